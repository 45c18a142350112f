"""The entries of a rank's rows in the columns of other ranks, and the entries of its vectors that those need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

from penstock.distributed.mpi import MpiCommunicator
from penstock.distributed.partition import RowPartition
from penstock.spmv import Array, BsrMatrix, CsrMatrix, InputError, SparseMatrix
from penstock.spmv.device import CPU, Device
from penstock.spmv.formats.validation import in_csr
from penstock.spmv.products.block_rows import csr_of

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

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.distributed import Coupling
    >>> from penstock.fem import Cantilever
    >>> corner = Cantilever(nodes=3, dof=1).matrix("csr").rows(0, 2)
    >>> coupling = Coupling(neighbour=1, rows=slice(5, 7), matrix=corner, sends=np.array([5, 6]))
    >>> coupling.block_size, coupling.outgoing(np.arange(7.0)).tolist()
    (1, [5.0, 6.0])
    """

    neighbour: int
    rows: slice
    matrix: CsrMatrix | BsrMatrix
    sends: slice | Array

    @property
    def block_size(self) -> int:
        """Rows of a block of the matrix."""
        return self.matrix.row_granularity

    def part(self, start: int, stop: int) -> CsrMatrix | BsrMatrix:
        """Return the entries of some of its rows, whole blocks, without a copy and without waiting for a GPU."""
        matrix, size = self.matrix, self.block_size
        arrays = {**matrix.arrays(), "row_offsets": matrix.row_offsets[start // size : stop // size + 1]}
        return type(matrix).from_arrays((stop - start, matrix.shape[1]), matrix.dtype, arrays, matrix.parameters())

    def outgoing(self, x: Array) -> Array:
        """Return what the neighbour needs of vectors: a view where its rows are adjacent."""
        return x[self.sends]

    def to_device(self, device: Device | str) -> Coupling:
        """Return the coupling on a device."""
        device = Device.parse(device)
        sends = self.sends if isinstance(self.sends, slice) else device.asarray(self.sends)
        return Coupling(self.neighbour, self.rows, self.matrix.to_device(device), sends)


def split_rows(
    rows: Any, partition: RowPartition, communicator: MpiCommunicator, *, block_size: int = 1
) -> tuple[CsrMatrix | BsrMatrix, list[Coupling]]:
    """Split a rank's rows of a matrix into its own square and couplings with its neighbours, on the host. Collective.

    Parameters
    ----------
    rows : scipy.sparse or penstock matrix, (own rows, all rows)
        The pattern of the whole matrix must be symmetric in blocks.
    partition : RowPartition
    communicator : MpiCommunicator
    block_size : int
        The square and the couplings are CSR for blocks of one row, else BSR.

    Returns
    -------
    CsrMatrix or BsrMatrix, (own rows, own rows), and list of Coupling

    Raises
    ------
    InputError
        On all ranks, if the rows of one are not those of the partition, blocks are cut, or of two ranks only one has entries in
        the columns of the other.

    Examples
    --------
    >>> from penstock.distributed import MpiCommunicator, RowPartition, split_rows
    >>> from penstock.fem import Cantilever
    >>> A, ranks = Cantilever(nodes=(9, 3, 3), dof=3).matrix(), MpiCommunicator()
    >>> partition = RowPartition.even(A.shape[0], ranks.size, multiple=3)
    >>> own = partition.of(ranks.rank)
    >>> square, couplings = split_rows(A.rows(own.start, own.stop), partition, ranks, block_size=3)
    >>> square.shape[0] == own.stop - own.start, len(couplings) < ranks.size
    (True, True)
    """
    own, size = partition.of(communicator.rank), int(block_size)
    with communicator.together():
        slab = _checked(rows, partition, communicator, size)
    communicator.check_same(partition=partition.bounds, block_size=size, dtype=str(slab.dtype))
    columns = slab.column_indices.astype(np.int64)  # of blocks, like all columns below
    bounds = np.array(partition.bounds) // size
    first, stop = bounds[communicator.rank], bounds[communicator.rank + 1]
    inside = (columns >= first) & (columns < stop)
    outside = np.unique(columns[~inside])
    owners = partition.owners(outside * size)
    needed = [outside[owners == rank] for rank in range(communicator.size)]
    wanted = communicator.exchange_objects(needed)
    couplings, asymmetric = [], ""
    for neighbour, (blocks, requested) in enumerate(zip(needed, wanted, strict=True)):
        if bool(blocks.size) != bool(requested.size):
            asymmetric = f"of ranks {communicator.rank} and {neighbour} only one needs values of the other"
        elif blocks.size:
            mask = (columns >= bounds[neighbour]) & (columns < bounds[neighbour + 1])
            whole = _part(slab, mask, np.searchsorted(blocks, columns[mask]), blocks.size)
            sends = (size * requested[:, None] + np.arange(size)).reshape(-1) - own.start
            couplings.append(_coupling(neighbour, whole, sends))
    with communicator.together():
        if asymmetric:
            raise InputError(f"the pattern of the matrix is not symmetric: {asymmetric}")
    return columns_within(slab, own), couplings


def columns_within(slab: CsrMatrix | BsrMatrix, own: slice) -> CsrMatrix | BsrMatrix:
    """Return the entries of a slab in the columns of a rank, counted from the first of these.

    Parameters
    ----------
    slab : CsrMatrix or BsrMatrix
    own : slice
        Columns of the rank, in scalars.

    Returns
    -------
    CsrMatrix or BsrMatrix, (rows of the slab, columns of the rank)

    Examples
    --------
    >>> from penstock.distributed import columns_within
    >>> from penstock.fem import Cantilever
    >>> slab = Cantilever(nodes=4, dof=3).matrix().rows(48, 96)
    >>> slab.shape, columns_within(slab, slice(48, 96)).shape
    ((48, 192), (48, 48))
    """
    size = slab.row_granularity
    if not 0 <= own.start <= own.stop <= slab.shape[1] or own.start % size or own.stop % size:
        raise InputError(
            f"columns {own.start} to {own.stop} of {slab.shape[1]} are out of range, or cut blocks of {size}"
        )
    first, stop = own.start // size, own.stop // size
    inside = (slab.column_indices >= first) & (slab.column_indices < stop)
    return _part(slab, inside, slab.column_indices[inside] - first, stop - first)


def _checked(rows: Any, partition: RowPartition, communicator: MpiCommunicator, size: int) -> CsrMatrix | BsrMatrix:
    """Return a rank's rows in CSR, or BSR for larger blocks."""
    own = partition.of(communicator.rank)
    if partition.ranks != communicator.size:
        raise InputError(f"the partition is for {partition.ranks} ranks, but there are {communicator.size}")
    is_matrix = isinstance(rows, SparseMatrix) or scipy.sparse.issparse(rows)
    if not is_matrix or tuple(rows.shape) != (own.stop - own.start, partition.rows):
        actual = f"a {type(rows).__name__} of shape {np.shape(rows)}"
        raise InputError(f"rows must be a matrix of shape {(own.stop - own.start, partition.rows)}, not {actual}")
    if size < 1 or any(bound % size for bound in partition.bounds):
        raise InputError(f"the partition {partition.bounds} cuts blocks of {size} rows; cut at multiples of them")
    if isinstance(rows, BsrMatrix) and rows.row_granularity == size > 1:
        return rows.to_device(CPU)
    is_ours = isinstance(rows, SparseMatrix)
    csr = csr_of(rows).to_device(CPU) if is_ours else CsrMatrix.from_csr(in_csr(rows, "rows"))
    return csr if size == 1 else BsrMatrix.from_csr(csr, block_size=size)


def _part(slab: CsrMatrix | BsrMatrix, mask: Array, columns: Integers, width: int) -> CsrMatrix | BsrMatrix:
    """Return the entries of a mask, in other columns; ``width`` is that of all columns, in blocks."""
    size = slab.row_granularity
    offsets = np.concatenate([[0], np.cumsum(mask)])[slab.row_offsets]
    arrays = {"row_offsets": offsets, "column_indices": columns.astype(np.int32), "values": slab.values[mask]}
    return type(slab).from_arrays((slab.shape[0], width * size), slab.dtype, arrays, slab.parameters())


def _coupling(neighbour: int, whole: CsrMatrix | BsrMatrix, sends: Integers) -> Coupling:
    size = whole.row_granularity
    coupled = np.flatnonzero(np.diff(whole.row_offsets)) * size
    low, high = int(coupled[0]), int(coupled[-1]) + size
    adjacent = sends[-1] - sends[0] + 1 == sends.size
    places = slice(int(sends[0]), int(sends[-1]) + 1) if adjacent else sends
    matrix = whole.rows(low, high)
    if isinstance(matrix, CsrMatrix):  # parts of it must not depend on how its entries are balanced
        chosen = CsrMatrix.whole_matrix_parameters(matrix.nnz, matrix.shape[0])
        matrix = CsrMatrix.from_arrays(matrix.shape, matrix.dtype, matrix.arrays(), chosen)
    return Coupling(neighbour, slice(low, high), matrix, places)
