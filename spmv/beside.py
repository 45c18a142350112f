"""Work on a GPU beside that of the current stream: many short kernels in the shade of a few long ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

from penstock.spmv.device import Device

T = TypeVar("T")
# Thread blocks of short kernels come before those of a long one that are waiting; CUDA takes the highest priority that there is.
_PRIORITY = -5


class SideStream:
    """A stream beside the current one, to which kernels go that are launched in a ``with`` block. On a CPU nothing changes.

    Arrays that are made in the block must be kept until the current stream has done what it does with them: their memory is used
    again by what is launched in later blocks.

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
        self._stream = None if device.kind == "cpu" else _stream(device.index)

    def __enter__(self) -> Self:
        if self._stream is not None:
            self._stream.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._stream is not None:
            self._stream.__exit__(*exception)

    def follow(self) -> None:
        """Let it wait for what has been launched on the current stream."""
        if self._stream is not None:
            self._stream.wait_event(_current_stream().record())

    def lead(self) -> None:
        """Let the current stream wait for what has been launched on it."""
        if self._stream is not None:
            _current_stream().wait_event(self._stream.record())


class Beside(Generic[T]):
    """The result of a function that, for a GPU, a thread of its own runs, on the stream beside the current one.

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
        self._side = SideStream(device)
        if device.kind == "cpu":
            self._future.set_result(function())
            return
        self._side.follow()

        def run() -> T:
            with device.current(), self._side:
                return function()

        try:
            self._future = _thread(device.index).submit(run)
        except RuntimeError:  # Python is ending
            self._future.set_result(run())

    def result(self) -> T:
        """Wait for the function and return its result; kernels that are launched from now on wait for its kernels."""
        result = self._future.result()
        self._side.lead()
        return result


def _current_stream() -> Any:
    from cupy import cuda

    return cuda.get_current_stream()


@functools.cache
def _stream(number: int) -> Any:
    """Return the one stream for a GPU, the current one."""
    from cupy import cuda

    return cuda.Stream(non_blocking=True, priority=_PRIORITY)


@functools.cache
def _thread(number: int) -> ThreadPoolExecutor:
    """Return the one thread for a GPU."""
    return ThreadPoolExecutor(1, f"penstock-beside-{number}")
