"""Whether a solution solves the caller's own system, and its correction where it does not.

In float64 a residual is known up to rounding, which may exceed the tolerance where x is large and rows are long. On the host
such residuals are computed anew with twice the digits.

A matrix that is symmetric to rounding may be stored by its upper half: what is solved then is ``A' x = b`` with
``A' = U + U^T - D``. The caller's A differs from it by entries of rounding, but times a large x that may exceed the tolerance.
The difference is bounded by the norm of ``A - A^T``; where the bound does not settle the claim, the residual is formed with the
caller's entries, and if it is too large the solve goes on with it as right-hand side (iterative refinement: Wilkinson 1963).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from penstock.solvers import SolveResult, StopReason
from penstock.spmv import Array, BsrMatrix, CsrMatrix, SparseMatrix, device_of
from penstock.spmv.products.accurate_residual import accurate_residual

# Corrections of a solve, and the share of the tolerance that each aims at.
_MOST_CORRECTIONS, _AIM = 6, 0.3
# A reported residual may differ by this share from that of the caller's matrix.
_UNCERTAINTY = 0.01
# A residual within this factor of the rounding of one product is at its floor.
_FLOOR_FACTOR = 100
_UNIT = float(np.finfo(np.float64).eps) / 2

#: ``correct(residuals, rtol)`` solves for corrections with the stored matrix, (n, k) each.
Correct = Callable[[Array, float], tuple[Array, list[SolveResult]]]


@dataclass(frozen=True)
class ExactMatrix:
    """A reference to the matrix that claims are about; ``difference`` bounds the norm of what the stored one differs by."""

    A: SparseMatrix
    difference: float = 0.0

    @classmethod
    def of(cls, A: CsrMatrix, difference: float) -> Self | None:
        """Return a reference to the caller's entries, or None if what is stored does not differ from them."""
        return cls(A, difference) if difference > 0 else None

    def settled(
        self, columns: list[SolveResult], b: Array, x: Array, rtol: float, atol: float, correct: Correct
    ) -> tuple[list[SolveResult], Array]:
        """Return results and solutions, (n, k), whose claims are about the caller's matrix, from those of the stored one."""
        xp = device_of(b).xp
        scales, tolerances, reported, met = _claims(columns, b, rtol, atol)
        bounds = self.difference * _norms(xp, x) / scales
        floors, roundings = _roundings(self.A, x, met)
        within = reported + bounds + roundings / scales <= tolerances
        doubtful = (bounds > _UNCERTAINTY * reported) | (met & ~within)
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
            at_floor = relative[column] * scales[column] <= _FLOOR_FACTOR * floors[column]
            unmet = StopReason.ROUNDING_FLOOR if at_floor else StopReason.STAGNATED
            columns[column] = _with_residual(
                columns[column],
                float(relative[column]),
                float(tolerances[column]),
                StopReason.STOPPED if stopped else unmet,
            )
        return columns, x

    def _residuals(self, b: Array, x: Array) -> Array:
        """Return ``B - A X`` with the caller's entries, where b lives; on the host with twice the digits."""
        home, device = device_of(b), self.A.device
        if device.kind == "cpu":
            A = self.A if isinstance(self.A, CsrMatrix) else CsrMatrix.from_csr(self.A.to_csr(), check=False)
            return home.asarray(accurate_residual(A, home.to_host(x), home.to_host(b)))
        out = device.asarray(b if home == device else home.to_host(b), dtype=np.float64).copy()
        self.A.apply(
            device.asarray(x if home == device else home.to_host(x), dtype=np.float64), out, alpha=-1.0, beta=1.0
        )
        return out if home == device else home.asarray(device.to_host(out))


def doubted(
    A: SparseMatrix, columns: list[SolveResult], b: Array, x: Array, rtol: float, atol: float
) -> ExactMatrix | None:
    """Return a reference to a matrix in the host's memory if a result claims more than float64 can tell; a product a column."""
    if not any(column.converged for column in columns):
        return None
    scales, tolerances, reported, met = _claims(columns, b, rtol, atol)
    within = reported + _roundings(A, x, met)[1] / scales <= tolerances
    return None if within[met].all() else ExactMatrix(A)


def _claims(columns: list[SolveResult], b: Array, rtol: float, atol: float) -> tuple[np.ndarray[Any, Any], ...]:
    """Return the norms of right-hand sides, or 1; relative to them tolerances and residuals; and which meet theirs."""
    norms = _norms(device_of(b).xp, b)
    scales = np.where(norms > 0, norms, 1.0)
    reported = np.array([column.true_residual for column in columns])
    return scales, np.maximum(rtol * norms, atol) / scales, reported, np.array([column.converged for column in columns])


def _roundings(A: SparseMatrix, x: Array, met: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return of the columns that have ``met`` their tolerance about the rounding of ``A x``: of a term, and of a long sum.

    It is 0 for others, and on a GPU. One product for each column.
    """
    floors = np.zeros(x.shape[1])
    if A.device.kind != "cpu" or device_of(x).kind != "cpu":
        return floors, floors
    longest = A.nnz / max(1, A.shape[0])
    if isinstance(A, (BsrMatrix, CsrMatrix)):
        longest = A.row_granularity * int(np.diff(A.row_offsets).max(initial=0))
    for column in np.flatnonzero(met):
        floors[column] = _UNIT * np.linalg.norm(A.apply_absolute(abs(x[:, column]).astype(A.dtype)))
    return floors, math.sqrt(longest) * floors


def _norms(xp: Any, block: Array) -> np.ndarray[Any, Any]:
    norms = xp.linalg.norm(block.astype(np.float64), axis=0)
    return np.asarray(norms.get() if hasattr(norms, "get") else norms)


def _with_residual(column: SolveResult, residual: float, tolerance: float, unmet: StopReason) -> SolveResult:
    """Return a result with the residual of the caller's matrix, and with another reason if that does not meet the tolerance."""
    reason = unmet if column.converged and not residual <= tolerance else column.reason
    cost = {name: getattr(column, name) for name in ("sweeps", "bytes_streamed", "timings", "state", "decisions")}
    return SolveResult.of(column.x, reason, column.residual_norms, residual, column.rounding_floor, **cost)
