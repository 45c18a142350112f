"""Rounding bounds that tests hold results against."""

import numpy as np


def product_bound(A_abs, x, out, alpha, beta, dtype):
    """Bound on the rounding error of ``alpha A x + beta out`` accumulated in float64, componentwise.

    A sum of m products in any order errs by at most (m + 1) u sum |a||x| (Higham 2002, section 3.1); scaling and adding
    cost 3 u more, and storing the result in ``dtype`` half a unit in its last place.
    """
    unit = np.finfo(np.float64).eps / 2
    lengths = np.diff(A_abs.indptr)
    lengths = lengths[:, None] if x.ndim == 2 else lengths
    magnitude = abs(alpha) * (A_abs @ np.abs(x).astype(np.float64))
    if beta:
        magnitude = magnitude + abs(beta) * np.abs(out).astype(np.float64)
    return (lengths + 4) * unit * magnitude + np.finfo(dtype).eps * magnitude * (np.dtype(dtype) == np.float32) + 1e-300
