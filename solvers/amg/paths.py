"""The connected components of a graph that are paths, found on its device by list ranking (Wyllie 1979, pointer jumping)."""

from __future__ import annotations

import numpy as np

from penstock.spmv import Array, device_of
from penstock.spmv.device import count_true
from penstock.spmv.products.block_rows import row_numbers


def long_paths(offsets: Array, neighbours: Array, least: int, most: int) -> tuple[Array, Array]:
    """Return the path of each node and its position there, int64 arrays (nodes,), for paths of ``least`` to ``most`` nodes.

    A path is named after its end with the smaller number, and positions count from that end; other nodes have path -1.
    ``offsets`` and ``neighbours`` are the graph in CSR, symmetric and without a diagonal. A path of n nodes takes ``log2(n)``
    rounds, each of which reads three numbers for every entry of the graph.
    """
    xp, nodes = device_of(neighbours).xp, len(offsets) - 1
    degrees, node = xp.diff(offsets), row_numbers(offsets, neighbours.size)
    if not neighbours.size:
        return xp.full(nodes, -1, dtype=np.int64), xp.zeros(nodes, dtype=np.int64)
    # An entry is a directed edge; its successor leaves the neighbour towards the other side.
    inner = degrees[neighbours] == 2
    first = xp.where(degrees[neighbours] > 0, offsets[neighbours], 0)
    second = first + inner
    back_by_first, back_by_second = neighbours[first] == node, neighbours[second] == node
    ends = (degrees[neighbours] == 1) & back_by_first
    goes_on = inner & (back_by_first | back_by_second)
    own = xp.arange(neighbours.size)
    jump = xp.where(goes_on, xp.where(back_by_first, second, first), own)
    steps = goes_on.astype(np.int64)
    for _ in range(nodes.bit_length()):
        further = jump[jump]
        if not count_true(further != jump):
            break
        steps += steps[jump]
        jump = further
    arrives = ends[jump]  # false on a ring, and where a path leads to a node with three neighbours or more
    end, distance = neighbours[jump].astype(np.int64), steps + 1

    numbers, path, place = xp.arange(nodes), xp.full(nodes, -1, dtype=np.int64), xp.zeros(nodes, dtype=np.int64)
    linked = xp.flatnonzero((degrees == 1) | (degrees == 2))
    one, other = offsets[linked], offsets[linked + 1] - 1
    is_end = one == other
    end_one, end_other = end[one], xp.where(is_end, numbers[linked], end[other])
    far_one, far_other = distance[one], xp.where(is_end, 0, distance[other])
    length = far_one + far_other + 1
    kept = arrives[one] & arrives[other] & (length >= least) & (length <= most)
    linked, nearer = linked[kept], end_one < end_other
    path[linked] = xp.where(nearer, end_one, end_other)[kept]
    place[linked] = xp.where(nearer, far_one, far_other)[kept]
    return path, place
