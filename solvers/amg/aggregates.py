"""Aggregates: groups of neighbouring nodes, of which each becomes one node of the coarse level."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.host.threads import in_pieces, mapped
from penstock.spmv import Array, InputError, device_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch
from penstock.spmv.compilation.jit import serial_kernel, shared_range
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.formats.statistics import spread

AGGREGATION_KERNELS = CudaSource("penstock.solvers.kernels", "aggregation.cu")

#: Nodes a side of an aggregate of a coarse level.
COARSE_SIDE = 3

# Nodes of a graph whose roots are found in order on a GPU: the more there are, the longer are chains of those that wait.
_MOST_ON_GPU = 100_000
# The host finds balls in parts of consecutive nodes, which threads share; no ball leaves its part. Parts depend on the graph
# alone, so aggregates do not depend on the number of threads.
_MOST_PARTS = 16
_LEAST_OF_PART = 1 << 20  # nodes
_PART_OF_REACH = 20  # times the distance, in numbers, from a node to its furthest neighbour
_SAMPLE = 1 << 16  # nodes by which that distance is estimated
# Nodes that a core counts at a time.
_PIECE = 1 << 20
# Rounds in which roots are found before the host asks whether all are, and how many there are at most in order; meshes of 16,000
# nodes need some 25.
_ROUNDS, _MOST_ROUNDS = 4, 64

Indices = np.ndarray[Any, np.dtype[np.integer[Any]]]


@dataclass(frozen=True)
class Aggregates:
    """The aggregate of every node: ``of_node``, int array (nodes,), numbers from 0 without gaps.

    ``grid`` has the aggregates along each axis if they are boxes of a structured mesh, numbered with the last axis fastest.
    """

    of_node: Array
    grid: tuple[int, ...] | None = None
    count: int = -1

    def __post_init__(self) -> None:
        if self.count < 0:
            object.__setattr__(self, "count", int(self.of_node.max()) + 1 if self.of_node.size else 0)


def numbered_aggregates(of_node: Any, nodes: int) -> Aggregates:
    """Return the caller's aggregates, numbered without gaps; refuse them unless there is one number for each node."""
    numbers = np.asarray(of_node)
    if numbers.shape != (nodes,) or numbers.dtype.kind not in "iu":
        raise InputError(
            f"aggregates must be {nodes} whole numbers, one for each node, not {numbers.shape} {numbers.dtype}"
        )
    return Aggregates(np.unique(numbers, return_inverse=True)[1].astype(np.int32))


def graph_aggregates(offsets: Array, neighbours: Array, radius: int, size: int) -> Aggregates:
    """Aggregate the nodes of a graph: balls around roots, and the nodes that are left join a neighbouring ball.

    A ball grows by whole layers until it has ``size`` nodes or a radius of ``radius`` edges. On the host large graphs are cut
    into parts, which balls do not leave; nodes at the cuts join balls of either side.

    Pass 1 of Vanek, Mandel and Brezina (1996), with balls of more than one edge; then nodes join the aggregate of which they
    have the most neighbours, that of the smallest number if there are several; what is left, such as small components, becomes
    aggregates of its own, and nodes without neighbours, which matter to no other, are gathered. A small graph on a GPU is
    aggregated there if the radius is 1: balls that do not overlap have roots of an independent set of distance 2. The aggregates
    are those of the host if the pattern is symmetric.
    """
    device, size = device_of(offsets), math.ceil(size)
    if device.kind == "cuda" and are_found_on_gpu(len(offsets) - 1, radius):
        found: Aggregates | None = find_kernel("graph", "balls", "cuda")(offsets, neighbours, radius, size)
        if found is not None:
            return found
    aggregates: Aggregates = find_kernel("graph", "balls", "cpu")(
        *map(device.to_host, (offsets, neighbours)), radius, size
    )
    return aggregates


def are_found_on_gpu(nodes: int, radius: int) -> bool:
    """Whether the aggregates of a graph on a GPU are made there, unless nodes wait for each other in long chains."""
    return radius == 1 and nodes <= _MOST_ON_GPU


