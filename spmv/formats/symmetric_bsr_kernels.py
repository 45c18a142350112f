"""CPU kernels of symmetric BSR."""

from __future__ import annotations

import numpy as np
from numba import prange

from penstock.spmv.compilation.intrinsics import (
    WIDTH,
    add_triples,
    consecutive,
    load,
    load_triples,
    multiply,
    multiply_add,
    prefetch,
    store,
)
from penstock.spmv.compilation.jit import embedded_kernel, parallel_kernel, serial_kernel, shared_range
from penstock.spmv.device import Array
from penstock.spmv.formats.sliced_bsr import HEIGHT, gather_rows

# Each part of the work owns consecutive chunks and writes to its own rows. Contributions to rows below them are collected in
# an overflow of its own, as long as the bandwidth of the matrix, and added at the end, part after part: so the bits depend
# only on the number of parts. No part follows the last one, so its overflow stays empty.
_NOWHERE = np.iinfo(np.int32).max


def find_reach(parts: int, first_row: int, block_rows: int, offsets: Array, columns: Array) -> tuple[Array, Array]:
    """Return the first block row below each part, and the number of block rows below it that the part adds to."""
    ends, reach = np.full(parts, _NOWHERE, dtype=np.int64), np.zeros(parts, dtype=np.int64)
    if parts > 1:
        _find_reach(parts - 1, first_row, block_rows, offsets, columns, ends, reach)
    return ends, reach


