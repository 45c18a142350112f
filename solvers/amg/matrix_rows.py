"""The rows of a matrix as blocks, complete and in ascending order, whatever its format, on the device of the matrix.

Of a matrix that ranks share, :class:`Boundary` adds what a rank's rows have to do with nodes of other ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from penstock.host.threads import mapped
from penstock.spmv import Array, BsrMatrix, Device, InputError, Operator, SparseMatrix, SweptOperator, device_of
from penstock.spmv.communicator import Communicator
from penstock.spmv.products.block_rows import BlockRows, block_rows, in_float64, row_numbers, rows_of
from penstock.spmv.products.completion import Completion, stored_size

# Of the stored rows that are visited at a time: on a CPU, what is formed from them stays in the cache; on a GPU, they occupy it,
# better if there is room for more. Complete rows, products with them and rows that wait take up to 13 times as much (measured: a
# cube of 128^3 nodes of 3 unknowns, whose half takes 2.2 GB: 13 GB at once), so this share is two fifths of the free memory. Of a
# streamed matrix, for which memory may be short, fewer are visited: more than 1 GiB would save a tenth of the set-up.
_SLAB_NBYTES = {"cpu": 4 << 20, "cuda": 96 << 20}
_LARGEST_SLAB_NBYTES, _LARGEST_OF_STREAMED_NBYTES, _SHARE_OF_FREE = 4 << 30, 1 << 30, 32


class _Coupling(Protocol):
    """Entries of a rank's rows in some columns of a neighbour, and the own rows of which the neighbour needs vectors."""

    neighbour: int
    rows: slice
    matrix: Any
    sends: Any
    block_size: int


@runtime_checkable
class IsSharedOut(Protocol):
    """This rank's rows of a matrix: a square of own rows and columns, and a coupling with each neighbour."""

    square: Any
    couplings: Sequence[_Coupling]
    communicator: Communicator


def block_size_of(A: Operator) -> int:
    """Return the rows of the blocks that a matrix stores, 1 without blocks."""
    if isinstance(A, IsSharedOut):
        return A.couplings[0].block_size if A.couplings else block_size_of(A.square)
    if isinstance(A, SparseMatrix):
        return stored_size(A)
    return A.block_size if isinstance(A, SweptOperator) else 1


