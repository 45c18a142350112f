"""Groups of nodes that only together can be smoothed: the lines of nodes across flat elements, and nodes that are tied.

The coupling of two nodes is the mean of ``-a_ij / sqrt(a_ii a_jj)`` over their unknowns of the same name: 1/2 between
neighbours on a line, nearly 1 between tied nodes. Flat finite elements also couple nodes beside each other, about as strongly
and with the opposite sign, as a mass matrix does; so the size of an entry does not show which nodes move alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import connected_components, reverse_cuthill_mckee

from penstock.solvers.amg.paths import long_paths
from penstock.spmv import Array, device_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch
from penstock.spmv.compilation.jit import inlined, shared_range
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.device import count_true
from penstock.spmv.products.block_rows import BlockRows, in_float64, row_numbers

LINK_KERNELS = CudaSource("penstock.solvers.kernels", "links.cu")

# Neighbours on a line have 1/2, in smooth meshes at most 0.3. Beside a line the negative couplings add up to 1 or more, at an
# edge of the body to 0.6. With more than two strong neighbours a node is not on a line, as of the biharmonic operator.
_STRONG, _OPPOSITE, _TIE = 0.35, 0.5, 0.75
# The inverse of a group is a dense block of at most 64 nodes and 192 unknowns; larger groups are cut into equal parts.
_MOST_NODES, _MOST_UNKNOWNS = 64, 192
# Lines of 6 to 4,096 nodes are factorised instead of inverted or cut. A shorter line has an inverse as small as its factors; a
# longer one would need too many sequential steps.
_LEAST_LINE, _MOST_LINE = 6, 4096


@dataclass(frozen=True)
class Groups:
    """The group of every node: ``of_node``, int32 array (nodes,) on the device of the matrix, numbers from 0 without gaps.

    ``cut``: some linked nodes are in different groups, because their group would be too large. ``on_line``, bool array (groups,):
    which groups are lines, on which A is block tridiagonal; ``place``, int64 array (nodes,): the position of a node on its line.
    Both are None if there are no lines.
    """

    of_node: Array
    count: int
    cut: bool = False
    on_line: Array | None = None
    place: Array | None = None

    @cached_property
    def sizes(self) -> Array:
        """The nodes of each group, int64 (count,)."""
        return device_of(self.of_node).xp.bincount(self.of_node, minlength=self.count)

    @property
    def dense_sizes(self) -> Array:
        """The nodes of each group whose inverse is dense, 0 for lines."""
        return self.sizes if self.on_line is None else self.sizes * ~self.on_line

    @cached_property
    def lists(self) -> tuple[Array, Array]:
        """Where the nodes of each group begin, int64 (count + 1,), and the nodes by group, each in ascending order."""
        xp = device_of(self.of_node).xp
        order = xp.argsort(self.of_node, kind="stable")
        return xp.searchsorted(self.of_node[order], xp.arange(self.count + 1)).astype(np.int64), order


def linked_groups(rows: BlockRows, *, ties: bool = True) -> Groups | None:
    """Return the groups of a square matrix of blocks, or None if no nodes are linked. Reads its diagonals four times.

    Without ``ties`` only lines across flat elements count: coarse levels have pairs of nodes that couple with hardly any other,
    as the ends of lines that have been coarsened, and these need no groups.

    Groups are the connected components of the links. Components that are too large, other than lines, are cut along their reverse
    Cuthill-McKee order, on the host.
    """
    rows = in_float64(rows)
    device, nodes, size = rows.device, len(rows.offsets) - 1, int(rows.blocks.shape[1])
    xp, kind = device.xp, device.kind
    scales, flat, counts = xp.zeros((nodes, size)), xp.zeros(nodes, dtype=bool), xp.zeros(nodes, dtype=np.int64)
    tie = _TIE if ties else math.inf
    find_kernel("links", "count", kind)(rows, scales, flat, counts, tie)
    offsets = xp.zeros(nodes + 1, dtype=np.int64)
    xp.cumsum(counts, out=offsets[1:])
    if not (total := int(offsets[-1])):
        return None
    links = xp.empty(total, dtype=np.int32)
    find_kernel("links", "list", kind)(rows, scales, flat, offsets, links, tie)
    most = max(2, min(_MOST_NODES, _MOST_UNKNOWNS // size))
    path, place = long_paths(offsets, links, _LEAST_LINE, _MOST_LINE)
    _drop_coupled(rows, path, place)
    first, cut = _first_of_groups(offsets, links, path, most)
    starts = xp.zeros(nodes, dtype=bool)
    starts[first] = True
    of_node = (xp.cumsum(starts) - 1)[first].astype(np.int32)
    count, lines = count_true(starts), path >= 0
    if not count_true(lines):
        return Groups(of_node, count, cut)
    on_line = xp.zeros(count, dtype=bool)
    on_line[of_node[lines]] = True
    return Groups(of_node, count, cut, on_line, place)


def _drop_coupled(rows: BlockRows, path: Array, place: Array) -> None:
    """Remove the paths on which the matrix is not block tridiagonal: set ``path`` to -1 for their nodes."""
    xp, row = rows.device.xp, row_numbers(rows.offsets, rows.columns.size)
    far = xp.flatnonzero(
        (path[row] >= 0) & (path[row] == path[rows.columns]) & (abs(place[row] - place[rows.columns]) > 1)
    )
    far = far[(rows.blocks[far] != 0.0).any(axis=(1, 2))]
    dropped = xp.zeros(len(path), dtype=bool)
    dropped[path[row[far]]] = True
    path[dropped[xp.maximum(path, 0)] & (path >= 0)] = -1


def _first_of_groups(offsets: Array, links: Array, path: Array, most: int) -> tuple[Array, bool]:
    """Return for every node a representative of its group, and whether any group was cut.

    Nodes on paths are represented by an end of their path. The other linked nodes are few, and grouped on the host.
    """
    device = device_of(links)
    xp, nodes = device.xp, len(path)
    first = xp.where(path >= 0, path, xp.arange(nodes))
    rest = xp.flatnonzero((path < 0) & (xp.diff(offsets) > 0))
    if not rest.size:
        return first, False
    number = xp.full(nodes, -1, dtype=np.int64)
    number[rest] = xp.arange(rest.size)
    row = number[row_numbers(offsets, links.size)]
    kept = xp.flatnonzero((row >= 0) & (number[links] >= 0))
    of_rest = xp.searchsorted(row[kept], xp.arange(rest.size + 1)).astype(np.int64)
    part, cut = _cut_components(device.to_host(of_rest), device.to_host(number[links[kept]].astype(np.int32)), most)
    first[rest] = rest[device.asarray(np.unique(part, return_index=True)[1][part])]
    return first, cut


def _cut_components(offsets: Array, links: Array, most: int) -> tuple[Array, bool]:
    """Return the connected component of every node of a graph, those of more than ``most`` nodes cut, and whether any was."""
    nodes = len(offsets) - 1
    graph = scipy.sparse.csr_matrix((np.ones(len(links), dtype=np.int8), links, offsets), shape=(nodes, nodes))
    order = reverse_cuthill_mckee(graph, symmetric_mode=True)  # component by component
    of_place = connected_components(graph, directed=False)[1][order]
    starts = np.flatnonzero(np.concatenate([[True], of_place[1:] != of_place[:-1]]))
    sizes = np.diff(starts, append=nodes)
    parts = -(-sizes // most)
    place = np.arange(nodes) - np.repeat(starts, sizes)
    part = place * np.repeat(parts, sizes) // np.repeat(sizes, sizes)
    of_node = np.empty(nodes, dtype=np.int32)
    of_node[order] = np.repeat(np.cumsum(parts) - parts, sizes) + part
    return of_node, bool((parts > 1).any())


@register_kernel("links", "count", "cpu")
def _count_cpu(rows: BlockRows, scales: Array, flat: Array, counts: Array, tie: float) -> None:
    matrix = (rows.offsets, rows.columns, rows.blocks)
    _scale_unknowns(len(scales), *matrix, scales)
    _find_flat(len(scales), *matrix, scales, _STRONG, _OPPOSITE, flat)
    _count(len(scales), *matrix, scales, _STRONG, tie, flat, counts)


@register_kernel("links", "list", "cpu")
def _list_cpu(rows: BlockRows, scales: Array, flat: Array, offsets: Array, links: Array, tie: float) -> None:
    _list(len(scales), rows.offsets, rows.columns, rows.blocks, scales, _STRONG, tie, flat, offsets, links)


@register_kernel("links", "count", "cuda")
def _count_cuda(rows: BlockRows, scales: Array, flat: Array, counts: Array, tie: float) -> None:
    nodes, limits = len(scales), (np.float64(_STRONG), np.float64(tie))
    matrix = (np.int32(nodes), np.int32(rows.blocks.shape[1]), rows.offsets, rows.columns, rows.blocks)
    launch(LINK_KERNELS.function("scale_unknowns"), nodes, 256, (*matrix, scales))
    of_flat = (np.float64(_STRONG), np.float64(_OPPOSITE), flat)
    launch(LINK_KERNELS.function("find_flat"), nodes, 256, (*matrix, scales, *of_flat))
    launch(LINK_KERNELS.function("count_links"), nodes, 256, (*matrix, scales, *limits, flat, counts))


@register_kernel("links", "list", "cuda")
def _list_cuda(rows: BlockRows, scales: Array, flat: Array, offsets: Array, links: Array, tie: float) -> None:
    nodes, limits = len(scales), (np.float64(_STRONG), np.float64(tie))
    matrix = (np.int32(nodes), np.int32(rows.blocks.shape[1]), rows.offsets, rows.columns, rows.blocks)
    launch(LINK_KERNELS.function("list_links"), nodes, 256, (*matrix, scales, *limits, flat, offsets, links))


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
def _coupling_at(place: int, node: int, columns: Array, blocks: Array, scales: Array) -> float:
    """Return the coupling of the block at a place in the row of a node: positive where both want to move alike."""
    total = 0.0
    for k in range(scales.shape[1]):
        total -= blocks[place, k, k] * scales[node, k] * scales[columns[place], k]
    return total / scales.shape[1]  # type: ignore[no-any-return]


@shared_range(least=2048)
def _find_flat(
    begin: int,
    end: int,
    offsets: Array,
    columns: Array,
    blocks: Array,
    scales: Array,
    strong: float,
    opposite: float,
    flat: Array,
) -> None:
    """Find the nodes with one or two couplings above ``strong``, and others that add up to less than ``-opposite``."""
    for node in range(begin, end):
        above, negative = 0, 0.0
        for place in range(offsets[node], offsets[node + 1]):
            if columns[place] != node:
                coupling = _coupling_at(place, node, columns, blocks, scales)
                above += coupling > strong
                negative -= min(coupling, 0.0)
        flat[node] = 0 < above < 3 and negative > opposite


@inlined
def _is_link(
    place: int, node: int, columns: Array, blocks: Array, scales: Array, strong: float, tie: float, flat: Array
) -> bool:
    """Return whether a place links its node with another one: a strong coupling of two flat nodes, or a tie."""
    other = columns[place]
    coupling = _coupling_at(place, node, columns, blocks, scales)
    return other != node and (coupling > tie or (coupling > strong and flat[node] and flat[other]))  # type: ignore[no-any-return]


@shared_range(least=2048)
def _count(
    begin: int,
    end: int,
    offsets: Array,
    columns: Array,
    blocks: Array,
    scales: Array,
    strong: float,
    tie: float,
    flat: Array,
    counts: Array,
) -> None:
    for node in range(begin, end):
        count = 0
        for place in range(offsets[node], offsets[node + 1]):
            count += _is_link(place, node, columns, blocks, scales, strong, tie, flat)
        counts[node] = count


@shared_range(least=2048)
def _list(
    begin: int, end: int, offsets: Array, columns: Array, blocks: Array, scales: Array, strong: float, tie: float, flat: Array,
    of_links: Array, links: Array,
) -> None:  # fmt: skip
    for node in range(begin, end):
        following = of_links[node]
        for place in range(offsets[node], offsets[node + 1]):
            if _is_link(place, node, columns, blocks, scales, strong, tie, flat):
                links[following] = columns[place]
                following += 1
