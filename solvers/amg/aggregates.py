"""Aggregates: groups of neighbouring nodes, of which each becomes one node of the coarse level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange

from penstock.spmv import Array, InputError, device_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch
from penstock.spmv.compilation.jit import inlined, parallel_kernel, serial_kernel
from penstock.spmv.compilation.table import find_kernel, register_kernel

AGGREGATION_KERNELS = CudaSource("penstock.solvers.kernels", "aggregation.cu")

#: Nodes a side of an aggregate of a coarse level.
COARSE_SIDE = 3
_ROOT = 2  # the mark of a root in the keys of the CUDA kernels

# Parts of more nodes than this are cut by all threads together, in this many chunks, by bins along their longest extent.
_LARGE, _CHUNKS, _BINS = 1 << 16, 64, 1024

Indices = np.ndarray[Any, np.dtype[np.integer[Any]]]


@dataclass(frozen=True)
class Aggregates:
    """The aggregate of every node: ``of_node``, int array (nodes,), numbers from 0 without gaps.

    ``grid`` has the aggregates along each axis if they are boxes of a structured mesh, numbered with the last axis fastest.
    """

    of_node: Indices
    grid: tuple[int, ...] | None = None
    count: int = -1

    def __post_init__(self) -> None:
        if self.count < 0:
            object.__setattr__(self, "count", int(self.of_node.max()) + 1 if self.of_node.size else 0)


def box_aggregates(counts: Sequence[int], size: int) -> Aggregates:
    """Cut a structured mesh into boxes of ``size`` nodes a side or a few more; a side of less than ``3/2 size`` is not cut.

    ``counts`` are the nodes along each axis; the last axis is numbered fastest.
    """
    # Smaller boxes would couple with others than their neighbours, unless there are only two along an axis.
    grid = tuple(max(count // size, 2 if 2 * count >= 3 * size else 1) for count in counts)
    of_node = np.zeros(1, dtype=np.int32)
    for count, boxes in zip(counts, grid, strict=True):
        line = np.arange(count, dtype=np.int64) * boxes // count
        of_node = (of_node[:, None] * np.int32(boxes) + line.astype(np.int32)).reshape(-1)
    return Aggregates(of_node, grid)


def coordinate_aggregates(coordinates: np.ndarray[Any, Any], size: int) -> Aggregates:
    """Bisect nodes, (nodes, dimensions), recursively across their longest extent, into parts of about ``size`` nodes.

    All parts of a level are cut at once. Where a cut divides nodes of one plane, their other coordinates decide: the parts do
    not depend on the numbers of the nodes.
    """
    if coordinates.ndim != 2 or not len(coordinates) or not np.isfinite(coordinates).all():
        raise InputError(f"coordinates must be finite and of shape (nodes, dimensions), not {coordinates.shape}")
    points, nodes = np.ascontiguousarray(coordinates, dtype=np.float64), len(coordinates)
    order, keys = np.arange(nodes, dtype=np.int32), np.empty(nodes)
    starts, parts = np.zeros(1, dtype=np.int64), np.array([max(1, round(nodes / size))])
    while (parts > 1).any():
        stops = np.append(starts[1:], nodes)
        cuts = starts + (stops - starts) * (parts // 2) // parts
        large = (stops - starts > _LARGE) & (parts > 1)
        for start, cut, stop in np.stack([starts, cuts, stops], axis=1)[large].tolist():
            _bisect_together(points, order, keys, start, cut, stop)
        _bisect(points, order, keys, starts, np.where(large, starts, cuts), stops)
        whole = parts == 1  # stays as it is: its first half is empty
        starts = np.stack([starts, cuts], axis=1).reshape(-1)
        parts = np.stack([parts // 2, parts - parts // 2], axis=1).reshape(-1)
        kept = np.stack([~whole, np.ones_like(whole)], axis=1).reshape(-1)
        starts, parts = starts[kept], parts[kept]
    of_node = np.empty(nodes, dtype=np.int32)
    of_node[order] = np.repeat(np.arange(len(starts), dtype=np.int32), np.diff(np.append(starts, nodes)))
    return Aggregates(of_node)


@parallel_kernel
def _bisect(points: Any, order: Indices, keys: Any, starts: Indices, cuts: Indices, stops: Indices) -> None:
    """Order the nodes of each part so that those before its cut come first along its longest extent."""
    for part in prange(starts.shape[0]):
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
    _find_extents(points, order, start, stop, lows, highs)
    low, high = lows.min(axis=0), highs.max(axis=0)
    with np.errstate(over="ignore"):
        axis = int(np.argmax(high - low))
        extent = high[axis] - low[axis]
    if 0 < extent < np.inf:
        scale, counts = _BINS / extent, np.zeros((_CHUNKS, _BINS), dtype=np.int64)
        _count_bins(points, order, axis, low[axis], scale, start, stop, counts)
        ends = np.cumsum(counts.sum(axis=0))
        middle = int(np.searchsorted(ends, cut - start, side="right"))  # the bin in which the cut lies
        shares = np.stack([counts[:, :middle].sum(axis=1), counts[:, middle], counts[:, middle + 1 :].sum(axis=1)])
        places = start + np.cumsum(shares.reshape(-1)) - shares.reshape(-1)
        moved = np.empty(stop - start, dtype=order.dtype)
        _move_by_bin(
            points, order, axis, low[axis], scale, start, stop, middle, places.reshape(3, _CHUNKS) - start, moved
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


@parallel_kernel
def _find_extents(points: Any, order: Indices, start: int, stop: int, lows: Any, highs: Any) -> None:
    for chunk in prange(_CHUNKS):
        first, last = _chunk(chunk, start, stop)
        for axis in range(points.shape[1]):
            low = high = points[order[first], axis]
            for place in range(first, last):
                value = points[order[place], axis]
                low, high = min(low, value), max(high, value)
            lows[chunk, axis], highs[chunk, axis] = low, high


@parallel_kernel
def _count_bins(
    points: Any, order: Indices, axis: int, low: float, scale: float, start: int, stop: int, counts: Indices
) -> None:
    for chunk in prange(_CHUNKS):
        first, last = _chunk(chunk, start, stop)
        for place in range(first, last):
            counts[chunk, _bin_of(points[order[place], axis], low, scale)] += 1


@parallel_kernel
def _move_by_bin(
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
    for chunk in prange(_CHUNKS):
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


def numbered_aggregates(of_node: Any, nodes: int) -> Aggregates:
    """Return the caller's aggregates, numbered without gaps; refuse them unless there is one number for each node."""
    numbers = np.asarray(of_node)
    if numbers.shape != (nodes,) or numbers.dtype.kind not in "iu":
        raise InputError(
            f"aggregates must be {nodes} whole numbers, one for each node, not {numbers.shape} {numbers.dtype}"
        )
    return Aggregates(np.unique(numbers, return_inverse=True)[1].astype(np.int32))


