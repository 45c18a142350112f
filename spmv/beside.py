"""Work on a GPU beside that of the current stream: many short kernels in the shade of a few long ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

import numba

from penstock.spmv.device import Device

T = TypeVar("T")
# Thread blocks of short kernels come before those of a long one that are waiting; CUDA takes the highest priority that there is.
_PRIORITY = -5


class SideStream:
    """Kernels launched in a ``with`` block run on a second stream of the calling thread. On a CPU nothing changes.

    Call :meth:`follow` before, so that they see what the current stream has made, and :meth:`lead` after, before the current
    stream reads their results. Memory allocated in a block returns to the pool of this stream: keep an array until everything
    that reads it has been ordered before a later ``follow``.

    Examples
    --------
    >>> from penstock.spmv import CPU
    >>> from penstock.spmv.beside import SideStream
    >>> side = SideStream(CPU)
    >>> side.follow()
    >>> with side:
    ...     total = sum(range(4))
    >>> side.lead()
    >>> total
    6
    """

    def __init__(self, device: Device) -> None:
        self._stream = None if device.kind == "cpu" else _own.stream(device.index)

    def __enter__(self) -> Self:
        if self._stream is not None:
            self._stream.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._stream is not None:
            self._stream.__exit__(*exception)

    def follow(self) -> None:
        """Let the side stream wait for the kernels launched on the current stream."""
        if self._stream is not None:
            self._stream.wait_event(_current_stream().record())

    def lead(self) -> None:
        """Let the current stream wait for the kernels launched on the side stream."""
        if self._stream is not None:
            _current_stream().wait_event(self._stream.record())


class Beside(Generic[T]):
    """The result of a function that, for a GPU, another thread runs, on the side stream of the calling one.

    Its kernels begin when those have ended that were launched before, and run beside those that are launched later. On a CPU,
    where kernels use all cores, the function is called at once.

    Examples
    --------
    >>> from penstock.spmv import CPU
    >>> from penstock.spmv.beside import Beside
    >>> total = Beside(CPU, lambda: sum(range(4)))
    >>> total.result()
    6
    """

    def __init__(self, device: Device, function: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self._side: SideStream | None = None
        if device.kind == "cpu":
            self._future.set_result(function())
            return
        from cupy import cuda

        side = self._side = SideStream(device)
        side.follow()
        threads, allocator = numba.get_num_threads(), cuda.get_allocator()  # which belong to a thread

        def run() -> T:
            numba.set_num_threads(threads)
            with device.current(), cuda.using_allocator(allocator), side:
                return function()

        try:
            self._future = _own.worker().submit(run)
        except RuntimeError:  # Python is ending
            self._future.set_result(run())

    def result(self) -> T:
        """Wait for the function and return its result, which kernels that are launched from now on may read."""
        try:
            return self._future.result()
        finally:
            if self._side is not None:
                self._side.lead()

    def wait(self) -> None:
        """Wait until the function has ended, with a result or an error, of which the caller has no use any more."""
        self._future.exception()
        if self._side is not None:
            self._side.lead()


class _Own(threading.local):
    """What a thread has of its own: a stream for each GPU, and a thread that works for it."""

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}
        self._worker: ThreadPoolExecutor | None = None

    def stream(self, number: int) -> Any:
        """Return the side stream of a GPU, which must be the current device."""
        if number not in self._streams:
            from cupy import cuda

            self._streams[number] = cuda.Stream(non_blocking=True, priority=_PRIORITY)
        return self._streams[number]

    def worker(self) -> ThreadPoolExecutor:
        """Return the thread that works for this one."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "penstock-beside")
        return self._worker


_own = _Own()


def _current_stream() -> Any:
    from cupy import cuda

    return cuda.get_current_stream()
