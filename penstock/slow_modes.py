"""Finds out whether constants are slow modes of a matrix, which a coarse level made of them then represents."""

from __future__ import annotations

import numpy as np

from penstock.spmv import CsrMatrix, Operator

__all__ = ["constants_are_slow"]

# A constant that A maps to less than this share of its absolute row sum, in so many rows, is a slow mode. Rows at fixed
# unknowns differ.
_SMALL, _MOST_ROWS = 1e-3, 0.9
# In memory a coarse level is worth its set-up for matrices of at least so many rows.
_LEAST_RESIDENT_ROWS, _LEAST_STREAMED_ROWS = 500_000, 20_000


def constants_are_slow(A: Operator, block_size: int, *, streamed: bool) -> bool:
    """Return whether smoothed aggregation is expected to win with a constant for each unknown of a node.

    Parameters
    ----------
    A : CsrMatrix
        In memory; other operators are not measured.
    block_size : int
        Unknowns a node.
    streamed : bool
        Whether the matrix will be streamed, which makes iterations dear.

    Notes
    -----
    Costs a product with ``block_size`` vectors and one with the absolute values. The constants are the near-null space of
    diffusion and the translations of elasticity; a shift, as of an implicit time step, makes them fast, and other methods do.
    """
    rows = A.shape[0]
    least = _LEAST_STREAMED_ROWS if streamed else _LEAST_RESIDENT_ROWS
    if not isinstance(A, CsrMatrix) or np.dtype(A.dtype) != np.float64 or rows < least or rows % block_size:
        return False
    xp = A.device.xp
    sums = A.apply_absolute(xp.ones(rows))
    for unknown in range(block_size):
        constant = xp.zeros(rows)
        constant[unknown::block_size] = 1.0
        small = xp.abs(A.apply(constant)) <= _SMALL * sums
        if float(xp.count_nonzero(small)) < _MOST_ROWS * rows:
            return False
    return True
