"""Plays schedules between a store and host memory: a reader thread fills slots while the caller computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from penstock.spmv import SparseFormat
from penstock.streaming.layout import Visit
from penstock.streaming.schedule import Compute, Copy, Step
from penstock.streaming.store import Store
from penstock.streaming.timeline import Timeline

__all__ = ["HostExecutor"]


class _Marker:
    """Comes back when everything requested before it has."""


class HostExecutor:
    """Transfers from a store (a disk, say) into host memory, and calls a function on each subdivision that has arrived.

    Parameters
    ----------
    store : Store
    slots : list of uint8 arrays
        Page-aligned; each holds the largest streamed subdivision.
    overlap : bool
        True reads in a thread of its own. False reads in the calling thread, when a copy is issued.

    Notes
    -----
    The schedule orders a copy after the release of its slot, and copies arrive in the order they are issued, so one queue
    to the reader and one back is all the synchronisation there is. The reader never runs Numba code.
    """

    def __init__(self, store: Store, slots: list[np.ndarray[Any, Any]], *, overlap: bool) -> None:
        self.store = store
        self.slots = slots
        self.timeline: Timeline | None = None
        self._views: dict[tuple[int, int], SparseFormat] = {}
        self._requests: queue.SimpleQueue[Copy | _Marker | None] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[Copy | _Marker | BaseException] = queue.SimpleQueue()
        self._clean = True
        self._reader = (
            threading.Thread(target=self._read_requests, name="penstock-reader", daemon=True) if overlap else None
        )
        if self._reader is not None:
            self._reader.start()

    def load_resident(self, number: int, buffer: np.ndarray[Any, Any]) -> SparseFormat:
        """Fill a resident buffer and return the subdivision in it."""
        self.store.read_into(number, buffer)
        return self.store.index.view(number, buffer)

    def play(self, steps: Iterable[Step], residents: dict[int, SparseFormat], visit: Visit) -> None:
        """Play steps in order; ``visit(number, slab)`` is called on each computation.

        An error of the store, of ``visit`` or a keyboard interrupt leaves the executor idle, with all slots free.
        """
        if not self._clean:
            self.drain()
        try:
            for step in steps:
                if isinstance(step, Copy):
                    self._requests.put(step)
                    if self._reader is None:
                        self._read_next()
                elif isinstance(step, Compute):
                    slab = (
                        residents[step.subdivision] if step.slot is None else self._arrived(step.subdivision, step.slot)
                    )
                    start = time.perf_counter()
                    visit(step.subdivision, slab)
                    self._record("compute", step.subdivision, step.slot, start)
        except BaseException:
            self._clean = False
            self.drain()
            raise

    def drain(self) -> None:
        """Wait for all copies in flight and forget them.

        A marker follows them through both queues, so nothing needs to be counted, which an interrupt could disturb.
        """
        marker = _Marker()
        self._requests.put(marker)
        if self._reader is None:
            while self._read_next() is not marker:
                pass
        while self._arrivals.get() is not marker:
            pass
        self._clean = True

    def close(self) -> None:
        """Stop the reader thread and wait for its end."""
        self.drain()
        if self._reader is not None:
            self._requests.put(None)
            self._reader.join()
            self._reader = None
        self._views.clear()

    def _arrived(self, subdivision: int, slot: int) -> SparseFormat:
        arrival = self._arrivals.get()
        if isinstance(arrival, BaseException):
            raise arrival
        assert arrival == Copy(subdivision, slot), "copies arrive in the order they were issued"
        if (subdivision, slot) not in self._views:
            self._views[subdivision, slot] = self.store.index.view(subdivision, self.slots[slot])
        return self._views[subdivision, slot]

    def _read_requests(self) -> None:
        while self._read_next() is not None:
            pass

    def _read_next(self) -> Copy | _Marker | None:
        """Serve one request; None asks the reader to stop."""
        request = self._requests.get()
        if isinstance(request, Copy):
            self._read(request)
        elif request is not None:
            self._arrivals.put(request)
        return request

    def _read(self, copy: Copy) -> None:
        start = time.perf_counter()
        try:
            self.store.read_into(copy.subdivision, self.slots[copy.slot])
        except BaseException as error:  # handed to the thread that waits for the data
            self._arrivals.put(error)
        else:
            self._record("transfer", copy.subdivision, copy.slot, start)
            self._arrivals.put(copy)

    def _record(self, kind: Literal["transfer", "compute"], subdivision: int, slot: int | None, start: float) -> None:
        timeline = self.timeline  # the reader may be here while the recording ends
        if timeline is not None:
            timeline.add(kind, subdivision, slot, start, time.perf_counter())
