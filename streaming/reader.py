"""A thread that reads parts of a store into buffers, in the order they are asked for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.spmv import StoreError
from penstock.streaming.layout import Part
from penstock.streaming.store import Store

__all__ = ["Reader", "describe_subdivision"]


def describe_subdivision(store: Store, number: int) -> str:
    """Return how messages name a subdivision: its number, its rows and its store."""
    place = getattr(store, "path", None) or f"a {type(store).__name__}"
    return f"subdivision {number} ({store.index.subdivisions[number]}) of {place}"


@dataclass(frozen=True)
class _Request:
    number: int
    slot: int
    buffer: np.ndarray[Any, Any]
    ready: Callable[[], object] | None


class _Marker:
    """Comes back when everything requested before it has."""


class Reader:
    """Reads in a thread of its own, or in the caller's.

    Parameters
    ----------
    store : Store
    part : Part
        What to read of each subdivision.
    threaded : bool
        False reads when asked, in the calling thread.
    stall_seconds : float
        A read that takes longer is reported as an error.
    note : callable
        ``note(number, slot, start, stop)`` is called after each read, from the thread that read, with the clock.

    Notes
    -----
    Arrivals come in the order of the requests, so one queue to the thread and one back are all the synchronisation there
    is. The thread never runs Numba code.
    """

    def __init__(
        self,
        store: Store,
        part: Part,
        *,
        threaded: bool,
        stall_seconds: float,
        note: Callable[[int, int, float, float], None],
    ) -> None:
        self._store, self._part, self._note = store, part, note
        self._stall_seconds = stall_seconds
        self._stalled = False  # whether a read was waited for in vain
        self._requests: queue.SimpleQueue[_Request | _Marker | None] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[_Request | _Marker | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="penstock-reader", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def request(
        self, number: int, slot: int, buffer: np.ndarray[Any, Any], ready: Callable[[], object] | None = None
    ) -> None:
        """Ask for subdivision ``number`` in the buffer of a slot; ``ready()`` is called, by the thread that reads, before."""
        self._requests.put(_Request(number, slot, buffer, ready))
        if self._thread is None:
            self._serve_one()

    def wait_for(self, number: int) -> None:
        """Wait until the request served next has arrived, which must be that for ``number``.

        Raises
        ------
        StoreError
            If the store fails, or nothing comes for ``stall_seconds``.
        """
        try:
            arrival = self._arrivals.get(timeout=self._stall_seconds)
        except queue.Empty:
            raise self._stall(describe_subdivision(self._store, number)) from None
        if isinstance(arrival, BaseException):
            raise arrival
        assert isinstance(arrival, _Request), "markers end in drain"
        assert arrival.number == number, "arrivals come in the order of requests"

    def drain(self, *, patient: bool = True) -> None:
        """Wait for everything requested and forget it; not again, unless ``patient``, for a read that was waited for in vain.

        A marker follows the requests through both queues, so nothing needs to be counted, which an interrupt could disturb.

        Raises
        ------
        StoreError
            If nothing comes for ``stall_seconds``; what is still being read then arrives in a later drain.
        """
        marker, patience = _Marker(), self._stall_seconds if patient or not self._stalled else 0.0
        self._requests.put(marker)
        if self._thread is None:
            while self._serve_one() is not marker:
                pass
        while True:
            try:
                if self._arrivals.get(timeout=patience) is marker:
                    self._stalled = False
                    return
            except queue.Empty:
                raise self._stall(f"a {type(self._store).__name__}") from None

    def close(self) -> None:
        """Stop the thread and wait for its end; one that a stalled read holds ends by itself when the read does."""
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join(0.0 if self._stalled else self._stall_seconds)
            self._thread = None

    def _stall(self, what: str) -> StoreError:
        self._stalled = True
        return StoreError(
            f"nothing came from {what} for {self._stall_seconds:g} s: the disk or its server stalls; check it, then apply "
            "the matrix again"
        )

    def _serve(self) -> None:
        while self._serve_one() is not None:
            pass

    def _serve_one(self) -> _Request | _Marker | None:
        """Serve one request; None asks the thread to stop."""
        request = self._requests.get()
        if isinstance(request, _Request):
            try:
                if request.ready is not None:
                    request.ready()
                start = time.perf_counter()
                self._store.read_into(request.number, request.buffer, self._part)
                self._note(request.number, request.slot, start, time.perf_counter())
            except BaseException as error:  # handed to the thread that waits for the data
                self._arrivals.put(_explained(error, describe_subdivision(self._store, request.number)))
            else:
                self._arrivals.put(request)
        elif request is not None:
            self._arrivals.put(request)
        return request


def _explained(error: BaseException, where: str) -> BaseException:
    """Say where an error of the store happened, unless it does so itself."""
    if isinstance(error, Exception) and where not in str(error):
        error.add_note(f"while reading {where}")
    return error
