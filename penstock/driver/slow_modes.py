"""Finds out whether constants are slow modes of a matrix, which a coarse level made of them then represents."""

from __future__ import annotations

import numpy as np

from penstock.spmv import CsrMatrix
from penstock.spmv.device import count_true

# A constant that A maps to less than this share of its absolute row sum, in this share of rows, is a slow mode. Rows next to
# fixed unknowns differ: a fifth of them in a cube of 28 nodes a side that is held all around.
_SMALL, _MOST_ROWS = 1e-3, 0.6
# Of the rows, within which this share of rows has all its entries.
_BAND, _BANDED_ROWS = 1 / 8, 0.9
# In memory a coarse level is worth its set-up for matrices of at least this many rows.
_LEAST_RESIDENT_ROWS, _LEAST_STREAMED_ROWS = 500_000, 20_000


def is_worth_measuring(rows: int, *, streamed: bool) -> bool:
    """Return whether a matrix is so large that a coarse level may pay; streamed, iterations are dear."""
    return rows >= (_LEAST_STREAMED_ROWS if streamed else _LEAST_RESIDENT_ROWS)


def has_band(A: CsrMatrix) -> bool:
    """Return whether most rows of A have all their entries within a part of the columns, which are sorted.

    In memory the set-up of a coarse level would otherwise hold most of the matrix at once; where A is streamed, its rows are put
    in an order that narrows the band.
    """
    rows = A.shape[0]
    widths = A.column_indices[A.row_offsets[1:] - 1] - A.column_indices[A.row_offsets[:-1]]
    return count_true(widths <= _BAND * rows) >= _BANDED_ROWS * rows


def constants_are_slow(A: CsrMatrix, block_size: int) -> bool:
    """Return whether A nearly maps to zero a constant for each unknown of a node.

    Costs ``block_size`` products, and one with the absolute values. The constants are the near-null space of diffusion and the
    translations of elasticity; a shift, as of an implicit time step, makes them fast, and other methods do.
    """
    rows = A.shape[0]
    if np.dtype(A.dtype) != np.float64 or rows % block_size:
        return False
    xp, most = A.device.xp, _MOST_ROWS * rows
    sums = A.apply_absolute(xp.ones(rows))
    for unknown in range(block_size):
        constant = xp.zeros(rows)
        constant[unknown::block_size] = 1.0
        small = xp.abs(A.apply(constant)) <= _SMALL * sums
        if count_true(small) < most:
            return False
    return True
