"""What a coarse level hands to the solver."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.solvers.coarse.tentative import Tentative
from penstock.spmv import Array, Operator, ValidatedOperator
from penstock.spmv.compilation.cuda_graph import Replay


@dataclass
class CoarseLevel:
    """T, ``A = P^T A P``, and an inverse B, fixed and symmetric; the eigenvalues of ``B A`` are between 0 and 2."""

    T: Tentative
    A: Operator
    inverse: Operator

    def __post_init__(self) -> None:
        self._solves: dict[tuple[int, ...], tuple[Array, Array, Replay]] = {}

    def solve(self, r: Array) -> Array:
        """Return ``B r`` as a new vector or block; on a GPU its many small kernels are replayed as one CUDA graph."""
        capturable = isinstance(self.inverse, ValidatedOperator) and self.inverse.capturable
        if self.A.device.kind == "cpu" or not capturable:
            return self.inverse.apply(r)
        if r.shape not in self._solves:
            right, e = (self.A.device.xp.zeros(r.shape) for _ in range(2))
            replay = Replay(lambda: self.inverse.apply(right, e), capturable=True)
            self._solves = {r.shape: (right, e, replay)}  # those of one shape
        right, e, replay = self._solves[r.shape]
        right[...] = r
        replay()
        return e.copy()
