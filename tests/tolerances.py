"""Rounding bounds that tests hold results against."""

import numpy as np


def product_bound(A_abs, x, out, alpha, beta, dtype, *, additions=False):
    """Bound on the rounding error of ``alpha A x + beta out`` accumulated in float64, componentwise.

    A sum of m products in any order errs by at most (m + 1) u sum |a||x| (Higham 2002, section 3.1); scaling and adding
    cost a few u more, and storing the result in ``dtype`` half a unit in its last place. With ``additions``, parts of a
    row are added to out one by one, at most as many as the row has entries, and each addition rounds to ``dtype``.
    """
    unit = np.finfo(np.float64).eps / 2
    lengths = np.diff(A_abs.indptr)
    lengths = lengths[:, None] if x.ndim == 2 else lengths
    magnitude = abs(alpha) * (A_abs @ np.abs(x).astype(np.float64))
    if beta:
        magnitude = magnitude + abs(beta) * np.abs(out).astype(np.float64)
    roundings = lengths + 3 if additions else 2
    storing = roundings * np.finfo(dtype).eps / 2 * magnitude * (np.dtype(dtype) == np.float32)
    return (lengths + 6) * unit * magnitude + storing + 1e-300
