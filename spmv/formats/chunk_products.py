"""Products of matrices in interleaved chunks, shared by SELL, ELL, sliced ELL and sliced BSR."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange

from penstock.spmv.compilation.chunk_size import scheduled
from penstock.spmv.compilation.cuda_module import CudaSource, launch, type_names
from penstock.spmv.compilation.intrinsics import fused
from penstock.spmv.compilation.jit import parallel_kernel, serial_kernel
from penstock.spmv.device import Array, address_of

SELL_KERNELS = CudaSource("penstock.spmv.kernels", "sell.cu")


@serial_kernel
def _add(total: float, columns: Array, values: Array, x: Array, entry: int) -> float:
    column = columns[entry]
    if column < 0:
        return total
    return total + np.float64(values[entry]) * np.float64(x[np.uint64(np.uint32(column))])


# Sums are scalars: an array of them would be loaded and stored at every entry. The more rows of a chunk are processed
# together, the longer the contiguous reads: with chunks of 32, sixteen rows at a time needed 4.6 ms, four needed 7.8.


@parallel_kernel
def spmv_strips_of_16(
    height: int,
    offsets: Array,
    columns: Array,
    values: Array,
    permutation: Array,
    x: Array,
    out: Array,
    alpha: float,
    beta: float,
) -> None:
    """Multiply a vector, sixteen rows at a time; no strip of sixteen may cross the end of a chunk."""
    for strip in prange((out.shape[0] + 15) // 16):
        first_position = 16 * strip
        chunk = first_position // height
        entry = np.uint64(offsets[chunk] + first_position % height)
        stop = np.uint64(offsets[chunk + 1])
        t0 = t1 = t2 = t3 = t4 = t5 = t6 = t7 = t8 = t9 = t10 = t11 = t12 = t13 = t14 = t15 = 0.0
        while entry < stop:
            t0 = _add(t0, columns, values, x, entry)
            t1 = _add(t1, columns, values, x, entry + np.uint64(1))
            t2 = _add(t2, columns, values, x, entry + np.uint64(2))
            t3 = _add(t3, columns, values, x, entry + np.uint64(3))
            t4 = _add(t4, columns, values, x, entry + np.uint64(4))
            t5 = _add(t5, columns, values, x, entry + np.uint64(5))
            t6 = _add(t6, columns, values, x, entry + np.uint64(6))
            t7 = _add(t7, columns, values, x, entry + np.uint64(7))
            t8 = _add(t8, columns, values, x, entry + np.uint64(8))
            t9 = _add(t9, columns, values, x, entry + np.uint64(9))
            t10 = _add(t10, columns, values, x, entry + np.uint64(10))
            t11 = _add(t11, columns, values, x, entry + np.uint64(11))
            t12 = _add(t12, columns, values, x, entry + np.uint64(12))
            t13 = _add(t13, columns, values, x, entry + np.uint64(13))
            t14 = _add(t14, columns, values, x, entry + np.uint64(14))
            t15 = _add(t15, columns, values, x, entry + np.uint64(15))
            entry += np.uint64(height)
        totals = (t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15)
        for i in range(min(16, out.shape[0] - first_position)):
            row = np.int64(permutation[first_position + i]) if permutation.size else np.int64(first_position + i)
            out[row] = alpha * totals[i] if beta == 0.0 else fused(beta, out[row], alpha * totals[i])


@parallel_kernel
def _spmv_strips_of_8(
    height: int,
    offsets: Array,
    columns: Array,
    values: Array,
    permutation: Array,
    x: Array,
    out: Array,
    alpha: float,
    beta: float,
) -> None:
    """Multiply a vector, eight rows at a time; they must divide the chunk height."""
    for strip in prange((out.shape[0] + 7) // 8):
        first_position = 8 * strip
        chunk = first_position // height
        entry = np.uint64(offsets[chunk] + first_position % height)
        stop = np.uint64(offsets[chunk + 1])
        t0 = t1 = t2 = t3 = t4 = t5 = t6 = t7 = 0.0
        while entry < stop:
            t0 = _add(t0, columns, values, x, entry)
            t1 = _add(t1, columns, values, x, entry + np.uint64(1))
            t2 = _add(t2, columns, values, x, entry + np.uint64(2))
            t3 = _add(t3, columns, values, x, entry + np.uint64(3))
            t4 = _add(t4, columns, values, x, entry + np.uint64(4))
            t5 = _add(t5, columns, values, x, entry + np.uint64(5))
            t6 = _add(t6, columns, values, x, entry + np.uint64(6))
            t7 = _add(t7, columns, values, x, entry + np.uint64(7))
            entry += np.uint64(height)
        totals = (t0, t1, t2, t3, t4, t5, t6, t7)
        for i in range(min(8, out.shape[0] - first_position)):
            row = np.int64(permutation[first_position + i]) if permutation.size else np.int64(first_position + i)
            out[row] = alpha * totals[i] if beta == 0.0 else fused(beta, out[row], alpha * totals[i])


@parallel_kernel
def spmv_rows(
    height: int,
    offsets: Array,
    columns: Array,
    values: Array,
    permutation: Array,
    x: Array,
    out: Array,
    alpha: float,
    beta: float,
) -> None:
    """Multiply a vector, one row at a time, for chunks of any height."""
    for position in prange(out.shape[0]):
        chunk, place = position // height, position % height
        total = 0.0
        for entry in range(offsets[chunk] + place, offsets[chunk + 1], height):
            column = columns[entry]
            if column >= 0:
                total += np.float64(values[entry]) * np.float64(x[np.uint64(np.uint32(column))])
        row = np.int64(permutation[position]) if permutation.size else np.int64(position)
        out[row] = alpha * total if beta == 0.0 else fused(beta, out[row], alpha * total)


@parallel_kernel
def multiply_block(
    height: int,
    offsets: Array,
    columns: Array,
    values: Array,
    permutation: Array,
    x: Array,
    out: Array,
    alpha: float,
    beta: float,
) -> None:
    """Multiply a C-ordered block of vectors."""
    for position in prange(out.shape[0]):
        chunk, place = position // height, position % height
        totals = np.zeros(out.shape[1])
        for entry in range(offsets[chunk] + place, offsets[chunk + 1], height):
            column = columns[entry]
            if column >= 0:
                value = np.float64(values[entry])
                for k in range(out.shape[1]):
                    totals[k] += value * np.float64(x[column, k])
        row = np.int64(permutation[position]) if permutation.size else np.int64(position)
        for k in range(out.shape[1]):
            out[row, k] = alpha * totals[k] if beta == 0.0 else fused(beta, out[row, k], alpha * totals[k])


def multiply_chunks(
    height: int,
    offsets: Array,
    columns: Array,
    values: Array,
    permutation: Array,
    x: Array,
    out: Array,
    alpha: float,
    beta: float,
    *,
    at_once: int,
) -> None:
    """Multiply a vector on the CPU; threads fetch ``at_once`` rows at a time, or equal shares for 0."""
    strips = {16: spmv_strips_of_16, 8: _spmv_strips_of_8, 1: spmv_rows}
    rows, product = next((rows, strips[rows]) for rows in strips if height % rows == 0)
    with scheduled(-(-at_once // rows)):
        product(height, offsets, columns, values, permutation, x, out, alpha, beta)


def stored(A: Any) -> tuple[Any, ...]:
    """Return the arguments of the kernels of sell.cu that describe a matrix in chunks."""
    return A.chunk_offsets, A.column_indices, A.values, np.int32(A.permutation.size > 0), A.permutation


#: Slots loaded before the first is used, by block size; measured on an H200, where 6 to 14 scalars are equally fast.
_BATCHES = {1: 9, 2: 3}


def spmv_expression(types: str, size: int) -> str:
    """Return the instantiation of ``sell_spmv`` for blocks of a size."""
    return f"sell_spmv<{types}, {size}, {_BATCHES.get(size, 1)}>"


def launch_spmv(A: Any, rows: int, height: int, size: int, x: Array, out: Array, alpha: float, beta: float) -> None:
    """Run ``sell_spmv`` for ``rows`` (block) rows in chunks of ``height`` rows of ``size`` x ``size`` blocks."""
    function = SELL_KERNELS.function(spmv_expression(type_names(A.values, x), size))
    sizes = (np.int64(rows), np.int32(height))
    launch(function, rows, 128, (*sizes, *stored(A), x, out, np.float64(alpha), np.float64(beta)))


def launch_spmm(A: Any, rows: int, height: int, size: int, x: Array, out: Array, alpha: float, beta: float) -> None:
    """Multiply a block of vectors, with kernels for 32, 16, 8, 4 and 2 columns and a general one for the rest."""
    types, columns = type_names(A.values, x), out.shape[1]
    factors = (np.float64(alpha), np.float64(beta))
    first = 0
    if _in_packs(x) and _in_packs(out):
        for width in (32, 16, 8, 4, 2):
            tile = spmm_tile(size, width, A.values.dtype.itemsize, x.dtype.itemsize)
            if columns - first < width or height % tile.group_rows(width):
                continue
            plain = height == 32 and width == columns
            function = SELL_KERNELS.function(tile.expression(types, size, width, plain))
            groups = -(-rows // tile.group_rows(width))
            while columns - first >= width:
                sizes = (np.int64(rows), np.int32(height), np.int64(first), np.int64(columns))
                launch(function, 32 * groups, tile.threads, (*sizes, *stored(A), x, out, *factors))
                first += width
    left = columns - first
    if left == 0:
        return
    function = SELL_KERNELS.function(f"sell_spmm_any<{types}, {size}>")
    rest = (np.int64(rows), np.int32(height), np.int64(left), np.int64(first), np.int64(columns))
    launch(function, rows * left, 256, (*rest, *stored(A), x, out, *factors))


def _in_packs(vectors: Array) -> bool:
    """Return whether every row begins at a multiple of 16 bytes."""
    return bool(address_of(vectors) % 16 == 0 and vectors.strides[0] % 16 == 0)


@dataclass(frozen=True)
class SpmmTile:
    """Template parameters of ``sell_spmm``, explained there."""

    vectors: int
    rows_per_lane: int
    slots: int
    stages: int
    threads: int

    def group_rows(self, columns: int) -> int:
        """Return the rows that 32 lanes process."""
        return 32 // (columns // self.vectors) * self.rows_per_lane

    def expression(self, types: str, size: int, columns: int, plain: bool) -> str:
        """Return the instantiation; ``plain`` for chunks of 32 rows and exactly ``columns`` columns."""
        numbers = (size, columns, self.vectors, self.rows_per_lane, self.slots, self.stages, self.threads)
        return f"sell_spmm<{types}, {', '.join(map(str, numbers))}, {str(plain).lower()}>"


_SHARED_NBYTES = 48 << 10


@functools.cache
def spmm_tile(size: int, columns: int, value_itemsize: int, vector_itemsize: int) -> SpmmTile:
    """Choose the tile for a block size and a number of columns; measured on an H200 for sizes 1 and 3, 16 and 32 columns.

    With scalars, lanes load whole lines of x for several rows at once. With blocks, each value read from shared memory
    serves four columns per lane. The block of threads is the largest whose stages fit 48 KiB.
    """
    pack = 16 // vector_itemsize
    vectors = min(columns, pack if size == 1 or size > 4 else max(pack, 4))
    groups = 32 // (columns // vectors)
    rows_per_lane = max(1, min(4, 32 // groups)) if size == 1 else 1
    slots, stages = (3 if size == 1 else 2 if size <= 3 else 1), 3
    stage_nbytes = slots * groups * rows_per_lane * (size * size * value_itemsize + 4)
    largest = 128 if size == 1 else 256
    fitting = [threads for threads in (largest, 128, 64, 32) if threads // 32 * stages * stage_nbytes <= _SHARED_NBYTES]
    if not fitting:
        stages, fitting = 2, [32]
    return SpmmTile(vectors, rows_per_lane, slots, stages, fitting[0])
