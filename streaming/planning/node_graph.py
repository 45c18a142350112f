"""The graph of the nodes of a matrix: which nodes have entries with each other, formed by all threads."""

from __future__ import annotations

import numpy as np
import scipy.sparse

from penstock.spmv import Array
from penstock.spmv.compilation.jit import serial_kernel, shared_range
from penstock.spmv.compilation.sorting import sort_part


def node_graph(offsets: Array, columns: Array, size: int) -> scipy.sparse.csr_array:
    """Return the graph of nodes of ``size`` rows each as a SciPy CSR array of ones.

    Reads the pattern twice, and the columns of every node ascend. With a ``size`` of 1 it is the pattern as it stands.

    Parameters
    ----------
    offsets, columns : arrays of int
        A square pattern in CSR, of which ``size`` divides the number of rows.
    size : int
    """
    nodes = (len(offsets) - 1) // size
    if size > 1:
        counts = np.zeros(nodes, dtype=np.int64)
        nothing: Array = np.empty(0, dtype=np.int64)
        _find_neighbours(nodes, offsets, columns, size, nothing, np.empty(0, dtype=np.int32), counts)
        starts = np.concatenate([[0], np.cumsum(counts)])
        neighbours = np.empty(int(starts[-1]), dtype=np.int32)
        _find_neighbours(nodes, offsets, columns, size, starts, neighbours, counts)
        offsets, columns = starts, neighbours
    return scipy.sparse.csr_array((np.ones(len(columns), dtype=np.int8), columns, offsets), shape=(nodes, nodes))


@shared_range(least=256)
def _find_neighbours(
    begin: int, end: int, offsets: Array, columns: Array, size: int, starts: Array, neighbours: Array, counts: Array
) -> None:
    """Count the neighbours of nodes, and write them from ``starts`` on, if there are starts."""
    own = np.empty(64, dtype=np.int32)
    for node in range(begin, end):
        rows = offsets[node * size : node * size + size + 1]
        if rows[size] - rows[0] > own.size:
            own = np.empty(2 * (rows[size] - rows[0]), dtype=np.int32)
        counts[node] = _neighbours_of(rows, columns, size, own)
        if starts.size:
            for k in range(counts[node]):
                neighbours[starts[node] + k] = own[k]


@serial_kernel
def _neighbours_of(rows: Array, columns: Array, size: int, own: Array) -> int:
    """Write the nodes of the columns of some rows, ascending and each once, and return their number."""
    count = 0
    for entry in range(rows[0], rows[1]):
        other = columns[entry] // size
        if count == 0 or other > own[count - 1]:
            own[count] = other
            count += 1
        elif other < own[count - 1]:
            return int(_sorted_neighbours(rows, columns, size, own))
    # The rows of a node mostly have entries in the same places, so that the others add nothing.
    for row in range(1, size):
        place = 0
        for entry in range(rows[row], rows[row + 1]):
            other = columns[entry] // size
            while place < count and own[place] < other:
                place += 1
            if place == count or own[place] != other:
                return int(_sorted_neighbours(rows, columns, size, own))
    return count


@serial_kernel
def _sorted_neighbours(rows: Array, columns: Array, size: int, own: Array) -> int:
    """Return what :func:`_neighbours_of` does, of rows in which nothing is known."""
    entries = rows[size] - rows[0]
    for k in range(entries):
        own[k] = columns[rows[0] + k] // size
    sort_part(own, 0, entries)
    count = 0
    for k in range(entries):
        if count == 0 or own[k] != own[count - 1]:
            own[count] = own[k]
            count += 1
    return count
