"""The pattern of an incomplete Cholesky factor, and its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.solvers.triangular.block_entries import BlockEntries
from penstock.solvers.triangular.levels import POLLS, count_waits, dataflow_blocks, find_levels
from penstock.spmv import Array, DeviceError, InputError, device_of
from penstock.spmv.compilation.cuda_module import CudaSource
from penstock.spmv.compilation.jit import serial_kernel
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.formats.limits import INT32_MAX
from penstock.spmv.products.block_rows import BlockRows, row_numbers

CHOLESKY_KERNELS = CudaSource("penstock.solvers.kernels", "incomplete_cholesky.cu")

# A pivot below this share of its diagonal entry counts as a breakdown.
_SMALLEST_PIVOT = 1e-8


@dataclass(frozen=True)
class Factor:
    """The pattern of a lower triangle, and where its entries come from."""

    offsets: Array  # int32, (rows + 1,)
    columns: Array  # int32, (entries,), ascending; the last of every row is its diagonal
    sources: Array  # int64, (entries,): where an entry stands in the matrix; -1 where elimination fills in
    order: Array | None = None  # int32, (rows,): the rows by levels, for a GPU; None: ascending


def lower_pattern(entries: BlockEntries, fill: int, kind: str) -> Factor:
    """Return the pattern of the lower triangle of a matrix, for ``fill`` 1 with the entries that pairs of its entries fill.

    A missing diagonal entry and more than 2**31 - 1 entries are refused.
    """
    xp, n = device_of(entries.values).xp, entries.rows
    waits = count_waits(entries, None, False, kind)
    if waits.missing < n:
        raise InputError(
            f"row {waits.missing * entries.size} has no diagonal entry, so the matrix is not positive definite"
        )
    rows = row_numbers(entries.offsets, len(entries.columns))
    sources = xp.flatnonzero(entries.columns <= rows)
    keys = rows[sources] * np.int64(n) + entries.columns[sources]
    if fill:
        strict = sources[entries.columns[sources] < rows[sources]]
        offsets = xp.searchsorted(rows[strict], xp.arange(n + 1)).astype(np.int64)
        S = BlockRows(0, offsets, entries.columns[strict], entries.values[strict])
        of_product, columns = find_kernel("block_rows", "pattern", kind)(S, S.transposed(n), n)
        row = row_numbers(of_product, columns.size)
        lower = columns < row
        filled = xp.unique(xp.concatenate([keys, row[lower] * np.int64(n) + columns[lower]]))
        place = xp.searchsorted(keys, filled)
        known = keys[xp.minimum(place, keys.size - 1)] == filled
        keys, sources = filled, xp.where(known, sources[xp.minimum(place, keys.size - 1)], -1)
    if keys.size > INT32_MAX:
        raise InputError(
            f"the factor would have {keys.size} entries, more than {INT32_MAX}; pass fill=0 or store A in blocks"
        )
    offsets = xp.searchsorted(keys, xp.arange(n + 1, dtype=np.int64) * n).astype(np.int32)
    columns = (keys % n).astype(np.int32)
    return Factor(offsets, columns, sources.astype(np.int64), _order(offsets, columns) if kind == "cuda" else None)


def _order(offsets: Array, columns: Array) -> Array | None:
    """Return the rows of a lower triangle by levels, unless these are narrow chains."""
    rows, xp = len(offsets) - 1, device_of(offsets).xp
    none = xp.empty((0, 1, 1))
    lower = BlockEntries(offsets.astype(np.int64), columns, none, np.dtype(np.float64))
    levels = find_levels(lower, False, count_waits(lower, None, False, "cuda"), max(1, rows // 32), "cuda")
    return None if levels is None else levels[0]


def factored(pattern: Factor, entries: BlockEntries, shift: float, kind: str) -> tuple[BlockEntries, int]:
    """Return L, and the first row whose pivot is not positive, or the number of rows; diagonals are scaled by ``1 + shift``."""
    xp, size = device_of(entries.values).xp, entries.size
    values = xp.where((pattern.sources >= 0)[:, None, None], entries.values[pattern.sources], 0.0).astype(np.float64)
    own = pattern.offsets[1:].astype(np.int64) - 1
    for i in range(size):
        values[own, i, i] *= 1.0 + shift
    bad = find_kernel("triangle", "factor", kind)(pattern, values) if entries.rows else 0
    stored = values.astype(entries.values.dtype)
    return BlockEntries(pattern.offsets.astype(np.int64), pattern.columns, stored, entries.dtype), bad


@register_kernel("triangle", "factor", "cpu")
def _factor_cpu(pattern: Factor, values: Array) -> int:
    return int(_factor(pattern.offsets, pattern.columns, values, _SMALLEST_PIVOT))


@register_kernel("triangle", "factor", "cuda")
def _factor_cuda(pattern: Factor, values: Array) -> int:
    xp, rows = device_of(values).xp, len(pattern.offsets) - 1
    done, ticket, failed = (xp.zeros(count, dtype=np.int32) for count in (rows, 1, 1))
    first_bad = xp.full(1, rows, dtype=np.int32)
    arguments: tuple[Any, ...] = (np.int32(rows), pattern.offsets, pattern.columns, pattern.order, values)
    arguments += (np.float64(_SMALLEST_PIVOT), done, ticket, first_bad, failed, np.int32(POLLS))
    function = CHOLESKY_KERNELS.function(f"factor_rows<{values.shape[1]}>")
    function((dataflow_blocks(values, 32 * rows, 2),), (256,), arguments)
    if int(failed[0]):
        raise DeviceError("the factorisation did not end on this GPU; factor the matrix on the CPU")
    return int(first_bad[0])


@serial_kernel
def _factor(offsets: Array, columns: Array, values: Array, smallest: float) -> int:
    rows, size = offsets.shape[0] - 1, values.shape[1]
    place_of = np.full(rows, -1, dtype=np.int64)
    square, bad = np.empty((size, size)), rows
    for row in range(rows):
        own = offsets[row + 1] - 1
        square[:] = 0.0
        for entry in range(offsets[row], own):
            other = columns[entry]
            diagonal = offsets[other + 1] - 1
            block, pivot = values[entry], values[diagonal]
            for place in range(offsets[other], diagonal):
                mine = place_of[columns[place]]
                if mine >= offsets[row]:
                    for i in range(size):
                        for j in range(size):
                            for k in range(size):
                                block[i, j] -= values[mine, i, k] * values[place, j, k]
            for i in range(size):
                for j in range(size):
                    for k in range(j):
                        block[i, j] -= block[i, k] * pivot[j, k]
                    block[i, j] /= pivot[j, j]
            for i in range(size):
                for j in range(size):
                    for k in range(size):
                        square[i, j] += block[i, k] * block[j, k]
            place_of[other] = entry
        block = values[own]
        for j in range(size):
            before = block[j, j]
            total = before - square[j, j]
            for k in range(j):
                total -= block[j, k] * block[j, k]
            if not (total > smallest * before and total < np.inf):
                bad, total = min(bad, row), 1.0
            block[j, j] = np.sqrt(total)
            for i in range(j + 1, size):
                below = block[i, j] - square[i, j]
                for k in range(j):
                    below -= block[i, k] * block[j, k]
                block[i, j] = below / block[j, j]
                block[j, i] = 0.0
    return int(bad)
