"""Ranks of MPI, through mpi4py."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

import numba
import numpy as np

from penstock.host.threads import THREADS_ARE_GIVEN, bound_cores
from penstock.spmv import CPU, Array, Device, DeviceError, InputError, PenstockError, device_of
from penstock.spmv.device import cuda_device_count

Numbers = np.ndarray[Any, Any]
#: What a rank sends to a neighbour and receives from it: ``(neighbour, outgoing, incoming)``.
Pair = tuple[int, Array, Array]


_PASSED = 32001  # tag of rows that are passed to the first rank, above those of exchanges


class Exchange(Protocol):
    """Messages between this rank and some neighbours, under way."""

    def arrivals(self) -> Iterator[int]:
        """Yield the number of each pair when its incoming array is there."""

    def wait(self) -> None:
        """Wait until all incoming arrays are there."""

    def progress(self) -> None:
        """Let the messages move on."""

    def end(self) -> None:
        """Wait until outgoing arrays may change."""


class MpiCommunicator:
    """A ``Communicator`` (``penstock.spmv.communicator``) over MPI.

    Vectors may be on a GPU: what ranks exchange then goes through host memory.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        All processes by default. It is duplicated, so that messages of others are never taken for ours.

    Attributes
    ----------
    rank, size : int
    host : str
        Name of this rank's host.
    host_rank, host_ranks : int
        Number of this rank among those of its host, and how many those are. Those with the same cores share them out as threads
        of Numba, unless NUMBA_NUM_THREADS is set.
    messages, message_nbytes, reductions : int
        Messages to neighbours, their bytes, and sums over all ranks, so far, without those that CUDA graphs replay.

    Raises
    ------
    InputError
        If mpi4py or MPI is missing.

    Notes
    -----
    As a context manager it ends all ranks when one leaves the block with an error that the others do not share, ``sys.exit`` with
    an error among them: they would wait for it for ever. It cannot be used after the block.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.distributed import MpiCommunicator
    >>> with MpiCommunicator() as ranks:
    ...     ranks.rank < ranks.size, (ranks.total(np.ones(2)) / ranks.size).tolist()
    (True, [1.0, 1.0])
    """

    #: Whether sums and messages only start work on a GPU, so that a CUDA graph can capture them.
    capturable: ClassVar[bool] = False
    #: The GPU that sums and messages need the vectors on; None if they may be anywhere.
    device: Device | None = None

    def __init__(self, comm: Any = None) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise InputError(
                f"several ranks need mpi4py and an MPI ({error}): pip install 'penstock[mpi]', and an MPI of the cluster "
                "or pip install mpich"
            ) from error
        self._mpi = MPI
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self.rank, self.size = int(self._comm.Get_rank()), int(self._comm.Get_size())
        self.messages = self.message_nbytes = self.reductions = 0
        on_host = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.host = str(MPI.Get_processor_name())
        self.host_rank, self.host_ranks = int(on_host.Get_rank()), int(on_host.Get_size())
        if not THREADS_ARE_GIVEN:
            # A launcher may have bound each rank to cores of its own already.
            cores = bound_cores()
            sharing = sum(bool(cores & others) for others in on_host.allgather(cores))
            numba.set_num_threads(max(1, min(numba.get_num_threads(), len(cores) // sharing)))
        on_host.Free()

    def total(self, numbers: Numbers) -> Numbers:
        """Return the sums over ranks, formed in the order of the ranks: the same bits on all of them and in every run."""
        self.reductions += 1
        own = np.ascontiguousarray(numbers, dtype=np.float64)
        gathered = np.empty((self.size, *own.shape))
        self._comm.Allgather(own, gathered)
        total = np.zeros(own.shape)
        for of_rank in gathered:
            total += of_rank
        return total

    def before(self, number: int) -> int:
        """Return the sum over the ranks before this one."""
        return sum(self._comm.allgather(int(number))[: self.rank])

    def largest(self, number: float) -> float:
        """Return the largest of the ranks' numbers; NaN if one of them is."""
        numbers = self._comm.allgather(float(number))
        return math.nan if any(math.isnan(one) for one in numbers) else max(numbers)

    def of_first(self, number: float) -> float:
        """Return the number of rank 0."""
        return float(self._comm.bcast(float(number)))

    def of_all(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in their order."""
        return list(self._comm.allgather(value))

    def add_up(self, partials: Array, sums: Array) -> None:
        """Set the first column of ``sums`` to the sums over all ranks and columns of ``partials``."""
        device = device_of(partials)
        sums[:, 0] = device.asarray(self.total(device.to_host(partials).sum(axis=1)))

    def check_same(self, **settings: object) -> None:
        """Raise an InputError on all ranks if they give different values."""
        of_ranks = self._comm.allgather(settings)
        for name in settings:
            values = [one[name] for one in of_ranks]
            if any(one != values[0] for one in values):
                listed = ", ".join(map(str, values))
                raise self._agreed(InputError(f"{name} must be the same on all ranks, but they give {listed}"))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make an error of one rank inside a ``with`` block one of all ranks at its end; nothing inside may be collective."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        failures = self._comm.allgather(None if failure is None else str(failure))
        if failure is not None:
            raise self._agreed(failure)
        for rank, message in enumerate(failures):
            if message is not None:
                raise self._agreed(InputError(f"rank {rank} of {self.size} says: {message}"))

    def _agreed(self, error: Exception) -> Exception:
        """Mark an error that all of these ranks raise, so that each can end by itself."""
        error.on_ranks = self.size  # type: ignore[attr-defined]
        return error

    def exchange_objects(self, to_each: Sequence[Any]) -> list[Any]:
        """Send an object to each rank and return those that came from each."""
        return list(self._comm.alltoall(list(to_each)))

    def start_exchange(self, pairs: Sequence[Pair], tag: int = 0) -> Exchange:
        """Start to send to neighbours and to receive from them; outgoing arrays must not change before the exchange has ended."""
        self.messages += len(pairs)
        self.message_nbytes += sum(int(outgoing.nbytes) for _, outgoing, _ in pairs)
        return MpiExchange(self._mpi, self._comm, pairs, tag)

    def gathered(self, rows: Array) -> Numbers:
        """Return the rows of all ranks, one rank's after the other, on the host of the first rank; others get none."""
        parts: Any = self._comm.gather(np.ascontiguousarray(CPU.asarray(rows)))
        return np.concatenate(parts) if self.rank == 0 else np.empty((0, *rows.shape[1:]), rows.dtype)

    def passed_to_first(self, rows: Array, most: int) -> Iterator[Numbers]:
        """Yield the rows of all ranks on the host of the first rank, at most ``most`` at once; others send theirs.

        Collective: every rank goes through to the end.
        """
        counts = self.of_all(len(rows))
        for rank, count in enumerate(counts):
            for start in range(0, count, most):
                stop = min(start + most, count)
                if self.rank == rank:
                    part = np.ascontiguousarray(CPU.asarray(rows[start:stop]))
                    if rank:
                        self._comm.Send(part, 0, _PASSED)
                elif not self.rank:
                    part = np.empty((stop - start, *rows.shape[1:]), rows.dtype)
                    self._comm.Recv(part, rank, _PASSED)
                if not self.rank:
                    yield part

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._comm.Barrier()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._comm.Free()
            return
        done = isinstance(error, SystemExit) and not error.code
        if done or self.size == 1 or getattr(error, "on_ranks", 0) >= self.size:
            return
        if not isinstance(error, PenstockError | SystemExit | KeyboardInterrupt):
            traceback.print_exception(kind, error, trace)
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        print(
            f"rank {self.rank} of {self.size} failed, so all are stopped: {error}{notes}", file=sys.stderr, flush=True
        )
        self._comm.Abort(130 if isinstance(error, KeyboardInterrupt) else 2)


class MpiExchange:
    """Messages on their way between this rank and some neighbours; those of arrays on a GPU go through host memory."""

    def __init__(self, mpi: Any, comm: Any, pairs: Sequence[Pair], tag: int) -> None:
        self._mpi, self._incoming = mpi, [incoming for _, _, incoming in pairs]
        self._there = [one if device_of(one) == CPU else np.empty(one.shape, one.dtype) for one in self._incoming]
        self._sent_arrays = [np.ascontiguousarray(CPU.asarray(outgoing)) for _, outgoing, _ in pairs]
        neighbours = [neighbour for neighbour, _, _ in pairs]
        self._received = [comm.Irecv(to, other, tag) for to, other in zip(self._there, neighbours, strict=True)]
        self._sent = [comm.Isend(of, other, tag) for of, other in zip(self._sent_arrays, neighbours, strict=True)]

    def arrivals(self) -> Iterator[int]:
        """Yield the number of each pair when its incoming array is there, in whatever order they come."""
        for _ in self._incoming:
            number = int(self._mpi.Request.Waitany(self._received))
            self._place(number)
            yield number

    def wait(self) -> None:
        """Wait until all incoming arrays are there."""
        self._mpi.Request.Waitall(self._received)
        for number in range(len(self._incoming)):
            self._place(number)

    def _place(self, number: int) -> None:
        if self._there[number] is not self._incoming[number]:
            self._incoming[number].set(self._there[number])

    def progress(self) -> None:
        """Let MPI work: it moves large messages only while it is called."""
        self._mpi.Request.Testall(self._sent)

    def end(self) -> None:
        """Wait until outgoing arrays may change."""
        self._mpi.Request.Waitall(self._sent)


def gpu_of_rank(communicator: MpiCommunicator) -> Device:
    """Return a GPU for each rank, another one for each rank of a host, and make it CuPy's current device. Collective.

    Parameters
    ----------
    communicator : MpiCommunicator

    Returns
    -------
    Device

    Raises
    ------
    InputError, DeviceError
        If a host has more ranks than GPUs, or a rank finds none.

    Examples
    --------
    >>> from penstock.distributed import MpiCommunicator, gpu_of_rank
    >>> device = gpu_of_rank(MpiCommunicator())  # doctest: +SKIP
    """
    with communicator.together():
        # A launcher may show each rank a GPU of its own alone.
        device = Device("cuda", communicator.host_rank % cuda_device_count())
        device.xp.cuda.Device(device.index).use()
        own = (communicator.host, str(device.xp.cuda.Device(device.index).pci_bus_id))
    taken = communicator.exchange_objects([own] * communicator.size)
    with communicator.together():
        if taken.count(own) > 1:
            raise DeviceError(
                f"{taken.count(own)} ranks have the same GPU; start as many ranks on a host as it has GPUs"
            )
    return device