@shared_range(least=1)
def _find_reach(
    begin: int, end: int, first_row: int, block_rows: int, offsets: Array, columns: Array, ends: Array, reach: Array
) -> None:
    chunks, parts = offsets.shape[0] - 1, ends.shape[0]
    for part in range(begin, end):
        last = chunks * (part + 1) // parts
        ends[part] = first_row + min(last * HEIGHT, block_rows)
        for block in range(offsets[chunks * part // parts], offsets[last]):
            reach[part] = max(reach[part], np.int64(columns[block]) + 1 - ends[part])


# How far ahead scalars are prefetched. Of 1 to 14 slots, three was best. Without prefetching, a product with 110 MB on two
# cores needed 6.6 ms instead of 3.0, and slab by slab 9.6 instead of 3.5: the lines of a slot are not read in order.
_SLOTS_AHEAD = 3
assert HEIGHT == 32 and HEIGHT % WIDTH == 0, "the products with three unknowns per node depend on it"  # noqa: PT018


# Three unknowns per node. A block is read into registers once and multiplied both ways. Neighbouring nodes mostly have
# consecutive neighbours; WIDTH rows are then processed together. ``below`` collects contributions to rows from ``end`` on.
#
# Arrays have one dimension and so one pointer: with two, the compiler keeps one for each scalar of a block, more than there
# are registers. Sums are completed before a branch: a multiplication that the compiler moves out of a branch is no longer fused
# with its addition, and Numba optimises code from its cache once more than code that it has just compiled.
@embedded_kernel
def _multiply_rows_3(
    p: int, row: int, k: int, a: Array, own: Array, total: Array, x: Array, out: Array, below: Array, end: int
) -> None:
    """Multiply the blocks of rows p to p + WIDTH of a chunk both ways; their columns follow k."""
    x0, x1, x2 = load_triples(x, 3 * k)
    a00, a01, a02 = load(a, p), load(a, p + 32), load(a, p + 64)
    a10, a11, a12 = load(a, p + 96), load(a, p + 128), load(a, p + 160)
    a20, a21, a22 = load(a, p + 192), load(a, p + 224), load(a, p + 256)
    total0, total1, total2 = load(total, p), load(total, p + 32), load(total, p + 64)
    store(total, p, multiply_add(a02, x2, multiply_add(a01, x1, multiply_add(a00, x0, total0))))
    store(total, p + 32, multiply_add(a12, x2, multiply_add(a11, x1, multiply_add(a10, x0, total1))))
    store(total, p + 64, multiply_add(a22, x2, multiply_add(a21, x1, multiply_add(a20, x0, total2))))
    if k > row:
        x0, x1, x2 = load(own, p), load(own, p + 32), load(own, p + 64)
        t0 = multiply_add(a20, x2, multiply_add(a10, x1, multiply(a00, x0)))
        t1 = multiply_add(a21, x2, multiply_add(a11, x1, multiply(a01, x0)))
        t2 = multiply_add(a22, x2, multiply_add(a12, x1, multiply(a02, x0)))
        if k < end:
            add_triples(out, 3 * k, t0, t1, t2)
        else:
            add_triples(below, 3 * (k - end), t0, t1, t2)


@embedded_kernel
def _multiply_row_3(
    p: int, row: int, k: int, a: Array, own: Array, total: Array, x: Array, out: Array, below: Array, end: int
) -> None:
    """Multiply the block of row p of a chunk both ways; its column is k."""
    x0, x1, x2 = np.float64(x[3 * k]), np.float64(x[3 * k + 1]), np.float64(x[3 * k + 2])
    a00, a01, a02 = np.float64(a[p]), np.float64(a[p + 32]), np.float64(a[p + 64])
    a10, a11, a12 = np.float64(a[p + 96]), np.float64(a[p + 128]), np.float64(a[p + 160])
    a20, a21, a22 = np.float64(a[p + 192]), np.float64(a[p + 224]), np.float64(a[p + 256])
    total[p] = total[p] + a00 * x0 + a01 * x1 + a02 * x2
    total[p + 32] = total[p + 32] + a10 * x0 + a11 * x1 + a12 * x2
    total[p + 64] = total[p + 64] + a20 * x0 + a21 * x1 + a22 * x2
    if k > row:
        x0, x1, x2 = own[p], own[p + 32], own[p + 64]
        t0 = a00 * x0 + a10 * x1 + a20 * x2
        t1 = a01 * x0 + a11 * x1 + a21 * x2
        t2 = a02 * x0 + a12 * x1 + a22 * x2
        if k < end:
            out[3 * k] += t0
            out[3 * k + 1] += t1
            out[3 * k + 2] += t2
        else:
            below[3 * (k - end)] += t0
            below[3 * (k - end) + 1] += t1
            below[3 * (k - end) + 2] += t2


@serial_kernel
def _multiply_chunks_3(
    first_chunk: int,
    stop_chunk: int,
    first_row: int,
    block_rows: int,
    end: int,
    below: Array,
    offsets: Array,
    columns: Array,
    values: Array,
    x: Array,
    out: Array,
    alpha: float,
) -> None:
    own, total = np.empty(96), np.empty(96)
    for chunk in range(first_chunk, stop_chunk):
        rows, row = min(HEIGHT, block_rows - chunk * HEIGHT), first_row + chunk * HEIGHT
        total[:] = 0.0
        for p in range(rows):
            for r in range(3):
                own[32 * r + p] = alpha * x[(row + p) * 3 + r]
        for block in range(offsets[chunk], offsets[chunk + 1], HEIGHT):
            column = columns[block : block + HEIGHT]
            a = values[block * 9 : (block + HEIGHT) * 9]
            for first in range(0, rows, WIDTH):
                last, k = min(first + WIDTH, rows), np.int64(column[first])
                for p in range(first, first + WIDTH):
                    prefetch(a, (_SLOTS_AHEAD * HEIGHT + p) * 9)
                same_part = k >= end or k + WIDTH <= end
                if last == first + WIDTH and k >= 0 and same_part and consecutive(column, first):
                    _multiply_rows_3(first, row + first, k, a, own, total, x, out, below, end)
                    continue
                for p in range(first, last):
                    if column[p] >= 0:
                        _multiply_row_3(p, row + p, np.int64(column[p]), a, own, total, x, out, below, end)
        for p in range(rows):
            for r in range(3):
                out[(row + p) * 3 + r] += alpha * total[32 * r + p]


@parallel_kernel
def _multiply_vector_3(
    first_row: int,
    block_rows: int,
    ends: Array,
    reach: Array,
    overflow: Array,
    offsets: Array,
    columns: Array,
    values: Array,
    x: Array,
    out: Array,
    alpha: float,
) -> None:
    chunks, parts = offsets.shape[0] - 1, ends.shape[0]
    for part in prange(parts):
        below = overflow[part]
        for i in range(3 * reach[part]):
            below[i] = 0.0
        first, stop = chunks * part // parts, chunks * (part + 1) // parts
        _multiply_chunks_3(
            first, stop, first_row, block_rows, ends[part], below, offsets, columns, values, x, out, alpha
        )


# Of values of 16 bits, which are multiples of a power of two of their block: that power by its exponent, that of a float.
BIAS = 127
_POWERS = 2.0 ** (np.arange(256) - BIAS)


@parallel_kernel
def _multiply_vector_any(
    size: int,
    first_row: int,
    block_rows: int,
    ends: Array,
    reach: Array,
    overflow: Array,
    offsets: Array,
    columns: Array,
    values: Array,
    exponents: Array,
    x: Array,
    out: Array,
    alpha: float,
) -> None:
    chunks, parts = offsets.shape[0] - 1, ends.shape[0]
    for part in prange(parts):
        end = ends[part] * size
        for row in range(size * reach[part]):
            overflow[part, row] = 0.0
        total, below = np.empty((size, HEIGHT)), np.empty((size, HEIGHT))
        own, gathered, scale = np.zeros((size, HEIGHT)), np.empty((size, HEIGHT)), np.ones(HEIGHT)
        for chunk in range(chunks * part // parts, chunks * (part + 1) // parts):
            rows, row = min(HEIGHT, block_rows - chunk * HEIGHT), first_row + chunk * HEIGHT
            total[:] = 0.0
            for p in range(rows):
                for r in range(size):
                    own[r, p] = x[(row + p) * size + r]
            for block in range(offsets[chunk], offsets[chunk + 1], HEIGHT):
                column = columns[block : block + HEIGHT]
                scalars = values[block * size * size : (block + HEIGHT) * size * size]
                gather_rows(size, column, x, gathered)
                if exponents.size > 0:
                    for p in range(HEIGHT):
                        scale[p] = _POWERS[exponents[block + p]]
                below[:] = 0.0
                for r in range(size):
                    for c in range(size):
                        for p in range(HEIGHT):
                            value = scale[p] * np.float64(scalars[(r * size + c) * HEIGHT + p])
                            total[r, p] += value * gathered[c, p]
                            below[c, p] += value * own[r, p]
                for p in range(rows):
                    if column[p] > row + p:
                        for c in range(size):
                            j = np.int64(column[p]) * size + c
                            if j < end:
                                out[j] += alpha * below[c, p]
                            else:
                                overflow[part, j - end] += alpha * below[c, p]
            for p in range(rows):
                for r in range(size):
                    out[(row + p) * size + r] += alpha * total[r, p]


@parallel_kernel
def _multiply_block(
    size: int,
    first_row: int,
    block_rows: int,
    ends: Array,
    reach: Array,
    overflow: Array,
    offsets: Array,
    columns: Array,
    values: Array,
    exponents: Array,
    x: Array,
    out: Array,
    alpha: float,
) -> None:
    chunks, parts = offsets.shape[0] - 1, ends.shape[0]
    for part in prange(parts):
        end = ends[part] * size
        for row in range(size * reach[part]):
            overflow[part, row] = 0.0
        for chunk in range(chunks * part // parts, chunks * (part + 1) // parts):
            for place in range(min(HEIGHT, block_rows - chunk * HEIGHT)):
                row = first_row + chunk * HEIGHT + place
                for block in range(offsets[chunk], offsets[chunk + 1], HEIGHT):
                    column = np.int64(columns[block + place])
                    if column < 0:
                        break
                    scale = alpha
                    if exponents.size > 0:
                        scale *= _POWERS[exponents[block + place]]
                    for r in range(size):
                        for c in range(size):
                            i, j = row * size + r, column * size + c
                            value = scale * np.float64(values[block * size * size + (r * size + c) * HEIGHT + place])
                            for k in range(x.shape[1]):
                                out[i, k] += value * np.float64(x[j, k])
                            if column > row and j < end:
                                for k in range(x.shape[1]):
                                    out[j, k] += value * np.float64(x[i, k])
                            elif column > row:
                                for k in range(x.shape[1]):
                                    overflow[part, j - end, k] += value * np.float64(x[i, k])


@parallel_kernel
def _add_corrections(first_row: int, corrections: Array, x: Array, out: Array, alpha: float) -> None:
    """Add products with blocks on the diagonal."""
    for block in prange(corrections.shape[0]):
        start = (first_row + block) * corrections.shape[1]
        for r in range(corrections.shape[1]):
            for c in range(corrections.shape[1]):
                value = alpha * np.float64(corrections[block, r, c])
                for k in range(x.shape[1]):
                    out[start + r, k] += value * np.float64(x[start + c, k])
