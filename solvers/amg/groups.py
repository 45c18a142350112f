"""Groups of nodes that only together can be smoothed: the lines of nodes across flat elements, and nodes that are tied."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import connected_components, reverse_cuthill_mckee

from penstock.solvers.amg.lines import LEAST_LINE, LONGEST_LINE
from penstock.solvers.amg.links import lines_of, links_between
from penstock.spmv import Array, device_of
from penstock.spmv.device import count_true
from penstock.spmv.products.block_rows import BlockRows, in_float64, row_numbers

# The inverse of a group is a dense block of at most 64 nodes and 192 unknowns; larger groups are cut into equal parts.
_MOST_NODES, _MOST_UNKNOWNS = 64, 192


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
    nodes, size, xp = len(rows.offsets) - 1, int(rows.blocks.shape[1]), rows.device.xp
    links = links_between(rows, ties=ties)
    if not links.columns.size:
        return None
    most = max(2, min(_MOST_NODES, _MOST_UNKNOWNS // size))
    path, place = lines_of(links, rows, LEAST_LINE, LONGEST_LINE)
    first, cut = _first_of_groups(links.offsets, links.columns, path, most)
    starts = xp.zeros(nodes, dtype=bool)
    starts[first] = True
    of_node = (xp.cumsum(starts) - 1)[first].astype(np.int32)
    count, lines = count_true(starts), path >= 0
    if not count_true(lines):
        return Groups(of_node, count, cut)
    on_line = xp.zeros(count, dtype=bool)
    on_line[of_node[lines]] = True
    return Groups(of_node, count, cut, on_line, place)


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
