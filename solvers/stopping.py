"""What all solvers agree on: when numbers are out of range, when a restart was useless, when a floor is reached."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np

from penstock.spmv import Array, InputError, Operator

__all__ = [
    "FLOOR_FACTOR",
    "LARGEST_NORM",
    "SMALLEST_NORM",
    "USELESS_RESTART",
    "check_finite",
    "check_state",
    "check_tolerances",
    "has_diverged",
]

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
        If one of them is negative, or no number.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not isinstance(value, Real) or not 0 <= value < math.inf:
            raise InputError(f"{name} must be a number, finite and not negative, not {value!r}")
    if maxiter is None:
        return 10 * n
    if not isinstance(maxiter, Real) or not maxiter >= 0 or maxiter != maxiter // 1:
        raise InputError(f"maxiter must be a whole number and not negative, not {maxiter!r}")
    return int(maxiter)


def has_diverged(residual_norms: list[float], residual: float, unit: float) -> bool:
    """Tell a relative residual that no consistent system has after these.

    Residuals of conjugate gradients exceed the first one by the square root of the condition number at most, which is less
    than ``1 / unit`` where there is anything to solve.
    """
    return residual > max(1.0, residual_norms[0]) / math.sqrt(unit)


def check_finite(name: str, values: Array, xp: Any) -> None:
    """Refuse NaN and Inf in a vector, or in a block of them.

    Raises
    ------
    InputError
        It names the first place.
    """
    finite = xp.isfinite(values)
    if bool(finite.all()):
        return
    row, *column = (int(index) for index in np.unravel_index(int(xp.argmin(finite)), values.shape))
    where = f"row {row} of column {column[0]}" if column else f"row {row}"
    raise InputError(f"{name} holds {float(values[row, *column])} at {where}; NaN and Inf cannot be solved with")


def check_state(state: Any, kind: type, shape: tuple[int, ...], operator: Operator) -> None:
    """Refuse a state of another solver or system.

    Parameters
    ----------
    state : object
    kind : type
    shape : tuple of int
        Of its iterates.
    operator : Operator
        Of the system.

    Raises
    ------
    InputError
        If it is of another kind, its iterates have another shape or type, or it cannot be written to.
    """
    if not isinstance(state, kind):
        raise InputError(f"state must be a {kind.__name__} of an earlier call, not a {type(state).__name__}")
    x = state.x  # type: ignore[attr-defined]
    if x.shape != shape or x.dtype != operator.dtype:
        raise InputError(
            f"the state holds iterates of shape {x.shape} and type {x.dtype}, but this system takes {shape} and "
            f"{operator.dtype}; go on with the system that it came from"
        )
    if not getattr(x.flags, "writeable", True):
        raise InputError("the state is read-only, but a solve changes it in place; give a copy.deepcopy of it")
