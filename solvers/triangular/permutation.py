"""Sparse matrices of blocks in another order, and transposed."""

from __future__ import annotations

import numpy as np

from penstock.solvers.triangular.block_entries import BlockEntries
from penstock.spmv import Array
from penstock.spmv.products.block_rows import block_rows, row_numbers


def permuted(entries: BlockEntries, names: Array) -> BlockEntries:
    """Return the matrix whose row and column k are row and column ``names[k]``."""
    xp = entries.device.xp
    place_of = xp.empty(entries.rows, dtype=np.int32)
    place_of[names] = xp.arange(entries.rows, dtype=np.int32)
    rows = place_of[row_numbers(entries.offsets, len(entries.columns))]
    return _from_blocks(entries, rows, place_of[entries.columns], entries.values)


def transposed(entries: BlockEntries) -> BlockEntries:
    """Return the transpose."""
    rows = row_numbers(entries.offsets, len(entries.columns))
    return _from_blocks(entries, entries.columns, rows, entries.values.swapaxes(1, 2))


def _from_blocks(like: BlockEntries, rows: Array, columns: Array, values: Array) -> BlockEntries:
    sorted_rows = block_rows(0, like.rows, rows, columns, values, like.rows)
    return BlockEntries(sorted_rows.offsets, sorted_rows.columns, sorted_rows.blocks, like.dtype)
