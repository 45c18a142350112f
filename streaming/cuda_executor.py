"""Plays schedules between host memory and a GPU: a copy stream fills slots while kernels work on the last ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.spmv import Array, Device, InputError, SparseFormat
from penstock.streaming.layout import Visit
from penstock.streaming.schedule import Compute, Copy, Release, Step
from penstock.streaming.store import PageLockable, Store
from penstock.streaming.timeline import Span, Timeline

__all__ = ["CudaExecutor"]


class CudaExecutor:
    """Transfers page-locked pieces of host memory to slots on a GPU, ordered against kernels by events alone.

    Parameters
    ----------
    store : Store
        Must be a :class:`HostStore` or another store whose pieces lie in host memory.
    device : Device
    slots : list of CuPy uint8 arrays
    overlap : bool
        True copies on a stream of its own. False copies on the stream that computes, so nothing runs at once.

    Notes
    -----
    The host only issues work: it waits for nothing inside a sweep. Computations run on the caller's current stream.
    """

    def __init__(self, store: Store, device: Device, slots: list[Array], *, overlap: bool) -> None:
        if not isinstance(store, PageLockable):
            raise InputError(
                f"a GPU streams from host memory, not from a {type(store).__name__}; use HostStore.from_store(store)"
            )
        import cupy

        self._cupy = cupy
        self._device = device
        self.store = store
        self.slots = slots
        self.timeline: Timeline | None = None
        self._index = store.index
        self._views: dict[tuple[int, int], SparseFormat] = {}
        with cupy.cuda.Device(device.index):
            store.page_lock()
            self._copy_stream = cupy.cuda.Stream(non_blocking=True) if overlap else None
            self._arrived = [cupy.cuda.Event(disable_timing=True) for _ in slots]
            self._released = [cupy.cuda.Event(disable_timing=True) for _ in slots]
        self._pending: list[tuple[Any, int, int | None, Any, Any]] = []

    def load_resident(self, number: int, buffer: Array) -> SparseFormat:
        """Fill a resident buffer and return the subdivision in it."""
        piece = self.store.piece(number)
        buffer[: piece.nbytes].set(piece)
        view: SparseFormat = self._index.view(number, buffer)
        return view

    def play(self, steps: Iterable[Step], residents: dict[int, SparseFormat], visit: Visit) -> None:
        """Issue steps in order; ``visit(number, slab)`` issues the computation on a slab."""
        compute_stream = self._cupy.cuda.get_current_stream()
        copy_stream = self._copy_stream or compute_stream
        try:
            for step in steps:
                if isinstance(step, Copy):
                    copy_stream.wait_event(self._released[step.slot])
                    with self._recorded("transfer", step.subdivision, step.slot, copy_stream):
                        piece = self.store.piece(step.subdivision)
                        self.slots[step.slot].data.copy_from_host_async(piece.ctypes.data, piece.nbytes, copy_stream)
                    self._arrived[step.slot].record(copy_stream)
                elif isinstance(step, Compute):
                    if step.slot is not None:
                        compute_stream.wait_event(self._arrived[step.slot])
                    with self._recorded("compute", step.subdivision, step.slot, compute_stream):
                        visit(step.subdivision, self._slab(step, residents))
                elif isinstance(step, Release):
                    self._released[step.slot].record(compute_stream)
        except BaseException:
            self.drain()
            raise

    def drain(self) -> None:
        """Wait for all work issued, on whatever streams, and turn recorded events into spans."""
        self._device.synchronize()
        if self.timeline is not None and self._pending:
            origin = self._pending[0][3]
            for kind, subdivision, slot, start, stop in self._pending:
                times = (self._cupy.cuda.get_elapsed_time(origin, event) / 1e3 for event in (start, stop))
                self.timeline.spans.append(Span(kind, subdivision, slot, *times))
        self._pending.clear()

    def close(self) -> None:
        """Wait for all work issued and drop the slots; the store stays open."""
        try:
            self.drain()
        finally:
            self._views.clear()
            self.slots.clear()

    def _slab(self, step: Compute, residents: dict[int, SparseFormat]) -> SparseFormat:
        if step.slot is None:
            return residents[step.subdivision]
        key = (step.subdivision, step.slot)
        if key not in self._views:
            self._views[key] = self._index.view(step.subdivision, self.slots[step.slot])
        return self._views[key]

    def _recorded(self, kind: str, subdivision: int, slot: int | None, stream: Any) -> _Recording:
        return _Recording(self, (kind, subdivision, slot), stream)


class _Recording:
    """Puts timing events around what is issued inside a ``with`` block, if a timeline is wanted."""

    def __init__(self, executor: CudaExecutor, what: tuple[str, int, int | None], stream: Any) -> None:
        self._executor, self._what, self._stream = executor, what, stream
        self._start: Any = None

    def __enter__(self) -> None:
        if self._executor.timeline is not None:
            self._start = self._stream.record()

    def __exit__(self, *exception: object) -> None:
        if self._start is not None:
            self._executor._pending.append((*self._what, self._start, self._stream.record()))
