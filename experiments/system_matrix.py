"""The matrix of a system in files, opened where it computes: in the format that suits it, streamed if it must be."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.experiments.matrix_files import read_matrix
from penstock.experiments.preconditioning import PreconditionerKind, Preconditioning, Products
from penstock.experiments.progress import Reporter
from penstock.experiments.rates import WORTH_MEASURING_NBYTES, machine_rates
from penstock.experiments.results import ResultsFolder
from penstock.experiments.system_files import check_matrix, check_square, matrix_name
from penstock.solvers import block_cg_workspace_nbytes, cg_workspace_nbytes
from penstock.solvers.solve_many import LARGEST_RESIDENT_BLOCK
from penstock.spmv import (
    CPU,
    BudgetError,
    CsrMatrix,
    Device,
    InputError,
    Operator,
    SparseFormat,
    format_named,
    format_nbytes,
    suggest_format,
)
from penstock.spmv.block_vectors import LARGEST_BLOCK
from penstock.spmv.formats.base import INT32_MAX
from penstock.spmv.formats.from_csr import LARGEST_BLOCK as LARGEST_DENSE_BLOCK
from penstock.spmv.structure import MatrixStructure
from penstock.streaming import (
    Couplings,
    FileStore,
    HostStore,
    LevelOrder,
    LinkRates,
    MatrixIndex,
    MemoryBudget,
    Store,
    StreamedMatrix,
    StreamPlan,
    index_of,
    level_order,
    plan_stream,
    plan_subdivisions,
    reach_of_store,
)
from penstock.streaming.budget import check_room

__all__ = ["OpenSystem", "SystemOpener"]

# Blocks of which more than this share is stored are worth a format of their own, as suggest_format has it; those of the
# unknowns of a node, which a preconditioner inverts, are stored almost whole.
_WORTHWHILE, _DENSE = 0.5, 0.75
# Of a GPU's free memory, what the matrix and the vectors leave to others.
_LEFT_FREE = 0.1
# A piece of a matrix is padded to pages, its structure and its values each.
_PADDING_NBYTES = 8192
# Another order of the rows must be worth its while.
_BETTER = 0.9
_COUPLED = "every subdivision couples with too many others for products that share a sweep"


@dataclass(frozen=True)
class OpenSystem:
    """A matrix that is ready to be applied, and what was decided on the way.

    Parameters
    ----------
    A : Operator
    plan : StreamPlan
    nonzeros : int
    preconditioning : Preconditioning
    together : int
        Right-hand sides that are solved together.
    solver_nbytes : int
        Of their vectors, those of the preconditioner apart.
    order : LevelOrder or None
        The order of the rows of A, if it is not that of the file.
    """

    A: Operator
    plan: StreamPlan
    nonzeros: int
    preconditioning: Preconditioning
    together: int
    solver_nbytes: int
    order: LevelOrder | None = None


@dataclass
class SystemOpener:
    """Opens one matrix.

    Parameters
    ----------
    source : str
        What :func:`read_matrix` takes, or the folder of a :class:`FileStore`.
    columns : int
        Right-hand sides.
    rows : int or None
        Rows of the right-hand sides, if they were given.
    preconditioner : PreconditionerKind or "auto"
        ``auto`` is ``block_jacobi`` for a matrix of dense blocks, else ``jacobi``.
    products : int or "auto"
        Of a Chebyshev polynomial.
    device : Device
    memory : int or None
        For matrix storage; by default all of a CPU's, or what is free on a GPU.
    folder : ResultsFolder
        A CPU streams from a store that is made there.
    reporter : Reporter
    resources : ExitStack
        Closes what is opened.
    facts : list of str
        What a user should know besides the plan; more are added.
    """

    source: str
    columns: int
    rows: int | None
    preconditioner: PreconditionerKind | Literal["auto"]
    products: Products
    device: Device
    memory: int | None
    folder: ResultsFolder
    reporter: Reporter
    resources: contextlib.ExitStack
    facts: list[str] = field(default_factory=list)

    def open(self) -> OpenSystem:
        """Read, plan, convert, and say so.

        Raises
        ------
        PenstockError
            If the matrix cannot be read, is none for conjugate gradients, or does not fit.
        """
        self.name = matrix_name(self.source)
        return self._open_store() if Path(self.source).is_dir() else self._open_file()

    def _open_store(self) -> OpenSystem:
        """Open a store where it lies; a GPU streams from a copy in host memory if that has room."""
        store = self.resources.enter_context(FileStore(Path(self.source)))
        index = store.index
        self._decide(index.shape, index.dtype, _block_size_of(index), LARGEST_BLOCK)
        room = self._room()
        streamed = room is not None and room < index.nbytes
        rates, reach = (self._rates(index.nbytes, Path(self.source)) if streamed else None), 1
        if streamed and self.preconditioning.kind == "chebyshev":
            with self.reporter.stage("survey"):
                reach = reach_of_store(store)
            if 2 * reach >= len(index.subdivisions):
                self._note("order", _COUPLED)
        plan = self.preconditioning.planned(
            lambda products: plan_stream(
                index,
                index.nbytes if room is None else room,
                rates=rates,
                products=products,
                reach=reach,
                **self._load(),
            )
        )
        self._note("symmetry", "not checked: a store is not held as a whole; it is taken to be symmetric")
        self._announce(plan)
        with self.reporter.stage("open"):
            source: Store = store
            if self.device.kind == "cuda" and plan.slots and index.nbytes < CPU.free_nbytes() // 2:
                source = self.resources.enter_context(HostStore.from_store(store))
            return self._opened(self._streamed(source, plan), plan, index.nnz)

    def _open_file(self) -> OpenSystem:
        """Read a matrix, and keep it in the format that suits it, or stream it in the smallest one if it is too large."""
        with self.reporter.stage("read") as stage:
            named = read_matrix(self.source)
            matrix, known = CsrMatrix.from_csr(named.matrix), named.block_size
            del named
            symmetry = check_matrix(matrix, self.name)
            structure = MatrixStructure.of(matrix, check=False)
            stage.advance(1.0)
        how = "exact" if symmetry.exact else f"to rounding: mirror images differ by {symmetry.largest:.2g} at most"
        self._note("symmetry", how)
        fills = {
            size: fill for size in range(2, LARGEST_DENSE_BLOCK + 1) if (fill := structure.fill(size)) > _WORTHWHILE
        }
        dense = [size for size, fill in fills.items() if fill > _DENSE]
        block_size = known if known and known > 1 else max(dense, key=lambda size: (fills[size], size), default=None)
        self._decide(matrix.shape, matrix.dtype, block_size, LARGEST_RESIDENT_BLOCK)
        room, nonzeros = self._room(), matrix.nnz
        ranking = suggest_format(matrix, device=self.device, columns=self.together, symmetric=symmetry.exact)
        best = next((one for one in ranking if room is None or one.nbytes + _PADDING_NBYTES <= room), None)
        if best is not None:
            with self.reporter.stage("convert"):
                resident = best.build(matrix)
                del matrix, structure
                index = _index_for(resident, 1 + nonzeros // INT32_MAX)
            memory = max(self.memory or 0, index.nbytes)
            plan = self.preconditioning.planned(
                lambda products: plan_stream(index, memory, products=products, **self._load())
            )
            self._announce(plan)
            return self._opened(resident.to_device(self.device), plan, nonzeros)
        self._decide(matrix.shape, matrix.dtype, block_size, LARGEST_BLOCK)
        room = self._room()
        assert room is not None, "without a limit every format fits"
        name, parameters = _smallest_format(structure, symmetric=symmetry.exact, sizes=list(fills))
        with self.reporter.stage("convert"):
            whole, plan, order = self._best_order(matrix, name, parameters, room)
            del matrix, structure
        self._announce(plan)
        count = len(plan.index.subdivisions)
        store: Store
        if self.device.kind == "cuda":
            store = self.resources.enter_context(HostStore.from_matrix(whole, count))
        else:
            store = self.resources.enter_context(self._written(whole, plan))
        return self._opened(self._streamed(store, plan), plan, nonzeros, order)

    def _best_order(
        self, matrix: CsrMatrix, name: str, parameters: dict[str, Any], room: int
    ) -> tuple[SparseFormat, StreamPlan, LevelOrder | None]:
        """Convert and plan; where another order of the rows lets more products share a sweep, in that order."""
        size = parameters.get("block_size", 1)

        def convert(of: CsrMatrix) -> SparseFormat:
            return format_named(name).from_csr(of, **parameters)

        def planned(whole: SparseFormat, couplings: Couplings) -> StreamPlan:
            index_for = functools.cache(lambda count: _index_for(whole, count))
            return self.preconditioning.planned(
                lambda products: plan_subdivisions(
                    index_for,
                    room,
                    limit=-(-whole.shape[0] // whole.row_granularity),
                    rates=rates,
                    products=products,
                    reach_for=lambda index: couplings.reach(index.row_starts),
                    **self._load(),
                )
            )

        whole = convert(matrix)
        rates = self._rates(whole.nbytes, self.folder.path)
        plan = planned(whole, Couplings.of(matrix.to_csr(), size))
        if self.preconditioning.kind != "chebyshev" or plan.products_a_sweep == plan.products:
            return whole, plan, None
        given = matrix.to_csr()
        order = level_order(given, math.lcm(size, self.preconditioning.block_size))
        reordered = order.matrix(given)
        ordered = convert(CsrMatrix.from_csr(reordered, check=False))
        other = planned(ordered, Couplings.of(reordered, size))
        more = other.products_a_sweep > plan.products_a_sweep
        if more and other.compared_seconds() < _BETTER * plan.compared_seconds():
            text = f"by levels (reverse Cuthill-McKee): a sweep makes {other.products_a_sweep} products"
            self._note("order", f"{text}, in the order of the file {plan.products_a_sweep}")
            return ordered, other, order
        if 2 * other.reach >= len(other.index.subdivisions):
            self._note("order", _COUPLED)
        return whole, plan, None

    def _decide(self, shape: tuple[int, int], dtype: Any, block_size: int | None, most: int) -> None:
        """Choose the preconditioner and how many right-hand sides, ``most`` at most, are solved together; count the vectors."""
        check_square(shape, self.name)
        n = shape[0]
        if self.rows is not None and self.rows != n:
            raise InputError(
                f"B has {self.rows} rows, but {self.name} is {n} x {n}; give right-hand sides of {n} entries"
            )
        self.together, self.solver_nbytes = 1, cg_workspace_nbytes(n, dtype)
        if self.columns > 1:
            each = block_cg_workspace_nbytes(n, 1, dtype)
            fit = max(1, self.device.free_nbytes() // 2 // each)  # the other half is the matrix's
            blocks = -(-self.columns // min(self.columns, most, fit))
            self.together = -(-self.columns // blocks)
            self.solver_nbytes = self.together * each
        kind = self.preconditioner
        if kind == "auto":
            kind = "jacobi" if block_size is None else "block_jacobi"
        if kind == "block_jacobi" and block_size is None:
            raise InputError("the matrix does not consist of dense blocks; choose --precond jacobi or chebyshev")
        self.preconditioning = Preconditioning(kind, block_size or 1, self.products)
        on_gpu = self.device.kind == "cuda"  # where it may turn out to be streamed
        held: int = self.preconditioning.vectors(self.together, recorded=on_gpu) * n * np.dtype(dtype).itemsize
        self._vectors_nbytes = self.solver_nbytes + held

    def _load(self) -> dict[str, Any]:
        """Return what a plan must know of the solver."""
        return {"columns": self.together, "workspace_nbytes": self._vectors_nbytes}

    def _room(self) -> int | None:
        """Return the bytes that matrix storage may take; None if there is no limit."""
        if self.memory is not None or self.device.kind == "cpu":
            return self.memory
        room: int = int((1 - _LEFT_FREE) * self.device.free_nbytes()) - self._vectors_nbytes
        if room <= 0:
            raise BudgetError(
                f"the vectors need {format_nbytes(self._vectors_nbytes)}, which leaves nothing of the free memory of "
                f"{self.device} to the matrix; free memory, or use --device cpu"
            )
        return room

    def _rates(self, nbytes: int, disk: Path) -> LinkRates | None:
        return machine_rates(self.device, disk) if nbytes >= WORTH_MEASURING_NBYTES else None

    def _note(self, title: str, text: str) -> None:
        self.facts.append(f"{title:<11} {text}")

    def _announce(self, plan: StreamPlan) -> None:
        """Show the plan, write it down, and refuse one for which the device has no room."""
        together = f"blocks of {self.together} right-hand sides" if self.columns > 1 else "one right-hand side"
        self._note("solver", f"conjugate gradients for {together}, preconditioner {self.preconditioning.kind}")
        self.folder.write_plan("\n".join([plan.explain(), *self.facts]), self.reporter)
        check_room(self.device, plan.storage_nbytes + plan.workspace_nbytes, "matrix storage and vectors")

    def _streamed(self, store: Store, plan: StreamPlan) -> StreamedMatrix:
        budget = MemoryBudget(plan.budget_nbytes)
        return self.resources.enter_context(StreamedMatrix(store, budget, device=self.device, plan=plan))

    def _written(self, whole: SparseFormat, plan: StreamPlan) -> FileStore:
        """Write a matrix to disk, in the results folder, for a CPU to stream from."""
        total, count = plan.index.nbytes, len(plan.index.subdivisions)
        with self.reporter.stage("write") as stage:
            return FileStore.create(
                self.folder.matrix,
                _slabs(whole, count),
                shape=whole.shape,
                label=self.name,
                progress=lambda written: stage.advance(written / total, f"{format_nbytes(written)} written"),
            )

    def _opened(self, A: Operator, plan: StreamPlan, nonzeros: int, order: LevelOrder | None = None) -> OpenSystem:
        return OpenSystem(A, plan, nonzeros, self.preconditioning, self.together, self.solver_nbytes, order)


def _block_size_of(index: MatrixIndex) -> int | None:
    """Return the size of the dense blocks that a stored matrix consists of, if it does."""
    size = index.parameters.get("block_size", 1)
    if index.format_name == "bsr":
        values = next(entry for entry in index.subdivisions[0].fields if entry.name == "values")
        size = values.shape[-1]
    return size if size > 1 else None


def _smallest_format(structure: MatrixStructure, *, symmetric: bool, sizes: list[int]) -> tuple[str, dict[str, Any]]:
    """Return the format, and what to call ``from_csr`` with, that moves the fewest bytes a sweep."""
    candidates: list[tuple[str, dict[str, Any]]] = [("csr", {})]
    for size in sizes:
        candidates += [(name, {"block_size": size}) for name in ("bsr", "sliced_bsr")]
    if symmetric:
        candidates += [("symmetric_bsr", {"block_size": size}) for size in sizes or [1]]
    return min(candidates, key=lambda one: format_named(one[0]).predicted_nbytes(structure, **one[1]))


def _slabs(whole: SparseFormat, count: int) -> Iterator[SparseFormat]:
    for start, stop in itertools.pairwise(whole.cut(count)):
        yield whole.rows(start, stop)


def _index_for(whole: SparseFormat, count: int) -> MatrixIndex:
    return index_of(_slabs(whole, count), whole.shape)
