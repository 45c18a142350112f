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
from typing import Any

import numpy as np

from penstock.driver.inputs import column_norms
from penstock.solvers import SolveResult, StopReason
from penstock.solvers.problem import FLOOR_FACTOR
from penstock.spmv import CPU, Array, BsrMatrix, CsrMatrix, SparseMatrix, device_of
from penstock.spmv.formats.limits import longest_row
from penstock.spmv.products.accurate_residual import accurate_residual
from penstock.spmv.unchecked import UncheckedEntries

# Corrections of a solve, and the share of the tolerance that each aims at.
_MOST_CORRECTIONS, _AIM = 6, 0.3
# A reported residual may differ by this share from that of the caller's matrix.
_UNCERTAINTY = 0.01
_UNIT = float(np.finfo(np.float64).eps) / 2

#: ``correct(residuals, rtol)`` solves for corrections with the stored matrix, (n, k) each.
Correct = Callable[[Array, float], tuple[Array, list[SolveResult]]]


def settled(
    A: SparseMatrix | UncheckedEntries,
    difference: float,
    columns: list[SolveResult],
    b: Array,
    x: Array,
    rtol: float,
    atol: float,
    correct: Correct,
) -> tuple[list[SolveResult], Array]:
    """Return results and solutions, (n, k), whose claims are about a matrix A, from those of the stored one.

    ``difference`` bounds the norm of the difference between the two. On the host this takes one product with ``|A|`` for each
    right-hand side that has converged, and residuals only where these do not settle the claim.
    """
    b_norms = column_norms(b)
    scales = np.where(b_norms > 0, b_norms, 1.0)
    reported = np.array([column.true_residual for column in columns])
    met = np.array([column.converged for column in columns])
    floors, roundings = _roundings(A, x, met)
    if not (difference or roundings.any()):
        return columns, x
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers near the ends of the range
        tolerances, bounds = np.maximum(rtol * b_norms, atol) / scales, difference * column_norms(x) / scales
    within = reported + bounds + roundings / scales <= tolerances
    doubtful = (bounds > _UNCERTAINTY * reported) | (met & ~within)
    doubtful &= np.isfinite(reported)
    if not doubtful.any():
        return columns, x
    x, columns = x.copy(), list(columns)
    met &= doubtful
    relative, halted = _corrected(_on_host_in_csr(A), columns, b, x, scales, tolerances, met, correct)
    for [column] in np.argwhere(doubtful):
        at_floor = relative[column] * scales[column] <= FLOOR_FACTOR * floors[column]
        unmet = StopReason.ROUNDING_FLOOR if at_floor else StopReason.STAGNATED
        columns[column] = _with_residual(
            columns[column],
            float(relative[column]),
            float(tolerances[column]),
            StopReason.STOPPED if int(column) in halted else unmet,
        )
    return columns, x


def _corrected(
    A: SparseMatrix,
    columns: list[SolveResult],
    b: Array,
    x: Array,
    scales: np.ndarray[Any, Any],
    tolerances: np.ndarray[Any, Any],
    wanted: np.ndarray[Any, Any],
    correct: Correct,
) -> tuple[np.ndarray[Any, Any], set[int]]:
    """Correct, in place, the ``wanted`` columns whose residuals are above their tolerances, while that helps.

    Returns
    -------
    relative : array, (columns,)
        Residuals of all columns.
    halted : set of int
        Columns whose correction the monitor stopped.
    """
    xp, halted = device_of(b).xp, set[int]()
    residuals = residuals_of(A, b, x)
    relative = column_norms(residuals) / scales
    for _ in range(_MOST_CORRECTIONS):
        [left] = np.nonzero(wanted & (relative > tolerances))
        if not left.size:
            break
        aim = float(_AIM * (tolerances[left] / relative[left]).min())
        corrections, costs = correct(xp.ascontiguousarray(residuals[:, left]), aim)
        previous, before = x[:, left].copy(), relative.copy()
        x[:, left] += corrections
        residuals = residuals_of(A, b, x)
        relative = column_norms(residuals) / scales
        for place, column in enumerate(left):
            columns[column] = columns[column].continued(costs[place], float(before[column]))
            if costs[place].reason is StopReason.STOPPED:
                wanted[column] = False
                halted.add(int(column))
            if not relative[column] < 0.5 * before[column]:  # the difference, or rounding, is too large to be corrected
                wanted[column] = False
                if not relative[column] < before[column]:
                    x[:, column], relative[column] = previous[:, place], before[column]
    return relative, halted


def residuals_of(A: SparseMatrix | UncheckedEntries, b: Array, x: Array) -> Array:
    """Return ``B - A X`` where b lives; on the host, where A is CSR, with twice the digits of float64."""
    A = A.to_device(CPU) if isinstance(A, UncheckedEntries) else A
    home, device = device_of(b), A.device
    if device.kind == "cpu" and isinstance(A, CsrMatrix):
        return home.asarray(accurate_residual(A, home.to_host(x), home.to_host(b)))
    out = device.asarray(b if home == device else home.to_host(b), dtype=np.float64).copy()
    A.apply(device.asarray(x if home == device else home.to_host(x), dtype=np.float64), out, alpha=-1.0, beta=1.0)
    return out if home == device else home.asarray(device.to_host(out))


def _on_host_in_csr(A: SparseMatrix | UncheckedEntries) -> SparseMatrix:
    """Return a matrix on the host in CSR, and one on a GPU as it is."""
    if isinstance(A, UncheckedEntries):
        return A.to_device(CPU)
    if A.device.kind != "cpu" or isinstance(A, CsrMatrix):
        return A
    return CsrMatrix.from_csr(A.to_csr(), check=False)


def _roundings(
    A: SparseMatrix | UncheckedEntries, x: Array, met: Any
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return two estimates of the rounding in ``A x`` for each column that has converged.

    They are ``u || |A||x| ||``, and that times the root of the longest row. Both are 0 for other columns, and after solves on a
    GPU.
    """
    floors = np.zeros(x.shape[1])
    if not isinstance(A, SparseMatrix):  # the caller's entries, of a solve on a GPU
        return floors, floors
    if A.device.kind != "cpu" or device_of(x).kind != "cpu" or not met.any():
        return floors, floors
    longest = A.shape[1]  # of formats that do not show it
    if isinstance(A, (BsrMatrix, CsrMatrix)):
        longest = A.row_granularity * longest_row(A.row_offsets)
    for column in np.flatnonzero(met):
        product = A.apply_absolute(np.abs(x[:, column]).astype(A.dtype))
        floors[column] = _UNIT * column_norms(product[:, None])[0]
    return floors, math.sqrt(longest) * floors


def _with_residual(column: SolveResult, residual: float, tolerance: float, unmet: StopReason) -> SolveResult:
    """Return a result with the residual of the caller's matrix, and with another reason if that does not meet the tolerance."""
    reason = unmet if column.converged and not residual <= tolerance else column.reason
    cost = {name: getattr(column, name) for name in ("sweeps", "bytes_streamed", "timings", "state", "decisions")}
    return SolveResult.of(column.x, reason, column.residual_norms, residual, column.rounding_floor, **cost)
