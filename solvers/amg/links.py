"""Links between nodes that must be smoothed together, and the lines of nodes that they make up.

The coupling of two nodes is the mean of ``-a_ij / sqrt(a_ii a_jj)`` over their unknowns of the same name: 1/2 between
neighbours on a line, nearly 1 between tied nodes. Flat finite elements also couple nodes beside each other, about as strongly
and with the opposite sign, as a mass matrix does; so the size of an entry does not show which nodes move alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock.solvers.amg.paths import long_paths
from penstock.spmv import Array, device_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch
from penstock.spmv.compilation.jit import inlined, shared_range
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.products.block_rows import BlockRows, row_numbers

LINK_KERNELS = CudaSource("penstock.solvers.kernels", "links.cu")

#: Neighbours on a line have 1/2, in smooth meshes at most 0.3.
STRONG = 0.35
# Beside a line the negative couplings add up to 1 or more, at an edge of the body to 0.6. A node with
# more than two strong neighbours is not on a line; the biharmonic operator has such nodes.
_OPPOSITE, _TIE = 0.5, 0.75
# Finite volumes have no negative couplings; there the strong ones make up more than this share of the diagonal, at an end of a
# line half as much beside the rest, and there are others: a node of a chain is on no line.
_MOST = 0.97


@dataclass(frozen=True)
class Links:
    """The links between nodes, from the first row on, as in CSR: int64 offsets, int32 ``columns``.

    ``shares``, (nodes,): the share of the diagonal of every node that its links make up.
    """

    offsets: Array
    columns: Array
    shares: Array


def inverse_roots(diagonal: Array) -> Array:
    """Return ``1 / sqrt(a_ii)`` of diagonal entries, such as (nodes, size); 0 where one is not positive."""
    xp = device_of(diagonal).xp
    roots = xp.sqrt(xp.where(diagonal > 0.0, diagonal, math.inf))
    return xp.divide(1.0, roots, out=roots)


def links_between(
    rows: BlockRows, scales: Array | None = None, *, ties: bool = True, finite_volumes: bool = False
) -> Links:
    """Return the links between the nodes of consecutive rows of a matrix, numbered from the first row.

    Reads its diagonals four times.

    Parameters
    ----------
    rows : BlockRows
        Square blocks of float64.
    scales : array, (nodes, size), optional
        ``1 / sqrt(a_ii)`` of all unknowns of the matrix; not needed if the rows are all of it.
    ties : bool
        Whether nodes of which each hardly couples with another one are linked too, and not only those on lines.
    finite_volumes : bool
        Whether lines of matrices without negative couplings are linked, such as those of finite volumes.
    """
    if scales is None:
        scales = rows.device.xp.zeros((len(rows.offsets) - 1, int(rows.blocks.shape[1])))
        find_kernel("links", "scale", rows.device.kind)(rows, scales)
    return links_among(rows, scales, flat_nodes(rows, scales, finite_volumes=finite_volumes), rows.start, ties=ties)


def flat_nodes(rows: BlockRows, scales: Array, *, finite_volumes: bool) -> Array:
    """Return which nodes of some rows may be on lines: bool."""
    flat = rows.device.xp.zeros(len(rows.offsets) - 1, dtype=bool)
    most = _MOST if finite_volumes else math.inf
    find_kernel("links", "find_flat", rows.device.kind)(rows, scales, most, flat)
    return flat


def links_among(rows: BlockRows, scales: Array, flat: Array, low: int, *, ties: bool) -> Links:
    """Return the links of the nodes of some rows with those from ``low`` on of which ``flat`` tells, numbered from there."""
    nodes, xp, kind = len(rows.offsets) - 1, rows.device.xp, rows.device.kind
    tie = _TIE if ties else math.inf
    counts, shares, offsets = (
        xp.zeros(nodes, dtype=np.int64),
        xp.zeros(nodes),
        xp.zeros(nodes + 1, dtype=np.int64),
    )
    find_kernel("links", "count", kind)(rows, scales, low, flat, tie, counts, shares)
    xp.cumsum(counts, out=offsets[1:])
    columns = xp.empty(int(offsets[-1]), dtype=np.int32)
    if columns.size:
        find_kernel("links", "list", kind)(rows, scales, low, flat, tie, offsets, columns)
    return Links(offsets, columns, shares)


def lines_of(links: Links, rows: BlockRows, least: int, most: int) -> tuple[Array, Array]:
    """Return the line of every node, or -1, and its place there, as :func:`long_paths`; the rows are those of the links.

    On a line the matrix is block tridiagonal.
    """
    path, place = long_paths(links.offsets, links.columns, least, most)
    xp, row, columns = rows.device.xp, row_numbers(rows.offsets, rows.columns.size), rows.columns - rows.start
    own = xp.flatnonzero((columns >= 0) & (columns < len(path)))
    row, columns = row[own], columns[own]
    far = xp.flatnonzero((path[row] >= 0) & (path[row] == path[columns]) & (abs(place[row] - place[columns]) > 1))
    far = far[(rows.blocks[own[far]] != 0.0).any(axis=(1, 2))]
    dropped = xp.zeros(len(path), dtype=bool)
    dropped[path[row[far]]] = True
    path[dropped[xp.maximum(path, 0)] & (path >= 0)] = -1
    return path, place


@register_kernel("links", "scale", "cpu")
def _scale_cpu(rows: BlockRows, scales: Array) -> None:
    _scale_unknowns(len(scales), rows.offsets, rows.columns, rows.blocks, scales)


@register_kernel("links", "find_flat", "cpu")
def _find_flat_cpu(rows: BlockRows, scales: Array, most: float, flat: Array) -> None:
    matrix = (rows.start, rows.offsets, rows.columns, rows.blocks)
    _find_flat(len(flat), *matrix, scales, STRONG, _OPPOSITE, most, flat)


@register_kernel("links", "count", "cpu")
def _count_cpu(rows: BlockRows, scales: Array, low: int, flat: Array, tie: float, counts: Array, shares: Array) -> None:
    matrix = (rows.start, rows.offsets, rows.columns, rows.blocks)
    _count(len(counts), *matrix, scales, low, STRONG, tie, flat, counts, shares)


@register_kernel("links", "list", "cpu")
def _list_cpu(rows: BlockRows, scales: Array, low: int, flat: Array, tie: float, offsets: Array, links: Array) -> None:
    matrix = (rows.start, rows.offsets, rows.columns, rows.blocks)
    _list(len(offsets) - 1, *matrix, scales, low, STRONG, tie, flat, offsets, links)


@register_kernel("links", "scale", "cuda")
def _scale_cuda(rows: BlockRows, scales: Array) -> None:
    nodes, size = scales.shape
    arguments = (np.int32(nodes), np.int32(size), rows.offsets, rows.columns, rows.blocks, scales)
    launch(LINK_KERNELS.function("scale_unknowns"), nodes, 256, arguments)


@register_kernel("links", "find_flat", "cuda")
def _find_flat_cuda(rows: BlockRows, scales: Array, most: float, flat: Array) -> None:
    limits = map(np.float64, (STRONG, _OPPOSITE, most))
    launch(LINK_KERNELS.function("find_flat"), len(flat), 256, (*_of_rows(rows), scales, *limits, flat))


@register_kernel("links", "count", "cuda")
def _count_cuda(
    rows: BlockRows, scales: Array, low: int, flat: Array, tie: float, counts: Array, shares: Array
) -> None:
    among = (np.int32(low), np.int32(len(flat)), np.float64(STRONG), np.float64(tie), flat)
    arguments = (*_of_rows(rows), scales, *among, counts, shares)
    launch(LINK_KERNELS.function("count_links"), len(counts), 256, arguments)


@register_kernel("links", "list", "cuda")
def _list_cuda(rows: BlockRows, scales: Array, low: int, flat: Array, tie: float, offsets: Array, links: Array) -> None:
    among = (np.int32(low), np.int32(len(flat)), np.float64(STRONG), np.float64(tie), flat)
    arguments = (*_of_rows(rows), scales, *among, offsets, links)
    launch(LINK_KERNELS.function("list_links"), len(offsets) - 1, 256, arguments)


def _of_rows(rows: BlockRows) -> tuple[object, ...]:
    """Return what kernels take of rows."""
    counts = (np.int32(len(rows.offsets) - 1), np.int32(rows.blocks.shape[1]), np.int32(rows.start))
    return (*counts, rows.offsets, rows.columns, rows.blocks)


@shared_range(least=4096)
def _scale_unknowns(begin: int, end: int, offsets: Array, columns: Array, blocks: Array, scales: Array) -> None:
    """Set the reciprocal roots of the diagonal; 0 where it is not positive."""
    for node in range(begin, end):
        for place in range(offsets[node], offsets[node + 1]):
            if columns[place] == node:
                for k in range(scales.shape[1]):
                    entry = blocks[place, k, k]
                    scales[node, k] = 1.0 / np.sqrt(entry) if entry > 0.0 else 0.0


@inlined
def _coupling_at(place: int, node: int, other: int, blocks: Array, scales: Array) -> float:
    """Return the coupling of the block at a place in the row of a node: positive where both want to move alike."""
    total = 0.0
    for k in range(scales.shape[1]):
        total -= blocks[place, k, k] * scales[node, k] * scales[other, k]
    return total / scales.shape[1]  # type: ignore[no-any-return]


@shared_range(least=2048)
def _find_flat(
    begin: int, end: int, first: int, offsets: Array, columns: Array, blocks: Array, scales: Array, strong: float,
    opposite: float, most: float, flat: Array,
) -> None:  # fmt: skip
    """Find the nodes with one or two couplings above ``strong``, where others add up to less than ``-opposite`` or these
    are more than the share ``most`` of the diagonal."""
    for node in range(begin, end):
        above, others, negative, share = 0, 0, 0.0, 0.0
        for place in range(offsets[node], offsets[node + 1]):
            if columns[place] != node + first:
                coupling = _coupling_at(place, node + first, columns[place], blocks, scales)
                negative -= min(coupling, 0.0)
                if coupling > strong:
                    above += 1
                    share += _coupling_at(place, node + first, node + first, blocks, scales)
                elif coupling != 0.0:
                    others += 1
        limit = most if above == 2 else most / (2.0 - most)
        flat[node] = 0 < above < 3 and (negative > opposite or (share > limit and others > 0))


# What comes before it stands in both kernels: a function of the arrays that returns it takes five times as long.
@inlined
def _is_link(coupling: float, strong: float, tie: float, both_flat: bool) -> bool:
    """Return whether a coupling links two nodes: both flat and coupled, or tied."""
    return coupling > tie or (coupling > strong and both_flat)


@shared_range(least=2048)
def _count(
    begin: int, end: int, first: int, offsets: Array, columns: Array, blocks: Array, scales: Array, low: int, strong: float,
    tie: float, flat: Array, counts: Array, shares: Array,
) -> None:  # fmt: skip
    for node in range(begin, end):
        count, share = 0, 0.0
        for place in range(offsets[node], offsets[node + 1]):
            other = columns[place] - low
            if columns[place] == node + first or not 0 <= other < flat.shape[0]:
                continue
            coupling = _coupling_at(place, node + first, columns[place], blocks, scales)
            if _is_link(coupling, strong, tie, flat[node + first - low] and flat[other]):
                count += 1
                share += _coupling_at(place, node + first, node + first, blocks, scales)
        counts[node], shares[node] = count, share


@shared_range(least=2048)
def _list(
    begin: int, end: int, first: int, offsets: Array, columns: Array, blocks: Array, scales: Array, low: int, strong: float,
    tie: float, flat: Array, of_links: Array, links: Array,
) -> None:  # fmt: skip
    for node in range(begin, end):
        following = of_links[node]
        for place in range(offsets[node], offsets[node + 1]):
            other = columns[place] - low
            if columns[place] == node + first or not 0 <= other < flat.shape[0]:
                continue
            coupling = _coupling_at(place, node + first, columns[place], blocks, scales)
            if _is_link(coupling, strong, tie, flat[node + first - low] and flat[other]):
                links[following] = other
                following += 1
