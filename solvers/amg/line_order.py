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
from penstock.spmv.compilation.jit import shared_range
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
    # On a host the diagonal is read where it is needed: all of it would take longer than all the rest.
    on_host = A.device.kind == "cpu"
    scales = np.zeros((nodes, size)) if on_host else _all_scales(A, size)
    flat, on_lines, looked_at = 0, 0, 0
    for start in np.unique(np.linspace(0, max(0, nodes - _RUN), _RUNS).astype(np.int64)).tolist():
        rows = _rows_of(A, size, start, min(start + _RUN, nodes))
        if on_host:
            _add_scales(A, rows, scales)
        flat_here = flat_nodes(rows, scales, finite_volumes=True)
        flat, looked_at = flat + count_true(flat_here), looked_at + len(flat_here)
        path, _ = lines_of(links_among(rows, scales, flat_here, start, ties=False), rows, LEAST_LINE, nodes)
        on_lines += count_true(path >= 0)
    if on_lines >= WORTH_WHILE * looked_at:
        return LinesFound(None)
    if flat < WORTH_WHILE * looked_at:
        return None
    return _lines_everywhere(A, size, _all_scales(A, size) if on_host else scales)


def _all_scales(A: CsrMatrix, size: int) -> Array:
    return inverse_roots(A.diagonal_blocks(1).reshape(-1, size).astype(np.float64, copy=False))


def _add_scales(A: CsrMatrix, rows: BlockRows, scales: Array) -> None:
    """Set the scales of the nodes of some rows and of those that they couple with, for a matrix on the host."""
    own = np.arange(rows.start, rows.start + len(rows.offsets) - 1)
    nodes, size = np.union1d(own, rows.columns), scales.shape[1]
    unknowns, diagonal = (nodes[:, None] * size + np.arange(size)).reshape(-1), np.zeros(nodes.size * size)
    _find_diagonal(len(unknowns), A.row_offsets, A.column_indices, A.values, unknowns, diagonal)
    scales[nodes] = inverse_roots(diagonal.reshape(-1, size))


@shared_range(least=1024)
def _find_diagonal(
    begin: int, end: int, offsets: Array, columns: Array, values: Array, rows: Array, diagonal: Array
) -> None:
    for number in range(begin, end):
        row = rows[number]
        for entry in range(offsets[row], offsets[row + 1]):
            if columns[entry] == row:
                diagonal[number] = values[entry]


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
    places = _places_of_lines(A, size, line, place)
    return LinesFound(np.lexsort((place, places[line])).astype(np.int64, copy=False))


def _rows_of(A: CsrMatrix, size: int, start: int, stop: int) -> BlockRows:
    """Return the rows of some nodes."""
    part = A.rows(start * size, stop * size)
    rows = in_float64(rows_of(part if size == 1 else BsrMatrix.from_csr(part, block_size=size, check=False)))
    rows.start = start
    return rows


def _places_of_lines(A: CsrMatrix, size: int, line: Array, place: Array) -> Array:
    """Return the place of every line in the reverse Cuthill-McKee order of the graph of lines.

    Lines are taken for neighbours where the ends or the middle of one couple with the other.
    """
    from scipy.sparse.csgraph import reverse_cuthill_mckee  # here, as it loads all of scipy.linalg

    offsets, columns = map(A.device.to_host, (A.row_offsets, A.column_indices))
    along = np.lexsort((place, line))
    starts = np.searchsorted(line[along], np.arange(int(line.max()) + 2))
    first, stop = starts[:-1], starts[1:]
    some = np.unique(along[np.concatenate([first, (first + stop) // 2, stop - 1])])
    pattern = scipy.sparse.csr_array((columns, columns, offsets), shape=A.shape)[some * size]
    of_row = np.repeat(line[some], np.diff(pattern.indptr))
    ones = np.ones(len(of_row), dtype=np.float32)
    graph = scipy.sparse.coo_array((ones, (of_row, line[pattern.indices // size])), shape=(len(first),) * 2).tocsr()
    places = np.empty(len(first), dtype=np.int64)
    places[reverse_cuthill_mckee((graph + graph.T).tocsr(), symmetric_mode=True)] = np.arange(len(first))
    return places
