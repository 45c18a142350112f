"""Finds out whether constants are slow modes of a matrix, which a coarse level made of them then represents."""

from __future__ import annotations

import numpy as np

from penstock.spmv import CsrMatrix
from penstock.spmv.compilation.jit import shared_range
from penstock.spmv.device import Array, count_true

# A constant that A maps to less than this share of its absolute row sum, in this share of rows, is a slow mode. Rows next to
# fixed unknowns differ: a fifth of them in a cube of 28 nodes a side that is held all around.
_SMALL, _MOST_ROWS = 1e-3, 0.6
# Of the rows, within which this share of rows has all its entries.
_BAND, _BANDED_ROWS = 1 / 8, 0.9
# In memory a coarse level is worth its set-up for matrices of at least this many rows.
_LEAST_RESIDENT_ROWS, _LEAST_STREAMED_ROWS = 500_000, 20_000
# Shares of rows are told by about as many of them, spread evenly.
_SAMPLE = 1 << 20


def is_worth_measuring(rows: int, *, streamed: bool) -> bool:
    """Return whether a matrix is so large that a coarse level may pay; streamed, iterations are dear."""
    return rows >= (_LEAST_STREAMED_ROWS if streamed else _LEAST_RESIDENT_ROWS)


def has_band(A: CsrMatrix) -> bool:
    """Return whether most rows of A have all their entries within a part of the columns, which are sorted.

    In memory the set-up of a coarse level would otherwise hold most of the matrix at once; where A is streamed, its rows are put
    in an order that narrows the band.
    """
    starts, stops = _sample(A)
    widths = A.column_indices[stops - 1] - A.column_indices[starts]
    return count_true(widths <= _BAND * A.shape[0]) >= _BANDED_ROWS * len(starts)


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
        starts, stops = _sample(A)
        slow = np.empty((len(starts), block_size), dtype=bool)
        _mark_small_sums(len(slow), starts, stops, A.column_indices, A.values, _SMALL, slow)
        return all(count_true(of) >= _MOST_ROWS * len(slow) for of in slow.T)
    xp = A.device.xp
    sums = A.apply_absolute(xp.ones(rows))
    for unknown in range(block_size):
        constant = xp.zeros(rows)
        constant[unknown::block_size] = 1.0
        small = xp.abs(A.apply(constant)) <= _SMALL * sums
        if count_true(small) < _MOST_ROWS * rows:
            return False
    return True


def _sample(A: CsrMatrix) -> tuple[Array, Array]:
    """Return where the entries of some rows begin and end; the step from row to row is odd, as sides of meshes rarely are."""
    step = A.shape[0] // _SAMPLE | 1
    return A.row_offsets[:-1:step].astype(np.int64), A.row_offsets[1::step].astype(np.int64)


@shared_range(least=4096)
def _mark_small_sums(
    begin: int, end: int, starts: Array, stops: Array, columns: Array, values: Array, share: float, small: Array
) -> None:
    """Mark the rows of which the entries of each unknown of a node add up to a small share of the absolute row sum."""
    size = small.shape[1]
    sums = np.empty(size)
    for row in range(begin, end):
        sums[:] = 0.0
        absolute = 0.0
        for entry in range(starts[row], stops[row]):
            sums[columns[entry] % size] += values[entry]
            absolute += abs(values[entry])
        for unknown in range(size):
            small[row, unknown] = abs(sums[unknown]) <= share * absolute
