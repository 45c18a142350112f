"""Scales a result before half matrices and slabs add to it."""

from __future__ import annotations

import numpy as np

from penstock.spmv.compilation.jit import shared_range
from penstock.spmv.device import Array

#: Numbers from which on several threads are faster than NumPy's one.
LONG = 1 << 18


def scale(out: Array, beta: float) -> None:
    """Multiply ``out`` by ``beta``; with 0 its old content, NaN or not, has no effect."""
    if isinstance(out, np.ndarray) and out.size > LONG and out.flags.c_contiguous and beta != 1.0:
        _scale_long(out.size, out.reshape(-1), out.dtype.type(beta))
    elif beta == 0.0:
        out.fill(0)
    elif beta != 1.0:
        out *= out.dtype.type(beta)


@shared_range(least=LONG // 2)
def _scale_long(begin: int, end: int, out: Array, beta: float) -> None:
    for i in range(begin, end):
        out[i] = 0.0 if beta == 0.0 else beta * out[i]
