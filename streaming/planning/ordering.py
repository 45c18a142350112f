"""Bandwidth-reducing order of the unknowns, needed for several powers per sweep."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from penstock.spmv import Array, InputError
from penstock.spmv.compilation.jit import shared_range
from penstock.spmv.formats.reordering import reordered, rows_of_nodes
from penstock.streaming.planning.node_graph import node_graph
from penstock.streaming.stores.base import Store
from penstock.streaming.stores.buffers import aligned_buffer

Integers = np.ndarray[Any, np.dtype[np.int64]]

_RUN = 1024  # rows of which the extents are joined once for all cuts

# Sums of squares of coordinates must not overflow.
_LARGEST_COORDINATE = 1e100


def _block_size(A: Any) -> int:
    return int(A.blocksize[0]) if A.format == "bsr" else 1


@dataclass(frozen=True)
class ColumnExtents:
    """The first and the last column of every row, which determine the reach of any cut.

    Parameters
    ----------
    first, last : int64 array, (rows,)

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import ColumnExtents
    >>> extents = ColumnExtents.of(Cantilever(nodes=4, dof=1).matrix().to_csr())
    >>> extents.last[:2].tolist(), extents.reach([0, 32]), extents.reach(range(0, 64, 8))
    ([21, 22], 1, 3)
    """

    first: Integers
    last: Integers
    _reaches: dict[tuple[int, ...], int] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, A: Any, block_size: int = 1) -> ColumnExtents:
        """Return the extents of a SciPy CSR or BSR matrix.

        ``block_size`` is the size of the blocks in which the matrix will be stored: rows are widened to whole blocks.
        """
        size, rows = _block_size(A), A.shape[0]
        if not A.has_sorted_indices:
            A = A.sorted_indices()
        first, last = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.int64)
        _find_extents(len(A.indptr) - 1, np.asarray(A.indptr), np.asarray(A.indices), size, block_size, first, last)
        return cls(first, last)

    @cached_property
    def _of_runs(self) -> tuple[Integers, Integers]:
        """The extents of whole runs of rows, of which many cuts are made."""
        starts = np.arange(0, len(self.first), _RUN)
        if not starts.size:
            return self.first, self.last
        return np.minimum.reduceat(self.first, starts), np.maximum.reduceat(self.last, starts)

    def reach(self, row_starts: Sequence[int]) -> int:
        """Return :func:`reach_of` slabs that begin at these rows."""
        key = tuple(row_starts)
        if key in self._reaches:
            return self._reaches[key]
        starts = np.asarray(row_starts, dtype=np.int64)
        firsts, lasts = np.empty_like(starts), np.empty_like(starts)
        _join_extents(len(starts), self.first, self.last, *self._of_runs, starts, firsts, lasts)
        bounds = zip(firsts.tolist(), (lasts + 1).tolist(), strict=True)
        reach = self._reaches[key] = reach_of(row_starts, [range(*pair) for pair in bounds])
        return reach


@shared_range(least=16384)
def _find_extents(
    begin: int, end: int, offsets: Any, columns: Any, size: int, block: int, first: Integers, last: Integers
) -> None:
    """Take the ends of each sorted row of ``size`` x ``size`` blocks, widened to blocks; an empty row couples with itself."""
    for row in range(begin, end):
        start, stop = offsets[row], offsets[row + 1]
        low, high = (columns[start], columns[stop - 1]) if stop > start else (row, row)
        low, high = (
            np.int64(low) * size // block * block,
            (np.int64(high) * size + size - 1) // block * block + block - 1,
        )
        for scalar_row in range(row * size, row * size + size):
            first[scalar_row], last[scalar_row] = low, high


@shared_range(least=256)
def _join_extents(
    begin: int, end: int, first: Integers, last: Integers, first_of_run: Integers, last_of_run: Integers,
    starts: Integers, firsts: Integers, lasts: Integers,
) -> None:  # fmt: skip
    for slab in range(begin, end):
        stop = starts[slab + 1] if slab + 1 < starts.shape[0] else first.shape[0]
        row = starts[slab]
        low, high = first[row], last[row]
        while row < stop:
            if row % _RUN == 0 and row + _RUN <= stop:
                low, high = min(low, first_of_run[row // _RUN]), max(high, last_of_run[row // _RUN])
                row += _RUN
            else:
                low, high = min(low, first[row]), max(high, last[row])
                row += 1
        firsts[slab], lasts[slab] = low, high


def reach_of(row_starts: Sequence[int], columns: Sequence[range]) -> int:
    """Return the largest number of slabs to either side that a slab couples with, at least 1.

    Parameters
    ----------
    row_starts : sequence of int
        First row of each slab.
    columns : sequence of range
        From the first to the last column of each slab; empty for a slab without entries. For a symmetric pattern the columns
        on one side of the diagonal are enough.

    Returns
    -------
    int

    Examples
    --------
    >>> from penstock.streaming import reach_of
    >>> reach_of([0, 10, 20], [range(0, 25), range(8, 30), range(3, 30)])
    2
    """
    reaches = [1]
    for number, extent in enumerate(columns):
        if extent:
            first, last = (bisect.bisect_right(row_starts, column) - 1 for column in (extent[0], extent[-1]))
            reaches += [number - first, last - number]
    return max(reaches)


def reach_of_store(store: Store) -> int:
    """Return :func:`reach_of` the slabs of a stored matrix; reads all of its structure, but no values.

    Parameters
    ----------
    store : Store

    Returns
    -------
    int
        At least 1.

    Raises
    ------
    StoreError
        If the store cannot be read.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import HostStore, reach_of_store
    >>> reach_of_store(HostStore.create(Cantilever(nodes=4, dof=3).subdivisions(8)))
    4
    """
    index, columns = store.index, []
    for number, subdivision in enumerate(index.subdivisions):
        structure = aligned_buffer(subdivision.part_nbytes("structure"))
        store.read_into(number, structure, "structure")
        values: np.ndarray[Any, Any] = np.empty(subdivision.part_nbytes("values"), dtype=np.uint8)  # never read
        arrays = index.arrays(number, structure, "structure")
        columns.append(index.view(number, values, arrays).column_range())
    return reach_of(index.row_starts, columns)


@dataclass(frozen=True)
class LevelOrder:
    """A permutation of the unknowns.

    Parameters
    ----------
    permutation : int64 array, (rows / block_size,)
        The old number of each node.
    block_size : int
        Number of unknowns of a node, which stay together.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.streaming import LevelOrder
    >>> order = LevelOrder(np.array([2, 0, 1]), block_size=2)
    >>> order.rows.tolist(), order.back(order.forward(np.arange(6.0))).tolist()
    ([4, 5, 0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    """

    permutation: Integers
    block_size: int = 1

    @property
    def rows(self) -> Integers:
        """The old number of each row."""
        return rows_of_nodes(self.permutation, self.block_size)

    def matrix(self, A: Any) -> Any:
        """Return a SciPy CSR or BSR matrix in the new order, with sorted columns; needs the memory of a second matrix."""
        size = _block_size(A)
        if self.block_size % size:
            raise InputError(f"blocks of {size} rows do not divide nodes of {self.block_size} unknowns")
        return reordered(A, rows_of_nodes(self.permutation, self.block_size // size))

    def forward(self, vectors: Array) -> Array:
        """Return vectors on the host, ``(n,)`` or ``(n, k)``, from the old order in the new one."""
        moved: Array = np.take(self._of_nodes(vectors), self.permutation, axis=0)
        return moved.reshape(vectors.shape)

    def back(self, vectors: Array) -> Array:
        """Return vectors on the host from the new order in the old one."""
        of_nodes = self._of_nodes(vectors)
        restored = np.empty_like(of_nodes)
        restored[self.permutation] = of_nodes
        return restored.reshape(vectors.shape)

    def _of_nodes(self, vectors: Array) -> Array:
        """Return vectors with a row for each node; refuse those of another length."""
        nodes, size = len(self.permutation), self.block_size
        if vectors.shape[0] != nodes * size:
            raise InputError(f"vectors of {vectors.shape[0]} rows do not belong to {nodes} nodes of {size} unknowns")
        return vectors.reshape(nodes, size * math.prod(vectors.shape[1:]))


def layer_order(coordinates: Any, block_size: int = 1) -> LevelOrder:
    """Return an order in layers of nodes across the longest axis of a body, and in rows in each layer.

    A layer is about as thick as nodes of a solid lie apart, so that nodes couple with few layers where those that are coupled lie
    near each other. It takes a sort, where :func:`level_order` takes a search of the graph.

    Parameters
    ----------
    coordinates : array on the host, (nodes, 2) or (nodes, 3)
    block_size : int
        Number of unknowns of a node.

    Returns
    -------
    LevelOrder

    Raises
    ------
    InputError
        If coordinates are not finite, or too large.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.streaming import layer_order
    >>> layer_order(np.array([[3.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 0.0]])).permutation.tolist()
    [3, 1, 2, 0]
    """
    points = np.array(np.asarray(coordinates).T, dtype=np.float64, order="C")  # one axis after the other
    if points.ndim != 2 or not points.size or not abs(points).max() < _LARGEST_COORDINATE:
        raise InputError(f"coordinates must be finite numbers below {_LARGEST_COORDINATE:g}, a row for each node")
    dimensions, nodes = points.shape
    points -= points.mean(axis=1)[:, None]
    _, principal = np.linalg.eigh(points @ points.T)
    # The axes of the coordinates, or the principal ones of a body that lies across them: those of the smaller box.
    extents, along = min(
        ((np.ptp(turned, axis=1), turned) for turned in (points, principal.T @ points)),
        key=lambda pair: float(pair[0].prod()),
    )
    longest_first = np.argsort(-extents, kind="stable")
    along, extents = along[longest_first], np.maximum(extents[longest_first], 1e-300)
    between = max((extents.prod() / nodes) ** (1 / dimensions), extents[0] / nodes)
    along -= along.min(axis=1)[:, None]
    # One number for each node is sorted sooner than three: layers, rows, and the place in a row, from 0 to 1/2.
    place = np.floor(along[0] / between)
    for axis in range(1, dimensions - 1):
        rows = np.floor(along[axis] / between)
        place = place * (rows.max() + 1.0) + rows
    place += along[-1] / (2.0 * extents[-1])
    return LevelOrder(_sorted_order(place), block_size)


def _sorted_order(numbers: Array) -> Integers:
    """Return the order of numbers from 0 on, which are compared to 32 bits; equal ones stay in their order."""
    numbers *= (2**32 - 1) / max(float(numbers.max()), 0.5)
    keys = numbers.astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= np.arange(keys.size, dtype=np.uint64)  # sorting numbers takes less time than sorting their places
    keys.sort()
    order: Integers = (keys & np.uint64(2**32 - 1)).astype(np.int64)
    return order


def level_order(A: Any, block_size: int = 1) -> LevelOrder:
    """Return the reverse Cuthill-McKee order, by the levels of a breadth-first search (Cuthill and McKee 1969; George 1971).

    Rows couple only with rows of their own level and of the adjacent levels, so slabs at least as thick as a level couple
    only with their neighbours. The search is SciPy's.

    Parameters
    ----------
    A : SciPy CSR or BSR matrix
        With a symmetric pattern.
    block_size : int
        Number of unknowns that stay together, for example those of a node.

    Returns
    -------
    LevelOrder

    Raises
    ------
    InputError
        If A is of another type or not square, or the blocks do not fit.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> from penstock.streaming import ColumnExtents, level_order
    >>> path = scipy.sparse.diags_array([1.0, 2.0, 1.0], offsets=[-1, 0, 1], shape=(9, 9)).tocsr()
    >>> mixed = np.random.default_rng(0).permutation(9)
    >>> A = path[mixed][:, mixed].tocsr()
    >>> order = level_order(A)
    >>> ColumnExtents.of(order.matrix(A)).reach(range(9))
    1
    """
    if getattr(A, "format", "") not in ("csr", "bsr"):
        raise InputError(f"level_order needs a SciPy CSR or BSR matrix, not {type(A).__name__}")
    if block_size < 1 or A.shape[0] != A.shape[1] or not A.shape[0] or A.shape[0] % block_size:
        raise InputError(
            f"level_order needs a square matrix that blocks of {block_size} rows divide, not one of shape {A.shape}"
        )
    stored_size = _block_size(A)
    if block_size % stored_size:
        raise InputError(f"blocks of {stored_size} rows do not divide nodes of {block_size} unknowns")
    graph = node_graph(np.asarray(A.indptr), np.asarray(A.indices), block_size // stored_size)
    from scipy.sparse.csgraph import reverse_cuthill_mckee  # here, as it loads all of scipy.linalg

    return LevelOrder(reverse_cuthill_mckee(graph, symmetric_mode=True).astype(np.int64), block_size)
