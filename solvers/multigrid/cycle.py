"""V- and W-cycles over levels that are stored, on the host or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.solvers.multigrid.levels import Cycle, Level, Smoother, levels_of_pyamg
from penstock.spmv import Array, Device, Operator, ValidatedOperator, VectorSpace
from penstock.spmv.operator import unchecked_product


class Multigrid(ValidatedOperator):
    """A symmetric multigrid cycle as a preconditioner; made by :func:`multigrid` or :meth:`Multigrid.from_pyamg`.

    Parameters
    ----------
    levels : sequence of Level
        The finest first.
    inverse : Operator
        Of the matrix of the coarsest level.
    cycle : {"V", "W"}
        How often a level is visited on the way: once, or twice.

    Attributes
    ----------
    operator_complexity : float
        Stored entries of all matrices but the coarsest, in those of the finest.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import multigrid
    >>> M = multigrid(Cantilever(nodes=10, dof=1).matrix())
    >>> M.shape, len(M.levels)
    ((1000, 1000), 1)
    """

    def __init__(self, levels: Sequence[Level], inverse: Operator, cycle: Cycle = "V") -> None:
        self.levels, self.inverse, self.cycle = list(levels), inverse, cycle
        finest = self.levels[0].A if self.levels else inverse
        self.shape, self.dtype, self.device = finest.shape, np.dtype(np.float64), finest.device

    @property
    def capturable(self) -> bool:
        """Whether a cycle only launches kernels, so that :func:`cg` replays it in a CUDA graph."""
        operators = [self.inverse, *(level.smoother for level in self.levels)]
        return all(isinstance(one, ValidatedOperator) and one.capturable for one in operators)

    @property
    def operator_complexity(self) -> float:
        """Stored entries of all matrices but the coarsest, in those of the finest."""
        entries = [int(level.A.values.size) for level in self.levels]
        return sum(entries) / entries[0] if entries else 1.0

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        if alpha == 1.0 and beta == 0.0:
            self._solve(0, x, out)
            return
        solved = self.device.xp.empty_like(x)
        self._solve(0, x, solved)
        VectorSpace(self.device).write(alpha, solved, beta, out)

    def _solve(self, number: int, r: Array, z: Array) -> None:
        """Set z to the result of a cycle for ``A z = r`` from zero."""
        if number == len(self.levels):
            unchecked_product(self.inverse)(r, z, 1.0, 0.0)
            return
        level = self.levels[number]
        work, smooth, product = level.lend(r), unchecked_product(level.smoother), unchecked_product(level.A)
        residual, right, solved = work["residual"], work["right"], work["solved"]
        smooth(r, z, 1.0, 0.0)
        residual[...] = r
        product(z, residual, -1.0, 1.0)
        unchecked_product(level.R)(residual, right, 1.0, 0.0)
        self._solve(number + 1, right, solved)
        if self.cycle == "W" and number + 1 < len(self.levels):
            again, more = work["again"], work["more"]
            again[...] = right
            unchecked_product(self.levels[number + 1].A)(solved, again, -1.0, 1.0)
            self._solve(number + 1, again, more)
            solved += more
        unchecked_product(level.P)(solved, z, 1.0, 1.0)
        residual[...] = r
        product(z, residual, -1.0, 1.0)
        smooth(residual, work["correction"], 1.0, 0.0)
        z += work["correction"]

    @classmethod
    def from_pyamg(
        cls, hierarchy: Any, *, smoother: Smoother = "chebyshev", cycle: Cycle = "V", device: Device | str = "cpu"
    ) -> Multigrid:
        """Return a cycle over the levels of a hierarchy of ``pyamg``, which then runs on a GPU.

        Parameters
        ----------
        hierarchy : pyamg.MultilevelSolver
            Of a symmetric positive definite matrix, with ``R = P'``.
        smoother, cycle
            As for :func:`multigrid`, here V-cycles by default; those of the hierarchy are not used.
        device : Device or str
        """
        return cls(*levels_of_pyamg(hierarchy, smoother, cycle, device), cycle)
