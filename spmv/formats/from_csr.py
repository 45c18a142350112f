"""Filling other formats from CSR on the device where the matrix lives: slots of scalars, slots of small blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from penstock.spmv.cuda_module import cuda_function, launch, type_names
from penstock.spmv.device import Array
from penstock.spmv.errors import InputError
from penstock.spmv.formats.base import INT32_MAX, check_block_size
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.jit import parallel_kernel, serial_kernel

__all__ = [
    "LARGEST_BLOCK",
    "check_symmetric",
    "chunk_offsets",
    "chunks_of_blocks",
    "chunks_of_slots",
    "count_blocks",
    "is_symmetric",
    "length_permutation",
    "scalar_triplets",
    "stored_blocks",
]

LARGEST_BLOCK = 8


def length_permutation(lengths: Array, scope: int) -> Array:
    """Order rows by descending length inside scopes of ``scope`` consecutive rows; equal lengths keep their order.

    Parameters
    ----------
    lengths : int64 array, (rows,)
    scope : int
        The sorting scope sigma; the last scope may be shorter.

    Returns
    -------
    int32 array, (rows,)
        The row that stands at each position, on the same device.

    Notes
    -----
    A solver may work in the sorted order throughout: with ``p`` this permutation, it solves ``A[p][:, p]`` for ``b[p]``, and
    its result holds ``x[p]``. SELL then needs no permutation of its own, and columns stay as close as rows are.
    """
    xp = _module(lengths)
    rows = xp.arange(lengths.size, dtype=np.int64)
    longest = int(lengths.max()) if lengths.size else 0
    # One sortable number a row: scope, then length downwards, then place inside the scope.
    keys = (rows // scope * (longest + 1) + (longest - lengths)) * scope + rows % scope
    keys.sort()
    return (keys // (scope * (longest + 1)) * scope + keys % scope).astype(np.int32)


def chunk_offsets(lengths: Array, height: int) -> Array:
    """Return where each chunk of ``height`` rows begins, in slots times height, if all its rows are as long as its longest.

    Parameters
    ----------
    lengths : int64 array, (rows,)
        In the order of storage.
    height : int

    Returns
    -------
    int64 array, (chunks + 1,)
    """
    xp = _module(lengths)
    chunks = -(-lengths.size // height)
    padded = xp.zeros(chunks * height, dtype=np.int64)
    padded[: lengths.size] = lengths
    offsets = xp.zeros(chunks + 1, dtype=np.int64)
    if chunks:
        xp.cumsum(padded.reshape(chunks, height).max(axis=1) * height, out=offsets[1:])
    return offsets


def chunks_of_slots(
    A: CsrMatrix, permutation: Array, offsets: Array, height: int, values_dtype: Any
) -> tuple[Array, Array]:
    """Return column indices and values of ``A`` in chunks of ``height`` interleaved rows; -1 and 0 where a row is shorter.

    Entries past a chunk's width are left out. ``permutation`` may be empty: the natural order.
    """
    xp, rows, size = A.device.xp, A.shape[0], int(offsets[-1])
    column_indices, values = xp.full(size, -1, dtype=np.int32), xp.zeros(size, dtype=values_dtype)
    source, target = (A.row_offsets, A.column_indices, A.values), (permutation, offsets, column_indices, values)
    if A.device.kind == "cpu":
        _fill_slots(rows, height, *source, *target)
    else:
        names = type_names(values, A.values, A.row_offsets)
        function = cuda_function("conversion.cu", f"fill_slots<{names}>")
        scalars = (np.int64(rows), np.int64(height))
        launch(function, 8 * rows, 256, (*scalars, *source, np.int32(permutation.size > 0), *target))
    return column_indices, values


def count_blocks(A: CsrMatrix, size: int, *, upper: int | None = None) -> Array:
    """Count the blocks of ``size`` x ``size`` that each block row needs.

    Parameters
    ----------
    A : CsrMatrix
    size : int
    upper : int, optional
        Leave out the blocks left of the diagonal. The number of the first block row in the matrix that ``A`` is a slab of,
        0 if it is the whole one; slabs are converted on the CPU.

    Returns
    -------
    int64 array, (block rows,)

    Raises
    ------
    InputError
        If the block size is not 1 to 8, or does not divide the shape.
    """
    if not 1 <= size <= LARGEST_BLOCK:
        raise InputError(f"blocks must be 1 x 1 to {LARGEST_BLOCK} x {LARGEST_BLOCK}, not {size} x {size}")
    check_block_size(size, A.shape[1])
    block_rows = check_block_size(size, A.shape[0])
    counts = A.device.xp.zeros(block_rows, dtype=np.int64)
    if A.device.kind == "cpu":
        _count_blocks(size, _first_kept(upper), A.row_offsets, A.column_indices, counts)
    else:
        _check_whole(upper)
        function = cuda_function("conversion.cu", f"count_blocks<{type_names(A.row_offsets)}, {size}>")
        arguments = (np.int64(block_rows), np.int32(upper is not None), A.row_offsets, A.column_indices, counts)
        launch(function, 8 * block_rows, 256, arguments)
    return counts


def chunks_of_blocks(
    A: CsrMatrix,
    size: int,
    permutation: Array,
    offsets: Array,
    height: int,
    values_dtype: Any,
    *,
    upper: int | None = None,
) -> tuple[Array, Array]:
    """Return column indices and values of ``A`` in chunks of ``height`` interleaved block rows; a height of 1 is BSR.

    Blocks that hold any stored entry are stored whole, with zeros where nothing was stored; ``upper`` as for
    :func:`count_blocks`.
    """
    xp, block_rows, blocks = A.device.xp, A.shape[0] // size, int(offsets[-1])
    column_indices = xp.full(blocks, -1, dtype=np.int32)
    values = xp.zeros(blocks * size * size, dtype=values_dtype)
    source, target = (A.row_offsets, A.column_indices, A.values), (permutation, offsets, column_indices, values)
    if A.device.kind == "cpu":
        _fill_blocks(block_rows, size, _first_kept(upper), height, *source, *target)
    else:
        _check_whole(upper)
        names = type_names(values, A.values, A.row_offsets)
        function = cuda_function("conversion.cu", f"fill_blocks<{names}, {size}>")
        scalars = (np.int64(block_rows), np.int32(upper is not None), np.int64(height))
        launch(function, 8 * block_rows, 256, (*scalars, *source, np.int32(permutation.size > 0), *target))
    return column_indices, values


def stored_blocks(
    offsets: Array,
    column_indices: Array,
    values: Array,
    permutation: Array,
    rows: int,
    height: int,
    size: int,
    *,
    first_block_row: int = 0,
    within: int | None = None,
) -> tuple[Array, Array, Array]:
    """Return block rows, block columns and blocks ``(blocks, size, size)`` of chunks, padding left out.

    Parameters
    ----------
    offsets, column_indices, values, permutation : array
        As :func:`chunks_of_blocks` makes them.
    rows : int
        Number of (block) rows.
    height, size : int
    first_block_row : int
        Of the larger matrix, where this is a slab of one.
    within : int, optional
        Only blocks at most so many block columns from the diagonal.
    """
    xp = _module(offsets)
    entries = xp.flatnonzero(column_indices >= 0)
    chunks = xp.searchsorted(offsets, entries, side="right") - 1
    positions = chunks * height + entries % height
    block_rows = permutation[positions].astype(np.int64) if permutation.size else positions
    if within is not None:
        near = xp.abs(block_rows + first_block_row - column_indices[entries]) <= within
        entries, block_rows = entries[near], block_rows[near]
    # A scalar of a block lies `height` from the next, a slot size * size * height from the next.
    first = (entries - entries % height) * (size * size) + entries % height
    scalars = values[first[:, None] + xp.arange(size * size)[None, :] * height]
    return block_rows, column_indices[entries].astype(np.int64), scalars.reshape(-1, size, size)


def scalar_triplets(block_rows: Array, block_columns: Array, blocks: Array) -> tuple[Array, Array, Array]:
    """Return row indices, column indices and values of the scalars of blocks ``(count, size, size)``."""
    xp, size = _module(blocks), blocks.shape[1]
    r, c = xp.arange(size)[None, :, None], xp.arange(size)[None, None, :]
    rows = block_rows[:, None, None] * size + r + xp.zeros_like(c)
    columns = block_columns[:, None, None] * size + xp.zeros_like(r) + c
    return rows.reshape(-1), columns.reshape(-1), blocks.reshape(-1)


def check_symmetric(A: CsrMatrix) -> None:
    """Refuse a matrix that is not exactly symmetric, in pattern and in every bit of its values.

    Raises
    ------
    InputError
        With the number of entries at fault.
    """
    if A.shape[0] != A.shape[1]:
        raise InputError(f"a symmetric matrix must be square, not {A.shape[0]} x {A.shape[1]}")
    if at_fault := _asymmetric_entries(A):
        raise InputError(
            f"{at_fault} of {A.nnz} entries differ from their mirror image, so half of the matrix does not stand for "
            "the whole; symmetrise it first, (A + A.T) / 2, or use another format"
        )


def is_symmetric(A: CsrMatrix) -> bool:
    """Tell whether a matrix is exactly symmetric."""
    return A.shape[0] == A.shape[1] and not _asymmetric_entries(A)


def _asymmetric_entries(A: CsrMatrix) -> int:
    """Count the entries of a square matrix that differ from their mirror image."""
    if A.device.kind == "cpu":
        return int(_count_asymmetric(A.row_offsets, A.column_indices, A.values))
    count = A.device.xp.zeros(1, dtype=np.int32)
    function = cuda_function("conversion.cu", f"count_asymmetric<{type_names(A.values, A.row_offsets)}>")
    launch(function, A.shape[0], 256, (np.int64(A.shape[0]), A.row_offsets, A.column_indices, A.values, count))
    return int(count[0])


def _module(array: Array) -> Any:
    if not hasattr(array, "get"):
        return np
    import cupy

    return cupy


@parallel_kernel
def _fill_slots(
    rows: int,
    height: int,
    row_offsets: Array,
    source_columns: Array,
    source_values: Array,
    permutation: Array,
    offsets: Array,
    column_indices: Array,
    values: Array,
) -> None:
    for position in prange(rows):
        row = np.int64(permutation[position]) if permutation.size else np.int64(position)
        base, stop = offsets[position // height] + position % height, offsets[position // height + 1]
        for entry in range(row_offsets[row], row_offsets[row + 1]):
            target = base + (entry - row_offsets[row]) * height
            if target < stop:
                column_indices[target] = source_columns[entry]
                values[target] = source_values[entry]


@serial_kernel
def _next_block(block_row: int, entries: Array, row_offsets: Array, source_columns: Array) -> int:
    """Return the least block column that the scalar rows of a block row have yet to come to; past INT32_MAX, none."""
    size, column = entries.size, np.int64(INT32_MAX) + 1
    for r in range(size):
        if entries[r] < row_offsets[block_row * size + r + 1]:
            column = min(column, np.int64(source_columns[entries[r]]) // size)
    return column  # type: ignore[return-value]


def _first_kept(upper: int | None) -> int:
    """Return what the kernels add to a block row for the first block column that they keep."""
    return -INT32_MAX if upper is None else upper


def _check_whole(upper: int | None) -> None:
    if upper:
        raise InputError("row slabs of a symmetric matrix are converted on the CPU; use slab.to_device('cpu')")


@parallel_kernel
def _count_blocks(size: int, upper: int, row_offsets: Array, source_columns: Array, counts: Array) -> None:
    for block_row in prange(counts.shape[0]):
        entries = np.empty(size, dtype=np.int64)  # how far each scalar row has come
        for r in range(size):
            entries[r] = row_offsets[block_row * size + r]
        while True:
            column = _next_block(block_row, entries, row_offsets, source_columns)
            if column > INT32_MAX:
                break
            for r in range(size):
                stop = row_offsets[block_row * size + r + 1]
                while entries[r] < stop and source_columns[entries[r]] // size == column:
                    entries[r] += 1
            if column >= block_row + upper:
                counts[block_row] += 1


@parallel_kernel
def _fill_blocks(
    block_rows: int,
    size: int,
    upper: int,
    height: int,
    row_offsets: Array,
    source_columns: Array,
    source_values: Array,
    permutation: Array,
    offsets: Array,
    column_indices: Array,
    values: Array,
) -> None:
    for position in prange(block_rows):
        block_row = np.int64(permutation[position]) if permutation.size else np.int64(position)
        first, place = offsets[position // height], position % height
        entries = np.empty(size, dtype=np.int64)  # how far each scalar row has come
        for r in range(size):
            entries[r] = row_offsets[block_row * size + r]
        slot = 0
        while True:
            column = _next_block(block_row, entries, row_offsets, source_columns)
            if column > INT32_MAX:
                break
            kept = column >= block_row + upper
            for r in range(size):
                stop = row_offsets[block_row * size + r + 1]
                while entries[r] < stop and source_columns[entries[r]] // size == column:
                    if kept:
                        scalar = (slot * size + r) * size + source_columns[entries[r]] - column * size
                        values[first * (size * size) + scalar * height + place] = source_values[entries[r]]
                    entries[r] += 1
            if kept:
                column_indices[first + slot * height + place] = column
                slot += 1


@parallel_kernel
def _count_asymmetric(row_offsets: Array, columns: Array, values: Array) -> int:
    found = 0
    for row in prange(row_offsets.shape[0] - 1):
        for entry in range(row_offsets[row], row_offsets[row + 1]):
            low, stop = row_offsets[columns[entry]], row_offsets[columns[entry] + 1]
            high = stop
            while low < high:
                middle = (low + high) // 2
                if columns[middle] < row:
                    low = middle + 1
                else:
                    high = middle
            if low == stop or columns[low] != row or values[low] != values[entry]:
                found += 1
    return found
