"""Finds out whether constants are slow modes of a matrix, which a coarse level made of them then represents."""

from __future__ import annotations

import numpy as np

from penstock.spmv import CsrMatrix
from penstock.spmv.compilation.jit import shared_range
from penstock.spmv.device import Array, count_true
from penstock.spmv.formats.statistics import spread

# A constant that A maps to less than this share of its absolute row sum, in this share of rows, is a slow mode. Rows next to
# fixed unknowns differ: a fifth of them in a cube of 28 nodes a side that is held all around.
_SMALL, _MOST_ROWS = 1e-3, 0.6
# Of the rows, within which this share of rows has all its entries.
_BAND, _BANDED_ROWS = 1 / 8, 0.9
# In memory a coarse level is worth its set-up for matrices of at least this many rows.
_LEAST_RESIDENT_ROWS, _LEAST_STREAMED_ROWS = 500_000, 20_000
# Shares of the rows on a host are estimated from this many.
_SAMPLE = 1 << 20


def is_worth_measuring(rows: int, *, streamed: bool) -> bool:
    """Return whether a matrix is so large that a coarse level may pay; streamed, iterations are dear."""
    return rows >= (_LEAST_STREAMED_ROWS if streamed else _LEAST_RESIDENT_ROWS)


def has_band(A: CsrMatrix) -> bool:
    """Return whether most rows of A have all their entries within a part of the columns, which are sorted.

    In memory the set-up of a coarse level would otherwise hold most of the matrix at once; where A is streamed, its rows are put
    in an order that narrows the band.
    """
    rows = A.device.asarray(spread(A.shape[0], _SAMPLE))
    widths = A.column_indices[A.row_offsets[rows + 1] - 1] - A.column_indices[A.row_offsets[rows]]
    return count_true(widths <= _BAND * A.shape[0]) >= _BANDED_ROWS * len(rows)


def constants_are_slow(A: CsrMatrix, block_size: int) -> bool:
    """Return whether A nearly maps to zero a constant for each unknown of a node.

    On a GPU this costs ``block_size`` products, and one with the absolute values; on a CPU, a look at a million rows. The
    constants are the near-null space of diffusion and the translations of elasticity; a shift, as of an implicit time step,
    makes them fast, and other methods do.
    """
    rows = A.shape[0]
    if np.dtype(A.dtype) != np.float64 or rows % block_size:
        return False
    if A.device.kind == "cpu":
        some = spread(rows, _SAMPLE)
        small = np.empty(len(some), dtype=bool)
        _mark_small(len(some), some, A.row_offsets, A.column_indices, A.values, block_size, _SMALL, small)
    else:
        xp = A.device.xp
        small, most = xp.ones(rows, dtype=bool), _SMALL * A.apply_absolute(xp.ones(rows))
        for unknown in range(block_size):
            constant = xp.zeros(rows)
            constant[unknown::block_size] = 1.0
            small &= xp.abs(A.apply(constant)) <= most
    return count_true(small) >= _MOST_ROWS * len(small)


@shared_range(least=4096)
def _mark_small(
    begin: int,
    end: int,
    rows: Array,
    offsets: Array,
    columns: Array,
    values: Array,
    size: int,
    share: float,
    small: Array,
) -> None:
    """Mark the rows whose entries for each of the ``size`` unknowns of a node add up to little beside the absolute row sum."""
    sums = np.empty(size)
    for place in range(begin, end):
        sums[:], absolute = 0.0, 0.0
        for entry in range(offsets[rows[place]], offsets[rows[place] + 1]):
            sums[columns[entry] % size] += values[entry]
            absolute += abs(values[entry])
        small[place] = np.abs(sums).max() <= share * absolute
