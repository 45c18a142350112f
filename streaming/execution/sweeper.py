"""Runs sweeps over a stored matrix, with its ring of slots and its resident part."""

from __future__ import annotations

import itertools
import os
import threading
from contextlib import AbstractContextManager

import numpy as np

from penstock.spmv import Array, Device, InputError, SparseMatrix
from penstock.streaming.execution.budget import MemoryBudget, check_room
from penstock.streaming.execution.cuda import CudaExecutor
from penstock.streaming.execution.executor import (
    Executor,
    ExecutorFactory,
    ExecutorSetup,
    Residents,
    Structures,
    SweepKey,
    Visit,
)
from penstock.streaming.execution.host import HostExecutor
from penstock.streaming.execution.reader import describe_subdivision
from penstock.streaming.planning.plan import StreamPlan
from penstock.streaming.planning.schedule import Step
from penstock.streaming.planning.timeline import Timeline
from penstock.streaming.stores.base import Store
from penstock.streaming.stores.made_store import makes_on
from penstock.streaming.stores.planes import CompletedOnArrival, JoinedStore

_COUNTER = itertools.count(1)
_BINDING = 1.5  # transfer / compute ratio above which the link is the bottleneck


class Sweeper:
    """Runs sweeps over all subdivisions of a store according to a plan, one at a time.

    Slots and resident part are one allocation of the budget, until :meth:`close`; the store stays open. With ``host_computes``
    the host computes during sweeps, so starting one must not make it wait for the device. ``structures`` are offsets and column
    indices that the plan shares with another matrix.
    """

    def __init__(
        self,
        store: Store,
        plan: StreamPlan,
        budget: MemoryBudget,
        device: Device,
        *,
        stall_seconds: float = 60.0,
        executor: ExecutorFactory | None = None,
        host_computes: bool = False,
        structures: Structures | None = None,
    ) -> None:
        self.store, self.plan, self.budget, self.device = store, plan, budget, device
        self.sweeps = 0
        self.bytes_streamed = 0
        self._purpose = f"matrix storage {next(_COUNTER)}"
        self._schedule = plan.schedule
        self._number = 0  # the next sweep of the schedule
        self._empty = True  # whether the ring must be filled first
        self._holds_rounded = False  # whether what is in it may be in float32
        self._sweeping = threading.Lock()  # the ring is used by one sweep at a time
        self._process = os.getpid()
        self._residents: Residents = {}
        self._resident_buffers: list[tuple[int, Array]] = []
        self.executor: Executor | None = None
        storage = budget.allocate(self._purpose, plan.storage_nbytes, device)
        try:
            with device.current():
                self._open(storage, structures, stall_seconds, executor, host_computes)
        except BaseException:
            del storage
            self.close()
            raise

    def _open(
        self,
        storage: Array,
        shared: Structures | None,
        stall_seconds: float,
        make_executor: ExecutorFactory | None,
        host_computes: bool,
    ) -> None:
        plan = self.plan
        # Of the planned vectors, what the maker holds lies on the device already.
        held = self.store.maker.nbytes if makes_on(self.store, self.device) else 0
        check_room(self.device, plan.workload.workspace_nbytes - held, "the vectors beside the matrix storage")
        numbers, all_numbers = sorted(plan.resident), range(len(plan.index.subdivisions))
        pieces = [plan.slot_nbytes] * plan.slots + [plan.nbytes_of(number) for number in numbers]
        if plan.resident_structure:
            pieces += [plan.index.subdivisions[number].part_nbytes("structure") for number in all_numbers]
        stops = np.cumsum(pieces).tolist()
        buffers = [storage[stop - nbytes : stop] for stop, nbytes in zip(stops, pieces, strict=True)]
        slots, resident = buffers[: plan.slots], buffers[plan.slots : plan.slots + len(numbers)]
        own = dict(zip(all_numbers, buffers[plan.slots + len(numbers) :], strict=False))  # a resident structure
        structures = [plan.index.arrays(number, buffer, "structure") for number, buffer in own.items()] or shared
        estimate = plan.estimate()
        setup = ExecutorSetup(
            self.store,
            self.device,
            slots,
            structures,
            part=plan.part,
            overlap=plan.ring.overlap and bool(plan.slots),
            stall_seconds=stall_seconds,
            link_binds=estimate is not None and estimate.transfer > _BINDING * estimate.compute,
            host_computes=host_computes,
        )
        if make_executor is None:
            make_executor = HostExecutor if self.device.kind == "cpu" else CudaExecutor
        self.executor = make_executor(setup)
        for number, buffer in own.items():
            self.executor.load(number, buffer, "structure")
        self._resident_buffers = list(zip(numbers, resident, strict=True))
        for number, buffer in self._resident_buffers:
            self.executor.load(number, buffer, plan.part)
            structure = None if structures is None else structures[number]
            self._residents[number] = plan.index.view(number, buffer, structure)
        self.executor.drain()

    @property
    def direction(self) -> int:
        """Direction of the next sweep: 1 for ascending rows, -1 for descending rows."""
        return self._schedule.direction(self._number)

    def turn_to(self, direction: int) -> None:
        """Set the direction of the next sweep, as :meth:`StreamedMatrix.turn_to` does."""
        if direction not in (1, -1):
            raise InputError(f"direction must be 1 or -1, not {direction}")
        if direction == self.direction:
            return
        self._renew_after_fork()
        if self.plan.ring.sweeps != "alternate":
            raise InputError("sweeps of this plan do not alternate: they run in direction 1 only")
        if self._sweeping.locked():
            raise InputError("a sweep of this matrix is running; change the direction when it has ended")
        self._number, self._empty = self._number + 1, True

    def sweep(
        self,
        visit: Visit,
        stages: int = 1,
        reach: int = 1,
        key: SweepKey | None = None,
        *,
        rounded: bool = False,
    ) -> None:
        """Sweep once, in consecutive stages at a distance of ``reach`` subdivisions, as in :meth:`Schedule.sweep`.

        ``visit(number, slab, stage)`` computes with subdivision ``number``; the slab's memory is reused afterwards. The key
        identifies a sweep that may be repeated. A ``rounded`` sweep reads the values of a :class:`JoinedStore` in float32. After
        an error or an interrupt the matrix can be swept again.
        """
        executor = self._opened()
        self._renew_after_fork()
        if not self._sweeping.acquire(blocking=False):
            raise InputError("another sweep of this matrix is running; finish it first, or open a second matrix")
        try:
            # Subdivisions that a rounded sweep left in the ring are in float32: only another rounded sweep may use them.
            number, empty = self._number, self._empty or (self._holds_rounded and not rounded)
            # If this sweep is interrupted anywhere, the next one starts from an empty ring.
            self._empty = True
            if isinstance(self.store, JoinedStore):
                self.store.rounded = self._holds_rounded = rounded
            if empty:
                executor.drain()
                number = number % 2 if self.plan.ring.sweeps == "alternate" else 0

            def steps() -> list[Step]:
                prologue = self._schedule.prologue(number) if empty else []
                return prologue + self._schedule.sweep(number, stages, reach)

            with self.device.current():
                executor.play(steps, self._residents, self._located(visit), self._placed(key, number, empty))
            self._number, self._empty = number + 1, False
            self.sweeps += 1
            moved = self.plan.streamed_nbytes if empty else self.plan.sweep_nbytes(number)
            share = self.store.read_share(self.plan.part) if isinstance(self.store, CompletedOnArrival) else 1.0
            self.bytes_streamed += round(moved * share)
        finally:
            if isinstance(self.store, JoinedStore):
                self.store.rounded = False
            self._sweeping.release()

    def _renew_after_fork(self) -> None:
        """Begin with an empty ring in a forked process, where threads of the parent may have been sweeping."""
        if self._process != os.getpid():
            with self.device.current():  # an error on a GPU
                self._process, self._sweeping, self._empty = os.getpid(), threading.Lock(), True

    def _located(self, visit: Visit) -> Visit:
        """Return a visit whose errors name the subdivision."""

        def located(number: int, slab: SparseMatrix, stage: int) -> None:
            try:
                visit(number, slab, stage)
            except Exception as error:
                error.add_note(f"while computing with {describe_subdivision(self.store, number)}")
                raise

        return located

    def _placed(self, key: SweepKey | None, number: int, empty: bool) -> SweepKey | None:
        """Add the direction of the sweep to a key.

        A sweep that fills the ring is not captured unless the key says so, nor are cyclic sweeps, whose slots change from sweep
        to sweep.
        """
        if key is None or key.unit == "visit":
            return key
        changes = (empty and not key.filling) or key.memory is None or self.plan.ring.sweeps == "cyclic"
        memory = None if changes else (*(key.memory or ()), number % 2, self._holds_rounded, empty)
        return SweepKey((*key.kernels, number % 2, self._holds_rounded), memory, filling=key.filling)

    def reload(self) -> None:
        """Read anew what the device holds, after the values of the store have changed; captured sweeps stay."""
        executor = self._opened()
        self._renew_after_fork()
        with self.device.current():
            executor.drain()
            for number, buffer in self._resident_buffers:
                executor.load(number, buffer, self.plan.part)
            executor.drain()
        self._empty = True

    def go_on_from(self, other: Sweeper) -> None:
        """Take over the counters and the direction of a sweeper with the same plan, which is closed."""
        self.sweeps, self.bytes_streamed, self._number = other.sweeps, other.bytes_streamed, other._number

    def trace(self) -> AbstractContextManager[Timeline]:
        """Return a context in which the times of transfers and computations are recorded."""
        return self._opened().trace()

    def _opened(self) -> Executor:
        if self.executor is None:
            raise InputError("this streamed matrix is closed; open a new one on its store")
        return self.executor

    def close(self) -> None:
        """Stop transfers and release the budget; the store stays open.

        A forked process drops what it has inherited: threads and transfers are those of its parent.
        """
        executor, self.executor = self.executor, None
        self._residents.clear()
        self._resident_buffers.clear()
        try:
            if executor is not None and self._process == os.getpid():
                with self.device.current():
                    executor.close()
        finally:
            self.budget.release(self._purpose)
