"""Ranks of MPI, through mpi4py."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np

from penstock.spmv import CPU, Array, InputError, PenstockError, device_of

__all__ = ["Message", "MpiCommunicator"]

Numbers = np.ndarray[Any, Any]


class MpiCommunicator:
    """A :class:`~penstock.spmv.communicator.Communicator` over MPI.

    Vectors may be on a GPU: what ranks exchange then goes through host memory.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        All processes by default. It is duplicated, so that messages of others are never taken for ours.

    Attributes
    ----------
    rank, size : int
    messages, message_nbytes, reductions : int
        Messages to neighbours, their bytes, and sums over all ranks, so far.

    Raises
    ------
    InputError
        If mpi4py or MPI is missing.

    Notes
    -----
    As a context manager it ends all ranks when one leaves the block with an error that the others do not share: they would wait
    for it for ever.
    """

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
        found = self._comm.allgather(float(number))
        return math.nan if any(math.isnan(one) for one in found) else max(found)

    def of_first(self, number: float) -> float:
        """Return the number of rank 0."""
        return float(self._comm.bcast(float(number)))

    def add_up(self, partials: Array, sums: Array) -> None:
        """Set the first column of ``sums`` to the sums over all ranks and columns of ``partials``."""
        device = device_of(partials)
        sums[:, 0] = device.asarray(self.total(device.to_host(partials).sum(axis=1)))

    def check_same(self, **settings: object) -> None:
        """Raise an InputError on all ranks if they give different values."""
        told = self._comm.allgather(settings)
        for name in settings:
            found = [one[name] for one in told]
            if any(one != found[0] for one in found):
                raise InputError(f"{name} must be the same on all ranks, but they give {', '.join(map(str, found))}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make an error of one rank inside a ``with`` block one of all ranks at its end; nothing inside may be collective."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        told = self._comm.allgather(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, message in enumerate(told):
            if message is not None:
                raise InputError(f"rank {rank} of {self.size} says: {message}")

    def exchange_objects(self, to_each: Sequence[Any]) -> list[Any]:
        """Send an object to each rank and return those that came from each."""
        return list(self._comm.alltoall(list(to_each)))

    def start_send(self, array: Array, neighbour: int, tag: int = 0) -> Message:
        """Start to send to a neighbour; the array must not change before the message has been waited for."""
        self.messages += 1
        self.message_nbytes += int(array.nbytes)
        host = np.ascontiguousarray(CPU.asarray(array))
        return Message(self._comm.Isend(host, neighbour, tag), host)

    def start_receive(self, array: Array, neighbour: int, tag: int = 0) -> Message:
        """Start to receive from a neighbour; the array is not to be read before the message has been waited for."""
        host = array if device_of(array) == CPU else np.empty(array.shape, dtype=array.dtype)
        return Message(self._comm.Irecv(host, neighbour, tag), host, array)

    def arrivals(self, messages: Sequence[Message]) -> Iterator[int]:
        """Yield the number of each message when it is there, in whatever order they come."""
        requests = [message.request for message in messages]
        for _ in messages:
            number = int(self._mpi.Request.Waitany(requests))
            messages[number].wait()
            yield number

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._comm.Barrier()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self.size == 1 or isinstance(error, SystemExit):
            return
        if not isinstance(error, PenstockError):
            traceback.print_exception(kind, error, trace)
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        print(
            f"rank {self.rank} of {self.size} failed, so all are stopped: {error}{notes}", file=sys.stderr, flush=True
        )
        self._comm.Abort(2)


class Message:
    """A message on its way.

    Parameters
    ----------
    request : mpi4py.MPI.Request
    host : array
        What is sent or received, on the host.
    target : array, optional
        Where it goes when it is there; ``host`` itself, or an array on a GPU.
    """

    def __init__(self, request: Any, host: Numbers, target: Array = None) -> None:
        self.request, self._host, self._target = request, host, target

    def wait(self) -> None:
        """Wait until what was sent may change, or what was to come is there."""
        self.request.Wait()
        if self._target is not None and self._target is not self._host:
            self._target.set(self._host)
        self._target = None

    def progress(self) -> bool:
        """Return whether the message is through; MPI moves large ones only while somebody asks."""
        return bool(self.request.Test())
