"""Reads parts of a store into buffers in a separate thread, in the order of the requests."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.spmv import StoreError
from penstock.streaming.stores.base import Store
from penstock.streaming.stores.matrix_index import Part

Note = Callable[[int, int, float, float], None]


def describe_subdivision(store: Store, number: int) -> str:
    """Return the description of a subdivision for messages: its number, its rows and its store."""
    return f"subdivision {number} ({store.index.subdivisions[number]}) of {_place(store)}"


def _place(store: Store) -> object:
    return getattr(store, "path", None) or f"a {type(store).__name__}"


@dataclass(frozen=True)
class _Request:
    number: int
    slot: int
    buffer: np.ndarray[Any, Any]
    ready: Callable[[], object] | None


class _Marker:
    """Passes through both queues after all earlier requests."""


class _Server:
    """Serves requests; it knows nothing of the reader, so that a reader which nobody holds any more can end its thread."""

    def __init__(self, store: Store, part: Part, note: weakref.WeakMethod[Note]) -> None:
        self.requests: queue.SimpleQueue[_Request | _Marker | None] = queue.SimpleQueue()
        self.arrivals: queue.SimpleQueue[_Request | _Marker | BaseException] = queue.SimpleQueue()
        self._store, self._part, self._note = store, part, note

    def serve(self) -> None:
        """Serve until a request is None."""
        while self.serve_one() is not None:
            pass

    def serve_one(self) -> _Request | _Marker | None:
        """Serve one request and return it."""
        request = self.requests.get()
        if isinstance(request, _Request):
            try:
                if request.ready is not None:
                    request.ready()
                start = time.perf_counter()
                self._store.read_into(request.number, request.buffer, self._part)
                note = self._note()
                if note is not None:
                    note(request.number, request.slot, start, time.perf_counter())
            except BaseException as error:  # raised in the thread that waits for the data
                self.arrivals.put(_with_note(error, describe_subdivision(self._store, request.number)))
            else:
                self.arrivals.put(request)
        elif request is not None:
            self.arrivals.put(request)
        return request


class Reader:
    """Reads parts of subdivisions in a separate thread or in the calling thread.

    ``note(number, slot, start, stop)``, with clock times, is called after each read by the thread that read. A read that takes
    longer than ``stall_seconds`` is an error.

    Arrivals come in the order of the requests, so one queue to the thread and one back are the only synchronisation. Their
    ``put`` and ``get`` are atomic for an interrupt, unlike the locks inside a ``Future``. The thread never runs Numba code.

    An interrupt between the start of the thread and the return of the constructor leaves a reader that nobody can close; its
    thread ends when it is collected.
    """

    def __init__(
        self,
        store: Store,
        part: Part,
        *,
        threaded: bool,
        stall_seconds: float,
        note: Note,
    ) -> None:
        self._store, self._part, self._note = store, part, weakref.WeakMethod(note)
        self._threaded, self._stall_seconds = threaded, stall_seconds
        self._begin()

    def _begin(self) -> None:
        """Begin with empty queues, and with a new thread."""
        self._server = _Server(self._store, self._part, self._note)
        self._requests, self._arrivals = self._server.requests, self._server.arrivals
        self._stalled = False  # whether a wait has timed out
        self._thread = None
        if self._threaded:
            self._thread = threading.Thread(target=self._server.serve, name="penstock-reader", daemon=True)
            weakref.finalize(self, self._requests.put, None).atexit = False
            try:
                self._thread.start()
            except RuntimeError as error:
                raise StoreError(
                    f"no thread could be started to read {_place(self._store)}: {error}; raise the limit of processes "
                    f"(ulimit -u), or read without overlap"
                ) from error

    @property
    def _lost(self) -> bool:
        """Whether this process was forked after the thread had been started, and has no such thread."""
        return self._thread is not None and not self._thread.is_alive()

    def request(
        self, number: int, slot: int, buffer: np.ndarray[Any, Any], ready: Callable[[], object] | None = None
    ) -> None:
        """Request subdivision ``number`` in the buffer of a slot; the reading thread calls ``ready()`` before it reads."""
        self._requests.put(_Request(number, slot, buffer, ready))
        if self._thread is None:
            self._server.serve_one()

    def wait_for(self, number: int) -> None:
        """Wait for subdivision ``number``, which must arrive next, or raise a StoreError if the store fails or stalls."""
        if self._lost:
            raise StoreError(
                f"nothing reads {describe_subdivision(self._store, number)}: this process was forked in the middle of a sweep; "
                "apply the matrix again, which begins a sweep in this process"
            )
        try:
            arrival = self._arrivals.get(timeout=self._stall_seconds)
        except queue.Empty:
            raise self._stall(describe_subdivision(self._store, number)) from None
        if isinstance(arrival, BaseException):
            raise arrival
        assert isinstance(arrival, _Request), "markers end in drain"
        assert arrival.number == number, "arrivals come in the order of requests"

    def drain(self, *, patient: bool = True) -> None:
        """Wait for all requests and discard them; if not ``patient``, do not wait again after a timeout.

        A marker follows the requests through both queues: an interrupt could disturb a count of them. A forked process has no
        requests, and starts a new thread. After a StoreError for a stalled read, a later drain waits for the remaining reads.
        """
        if self._lost:
            self._begin()
            return
        marker, patience = _Marker(), self._stall_seconds if patient or not self._stalled else 0.0
        self._requests.put(marker)
        if self._thread is None:
            while self._server.serve_one() is not marker:
                pass
        while True:
            try:
                if self._arrivals.get(timeout=patience) is marker:
                    self._stalled = False
                    return
            except queue.Empty:
                raise self._stall(f"a {type(self._store).__name__}") from None

    def close(self) -> None:
        """Stop the thread and wait for its end; after a stall the thread ends with its read."""
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


def _with_note(error: BaseException, where: str) -> BaseException:
    """Add the place to an error of the store, unless its message contains it."""
    if isinstance(error, Exception) and where not in str(error):
        error.add_note(f"while reading {where}")
    return error