@register_kernel("graph", "balls", "cpu")
def _balls_cpu(offsets: Indices, neighbours: Indices, radius: int, size: int) -> Aggregates:
    nodes, parts = len(offsets) - 1, _count_parts(offsets, neighbours)
    bounds, counts = np.arange(parts + 1) * nodes // parts, np.zeros(parts, dtype=np.int64)
    of_node = np.empty(nodes, dtype=np.int32)
    _find_balls(parts, bounds, offsets, neighbours, radius, size, of_node, counts)
    first_numbers = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

    def number(part: int) -> None:
        own = of_node[bounds[part] : bounds[part + 1]]
        np.add(own, first_numbers[part], out=own, where=own >= 0)

    mapped(number, range(1, parts))
    count = int(first_numbers[-1])
    left, before = _count_left(of_node), -1
    while left not in (0, before):
        before, known, of_node = left, of_node, np.empty_like(of_node)
        _join_balls(nodes, offsets, neighbours, known, count, of_node)
        left = _count_left(of_node)
    if left:
        _place_others(offsets, neighbours, count, size, of_node)
    return Aggregates(of_node)


def _count_left(of_node: Indices) -> int:
    """Return how many nodes have no aggregate."""
    return sum(in_pieces(lambda place: int(np.count_nonzero(of_node[place] < 0)), len(of_node), _PIECE))


