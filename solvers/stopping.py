"""What all solvers agree on: when numbers are out of range, when a restart was useless, when a floor is reached."""

from __future__ import annotations

from penstock.spmv import InputError

__all__ = ["FLOOR_FACTOR", "LARGEST_NORM", "SMALLEST_NORM", "USELESS_RESTART", "check_tolerances"]

#: A true residual within this factor of the estimated rounding floor counts as having reached it.
FLOOR_FACTOR = 100
#: A restart from the true residual that does not bring it below this share of itself is useless; more will be as well.
USELESS_RESTART = 0.5
#: Squares of vectors must stay within the range of float64, with room for those of the matrix and of small residuals.
SMALLEST_NORM, LARGEST_NORM = 1e-100, 1e140


def check_tolerances(rtol: float, atol: float, maxiter: int | None, n: int) -> int:
    """Return the iterations at most, 10 n by default.

    Raises
    ------
    InputError
        If one of them is negative.
    """
    if not (rtol >= 0 and atol >= 0):
        raise InputError(f"tolerances must not be negative: rtol={rtol}, atol={atol}")
    maxiter = 10 * n if maxiter is None else int(maxiter)
    if maxiter < 0:
        raise InputError(f"maxiter must not be negative, but is {maxiter}")
    return maxiter
