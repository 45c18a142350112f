"""Executes schedules on the CPU: a reader thread fills slots while the calling thread computes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock.spmv import SparseMatrix, StoreError
from penstock.streaming.execution.executor import ExecutorSetup, Residents, SlabViews, SweepKey, Visit
from penstock.streaming.execution.reader import Reader
from penstock.streaming.planning.schedule import Compute, Copy, Release, Step
from penstock.streaming.planning.timeline import Timeline
from penstock.streaming.stores.made_store import MadeStore
from penstock.streaming.stores.matrix_index import Part


class HostExecutor:
    """Transfers subdivisions from a store (for example on disk) into page-aligned host slots; the calling thread computes.

    With overlap a separate thread reads; without, each copy is read at its step. A schedule puts each copy after the release
    of its slot, so the copy can be requested as soon as its step is reached.
    """

    staged = False

    def __init__(self, setup: ExecutorSetup) -> None:
        self.store = setup.store
        self.timeline: Timeline | None = None
        self.waited_seconds = 0.0
        self._slots = setup.slots
        self._slabs = SlabViews(setup.store.index, setup.slots, setup.structures)
        self._arrived: set[int] = set()  # slots whose data have arrived
        self._reader = Reader(
            setup.store,
            setup.part,
            # A MadeStore assembles with all cores, and Numba's threads may be started from one thread only: no reader thread.
            threaded=setup.overlap and not isinstance(setup.store, MadeStore),
            stall_seconds=setup.stall_seconds,
            note=self._note_transfer,
        )

    def load(self, number: int, buffer: np.ndarray[Any, Any], part: Part) -> None:
        """Read a part of a subdivision into a resident buffer."""
        self.store.read_into(number, buffer, part)

    def play(
        self, steps: Callable[[], Sequence[Step]], residents: Residents, visit: Visit, key: SweepKey | None = None
    ) -> None:
        """Execute the steps in order; the key is not used on a CPU."""
        try:
            for step in steps():
                if isinstance(step, Copy):
                    with self._waiting():  # the request, where the calling thread reads
                        self._reader.request(step.subdivision, step.slot, self._slots[step.slot])
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
                self._drain(patient=False)
            raise

    def _slab(self, step: Compute, residents: Residents) -> SparseMatrix:
        if step.slot is not None and step.slot not in self._arrived:
            with self._waiting():  # it is not there from the previous sweep
                self._reader.wait_for(step.subdivision)
            self._arrived.add(step.slot)
        return self._slabs.slab(step, residents)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time in the block as waiting for transfers."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_seconds += time.perf_counter() - began

    @contextlib.contextmanager
    def trace(self) -> Iterator[Timeline]:
        """Record the times of transfers and computations."""
        self.timeline = timeline = Timeline(origin=time.perf_counter())
        try:
            yield timeline
        finally:
            self.timeline = None

    def drain(self) -> None:
        """Wait for all copies in flight and discard them."""
        self._drain(patient=True)

    def _drain(self, *, patient: bool) -> None:
        """Drain; if not ``patient``, do not wait again for a read that has stalled."""
        self._arrived.clear()
        self._reader.drain(patient=patient)

    def close(self) -> None:
        """Stop the reader thread and wait for its end."""
        with contextlib.suppress(StoreError):  # of a stalled read: its thread ends with the read
            self._drain(patient=False)
        self._reader.close()
        self._slabs.clear()

    def _note_transfer(self, number: int, slot: int, start: float, stop: float) -> None:
        timeline = self.timeline  # read once: the recording may end while this runs in the reader's thread
        if timeline is not None:
            timeline.add("transfer", number, slot, start, stop)
