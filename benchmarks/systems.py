"""The systems that several benchmarks solve: cantilevers of random stiffness, as they are and with their nodes shuffled."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import scipy.sparse

from penstock.fem import Cantilever, LognormalMaterial, Material
from penstock.solvers import PreconditionerSpec, cg_workspace_nbytes, preconditioner_spec
from penstock.spmv import Array, CsrMatrix, Device, InputError, SparseMatrix, format_named
from penstock.spmv.formats.partition import cut_rows
from penstock.streaming import (
    Candidate,
    ColumnExtents,
    HostStore,
    LevelOrder,
    LinkRates,
    Ring,
    StreamedMatrix,
    StreamPlan,
    Workload,
    choose,
    index_of,
    level_order,
)

__all__ = ["FORMATS", "Reordered", "System"]

FORMATS = ("bsr", "sliced_bsr", "symmetric_bsr")


class System:
    """A cantilever: its load, its matrix in every format, and how that is cut.

    Parameters
    ----------
    name : str
    nodes : tuple of int
    device : Device
    dof : int
        Unknowns a node.
    material : Material, optional
    """

    def __init__(
        self, name: str, nodes: tuple[int, ...], device: Device, *, dof: int = 3, material: Material | None = None
    ) -> None:
        self.name, self.device = name, device
        self.beam = Cantilever(nodes=nodes, dof=dof, material=material or LognormalMaterial(sigma=0.5, seed=1))
        self.n, self.planes = self.beam.unknowns, nodes[0]
        self._made: dict[str, SparseMatrix] = {}
        self.budget = self.matrix("bsr").nbytes // 4

    def matrix(self, name: str) -> SparseMatrix:
        """Return the whole matrix, made once."""
        if name not in self._made:
            self._made[name] = self.make(name)
        return self._made[name]

    def make(self, name: str) -> SparseMatrix:
        """Make the whole matrix."""
        return self.beam.matrix(name)

    def load(self) -> Array:
        """Return the right-hand side."""
        return self.device.asarray(self.beam.load())

    def place(self) -> dict[str, Any]:
        """Return what :func:`smoothed_aggregation` needs to know of the nodes."""
        return {"coordinates": self.beam.mesh.coordinates(), "aggregates": self.beam.mesh.node_counts}

    def counts(self) -> tuple[int, ...]:
        """Return the cuts to try: of whole planes."""
        return tuple(count for count in range(8, 513) if self.planes % count == 0)

    def slabs(self, name: str, count: int) -> Iterator[SparseMatrix]:
        """Return the subdivisions."""
        return self.beam.subdivisions(count, name)

    def symbolic_slabs(self, name: str, count: int) -> Iterable[SparseMatrix]:
        """Return what is known of them without their entries."""
        return self.beam.symbolic_slabs(count, name)

    def reach(self, index: Any) -> int:
        """Return how many others a subdivision couples with."""
        return 1

    @contextmanager
    def streamed(self, plan: StreamPlan) -> Iterator[StreamedMatrix]:
        """Open the matrix by a plan."""
        store = HostStore.create(self.slabs(plan.index.format_name, len(plan.index.subdivisions)))
        with store, StreamedMatrix(store, self.budget, device=self.device, plan=plan) as A:
            yield A

    def candidates(
        self,
        spec: PreconditionerSpec,
        formats: Sequence[str],
        degrees: Sequence[int],
        counts: Sequence[int],
        columns: int = 1,
    ) -> Iterator[Candidate]:
        """Yield the matrix in every format and cut, for every number of consecutive products."""
        for name, count in itertools.product(formats, sorted({min(count, self.planes) for count in counts})):
            try:
                index = index_of(self.symbolic_slabs(name, count), (self.n, self.n))
            except InputError:  # too many entries for one slab
                continue
            reach = self.reach(index)
            for degree in degrees:
                chosen, iterations = spec.with_products(degree), spec.iterations(degree)
                held = chosen.workspace_nbytes(self.n, columns, streamed_to_gpu=True)
                workload = Workload(
                    columns,
                    degree=degree,
                    workspace_nbytes=columns * cg_workspace_nbytes(self.n) + held,
                    parts=chosen.parts(self.n, columns, streamed_to_gpu=True),
                    iterations=iterations,
                )
                yield Candidate(index, workload, reach)

    def plan(
        self,
        rates: LinkRates,
        formats: Sequence[str],
        degrees: Sequence[int],
        ring: Ring | None = None,
        *,
        counts: Sequence[int] | None = None,
    ) -> StreamPlan:
        """Choose format, cut and degree among those given; by default all cuts are tried."""
        spec = preconditioner_spec("chebyshev", block_size=self.beam.dof)
        return choose(self.candidates(spec, formats, degrees, counts or self.counts()), self.budget, ring, rates=rates)

    def plan_for(self, spec: PreconditionerSpec, rates: LinkRates, columns: int = 1) -> StreamPlan:
        """Choose format and cut for a preconditioner and so many right-hand sides."""
        counts, degrees = self.counts() or (self.planes,), spec.products_per_iteration(streamed=True)
        return choose(self.candidates(spec, FORMATS, degrees, counts, columns), self.budget, rates=rates)


class Reordered(System):
    """The same matrix with its nodes shuffled, and put in the order of levels, or left as it is."""

    def __init__(self, name: str, nodes: tuple[int, ...], device: Device, *, levels: bool = True) -> None:
        super().__init__(name, nodes, device)
        A = self.matrix("bsr")
        blocks = scipy.sparse.bsr_array((A.values, A.column_indices, A.row_offsets), shape=A.shape)
        self._made.clear()
        shuffle = LevelOrder(np.random.default_rng(0).permutation(self.n // 3), 3)
        blocks = shuffle.matrix(blocks)
        self.order, self._forward = shuffle, shuffle.forward
        if levels:
            self.order = level_order(blocks, 3)
            blocks = self.order.matrix(blocks)
            self._forward = lambda vectors: self.order.forward(shuffle.forward(vectors))
            self._couplings = ColumnExtents.of(blocks)
        self._csr = CsrMatrix.from_csr(blocks.tocsr(), check=False)

    def place(self) -> dict[str, Any]:
        """Return the near-null space, without which aggregates come from the graph."""
        return {"near_null_space": self._forward(np.ascontiguousarray(self.beam.rigid_body_modes()))}

    def make(self, name: str) -> SparseMatrix:
        """Make the whole matrix; before it is shuffled, the given one."""
        if not hasattr(self, "_csr"):
            return super().make(name)
        return format_named(name).from_csr(self._csr, block_size=3, check=False)

    def load(self) -> Array:
        """Return the right-hand side in the order of levels."""
        return self.device.asarray(self._forward(self.beam.load()))

    def counts(self) -> tuple[int, ...]:
        """Return the cuts to try: of any rows."""
        return tuple(range(8, 129, 4))

    def slabs(self, name: str, count: int) -> Iterator[SparseMatrix]:
        """Return the subdivisions, about equal."""
        whole = self.matrix(name)
        return (whole.rows(*part) for part in itertools.pairwise(cut_rows(whole, count)))

    def symbolic_slabs(self, name: str, count: int) -> Iterable[SparseMatrix]:
        """Return the subdivisions."""
        return self.slabs(name, count)

    def reach(self, index: Any) -> int:
        """Return how many others a subdivision couples with."""
        return self._couplings.reach(index.row_starts)
