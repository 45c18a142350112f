"""Lines of nodes across flat elements, and an order of the nodes in which each line is a run of them.

D of a streamed matrix couples no nodes of different subdivisions, so lines should not be cut by them. Where the nodes of a line
follow each other, few are: one at each end of a subdivision.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse

from penstock.solvers.amg.links import Links, flat_nodes, lines_of, links_among
from penstock.solvers.amg.matrix_rows import visit_rows
from penstock.solvers.amg.paths import long_paths
from penstock.spmv import Array, BsrMatrix, CsrMatrix
from penstock.spmv.device import count_true
from penstock.spmv.products.block_rows import BlockRows, in_float64, row_numbers, rows_of

#: Lines are worth while where at least this share of the nodes is on one.
WORTH_WHILE = 0.1
#: Nodes of a line, at least: where stiffness jumps at random, a few nodes often make up a line, too.
LEAST_LINE = 6
# Runs of nodes that are looked at, and their length.
_RUNS, _RUN = 64, 64


@dataclass(frozen=True)
class LinesFound:
    """Lines of a matrix. ``permutation``: the old numbers of the nodes in an order in which lines are runs of nodes, int64 on the
    host; None if they are as it is."""

    permutation: Array | None


def find_lines(A: CsrMatrix, size: int) -> LinesFound | None:
    """Return the lines of a matrix of nodes of ``size`` unknowns, or None if few nodes are on lines.

    Looks at short runs of nodes, some thousand together. Only if nodes in these may be on lines, but not with others of the same
    run, all of the matrix is read, three times.
    """
    nodes = A.shape[0] // size
    if A.shape[0] % size or not nodes:
        return None
    scales = _inverse_roots(A, size)
    flat, on_lines, looked_at = 0, 0, 0
    for start in np.unique(np.linspace(0, max(0, nodes - _RUN), _RUNS).astype(np.int64)).tolist():
        part = A.rows(start * size, min(start + _RUN, nodes) * size)
        rows = in_float64(rows_of(part if size == 1 else BsrMatrix.from_csr(part, block_size=size, check=False)))
        rows.start = start
        flat_here = flat_nodes(rows, scales, finite_volumes=True)
        flat, looked_at = flat + count_true(flat_here), looked_at + len(flat_here)
        path, _ = lines_of(links_among(rows, scales, flat_here, start, ties=False), rows, LEAST_LINE, nodes)
        on_lines += count_true(path >= 0)
    if on_lines >= WORTH_WHILE * looked_at:
        return LinesFound(None)
    return _lines_everywhere(A, size, scales) if flat >= WORTH_WHILE * looked_at else None


def _lines_everywhere(A: CsrMatrix, size: int, scales: Array) -> LinesFound | None:
    """Return the lines with the order of the nodes by lines, which follow each other by the reverse Cuthill-McKee order of their
    graph, so that the matrix has a narrow band; None if few nodes are on lines."""
    flat, parts, xp = list[Array](), list[Links](), A.device.xp
    visit_rows(A, size, lambda rows: flat.append(flat_nodes(in_float64(rows), scales, finite_volumes=True)))
    of_all = xp.concatenate(flat)
    visit_rows(A, size, lambda rows: parts.append(links_among(in_float64(rows), scales, of_all, 0, ties=False)))
    counts = xp.concatenate([xp.diff(part.offsets) for part in parts])
    offsets = xp.concatenate([xp.zeros(1, dtype=np.int64), xp.cumsum(counts)])
    path, place = long_paths(offsets, xp.concatenate([part.columns for part in parts]), LEAST_LINE, len(counts))
    if count_true(path >= 0) < WORTH_WHILE * len(counts):
        return None
    path, place = map(A.device.to_host, (path, place))
    line = np.unique(np.where(path < 0, np.arange(len(path)), path), return_inverse=True)[1].reshape(-1)
    return LinesFound(np.lexsort((place, _places_of_lines(A, size, line)[line])).astype(np.int64, copy=False))


def _places_of_lines(A: CsrMatrix, size: int, line: Array) -> Array:
    """Return the place of every line in the reverse Cuthill-McKee order of the graph of lines."""
    from scipy.sparse.csgraph import reverse_cuthill_mckee  # here, as it loads all of scipy.linalg

    count, keys = int(line.max()) + 1, list[Array]()

    def visit(rows: BlockRows) -> None:
        to_host = A.device.to_host
        row = to_host(row_numbers(rows.offsets, rows.columns.size)) + rows.start
        keys.append(np.unique(line[row] * np.int64(count) + line[to_host(rows.columns)]))

    visit_rows(A, size, visit)
    key = np.unique(np.concatenate(keys))
    ones = np.ones(len(key), dtype=np.int8)
    graph = scipy.sparse.coo_array((ones, (key // count, key % count)), shape=(count, count)).tocsr()
    places = np.empty(count, dtype=np.int64)
    places[reverse_cuthill_mckee(graph, symmetric_mode=True)] = np.arange(count)
    return places


def _inverse_roots(A: CsrMatrix, size: int) -> Array:
    """Return ``1 / sqrt(a_ii)``, (nodes, size); 0 where an entry is not positive."""
    xp, diagonal = A.device.xp, A.diagonal_blocks(1).reshape(-1, size).astype(np.float64, copy=False)
    return xp.where(diagonal > 0.0, 1.0 / xp.sqrt(xp.where(diagonal > 0.0, diagonal, 1.0)), 0.0)
