"""What a coarse level is made of across flat elements: D of lines of nodes, and aggregates of neighbouring lines.

Across flat elements a node is coupled so strongly with those above and below it that a line of them moves as one. D inverts the
matrix on whole lines, so the polynomial in ``D A`` smooths all but what changes slowly from line to line and, along a line, over
the length of some widths of elements. An aggregate therefore has as many lines a side as it would have nodes, and as many nodes
along them as make it as long as wide: a *segment* of each line.

The length of a line in widths of elements follows from the entries. The links of a node on a line make up all of its diagonal but
a share that falls with the square of the ratio of width to height: with trilinear elements ``3 / (ratio^2 + 2)``, with finite
volumes ``2 / (ratio^2 + 2)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.solvers.amg.aggregates import Aggregates, graph_aggregates
from penstock.solvers.amg.line_factors import LineFactors
from penstock.solvers.amg.lines import ADDED, LEAST_LINE, LONGEST_LINE, WORTH_WHILE, LineInverses
from penstock.solvers.amg.links import STRONG, lines_of, links_between
from penstock.solvers.amg.matrix_rows import bounds_within, row_bounds_of, visit_rows
from penstock.solvers.chebyshev import largest_eigenvalue
from penstock.spmv import Array, Operator, device_of
from penstock.spmv.communicator import communicator_of
from penstock.spmv.device import count_true
from penstock.spmv.products.block_rows import BlockRows, in_float64, row_numbers

# Segments of a line: a longer one is cut, because its parts are so long that they hardly feel each other, and the columns of P
# reach as far as a line does.
_SEGMENTS = 8
# The square of a ratio is about this over the share of the diagonal that is not on the line.
_OF_RATIO = 2.5
# What a norm of 1 is as a whole number.
_UNIT = 2.0**32
# Lines are neighbours where they couple by at least this share of what couples a line most with others.
_BESIDE = 0.25
# More segments than this share that go on in another subdivision would be too many aggregates.
_MOST_CUT = 0.25
# The link of a free end of a line makes up more than this share of its diagonal, that of an end where the line is cut less.
_CUT = 0.6


@dataclass
class LineSpace:
    """D of lines, a bound of the eigenvalues of ``D A``, and aggregates of their segments."""

    D: LineFactors
    high: float
    aggregates: Aggregates


def line_space(A: Operator, scales: Array, nodes: int, smoothing: int, **measuring: Any) -> LineSpace | None:
    """Return what a coarse level of lines is made of, in about four sweeps; None if few nodes are on lines, after one.

    Lines and aggregates do not cross ranks that share A. Collective.

    Parameters
    ----------
    A : Operator
    scales : array, (nodes, size)
        ``1 / sqrt(a_ii)`` of all unknowns.
    nodes, smoothing : int
        Nodes of an aggregate and the degree of p; a side of an aggregate is the cubic root of ``nodes``.
    **measuring
        Options of :func:`largest_eigenvalue`.
    """
    size, side = int(scales.shape[1]), nodes ** (1 / 3)
    found = _lines(A, scales, size, side)
    if found is None:
        return None
    D, segments, of_line = found
    with communicator_of(A).together():
        aggregates = _aggregates(A, scales, segments, of_line, nodes, smoothing)
    return LineSpace(D, largest_eigenvalue(A, D, scales=scales.reshape(-1), **measuring), aggregates)


def _lines(A: Operator, scales: Array, size: int, side: float) -> tuple[LineFactors, Aggregates, Array] | None:
    """Return D of lines, the segment of every node, and the line of every segment; one sweep. None if there are few lines."""
    bounds = row_bounds_of(A)
    xp, parts, numbers = A.device.xp, list[LineInverses](), list[tuple[Array, Array]]()
    on_lines, lines, segments = 0, 0, 0

    def visit(rows: BlockRows) -> None:
        nonlocal on_lines, lines, segments
        for start, stop in pairwise(bounds_within(rows, bounds, size)):
            part = in_float64(rows.part(start, stop))
            line, place, segment, joined = _lines_of_part(part, scales, side)
            on_lines += joined
            parts.append(LineInverses(part, line, place, ADDED))
            first = xp.zeros(int(segment.max()) + 1 if len(segment) else 0, dtype=np.int64)
            first[segment] = line
            numbers.append((segment + segments, first + lines))
            lines, segments = lines + parts[-1].count, segments + len(first)

    communicator = communicator_of(A)
    with communicator.together():
        visit_rows(A, size, visit, bounds)
    of_ranks, nodes = communicator.total(np.array([on_lines, A.shape[0] // size], dtype=np.float64))
    if of_ranks < WORTH_WHILE * nodes:
        return None
    with communicator.together():
        of_node, of_segment = (xp.concatenate([pair[k] for pair in numbers]) for k in range(2))
        grouped = Aggregates(A.device.to_host(of_node).astype(np.int32), count=segments)
        return LineFactors(parts, bounds, size, A.device), grouped, A.device.to_host(of_segment)


def _lines_of_part(rows: BlockRows, scales: Array, side: float) -> tuple[Array, Array, Array, int]:
    """Return the line, the place on it and the segment of each of some consecutive nodes, and how many are on long lines.

    Lines and segments are numbered from 0, without gaps; lines are cut where they have too many segments.
    """
    xp, nodes = rows.device.xp, len(rows.offsets) - 1
    links = links_between(rows, scales, ties=False, finite_volumes=True)
    path, place = lines_of(links, rows, 2, nodes)  # subdivisions may leave short ends of lines
    path, place = xp.where(path < 0, xp.arange(nodes), path), xp.where(path < 0, 0, place)
    order = xp.argsort(path * np.int64(max(1, nodes)) + place)  # line by line
    number = xp.cumsum(_begins(path[order])) - 1
    # An end has one link and half an element. Where a line is cut or held, the diagonal still is that of two elements.
    end = xp.diff(links.offsets) == 1
    shares = xp.where(end & (links.shares < _CUT), 2.0, 1.0) * links.shares
    share = xp.maximum(1.0 - shares, 0.0) * xp.where(end, 0.5, 1.0)
    own, piece, long = _segments(number, xp.sqrt(share[order] / _OF_RATIO), side)
    of_segment, of_piece = (xp.cumsum(_begins(number, part)) - 1 for part in (own, piece))
    line, position, segment = (xp.empty(nodes, dtype=np.int64) for _ in range(3))
    line[order], segment[order] = of_piece, of_segment
    position[order] = xp.arange(nodes) - xp.flatnonzero(_begins(number, piece))[of_piece]
    return line, position, segment, count_true(long)


def _segments(number: Array, heights: Array, side: float) -> tuple[Array, Array, Array]:
    """Return the segment and the piece of every node on its line, and whether it is on a line of many nodes.

    Nodes are ordered by line; ``number`` is the line of each, and ``heights`` its height in widths of elements. A line is
    divided into segments of equal height, of about ``side`` widths each. Up to ``_SEGMENTS`` of them make up a piece.
    """
    xp, nodes = device_of(number).xp, len(number)
    first = xp.flatnonzero(_begins(number))
    length = xp.diff(xp.append(first, nodes))
    height = xp.cumsum(heights)
    height -= height[first][number]
    of_line = height[first + length - 1]
    count = xp.clip(xp.rint(of_line / side), 1, length).astype(np.int64)
    pieces = xp.maximum(-(-count // _SEGMENTS), -(-length // LONGEST_LINE))
    count = xp.maximum(count, pieces)
    # Without any height, as of chains that couple with nothing else, nodes are counted.
    by_number = (xp.arange(nodes) - first[number]) / xp.maximum(length, 1)[number]
    along = xp.where(of_line[number] > 0.0, height / xp.where(of_line > 0.0, of_line, 1.0)[number], by_number)
    own = xp.minimum((along * count[number]).astype(np.int64), count[number] - 1)
    return own, own * pieces[number] // count[number], (length >= LEAST_LINE)[number]


def _begins(number: Array, part: Array | None = None) -> Array:
    """Return where a line begins, or goes on with another part: bool, in the order of the lines."""
    begins = device_of(number).xp.ones(len(number), dtype=bool)
    begins[1:] = number[1:] != number[:-1]
    if part is not None:
        begins[1:] |= part[1:] != part[:-1]
    return begins


def _aggregates(
    A: Operator, scales: Array, segments: Aggregates, of_line: Array, nodes: int, radius: int
) -> Aggregates:
    """Return aggregates of segments that lie beside each other; one sweep.

    A line that goes on in another subdivision, or was cut, moves as one, though D knows nothing of it: each segment at a cut
    becomes an aggregate of its own, unless more than ``_MOST_CUT`` of all are.
    """
    offsets, columns, cut = _beside(A, scales, segments, of_line)
    of_segment = graph_aggregates(offsets, columns, radius, nodes)
    if 0 < (more := int(np.count_nonzero(cut))) <= _MOST_CUT * segments.count:
        numbers = of_segment.of_node.copy()
        numbers[cut] = of_segment.count + np.arange(more)
        numbers = np.unique(numbers, return_inverse=True)[1].astype(np.int32)
        of_segment = Aggregates(numbers)
    return Aggregates(of_segment.of_node[segments.of_node], count=of_segment.count)


def _beside(A: Operator, scales: Array, segments: Aggregates, of_line: Array) -> tuple[Array, Array, Array]:
    """Return which segments lie beside each other, as the offsets and columns of a graph, and which go on elsewhere.

    Across flat elements couplings beside a line and along it have different signs and cancel in a sum. So the norms are added up,
    and segments that only meet at an end have a small part of those that lie side by side. All is on the host.
    """
    xp, size, count = A.device.xp, int(scales.shape[1]), segments.count
    of_node, lines = A.device.asarray(segments.of_node).astype(np.int64), A.device.asarray(of_line)
    keys, sums = list[Array](), list[Array]()
    several = xp.bincount(lines[of_node], minlength=1) > 1
    cut = xp.zeros(count, dtype=bool)

    def visit(rows: BlockRows) -> None:
        row = row_numbers(rows.offsets, rows.columns.size) + rows.start
        scaled = rows.blocks * scales[row][:, :, None] * scales[rows.columns][:, None, :]
        own, other = of_node[row], of_node[rows.columns]
        apart, strong = lines[own] != lines[other], -xp.einsum("eii->e", scaled) > STRONG * size
        goes_on = apart & strong & (several[lines[own]] | several[lines[other]])
        cut[own[goes_on]] = True
        beside = xp.flatnonzero(apart & ~strong)
        norms = xp.sqrt(xp.einsum("eij,eij->e", scaled[beside], scaled[beside]))
        # Whole numbers, whose sums do not depend on their order.
        weights = xp.rint(norms * _UNIT).astype(np.int64)
        key = own[beside] * count + other[beside]
        order = xp.argsort(key)
        ends = xp.flatnonzero(xp.diff(key[order], append=-1))
        keys.append(A.device.to_host(key[order[ends]]))
        sums.append(np.diff(A.device.to_host(xp.cumsum(weights[order])[ends]), prepend=0))

    visit_rows(A, size, visit)
    key, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    total = np.bincount(inverse.reshape(-1), weights=np.concatenate(sums), minlength=len(key))
    row, column = key // count, key % count
    most = np.zeros(count)
    np.maximum.at(most, row, total)
    kept = (total >= _BESIDE * np.minimum(most[row], most[column])) & (total > 0.0)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row[kept], minlength=count))])
    return offsets, column[kept].astype(np.int32), A.device.to_host(cut)
