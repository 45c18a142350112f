"""Converts CSR to chunks of scalars or of small blocks, on the device that holds the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.spmv.compilation.cuda_module import launch, type_names
from penstock.spmv.compilation.jit import shared_range
from penstock.spmv.device import Array, Device, count_true
from penstock.spmv.errors import InputError
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.formats.limits import INT32_MAX
from penstock.spmv.formats.statistics import first_kept, next_block, wide_offsets
from penstock.spmv.formats.survey import CONVERSION_KERNELS
from penstock.spmv.formats.through_device import Rows, fill_through

_COUNTED_AT_ONCE = 1 << 16


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
        The row at each position, on the same device.

    Notes
    -----
    A solver may work in the sorted order throughout: with ``p`` this permutation, it solves ``A[p][:, p]`` for ``b[p]``, and
    its result holds ``x[p]``. SELL then needs no permutation of its own, and columns stay as close as rows are.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.spmv import length_permutation
    >>> length_permutation(np.array([1, 3, 2, 9, 9, 1]), scope=3).tolist()
    [1, 2, 0, 3, 4, 5]
    """
    if scope < 1:
        raise InputError(f"scope is the number of rows sorted together, at least 1, not {scope}")
    xp = _module(lengths)
    rows = xp.arange(lengths.size, dtype=np.int64)
    longest = int(lengths.max()) if lengths.size else 0
    # One sort key per row: scope, then descending length, then position inside the scope.
    keys = (rows // scope * (longest + 1) + (longest - lengths)) * scope + rows % scope
    keys.sort()
    return (keys // (scope * (longest + 1)) * scope + keys % scope).astype(np.int32)


def chunk_offsets(lengths: Array, height: int) -> Array:
    """Return where each chunk of ``height`` rows begins, in entries, padded to its longest row: int64, (chunks + 1,)."""
    xp, whole = _module(lengths), lengths.size // height
    offsets = xp.zeros(-(-lengths.size // height) + 1, dtype=np.int64)
    longest = offsets[1:]
    if whole:
        longest[:whole] = lengths[: whole * height].reshape(whole, height).max(axis=1)
    if whole < longest.size:
        longest[whole] = lengths[whole * height :].max()
    longest *= height
    xp.cumsum(longest, out=longest)
    return offsets


def chunks_of_slots(
    A: CsrMatrix, permutation: Array, offsets: Array, height: int, values_dtype: Any
) -> tuple[Array, Array]:
    """Return column indices and values of ``A`` in chunks of ``height`` interleaved rows, padded with -1 and 0.

    Entries past a chunk's width are left out. ``permutation`` may be empty: the natural order.
    """
    xp, rows, size = A.device.xp, A.shape[0], int(offsets[-1])
    column_indices, values = xp.full(size, -1, dtype=np.int32), xp.zeros(size, dtype=values_dtype)
    source, target = (A.row_offsets, A.column_indices, A.values), (permutation, offsets, column_indices, values)
    if A.device.kind == "cpu":
        _fill_slots(rows, height, wide_offsets(A.row_offsets), *source[1:], *target)
    else:
        names = type_names(values, A.values, A.row_offsets)
        function = CONVERSION_KERNELS.function(f"fill_slots<{names}>")
        scalars = (np.int64(rows), np.int64(height))
        launch(function, 8 * rows, 256, (*scalars, *source, np.int32(permutation.size > 0), *target))
    return column_indices, values


def chunks_of_blocks(
    A: CsrMatrix,
    size: int,
    permutation: Array,
    offsets: Array,
    height: int,
    values_dtype: Any,
    *,
    upper: int | None = None,
    through: Device | None = None,
) -> tuple[Array, Array]:
    """Return column indices and values of ``A`` in chunks of ``height`` interleaved block rows; a height of 1 is BSR.

    Blocks that hold any stored entry are stored whole, with zeros where nothing was stored; ``upper`` as for
    :func:`count_blocks`. ``through``: a GPU that converts a matrix of the host, in its order.
    """
    xp, blocks = A.device.xp, int(offsets[-1])
    if through is not None:
        targets = np.empty(blocks, dtype=np.int32), np.empty(blocks * size * size, dtype=values_dtype)
        fill_blocks_through(through, A, size, offsets, height, *targets, upper=upper)
        return targets
    column_indices = xp.full(blocks, -1, dtype=np.int32)
    values = xp.zeros(blocks * size * size, dtype=values_dtype)
    fill_blocks(A, size, permutation, offsets, height, column_indices, values, upper=upper)
    return column_indices, values


def fill_blocks(
    A: CsrMatrix,
    size: int,
    permutation: Array,
    offsets: Array,
    height: int,
    column_indices: Array,
    values: Array,
    *,
    upper: int | None = None,
) -> None:
    """Write the entries of ``A`` into chunks with room for its blocks, on its device; as :func:`chunks_of_blocks`."""
    block_rows, offsets = A.shape[0] // size, offsets.astype(np.int64, copy=False)
    source, target = (A.row_offsets, A.column_indices, A.values), (permutation, offsets, column_indices, values)
    if A.device.kind == "cpu":
        _fill_blocks(block_rows, size, first_kept(upper), height, wide_offsets(A.row_offsets), *source[1:], *target)
    else:
        launch_fill_blocks(block_rows, first_kept(upper), height, size, source, *target)


def fill_blocks_through(
    device: Device,
    A: CsrMatrix,
    size: int,
    offsets: Array,
    height: int,
    column_indices: Array | None,
    values: Array,
    *,
    upper: int | None = None,
) -> None:
    """Do what :func:`fill_blocks` does for a matrix on the host, in its order, on a GPU, perhaps for values only."""
    in_order = device.xp.empty(0, dtype=np.int32)

    def fill(rows: Rows, of_chunks: Array, arrays: Sequence[Array]) -> None:
        count, kept = (rows.row_offsets.size - 1) // size, first_kept(upper) + rows.first // size
        launch_fill_blocks(count, kept, height, size, rows[1:], in_order, of_chunks, *arrays)

    source = (A.row_offsets, A.column_indices, A.values)
    fill_through(device, source, height * size, offsets, (column_indices, values), fill)


def launch_fill_blocks(
    block_rows: int,
    kept: int,
    height: int,
    size: int,
    source: Sequence[Array],
    permutation: Array,
    offsets: Array,
    column_indices: Array,
    values: Array,
) -> None:
    """Launch what writes block rows of a sound matrix on a GPU, whose ``source`` arrays are CSR, into chunks.

    ``kept`` is the first block column that is stored, from :func:`first_kept`; the arrays hold -1 and 0 before.
    """
    names = type_names(values, source[2], source[0])
    function = CONVERSION_KERNELS.function(f"fill_blocks<{names}, {size}>")
    scalars, ordered = (np.int64(block_rows), np.int64(kept), np.int64(height)), np.int32(permutation.size > 0)
    launch(function, 8 * block_rows, 256, (*scalars, *source, ordered, permutation, offsets, column_indices, values))


def count_stored(column_indices: Array) -> int:
    """Return how many blocks are stored, padding left out."""
    if hasattr(column_indices, "get"):
        return count_true(column_indices >= 0)
    counts = np.zeros(-(-column_indices.size // _COUNTED_AT_ONCE), dtype=np.int64)
    _count_stored(counts.size, column_indices, counts)
    return int(counts.sum())


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

    The arrays are those of :func:`chunks_of_blocks`. Only blocks at most ``within`` block columns from the diagonal are
    returned.
    """
    xp = _module(offsets)
    entries = xp.flatnonzero(column_indices >= 0)
    chunks = xp.searchsorted(offsets, entries, side="right") - 1
    positions = chunks * height + entries % height
    block_rows = permutation[positions].astype(np.int64) if permutation.size else positions
    if within is not None:
        near = xp.abs(block_rows + first_block_row - column_indices[entries]) <= within
        entries, block_rows = entries[near], block_rows[near]
    # Consecutive scalars of a block are `height` apart, consecutive slots size * size * height.
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


def _module(array: Array) -> Any:
    if not hasattr(array, "get"):
        return np
    import cupy

    return cupy


@shared_range(least=4096)
def _fill_slots(
    begin: int,
    end: int,
    height: int,
    row_offsets: Array,
    source_columns: Array,
    source_values: Array,
    permutation: Array,
    offsets: Array,
    column_indices: Array,
    values: Array,
) -> None:
    for position in range(begin, end):
        row = np.int64(permutation[position]) if permutation.size else np.int64(position)
        base, stop = offsets[position // height] + position % height, offsets[position // height + 1]
        for entry in range(row_offsets[row], row_offsets[row + 1]):
            target = base + (entry - row_offsets[row]) * height
            if target < stop:
                column_indices[target] = source_columns[entry]
                values[target] = source_values[entry]


@shared_range(least=2048)
def _fill_blocks(
    begin: int,
    end: int,
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
    for position in range(begin, end):
        block_row = np.int64(permutation[position]) if permutation.size else np.int64(position)
        first, place = offsets[position // height], position % height
        entries = np.empty(size, dtype=np.int64)  # current entry of each scalar row
        for r in range(size):
            entries[r] = row_offsets[block_row * size + r]
        slot = 0
        while True:
            column = next_block(block_row, entries, row_offsets, source_columns)
            if column > INT32_MAX:
                break
            selected, left = column >= block_row + upper, column * size
            for r in range(size):
                entry, stop = entries[r], row_offsets[block_row * size + r + 1]
                start = first * (size * size) + ((slot * size + r) * size - left) * height + place
                while entry < stop and source_columns[entry] < left + size:
                    if selected:
                        values[start + source_columns[entry] * height] = source_values[entry]
                    entry += 1
                entries[r] = entry
            if selected:
                column_indices[first + slot * height + place] = column
                slot += 1


@shared_range(least=16)
def _count_stored(begin: int, end: int, column_indices: Array, counts: Array) -> None:
    for piece in range(begin, end):
        part, padding = column_indices[piece * _COUNTED_AT_ONCE : (piece + 1) * _COUNTED_AT_ONCE], 0
        for place in range(part.size):
            padding -= part[place] >> 31  # -1 for a negative index: compilers vectorise this, but no comparison
        counts[piece] = part.size - padding
