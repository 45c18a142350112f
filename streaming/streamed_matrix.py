"""A matrix larger than the memory that computes with it, as an operator like any other."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

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
from penstock.spmv.operator import as_output
from penstock.spmv.recurrence import Recurrence
from penstock.streaming.budget import MemoryBudget, check_room
from penstock.streaming.cuda_executor import CudaExecutor, RecordedSweep
from penstock.streaming.host_executor import HostExecutor
from penstock.streaming.layout import Visit
from penstock.streaming.level_order import reach_of
from penstock.streaming.plan import StreamPlan
from penstock.streaming.planning import plan_stream
from penstock.streaming.product_graphs import LEAST_RECORDED, ProductGraphs
from penstock.streaming.reader import describe_subdivision
from penstock.streaming.schedule import Step
from penstock.streaming.store import Store
from penstock.streaming.timeline import Timeline

__all__ = ["StreamedMatrix"]


_COUNTER = itertools.count(1)
_BINDING = 1.5  # times the computations of a sweep, from which on transfers decide how it is played
_MOST_RECORDINGS = 64  # of sweeps: a few MB each; as many as a polynomial of 33 products needs at two a sweep, and more


class StreamedMatrix(ValidatedOperator):
    """Apply a stored matrix by streaming it, subdivision by subdivision, through a memory budget.

    Parameters
    ----------
    store : Store
        A :class:`FileStore` or a :class:`HostStore`, which is what a GPU streams from fastest: from a file, the matrix goes
        through page-locked buffers. It stays open.
    budget : MemoryBudget or int or str
        Memory for slots and the resident part.
    device : Device or str
        Where products are computed.
    plan : StreamPlan, optional
        A plan made before, for this store, instead of the options.
    stall_seconds : float
        A read that takes longer is an error, with overlap; without it, and when the matrix is opened, reads are waited for.
    **options
        Of :func:`plan_stream`: ``overlap``, ``slots``, ``at_end``, ``resident_structure`` ...

    Raises
    ------
    BudgetError
        If the budget holds neither the matrix nor two slots, or the device has no room for them and the vectors planned.

    Notes
    -----
    A product is bit-equal to that of the resident matrix of the same format, whatever the budget, with or without overlap:
    every row is summed by the same kernel in the same order. (Formats that ``scatter`` add to rows in the order of the
    sweep, and on a GPU in the order of arrival, so their last digits vary.)

    The first sweep moves ``plan.streamed_nbytes`` bytes; later ones find in the slots what the one before left there, if
    they turn.

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
        plan: StreamPlan | None = None,
        stall_seconds: float = 60.0,
        **options: Any,
    ) -> None:
        self.device = Device.parse(device)
        self.store = store
        self.budget = budget if isinstance(budget, MemoryBudget) else MemoryBudget(budget)
        index = store.index
        if plan is not None and options:
            raise InputError(f"{', '.join(sorted(options))} are decided by the plan; give one or the other")
        left = self.budget.limit_nbytes - self.budget.used_nbytes
        self.plan = plan or plan_stream(index, left, **options)
        if not self.plan.index.same_layout(index):
            raise InputError("the plan was made for another cut of the matrix; plan again from store.index")
        self.shape = index.shape
        self.dtype = np.dtype(index.dtype)
        self.sweeps = 0
        self.bytes_streamed = 0
        self._purpose = f"matrix storage {next(_COUNTER)}"
        self._schedule = self.plan.schedule
        self._number = 0  # of the next sweep in the schedule
        self._empty = True  # whether the ring must be filled first
        self._sweeping = threading.Lock()  # the ring serves one sweep at a time
        self._residents: dict[int, SparseFormat] = {}
        self._places: tuple[int, ...] = ()  # shape and addresses of the vectors of the last call of apply_each
        self._graphs: ProductGraphs | None = None
        self._recordings: dict[tuple[object, ...], RecordedSweep] = {}
        # Kernels that sweeps in a direction have started; others cannot be recorded.
        self._loaded: set[tuple[object, ...]] = set()
        self._executor: HostExecutor | CudaExecutor | None = None
        # One allocation for the ring and what is resident: nothing is allocated again until close.
        storage = self.budget.allocate(self._purpose, self.plan.storage_nbytes, self.device)
        try:
            with self.device.current():
                self._open(storage, stall_seconds)
        except BaseException:
            del storage
            self.close()
            raise

    def _open(self, storage: Array, stall_seconds: float) -> None:
        plan = self.plan
        check_room(self.device, plan.workspace_nbytes, "the vectors beside the matrix storage")
        numbers, everything = sorted(plan.resident), range(len(plan.index.subdivisions))
        pieces = [plan.slot_nbytes] * plan.slots + [plan.nbytes_of(number) for number in numbers]
        if plan.resident_structure:
            pieces += [plan.index.subdivisions[number].part_nbytes("structure") for number in everything]
        stops = np.cumsum(pieces).tolist()
        buffers = [storage[stop - nbytes : stop] for stop, nbytes in zip(stops, pieces, strict=True)]
        slots, resident = buffers[: plan.slots], buffers[plan.slots : plan.slots + len(numbers)]
        structures = buffers[plan.slots + len(numbers) :] if plan.resident_structure else None
        options: dict[str, Any] = {"part": plan.part, "structures": structures, "stall_seconds": stall_seconds}
        options["overlap"] = plan.overlap and bool(plan.slots)
        if self.device.kind == "cpu":
            self._executor = HostExecutor(self.store, slots, **options)
        else:
            forecast = plan.forecast()
            binds = forecast is not None and forecast.transfer > _BINDING * forecast.compute
            self._executor = CudaExecutor(self.store, self.device, slots, link_binds=binds, **options)
        for number, buffer in zip(everything, structures or (), strict=False):
            self._executor.load(number, buffer, "structure")
        for number, buffer in zip(numbers, resident, strict=True):
            self._executor.load(number, buffer, plan.part)
            self._residents[number] = plan.index.view(
                number, buffer, None if structures is None else structures[number]
            )
        self._executor.drain()

    @property
    def staged(self) -> bool:
        """Whether data pass through page-locked buffers between the store and a GPU: it is on disk, or cannot be locked."""
        return isinstance(self._executor, CudaExecutor) and self._executor.staged

    @property
    def waited_seconds(self) -> float:
        """Seconds so far that the host spent waiting for a GPU while it started sweeps."""
        return self._executor.waited_seconds if isinstance(self._executor, CudaExecutor) else 0.0

    @property
    def workspace_nbytes(self) -> int:
        """Bytes that the plan has set aside for the vectors of a solver."""
        return self.plan.workspace_nbytes

    @property
    def direction(self) -> int:
        """Direction of the next sweep: 1 takes the rows in ascending order, -1 in descending order."""
        return self._schedule.direction(self._number)

    def turn_to(self, direction: int) -> None:
        """Choose the direction of the next sweep; the ring is filled anew if that is not its own.

        Raises
        ------
        InputError
            If this plan's sweeps do not turn and another direction is asked for.
        """
        if direction not in (1, -1):
            raise InputError(f"a direction is 1 or -1, not {direction}")
        if direction == self.direction:
            return
        if self.plan.at_end != "turn":
            raise InputError("sweeps of this plan do not turn: they run in direction 1 only")
        if self._sweeping.locked():
            raise InputError("a sweep of this matrix is under way; turn it when it has ended")
        self._number, self._empty = self._number + 1, True

    def sweep(self, visit: Callable[[int, SparseFormat], None]) -> None:
        """Pass once over all subdivisions, in the direction of the sweep.

        Parameters
        ----------
        visit : callable
            ``visit(number, slab)`` computes with subdivision ``number``. The slab's memory is reused afterwards.

        Notes
        -----
        After an error or an interrupt the matrix can be swept again.
        """
        self._sweep_in_stages(lambda number, slab, stage: visit(number, slab), 1, 1)

    def _sweep_in_stages(self, visit: Visit, stages: int, reach: int, places: tuple[object, ...] | None = None) -> None:
        """Sweep; with ``places``, which say what it computes and where, it is recorded, and the same one replayed later."""
        if self._executor is None:
            raise InputError("this streamed matrix is closed; open a new one on its store")
        if not self._sweeping.acquire(blocking=False):
            raise InputError("another sweep of this matrix is under way; finish it first, or open a second matrix")
        try:
            self._sweep(self._executor, visit, stages, reach, places)
        finally:
            self._sweeping.release()

    def _sweep(
        self,
        executor: HostExecutor | CudaExecutor,
        visit: Visit,
        stages: int,
        reach: int,
        places: tuple[object, ...] | None,
    ) -> None:
        number, empty = self._number, self._empty
        self._empty = True  # unless this sweep ends, wherever it is interrupted, the next one starts from an empty ring
        if empty:
            executor.drain()
            number = number % 2 if self.plan.at_end == "turn" else 0
        if not empty and places is not None and self._replay(executor, (*places, number % 2)):
            self._end_sweep(number, empty)
            return
        steps = (self._schedule.prologue(number) if empty else []) + self._schedule.sweep(number, stages, reach)

        def located(subdivision: int, slab: SparseFormat, stage: int) -> None:
            try:
                visit(subdivision, slab, stage)
            except Exception as error:
                error.add_note(f"while computing with {describe_subdivision(self.store, subdivision)}")
                raise

        with self.device.current():
            if not empty and places is not None and self._record(executor, (*places, number % 2), steps, located):
                self._replay(executor, (*places, number % 2))
            else:
                executor.play(steps, self._residents, located)
        self._end_sweep(number, empty)

    def _replay(self, executor: HostExecutor | CudaExecutor, key: tuple[object, ...]) -> bool:
        """Issue a sweep from its recording, if there is one."""
        recording = self._recordings.get(key)
        if recording is None or not isinstance(executor, CudaExecutor) or not executor.recordable:
            return False
        with self.device.current():
            executor.replay(recording)
        return True

    def _record(
        self, executor: HostExecutor | CudaExecutor, key: tuple[object, ...], steps: list[Step], visit: Visit
    ) -> bool:
        """Record a sweep, of which everything has been started before: no kernel can be loaded while it is recorded."""
        if not isinstance(executor, CudaExecutor) or not executor.recordable or self.plan.at_end == "continue":
            return False
        while len(self._recordings) >= _MOST_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        self._recordings[key] = executor.record(steps, self._residents, visit)
        return True

    def _end_sweep(self, number: int, empty: bool) -> None:
        self._number, self._empty = number + 1, False
        self.sweeps += 1
        self.bytes_streamed += self.plan.streamed_nbytes if empty else self.plan.sweep_nbytes(number)

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        if self._scatters:
            scale(out, beta)
        self.sweep(lambda number, slab: slab.apply_slab(self._rows(number).start, x, out, alpha, beta))

    def apply_each(self, X: Array, out: Array | None = None) -> Array:
        """Return the products with several vectors, or blocks of vectors, made one after the other in a single sweep.

        Parameters
        ----------
        X : array, (repeats, columns) or (repeats, columns, k), C-ordered
            Each ``X[r]`` is contiguous, unlike the columns of a block of vectors, which a kernel reads together.
        out : array, (repeats, rows) or (repeats, rows, k), optional
            Must not overlap ``X``.

        Returns
        -------
        array
            ``out[r] = A @ X[r]``, each bit-equal to a product of its own.

        Notes
        -----
        On a CUDA device, calls with the same ``X`` and ``out`` as the call before replay its kernels as CUDA graphs, one a
        subdivision, which takes the host far less time than starting them one by one.
        """
        if X.ndim not in (2, 3) or X.shape[1] != self.shape[1] or not X.shape[0]:
            raise InputError(
                f"X must have shape (repeats, {self.shape[1]}) or (repeats, {self.shape[1]}, k), not {X.shape}"
            )
        vectors = [as_vectors(x, self.shape[1], self, "X[r]") for x in X]
        out = as_output(out, (X.shape[0], self.shape[0], *X.shape[2:]), self, X, "X")
        if format_named(self.plan.index.format_name).scatters:
            scale(out, 0.0)
        products = list(zip(vectors, out, strict=True))
        graphs = self._graphs_for(vectors, out)

        def visit(number: int, slab: SparseFormat) -> None:
            first_row = self._rows(number).start

            def issue() -> None:
                for x, product in products:
                    slab.apply_slab(first_row, x, product, 1.0, 0.0)

            if graphs is None:
                issue()
            else:
                graphs.run(number, slab, issue)

        self.sweep(visit)
        return out

    @cached_property
    def reach(self) -> int:
        """How many subdivisions to either side the entries of one reach; found in a sweep of its own, which is not counted
        among those that turn: the order in which half a matrix adds must not depend on when this is asked for.
        """
        starts = self.plan.index.row_starts
        columns, direction = [range(0)] * len(starts), self.direction

        def visit(number: int, slab: SparseFormat) -> None:
            columns[number] = slab.column_range()

        self.sweep(visit)
        self.turn_to(direction)
        return reach_of(starts, columns)

    def products_a_sweep(self) -> int:
        """Return how many products of a recurrence one sweep makes: as many as the ring has room for.

        With overlap one slot is left to what arrives meanwhile.
        """
        if self.plan.slots <= (2 if self.plan.overlap else 1):
            return 1
        return replace(self.plan, reach=self.reach).room_for_products

    def following_products(self) -> int | None:
        """Return how many products had best follow each other: what the plan says, or what one sweep makes."""
        if not self.plan.slots:
            return None
        return self.plan.products if self.plan.products > 1 else self.products_a_sweep()

    def keeps_together(self, rows: int) -> bool:
        """Return whether subdivisions begin at multiples of so many rows."""
        return all(start % rows == 0 for start in self.plan.index.row_starts)

    def advance(self, recurrence: Recurrence) -> None:
        """Take all steps of a recurrence, several in a sweep.

        While a subdivision is on its way, the first product runs on the one before it, the second on the one before that:
        a product needs the last one only on the subdivisions that its own couples with. A ring of m slots thus makes m - 1
        products of a banded matrix in one sweep, m without overlap. Rows are bit-equal to those of products one after the
        other; of a format that ``scatters``, such as half a symmetric matrix, they agree to rounding.
        """
        total, count = len(recurrence.steps), self.products_a_sweep()
        if count == 1:
            recurrence.run_whole(self, range(total))
            return
        places = recurrence.places() if self.device.kind == "cuda" and recurrence.repeats else None
        for first in range(0, total, count):
            visit = self._scattering_visit(recurrence, first) if self._scatters else self._visit(recurrence, first)
            kernels = (*recurrence.kernels(), self.direction)
            recorded = places is not None and kernels in self._loaded
            stages = min(count, total - first)
            self._sweep_in_stages(visit, stages, self.reach, (*(places or ()), first) if recorded else None)
            self._loaded.add(kernels)

    @property
    def _scatters(self) -> bool:
        return format_named(self.plan.index.format_name).scatters

    def _visit(self, recurrence: Recurrence, first: int) -> Visit:
        """Return the computation of step ``first + stage`` with a subdivision."""

        def visit(number: int, slab: SparseFormat, stage: int) -> None:
            rows = self._rows(number)
            recurrence.advance(first + stage, rows, lambda x, out: slab.apply_slab(0, x, out, 1.0, 0.0))

        return visit

    def _scattering_visit(self, recurrence: Recurrence, first: int) -> Visit:
        """Return the same for slabs that add to rows of their own and below.

        One image serves all stages: those of its rows that a stage has completed are zero again before the next stage, which
        comes later or a subdivision behind, adds to them. Upwards, rows are complete when their own subdivision was the last
        to add to them; downwards, when the first one that couples with them was.
        """
        recurrence.image[...] = 0  # whatever an interrupted sweep has left there
        last, direction, reach = len(self.plan.index.subdivisions) - 1, self.direction, self.reach

        def visit(number: int, slab: SparseFormat, stage: int) -> None:
            start = self._rows(number).start
            recurrence.scatter(first + stage, lambda x, image: slab.apply_slab(start, x, image, 1.0, 0.0))
            if direction == 1:
                recurrence.complete(first + stage, self._rows(number))
            elif number + reach <= last or number == 0:
                top = 0 if number == 0 else self._rows(number + reach).start
                recurrence.complete(first + stage, slice(top, self._rows(min(number + reach, last)).stop))

        return visit

    def _graphs_for(self, vectors: list[Array], out: Array) -> ProductGraphs | None:
        """Return graphs of these products if they are made a second time, in the same memory."""
        if self.device.kind == "cpu" or len(vectors) < LEAST_RECORDED:
            return None
        places = (*vectors[0].shape, *(int(x.data.ptr) for x in vectors), int(out.data.ptr))
        if places != self._places:
            self._places, self._graphs = places, None
        elif self._graphs is None:
            self._graphs = ProductGraphs()
        return self._graphs

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
        executor, timeline = self._executor, Timeline()
        with self.device.current():
            executor.start_recording(timeline)
            try:
                yield timeline
            finally:
                executor.stop_recording()

    def close(self) -> None:
        """Stop transfers and give the budget back; the store stays open."""
        executor, self._executor = self._executor, None
        self._residents.clear()
        try:
            if executor is not None:
                with self.device.current():
                    executor.close()
        finally:
            self._graphs = None
            self._recordings.clear()
            self.budget.release(self._purpose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Forgotten to close: the reader thread must not outlive the matrix. At the end of the interpreter it is gone already.
        if getattr(self, "_executor", None) is not None and not sys.is_finalizing():
            self.close()
