"""A matrix whose rows are shared out among ranks, as an operator on the rows that this rank has of every vector."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np

from penstock.distributed.coupling import Coupling, split_rows
from penstock.distributed.mpi import Exchange, MpiCommunicator
from penstock.distributed.partition import RowPartition
from penstock.spmv import CPU, Array, Device, InputError, ValidatedOperator, as_vectors, format_named
from penstock.spmv.operator import HasAbsoluteProduct, HasDiagonalBlocks, is_capturable, unchecked_product
from penstock.spmv.products.block_rows import csr_of


class DistributedMatrix(ValidatedOperator):
    """This rank's rows of a square matrix: a square that needs no messages, and a coupling with each neighbour.

    Parameters
    ----------
    square : SparseMatrix or StreamedMatrix
        Own rows and columns.
    couplings : sequence of Coupling
        On the device of the square.
    communicator : MpiCommunicator
        Constructing the matrix is collective, as products are.

    Attributes
    ----------
    shape : (int, int)
        Of the square: ``x`` and ``out`` hold the rows of this rank.
    waited_for_ranks : float
        Seconds for which products waited for neighbours, so far.

    Raises
    ------
    InputError
        On all ranks, if the square of one is not on the device that it sends and receives on.

    Notes
    -----
    A product is collective. While messages are on their way the square is multiplied, then each coupling as soon as its
    neighbour's values are there. Entries of a row are thus summed in another order than by one rank, so products agree to
    rounding. One message goes to each neighbour, with those values of x that its rows need.

    Splitting by columns leaves a square matrix, to which half storage, streaming and block Jacobi apply as they are; it is the
    layout of PETSc's MPIAIJ and hypre's ParCSR.

    Examples
    --------
    >>> from penstock.distributed import DistributedMatrix, MpiCommunicator, RowPartition
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import cg
    >>> beam, ranks = Cantilever(nodes=(9, 3, 3), dof=3), MpiCommunicator()
    >>> partition = RowPartition.even(beam.unknowns, ranks.size, multiple=3)
    >>> own = partition.of(ranks.rank)
    >>> A = DistributedMatrix.from_rows(beam.matrix().rows(own.start, own.stop), partition, ranks, block_size=3)
    >>> cg(A, beam.load()[own], rtol=1e-8).converged
    True
    """

    def __init__(self, square: Any, couplings: Sequence[Coupling], communicator: MpiCommunicator) -> None:
        self.square, self.couplings, self.communicator = square, list(couplings), communicator
        self.shape, self.dtype, self.device = square.shape, np.dtype(square.dtype), square.device
        with communicator.together():
            home = communicator.device or self.device
            if home != self.device:
                raise InputError(f"the matrix is on {self.device}, but this rank sends and receives on {home}")
        communicator.check_same(device=self.device.kind, dtype=str(self.dtype))
        self._multiply = unchecked_product(square)
        self._halos: dict[tuple[int, ...], list[Array]] = {}
        self._capturable = self._all_can_capture(is_capturable(square))
        self.waited_for_ranks = 0.0

    @classmethod
    def from_rows(
        cls,
        rows: Any,
        partition: RowPartition,
        communicator: MpiCommunicator,
        *,
        format: str = "csr",
        block_size: int = 1,
        device: Device | str | None = None,
        **parameters: Any,
    ) -> Self:
        """Split this rank's rows of a matrix. Collective.

        Parameters
        ----------
        rows : scipy.sparse or penstock matrix, (own rows, all rows)
            The pattern of the whole matrix must be symmetric in blocks.
        partition : RowPartition
        communicator : MpiCommunicator
        format : str
            That of the square, such as ``sliced_bsr`` or ``symmetric_bsr``.
        block_size : int
            Of formats of blocks, and of the couplings.
        device : Device or str, optional
            By default that of the communicator, or the CPU.
        **parameters
            Of the format.

        Raises
        ------
        InputError
            On all ranks, if the rows of one do not fit.
        """
        square, couplings = split_rows(rows, partition, communicator, block_size=block_size)
        with communicator.together():
            chosen = format_named(format)
            target = Device.parse(device or communicator.device or CPU)
            matrix: Any = square
            if not isinstance(square, chosen):
                if chosen.traits.blocked:
                    parameters["block_size"] = block_size
                with target.current():
                    matrix = chosen.from_csr(csr_of(square).to_device(target), **parameters)
            matrix = matrix.to_device(target)
            there = [coupling.to_device(target) for coupling in couplings]
        return cls(matrix, there, communicator)

    def _all_can_capture(self, able: bool) -> bool:
        """Return whether CUDA graphs can capture the messages and the work of all ranks. Collective, as capturing is."""
        adjacent = all(isinstance(coupling.sends, slice) for coupling in self.couplings)
        return not self.communicator.largest(float(not (self.communicator.capturable and adjacent and able)))

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture products of all ranks."""
        return self._capturable

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        exchange = self._exchange(x)
        self._multiply(x, out, alpha, beta)
        for coupling, halo in self._arrivals(exchange, x.shape[1:]):
            coupling.matrix._apply(halo, out[coupling.rows], alpha, 1.0)
        exchange.end()

    def _exchange(self, x: Array) -> Exchange:
        """Start to send what neighbours need and to receive what this rank needs."""
        if x.shape[1:] not in self._halos:
            self._halos[x.shape[1:]] = self.new_halos(x)
        pairs = zip(self.couplings, self._halos[x.shape[1:]], strict=True)
        return self.communicator.start_exchange(
            [(coupling.neighbour, coupling.outgoing(x), halo) for coupling, halo in pairs]
        )

    def new_halos(self, x: Array) -> list[Array]:
        """Return memory for the entries of vectors like x that each neighbour sends."""
        widths = [coupling.matrix.shape[1] for coupling in self.couplings]
        return [self.device.xp.empty((width, *x.shape[1:]), dtype=self.dtype) for width in widths]

    def _arrivals(self, exchange: Exchange, further: tuple[int, ...] = ()) -> Iterator[tuple[Coupling, Array]]:
        """Yield each coupling with its neighbour's values, as they come."""
        arrivals = exchange.arrivals()
        while True:
            began = time.perf_counter()
            number = next(arrivals, None)
            self.waited_for_ranks += time.perf_counter() - began
            if number is None:
                return
            yield self.couplings[number], self._halos[further][number]

    def apply_absolute(self, x: Array) -> Array:
        """Return this rank's rows of ``|A| @ x``. Collective.

        Raises
        ------
        InputError
            If the square cannot compute it.
        """
        with self.communicator.together():
            if not isinstance(self.square, HasAbsoluteProduct):
                raise InputError(f"{type(self.square).__name__} cannot compute |A| x")
            x = as_vectors(x, self.shape[1], self, "x")
            if x.ndim != 1:
                raise InputError(f"x must have shape ({self.shape[1]},), not {x.shape}: only one vector at a time")
        with self.device.current():
            exchange = self._exchange(x)
            out = self.square.apply_absolute(x)
            for coupling, halo in self._arrivals(exchange):
                out[coupling.rows] += coupling.matrix.apply_absolute(halo)
            exchange.end()
        return out

    def diagonal_blocks(self, size: int) -> Array:
        """Return the diagonal blocks of this rank's rows; not collective."""
        if not isinstance(self.square, HasDiagonalBlocks):
            raise InputError(f"{type(self.square).__name__} does not know its diagonal")
        return self.square.diagonal_blocks(size)
