"""Checks the arguments of solvers."""

from __future__ import annotations

import math
from numbers import Real

import numpy as np

from penstock.spmv import Array, Device, InputError, VectorSpace


def check_tolerances(rtol: float, atol: float) -> None:
    """Refuse tolerances that are not finite or are negative; the message names the first."""
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not isinstance(value, Real) or not 0 <= value < math.inf:
            raise InputError(f"{name} must be a number, finite and not negative, not {value!r}")


def check_maxiter(maxiter: int | None) -> None:
    """Raise an InputError if the iteration limit is negative or not a whole number."""
    if maxiter is not None and (not isinstance(maxiter, Real) or not maxiter >= 0 or maxiter != maxiter // 1):
        raise InputError(f"maxiter must be a whole number and not negative, not {maxiter!r}")


def check_finite(name: str, values: Array, device: Device) -> None:
    """Refuse a vector or block of vectors, on a device, that contains NaN or Inf; the message names the first such entry."""
    # On a GPU the squares are summed first: CuPy takes seconds to compile its first reduction.
    if device.kind == "cuda" and values.flags.c_contiguous and values.dtype.char in "fd":
        flat = values.reshape(-1)
        if math.isfinite(VectorSpace(device).dot(flat, flat)):
            return
    finite = device.xp.isfinite(values)
    if bool(finite.all()):
        return
    row, *column = (int(index) for index in np.unravel_index(int(device.xp.argmin(finite)), values.shape))
    where = f"row {row} of column {column[0]}" if column else f"row {row}"
    raise InputError(f"{name} holds {float(values[row, *column])} at {where}; all entries must be finite")
