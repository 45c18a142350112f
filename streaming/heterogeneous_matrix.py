"""An operator that a GPU and the CPU multiply by together: the GPU streams its rows, the CPU reads the others in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.spmv import Array, Device, InputError, SparseMatrix, as_vectors
from penstock.spmv.formats.limits import check_block_size
from penstock.spmv.formats.scaling import scale
from penstock.streaming.execution.budget import MemoryBudget
from penstock.streaming.execution.executor import SweepKey, Visit
from penstock.streaming.execution.sweeper import Sweeper
from penstock.streaming.planning.division import Division, divide, division_at
from penstock.streaming.planning.estimate import TYPICAL, LinkRates
from penstock.streaming.planning.timeline import Timeline
from penstock.streaming.planning.workload import Ring, Workload
from penstock.streaming.stores.base import Store
from penstock.streaming.stores.host_store import HostStore
from penstock.streaming.swept_matrix import SweptMatrix

_FIRST_NBYTES = 256 << 20  # by which the rate of the CPU alone is measured
_ROUNDS, _PRODUCTS = 4, 3  # rounds of measuring and dividing, and timed products in each
_WARM = 4  # untimed products: one in each direction is started kernel by kernel, and the next two are captured
_CLOSE = 0.02  # share of a product that another division must save


class HeterogeneousMatrix(SweptMatrix):
    """Multiply by a matrix in host memory that a GPU and the CPU share by rows.

    The GPU streams the first subdivisions through its budget. Meanwhile the CPU multiplies the others where they lie, so they
    never cross the link. Vectors stay on the GPU: the entries of x that the CPU needs are sent to it, and its rows of the product
    come back.

    This pays where every product is a sweep of its own, as with Jacobi preconditioners. Where many products follow every
    transfer (:class:`StreamedMatrix` with Chebyshev polynomials), the GPU alone is faster.

    Parameters
    ----------
    store : HostStore
        Of a square matrix. Stays open; the GPU's part is page-locked.
    budget : MemoryBudget or int or str
        GPU memory for slots and the resident part.
    device : Device or str
        The GPU, which has the vectors. (With ``"cpu"``, for tests, one part after the other is computed on the CPU.)
    workload : Workload, optional
    ring : Ring, optional
    rates : LinkRates, optional
        Rates of the GPU other than that of the link; typical ones by default.
    gpu_subdivisions : int, optional
        How many of the first subdivisions the GPU takes. By default both parts of a product are timed, and the division is
        moved until both end at the same time, in at most 28 products.

    Attributes
    ----------
    division : Division
        What each takes, with the predicted seconds of a product.

    Raises
    ------
    InputError
        If the store is not in host memory.
    BudgetError
        As for :class:`StreamedMatrix`.

    Notes
    -----
    The rows of each device have the bits of its own kernels, so results depend on the division by rounding. Give
    ``gpu_subdivisions`` where they must not.

    The link carries ``plan.streamed_nbytes`` bytes a product, and 8 bytes of each vector for every row of the CPU. GHOST
    (Kreutzer and others 2017, sec. 5) divides the rows of a resident matrix between both kinds of processors in the same way,
    by the bandwidth of each.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import HeterogeneousMatrix, HostStore
    >>> store = HostStore.create(Cantilever(nodes=4, dof=3).subdivisions(4))
    >>> with HeterogeneousMatrix(store, "64 KiB", device="cpu", gpu_subdivisions=3) as A:
    ...     A.shape, A.division.count
    ((192, 192), 3)
    """

    division: Division

    def __init__(
        self,
        store: Store,
        budget: MemoryBudget | int | str,
        *,
        device: Device | str = "cuda",
        workload: Workload | None = None,
        ring: Ring | None = None,
        rates: LinkRates | None = None,
        gpu_subdivisions: int | None = None,
    ) -> None:
        if not isinstance(store, HostStore):
            raise InputError(
                f"the CPU multiplies what lies in host memory; a {type(store).__name__} does not: HostStore.from_store reads it"
            )
        self.store: HostStore = store
        self.device = Device.parse(device)
        self.shape, self.dtype = store.index.shape, np.dtype(store.index.dtype)
        if self.shape[0] != self.shape[1]:
            raise InputError(f"only square matrices are shared, not one of shape {self.shape}")
        self.budget = budget if isinstance(budget, MemoryBudget) else MemoryBudget(budget)
        self._workload, self._ring, self._rates = workload or Workload(), ring or Ring(), rates or TYPICAL
        self._mirrors: dict[tuple[int, ...], _Mirror] = {}
        self._timeline: Timeline | None = None
        self._all_slabs = [store.slab(number) for number in range(len(store.index.subdivisions))]
        self._limit = self.budget.limit_nbytes - self.budget.used_nbytes
        if gpu_subdivisions is not None:
            self._open(self._division(self._cpu_alone(), self._rates, gpu_subdivisions))
        else:
            self._balance()

    def _division(self, cpu_rate: float, rates: LinkRates, count: int | None = None) -> Division:
        index, options = self.store.index, {"cpu_rate": cpu_rate, "rates": rates}
        if count is None:
            return divide(index, self._limit, self._workload, self._ring, **options)  # type: ignore[arg-type]
        return division_at(index, count, self._limit, self._workload, self._ring, **options)  # type: ignore[arg-type]

    def _open(self, division: Division) -> None:
        """Use a division for the next products."""
        self.close()
        self.division, self.plan = division, division.plan
        part = self.store.first(division.count)
        self._sweeper = Sweeper(part, division.plan, self.budget, self.device, host_computes=True)
        self._slabs = self._all_slabs[division.count :]  # of the CPU
        self._first_row = division.plan.index.shape[0]  # likewise

    def _balance(self) -> None:
        """Time both parts beside each other, and move the division until neither waits long for the other."""
        rates, cpu_rate = self._rates, self._cpu_alone()
        division = self._division(cpu_rate, rates)
        with self.device.current():
            x = self.device.asarray(np.random.default_rng(0).normal(size=self._shape_of_vectors()), dtype=self.dtype)
            out = self.device.xp.empty_like(x)
            for _ in range(_ROUNDS):
                self._open(division)
                for _ in range(_WARM):
                    self._product(x, out, 1.0, 0.0)
                gpu, cpu = np.median([self._timed(x, out) for _ in range(_PRODUCTS)], axis=0)
                rates = replace(rates, link=rates.link * division.gpu_seconds / gpu)
                if self._slabs:
                    cpu_rate = division.cpu_nbytes / cpu
                self.division = self._division(cpu_rate, rates, division.count)
                best = self._division(cpu_rate, rates)
                if self.division.seconds <= (1 + _CLOSE) * best.seconds:
                    return
                division = best

    def _shape_of_vectors(self) -> tuple[int, ...]:
        columns = self._workload.columns
        return (self.shape[1], columns) if columns > 1 else (self.shape[1],)

    def _cpu_alone(self) -> float:
        """Return the bytes per second at which the CPU multiplies the last subdivisions."""
        subdivisions = self.store.index.subdivisions
        count = max(1, min(len(subdivisions), _FIRST_NBYTES // max(one.nbytes for one in subdivisions)))
        x = np.ones(self._shape_of_vectors(), dtype=self.dtype)
        out = np.zeros_like(x)
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            for subdivision, slab in zip(subdivisions[-count:], self._all_slabs[-count:], strict=True):
                slab.apply_slab(subdivision.row_start, x, out, 1.0, 0.0)
            seconds.append(time.perf_counter() - began)
        return sum(one.nbytes for one in subdivisions[-count:]) / min(seconds)

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        self._product(x, out, alpha, beta)

    def _timed(self, x: Array, out: Array) -> tuple[float, float]:
        """Return the seconds of the GPU's sweep, and of the CPU's subdivisions."""
        clock = _Clock(self.device)
        self.device.synchronize()
        self._product(x, out, 1.0, 0.0, clock)
        return clock.gpu_seconds(), clock.cpu_seconds

    def _product(self, x: Array, out: Array, alpha: float, beta: float, clock: _Clock | None = None) -> None:
        scale(out if self._is_half else out[self._first_row :], beta)

        def on_gpu(number: int, slab: SparseMatrix, stage: int) -> None:
            slab.apply_slab(self._rows(number).start, x, out, alpha, beta)

        def on_cpu(first_row: int, slab: SparseMatrix, x: Array, out: Array) -> None:
            slab.apply_slab(first_row, x, out, alpha, 0.0)

        key = None
        if self.device.kind == "cuda":  # replayed, a sweep costs the host next to nothing, and the cores begin at once
            kernels = ("product", x.shape[1:])
            key = SweepKey(kernels, (*kernels, int(x.data.ptr), int(out.data.ptr), alpha, beta))
        self._both(x, out, on_gpu, on_cpu, key, clock)

    def _both(
        self,
        x: Array,
        out: Array,
        on_gpu: Visit,
        on_cpu: Callable[[int, SparseMatrix, Array, Array], None],
        key: SweepKey | None = None,
        clock: _Clock | None = None,
    ) -> None:
        """Let the GPU visit its subdivisions while the CPU visits its own, and add the CPU's rows to ``out``."""
        mirror = self._mirror(x)
        # The upper half of a symmetric matrix has no columns left of its rows, and adds to no rows above them.
        arrived = mirror.send(x, first=self._first_row if self._is_half else 0)
        if clock is not None:
            clock.start_gpu()
        self._sweeper.sweep(on_gpu, key=key)
        if clock is not None:
            clock.stop_gpu()
        arrived()
        began = time.perf_counter()
        if self._is_half:
            scale(mirror.out[self._first_row :], 0.0)
        for number, slab in enumerate(self._slabs, start=self.division.count):
            rows, started = self._rows(number), time.perf_counter()
            on_cpu(rows.start, slab, mirror.x, mirror.out)
            mirror.give_back(rows)  # complete: later subdivisions add to later rows
            if self._timeline is not None:
                self._timeline.add("host", number, None, started, time.perf_counter())
        if clock is not None:
            clock.cpu_seconds = time.perf_counter() - began
        mirror.add(out, self._first_row)

    def _mirror(self, x: Array) -> _Mirror:
        if x.shape not in self._mirrors:
            self._mirrors = {x.shape: _Mirror(x, self.device)}  # only the last shape: a solve has vectors of one shape
        return self._mirrors[x.shape]

    def apply_absolute(self, x: Array) -> Array:
        """Return ``|A| @ x`` in one sweep; needs one further slab of memory."""
        x = as_vectors(x, self.shape[1], self, "x")
        if x.ndim != 1:
            raise InputError(f"x must have shape ({self.shape[1]},), not {x.shape}: only one vector at a time")
        with self.device.current():
            out = self.device.xp.zeros(self.shape[0], dtype=self.dtype)
            self._mirror(x).out[:] = 0  # formats that do not store half add to it as well

            def on_gpu(number: int, slab: SparseMatrix, stage: int) -> None:
                slab.add_absolute(self._rows(number).start, x, out)

            self._both(x, out, on_gpu, lambda first_row, slab, x, out: slab.add_absolute(first_row, x, out))
        return out

    def diagonal_blocks(self, size: int) -> Array:
        """Return the dense blocks on the diagonal, ``(rows / size, size, size)``, in one sweep."""
        count = check_block_size(size, self.shape[0])
        with self.device.current():
            blocks = self.device.xp.zeros((count, size, size), dtype=self.dtype)
            self._sweeper.sweep(lambda number, slab, stage: slab.add_diagonal_blocks(self._rows(number).start, blocks))
            of_cpu = np.zeros(blocks.shape, dtype=self.dtype)
            for number, slab in enumerate(self._slabs, start=self.division.count):
                slab.add_diagonal_blocks(self._rows(number).start, of_cpu)
            blocks += self.device.asarray(of_cpu)
        return blocks

    @contextmanager
    def recording(self) -> Iterator[Timeline]:
        """Record the times of both devices, as :meth:`SweptMatrix.recording` does."""
        with super().recording() as timeline:
            self._timeline = timeline
            try:
                yield timeline
            finally:
                self._timeline = None

    def close(self) -> None:
        """Stop transfers and release the budget; the store stays open."""
        if hasattr(self, "_sweeper"):
            self._sweeper.close()

    def _facts(self) -> list[str]:
        share = f"{self.division.count} of {len(self.store.index.subdivisions)} subdivisions on {self.device}"
        return [*super()._facts(), share]


