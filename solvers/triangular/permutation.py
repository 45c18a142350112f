"""Sparse matrices of blocks in another order, and transposed."""

from __future__ import annotations

import numpy as np

from penstock.solvers.triangular.block_entries import BlockEntries
from penstock.spmv import Array, device_of

__all__ = ["from_triplets", "permuted", "row_of_entries", "transposed"]


def row_of_entries(offsets: Array, count: int) -> Array:
    """Return the row of every entry."""
    xp = device_of(offsets).xp
    return xp.searchsorted(offsets, xp.arange(count), side="right") - 1


def from_triplets(like: BlockEntries, rows: Array, columns: Array, values: Array) -> BlockEntries:
    """Return a matrix with as many rows as another one, of blocks in any order."""
    xp = like.device.xp
    order = xp.argsort(rows.astype(np.int64) * like.rows + columns)
    offsets = xp.searchsorted(rows[order], xp.arange(like.rows + 1)).astype(np.int64)
    return BlockEntries(offsets, columns[order].astype(np.int32), xp.ascontiguousarray(values[order]), like.dtype)


def permuted(entries: BlockEntries, names: Array) -> BlockEntries:
    """Return the matrix whose row and column k are row and column ``names[k]``."""
    xp = entries.device.xp
    place_of = xp.empty(entries.rows, dtype=np.int32)
    place_of[names] = xp.arange(entries.rows, dtype=np.int32)
    rows = place_of[row_of_entries(entries.offsets, len(entries.columns))]
    return from_triplets(entries, rows, place_of[entries.columns], entries.values)


def transposed(entries: BlockEntries) -> BlockEntries:
    """Return the transpose."""
    rows = row_of_entries(entries.offsets, len(entries.columns))
    return from_triplets(entries, entries.columns, rows, entries.values.swapaxes(1, 2))
