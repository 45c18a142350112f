"""Residuals ``b - A x`` with twice the digits of float64 in every sum, for claims that float64 cannot settle.

Source: Ogita, Rump and Oishi (2005), algorithm Dot2; products by fused multiply-adds (section 6 there).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.spmv.compilation.intrinsics import fused
from penstock.spmv.compilation.jit import shared_range
from penstock.spmv.device import Array
from penstock.spmv.formats.csr import CsrMatrix


def accurate_residual(A: CsrMatrix, x: Array, b: Array) -> np.ndarray[Any, Any]:
    """Return ``b - A x`` as if computed with 106 bits and rounded to float64.

    Parameters
    ----------
    A : CsrMatrix
        On the host.
    x : float64 array, (n, columns)
    b : float64 array, (rows, columns)

    Returns
    -------
    float64 array, (rows, columns)

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> from penstock.spmv import CsrMatrix
    >>> A = CsrMatrix.from_csr(scipy.sparse.csr_array([[1e16, 1.0, -1e16]]))
    >>> accurate_residual(A, np.ones((3, 1)), np.zeros((1, 1))).tolist()
    [[-1.0]]
    """
    out = np.empty(b.shape)
    x, b = (np.ascontiguousarray(vectors, dtype=np.float64) for vectors in (x, b))
    _subtract_product(A.shape[0], A.row_offsets, A.column_indices, A.values, x, b, out)
    return out


@shared_range(least=2048, rounded=True)
def _subtract_product(
    begin: int, end: int, offsets: Array, columns: Array, values: Array, x: Array, b: Array, out: Array
) -> None:
    for row in range(begin, end):
        for k in range(out.shape[1]):
            total, rest = b[row, k], 0.0
            for entry in range(offsets[row], offsets[row + 1]):
                factor, number = -np.float64(values[entry]), x[columns[entry], k]
                product = factor * number
                before, total = total, total + product
                added = total - before
                rest += (before - (total - added)) + (product - added) + fused(factor, number, -product)
            out[row, k] = total + rest