def graph_aggregates(offsets: Indices, neighbours: Indices, radius: int, size: int) -> Aggregates:
    """Aggregate the nodes of a graph: balls around roots, and the nodes that are left join a neighbouring ball.

    A ball grows by whole layers until it has ``size`` nodes or a radius of ``radius`` edges.

    Pass 1 of Vanek, Mandel and Brezina (1996), with balls of more than one edge; then nodes join the aggregate of which they
    have the most neighbours; what is left, such as small components, becomes aggregates of its own, and nodes without
    neighbours, which matter to no other, are gathered.
    """
    return Aggregates(_grow(np.asarray(offsets), np.asarray(neighbours), radius, math.ceil(size)))


def device_aggregates(offsets: Array, columns: Array, active: Array, kind: str) -> Aggregates:
    """Return aggregates of about three nodes a side of a graph in CSR, formed on its device: roots with nodes around them.

    Nodes that are not ``active`` couple with no other and are put anywhere: they have no part in the coarse level. On a GPU by
    maximal independent sets of distance 2 (Bell, Dalton and Olson 2012), the same in every run; on a CPU by the passes of
    Vanek, Mandel and Brezina (1996).
    """
    aggregates: Aggregates = find_kernel("graph", "aggregates", kind)(offsets, columns, active)
    return aggregates


