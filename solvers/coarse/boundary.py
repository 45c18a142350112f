"""What a rank's rows of a matrix have to do with nodes of other ranks, while a coarse matrix is formed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from penstock.spmv import Array, Device, InputError, SparseMatrix
from penstock.spmv.communicator import Communicator
from penstock.spmv.products.block_rows import BlockRows, block_rows, row_numbers


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
