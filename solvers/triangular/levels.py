"""Which rows of a triangle wait for which, and the levels of rows that wait for none of each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.solvers.triangular.block_entries import ORDER_KERNELS, BlockEntries
from penstock.spmv import Array, DeviceError, device_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch, multiprocessors
from penstock.spmv.compilation.jit import serial_kernel, shared_range
from penstock.spmv.compilation.table import find_kernel, register_kernel

#: Kernels of substitution and of colouring: in both, rows wait for rows.
TRIANGLE_KERNELS = CudaSource("penstock.solvers.kernels", "triangular.cu")

#: Times a GPU's lanes look for a word that other lanes write before they give up: many seconds.
POLLS = 1 << 24
# A level of at most this many rows is the work of one thread block.
_NARROW, _THREADS = 1024, 512


@dataclass(frozen=True)
class Waits:
    """For every row of a triangle, what it waits for."""

    counts: Array  # int32, (rows,): entries of earlier rows
    diagonal: Array  # int64, (rows,): place of the diagonal entry among the entries, or -1
    later: int  # the first row with an entry of a later row; the number of rows if no row has one
    missing: int  # the first row without a diagonal entry; the number of rows if all have one
    longest: int  # the largest of the counts


def count_waits(entries: BlockEntries, ranks: Array | None, upper: bool, kind: str) -> Waits:
    """Return what every row waits for: entries in columns of smaller rank, of larger for ``upper``. Ranks None: row numbers."""
    xp = device_of(entries.values).xp
    counts, diagonal = xp.empty(entries.rows, dtype=np.int32), xp.empty(entries.rows, dtype=np.int64)
    figures = xp.full(3, entries.rows, dtype=np.int32)
    find_kernel("triangle", "waits", kind)(entries, ranks, upper, counts, diagonal, figures)
    return Waits(counts, diagonal, *device_of(figures).to_host(figures).tolist())


def find_levels(entries: BlockEntries, upper: bool, waits: Waits, most: int, kind: str) -> tuple[Array, Any] | None:
    """Return the rows by levels, int32, and where each level begins, int64 on the host; None if there are more than ``most``.

    Rows ascend within a level. On a CPU, one pass in the order of the rows. On a GPU, a breadth-first search in one launch,
    whose thread blocks meet after every level (Naumov 2011, section 3, with a launch for every level).
    """
    if entries.rows == 0:
        return device_of(entries.values).xp.empty(0, dtype=np.int32), np.zeros(1, dtype=np.int64)
    levels: tuple[Array, Any] | None = find_kernel("triangle", "levels", kind)(entries, upper, waits, most)
    return levels


@register_kernel("triangle", "waits", "cpu")
def _waits_cpu(
    entries: BlockEntries, ranks: Array | None, upper: bool, counts: Array, diagonal: Array, figures: Array
) -> None:
    ranks = np.arange(entries.rows, dtype=np.int32) if ranks is None else ranks
    later = np.empty(entries.rows, dtype=np.bool_)
    _count_waits(len(entries.offsets) - 1, entries.offsets, entries.columns, ranks, upper, counts, diagonal, later)
    for place, bad in enumerate((later, diagonal < 0)):
        figures[place] = int(np.argmax(bad)) if bad.any() else entries.rows
    figures[2] = counts.max(initial=0)


@register_kernel("triangle", "levels", "cpu")
def _levels_cpu(entries: BlockEntries, upper: bool, waits: Waits, most: int) -> tuple[Array, Any] | None:
    level = np.zeros(entries.rows, dtype=np.int32)
    count = _find_levels(entries.offsets, entries.columns, upper, level)
    if count > most:
        return None
    levels = np.concatenate([[0], np.cumsum(np.bincount(level, minlength=count))]).astype(np.int64)
    return np.argsort(level, kind="stable").astype(np.int32), levels


@register_kernel("triangle", "waits", "cuda")
def _waits_cuda(
    entries: BlockEntries, ranks: Array | None, upper: bool, counts: Array, diagonal: Array, figures: Array
) -> None:
    arguments = (
        np.int32(entries.rows),
        entries.offsets,
        entries.columns,
        ranks,
        np.int32(upper),
        counts,
        diagonal,
        figures,
    )
    figures[2] = 0
    launch(ORDER_KERNELS.function("count_waits"), entries.rows, 256, arguments)


@register_kernel("triangle", "levels", "cuda")
def _levels_cuda(entries: BlockEntries, upper: bool, waits: Waits, most: int) -> tuple[Array, Any] | None:
    xp, rows = device_of(entries.values).xp, entries.rows
    follower_offsets = xp.zeros(rows + 1, dtype=np.int32)
    triangle = (np.int32(rows), entries.offsets, entries.columns, None, np.int32(upper))
    list_followers = ORDER_KERNELS.function("list_followers")
    launch(list_followers, rows, 256, (*triangle, follower_offsets[1:], None))
    xp.cumsum(follower_offsets, out=follower_offsets)
    followers = xp.empty(max(1, int(follower_offsets[-1])), dtype=np.int32)
    launch(list_followers, rows, 256, (*triangle, follower_offsets[1:].copy(), followers))
    order, most = xp.empty(rows, dtype=np.int32), min(most, rows)
    levels, counters, failed = (xp.full(count, -1, dtype=np.int32) for count in (most + 2, 3, 1))
    levels[0] = counters[0] = counters[1] = failed[0] = 0
    lanes = 8 if followers.size > 8 * rows else 1
    arguments: tuple[Any, ...] = (
        np.int32(rows),
        follower_offsets,
        followers,
        waits.counts.copy(),
        order,
        levels,
        counters,
    )
    arguments += (np.int32(_NARROW // lanes), np.int32(most), failed, np.int64(POLLS))
    function = ORDER_KERNELS.function(f"find_levels<{lanes}>")
    function((multiprocessors(entries.values),), (_THREADS,), arguments)
    if int(failed[0]):
        raise DeviceError("the search for levels of a triangle did not end on this GPU; pass order='natural'")
    count = int(counters[2])
    if count < 0:
        return None
    # Rows of a level that are near each other need rows of the last one that are near each other.
    keys = xp.empty(rows, dtype=np.int64)
    launch(ORDER_KERNELS.function("key_levels"), rows, 256, (np.int32(rows), np.int32(count), levels, order, keys))
    keys.sort()
    order = keys.astype(np.int32)  # the lower halves
    return order, device_of(entries.values).to_host(levels[: count + 1]).astype(np.int64)


def dataflow_blocks(array: Array, threads: int, a_multiprocessor: int = 4) -> int:
    """Return how many blocks of 256 threads share a dataflow: enough for the threads, at most ``a_multiprocessor`` each."""
    return max(1, min(-(-threads // 256), a_multiprocessor * multiprocessors(array)))


@shared_range(least=4096)
def _count_waits(
    begin: int,
    end: int,
    offsets: Array,
    columns: Array,
    ranks: Array,
    upper: bool,
    counts: Array,
    diagonal: Array,
    later: Array,
) -> None:
    for row in range(begin, end):
        count, own, after = 0, -1, False
        for entry in range(offsets[row], offsets[row + 1]):
            column = columns[entry]
            if column == row:
                own = entry
            elif (ranks[column] > ranks[row]) if upper else (ranks[column] < ranks[row]):
                count += 1
            else:
                after = True
        counts[row], diagonal[row], later[row] = count, own, after


@serial_kernel
def _find_levels(offsets: Array, columns: Array, upper: bool, level: Array) -> int:
    rows, deepest = offsets.shape[0] - 1, 0
    for step in range(rows):
        row = rows - 1 - step if upper else step
        depth = 0
        for entry in range(offsets[row], offsets[row + 1]):
            column = columns[entry]
            if (column > row) if upper else (column < row):
                depth = max(depth, level[column] + 1)
        level[row] = depth
        deepest = max(deepest, depth)
    return deepest + 1