def diagonal_and_row_sums(A: Operator, size: int) -> tuple[Array, Array]:
    """Return the dense blocks on the diagonal, and the sums of the absolute values of every row; one sweep if A is streamed."""
    xp = A.device.xp
    ones = xp.ones(A.shape[0], dtype=A.dtype)
    if isinstance(A, IsSharedOut):
        with own_part_of(A) as square:
            blocks, sums = diagonal_and_row_sums(square, size)
        for coupling in A.couplings:
            sums[coupling.rows] += coupling.matrix.apply_absolute(xp.ones(coupling.matrix.shape[1], dtype=A.dtype))
        return blocks, sums
    if not isinstance(A, SweptOperator):
        matrix = _as_matrix(A)
        return matrix.diagonal_blocks(size), matrix.apply_absolute(ones)
    blocks, sums = xp.zeros((A.shape[0] // size, size, size), dtype=A.dtype), xp.zeros(A.shape[0], dtype=A.dtype)

    def visit(first_row: int, slab: SparseMatrix) -> None:
        slab.add_diagonal_blocks(first_row, blocks)
        slab.add_absolute(first_row, ones, sums)

    A.visit_slabs(visit)
    return blocks, sums


def visit_rows(
    A: Operator, block_size: int, visit: Callable[[BlockRows], None], bounds: Sequence[int] | None = None
) -> None:
    """Call ``visit(rows)`` for consecutive rows of A, with blocks of ``block_size``; one sweep if A is streamed.

    Of a matrix that ranks share these are the rows of this rank's square. A matrix whose entries cannot be read is refused.
    ``bounds``, from 0 to the number of rows, are those between which rows of a matrix in memory are not cut; subdivisions of
    one that is streamed never are.
    """
    if isinstance(A, IsSharedOut):
        with own_part_of(A) as square:
            visit_rows(square, block_size, visit, bounds)
        return
    if isinstance(A, SweptOperator):
        completion = Completion(block_size, visit, _enough(A.device, _LARGEST_OF_STREAMED_NBYTES))
        A.turn_to(1)
        A.visit_slabs(completion.add)
        return
    A = _as_matrix(A)
    granularity = math.lcm(A.row_granularity, block_size)
    enough = _enough(A.device, _LARGEST_SLAB_NBYTES)
    nbytes = max(A.nbytes, 8 * A.values.size, 1)  # of rows in float64, as they are visited
    step = max(1, A.shape[0] * enough // nbytes // granularity) * granularity
    cuts = list(itertools.pairwise(bounds or (*range(0, A.shape[0], step), A.shape[0])))
    if isinstance(A, BsrMatrix) and stored_size(A) == block_size:  # its rows are complete, and of such blocks
        rows = rows_of(A)
        for start, stop in cuts:
            visit(in_float64(rows.part(start // block_size, stop // block_size)))
        return
    completion = Completion(block_size, visit)
    for start, stop in cuts:
        completion.add(start, A.rows(start, stop))


def _enough(device: Device, largest_nbytes: int) -> int:
    """Return the bytes of stored rows that are visited at a time."""
    least = _SLAB_NBYTES[device.kind]
    return least if device.kind == "cpu" else max(least, min(largest_nbytes, device.free_nbytes() // _SHARE_OF_FREE))


def row_bounds_of(A: Operator) -> tuple[int, ...]:
    """Return the rows at which those begin that are advanced together, and the end: subdivisions of a streamed matrix."""
    if isinstance(A, IsSharedOut):
        return row_bounds_of(A.square)
    bounds = A.row_bounds if isinstance(A, SweptOperator) else None
    return (0, A.shape[0]) if bounds is None else tuple(bounds)


@contextmanager
def own_part_of(A: Operator) -> Iterator[Operator]:
    """Hand out the square of a rank's rows, or the matrix itself where no ranks share it.

    The square may be swept alone meanwhile: then the ranks turn back, so that neighbours sweep towards each other again.
    """
    if not isinstance(A, IsSharedOut):
        yield A
        return
    try:
        yield A.square
    finally:
        if isinstance(A, SweptOperator):
            A.turn_to(1)


def bounds_within(rows: BlockRows, bounds: Sequence[int], block_size: int) -> list[int]:
    """Return the nodes of ``block_size`` unknowns at which parts begin or end among some rows; ``bounds`` are rows."""
    return [bound // block_size for bound in bounds if rows.start <= bound // block_size <= rows.stop]


def graph_of(A: Operator, size: int) -> tuple[Array, Array]:
    """Return the neighbours of every node of ``size`` unknowns, as in CSR; one sweep if A is streamed.

    They are on the device of a matrix that is stored so, whose arrays they are then, else on the host.
    """
    if isinstance(A, BsrMatrix) and stored_size(A) == size:
        return A.row_offsets, A.column_indices
    graph = Graph(A.shape[0] // size)
    visit_rows(A, size, lambda rows: graph.add(rows.offsets, rows.columns))
    return graph.arrays()


class Graph:
    """The neighbours of nodes, gathered on the host from the rows of a matrix as they come."""

    def __init__(self, nodes: int) -> None:
        self._offsets, self._columns, self._nodes = np.zeros(nodes + 1, dtype=np.int64), list[Array](), 0

    def add(self, offsets: Array, columns: Array) -> None:
        """Add the neighbours of the next nodes; ``offsets`` begin at 0."""
        start, device = self._nodes, device_of(offsets)
        self._nodes += len(offsets) - 1
        self._offsets[start + 1 : self._nodes + 1] = device.to_host(offsets[1:]) + self._offsets[start]
        self._columns.append(device.to_host(columns))

    def arrays(self) -> tuple[Array, Array]:
        """Return the offsets and the neighbours, int32, as in CSR."""
        if len(self._columns) == 1:
            return self._offsets, self._columns[0]
        columns, ends = np.empty(self._offsets[-1], dtype=np.int32), np.cumsum([0, *map(len, self._columns)])

        def put(part: int) -> None:
            columns[ends[part] : ends[part + 1]] = self._columns[part]

        mapped(put, range(len(self._columns)))
        return self._offsets, columns


def _as_matrix(A: Operator) -> SparseMatrix:
    if not isinstance(A, SparseMatrix):
        raise InputError(
            f"a coarse level is made of the entries of a sparse matrix, which {type(A).__name__} does not show; "
            "make a dense array one by scipy.sparse.csr_array"
        )
    return A


class Boundary:
    """The couplings of a rank's rows, in blocks of ``size``, with the nodes of neighbours numbered behind its own."""

    def __init__(self, A: IsSharedOut, size: int) -> None:
        self.nodes, self.communicator, self._couplings = A.square.shape[0] // size, A.communicator, A.couplings
        self._device: Device = A.square.device
        # Rows, columns and blocks of every coupling; rows ascend.
        self._entries: list[tuple[Array, Array, Array]] = []
        self._stop = self.nodes
        for coupling in A.couplings:
            matrix: SparseMatrix = coupling.matrix
            if coupling.block_size != size:
                raise InputError(
                    f"a coarse level of nodes of {size} unknowns needs couplings of such blocks; give block_size={size} where "
                    "rows are split"
                )
            arrays = matrix.arrays()
            rows = row_numbers(arrays["row_offsets"], arrays["column_indices"].size) + coupling.rows.start // size
            blocks = arrays["values"].reshape(-1, size, size).astype(np.float64, copy=False)
            self._entries.append((rows, arrays["column_indices"] + np.int64(self._stop), blocks))
            self._stop += matrix.shape[1] // size
        self._sent = [_nodes(coupling.sends, size, self._device) for coupling in A.couplings]

    @classmethod
    def of(cls, A: Any, size: int) -> Self | None:
        """Return the boundary of a matrix that ranks share, or None. Collective."""
        if not isinstance(A, IsSharedOut):
            return None
        with A.communicator.together():
            return cls(A, size)

    def widened(self, rows: BlockRows) -> BlockRows:
        """Return rows of the square with their entries in columns of neighbours."""
        xp, parts = self._device.xp, []
        ends = xp.array([rows.start, rows.stop])
        for of_row, columns, blocks in self._entries:
            low, high = self._device.to_host(xp.searchsorted(of_row, ends)).tolist()
            if low < high:
                parts.append((of_row[low:high], columns[low:high], blocks[low:high]))
        if not parts:
            return rows
        own = row_numbers(rows.offsets, rows.columns.size) + rows.start, rows.columns.astype(np.int64), rows.blocks
        of_row, columns, blocks = (xp.concatenate(arrays) for arrays in zip(own, *parts, strict=True))
        return block_rows(rows.start, rows.stop, of_row, columns, blocks, self._stop)

    def exchange(self, rows_of: Callable[[int, int], BlockRows]) -> BlockRows:
        """Send the rows of P that neighbours need, and return theirs; ``rows_of(start, stop)`` returns own ones. Collective."""
        to_each: list[Any] = [None] * self.communicator.size
        with self.communicator.together():
            for coupling, nodes in zip(self._couplings, self._sent, strict=True):
                rows = rows_of(int(nodes[0]), int(nodes[-1]) + 1)
                to_each[coupling.neighbour] = self._packed(rows, nodes)
        received = self.communicator.exchange_objects(to_each)
        parts = [received[coupling.neighbour] for coupling in self._couplings]
        xp = self._device.xp
        counts = np.concatenate([np.zeros(1, dtype=np.int64), *(part[0] for part in parts)])
        offsets = self._device.asarray(np.cumsum(counts))
        if not parts:
            nothing = rows_of(0, 0)
            return BlockRows(self.nodes, offsets, nothing.columns, nothing.blocks)
        columns, blocks = (xp.concatenate([self._device.asarray(part[i]) for part in parts]) for i in (1, 2))
        return BlockRows(self.nodes, offsets, columns, blocks)

    def _packed(self, P: BlockRows, nodes: Array) -> tuple[Array, Array, Array]:
        """Return the blocks in each of some rows, their columns, and themselves, on the host."""
        xp, to_host = self._device.xp, self._device.to_host
        first = P.offsets[nodes - P.start]
        counts = P.offsets[nodes - P.start + 1] - first
        offsets = xp.concatenate([xp.zeros(1, dtype=np.int64), xp.cumsum(counts)])
        total = int(offsets[-1])
        row = row_numbers(offsets, total)
        places = first[row] + xp.arange(total) - offsets[row]
        return to_host(counts), to_host(P.columns[places]), to_host(P.blocks[places])


def _nodes(sends: slice | Array, size: int, device: Device) -> Array:
    rows = np.arange(sends.start, sends.stop) if isinstance(sends, slice) else device.to_host(sends)
    return device.asarray(rows[::size] // size)
