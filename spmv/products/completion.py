"""Completes the rows of a matrix whose half is stored, slab by slab."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

import numpy as np

from penstock.spmv import Array, BsrMatrix, SparseMatrix, SymmetricBsrMatrix, device_of
from penstock.spmv.compilation.table import find_kernel, has_kernel
from penstock.spmv.formats.convert import scalar_triplets, stored_blocks
from penstock.spmv.formats.sliced_bsr import HEIGHT
from penstock.spmv.products.block_rows import BlockRows, block_rows, row_numbers
from penstock.spmv.products.mirrored_rows import Waiting

#: Block rows, block columns and blocks.
_Blocks = tuple[Array, Array, Array]


class Completion:
    """Completes rows of a matrix whose half is stored, by the mirror images of earlier rows.

    ``visit`` receives complete rows in ascending order, once the values of the slabs gathered would take ``enough`` bytes in
    float64.
    """

    def __init__(self, block_size: int, visit: Callable[[BlockRows], None], enough: int = 0) -> None:
        self._size, self._visit = block_size, visit
        self._enough = enough
        # Blocks of rows that have arrived, and mirror images of blocks in later rows.
        self._arrived: list[_Blocks] = []
        self._pending: list[_Blocks] = []
        # The same where kernels complete the rows: slabs with their first block rows, and blocks that wait.
        self._slabs: list[tuple[int, SymmetricBsrMatrix]] = []
        self._waiting: Waiting | None = None
        self._start, self._gathered = 0, 0

    def add(self, first_row: int, slab: SparseMatrix) -> None:
        """Take the next rows."""
        stored, last = stored_size(slab), first_row + slab.shape[0] == slab.shape[1]
        start, stop = first_row // stored, (first_row + slab.shape[0]) // stored
        self._gathered += 8 * int(slab.values.size)
        enough = last or self._gathered >= self._enough
        # The memory of a slab is used again, so what is kept of it is copied.
        if stored == self._size and _has_kernels(slab):
            self._slabs.append((start, slab if enough else _copied(slab)))
        else:
            rows, columns, blocks = _blocks_of(slab)
            if blocks is slab.values and not last:
                blocks = blocks.copy()
            self._arrived.append((rows + start, columns, blocks))
        if not enough:
            return
        self._gathered = 0
        if self._slabs:
            complete = find_kernel("block_rows", "complete", slab.device.kind)
            rows_of_blocks, self._waiting = complete(self._slabs, self._waiting, self._start, stop)
            self._start, self._slabs = stop, []
            self._visit(rows_of_blocks)
        else:
            self._complete(stop, slab.shape[1], stored, half=slab.traits.half)

    def _complete(self, stop: int, width: int, stored: int, *, half: bool) -> None:
        """Visit the rows that have arrived, up to a row of stored blocks."""
        start, self._start = self._start, stop
        xp = device_of(self._arrived[0][2]).xp
        rows, columns, blocks = _joined(self._arrived)
        parts = [(rows, columns, blocks)]
        if half:
            below = xp.flatnonzero(columns > rows)
            images = (columns[below], rows[below], blocks[below].swapaxes(1, 2))
            pending, self._pending = [*self._pending, images], []
            for entry in pending:
                here = entry[0] < stop
                parts.append(_some(entry, xp.flatnonzero(here)))
                later = xp.flatnonzero(~here)
                if later.size:
                    self._pending.append(_some(entry, later))
        self._arrived, blocks = [], _joined(parts)
        if stored != self._size:
            blocks = _regrouped(blocks, self._size, width)
            start, stop = start * stored // self._size, stop * stored // self._size
        self._visit(block_rows(start, stop, *blocks, width))


def _has_kernels(slab: SparseMatrix) -> TypeGuard[SymmetricBsrMatrix]:
    return isinstance(slab, SymmetricBsrMatrix) and has_kernel("block_rows", "complete", slab.device.kind)


def _copied(slab: SymmetricBsrMatrix) -> SymmetricBsrMatrix:
    arrays = {name: array.copy() for name, array in slab.arrays().items()}
    return slab.from_arrays(slab.shape, slab.dtype, arrays, slab.parameters())


def _joined(parts: list[_Blocks]) -> _Blocks:
    if len(parts) == 1:
        return parts[0]
    xp = device_of(parts[0][2]).xp
    rows, columns, blocks = (xp.concatenate([part[i] for part in parts]) for i in range(3))
    return rows, columns, blocks


def _some(blocks: _Blocks, chosen: Array) -> _Blocks:
    rows, columns, values = blocks
    return rows[chosen], columns[chosen], values[chosen]


def _blocks_of(slab: SparseMatrix) -> _Blocks:
    """Return block rows, block columns and blocks of a slab, where the slab is and as it stores them."""
    if isinstance(slab, BsrMatrix):
        rows = row_numbers(slab.row_offsets, slab.column_indices.size)
        return rows, slab.column_indices.astype(np.int64), slab.values.astype(np.float64, copy=False)
    arrays, size = slab.arrays(), stored_size(slab)
    if "chunk_offsets" in arrays and "block_size" in slab.parameters():
        return stored_blocks(
            arrays["chunk_offsets"],
            arrays["column_indices"],
            slab.numbers().astype(np.float64, copy=False),
            arrays["permutation"],
            slab.shape[0] // size,
            HEIGHT,
            size,
        )
    rows, columns, values = slab.triplets()
    return rows.astype(np.int64), columns.astype(np.int64), values.astype(np.float64).reshape(-1, 1, 1)


def stored_size(slab: SparseMatrix) -> int:
    """Return the rows of the blocks that a matrix stores, 1 without blocks."""
    return int(slab.values.shape[-1] if isinstance(slab, BsrMatrix) else slab.parameters().get("block_size", 1))


def _regrouped(blocks: _Blocks, size: int, width: int) -> _Blocks:
    """Return the nonzeros of blocks as blocks of another size; the matrix has ``width`` columns."""
    rows, columns, values = scalar_triplets(*blocks)
    xp = device_of(values).xp
    present = xp.flatnonzero(values)
    rows, columns, values = rows[present], columns[present], values[present]
    if size == 1:  # blocks come in any order
        return rows, columns, values.reshape(-1, 1, 1)
    across = -(-width // size)
    keys, places = xp.unique(rows // size * np.int64(across) + columns // size, return_inverse=True)
    regrouped = xp.zeros((keys.size, size, size))
    regrouped[places.reshape(-1), rows % size, columns % size] = values
    return keys // across, keys % across, regrouped