class _Clock:
    """Times both parts of a product."""

    def __init__(self, device: Device) -> None:
        self.device, self.cpu_seconds = device, 0.0
        self._marks: list[Any] = []

    def start_gpu(self) -> None:
        """Mark the start of the GPU's sweep, in stream order."""
        if self.device.kind == "cuda":
            self._marks.append(self.device.xp.cuda.get_current_stream().record())
        else:
            self._marks.append(time.perf_counter())

    stop_gpu = start_gpu

    def gpu_seconds(self) -> float:
        """Wait for the sweep and return its seconds."""
        start, stop = self._marks
        if self.device.kind == "cpu":
            return float(stop - start)
        stop.synchronize()
        return float(self.device.xp.cuda.get_elapsed_time(start, stop)) / 1e3


class _Mirror:
    """Page-locked host copies of x and of the CPU's rows of the product, which cross the link while others are computed.

    On the CPU, x is the vector itself.
    """

    def __init__(self, x: Array, device: Device) -> None:
        self.device = device
        self.x: np.ndarray[Any, Any] = x if device.kind == "cpu" else device.pinned_like(x)
        self.out: np.ndarray[Any, Any] = np.empty_like(x) if device.kind == "cpu" else device.pinned_like(x)
        self._returned: Array = self.out if device.kind == "cpu" else device.xp.empty_like(x)
        self._stream = None if device.kind == "cpu" else device.xp.cuda.Stream(non_blocking=True)

    def send(self, x: Array, *, first: int) -> Callable[[], object]:
        """Start to send the entries of x from ``first`` on, and return a function that waits for them."""
        if self._stream is None:
            self.x = x
            return lambda: None
        # In a separate stream, after all work of the current one with x and with the rows sent back.
        self._stream.wait_event(self.device.xp.cuda.get_current_stream().record())
        if first < len(x):
            x[first:].get(stream=self._stream, out=self.x[first:], blocking=False)
        return self._stream.record().synchronize  # type: ignore[no-any-return]

    def give_back(self, rows: slice) -> None:
        """Begin to send rows of the product to the GPU."""
        if self._stream is not None:
            self._returned[rows].set(self.out[rows], stream=self._stream)

    def add(self, out: Array, first: int) -> None:
        """Add the rows sent back, from ``first`` on, to the GPU's product, in stream order."""
        if self._stream is not None:
            self.device.xp.cuda.get_current_stream().wait_event(self._stream.record())
        if first < len(out):
            out[first:] += self._returned[first:]
