"""Plays schedules between host memory and a GPU: a copy stream fills slots while kernels work on the last ones."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from penstock.spmv import Array, Device, DeviceError, SparseFormat, StoreError
from penstock.spmv.cuda_graph import RecordedGraph, record_graph
from penstock.streaming.budget import aligned_buffer
from penstock.streaming.layout import Part, Visit
from penstock.streaming.reader import Reader
from penstock.streaming.schedule import Compute, Copy, Release, Step
from penstock.streaming.store import PageLockable, Store
from penstock.streaming.timeline import Span, SpanKind, Timeline

__all__ = ["LANES", "CudaExecutor", "RecordedSweep"]

#: The parts of a sweep, and in how many streams each computes.
RecordedSweep = list[tuple[RecordedGraph, int]]

#: Streams among which the stages of a recorded sweep are shared: a subdivision alone does not fill the GPU.
LANES = 4
_HOST_TO_DEVICE = 1  # cudaMemcpyHostToDevice


class CudaExecutor:
    """Transfers pieces of a matrix to slots on a GPU, ordered against kernels by events alone.

    Parameters
    ----------
    store : Store
        One whose pieces lie in host memory (a :class:`HostStore`) is page-locked, and the GPU copies from it. Any other,
        and one that the system refuses to lock, is read into page-locked buffers, as long as the ring, by a thread of its
        own: disk -> page-locked memory -> GPU.
    device : Device
    slots : list of CuPy uint8 arrays
    part : Part
        What moves of each subdivision.
    structures : list of CuPy uint8 arrays
        The structure of every subdivision, if only values move.
    overlap : bool
        True copies on a stream of its own. False copies on the stream that computes and waits for the end of each copy.
    stall_seconds : float
        A read that takes longer is an error.
    link_binds : bool
        Whether transfers are expected to take much longer than all computations of a sweep.

    Notes
    -----
    From page-locked memory the host only issues work: it waits for nothing inside a sweep that it plays, and between the parts
    of one that it replays. From a disk it waits for what is read, and issues each transfer when its data are there.
    Computations run on the caller's current stream.
    """

    def __init__(
        self,
        store: Store,
        device: Device,
        slots: list[Array],
        *,
        part: Part = "whole",
        structures: list[Array] | None = None,
        overlap: bool,
        stall_seconds: float,
        link_binds: bool = False,
    ) -> None:
        import cupy

        self._cupy = cupy
        self._device = device
        self.store = store
        self.slots = slots
        self.timeline: Timeline | None = None
        self.waited_seconds = 0.0  # in replays, for the sweep or the part before
        self._index = store.index
        self._part = part
        self._link_binds = link_binds
        self._structures = structures
        self._views: dict[tuple[int, int], SparseFormat] = {}
        self._pending: list[tuple[SpanKind, int, int | None, Any, Any]] = []
        self._direct: PageLockable | None = None
        self._staging: _Staging | None = None
        with cupy.cuda.Device(device.index):
            if isinstance(store, PageLockable):
                try:
                    store.page_lock()
                    self._direct = store
                except DeviceError as error:
                    warnings.warn(f"{error}; until then transfers take the way through buffers", stacklevel=4)
            if self._direct is None:
                nbytes = [int(slot.nbytes) for slot in slots]
                self._staging = _Staging(
                    store, part, nbytes, threaded=overlap, stall_seconds=stall_seconds, executor=self
                )
            self._copy_stream = cupy.cuda.Stream(non_blocking=True) if overlap else None
            self._events = _Events(len(slots))
            [self._played] = _new_events(1)

    @property
    def staged(self) -> bool:
        """Whether data pass through page-locked buffers of the executor's own on their way."""
        return self._staging is not None

    def load(self, number: int, buffer: Array, part: Part) -> None:
        """Fill a buffer that stays."""
        if self._direct is not None:
            for offset, piece in self._direct.segments(number, part):
                buffer[offset : offset + piece.nbytes].set(piece)
        else:
            host = aligned_buffer(self._index.subdivisions[number].part_nbytes(part))
            self.store.read_into(number, host, part)
            buffer[: host.nbytes].set(host)

    @property
    def recordable(self) -> bool:
        """Whether a sweep can be recorded: nothing in it waits for the host, and nobody asks for its times."""
        return self._staging is None and self._copy_stream is not None and self.timeline is None

    def play(self, steps: Sequence[Step], residents: dict[int, SparseFormat], visit: Visit) -> None:
        """Issue steps in order; ``visit(number, slab, stage)`` issues the computation on a slab."""
        compute_stream = self._cupy.cuda.get_current_stream()
        # The last run may have been on another stream, and may still read what is left in the slots.
        compute_stream.wait_event(self._played)
        try:
            copy_stream = self._copy_stream or compute_stream
            self._issue(steps, residents, visit, self._events, set(), [compute_stream], copy_stream)
            self._played.record(compute_stream)
        except BaseException:
            # A stalled read: the next sweep waits for it. A fault of the device: the error under way says where.
            with contextlib.suppress(Exception):
                self.drain(patient=False)
            raise

    def record(self, steps: Sequence[Step], residents: dict[int, SparseFormat], visit: Visit) -> RecordedSweep:
        """Record a sweep, transfers included, that begins when all that was issued before has ended.

        Played, a computation costs the host as much as a few of them cost the GPU; recorded, next to nothing.
        """

        def recorded(part: Sequence[Step], lanes: int) -> RecordedGraph:
            return record_graph(lambda: self._issue_in_branches(part, residents, visit, lanes))

        return [(recorded(part, lanes), lanes) for part, lanes in self._parts(steps) if part]

    def _parts(self, steps: Sequence[Step]) -> list[tuple[Sequence[Step], int]]:
        """Return the parts in which a sweep is recorded, and in how many streams each computes.

        Streams that wait slow transfers down, by 4 % for BSR. Where the link binds there is but one while anything is on its
        way, and several before the first transfer and after the last one, when the link waits for computations.
        """
        transfers = [position for position, step in enumerate(steps) if isinstance(step, Copy)]
        if not transfers or not self._link_binds:
            return [(steps, LANES)]
        first, slot = transfers[0], steps[transfers[-1]].slot
        last = next(i for i in range(transfers[-1] + 1, len(steps)) if steps[i].slot == slot)
        return [(steps[:first], LANES), (steps[first:last], 1), (steps[last:], LANES)]

    def _issue_in_branches(
        self, steps: Sequence[Step], residents: dict[int, SparseFormat], visit: Visit, lanes: int
    ) -> None:
        """Issue steps to the current stream and others that leave it and join it again."""
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

    def replay(self, sweep: RecordedSweep) -> None:
        """Issue a recorded sweep; the host does not wait for its end.

        Before a part of several branches it waits for what it has launched before: such a graph, waiting in a stream, slows
        the transfers of what runs before it, by 6 %.
        """
        compute_stream = self._cupy.cuda.get_current_stream()
        compute_stream.wait_event(self._played)
        for graph, lanes in sweep:
            if lanes > 1:
                began = time.perf_counter()
                self._played.synchronize()
                self.waited_seconds += time.perf_counter() - began
            graph.launch()
            self._played.record(compute_stream)
        assert self._copy_stream is not None, "recordable"
        self._copy_stream.wait_event(self._played)  # the events of slots know nothing of the recording

    def _issue(
        self,
        steps: Sequence[Step],
        residents: dict[int, SparseFormat],
        visit: Visit,
        events: _Events,
        settled: set[int],
        lanes: list[Any],
        copies: Any,
    ) -> None:
        """Issue steps; slots that are ``settled`` were filled, and read, before the first of them can begin.

        Streams, the ``lanes``, take turns whenever the stages begin anew: a :class:`Schedule` issues all stages that follow an
        arrival in ascending order. So a computation follows the one of the stage before in its own stream, and waits for the
        last one of its own stage; while it runs, a later stage works on what came earlier.
        """
        lane, turn, last = lanes[0], 0, -1
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
                turn, last = turn + (stage <= last), stage
                lane = lanes[turn % len(lanes)]
                if stage in done:
                    lane.wait_event(done[stage])
                if step.slot is not None and step.slot not in ready:
                    if self._staging is not None and (copy := self._staging.arrival(step)):
                        self._transfer(copy, copies, events)
                    lane.wait_event(events.arrived[step.slot])
                    ready.add(step.slot)
                with lane, self._recorded("compute", step.subdivision, step.slot, lane):
                    visit(step.subdivision, self._slab(step, residents), stage)
                if len(lanes) > 1:
                    if stage not in done:
                        [done[stage]] = _new_events(1)
                    done[stage].record(lane)
            elif isinstance(step, Release):
                events.released[step.slot].record(lane)  # its last computation was the last one issued
                settled.discard(step.slot)

    def _transfer(self, step: Copy, stream: Any, events: _Events, *, wait: bool = True) -> None:
        """Issue the copy of a subdivision to its slot, after the last computation on what the slot held."""
        if wait:
            stream.wait_event(events.released[step.slot])
        target = self.slots[step.slot].data
        with self._recorded("transfer", step.subdivision, step.slot, stream):
            if self._staging is None:
                assert self._direct is not None
                # Not CuPy's copy_from_host_async, which refuses to be recorded.
                copy = self._cupy.cuda.runtime.memcpyAsync
                for offset, piece in self._direct.segments(step.subdivision, self._part):
                    copy(target.ptr + offset, piece.ctypes.data, piece.nbytes, _HOST_TO_DEVICE, stream.ptr)
            else:
                nbytes = self._index.subdivisions[step.subdivision].part_nbytes(self._part)
                target.copy_from_host_async(self._staging.buffers[step.slot].ctypes.data, nbytes, stream)
                self._staging.copied[step.slot].record(stream)
        events.arrived[step.slot].record(stream)
        if self._copy_stream is None:
            stream.synchronize()

    def drain(self, *, patient: bool = True) -> None:
        """Wait for all work issued, on whatever streams, and forget what is on its way from a disk.

        Unless ``patient``, a read that was waited for in vain is not waited for again.
        """
        self._device.synchronize()
        if self._staging is not None:
            self._staging.drain(patient=patient)

    def close(self) -> None:
        """Wait for all work issued and drop the slots; the store stays open."""
        try:
            with contextlib.suppress(StoreError):  # of a stalled read, whose thread ends when the read does
                self.drain(patient=False)
        finally:
            if self._staging is not None:
                self._staging.close()
            self._views.clear()
            self.slots.clear()
            self._structures = None

    def _slab(self, step: Compute, residents: dict[int, SparseFormat]) -> SparseFormat:
        if step.slot is None:
            return residents[step.subdivision]
        key = (step.subdivision, step.slot)
        if key not in self._views:
            structure = None if self._structures is None else self._structures[step.subdivision]
            self._views[key] = self._index.view(step.subdivision, self.slots[step.slot], structure)
        return self._views[key]

    def start_recording(self, timeline: Timeline) -> None:
        """Record from now on; the clocks of host and GPU are brought together by waiting for all work."""
        self._device.synchronize()
        self._zero = self._cupy.cuda.get_current_stream().record()
        self._zero.synchronize()
        timeline.origin = time.perf_counter()
        self.timeline = timeline

    def stop_recording(self) -> None:
        """Wait for all work issued and turn recorded events into spans."""
        timeline, self.timeline = self.timeline, None
        pending, self._pending = self._pending, []
        self._device.synchronize()
        assert timeline is not None, "a recording was started"
        for kind, subdivision, slot, start, stop in pending:
            times = (self._cupy.cuda.get_elapsed_time(self._zero, event) / 1e3 for event in (start, stop))
            timeline.spans.append(Span(kind, subdivision, slot, *times))

    @contextlib.contextmanager
    def _recorded(self, kind: SpanKind, subdivision: int, slot: int | None, stream: Any) -> Iterator[None]:
        """Put timing events and a range for Nsight around what is issued, if a timeline is wanted."""
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
    """Of each slot: when its data have arrived, and when the last computation has read them."""

    def __init__(self, slots: int) -> None:
        self.arrived, self.released = _new_events(slots), _new_events(slots)


