"""The inverse of a prepared matrix as an operator."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from penstock.spmv import Array, Device, ValidatedOperator


class Solves(Protocol):
    """A prepared system, as far as its inverse needs it."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""

    @property
    def device(self) -> Device:
        """Where it solves."""

    def solve(self, b: Any, *, rtol: float, on_failure: Any) -> Any:
        """Return the result for a right-hand side."""


class Inverse(ValidatedOperator):
    """``x = A^-1 b`` as an operator, for solvers that need it, such as SciPy's ``eigsh(..., OPinv=...)``.

    Its products raise a NotConvergedError if a solve, to the tolerance ``rtol``, does not converge.
    """

    dtype: np.dtype[np.generic] = np.dtype(np.float64)

    def __init__(self, system: Solves, rtol: float) -> None:
        self.shape, self.device = system.shape, system.device
        self._system, self.rtol = system, rtol

    def to(self, rtol: float) -> Inverse:
        """Return the operator with another tolerance."""
        return Inverse(self._system, rtol)

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        solution = self._system.solve(x, rtol=self.rtol, on_failure="raise").x
        out[...] = alpha * solution if beta == 0.0 else alpha * solution + beta * out
