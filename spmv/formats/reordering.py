"""Matrices whose rows and columns are put in another order, by all threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.spmv.compilation.jit import serial_kernel, shared_range
from penstock.spmv.compilation.sorting import sort_with
from penstock.spmv.device import Array


def rows_of_nodes(order: Array, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the old number of each row, int64, where nodes of ``size`` rows are in an order: the old number of each node."""
    rows: np.ndarray[Any, np.dtype[np.int64]] = (
        order.astype(np.int64, copy=False)[:, None] * size + np.arange(size)
    ).reshape(-1)
    return rows


def reordered(A: Any, rows: Array) -> Any:
    """Return a square SciPy CSR or BSR matrix with its rows and columns in another order, and sorted columns.

    Needs the memory of a second matrix.

    Parameters
    ----------
    A : csr_array or bsr_array
    rows : array of int
        The old number of each row, or of each row of blocks of BSR.
    """
    place = np.empty(len(rows), dtype=A.indices.dtype)
    place[rows] = np.arange(len(rows), dtype=place.dtype)
    offsets = np.zeros_like(A.indptr)
    np.cumsum(np.diff(A.indptr)[rows], out=offsets[1:])
    columns, values = np.empty_like(A.indices), np.empty_like(A.data)
    old_blocks, blocks = (
        array.reshape(len(array), -1) if len(array) else array.reshape(0, 1) for array in (A.data, values)
    )
    _permute_rows(len(rows), rows, place, A.indptr, A.indices, old_blocks, offsets, columns, blocks)
    result = type(A)((values, columns, offsets), shape=A.shape)
    result.has_sorted_indices = True  # which SciPy would find out by looking
    return result


@shared_range(least=256)
def _permute_rows(
    begin: int, end: int, rows: Array, place: Array, old_offsets: Array, old_columns: Array, old_values: Array,
    offsets: Array, columns: Array, values: Array,
) -> None:  # fmt: skip
    """Copy rows in their new order, with their new columns in ascending order."""
    before, order, renamed = 0, np.empty(0, dtype=np.int64), np.empty(0, dtype=columns.dtype)
    for row in range(begin, end):
        first, start, count = old_offsets[rows[row]], offsets[row], offsets[row + 1] - offsets[row]
        # The rows of a node mostly have entries in the same columns, which are sorted once.
        if count != order.size or not _are_equal(old_columns, before, first, count):
            before, order, renamed = first, np.arange(count), np.empty(count, dtype=columns.dtype)
            for k in range(count):
                renamed[k] = place[old_columns[first + k]]
            sort_with(renamed, order, count)
        for k in range(count):
            columns[start + k] = renamed[k]
            for scalar in range(values.shape[1]):
                values[start + k, scalar] = old_values[first + order[k], scalar]


@serial_kernel
def _are_equal(columns: Array, first: int, second: int, count: int) -> bool:
    equal = True
    for k in range(count):
        equal &= columns[first + k] == columns[second + k]
    return equal
