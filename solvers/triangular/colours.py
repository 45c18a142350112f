"""Greedy colouring of the rows of a symmetric pattern: no two rows of one colour have an entry in common."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.solvers.triangular.block_entries import ORDER_KERNELS, BlockEntries
from penstock.solvers.triangular.levels import POLLS, TRIANGLE_KERNELS, count_waits, dataflow_blocks
from penstock.spmv import CPU, Array, DeviceError, InputError, device_of
from penstock.spmv.compilation.cuda_module import launch
from penstock.spmv.compilation.jit import serial_kernel
from penstock.spmv.compilation.table import find_kernel, register_kernel

_TOO_MANY = 2


def colour_rows(entries: BlockEntries, kind: str) -> Array:
    """Return a colour for every row: the smallest that no earlier neighbour has (greedy colouring in the order of the rows).

    A 7-point stencil gets 2 colours, a 27-point one 8. A pattern that is not symmetric is refused, because then rows of one
    colour may need each other.
    """
    check_symmetric_pattern(entries, kind)
    colours: Array = find_kernel("triangle", "colours", kind)(entries)
    return colours


def check_symmetric_pattern(entries: BlockEntries, kind: str) -> None:
    """Refuse a matrix with an entry that has no mirror image; values are not compared."""
    bad = find_kernel("triangle", "unpaired", kind)(entries)
    if bad < entries.rows:
        raise InputError(
            f"row {bad * entries.size} has an entry without a mirror image: the pattern of the matrix is not symmetric"
        )


def order_by_colour(colours: Array, upper: bool) -> tuple[Array, Any]:
    """Return the rows by ascending colours, descending for ``upper``, and where each colour begins, on the host."""
    device = device_of(colours)
    if not colours.size:
        return colours, np.zeros(1, dtype=np.int64)
    last = int(colours.max())
    keys = last - colours if upper else colours
    order = device.xp.argsort(keys, kind="stable").astype(np.int32)
    levels = device.xp.searchsorted(keys[order], device.xp.arange(last + 2))
    return order, device.to_host(levels).astype(np.int64)


@register_kernel("triangle", "unpaired", "cpu")
def _unpaired_cpu(entries: BlockEntries) -> int:
    return int(_find_unpaired(entries.offsets, entries.columns))


@register_kernel("triangle", "unpaired", "cuda")
def _unpaired_cuda(entries: BlockEntries) -> int:
    first_bad = device_of(entries.values).xp.full(1, entries.rows, dtype=np.int32)
    arguments = (np.int32(entries.rows), entries.offsets, entries.columns, first_bad)
    launch(ORDER_KERNELS.function("find_unpaired"), entries.rows, 256, arguments)
    return int(first_bad[0])


@register_kernel("triangle", "colours", "cpu")
def _colours_cpu(entries: BlockEntries) -> Array:
    colours = np.empty(entries.rows, dtype=np.int32)
    _colour(entries.offsets, entries.columns, colours)
    return colours


@register_kernel("triangle", "colours", "cuda")
def _colours_cuda(entries: BlockEntries) -> Array:
    xp, rows = device_of(entries.values).xp, entries.rows
    waits = count_waits(entries, None, False, "cuda")
    offsets = xp.zeros(rows + 1, dtype=np.int32)
    xp.cumsum(waits.counts, out=offsets[1:])
    places = xp.empty(int(offsets[-1]), dtype=np.int32)
    find_kernel("triangle", "entries", "cuda")(entries, None, False, None, None, offsets, places, xp.empty_like(places))
    colours, ticket, failed = (xp.empty(count, dtype=np.int32) for count in (rows, 1, 1))
    lanes = 8 if places.size > 4 * rows else 1
    launch(TRIANGLE_KERNELS.function("forget<int>"), rows, 256, (np.int64(rows), colours, ticket, failed))
    function = TRIANGLE_KERNELS.function(f"colour_rows<{lanes}>")
    arguments = (np.int64(rows), offsets, places, colours, ticket, failed, np.int32(POLLS))
    if rows:
        function((dataflow_blocks(colours, rows * lanes),), (256,), arguments)
    if int(failed[0]) == _TOO_MANY:  # a lane's mask has one bit a colour
        offsets, columns, values = (CPU.asarray(array) for array in (entries.offsets, entries.columns, entries.values))
        host = BlockEntries(offsets, columns, values, entries.dtype)
        return device_of(entries.values).asarray(_colours_cpu(host))
    if int(failed[0]):
        raise DeviceError("the colouring of a matrix did not end on this GPU; pass order='levels'")
    return colours


@serial_kernel
def _colour(offsets: Array, columns: Array, colours: Array) -> None:
    rows, longest = offsets.shape[0] - 1, 0
    for row in range(rows):
        longest = max(longest, offsets[row + 1] - offsets[row])
    taken_by = np.full(longest + 2, -1, dtype=np.int32)
    for row in range(rows):
        for entry in range(offsets[row], offsets[row + 1]):
            if columns[entry] < row and colours[columns[entry]] <= longest:
                taken_by[colours[columns[entry]]] = row
        colour = 0
        while taken_by[colour] == row:
            colour += 1
        colours[row] = colour


@serial_kernel
def _find_unpaired(offsets: Array, columns: Array) -> int:
    rows = offsets.shape[0] - 1
    for row in range(rows):
        for entry in range(offsets[row], offsets[row + 1]):
            other = columns[entry]
            place = offsets[other] + np.searchsorted(columns[offsets[other] : offsets[other + 1]], row)
            if place == offsets[other + 1] or columns[place] != row:
                return int(row)
    return int(rows)
