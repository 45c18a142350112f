"""Greedy colouring of the rows of a symmetric pattern: no two rows of one colour have an entry in common."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.solvers.triangular.block_entries import BlockEntries
from penstock.solvers.triangular.levels import POLLS, count_waits, dataflow_blocks
from penstock.spmv import CPU, Array, DeviceError, InputError, device_of
from penstock.spmv.compilation.cuda_module import cuda_function, launch
from penstock.spmv.compilation.jit import serial_kernel
from penstock.spmv.compilation.table import find_kernel, register_kernel

__all__ = ["colour_rows", "order_by_colour"]

_MOST_ON_GPU, _TOO_MANY = 64, 2


def colour_rows(entries: BlockEntries, kind: str) -> Array:
    """Return a colour for every row: the smallest that no earlier neighbour has (greedy colouring in the order of the rows).

    A 7-point stencil gets 2 colours, a 27-point one 8.

    Returns
    -------
    int32 array, (rows,)

    Raises
    ------
    InputError
        If the pattern is not symmetric, so that rows of one colour may need each other.
    """
    colours = find_kernel("triangle", "colours", kind)(entries)
    lower, upper = (count_waits(entries, colours, upper, kind) for upper in (False, True))
    off_diagonal = len(entries.columns) - int((lower.diagonal >= 0).sum())
    if int(lower.counts.sum()) + int(upper.counts.sum()) != off_diagonal:
        raise InputError(
            "the pattern of the matrix is not symmetric, which an order by colours needs; use order='levels'"
        )
    return colours


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
    failed[0] = 0
    lanes = 8 if places.size > 4 * rows else 1
    launch(cuda_function("triangular.cu", "forget<int>"), rows, 256, (np.int64(rows), colours, ticket))
    function = cuda_function("triangular.cu", f"colour_rows<{lanes}>")
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
