"""Ranks of NCCL, a GPU each: sums and messages are work on a GPU, in order with kernels, and part of CUDA graphs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from penstock.distributed.mpi import Exchange, MpiCommunicator, Pair, gpu_of_rank
from penstock.spmv import Array, Device

_SUM = 0
_TYPES = {np.dtype(np.float32): 7, np.dtype(np.float64): 8}


class NcclCommunicator(MpiCommunicator):
    """Sums and messages of vectors go from GPU to GPU, through NCCL; what the host decides goes through MPI.

    Parameters
    ----------
    device : Device, optional
        Of this rank; by default another GPU for each rank of a host.
    comm : mpi4py.MPI.Comm, optional
    library : module, optional
        ``cupy.cuda.nccl``.

    Raises
    ------
    InputError, DeviceError
        On all ranks, if one has no GPU.

    Notes
    -----
    Everything is ordered on CuPy's current stream: a message leaves when kernels before it have ended, and has arrived when
    kernels after it begin. NCCL connects two ranks when they first exchange something, which cannot be captured: an iteration has
    to run once before it is, as those of ``cg`` do. Whether work is captured is collective, and so is launching a graph.

    Examples
    --------
    >>> from penstock.distributed import NcclCommunicator
    >>> ranks = NcclCommunicator()  # doctest: +SKIP
    """

    capturable: ClassVar[bool] = True
    device: Device

    def __init__(self, device: Device | None = None, comm: Any = None, library: Any = None) -> None:
        super().__init__(comm)
        self.device = gpu_of_rank(self) if device is None else device
        with self.together():  # a rank without NCCL must not leave the others waiting in it
            self._library = importlib.import_module("cupy.cuda.nccl") if library is None else library
            identity = self._library.get_unique_id() if self.rank == 0 else None
        identity = self._comm.bcast(identity)
        with self.device.current():
            self._nccl = self._library.NcclCommunicator(self.size, identity, self.rank)

    @property
    def _stream(self) -> int:
        return int(self.device.xp.cuda.get_current_stream().ptr)

    def add_up(self, partials: Array, sums: Array) -> None:
        """Set ``sums`` to the sums over ranks of ``partials``, block by block: 16 kB take as long as 8 bytes."""
        self.reductions += 1
        kind = _TYPES[partials.dtype]
        self._nccl.allReduce(partials.data.ptr, sums.data.ptr, partials.size, kind, _SUM, self._stream)

    def start_exchange(self, pairs: Sequence[Pair], tag: int = 0) -> Exchange:
        """Send to neighbours and receive from them, in order on CuPy's current stream."""
        self.messages += len(pairs)
        self.message_nbytes += sum(int(outgoing.nbytes) for _, outgoing, _ in pairs)
        self._library.groupStart()
        try:
            for neighbour, outgoing, incoming in pairs:
                kind = _TYPES[outgoing.dtype]
                self._nccl.send(outgoing.data.ptr, outgoing.size, kind, neighbour, self._stream)
                self._nccl.recv(incoming.data.ptr, incoming.size, kind, neighbour, self._stream)
        finally:
            self._library.groupEnd()
        return Arrived(len(pairs))


class Arrived:
    """An exchange whose messages have arrived when later work on the stream begins."""

    def __init__(self, count: int) -> None:
        self._count = count

    def arrivals(self) -> Iterator[int]:
        """Yield all numbers."""
        return iter(range(self._count))

    def wait(self) -> None:
        """Do nothing: the stream waits."""

    def progress(self) -> None:
        """Do nothing: the GPU works."""

    def end(self) -> None:
        """Do nothing: what changes outgoing arrays comes later on the stream."""
