"""Consecutive rows of a sparse matrix of small dense blocks, on the host or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from penstock.spmv import Array, BsrMatrix, CsrMatrix, Device, SparseMatrix, device_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch, type_names
from penstock.spmv.compilation.jit import shared_range
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.formats.survey import CONVERSION_KERNELS

BLOCK_ROW_KERNELS = CudaSource("penstock.spmv.kernels", "block_rows.cu")

_THREADS = 256


class TransposedPattern(NamedTuple):
    """The pattern of a transpose, and the places of its blocks in the matrix that is transposed: int64."""

    order: Array
    offsets: Array
    columns: Array


@dataclass
class BlockRows:
    """Consecutive rows of a sparse matrix of blocks ``(count, height, width)``: int64 offsets from 0, ascending int32 columns."""

    start: int
    offsets: Array
    columns: Array
    blocks: Array
    width: int | None = None

    @property
    def stop(self) -> int:
        """The row after the last one."""
        return self.start + len(self.offsets) - 1

    @property
    def device(self) -> Device:
        """Where the arrays are."""
        return device_of(self.blocks)

    @cached_property
    def reach(self) -> tuple[int, int]:
        """The smallest and the largest column; without blocks ``(start, start - 1)``."""
        if not self.columns.size:
            return self.start, self.start - 1
        least, most = self.device.to_host(self.device.xp.stack([self.columns.min(), self.columns.max()])).tolist()
        return least, most

    def part(self, start: int, stop: int) -> BlockRows:
        """Return some of the rows, as views."""
        if (start, stop) == (self.start, self.stop):
            return self
        offsets = self.offsets[start - self.start : stop - self.start + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return BlockRows(start, offsets - first, self.columns[first:last], self.blocks[first:last])

    def transposed(self, columns: int, pattern: TransposedPattern | None = None) -> BlockRows:
        """Return the transpose; its columns are numbered from the first row of this one. ``pattern`` may be known."""
        if self.device.kind == "cpu":
            T = _in_scipy(self, columns).T
            T, blocks = T if T.format == "bsr" else T.tocsr(), (-1, *self.blocks.shape[:0:-1])
            offsets, indices = T.indptr.astype(np.int64), T.indices.astype(np.int32, copy=False)
            return BlockRows(0, offsets, indices, T.data.reshape(blocks), len(self.offsets) - 1)
        (count, tall, wide), pattern = self.blocks.shape, pattern or self.transposed_pattern(columns)
        blocks = self.device.xp.empty((count, wide, tall), dtype=self.blocks.dtype)
        function = BLOCK_ROW_KERNELS.function(f"transpose_blocks<{type_names(blocks)}>")
        arguments = (np.int64(blocks.size), np.int32(tall), np.int32(wide), pattern.order, self.blocks, blocks)
        launch(function, int(blocks.size), _THREADS, arguments)
        return BlockRows(0, pattern.offsets, pattern.columns, blocks, len(self.offsets) - 1)

    def transposed_pattern(self, columns: int) -> TransposedPattern:
        """Return the pattern of the transpose, on a GPU."""
        order, offsets = grouped(self.columns, columns)
        rows = device_of(self.columns).xp.empty(len(order), dtype=np.int32)
        arguments = (np.int64(len(order)), order, row_numbers(self.offsets, len(order)), rows)
        launch(BLOCK_ROW_KERNELS.function("order_rows"), len(order), _THREADS, arguments)
        return TransposedPattern(order, offsets, rows)

    @staticmethod
    def joined(parts: list[BlockRows], start: int) -> BlockRows:
        """Return ascending rows from ``start`` or earlier on as one; rows that no part has are empty."""
        following = min(start, parts[0].start)
        if len(parts) == 1 and parts[0].start == following:
            return parts[0]
        xp, counts, first = parts[0].device.xp, [], following
        for part in parts:
            counts += [xp.zeros(part.start - following, dtype=np.int64), xp.diff(part.offsets)]
            following = part.stop
        offsets = xp.concatenate([xp.zeros(1, dtype=np.int64), xp.cumsum(xp.concatenate(counts))])
        columns = xp.concatenate([part.columns for part in parts])
        return BlockRows(first, offsets, columns, xp.concatenate([part.blocks for part in parts]))


def block_rows(start: int, stop: int, rows: Array, columns: Array, blocks: Array, width: int) -> BlockRows:
    """Return rows ``start`` to ``stop`` from their blocks in any order; a matrix of ``width`` block columns."""
    xp = device_of(blocks).xp
    order = xp.argsort((rows - start) * np.int64(width) + columns)
    offsets = xp.searchsorted(rows[order], xp.arange(start, stop + 1)).astype(np.int64)
    return BlockRows(start, offsets, columns[order].astype(np.int32), xp.ascontiguousarray(blocks[order]))


def row_numbers(offsets: Array, entries: int) -> Array:
    """Return the row of every entry, from 0: int64."""
    numbers: Array = find_kernel("block_rows", "numbers", device_of(offsets).kind)(offsets, entries)
    return numbers


@register_kernel("block_rows", "numbers", "cpu")
def _numbers_cpu(offsets: Array, entries: int) -> Array:
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))[:entries]


@register_kernel("block_rows", "numbers", "cuda")
def _numbers_cuda(offsets: Array, entries: int) -> Array:
    numbers, wide = device_of(offsets).xp.empty(entries, dtype=np.int64), offsets.astype(np.int64, copy=False)
    arguments = (np.int64(entries), np.int64(len(offsets) - 1), wide, numbers)
    launch(BLOCK_ROW_KERNELS.function("number_rows"), entries, _THREADS, arguments)
    return numbers


def grouped(keys: Array, groups: int) -> tuple[Array, Array]:
    """Return the places of int32 keys from 0 to ``groups - 1`` in ascending order of the keys, and where each key begins there.

    Both int64, ``(len(keys),)`` and ``(groups + 1,)``; places of equal keys ascend.
    """
    order = device_of(keys).xp.argsort(keys, kind="stable")
    return order, find_kernel("block_rows", "begin_groups", device_of(keys).kind)(keys, order, groups)


@register_kernel("block_rows", "begin_groups", "cpu")
def _begin_groups_cpu(keys: Array, order: Array, groups: int) -> Array:
    return np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=groups))])


@register_kernel("block_rows", "begin_groups", "cuda")
def _begin_groups_cuda(keys: Array, order: Array, groups: int) -> Array:
    offsets = device_of(keys).xp.empty(groups + 1, dtype=np.int64)
    arguments = (np.int64(len(keys)), np.int64(groups), keys, order, offsets)
    launch(BLOCK_ROW_KERNELS.function("begin_groups"), groups + 1, _THREADS, arguments)
    return offsets


def both_halves(upper: BlockRows) -> BlockRows:
    """Return all rows of a symmetric matrix, in float64, from its blocks on the diagonal and right of it."""
    rows: BlockRows = find_kernel("block_rows", "mirror", upper.device.kind)(upper)
    return rows


@register_kernel("block_rows", "mirror", "cpu")
def _mirror_cpu(upper: BlockRows) -> BlockRows:
    rows, columns, count = row_numbers(upper.offsets, upper.columns.size), upper.columns, len(upper.offsets) - 1
    right = np.flatnonzero(columns > rows)
    rows, columns = np.concatenate([rows, columns[right]]), np.concatenate([columns, rows[right]])
    return block_rows(
        0, count, rows, columns, np.concatenate([upper.blocks, upper.blocks[right].swapaxes(1, 2)]), count
    )


@register_kernel("block_rows", "mirror", "cuda")
def _mirror_cuda(upper: BlockRows) -> BlockRows:
    xp, count, (_, size, _) = upper.device.xp, len(upper.offsets) - 1, upper.blocks.shape
    lower, offsets, kernel = upper.transposed(count), xp.zeros(count + 1, dtype=np.int64), BLOCK_ROW_KERNELS.function
    counted = (lower.offsets, lower.columns, upper.offsets, offsets[1:])
    launch(kernel("count_halves"), count, _THREADS, (np.int64(count), *counted))
    xp.cumsum(offsets, out=offsets)
    entries = int(offsets[-1])
    columns, blocks = xp.empty(entries, dtype=np.int32), xp.empty((entries, size, size))
    halves = (lower.offsets, lower.columns, lower.blocks, upper.offsets, upper.columns, upper.blocks)
    arguments = (np.int64(count), np.int32(size * size), *halves, offsets, columns, blocks)
    launch(kernel("join_halves"), 32 * count, _THREADS, arguments)
    return BlockRows(0, offsets, columns, blocks, count)


def rows_with_entries(offsets: Array) -> int:
    """Return how many rows have entries."""
    count: int = find_kernel("block_rows", "count_with_entries", device_of(offsets).kind)(offsets)
    return count


@register_kernel("block_rows", "count_with_entries", "cpu")
def _count_with_entries_cpu(offsets: Array) -> int:
    return int(np.count_nonzero(offsets[1:] != offsets[:-1]))


@register_kernel("block_rows", "count_with_entries", "cuda")
def _count_with_entries_cuda(offsets: Array) -> int:
    count = device_of(offsets).xp.zeros(1, dtype=np.int32)
    arguments = (np.int64(len(offsets) - 1), offsets, count)
    launch(BLOCK_ROW_KERNELS.function("count_rows_with_entries"), len(offsets) - 1, _THREADS, arguments)
    return int(count[0])


def replace_vanishing(A: BsrMatrix, sizes: Array, share: float) -> Array:
    """Set diagonal entries that are at most a ``share`` of ``sizes``, (n,), to these, in place, where their blocks are stored.

    Returns which entries it set: bool, (n,).
    """
    replaced: Array = find_kernel("block_rows", "replace_vanishing", A.device.kind)(A, sizes, share)
    return replaced


@register_kernel("block_rows", "replace_vanishing", "cpu")
def _replace_vanishing_cpu(A: BsrMatrix, sizes: Array, share: float) -> Array:
    size, diagonal = A.row_granularity, np.full(A.shape[0] // A.row_granularity, -1, dtype=np.int64)
    rows = row_numbers(A.row_offsets, A.column_indices.size)
    on_diagonal = np.flatnonzero(rows == A.column_indices)
    diagonal[rows[on_diagonal]] = on_diagonal
    unknowns = np.flatnonzero(np.repeat(diagonal, size) >= 0)
    places = diagonal[unknowns // size], unknowns % size, unknowns % size
    own, sizes, replaced = A.values[places], sizes[unknowns], np.zeros(A.shape[0], dtype=bool)
    vanishing = replaced[unknowns] = np.abs(own) <= share * sizes
    A.values[places] = np.where(vanishing, sizes, own)
    return replaced


@register_kernel("block_rows", "replace_vanishing", "cuda")
def _replace_vanishing_cuda(A: BsrMatrix, sizes: Array, share: float) -> Array:
    unknowns, arrays = A.shape[0], (A.row_offsets.astype(np.int64, copy=False), A.column_indices, A.values)
    replaced = A.device.xp.zeros(unknowns, dtype=bool)
    arguments = (np.int64(unknowns), np.int32(A.row_granularity), np.float64(share), sizes, *arrays, replaced)
    launch(BLOCK_ROW_KERNELS.function("replace_vanishing"), unknowns, _THREADS, arguments)
    return replaced


def csr_of(A: SparseMatrix) -> CsrMatrix:
    """Return a matrix of any format as CSR, on its device, for vectors of the same type; by way of the host."""
    scalars = A.to_csr()
    return CsrMatrix.from_csr(scalars.astype(A.dtype, copy=False), values_dtype=scalars.dtype).to_device(A.device)


def rows_of(A: BsrMatrix | CsrMatrix) -> BlockRows:
    """Return all rows of a matrix, sharing its arrays."""
    size, arrays = (A.row_granularity if isinstance(A, BsrMatrix) else 1), A.arrays()
    offsets = arrays["row_offsets"].astype(np.int64, copy=False)
    return BlockRows(0, offsets, arrays["column_indices"], A.values.reshape(-1, size, size), A.shape[1] // size)


def in_float64(rows: BlockRows) -> BlockRows:
    """Return rows with blocks of float64, which kernels read; they are shared if they are of that type."""
    return BlockRows(rows.start, rows.offsets, rows.columns, rows.blocks.astype(np.float64, copy=False), rows.width)


def _in_scipy(rows: BlockRows, columns: int) -> Any:
    """Return rows on the host as a SciPy matrix of ``columns`` columns of blocks, CSR of numbers or BSR, of the same entries."""
    tall, wide = rows.blocks.shape[1:]
    shape = ((len(rows.offsets) - 1) * tall, columns * wide)
    # With wide offsets SciPy would make the columns wide, too.
    offsets = rows.offsets.astype(np.int32 if rows.blocks.size < 1 << 31 else np.int64, copy=False)
    if tall == wide == 1:
        return scipy.sparse.csr_array((rows.blocks.reshape(-1), rows.columns, offsets), shape)
    return scipy.sparse.bsr_array((rows.blocks, rows.columns, offsets), shape)


def as_csr(rows: BlockRows, columns: int, dtype: Any = None) -> CsrMatrix:
    """Return all rows of a matrix of ``columns`` columns of blocks as CSR, for vectors of its own type or another."""
    dtype = rows.blocks.dtype if dtype is None else dtype
    xp, (tall, wide) = rows.device.xp, rows.blocks.shape[1:]
    height, width = (len(rows.offsets) - 1) * tall, columns * wide
    if tall == wide == 1:
        return _csr_of_arrays((height, width), dtype, rows.offsets, rows.columns, rows.blocks.reshape(-1))
    offsets = xp.zeros(height + 1, dtype=np.int64)
    counts = xp.diff(rows.offsets)[:, None]
    offsets[1:] = (rows.offsets[:-1, None] * tall + xp.arange(1, tall + 1) * counts).reshape(-1) * wide
    indices = xp.empty(rows.blocks.size, dtype=np.int32)
    values = xp.empty(rows.blocks.size, dtype=rows.blocks.dtype)
    find_kernel("block_rows", "scalars", rows.device.kind)(rows, indices, values)
    return _csr_of_arrays((height, width), dtype, offsets, indices, values)


@register_kernel("block_rows", "scalars", "cpu")
def _scalars_cpu(rows: BlockRows, indices: Array, values: Array) -> None:
    _fill_scalars(len(rows.offsets) - 1, rows.offsets, rows.columns, rows.blocks, indices, values)


@shared_range(least=1024)
def _fill_scalars(
    begin: int, end: int, offsets: Array, columns: Array, blocks: Array, indices: Array, values: Array
) -> None:
    height, width = blocks.shape[1], blocks.shape[2]
    for block_row in range(begin, end):
        following = offsets[block_row] * height * width
        for row in range(height):
            for block in range(offsets[block_row], offsets[block_row + 1]):
                for column in range(width):
                    indices[following] = columns[block] * width + column
                    values[following] = blocks[block, row, column]
                    following += 1


@register_kernel("block_rows", "scalars", "cuda")
def _scalars_cuda(rows: BlockRows, indices: Array, values: Array) -> None:
    block_rows, (height, width) = len(rows.offsets) - 1, rows.blocks.shape[1:]
    sizes = (np.int64(block_rows), np.int32(height), np.int32(width))
    arguments = (*sizes, rows.offsets, rows.columns, rows.blocks, indices, values)
    launch(CONVERSION_KERNELS.function(f"scalar_rows<{type_names(values)}>"), 32 * block_rows, 256, arguments)


def _csr_of_arrays(shape: tuple[int, int], dtype: Any, offsets: Array, columns: Array, values: Array) -> CsrMatrix:
    arrays = {"row_offsets": offsets, "column_indices": columns.astype(np.int32, copy=False), "values": values}
    return CsrMatrix.from_csr(CsrMatrix.from_arrays(shape, dtype, arrays, {}), strategy="auto")
