"""CPU kernels of CSR."""

from __future__ import annotations

import numpy as np
from numba import prange

from penstock.spmv.compilation.intrinsics import fused
from penstock.spmv.compilation.jit import parallel_kernel, serial_and_parallel, shared_range
from penstock.spmv.device import Array

# Column indices are made unsigned, which avoids the wrap-around test for negative ones.


@serial_and_parallel
def _spmv(
    row_offsets: Array, column_indices: Array, values: Array, x: Array, out: Array, alpha: float, beta: float
) -> None:
    # Four sums at a time: a single one would wait for each addition to end.
    for row in prange(out.shape[0]):
        entry, stop = np.uint64(row_offsets[row]), np.uint64(row_offsets[row + 1])
        t0 = t1 = t2 = t3 = 0.0
        while entry + np.uint64(4) <= stop:
            c0, c1 = (
                np.uint64(np.uint32(column_indices[entry])),
                np.uint64(np.uint32(column_indices[entry + np.uint64(1)])),
            )
            c2 = np.uint64(np.uint32(column_indices[entry + np.uint64(2)]))
            c3 = np.uint64(np.uint32(column_indices[entry + np.uint64(3)]))
            t0 += np.float64(values[entry]) * np.float64(x[c0])
            t1 += np.float64(values[entry + np.uint64(1)]) * np.float64(x[c1])
            t2 += np.float64(values[entry + np.uint64(2)]) * np.float64(x[c2])
            t3 += np.float64(values[entry + np.uint64(3)]) * np.float64(x[c3])
            entry += np.uint64(4)
        while entry < stop:
            t0 += np.float64(values[entry]) * np.float64(x[np.uint64(np.uint32(column_indices[entry]))])
            entry += np.uint64(1)
        total = (t0 + t1) + (t2 + t3)
        if beta == 0.0:
            out[row] = alpha * total
        else:
            out[row] = fused(beta, out[row], alpha * total)


@parallel_kernel
def _spmm(
    row_offsets: Array, column_indices: Array, values: Array, x: Array, out: Array, alpha: float, beta: float
) -> None:
    columns = out.shape[1]
    for row in prange(out.shape[0]):
        # Four columns at a time keep their sums in registers; the last group may hold fewer.
        for first in range(0, columns, 4):
            width = min(4, columns - first)
            second, third, fourth = first + min(1, width - 1), first + min(2, width - 1), first + width - 1
            t0 = t1 = t2 = t3 = 0.0
            for entry in range(row_offsets[row], row_offsets[row + 1]):
                value = np.float64(values[entry])
                column = np.uint64(np.uint32(column_indices[entry]))
                t0 += value * np.float64(x[column, first])
                t1 += value * np.float64(x[column, second])
                t2 += value * np.float64(x[column, third])
                t3 += value * np.float64(x[column, fourth])
            for c in range(width):
                total = t0 if c == 0 else (t3 if c == width - 1 else (t1 if c == 1 else t2))
                if beta == 0.0:
                    out[row, first + c] = alpha * total
                else:
                    out[row, first + c] = fused(beta, out[row, first + c], alpha * total)


@shared_range(least=4096)
def _diagonal_blocks(
    begin: int, end: int, row_offsets: Array, column_indices: Array, values: Array, first_row: int, blocks: Array
) -> None:
    size = blocks.shape[1]
    for row in range(begin, end):
        block, r = divmod(first_row + row, size)
        for entry in range(row_offsets[row], row_offsets[row + 1]):
            c = column_indices[entry] - block * size
            if 0 <= c < size:
                blocks[block, r, c] = values[entry]