@register_kernel("graph", "aggregates", "cpu")
def _aggregates_cpu(offsets: Array, columns: Array, active: Array) -> Aggregates:
    return graph_aggregates(offsets, columns, 1, COARSE_SIDE**3)


@register_kernel("graph", "aggregates", "cuda")
def _aggregates_cuda(offsets: Array, columns: Array, active: Array) -> Aggregates:
    xp, nodes = device_of(offsets).xp, len(offsets) - 1
    keys, near, far = (xp.empty(nodes, dtype=np.uint64) for _ in range(3))
    count = np.int32(nodes)
    launch(AGGREGATION_KERNELS.function("make_keys"), nodes, 256, (count, active, keys))
    find_largest, decide = (AGGREGATION_KERNELS.function(name) for name in ("find_largest", "decide"))
    left = 1
    while left:
        open_ = xp.zeros(1, dtype=np.int32)
        launch(find_largest, nodes, 256, (count, offsets, columns, active, keys, near))
        launch(find_largest, nodes, 256, (count, offsets, columns, active, near, far))
        launch(decide, nodes, 256, (count, far, keys, open_))
        left = int(open_[0])
    roots = (keys >> np.uint64(62)) == _ROOT
    numbers = xp.cumsum(roots, dtype=np.int32)
    labels = xp.where(roots, numbers - 1, np.int32(-1)).astype(np.int32)
    for _ in range(3):  # active nodes are one or two edges from a root, and nodes beside them one more
        joined = xp.empty_like(labels)
        launch(
            AGGREGATION_KERNELS.function("join_aggregates"),
            nodes,
            256,
            (count, offsets, columns, active, labels, joined),
        )
        labels = joined
    # What is left has no active neighbours, and no part in the coarse level. By number, so that one aggregate does not get all.
    return Aggregates(xp.where(labels < 0, xp.maximum(numbers - 1, 0), labels))


@serial_kernel
def _grow(offsets: Indices, neighbours: Indices, radius: int, size: int) -> Indices:
    nodes = offsets.shape[0] - 1
    of_node, seen = np.full(nodes, -1, dtype=np.int32), np.full(nodes, -1, dtype=np.int32)
    ball, count = np.empty(nodes, dtype=np.int32), 0
    for root in range(nodes):
        if of_node[root] >= 0:
            continue
        ball[0], reached, start, free = root, 1, 0, True
        seen[root] = root
        for _ in range(radius):
            layer_end = reached
            if not free or layer_end >= size:
                break
            for place in range(start, layer_end):
                node = ball[place]
                for entry in range(offsets[node], offsets[node + 1]):
                    other = neighbours[entry]
                    if seen[other] == root:
                        continue
                    seen[other] = root
                    if of_node[other] >= 0:
                        free = False
                        break
                    ball[reached] = other
                    reached += 1
                if not free:
                    break
            start = layer_end
        if free and reached > 1:
            for place in range(reached):
                of_node[ball[place]] = count
            count += 1
    joined = 1
    while joined:
        joined = 0
        before = of_node.copy()
        for node in range(nodes):
            if before[node] >= 0:
                continue
            best, most = -1, 0
            for entry in range(offsets[node], offsets[node + 1]):
                candidate = before[neighbours[entry]]
                if candidate < 0 or candidate == best:
                    continue
                votes = 0
                for again in range(offsets[node], offsets[node + 1]):
                    votes += before[neighbours[again]] == candidate
                if votes > most:
                    best, most = candidate, votes
            if best >= 0:
                of_node[node] = best
                joined += 1
    alone, gathered = -1, size  # the aggregate of nodes without neighbours that is being filled
    for node in range(nodes):
        if of_node[node] >= 0:
            continue
        place, isolated = count, True
        for entry in range(offsets[node], offsets[node + 1]):
            isolated = isolated and neighbours[entry] == node
        if isolated:
            if gathered >= size:
                alone, gathered = count, 0
            gathered += 1
            place = alone
        of_node[node] = place
        for entry in range(offsets[node], offsets[node + 1]):
            if of_node[neighbours[entry]] < 0:
                of_node[neighbours[entry]] = place
        count = max(count, place + 1)
    return of_node
