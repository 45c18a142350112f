"""Whether a solution computed with half of a matrix solves the caller's own system, and its correction where it does not.

A matrix that is symmetric to rounding may be stored by its upper half: what is solved then is ``A' x = b`` with
``A' = U + U^T - D``. The caller's A differs from it by entries of rounding, but times a large x that may exceed the tolerance.
The difference is bounded by the norm of ``A - A^T``; where the bound does not settle the claim, the residual is formed with the
caller's entries, and if it is too large the solve goes on with it as right-hand side (iterative refinement: Wilkinson 1963).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from penstock.solvers import SolveResult, StopReason
from penstock.spmv import Array, CsrMatrix, device_of

# Corrections of a solve, and the share of the tolerance that each aims at.
_MOST_CORRECTIONS, _AIM = 6, 0.3
# A reported residual may differ by this share from that of the caller's matrix.
_UNCERTAINTY = 0.01

#: ``correct(residuals, rtol)`` solves for corrections with the stored matrix, (n, k) each.
Correct = Callable[[Array, float], tuple[Array, list[SolveResult]]]


@dataclass(frozen=True)
class ExactMatrix:
    """A reference to the caller's matrix, where the stored one equals it but for rounding: ``difference`` bounds its norm."""

    A: CsrMatrix
    difference: float

    @classmethod
    def of(cls, A: CsrMatrix, difference: float) -> Self | None:
        """Return a reference to the caller's entries, or None if what is stored does not differ from them."""
        return cls(A, difference) if difference > 0 else None

    def settled(
        self, columns: list[SolveResult], b: Array, x: Array, rtol: float, atol: float, correct: Correct
    ) -> tuple[list[SolveResult], Array]:
        """Return results and solutions, (n, k), whose claims are about the caller's matrix, from those of the stored one."""
        xp = device_of(b).xp
        b_norms, x_norms = (_norms(xp, of) for of in (b, x))
        scales = np.where(b_norms > 0, b_norms, 1.0)
        tolerances = np.maximum(rtol * b_norms, atol) / scales
        bounds = self.difference * x_norms / scales
        reported = np.array([column.true_residual for column in columns])
        met = np.array([column.converged for column in columns])
        doubtful = (bounds > _UNCERTAINTY * reported) | (met & ~(reported + bounds <= tolerances))
        doubtful &= np.isfinite(reported)
        if not doubtful.any():
            return columns, x
        x, columns = x.copy(), list(columns)
        residuals = self._residuals(b, x)
        relative = _norms(xp, residuals) / scales
        halted: set[int] = set()
        for _ in range(_MOST_CORRECTIONS):
            [left] = np.nonzero(doubtful & met & (relative > tolerances))
            if not left.size:
                break
            aim = float(_AIM * (tolerances[left] / relative[left]).min())
            corrections, costs = correct(xp.ascontiguousarray(residuals[:, left]), aim)
            previous, before = x[:, left].copy(), relative.copy()
            x[:, left] += corrections
            residuals = self._residuals(b, x)
            relative = _norms(xp, residuals) / scales
            for place, column in enumerate(left):
                columns[column] = columns[column].continued(costs[place], float(before[column]))
                if costs[place].reason is StopReason.STOPPED:
                    met[column] = False
                    halted.add(int(column))
            worse = [place for place, column in enumerate(left) if not relative[column] < 0.5 * before[column]]
            for place in worse:  # the difference is too large for the stored matrix to correct it
                column = left[place]
                if not relative[column] < before[column]:
                    x[:, column], relative[column] = previous[:, place], before[column]
                met[column] = False
        for [column] in np.argwhere(doubtful):
            stopped = int(column) in halted
            columns[column] = _with_residual(
                columns[column], float(relative[column]), float(tolerances[column]), stopped=stopped
            )
        return columns, x

    def _residuals(self, b: Array, x: Array) -> Array:
        """Return ``B - A X`` with the caller's entries, where b lives."""
        home, device = device_of(b), self.A.device
        out = device.asarray(b if home == device else home.to_host(b), dtype=np.float64).copy()
        self.A.apply(
            device.asarray(x if home == device else home.to_host(x), dtype=np.float64), out, alpha=-1.0, beta=1.0
        )
        return out if home == device else home.asarray(device.to_host(out))


def _norms(xp: Any, block: Array) -> np.ndarray[Any, Any]:
    norms = xp.linalg.norm(block.astype(np.float64), axis=0)
    return np.asarray(norms.get() if hasattr(norms, "get") else norms)


def _with_residual(column: SolveResult, residual: float, tolerance: float, *, stopped: bool) -> SolveResult:
    """Return a result with the residual of the caller's matrix."""
    reason = column.reason
    if column.converged and not residual <= tolerance:
        reason = StopReason.STOPPED if stopped else StopReason.STAGNATED
    cost = {name: getattr(column, name) for name in ("sweeps", "bytes_streamed", "timings", "state", "decisions")}
    return SolveResult.of(column.x, reason, column.residual_norms, residual, column.rounding_floor, **cost)
