"""Lists of a mesh: the elements of each node, the nodes of each row, and elements in another order."""

from __future__ import annotations

import numpy as np

from penstock.spmv import Array
from penstock.spmv.compilation.jit import serial_kernel, shared_range, strict_kernel


@strict_kernel
def list_elements(nodes: int, connectivity: Array) -> tuple[Array, Array]:
    """Return for each node its places in the flattened connectivity, ascending: offsets and places."""
    flat = connectivity.reshape(-1)
    offsets = np.zeros(nodes + 1, dtype=np.int64)
    for place in range(flat.size):
        offsets[flat[place] + 1] += 1
    for node in range(nodes):
        offsets[node + 1] += offsets[node]
    filled, places = offsets[:-1].copy(), np.empty(flat.size, dtype=np.int32)
    for place in range(flat.size):
        places[filled[flat[place]]] = place
        filled[flat[place]] += 1
    return offsets, places


@serial_kernel
def _columns_of(node: int, offsets: Array, places: Array, connectivity: Array, half: bool, columns: Array) -> int:
    """Write the ascending columns of the row of a node, and return their number."""
    size, count, columns_in_all = connectivity.shape[1], 0, offsets.size - 1
    for entry in range(offsets[node], offsets[node + 1]):
        for b in range(size):
            other = connectivity[places[entry] // size, b]
            if other >= columns_in_all or (half and other < node):
                continue
            at = count
            while at > 0 and columns[at - 1] > other:
                at -= 1
            if at > 0 and columns[at - 1] == other:
                continue
            for later in range(count, at, -1):
                columns[later] = columns[later - 1]
            columns[at] = other
            count += 1
    return count


def find_columns(
    offsets: Array, places: Array, connectivity: Array, half: bool, limit: int, starts: Array, columns: Array
) -> Array:
    """Write the ascending columns of every row from its start on, if there are starts, and return their numbers.

    There are as many columns as rows. ``limit`` is the most that a row may have, with those that are found more than once.
    """
    counts = np.zeros(offsets.size - 1, dtype=np.int64)
    _find_columns(counts.size, offsets, places, connectivity, half, limit, starts, columns, counts)
    return counts


@shared_range(least=256)
def _find_columns(
    begin: int, end: int, offsets: Array, places: Array, connectivity: Array, half: bool, limit: int, starts: Array,
    columns: Array, counts: Array,
) -> None:  # fmt: skip
    own = np.empty(limit, dtype=np.int32)
    for node in range(begin, end):
        counts[node] = _columns_of(node, offsets, places, connectivity, half, own)
        if starts.size:
            for number in range(counts[node]):
                columns[starts[node] + number] = own[number]


@strict_kernel
def names_twice(connectivity: Array) -> bool:
    """Return whether an element names a node more than once, as a wedge does that is given as a hexahedron."""
    for element in range(connectivity.shape[0]):
        for a in range(connectivity.shape[1]):
            for b in range(a):
                if connectivity[element, a] == connectivity[element, b]:
                    return True
    return False


def renamed(connectivity: Array, place: Array) -> tuple[Array, Array]:
    """Return elements whose nodes have other numbers, ``place[node]``, in the order of their first nodes.

    Returns
    -------
    connectivity : int32 array, (elements, nodes of an element)
    order : int32 array, (elements,)
        The old number of each element. Elements with the same first node stay in their order.
    """
    elements = len(connectivity)
    firsts, moved = np.empty(elements, dtype=np.int32), np.empty_like(connectivity)
    _find_firsts(elements, connectivity, place, firsts)
    order = _order_by_first(len(place), firsts)
    _rename(elements, connectivity, place, order, moved)
    return moved, order


@shared_range(least=4096)
def _find_firsts(begin: int, end: int, connectivity: Array, place: Array, firsts: Array) -> None:
    for element in range(begin, end):
        first = place[connectivity[element, 0]]
        for b in range(1, connectivity.shape[1]):
            first = min(first, place[connectivity[element, b]])
        firsts[element] = first


@strict_kernel
def _order_by_first(nodes: int, firsts: Array) -> Array:
    """Return the elements in the order of their first nodes, those of one node as they were: a counting sort."""
    starts, order = np.zeros(nodes + 1, dtype=np.int64), np.empty(firsts.size, dtype=np.int32)
    for element in range(firsts.size):
        starts[firsts[element] + 1] += 1
    for node in range(nodes):
        starts[node + 1] += starts[node]
    for element in range(firsts.size):
        order[starts[firsts[element]]] = element
        starts[firsts[element]] += 1
    return order


@shared_range(least=4096)
def _rename(begin: int, end: int, connectivity: Array, place: Array, order: Array, moved: Array) -> None:
    for element in range(begin, end):
        for b in range(connectivity.shape[1]):
            moved[element, b] = place[connectivity[order[element], b]]


def largest_span(connectivity: Array, nodes: int) -> int:
    """Return the largest difference of the numbers of two nodes of an element that are among the first ``nodes``."""
    spans = np.empty(len(connectivity), dtype=np.int32)
    _find_spans(len(connectivity), connectivity, nodes, spans)
    return int(spans.max())


@shared_range(least=4096)
def _find_spans(begin: int, end: int, connectivity: Array, nodes: int, spans: Array) -> None:
    for element in range(begin, end):
        first, last = nodes, 0
        for b in range(connectivity.shape[1]):
            node = connectivity[element, b]
            if node < nodes:
                first, last = min(first, node), max(last, node)
        spans[element] = max(0, last - first)


def degenerate_elements(coordinates: Array, connectivity: Array, share: float) -> Array:
    """Return which elements are flat, folded or have their nodes in another order, in ascending order.

    The determinant of the Jacobian must have one sign at all integration points, and be above a share of the cube of the
    longest edge at a corner.
    """
    degenerate = np.zeros(len(connectivity), dtype=bool)
    _find_degenerate(len(connectivity), coordinates, connectivity, share, degenerate)
    return np.flatnonzero(degenerate)


@shared_range(least=4096, rounded=True)
def _find_degenerate(
    begin: int, end: int, coordinates: Array, connectivity: Array, share: float, degenerate: Array
) -> None:
    size = connectivity.shape[1]
    x, g, J = np.empty((size, 3)), np.empty((size, 3)), np.empty((3, 3))
    for element in range(begin, end):
        for b in range(size):
            for c in range(3):
                x[b, c] = coordinates[connectivity[element, b], c]
        longest, least, most = 0.0, np.inf, -np.inf
        for b in range(1, size):
            longest = max(longest, np.sqrt(((x[b] - x[0]) ** 2).sum()))
        for point in range(1 if size == 4 else 8):
            if size == 4:
                for b in range(3):
                    for c in range(3):
                        J[b, c] = x[b + 1, c] - x[0, c]
            else:
                jacobian_of_hexahedron(point, x, g, J)
            determinant = 0.0
            for c in range(3):
                i, j = (c + 1) % 3, (c + 2) % 3
                determinant += J[0, c] * (J[1, i] * J[2, j] - J[1, j] * J[2, i])
            least, most = min(least, determinant), max(most, determinant)
        degenerate[element] = not (least > share * longest**3 or most < -share * longest**3)


@serial_kernel
def jacobian_of_hexahedron(point: int, x: Array, g: Array, J: Array) -> None:
    """Write the gradients on the reference element at one of eight Gauss points, and the derivatives of the coordinates there."""
    J[:] = 0.0
    for b in range(8):
        for axis in range(3):
            others = 1.0
            for other in range(3):
                if other != axis:
                    others *= 1.0 + _corner(b, other) * _corner(point, other) * 0.57735026918962576451
            g[b, axis] = _corner(b, axis) * others / 8.0
            for c in range(3):
                J[axis, c] += g[b, axis] * x[b, c]


@serial_kernel
def _corner(node: int, axis: int) -> float:
    """Return a coordinate of a corner of the reference hexahedron, in the order of VTK and gmsh."""
    if axis == 0:
        return 1.0 if node % 4 == 1 or node % 4 == 2 else -1.0
    return 1.0 if (node // 2 % 2 if axis == 1 else node // 4) else -1.0
