"""The entries of a rank's rows in the columns of other ranks, and what those need of this rank's vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

from penstock.distributed.mpi import MpiCommunicator
from penstock.distributed.partition import RowPartition
from penstock.spmv import Array, BsrMatrix, CsrMatrix, InputError, SparseMatrix
from penstock.spmv.device import CPU, Device

__all__ = ["Coupling", "split_rows"]

Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Coupling:
    """The entries of this rank's rows in the columns of one neighbour, and what the neighbour needs of us.

    Parameters
    ----------
    neighbour : int
    rows : slice
        Own rows, from the first to the last that couples with the neighbour.
    matrix : CsrMatrix or BsrMatrix
        Of these rows, and of those columns of the neighbour that have entries, in ascending order.
    sends : slice or int64 array
        Own rows whose values the neighbour needs, in ascending order.
    """

    neighbour: int
    rows: slice
    matrix: Any
    sends: slice | Array

    def outgoing(self, x: Array) -> Array:
        """Return what the neighbour needs of vectors: a view where its rows are adjacent."""
        return x[self.sends]

    def to_device(self, device: Device) -> Coupling:
        """Return the coupling on a device."""
        sends = self.sends if isinstance(self.sends, slice) else device.asarray(self.sends)
        return Coupling(self.neighbour, self.rows, self.matrix.to_device(device), sends)


def split_rows(
    rows: Any, partition: RowPartition, communicator: MpiCommunicator, *, block_size: int = 1
) -> tuple[scipy.sparse.csr_array, list[Coupling]]:
    """Split a rank's rows of a matrix into its own square and couplings with its neighbours. Collective.

    Parameters
    ----------
    rows : scipy.sparse or penstock matrix, (own rows, all rows)
        The pattern of the whole matrix must be symmetric in blocks.
    partition : RowPartition
    communicator : MpiCommunicator
    block_size : int
        Couplings have square blocks of so many rows.

    Raises
    ------
    InputError
        On all ranks, if the rows of one are not those of the partition, blocks are cut, or the pattern is not symmetric.
    """
    own, size = partition.of(communicator.rank), int(block_size)
    with communicator.together():
        rows = rows.to_csr() if isinstance(rows, SparseMatrix) else rows
        _check(rows, partition, communicator, size)
        slab = scipy.sparse.csr_array(rows)
        slab.sort_indices()
    columns = slab.indices.astype(np.int64)
    inside = (columns >= own.start) & (columns < own.stop)
    square = _part(slab, inside, columns[inside] - own.start, len(own))
    outside = np.unique(columns[~inside] // size)
    owners = partition.owners(outside * size)
    needed = [outside[owners == rank] for rank in range(communicator.size)]
    wanted = communicator.exchange_objects(needed)
    couplings, asymmetric = [], ""
    for neighbour, (blocks, given) in enumerate(zip(needed, wanted, strict=True)):
        if bool(blocks.size) != bool(given.size):
            asymmetric = f"of ranks {communicator.rank} and {neighbour} only one needs values of the other"
        elif blocks.size:
            first, stop = partition.bounds[neighbour], partition.bounds[neighbour + 1]
            mask = (columns >= first) & (columns < stop)
            places = size * np.searchsorted(blocks, columns[mask] // size) + columns[mask] % size
            whole = _part(slab, mask, places, size * blocks.size)
            sends = (size * given[:, None] + np.arange(size)).reshape(-1) - own.start
            couplings.append(_coupling(neighbour, whole, sends, size))
    with communicator.together():
        if asymmetric:
            raise InputError(f"the pattern of the matrix is not symmetric: {asymmetric}")
    return square, couplings


def _check(rows: Any, partition: RowPartition, communicator: MpiCommunicator, size: int) -> None:
    own = partition.of(communicator.rank)
    if partition.ranks != communicator.size:
        raise InputError(f"the partition is for {partition.ranks} ranks, but there are {communicator.size}")
    if not scipy.sparse.issparse(rows) or rows.shape != (len(own), partition.rows):
        given = f"a {type(rows).__name__} of shape {np.shape(rows)}"
        raise InputError(f"rows must be a SciPy matrix of shape {(len(own), partition.rows)}, not {given}")
    if size < 1 or any(bound % size for bound in partition.bounds):
        raise InputError(f"the partition {partition.bounds} cuts blocks of {size} rows; cut at multiples of them")


def _part(slab: scipy.sparse.csr_array, mask: Array, columns: Integers, width: int) -> scipy.sparse.csr_array:
    """Return the entries of a mask, in other columns."""
    offsets = np.concatenate([[0], np.cumsum(mask)])[slab.indptr]
    return scipy.sparse.csr_array((slab.data[mask], columns, offsets), shape=(slab.shape[0], width))


def _coupling(neighbour: int, whole: scipy.sparse.csr_array, sends: Integers, size: int) -> Coupling:
    coupled = np.flatnonzero(np.diff(whole.indptr))
    low, high = int(coupled[0]) // size * size, -(-(int(coupled[-1]) + 1) // size) * size
    part = whole[low:high]
    matrix = CsrMatrix.from_csr(part) if size == 1 else BsrMatrix.from_csr(part, block_size=size)
    adjacent = sends[-1] - sends[0] + 1 == sends.size
    return Coupling(
        neighbour,
        slice(low, high),
        matrix.to_device(CPU),
        slice(int(sends[0]), int(sends[-1]) + 1) if adjacent else sends,
    )
