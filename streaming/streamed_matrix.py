"""A matrix larger than the memory that computes with it, as an operator like any other."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import numpy as np

from penstock.spmv import (
    CPU,
    Array,
    Device,
    InputError,
    SparseFormat,
    ValidatedOperator,
    as_vectors,
    format_named,
)
from penstock.spmv.formats.base import check_block_size, scale
from penstock.streaming.budget import MemoryBudget
from penstock.streaming.cuda_executor import CudaExecutor
from penstock.streaming.host_executor import HostExecutor
from penstock.streaming.layout import Visit
from penstock.streaming.plan import StreamPlan, plan_stream
from penstock.streaming.store import Store
from penstock.streaming.timeline import Timeline

__all__ = ["StreamedMatrix"]


_COUNTER = itertools.count(1)


class StreamedMatrix(ValidatedOperator):
    """Apply a stored matrix by streaming it, subdivision by subdivision, through a memory budget.

    Parameters
    ----------
    store : Store
        A :class:`FileStore` for the CPU, a :class:`HostStore` for a CUDA device (or the CPU). It stays open.
    budget : MemoryBudget or int or str
        Memory for slots and the resident part.
    device : Device or str
        Where products are computed.
    overlap : bool
        Transfer the next subdivisions while computing (communication hiding).
    slots : int, optional
        Length of the ring; the plan chooses by default.
    plan : StreamPlan, optional
        A plan made before, for this store.

    Raises
    ------
    BudgetError
        If the budget holds neither the matrix nor two slots.

    Notes
    -----
    A product is bit-equal to that of the resident matrix of the same format, whatever the budget, with or without overlap:
    every row is summed by the same kernel in the same order. A sweep moves ``plan.streamed_nbytes`` bytes.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import HostStore
    >>> beam = Cantilever(nodes=(17, 5, 5), dof=3)
    >>> with StreamedMatrix(HostStore.create(beam.subdivisions(8)), budget="400 KiB") as A:
    ...     bool((A @ beam.load() == beam.matrix() @ beam.load()).all())
    True
    """

    def __init__(
        self,
        store: Store,
        budget: MemoryBudget | int | str,
        *,
        device: Device | str = CPU,
        overlap: bool = True,
        slots: int | None = None,
        plan: StreamPlan | None = None,
    ) -> None:
        self.device = Device.parse(device)
        self.store = store
        self.budget = budget if isinstance(budget, MemoryBudget) else MemoryBudget(budget)
        index = store.index
        if plan is not None and slots is not None:
            raise InputError("slots are decided by the plan; give one of plan and slots")
        left = self.budget.limit_nbytes - self.budget.used_nbytes
        self.plan = plan or plan_stream(index, left, slots=slots, overlap=overlap)
        if not self.plan.index.same_layout(index):
            raise InputError("the plan was made for another cut of the matrix; plan again from store.index")
        self.shape = index.shape
        self.dtype = np.dtype(index.dtype)
        self.sweeps = 0
        self.bytes_streamed = 0
        self._purpose = f"matrix storage {next(_COUNTER)}"
        self._schedule = self.plan.schedule
        self._sweeps_since_start: int | None = None
        self._sweeping = threading.Lock()  # the ring serves one sweep at a time
        self._residents: dict[int, SparseFormat] = {}
        self._executor: HostExecutor | CudaExecutor | None = None
        # One allocation for the ring and the resident part: nothing is allocated again until close.
        storage = self.budget.allocate(self._purpose, self.plan.storage_nbytes, self.device)
        try:
            with self.device.current():
                self._open(storage)
        except BaseException:
            del storage
            self.close()
            raise

    def _open(self, storage: Array) -> None:
        pieces = [self.plan.slot_nbytes] * self.plan.slots
        numbers = sorted(self.plan.resident)
        pieces += [self.plan.index.subdivisions[number].nbytes for number in numbers]
        stops = np.cumsum(pieces).tolist()
        buffers = [storage[stop - nbytes : stop] for stop, nbytes in zip(stops, pieces, strict=True)]
        slots, overlap = buffers[: self.plan.slots], self.plan.overlap and bool(self.plan.slots)
        if self.device.kind == "cpu":
            self._executor = HostExecutor(self.store, slots, overlap=overlap)
        else:
            self._executor = CudaExecutor(self.store, self.device, slots, overlap=overlap)
        for number, buffer in zip(numbers, buffers[self.plan.slots :], strict=True):
            self._residents[number] = self._executor.load_resident(number, buffer)
        self._executor.drain()

    def sweep(self, visit: Visit) -> None:
        """Pass once over all subdivisions in row order.

        Parameters
        ----------
        visit : callable
            ``visit(number, slab)`` computes with subdivision ``number``. The slab's memory is reused afterwards.

        Notes
        -----
        After an error or an interrupt the matrix can be swept again.
        """
        if self._executor is None:
            raise InputError("this streamed matrix is closed; open a new one on its store")
        if not self._sweeping.acquire(blocking=False):
            raise InputError("another sweep of this matrix is under way; finish it first, or open a second matrix")
        try:
            self._sweep(self._executor, visit)
        finally:
            self._sweeping.release()

    def _sweep(self, executor: HostExecutor | CudaExecutor, visit: Visit) -> None:
        # Unless this sweep ends, wherever it is interrupted, the next one starts from an empty ring.
        number, self._sweeps_since_start = self._sweeps_since_start, None
        steps = self._schedule.sweep(number or 0)
        if number is None:
            executor.drain()
            steps = self._schedule.prologue() + steps
        with self.device.current():
            executor.play(steps, self._residents, visit)
        self._sweeps_since_start = (number or 0) + 1
        self.sweeps += 1
        self.bytes_streamed += self.plan.streamed_nbytes

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        if format_named(self.plan.index.format_name).scatters:
            scale(out, beta)
        self.sweep(lambda number, slab: slab.apply_slab(self._rows(number).start, x, out, alpha, beta))

    def apply_absolute(self, x: Array) -> Array:
        """Return ``|A| @ x`` in one sweep; needs one further slab of memory."""
        x = as_vectors(x, self.shape[1], self, "x")
        if x.ndim != 1:
            raise InputError(f"x must have shape ({self.shape[1]},), not {x.shape}: this product takes one vector")
        out = self.device.xp.zeros(self.shape[0], dtype=self.dtype)
        self.sweep(lambda number, slab: slab.add_absolute(self._rows(number).start, x, out))
        return out

    def diagonal_blocks(self, size: int) -> Array:
        """Return the dense blocks on the diagonal, ``(rows / size, size, size)``, in one sweep."""
        count = check_block_size(size, self.shape[0])
        blocks = self.device.xp.zeros((count, size, size), dtype=self.dtype)
        self.sweep(lambda number, slab: slab.add_diagonal_blocks(self._rows(number).start, blocks))
        return blocks

    def _rows(self, number: int) -> slice:
        subdivision = self.plan.index.subdivisions[number]
        return slice(subdivision.row_start, subdivision.row_stop)

    @contextmanager
    def recording(self) -> Iterator[Timeline]:
        """Record the times of all transfers and computations inside a ``with`` block; it ends with a synchronisation."""
        if self._executor is None:
            raise InputError("this streamed matrix is closed; open a new one on its store")
        timeline = Timeline(origin=time.perf_counter())
        self._executor.timeline = timeline
        try:
            yield timeline
        finally:
            if isinstance(self._executor, CudaExecutor):
                self._executor.drain()
            self._executor.timeline = None

    def close(self) -> None:
        """Stop transfers and give the budget back; the store stays open."""
        executor, self._executor = self._executor, None
        self._residents.clear()
        try:
            if executor is not None:
                with self.device.current():
                    executor.close()
        finally:
            self.budget.release(self._purpose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Forgotten to close: the reader thread must not outlive the matrix. At the end of the interpreter it is gone already.
        if getattr(self, "_executor", None) is not None and not sys.is_finalizing():
            self.close()
