"""Executes schedules on a GPU: a copy stream fills slots while kernels work on other slots."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock.spmv import Array, DeviceError, StoreError
from penstock.spmv.compilation.cuda_graph import CapturedGraph, capture
from penstock.streaming.execution.executor import ExecutorSetup, Residents, SlabViews, SweepKey, Visit
from penstock.streaming.execution.graph_cache import CapturedSweep, GraphCache
from penstock.streaming.execution.staging import Staging
from penstock.streaming.planning.estimate import LANES
from penstock.streaming.planning.schedule import Compute, Copy, Release, Step
from penstock.streaming.planning.timeline import Span, SpanKind, Timeline
from penstock.streaming.stores.base import PageLockable
from penstock.streaming.stores.loading import load_part
from penstock.streaming.stores.made_store import makes_on
from penstock.streaming.stores.matrix_index import Part
from penstock.streaming.stores.planes import CompletedOnArrival

_HOST_TO_DEVICE = 1  # cudaMemcpyHostToDevice


class CudaExecutor:
    """Transfers subdivisions to slots on a GPU, synchronised with kernels by events only.

    A store in host memory (a :class:`HostStore`) is page-locked, and the GPU copies from it; the host then only issues work: it
    never waits inside a sweep that it plays, and where data move it waits before the parts in several streams of one that it
    replays. Any other store, or one that the system refuses to lock, is read by a thread into page-locked buffers, one per slot;
    the host waits for the reads and issues each transfer when its data have arrived. What a :class:`MadeStore` makes on this GPU,
    kernels write into the slots. Copies, and these kernels, run on a separate stream if they overlap, computations on the
    caller's.

    A sweep with a key is captured when it is repeated, including its transfers, and replayed from then on: starting a
    computation costs the host the GPU time of a few computations, replaying one costs next to nothing.
    """

    def __init__(self, setup: ExecutorSetup) -> None:
        import cupy

        self._cupy = cupy
        self._device = setup.device
        self.store = setup.store
        self.slots = setup.slots
        self.timeline: Timeline | None = None
        self.waited_seconds = 0.0  # in replays, for the previous sweep or part
        self._index = setup.store.index
        self._part = setup.part
        self._link_binds, self._host_computes = setup.link_binds, setup.host_computes
        self._slabs = SlabViews(self._index, setup.slots, setup.structures)
        self._graphs = GraphCache()
        self._pending: list[tuple[SpanKind, int, int | None, Any, Any]] = []
        self._direct: PageLockable | None = None
        self._staging: Staging | None = None
        self._made = setup.store if makes_on(setup.store, setup.device) else None
        self._transfers = self._made is None or self._made.moved_share > 0  # whether anything moves over the link
        self._completed = setup.store if isinstance(setup.store, CompletedOnArrival) else None
        self._incomplete: set[int] = set()  # slots
        with cupy.cuda.Device(setup.device.index):
            if isinstance(setup.store, PageLockable):
                try:
                    setup.store.page_lock()
                    self._direct = setup.store
                except DeviceError as error:
                    warnings.warn(f"{error}; until then transfers pass through buffers", stacklevel=4)
            if self._direct is None and self._made is None:
                self._staging = Staging(
                    setup.store,
                    setup.part,
                    [int(slot.nbytes) for slot in setup.slots],
                    threaded=setup.overlap,
                    stall_seconds=setup.stall_seconds,
                    note=self._note_read,
                )
            self._copy_stream = cupy.cuda.Stream(non_blocking=True) if setup.overlap else None
            self._scratch = cupy.empty(0 if self._completed is None else self._completed.scratch_nbytes, dtype=np.uint8)
            self._events = _Events(len(setup.slots))
            [self._played] = _new_events(1)

    @property
    def staged(self) -> bool:
        """Whether data pass through page-locked buffers between the store and the GPU."""
        return self._staging is not None

    def load(self, number: int, buffer: Array, part: Part) -> None:
        """Read a part of a subdivision into a resident buffer."""
        load_part(self.store, number, buffer, part, self._device)
        if self._completed is not None:
            self._completed.complete(number, buffer, part, self._scratch)

    @property
    def _capturable(self) -> bool:
        """Whether sweeps can be captured: nothing in them waits for the host, and no timeline is recorded."""
        return self._staging is None and self._copy_stream is not None and self.timeline is None

    def play(
        self, steps: Callable[[], Sequence[Step]], residents: Residents, visit: Visit, key: SweepKey | None = None
    ) -> None:
        """Issue the steps in order, or replay the captured sweep."""
        if key is not None and self._capturable:
            captured = self._graphs.sweep(key, lambda: self._capture(steps(), residents, visit))
            if captured is not None:
                self._replay(captured)
                return
        if key is not None:
            visit = self._graphs.visits(key, visit)
        compute_stream = self._cupy.cuda.get_current_stream()
        # The previous sweep may have run on another stream and may still be reading the slots.
        compute_stream.wait_event(self._played)
        try:
            copy_stream = self._copy_stream or compute_stream
            self._issue(steps(), residents, visit, self._events, set(), [compute_stream], copy_stream)
            self._played.record(compute_stream)
        except BaseException:
            # After a stalled read the next sweep waits for it; after a device fault the original error is raised.
            with contextlib.suppress(Exception):
                self._drain(patient=False)
            raise
        if key is not None:
            self._graphs.note(key)

    def _capture(self, steps: Sequence[Step], residents: Residents, visit: Visit) -> CapturedSweep:
        """Capture a sweep that begins when all work issued before has ended."""

        def captured(part: Sequence[Step], lanes: int) -> CapturedGraph:
            return capture(lambda: self._issue_in_branches(part, residents, visit, lanes))

        return [(captured(part, lanes), lanes) for part, lanes in self._parts(steps) if part]

    def _parts(self, steps: Sequence[Step]) -> list[tuple[Sequence[Step], int]]:
        """Return the parts in which a sweep is captured, and the number of streams in which each computes.

        Waiting streams slow transfers down, by 4 % for BSR. If the link is the bottleneck, only one stream computes during
        transfers, and several before the first transfer and after the last one, when the link is idle. The host waits between
        such parts; if it has to compute meanwhile, there is one part, in one stream; so it is where values are completed,
        which all need the same scratch memory.
        """
        if self._host_computes or self._completed is not None:
            return [(steps, 1)]
        transfers = [position for position, step in enumerate(steps) if isinstance(step, Copy)]
        if not transfers or not self._link_binds:
            return [(steps, LANES)]
        first, slot = transfers[0], steps[transfers[-1]].slot
        last = next(i for i in range(transfers[-1] + 1, len(steps)) if steps[i].slot == slot)
        return [(steps[:first], LANES), (steps[first:last], 1), (steps[last:], LANES)]

    def _issue_in_branches(self, steps: Sequence[Step], residents: Residents, visit: Visit, lanes: int) -> None:
        """Issue steps to the current stream and to branches that fork from it and join it again."""
        cuda = self._cupy.cuda
        current, branches = cuda.get_current_stream(), [cuda.Stream(non_blocking=True) for _ in range(lanes)]
        [fork], joins, events = _new_events(1), _new_events(lanes), _Events(len(self.slots))
        fork.record(current)
        for branch in branches:
            branch.wait_event(fork)
        *others, copies = branches
        self._issue(steps, residents, visit, events, set(range(len(self.slots))), [current, *others], copies)
        for join, branch in zip(joins, branches, strict=True):
            join.record(branch)
            current.wait_event(join)

    def _replay(self, sweep: CapturedSweep) -> None:
        """Issue a captured sweep; the host does not wait for its end.

        Synchronises before launching a part of several streams: a queued one slows the transfers ahead of it by 6 %. Where
        kernels make the subdivisions there are none to slow, and a queued sweep begins 0.2 ms sooner.
        """
        compute_stream = self._cupy.cuda.get_current_stream()
        compute_stream.wait_event(self._played)
        for graph, lanes in sweep:
            if lanes > 1 and self._transfers:
                began = time.perf_counter()
                self._played.synchronize()
                self.waited_seconds += time.perf_counter() - began
            graph.launch()
            self._played.record(compute_stream)
        assert self._copy_stream is not None, "capturable"
        self._copy_stream.wait_event(self._played)  # a replay does not record the events of slots

    def _issue(
        self,
        steps: Sequence[Step],
        residents: Residents,
        visit: Visit,
        events: _Events,
        settled: set[int],
        lanes: list[Any],
        copies: Any,
    ) -> None:
        """Issue steps; ``settled`` slots were filled and read before the first step can begin.

        A :class:`Schedule` issues all stages that follow an arrival in ascending order; each such group goes to the next
        stream of ``lanes`` in turn. A computation thus follows the previous stage in its own stream, and waits for the previous
        computation of its own stage; meanwhile a later stage computes with an earlier subdivision.
        """
        lane, group, last = lanes[0], 0, -1
        done: dict[int, Any] = {}  # the last computation of each stage
        ready = set(settled)
        for step in steps:
            if isinstance(step, Copy):
                ready.discard(step.slot)
                if self._staging is not None:
                    self._staging.request(step)
                else:
                    self._transfer(step, copies, events, wait=step.slot not in settled)
            elif isinstance(step, Compute):
                stage = step.stage
                group, last = group + (stage <= last), stage
                lane = lanes[group % len(lanes)]
                if stage in done:
                    lane.wait_event(done[stage])
                if step.slot is not None and step.slot not in ready:
                    if self._staging is not None and (copy := self._staging.arrival(step)):
                        self._transfer(copy, copies, events)
                    lane.wait_event(events.arrived[step.slot])
                    ready.add(step.slot)
                self._complete(step, lane)
                with lane, self._recorded("compute", step.subdivision, step.slot, lane):
                    visit(step.subdivision, self._slabs.slab(step, residents), stage)
                if len(lanes) > 1:
                    if stage not in done:
                        [done[stage]] = _new_events(1)
                    done[stage].record(lane)
            elif isinstance(step, Release):
                events.released[step.slot].record(lane)  # its last computation was the last one issued
                settled.discard(step.slot)

    def _transfer(self, step: Copy, stream: Any, events: _Events, *, wait: bool = True) -> None:
        """Issue the copy of a subdivision to its slot, after the last computation with the slot's previous data."""
        if wait:
            stream.wait_event(events.released[step.slot])
        target = self.slots[step.slot].data
        with self._recorded("transfer", step.subdivision, step.slot, stream):
            if self._made is not None:
                with stream:  # in which the data that it is made from are copied first, if they are not on the device
                    self._made.make(step.subdivision, self._slabs.arrays(step.subdivision, step.slot, self._part))
            elif self._staging is None:
                assert self._direct is not None
                # CuPy's copy_from_host_async cannot be captured.
                copy = self._cupy.cuda.runtime.memcpyAsync
                for offset, piece in self._direct.segments(step.subdivision, self._part):
                    copy(target.ptr + offset, piece.ctypes.data, piece.nbytes, _HOST_TO_DEVICE, stream.ptr)
            else:
                nbytes = self._index.subdivisions[step.subdivision].part_nbytes(self._part)
                target.copy_from_host_async(self._staging.buffers[step.slot].ctypes.data, nbytes, stream)
                self._staging.copied[step.slot].record(stream)
        if self._completed is not None:
            self._incomplete.add(step.slot)
        events.arrived[step.slot].record(stream)
        if self._copy_stream is None:
            stream.synchronize()

    def _complete(self, step: Compute, lane: Any) -> None:
        """Complete what has arrived in a slot in the stream of its first computation, while the next transfer goes on."""
        if self._completed is not None and step.slot in self._incomplete:
            with lane:
                self._completed.complete(step.subdivision, self.slots[step.slot], self._part, self._scratch)
            self._incomplete.remove(step.slot)

    def drain(self) -> None:
        """Wait for all work issued on any stream, and discard reads in flight."""
        self._drain(patient=True)

    def _drain(self, *, patient: bool) -> None:
        """Drain; if not ``patient``, do not wait again for a read that has stalled."""
        self._device.synchronize()
        self._incomplete.clear()  # slots are filled anew
        if self._staging is not None:
            self._staging.drain(patient=patient)

    def close(self) -> None:
        """Wait for all work issued and drop the slots; the store stays open."""
        try:
            with contextlib.suppress(StoreError):  # of a stalled read: its thread ends with the read
                self._drain(patient=False)
        finally:
            if self._staging is not None:
                self._staging.close()
            self._graphs.clear()
            self._slabs.clear()

    @contextlib.contextmanager
    def trace(self) -> Iterator[Timeline]:
        """Record times; waits for all work at both ends, to align the clocks of host and GPU."""
        self._device.synchronize()
        zero = self._cupy.cuda.get_current_stream().record()
        zero.synchronize()
        self.timeline = timeline = Timeline(origin=time.perf_counter())
        try:
            yield timeline
        finally:
            self.timeline = None
            pending, self._pending = self._pending, []
            self._device.synchronize()
            for kind, subdivision, slot, start, stop in pending:
                times = (self._cupy.cuda.get_elapsed_time(zero, event) / 1e3 for event in (start, stop))
                timeline.spans.append(Span(kind, subdivision, slot, *times))

    def _note_read(self, number: int, slot: int, start: float, stop: float) -> None:
        if (timeline := self.timeline) is not None:
            timeline.add("read", number, slot, start, stop)

    @contextlib.contextmanager
    def _recorded(self, kind: SpanKind, subdivision: int, slot: int | None, stream: Any) -> Iterator[None]:
        """Put timing events and an NVTX range around the issued work, if a timeline is recorded."""
        if self.timeline is None:
            yield
            return
        self._cupy.cuda.nvtx.RangePush(f"{kind} {subdivision}")
        start = stream.record()
        try:
            yield
        finally:
            self._pending.append((kind, subdivision, slot, start, stream.record()))
            self._cupy.cuda.nvtx.RangePop()


def _new_events(count: int) -> list[Any]:
    import cupy

    return [cupy.cuda.Event(disable_timing=True) for _ in range(count)]


class _Events:
    """Events for each slot: its data have arrived; the last computation has read them."""

    def __init__(self, slots: int) -> None:
        self.arrived, self.released = _new_events(slots), _new_events(slots)
