"""Plays schedules between a store and host memory: a reader thread fills slots while the caller computes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from penstock.spmv import SparseFormat, StoreError
from penstock.streaming.layout import Part, Visit
from penstock.streaming.reader import Reader
from penstock.streaming.schedule import Compute, Copy, Release, Step
from penstock.streaming.store import Store
from penstock.streaming.timeline import Timeline

__all__ = ["HostExecutor"]


class HostExecutor:
    """Transfers from a store (a disk, say) into host memory, and calls a function on each subdivision that has arrived.

    Parameters
    ----------
    store : Store
    slots : list of uint8 arrays
        Page-aligned; each holds the largest streamed part of a subdivision.
    part : Part
        What moves of each subdivision.
    structures : list of uint8 arrays
        The structure of every subdivision, if only values move.
    overlap : bool
        True reads in a thread of its own. False reads in the calling thread, when a copy is issued.
    stall_seconds : float
        A read that takes longer is an error.

    Notes
    -----
    The schedule orders a copy after the release of its slot, so a copy may be requested when its step is reached.
    """

    def __init__(
        self,
        store: Store,
        slots: list[np.ndarray[Any, Any]],
        *,
        part: Part = "whole",
        structures: list[np.ndarray[Any, Any]] | None = None,
        overlap: bool,
        stall_seconds: float,
    ) -> None:
        self.store = store
        self.slots = slots
        self.timeline: Timeline | None = None
        self._part = part
        self._structures = structures
        self._views: dict[tuple[int, int], SparseFormat] = {}
        self._arrived: set[int] = set()  # slots whose data are there
        self._reader = Reader(store, part, threaded=overlap, stall_seconds=stall_seconds, note=self._note_transfer)

    def load(self, number: int, buffer: np.ndarray[Any, Any], part: Part) -> None:
        """Fill a buffer that stays."""
        self.store.read_into(number, buffer, part)

    def play(self, steps: Iterable[Step], residents: dict[int, SparseFormat], visit: Visit) -> None:
        """Play steps in order; ``visit(number, slab, stage)`` is called on each computation.

        An error of the store, of ``visit`` or a keyboard interrupt leaves the executor idle, with all slots free.
        """
        try:
            for step in steps:
                if isinstance(step, Copy):
                    self._reader.request(step.subdivision, step.slot, self.slots[step.slot])
                elif isinstance(step, Compute):
                    slab = self._slab(step, residents)
                    start = time.perf_counter()
                    visit(step.subdivision, slab, step.stage)
                    if self.timeline is not None:
                        self.timeline.add("compute", step.subdivision, step.slot, start, time.perf_counter())
                elif isinstance(step, Release):
                    self._arrived.discard(step.slot)
        except BaseException:
            with contextlib.suppress(StoreError):  # a stalled read: the next sweep waits for it
                self.drain(patient=False)
            raise

    def start_recording(self, timeline: Timeline) -> None:
        """Record from now on."""
        timeline.origin = time.perf_counter()
        self.timeline = timeline

    def stop_recording(self) -> None:
        """Record no longer."""
        self.timeline = None

    def drain(self, *, patient: bool = True) -> None:
        """Wait for all copies in flight and forget them; not again, unless ``patient``, for one that stalls."""
        self._arrived.clear()
        self._reader.drain(patient=patient)

    def close(self) -> None:
        """Stop the reader thread and wait for its end."""
        with contextlib.suppress(StoreError):  # of a stalled read, whose thread ends when the read does
            self.drain(patient=False)
        self._reader.close()
        self._views.clear()

    def _slab(self, step: Compute, residents: dict[int, SparseFormat]) -> SparseFormat:
        if step.slot is None:
            return residents[step.subdivision]
        if step.slot not in self._arrived:  # else it was left there at the turn
            self._reader.wait_for(step.subdivision)
            self._arrived.add(step.slot)
        key = (step.subdivision, step.slot)
        if key not in self._views:
            structure = None if self._structures is None else self._structures[step.subdivision]
            self._views[key] = self.store.index.view(step.subdivision, self.slots[step.slot], structure)
        return self._views[key]

    def _note_transfer(self, number: int, slot: int, start: float, stop: float) -> None:
        timeline = self.timeline  # the reader may be here while the recording ends
        if timeline is not None:
            timeline.add("transfer", number, slot, start, stop)