class _Staging:
    """Page-locked buffers, one a slot, that a thread fills from a store."""

    def __init__(
        self,
        store: Store,
        part: Part,
        nbytes: list[int],
        *,
        threaded: bool,
        stall_seconds: float,
        executor: CudaExecutor,
    ) -> None:
        cupy = executor._cupy
        self._executor = executor
        self.buffers = [aligned_buffer(length) for length in nbytes]
        self.copied = [cupy.cuda.Event(disable_timing=True) for _ in nbytes]
        self._locked: list[int] = []
        self._unlock = cupy.cuda.runtime.hostUnregister
        for buffer in self.buffers:
            # Refused too: the driver then copies through buffers of its own, slowly, but right.
            with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
                cupy.cuda.runtime.hostRegister(buffer.ctypes.data, buffer.nbytes, 1)
                self._locked.append(buffer.ctypes.data)
        self._on_the_way: dict[int, Copy] = {}  # by slot
        self._reader = Reader(store, part, threaded=threaded, stall_seconds=stall_seconds, note=self._note_read)

    def request(self, step: Copy) -> None:
        """Ask for a subdivision; it is read when the last transfer from its buffer has ended."""
        self._on_the_way[step.slot] = step
        buffer: np.ndarray[Any, Any] = self.buffers[step.slot]
        self._reader.request(step.subdivision, step.slot, buffer, ready=self.copied[step.slot].synchronize)

    def arrival(self, step: Compute) -> Copy | None:
        """Wait until the data of a computation have been read; None if they are in the slot since the last sweep."""
        assert step.slot is not None
        copy = self._on_the_way.pop(step.slot, None)
        if copy is not None:
            self._reader.wait_for(step.subdivision)
        return copy

    def drain(self, *, patient: bool) -> None:
        """Wait for what is being read and forget it."""
        self._on_the_way.clear()
        self._reader.drain(patient=patient)

    def close(self) -> None:
        """Stop the thread and unlock the buffers."""
        self._reader.close()
        while self._locked:
            self._unlock(self._locked.pop())

    def _note_read(self, number: int, slot: int, start: float, stop: float) -> None:
        timeline = self._executor.timeline
        if timeline is not None:
            timeline.add("read", number, slot, start, stop)
