"""Aggregates: groups of neighbouring nodes, of which each becomes one node of the coarse level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange

from penstock.spmv import InputError
from penstock.spmv.compilation.jit import parallel_kernel, serial_kernel

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
        _bisect(points, order, keys, starts, cuts, stops)
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
    """Move the node that belongs at a place there, and those before it to the front (Hoare 1961, quickselect)."""
    while low < high:
        middle = (low + high) // 2
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


def given_aggregates(of_node: Any, nodes: int) -> Aggregates:
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
