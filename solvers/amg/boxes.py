"""Aggregates that are boxes: of a structured mesh, and of nodes whose coordinates lie on a lattice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.solvers.amg.aggregates import Aggregates
from penstock.spmv import Array, device_of
from penstock.spmv.device import count_true

# Nodes are on one plane of a lattice if their coordinates differ by at most this share of the body's extent, or of the distance
# between two planes. These distances may differ by the third factor where cells are nearly cubic. There may be so few, and so
# many, nodes for a place.
_ONE_PLANE, _THICK, _CUBIC, _FILLED, _DOUBLED = 1e-6, 1e-3, 1.5, 0.1, 1.5
# There may be this many times as many boxes as aggregates are wanted, as boxes have half as many neighbours as other parts. With
# the second number of times as many nodes as wanted, boxes are large, and with the third there are none. Those of a thin body are
# up to the last number of times as long as others.
_MORE_BOXES, _LARGE, _LARGEST, _LONGEST = 2.0, 1.25, 3.0, 3


def box_aggregates(counts: Sequence[int], size: int) -> Aggregates:
    """Cut a structured mesh into boxes of ``size`` nodes a side or a few more; a side of less than ``3/2 size`` is not cut.

    ``counts`` are the nodes along each axis; the last axis is numbered fastest.
    """
    grid = _boxes(counts, size)
    return Aggregates(_numbers(np.ix_(*map(np.arange, counts)), counts, grid, np.int32).reshape(-1), grid)


def _boxes(counts: Sequence[int], size: int) -> tuple[int, ...]:
    # Smaller boxes would couple with others than their neighbours, unless there are only two along an axis.
    return tuple(max(count // size, 2 if 2 * count >= 3 * size else 1) for count in counts)


def _numbers(planes: Sequence[Array], counts: Sequence[int], grid: tuple[int, ...], dtype: Any) -> Array:
    """Return the boxes in which nodes lie whose planes along each axis, of ``counts``, are given; arrays may be an open grid."""
    numbers: Any = dtype(0)
    for of_axis, count, boxes in zip(planes, counts, grid, strict=True):
        numbers = numbers * dtype(boxes) + (of_axis.astype(np.int64) * boxes // count).astype(dtype)
    return numbers


def lattice_aggregates(points: Array, size: float) -> Aggregates | None:
    """Cut nodes at ``points``, (nodes, dimensions), into boxes of about ``size`` nodes if they lie on a lattice, in any order.

    Boxes couple with fewer others than the parts of a bisection, of which a side is often twice as long as another, and bridge
    fewer gaps where places of the lattice are empty, as in an image of bone. None where nodes do not lie on a lattice, its
    cells are far from cubic, or nine tenths of its places are empty.
    """
    xp, nodes = device_of(points).xp, len(points)
    with np.errstate(over="ignore"):
        extents = [float(of) for of in points.max(axis=0) - points.min(axis=0)]
    if not math.isfinite(sum(extents)):
        return None
    lines, counts, spacings = list[Array](), list[int](), list[float]()
    for axis, extent in enumerate(extents):
        if extent <= _ONE_PLANE * max(extents):
            lines.append(xp.zeros(nodes, dtype=np.int32))
            counts.append(1)
            continue
        if (planes := _planes(points[:, axis])) is None:
            return None
        between, apart = planes
        spacings += apart
        if max(spacings) > _CUBIC * min(spacings):
            return None
        lines.append(xp.searchsorted(between, points[:, axis]).astype(np.int32))
        counts.append(len(between) + 1)
    across = max(1, sum(count > 1 for count in counts))
    least, places = round(size ** (1 / across)), math.prod(counts)
    if least < 2 or not _FILLED * places <= nodes <= _DOUBLED * places:
        return None
    # Of a thin body boxes are longer, as it has few nodes across.
    for side in range(least, _LONGEST * least + 1):
        grid = _boxes(counts, side)
        if places > _LARGE * size * math.prod(grid):  # of a small body, where boxes of a little less do no harm
            grid = tuple(max(1, round(count / side)) for count in counts)
        of_node = _numbers(lines, counts, grid, np.int64)
        used = xp.bincount(of_node, minlength=math.prod(grid)) > 0
        number = count_true(used)
        if number * _LARGEST * size < nodes:
            return None
        if number <= _MORE_BOXES * max(1.0, nodes / size):
            numbers = (xp.cumsum(used) - 1).astype(np.int32)
            return Aggregates(numbers[of_node], grid if number == used.size else None, number)
    return None


def _planes(along: Array) -> tuple[Array, tuple[float, float]] | None:
    """Return the middles between the planes of a lattice along an axis, and the least and largest distance of two of them.

    Planes are where coordinates are no further apart than by half of the largest distance; None if one is thick.
    """
    xp = device_of(along).xp
    places = xp.unique(along)
    apart = xp.diff(places)
    last = xp.flatnonzero(apart > apart.max() / 2)  # of each plane, except of the last one
    apart = apart[last]
    ends = xp.concatenate([last, xp.full(1, places.size - 1)])
    starts = xp.concatenate([xp.zeros(1, dtype=last.dtype), last + 1])
    least, most = float(apart.min()), float(apart.max())
    if float((places[ends] - places[starts]).max()) > _THICK * least:
        return None
    return places[last] + apart / 2, (least, most)
