"""Scales a result before half matrices and slabs add to it."""

from __future__ import annotations

import numpy as np
from numba import prange

from penstock.spmv.compilation.jit import parallel_kernel
from penstock.spmv.device import Array

#: Numbers from which on several threads are faster than NumPy's one.
_LONG = 1 << 18


def scale(out: Array, beta: float) -> None:
    """Multiply ``out`` by ``beta``; with 0 its old content, NaN or not, has no effect."""
    if isinstance(out, np.ndarray) and out.size > _LONG and out.flags.c_contiguous and beta != 1.0:
        _scale_long(out.reshape(-1), out.dtype.type(beta))
    elif beta == 0.0:
        out.fill(0)
    elif beta != 1.0:
        out *= out.dtype.type(beta)


@parallel_kernel
def _scale_long(out: Array, beta: float) -> None:
    for i in prange(out.shape[0]):
        out[i] = 0.0 if beta == 0.0 else beta * out[i]
