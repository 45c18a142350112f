"""Stages data from a store on disk in page-locked buffers for a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.streaming.execution.reader import Reader
from penstock.streaming.planning.schedule import Compute, Copy
from penstock.streaming.stores.base import Store
from penstock.streaming.stores.buffers import aligned_buffer
from penstock.streaming.stores.matrix_index import Part


class Staging:
    """Page-locked buffers, one per slot, that a thread fills from a store."""

    def __init__(
        self,
        store: Store,
        part: Part,
        nbytes: list[int],
        *,
        threaded: bool,
        stall_seconds: float,
        note: Callable[[int, int, float, float], None],
    ) -> None:
        import cupy

        self.buffers = [aligned_buffer(length) for length in nbytes]
        self.copied = [cupy.cuda.Event(disable_timing=True) for _ in nbytes]
        self._locked: list[int] = []
        self._unlock = cupy.cuda.runtime.hostUnregister
        for buffer in self.buffers:
            # If locking is refused, the driver copies through its own buffers, which is slower.
            with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
                cupy.cuda.runtime.hostRegister(buffer.ctypes.data, buffer.nbytes, 1)
                self._locked.append(buffer.ctypes.data)
        self._requested: dict[int, Copy] = {}  # by slot
        self._reader = Reader(store, part, threaded=threaded, stall_seconds=stall_seconds, note=note)

    def request(self, step: Copy) -> None:
        """Request a subdivision; it is read when the last transfer from its buffer has ended."""
        self._requested[step.slot] = step
        buffer: np.ndarray[Any, Any] = self.buffers[step.slot]
        self._reader.request(step.subdivision, step.slot, buffer, ready=self.copied[step.slot].synchronize)

    def arrival(self, step: Compute) -> Copy | None:
        """Wait until the data for a computation have been read; None if the slot has them from the previous sweep."""
        assert step.slot is not None
        copy = self._requested.pop(step.slot, None)
        if copy is not None:
            self._reader.wait_for(step.subdivision)
        return copy

    def drain(self, *, patient: bool) -> None:
        """Wait for all requested reads and discard them."""
        self._requested.clear()
        self._reader.drain(patient=patient)

    def close(self) -> None:
        """Stop the thread and unlock the buffers."""
        self._reader.close()
        while self._locked:
            self._unlock(self._locked.pop())
