"""Aggregates of nodes by their coordinates: boxes of a lattice, or recursive bisection across the longest extent (Berger and
Bokhari 1987)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from penstock.solvers.amg.aggregates import Aggregates, Indices
from penstock.solvers.amg.boxes import lattice_aggregates
from penstock.spmv import Array, InputError, device_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch
from penstock.spmv.compilation.jit import inlined, serial_kernel, shared_range
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.formats.limits import INT32_MAX

BISECTION_KERNELS = CudaSource("penstock.solvers.kernels", "bisection.cu")

# Parts of more nodes than this are cut by all threads together, in this many chunks, by bins along their longest extent.
_LARGE, _CHUNKS, _BINS = 1 << 16, 64, 1024
_RUN = 16  # positions that a thread of a GPU looks at for the extents of parts


def coordinate_aggregates(coordinates: Array, size: int) -> Aggregates:
    """Divide nodes, (nodes, dimensions), into parts of about ``size``: boxes if they lie on a lattice, else by bisection.

    The parts do not depend on the numbers of the nodes, nor on the device.
    """
    real = coordinates.dtype.kind in "fiub"
    if not real or coordinates.ndim != 2 or not coordinates.size or not _are_finite(coordinates):
        raise InputError(
            f"coordinates must be finite, real and of shape (nodes, dimensions), not {coordinates.dtype} of shape "
            f"{coordinates.shape}"
        )
    if not size > 0:
        raise InputError(f"size must be a positive number of nodes, not {size!r}")
    device = device_of(coordinates)
    points = device.xp.ascontiguousarray(coordinates, dtype=np.float64)
    return lattice_aggregates(points, size) or bisected(points, size)


def bisected(points: Array, size: float) -> Aggregates:
    """Cut nodes recursively across their longest extent into parts of about ``size`` nodes.

    All parts of a level are cut at once, where the coordinates are. Where a cut divides nodes of one plane, their other
    coordinates decide.
    """
    levels, starts = _levels(len(points), size)
    of_node = find_kernel("points", "bisect", device_of(points).kind)(points, levels, starts)
    return Aggregates(of_node, count=len(starts))


def _are_finite(coordinates: Array) -> bool:
    """Return whether all coordinates are finite."""
    flat = coordinates.reshape(-1)
    return bool(np.isfinite(float(flat.max()))) and bool(np.isfinite(float(flat.min())))


@functools.lru_cache(maxsize=4)
def _levels(nodes: int, size: float) -> tuple[list[tuple[Indices, Indices]], Indices]:
    """Return where the parts of every level begin and where they are cut, and where the last parts begin.

    A part that is cut no more has its cut where it begins.
    """
    starts, parts = np.zeros(1, dtype=np.int64), np.array([max(1, round(nodes / size))])
    levels: list[tuple[Indices, Indices]] = []
    while (parts > 1).any():
        stops = np.append(starts[1:], nodes)
        cuts = starts + (stops - starts) * (parts // 2) // parts
        levels.append((starts, cuts))
        whole = parts == 1
        kept = np.stack([~whole, np.ones_like(whole)], axis=1).reshape(-1)  # the first half of a whole part is empty
        starts = np.stack([starts, cuts], axis=1).reshape(-1)[kept]
        parts = np.stack([parts // 2, parts - parts // 2], axis=1).reshape(-1)[kept]
    return levels, starts


@register_kernel("points", "bisect", "cpu")
def _bisect_cpu(points: Array, levels: list[tuple[Indices, Indices]], last: Indices) -> Array:
    nodes = len(points)
    order, keys = np.arange(nodes, dtype=np.int32), np.empty(nodes)
    for starts, cuts in levels:
        stops = np.append(starts[1:], nodes)
        large = (stops - starts > _LARGE) & (cuts > starts)
        for start, cut, stop in np.stack([starts, cuts, stops], axis=1)[large].tolist():
            _bisect_together(points, order, keys, start, cut, stop)
        _bisect(len(starts), points, order, keys, starts, np.where(large, starts, cuts), stops)
    of_node = np.empty(nodes, dtype=np.int32)
    of_node[order] = np.repeat(np.arange(len(last), dtype=np.int32), np.diff(np.append(last, nodes)))
    return of_node


@register_kernel("points", "bisect", "cuda")
def _bisect_cuda(points: Array, levels: list[tuple[Indices, Indices]], last: Indices) -> Array:
    device, (nodes, dimensions) = device_of(points), points.shape
    xp, kernel, count = device.xp, BISECTION_KERNELS.function, np.int32(len(points))
    ranks, ordered = xp.empty((dimensions, nodes), dtype=np.int32), xp.empty((dimensions, nodes), dtype=np.int32)
    along = None  # by the first coordinate, then by the others in turn; equal ones by number
    for axis in reversed(range(dimensions)):
        along = _sorted_along(points, axis, along)
    for axis in range(dimensions):
        by_axis = along if axis == 0 else _sorted_along(points, axis, along)
        launch(kernel("rank_nodes"), nodes, 256, (count, by_axis, ordered[axis], ranks[axis]))
    of_node = xp.empty(nodes, dtype=np.int32)
    order, following = ordered[0], xp.empty(nodes, dtype=np.int32)  # any order does for the first level
    for starts, _ in levels:
        parts, of_level = np.int32(len(starts)), device.asarray(starts)
        lowest, highest = (xp.full((len(starts), dimensions), of, dtype=np.int32) for of in (nodes, -1))
        axes, cut = xp.empty(len(starts), dtype=np.int32), (parts, of_level)
        extents = (count, np.int32(_RUN), np.int32(dimensions), *cut, order, ranks, lowest, highest)
        launch(kernel("find_extents"), -(-nodes // _RUN), 256, extents)
        choice = (count, np.int32(dimensions), parts, points, ordered, lowest, highest, axes)
        launch(kernel("choose_axes"), len(starts), 256, choice)
        # Of as few digits as will do: they are sorted one after another.
        dtype, key = (np.int32, "int") if len(starts) * nodes <= INT32_MAX else (np.int64, "long long")
        keys = xp.empty(nodes, dtype=dtype)
        launch(kernel(f"make_part_keys<{key}>"), nodes, 256, (count, *cut, axes, order, ranks, keys))
        keys.sort()  # by part, and along its axis: every part is then cut wherever that is
        launch(kernel(f"take_nodes<{key}>"), nodes, 256, (count, axes, ordered, keys, following))
        order = following
    launch(kernel("number_parts"), nodes, 256, (count, np.int32(len(last)), device.asarray(last), order, of_node))
    return of_node


def _sorted_along(points: Array, axis: int, order: Array | None) -> Array:
    """Return nodes in an order, by default that of their numbers, by a coordinate; those of equal ones stay in that order."""
    nodes, dimensions = points.shape
    keys = device_of(points).xp.empty(nodes, dtype=np.int64)
    arguments = (np.int32(nodes), np.int32(dimensions), np.int32(axis), order, points, keys)
    launch(BISECTION_KERNELS.function("make_sortable"), nodes, 256, arguments)
    places = keys.argsort(kind="stable")  # of integers, which are sorted by their digits
    if order is not None:
        launch(BISECTION_KERNELS.function("follow_order"), nodes, 256, (np.int32(nodes), order, places))
    return places


@shared_range(least=8)
def _bisect(
    begin: int, end: int, points: Any, order: Indices, keys: Any, starts: Indices, cuts: Indices, stops: Indices
) -> None:
    """Order the nodes of each part so that those before its cut come first along its longest extent."""
    for part in range(begin, end):
        start, cut, stop = starts[part], cuts[part], stops[part]
        if cut == start:
            continue
        axis, longest = 0, -1.0
        for candidate in range(points.shape[1]):
            least = most = points[order[start], candidate]
            for place in range(start, stop):
                value = points[order[place], candidate]
                least, most = min(least, value), max(most, value)
            if most - least > longest:
                axis, longest = candidate, most - least
        for place in range(start, stop):
            keys[place] = points[order[place], axis]
        _select(keys, order, points, start, cut, stop - 1)


def _bisect_together(points: Any, order: Indices, keys: Any, start: int, cut: int, stop: int) -> None:
    """Do what :func:`_bisect` does to one large part, with all threads: bins along the axis leave few nodes to select from."""
    lows, highs = np.empty((_CHUNKS, points.shape[1])), np.empty((_CHUNKS, points.shape[1]))
    _find_extents(_CHUNKS, points, order, start, stop, lows, highs)
    low, high = lows.min(axis=0), highs.max(axis=0)
    with np.errstate(over="ignore"):
        axis = int(np.argmax(high - low))
        extent = high[axis] - low[axis]
        scale = (
            _BINS / extent if extent > 0 else 0.0
        )  # infinite for a tiny extent, 0 for an infinite one: then without bins
    if 0 < scale < np.inf:
        counts = np.zeros((_CHUNKS, _BINS), dtype=np.int64)
        _count_bins(_CHUNKS, points, order, axis, low[axis], scale, start, stop, counts)
        ends = np.cumsum(counts.sum(axis=0))
        middle = int(np.searchsorted(ends, cut - start, side="right"))  # the bin in which the cut lies
        shares = np.stack([counts[:, :middle].sum(axis=1), counts[:, middle], counts[:, middle + 1 :].sum(axis=1)])
        places = start + np.cumsum(shares.reshape(-1)) - shares.reshape(-1)
        moved = np.empty(stop - start, dtype=order.dtype)
        _move_by_bin(
            _CHUNKS,
            points,
            order,
            axis,
            low[axis],
            scale,
            start,
            stop,
            middle,
            places.reshape(3, _CHUNKS) - start,
            moved,
        )
        order[start:stop] = moved
        first = start + int(shares[0].sum())
        start, stop = first, first + int(shares[1].sum())
    if start < cut < stop:
        keys[start:stop] = points[order[start:stop], axis]
        _select(keys, order, points, start, cut, stop - 1)


@inlined
def _chunk(number: int, start: int, stop: int) -> tuple[int, int]:
    """Return where a chunk of a part begins and ends."""
    return start + (stop - start) * number // _CHUNKS, start + (stop - start) * (number + 1) // _CHUNKS


@inlined
def _bin_of(value: float, low: float, scale: float) -> int:
    return min(int((value - low) * scale), _BINS - 1)


@shared_range(least=1)
def _find_extents(
    begin: int, end: int, points: Any, order: Indices, start: int, stop: int, lows: Any, highs: Any
) -> None:
    for chunk in range(begin, end):
        first, last = _chunk(chunk, start, stop)
        for axis in range(points.shape[1]):
            low = high = points[order[first], axis]
            for place in range(first, last):
                value = points[order[place], axis]
                low, high = min(low, value), max(high, value)
            lows[chunk, axis], highs[chunk, axis] = low, high


@shared_range(least=1)
def _count_bins(
    begin: int,
    end: int,
    points: Any,
    order: Indices,
    axis: int,
    low: float,
    scale: float,
    start: int,
    stop: int,
    counts: Indices,
) -> None:
    for chunk in range(begin, end):
        first, last = _chunk(chunk, start, stop)
        for place in range(first, last):
            counts[chunk, _bin_of(points[order[place], axis], low, scale)] += 1


@shared_range(least=1)
def _move_by_bin(
    begin: int,
    end: int,
    points: Any,
    order: Indices,
    axis: int,
    low: float,
    scale: float,
    start: int,
    stop: int,
    middle: int,
    places: Indices,
    moved: Indices,
) -> None:
    """Put nodes of bins before the middle one first, those in it next; ``places``: where those of each chunk begin."""
    for chunk in range(begin, end):
        first, last = _chunk(chunk, start, stop)
        before, within, after = places[0, chunk], places[1, chunk], places[2, chunk]
        for place in range(first, last):
            node = order[place]
            number = _bin_of(points[node, axis], low, scale)
            if number < middle:
                moved[before] = node
                before += 1
            elif number == middle:
                moved[within] = node
                within += 1
            else:
                moved[after] = node
                after += 1


@serial_kernel
def _precedes(key: float, node: int, pivot: float, other: int, points: Any) -> bool:
    """Return whether a node comes before another one: by their keys, where these are equal by all coordinates, then by number."""
    if key != pivot:
        return key < pivot
    for axis in range(points.shape[1]):
        one, two = points[node, axis], points[other, axis]
        if one != two:
            return one < two  # type: ignore[no-any-return]
    return node < other


@serial_kernel
def _select(keys: Any, nodes: Indices, points: Any, low: int, place: int, high: int) -> None:
    """Move the node that belongs at a place there, and those before it to the front (Hoare 1961, quickselect).

    Pivots are taken at random: where runs of ascending nodes follow each other, those in the middle are the worst.
    """
    random = np.uint64(place)
    while low < high:
        random = random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)  # Knuth 1997, MMIX
        middle = low + np.int64((random >> np.uint64(33)) % np.uint64(high - low + 1))
        pivot, node = keys[middle], nodes[middle]
        left, right = low, high
        while left <= right:
            while _precedes(keys[left], nodes[left], pivot, node, points):
                left += 1
            while _precedes(pivot, node, keys[right], nodes[right], points):
                right -= 1
            if left <= right:
                keys[left], keys[right] = keys[right], keys[left]
                nodes[left], nodes[right] = nodes[right], nodes[left]
                left += 1
                right -= 1
        if place <= right:
            high = right
        elif place >= left:
            low = left
        else:
            return
