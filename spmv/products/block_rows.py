"""Consecutive rows of a sparse matrix of small dense blocks, on the host or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse

from penstock.spmv import Array, BsrMatrix, CsrMatrix, Device, SparseMatrix, device_of
from penstock.spmv.compilation.cuda_module import launch, type_names
from penstock.spmv.compilation.jit import shared_range
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.formats.survey import CONVERSION_KERNELS


@dataclass
class BlockRows:
    """Consecutive rows of a sparse matrix of blocks ``(count, height, width)``: int64 offsets, ascending int32 columns."""

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

    def transposed(self, columns: int) -> BlockRows:
        """Return the transpose; its columns are numbered from the first row of this one."""
        if self.device.kind == "cpu":
            T = _in_scipy(self, columns).T
            T, blocks = T if T.format == "bsr" else T.tocsr(), (-1, *self.blocks.shape[:0:-1])
            offsets, indices = T.indptr.astype(np.int64), T.indices.astype(np.int32, copy=False)
            return BlockRows(0, offsets, indices, T.data.reshape(blocks), len(self.offsets) - 1)
        xp = self.device.xp
        rows = row_numbers(self.offsets, self.columns.size)
        order = xp.argsort(self.columns, kind="stable")
        offsets = xp.searchsorted(self.columns[order], xp.arange(columns + 1)).astype(np.int64)
        blocks = xp.ascontiguousarray(self.blocks[order].swapaxes(1, 2))
        return BlockRows(0, offsets, rows[order].astype(np.int32), blocks, len(self.offsets) - 1)

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
    """Return the row of every entry, from 0."""
    xp = device_of(offsets).xp
    if xp is np:
        return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))[:entries]
    return xp.searchsorted(offsets, xp.arange(entries), side="right") - 1  # CuPy repeats by a list of the host only


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
