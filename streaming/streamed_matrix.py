"""An operator that streams a matrix larger than device memory from a store."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from penstock.spmv import (
    CPU,
    Array,
    Device,
    InputError,
    SparseMatrix,
    as_vectors,
)
from penstock.spmv.formats.limits import check_block_size
from penstock.spmv.formats.scaling import scale
from penstock.spmv.operator import as_output
from penstock.spmv.vectors.recurrence import Recurrence
from penstock.streaming.execution.budget import MemoryBudget
from penstock.streaming.execution.executor import ExecutorFactory, Structures, SweepKey
from penstock.streaming.execution.sweeper import Sweeper
from penstock.streaming.planning.estimate import LEAST_CAPTURED
from penstock.streaming.planning.ordering import reach_of
from penstock.streaming.planning.plan import StreamPlan, plan_stream
from penstock.streaming.planning.workload import Ring, Workload
from penstock.streaming.stores.as_store import as_store
from penstock.streaming.stores.base import Store
from penstock.streaming.stores.made_store import makes_on
from penstock.streaming.stores.planes import CompletedStore, JoinedStore
from penstock.streaming.swept_matrix import SweptMatrix
from penstock.streaming.wavefront import wavefront_visit

# Transfers and kernels of smaller subdivisions take a GPU less time than the host, which needs 0.1 to 0.25 ms to start them.
_SMALL_NBYTES = 8 << 20


class StreamedMatrix(SweptMatrix):
    """Multiply by a stored matrix that is streamed, subdivision by subdivision, through a memory budget.

    Parameters
    ----------
    store : Store, path, SciPy matrix or penstock format
        A GPU streams fastest from a :class:`HostStore`; data of a :class:`FileStore` pass through page-locked buffers, and
        those of a :class:`MadeStore` are made in the slots. The store stays open. A path is that of a :class:`FileStore`; a
        matrix is streamed from its arrays, cut to suit the budget.
    budget : MemoryBudget or int or str
        Memory for slots and the resident part.
    device : Device or str
        Where products are computed.
    workload : Workload, optional
        What is computed, for the plan.
    ring : Ring, optional
        How the ring of slots is run, for example ``Ring(overlap=False)``.
    plan : StreamPlan, optional
        A plan already made for this store, instead of workload and ring.
    stall_seconds : float
        With overlap, a read that lasts longer is an error. Without overlap, and while the matrix is opened, there is no limit.
    structures : list of dict, optional
        Of a plan with ``Ring(shared_structure=True)``: the offsets and column indices of every subdivision, by name, on the
        device.
    executor : callable, optional
        Returns the :class:`Executor` for an :class:`ExecutorSetup`; by default the one for the device.

    Raises
    ------
    BudgetError
        If neither the matrix nor two slots fit the budget, or the device has no room for them and the planned vectors.

    Notes
    -----
    A product is bit-equal to that of the resident matrix of the same format, for any budget, with or without overlap:
    every row is summed by the same kernel in the same order. (Formats that store half of a symmetric matrix add to rows in
    the order of the sweep, and on a GPU in the order of arrival, so their last digits vary.)

    The first sweep moves ``plan.streamed_nbytes`` bytes. If sweeps alternate, later ones move less: they reuse the
    subdivisions that the previous sweep left in the slots.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import HostStore, StreamedMatrix
    >>> beam = Cantilever(nodes=(17, 5, 5), dof=3)
    >>> with StreamedMatrix(HostStore.create(beam.subdivisions(8)), budget="400 KiB") as A:
    ...     bool((A @ beam.load() == beam.matrix() @ beam.load()).all())
    True
    """

    def __init__(
        self,
        store: Store | str | Path | Any,
        budget: MemoryBudget | int | str,
        *,
        device: Device | str = CPU,
        workload: Workload | None = None,
        ring: Ring | None = None,
        plan: StreamPlan | None = None,
        stall_seconds: float = 60.0,
        structures: Structures | None = None,
        executor: ExecutorFactory | None = None,
    ) -> None:
        self.device = Device.parse(device)
        self.budget = budget if isinstance(budget, MemoryBudget) else MemoryBudget(budget)
        self._opened = ExitStack()
        self.store = store = as_store(store, self.budget.limit_nbytes, self._opened)
        index = store.index
        if plan is not None and (workload is not None or ring is not None):
            raise InputError("workload and ring are decided by the plan; give one or the other")
        self._planned, self._warned = (plan or workload or ring) is not None, False
        if plan is None and makes_on(store, self.device):
            ring = replace(ring or Ring(), on_arrival=True, moved_share=store.moved_share)
        if plan is not None and plan.ring.on_arrival != makes_on(store, self.device):
            raise InputError(
                "the plan is for another kind of store: with Ring(on_arrival=True) it is for a MadeStore only"
            )
        if plan is not None and makes_on(store, self.device) and plan.ring.moves_nothing != (not store.moved_share):
            raise InputError(
                "the plan and the store differ in whether elements move over the link; see Ring(moved_share=)"
            )
        available = self.budget.limit_nbytes - self.budget.used_nbytes
        self.plan = plan or plan_stream(index, available, workload, ring)
        if not self.plan.index.same_layout(index):
            raise InputError("the plan was made for another cut of the matrix; plan again from store.index")
        _check_structures(structures, self.plan)
        self.shape = index.shape
        self.dtype = np.dtype(index.dtype)
        self._stall_seconds, self._executor = stall_seconds, executor
        self._structures = structures
        self._replayed: tuple[Array, Array] | None = None
        self._sweeper = self._sweeper_of(store)

    def _sweeper_of(self, store: Store) -> Sweeper:
        return Sweeper(
            store,
            self.plan,
            self.budget,
            self.device,
            stall_seconds=self._stall_seconds,
            executor=self._executor,
            structures=self._structures,
        )

    def reopen(self, store: Store) -> None:
        """Continue with the present values of a store: that of this matrix, refilled, or another one with the same structure.

        What the device holds is read anew. The plan, the direction of the next sweep and the counters go on.

        Raises
        ------
        InputError
            If the store is cut in another way.
        """
        if not self.plan.index.same_layout(store.index):
            raise InputError("the store is cut in another way than the one of this matrix; open a new StreamedMatrix")
        if store is self.store:
            self._sweeper.reload()
            return
        before = self._sweeper
        before.close()
        self.store, self._sweeper = store, self._sweeper_of(store)
        self._sweeper.go_on_from(before)

    def close(self) -> None:
        """Stop transfers and release the budget; a store of the caller stays open."""
        super().close()
        self._replayed = self._structures = None
        self._opened.close()

    def __reduce__(self) -> NoReturn:
        """Refuse pickling and copies."""
        raise InputError(
            "a streamed matrix holds device memory, open files and threads, so it can be neither pickled nor copied; make "
            "another one of its store where it is used"
        )

    def sweep(self, visit: Callable[[int, SparseMatrix], None]) -> None:
        """Visit all subdivisions once, in the direction of the sweep.

        Parameters
        ----------
        visit : callable
            ``visit(number, slab)`` computes with subdivision ``number``. The slab's memory is reused afterwards.

        Notes
        -----
        After an error or an interrupt the matrix can be swept again.
        """
        self._sweeper.sweep(lambda number, slab, stage: visit(number, slab))

    def visit_slabs(self, visit: Callable[[int, SparseMatrix], None]) -> None:
        """Call ``visit(first_row, slab)`` for all subdivisions, in one sweep."""
        self._sweeper.sweep(lambda number, slab, stage: visit(self._rows(number).start, slab))

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        self.apply_all((x, out, alpha, beta))

    def apply_all(self, *products: tuple[Array, Array, float, float]) -> None:
        """Compute ``out = alpha A @ x + beta out`` for each ``(x, out, alpha, beta)`` in one sweep."""
        self._multiply_all(products)

    def _multiply_all(self, products: Sequence[tuple[Array, Array, float, float]], *, rounded: bool = False) -> None:
        if self._is_half:
            for _, out, _, beta in products:
                scale(out, beta)

        def visit(number: int, slab: SparseMatrix, stage: int) -> None:
            for product in products:
                slab.apply_slab(self._rows(number).start, *product)

        key = None
        if self._replayed is not None and len(products) == 1:
            addresses = [int(vector.data.ptr) for vector in self._replayed]
            if addresses == [int(vector.data.ptr) for vector in products[0][:2]]:
                memory = (*self._replayed[0].shape, *addresses, *products[0][2:])
                key = SweepKey(memory, memory, filling=True)
        self._sweeper.sweep(visit, key=key, rounded=rounded)

    @property
    def _host_binds(self) -> bool:
        """Whether to start the transfers and kernels of a subdivision takes the host longer than a GPU to do them."""
        return self.device.kind == "cuda" and self.plan.slots > 0 and self.plan.slot_nbytes <= _SMALL_NBYTES

    def replayed_vectors(self, like: Array) -> tuple[Array, Array] | None:
        """Return vectors of a shape, the same ones in every call, between which a GPU replays products; None if it does not."""
        if not self._host_binds:
            return None
        if self._replayed is None or self._replayed[0].shape != like.shape:
            self._replayed = None  # before the new ones take memory
            self._replayed = self.device.xp.empty_like(like), self.device.xp.empty_like(like)
        return self._replayed

    @property
    def can_round(self) -> bool:
        """Whether fewer bytes move for a product with the matrix in float32: of two planes in the store, one or none."""
        return isinstance(self.store, JoinedStore | CompletedStore)

    def apply_rounded(self, x: Array, out: Array | None = None) -> Array:
        """Return the product with the matrix rounded to float32, or with the matrix where it is on the device already.

        Parameters
        ----------
        x : array, (n,) or (n, k)
        out : array of that shape, optional

        Returns
        -------
        array
            ``y`` with ``|y - A x| <= 2 ** -24 |A| |x|``, but for the rounding of the product. Half of the bytes of values move;
            none where the device holds these numbers, and then it is no sweep.
        """
        store = self.store
        if isinstance(store, CompletedStore):
            return store.rounded_matrix.apply(x, out)
        if not isinstance(store, JoinedStore):
            raise InputError(f"a {type(store).__name__} has no high words alone; use apply")
        x = as_vectors(x, self.shape[1], self, "x")
        out = as_output(out, (self.shape[0], *x.shape[1:]), self, x, "x")
        with self.device.current():
            self._multiply_all(((x, out, 1.0, 0.0),), rounded=True)
        return out

    def apply_each(self, X: Array, out: Array | None = None) -> Array:
        """Return the products with several vectors, or blocks of vectors, computed one after the other in a single sweep.

        Parameters
        ----------
        X : array, (repeats, columns) or (repeats, columns, k), C-ordered
            Each ``X[r]`` is contiguous, unlike the columns of a block of vectors, which a kernel reads together.
        out : array, (repeats, rows) or (repeats, rows, k), optional
            Must not overlap ``X``.

        Returns
        -------
        array
            ``out[r] = A @ X[r]``, each bit-equal to a separate product.

        Notes
        -----
        On a CUDA device, a call with the same ``X`` and ``out`` as the previous one replays its kernels as CUDA graphs, one
        for each subdivision: this costs the host far less time than starting them one by one.
        """
        if X.ndim not in (2, 3) or X.shape[1] != self.shape[1] or not X.shape[0]:
            raise InputError(
                f"X must have shape (repeats, {self.shape[1]}) or (repeats, {self.shape[1]}, k), not {X.shape}"
            )
        vectors = [as_vectors(x, self.shape[1], self, "X[r]") for x in X]
        out = as_output(out, (X.shape[0], self.shape[0], *X.shape[2:]), self, X, "X")
        if self._is_half:
            scale(out, 0.0)
        products = list(zip(vectors, out, strict=True))

        def visit(number: int, slab: SparseMatrix, stage: int) -> None:
            for x, product in products:
                slab.apply_slab(self._rows(number).start, x, product, 1.0, 0.0)

        key = None
        if self.device.kind == "cuda" and len(vectors) >= LEAST_CAPTURED:
            memory = (*vectors[0].shape, *(int(x.data.ptr) for x in vectors), int(out.data.ptr))
            key = SweepKey((), memory, "visit")
        self._sweeper.sweep(visit, key=key)
        return out

    @cached_property
    def reach(self) -> int:
        """Number of subdivisions to either side that the entries of one couple with.

        Where the plan does not know it, it is measured in an extra sweep that restores the direction afterwards: otherwise the
        order in which half of a symmetric matrix is summed would depend on when this property is first read.
        """
        if self.plan.reach is not None:
            return self.plan.reach
        starts = self.plan.index.row_starts
        columns, direction = [range(0)] * len(starts), self.direction

        def visit(number: int, slab: SparseMatrix) -> None:
            columns[number] = slab.column_range()

        self.sweep(visit)
        self.turn_to(direction)
        return reach_of(starts, columns)

    def powers_per_sweep(self) -> int:
        """Return how many consecutive powers one sweep can compute; with overlap, one slot receives the next subdivision."""
        if self.plan.slots <= (2 if self.plan.ring.overlap else 1):
            return 1  # whatever the reach, which takes a sweep to measure
        return replace(self.plan, reach=self.reach).room_for_powers

    def sweeps_of(self, products: int) -> int:
        """Return the sweeps of some consecutive products."""
        return -(-products // self.powers_per_sweep())

    def turn_back(self, products: int) -> None:
        """Let the next consecutive products sweep as this many of them did before: half of a matrix adds in the order of rows."""
        if self.alternates:
            self.turn_to(-self.direction if self.sweeps_of(products) % 2 else self.direction)

    @property
    def block_size(self) -> int:
        """Rows of the dense blocks that are stored; 1 without blocks."""
        return self.plan.index.block_size

    @property
    def row_bounds(self) -> tuple[int, ...]:
        """Rows at which subdivisions begin, and the number of rows: what lies between is advanced as a whole."""
        return self.plan.index.row_bounds

    def preferred_degree(self) -> int | None:
        """Return the planned polynomial degree, or else the powers of one sweep; None if nothing is streamed."""
        if not self.plan.slots:
            return None
        degree = self.plan.workload.degree
        return degree if degree > 1 else self.powers_per_sweep()

    def keeps_together(self, rows: int) -> bool:
        """Return whether all subdivisions begin at multiples of ``rows``."""
        return all(start % rows == 0 for start in self.plan.index.row_starts)

    def advance(self, recurrence: Recurrence, *, powers: int | None = None) -> None:
        """Perform all steps of a recurrence, several in each sweep: ``powers``, or as many as the ring allows.

        While a subdivision is transferred, the first product runs on the one before it, the second on the one before that:
        a product needs the previous product only on the subdivisions that its own couples with. A ring of m slots thus
        computes m - 1 products with a banded matrix in one sweep, m without overlap. Rows are bit-equal to those of separate
        products; for half of a symmetric matrix they agree to rounding.
        """
        total, most = len(recurrence.steps), self.powers_per_sweep()
        powers = most if powers is None else min(powers, most)
        if powers == 1:
            self._warn_of_sweeps(total)
            recurrence.run_whole(self, range(total))
            return
        on_gpu = self.device.kind == "cuda"
        memory = recurrence.capture_key() if on_gpu and recurrence.repeats else None
        for first in range(0, total, powers):
            visit = wavefront_visit(
                self.plan.index, recurrence, first, half=self._is_half, reach=self.reach, direction=self.direction
            )
            key = SweepKey(recurrence.kernels(), None if memory is None else (*memory, first)) if on_gpu else None
            self._sweeper.sweep(visit, min(powers, total - first), self.reach, key)

    def _warn_of_sweeps(self, products: int) -> None:
        """Warn once of a polynomial for which the plan was not made: its products could share sweeps."""
        if products > 1 and self.plan.slots and not self._planned and not self._warned:
            self._warned = True
            warnings.warn(
                f"a polynomial of {products} products sweeps {products} times over this matrix, which was opened for single "
                f"products; open it with workload=Workload(degree={products})",
                stacklevel=2,
            )

    def apply_absolute(self, x: Array) -> Array:
        """Return ``|A| @ x`` in one sweep; needs one further slab of memory."""
        x = as_vectors(x, self.shape[1], self, "x")
        if x.ndim != 1:
            raise InputError(f"x must have shape ({self.shape[1]},), not {x.shape}: only one vector at a time")
        out = self.device.xp.zeros(self.shape[0], dtype=self.dtype)
        self.visit_slabs(lambda first_row, slab: slab.add_absolute(first_row, x, out))
        return out

    def diagonal_blocks(self, size: int) -> Array:
        """Return the dense blocks on the diagonal, ``(rows / size, size, size)``, in one sweep."""
        count = check_block_size(size, self.shape[0])
        blocks = self.device.xp.zeros((count, size, size), dtype=self.dtype)
        self.visit_slabs(lambda first_row, slab: slab.add_diagonal_blocks(first_row, blocks))
        return blocks


def _check_structures(structures: Structures | None, plan: StreamPlan) -> None:
    """Refuse offsets and column indices that a plan has no use for, or that are not those of its subdivisions."""
    if (structures is not None) != plan.shared_structure:
        raise InputError("give structures= exactly if the plan was made with Ring(shared_structure=True)")
    if structures is None:
        return
    wanted = [
        {field.name: (field.shape, field.dtype) for field in subdivision.fields if field.part == "structure"}
        for subdivision in plan.index.subdivisions
    ]
    if wanted != [{name: (array.shape, str(array.dtype)) for name, array in of.items()} for of in structures]:
        raise InputError("structures= are not the offsets and column indices of the subdivisions of this matrix")
