"""Lines of nodes across flat elements, and an order of the nodes in which each line is a run of them.

D of a streamed matrix couples no nodes of different subdivisions, so lines should not be cut by them. Where the nodes of a line
follow each other, few are: one at each end of a subdivision.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse

from penstock.solvers.amg.lines import LEAST_LINE, WORTH_WHILE
from penstock.solvers.amg.links import flat_nodes, inverse_roots, lines_of, links_among
from penstock.solvers.amg.paths import long_paths
from penstock.spmv import Array, BsrMatrix, CsrMatrix
from penstock.spmv.device import count_true
from penstock.spmv.products.block_rows import BlockRows, in_float64, rows_of

# Runs of nodes that are looked at, and their length; bytes of a part of the matrix of which the rows are looked at together.
_RUNS, _RUN, _PART_NBYTES = 64, 64, 64 << 20


@dataclass(frozen=True)
class LinesFound:
    """Lines of a matrix.

    ``permutation``: the old numbers of the nodes in an order in which lines are runs of nodes, int64 on the host; None if the
    nodes of each line follow each other already.
    """

    permutation: Array | None


def find_lines(A: CsrMatrix, size: int) -> LinesFound | None:
    """Return the lines of a matrix of nodes of ``size`` unknowns, or None if few nodes are on lines.

    Looks at short runs of nodes, some thousand together. If many of these look flat, but their neighbours on a line are outside
    the run, the whole matrix is read, three times.
    """
    nodes = A.shape[0] // size
    if A.shape[0] % size or not nodes:
        return None
    scales = inverse_roots(A.diagonal_blocks(1).reshape(-1, size).astype(np.float64, copy=False))
    flat, on_lines, looked_at = 0, 0, 0
    for start in np.unique(np.linspace(0, max(0, nodes - _RUN), _RUNS).astype(np.int64)).tolist():
        rows = _rows_of(A, size, start, min(start + _RUN, nodes))
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
    nodes, xp = A.shape[0] // size, A.device.xp
    step = max(1, nodes * _PART_NBYTES // max(1, A.nbytes))
    parts = [(start, min(start + step, nodes)) for start in range(0, nodes, step)]
    flat = [flat_nodes(_rows_of(A, size, *part), scales, finite_volumes=True) for part in parts]
    of_all = xp.concatenate(flat)
    links = [links_among(_rows_of(A, size, *part), scales, of_all, 0, ties=False) for part in parts]
    counts = xp.concatenate([xp.diff(part.offsets) for part in links])
    offsets = xp.concatenate([xp.zeros(1, dtype=np.int64), xp.cumsum(counts)])
    path, place = long_paths(offsets, xp.concatenate([part.columns for part in links]), LEAST_LINE, nodes)
    if count_true(path >= 0) < WORTH_WHILE * nodes:
        return None
    path, place = map(A.device.to_host, (path, place))
    is_first = np.zeros(nodes, dtype=bool)
    name = np.where(path < 0, np.arange(nodes), path)  # a line is named after one of its nodes
    is_first[name] = True
    line = (np.cumsum(is_first) - 1)[name]
    return LinesFound(np.lexsort((place, _places_of_lines(A, size, line)[line])).astype(np.int64, copy=False))


def _rows_of(A: CsrMatrix, size: int, start: int, stop: int) -> BlockRows:
    """Return the rows of some nodes."""
    part = A.rows(start * size, stop * size)
    rows = in_float64(rows_of(part if size == 1 else BsrMatrix.from_csr(part, block_size=size, check=False)))
    rows.start = start
    return rows


def _places_of_lines(A: CsrMatrix, size: int, line: Array) -> Array:
    """Return the place of every line in the reverse Cuthill-McKee order of the graph of lines."""
    from scipy.sparse.csgraph import reverse_cuthill_mckee  # here, as it loads all of scipy.linalg

    offsets, columns = map(A.device.to_host, (A.row_offsets, A.column_indices))
    nodes, lines = len(line), int(line.max()) + 1
    ones = np.ones(len(columns), dtype=np.float32)
    pattern = scipy.sparse.csr_array((ones, columns, offsets), shape=A.shape)
    onto = scipy.sparse.csr_array((ones[: len(line)], line, np.arange(nodes + 1)), shape=(nodes, lines))
    of_columns = onto if size == 1 else scipy.sparse.kron(onto, np.ones((size, 1), dtype=np.float32), format="csr")
    beside = (pattern if size == 1 else pattern[::size]) @ of_columns  # from nodes to lines
    graph = onto.T.tocsr() @ beside
    places = np.empty(lines, dtype=np.int64)
    places[reverse_cuthill_mckee(graph, symmetric_mode=True)] = np.arange(lines)
    return places
