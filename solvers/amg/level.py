"""The level below a matrix: what coarsening makes, and what a coarse level hands to the solver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.solvers.amg.group_factors import GroupFactors
from penstock.solvers.amg.group_inverses import GroupInverses
from penstock.solvers.amg.line_factors import LineFactors
from penstock.solvers.amg.tentative import Tentative
from penstock.solvers.preconditioners import DiagonalBlocks
from penstock.spmv import Array, BsrMatrix, CsrMatrix, Operator
from penstock.spmv.compilation.cuda_graph import Replay
from penstock.spmv.operator import is_capturable

#: Whether nodes are grouped: not, as lines across flat elements if there are any, or also otherwise.
Grouped = bool | Literal["lines"]
#: D of nodes that are smoothed together, which stay in rows that are advanced together.
RowFactors = GroupFactors | LineFactors


@dataclass
class CoarseLevel:
    """The level below a matrix, as :func:`coarsen` makes it; see :attr:`near_null_space`.

    For :meth:`solve` its user sets an inverse B, symmetric and fixed, or nearly so, as inner iterations are; the eigenvalues of
    ``B A`` are between 0 and 2.
    """

    finer: Operator
    diagonal: DiagonalBlocks  # D, the inverse of the diagonal blocks of the finer matrix
    high: float  # bounds the eigenvalues of D times that matrix
    T: Tentative
    A: BsrMatrix  # ``P^T A P``, with a positive diagonal also where columns of T, or their images, vanish
    vanishing: Array  # where that diagonal was replaced: bool, (unknowns,)
    scale: float  # about the largest diagonal entry of the finer matrix in rows that take part in the coarse level
    transfers: tuple[CsrMatrix, ...] = ()  # P and its transpose, if they are stored
    # D of groups or lines of nodes, in place of ``diagonal``; ``high`` is for it then.
    groups: GroupInverses | RowFactors | None = None
    known: int | None = None  # columns of T, the first ones, that stand for the near-null space; None: all
    finer_in_float32: BsrMatrix | None = None  # the finer matrix in float32, if it is a coarse one
    jumps: bool = False  # whether aggregates follow strong couplings, because the stiffness jumps
    inverse: Operator = field(init=False, repr=False)

    @property
    def near_null_space(self) -> Array:
        """That of the coarse matrix."""
        return self.T.candidates[:, : self.known]

    def __post_init__(self) -> None:
        self._solves: dict[tuple[int, ...], tuple[Array, Array, Replay]] = {}

    def energy_product(self, vectors: Array) -> Array:
        """Return ``P^T A P`` times coarse vectors, as a new array; A has other diagonal entries where those of that are rounding.

        Such rows count as zero: where a diagonal entry of a positive semidefinite matrix vanishes, its row does.
        """
        products = self.A.apply(vectors)
        products[self.vanishing] = 0.0
        return products

    def solve(self, r: Array) -> Array:
        """Return ``B r`` as a new vector or block; on a GPU its many small kernels are replayed as one CUDA graph."""
        if self.A.device.kind == "cpu" or not is_capturable(self.inverse):
            return self.inverse.apply(r)
        if r.shape not in self._solves:
            right, e = (self.A.device.xp.zeros(r.shape) for _ in range(2))
            apply = self.inverse.apply  # not of self, whose memory would then wait for the garbage collector
            replay = Replay(lambda: apply(right, e), capturable=True)
            self._solves = {r.shape: (right, e, replay)}  # those of one shape
        right, e, replay = self._solves[r.shape]
        right[...] = r
        replay()
        return e.copy()