def _count_parts(offsets: Indices, neighbours: Indices) -> int:
    """Return the number of parts in which balls are found. The neighbours of each node must ascend."""
    nodes = len(offsets) - 1
    most = min(_MOST_PARTS, nodes // _LEAST_OF_PART)
    if most < 2:
        return 1
    node = spread(nodes, _SAMPLE)
    node = node[offsets[node] < offsets[node + 1]]
    first, last = neighbours[offsets[node]], neighbours[offsets[node + 1] - 1]
    reach = np.quantile(np.maximum(node - first, last - node), 0.9) if node.size else 0.0
    return max(1, min(most, int(nodes / (_PART_OF_REACH * max(reach, 1.0)))))


@register_kernel("graph", "balls", "cuda")
def _balls_cuda(offsets: Array, neighbours: Array, radius: int, size: int) -> Aggregates | None:
    assert radius == 1, "larger balls are found on the host"
    xp, nodes = device_of(offsets).xp, len(offsets) - 1
    graph = offsets.astype(np.int64, copy=False), neighbours, xp.empty(nodes, dtype=bool)
    alone = xp.zeros(1, dtype=np.int64)
    launch(AGGREGATION_KERNELS.function("mark_coupled"), nodes, 256, (np.int32(nodes), *graph, alone))
    found = _find_roots(*graph, in_order=True)
    if found is None:
        return None
    roots, labels = found
    labels = _joined(*graph, labels, 2)  # those beside roots, and then those beside these
    count = int(roots[-1]) if nodes else 0
    if gathered := int(alone[0]):
        of_alone = xp.arange(gathered, dtype=np.int32) // np.int32(size)
        labels[labels < 0] = of_alone + np.int32(count)
        count += -(-gathered // size)
    return Aggregates(labels, count=count)


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
    nodes = len(offsets) - 1
    found = _find_roots(offsets, columns, active, in_order=False)
    assert found is not None, "only chains in order are long"
    roots, labels = found
    # Active nodes are one or two edges from a root, and nodes beside them one more.
    labels = _joined(offsets, columns, active, labels, 3)
    # What is left has no active neighbours, and no part in the coarse level. By number, so that one aggregate does not get all.
    launch(AGGREGATION_KERNELS.function("place_others"), nodes, 256, (np.int32(nodes), roots, labels))
    return Aggregates(labels, count=max(1, int(roots[-1])) if nodes else 0)


def _find_roots(offsets: Array, columns: Array, active: Array, *, in_order: bool) -> tuple[Array, Array] | None:
    """Return how many of the nodes up to every node are roots, and the labels of roots, -1 for other nodes.

    None if they are to be chosen ``in_order`` and too many wait for each other.
    """
    xp, nodes = device_of(offsets).xp, len(offsets) - 1
    keys, near = (xp.empty(nodes, dtype=np.uint64) for _ in range(2))
    count = np.int32(nodes)
    launch(AGGREGATION_KERNELS.function("make_keys"), nodes, 256, (count, np.bool_(in_order), active, keys))
    find_largest, decide = (AGGREGATION_KERNELS.function(name) for name in ("find_largest", "decide"))
    lanes = _lanes(offsets, columns)
    graph = count, np.int32(lanes), offsets, columns
    left, rounds = nodes, 0
    while left:
        if in_order and rounds >= _MOST_ROUNDS:
            return None
        before, last = xp.zeros((2, 1), dtype=np.int32)
        for number in range(_ROUNDS):
            launch(find_largest, nodes * lanes, 256, (*graph, active, keys, near))
            launch(decide, nodes * lanes, 256, (*graph, near, keys, last if number == _ROUNDS - 1 else before))
        left, rounds = int(last[0]), rounds + _ROUNDS
    roots, labels = xp.empty(nodes, dtype=np.int64), xp.empty(nodes, dtype=np.int32)
    launch(AGGREGATION_KERNELS.function("mark_roots"), nodes, 256, (count, keys, roots))
    xp.cumsum(roots, out=roots)
    launch(AGGREGATION_KERNELS.function("label_roots"), nodes, 256, (count, keys, roots, labels))
    return roots, labels


def _joined(offsets: Array, columns: Array, active: Array, labels: Array, times: int) -> Array:
    """Return labels after nodes without one have joined an aggregate of neighbours, ``times`` times."""
    nodes, lanes = len(offsets) - 1, _lanes(offsets, columns)
    join = AGGREGATION_KERNELS.function("join_aggregates")
    for _ in range(times):
        before, labels = labels, device_of(labels).xp.empty_like(labels)
        launch(join, nodes * lanes, 256, (np.int32(nodes), np.int32(lanes), offsets, columns, active, before, labels))
    return labels


def _lanes(offsets: Array, columns: Array) -> int:
    """Return how many lanes of a GPU work on a node: a power of two, about a third of its neighbours."""
    neighbours = columns.size // max(1, len(offsets) - 1)
    return min(32, 1 << int(neighbours // 3).bit_length())


@shared_range(least=1)
def _find_balls(
    begin: int,
    end: int,
    bounds: Indices,
    offsets: Indices,
    neighbours: Indices,
    radius: int,
    size: int,
    of_node: Indices,
    counts: Indices,
) -> None:
    """Find the balls of some parts of the nodes, numbered from 0 in each part, and count those of each."""
    for part in range(begin, end):
        first, stop, count = bounds[part], bounds[part + 1], 0
        seen, ball = np.full(stop - first, -1, dtype=np.int32), np.empty(stop - first, dtype=np.int32)
        own = of_node[first:stop]
        own[:] = -1
        for root in range(stop - first):
            if own[root] >= 0:
                continue
            ball[0], reached, start, free = root, 1, 0, True
            seen[root] = root
            for _ in range(radius):
                layer_end = reached
                if not free or layer_end >= size:
                    break
                for place in range(start, layer_end):
                    node = first + ball[place]
                    for entry in range(offsets[node], offsets[node + 1]):
                        other = neighbours[entry] - first
                        if other < 0 or other >= stop - first or seen[other] == root:
                            continue
                        seen[other] = root
                        if own[other] >= 0:
                            free = False
                            break
                        ball[reached] = other
                        reached += 1
                    if not free:
                        break
                start = layer_end
            if free and reached > 1:
                for place in range(reached):
                    own[ball[place]] = count
                count += 1
        counts[part] = count


@shared_range(least=1024)
def _join_balls(
    begin: int, end: int, offsets: Indices, neighbours: Indices, known: Indices, count: int, of_node: Indices
) -> None:
    """Put nodes without an aggregate into the one of which they have the most neighbours, the smallest of several."""
    votes = np.zeros(count, dtype=np.int32)
    for node in range(begin, end):
        if known[node] >= 0:
            of_node[node] = known[node]
            continue
        for entry in range(offsets[node], offsets[node + 1]):
            candidate = known[neighbours[entry]]
            if candidate >= 0:
                votes[candidate] += 1
        best, most = -1, 0
        for entry in range(offsets[node], offsets[node + 1]):
            candidate = known[neighbours[entry]]
            if candidate >= 0 and (votes[candidate] > most or (votes[candidate] == most and candidate < best)):
                best, most = candidate, votes[candidate]
        of_node[node] = best
        for entry in range(offsets[node], offsets[node + 1]):
            if known[neighbours[entry]] >= 0:
                votes[known[neighbours[entry]]] = 0


@serial_kernel
def _place_others(offsets: Indices, neighbours: Indices, count: int, size: int, of_node: Indices) -> None:
    """Make aggregates of nodes that are left, and gather those without neighbours."""
    alone, gathered = -1, size  # the aggregate of nodes without neighbours that is being filled
    for node in range(of_node.shape[0]):
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
