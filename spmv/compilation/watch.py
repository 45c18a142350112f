"""Measures the time of compiling kernels, which dominates the first solve on a machine, and announces it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core import event

Listener = Callable[[], object]


class _Watch(event.Listener):
    """Adds up the time in which at least one kernel is compiled; nested compilations are counted once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth, self._began, self._seconds = 0, 0.0, 0.0
        self.listeners: list[Listener] = []

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._seconds + (time.perf_counter() - self._began if self._depth else 0.0)

    def on_start(self, event: object = None) -> None:
        with self._lock:
            if not self._depth:
                self._began = time.perf_counter()
            self._depth += 1
            first, listeners = self._depth == 1, tuple(self.listeners)
        try:
            for listener in listeners if first else ():
                listener()
        except BaseException:  # such as an interrupt: on_end would not be called
            self.on_end()
            raise

    def on_end(self, event: object = None) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._seconds += time.perf_counter() - self._began


_watch = _Watch()
event.register("numba:compile", _watch)  # type: ignore[no-untyped-call]  # only of kernels that Numba does not find in its cache


def compile_seconds() -> float:
    """Return the seconds that this process has spent on compiling kernels, for CPUs and GPUs."""
    return _watch.seconds


def seconds_without_compiling() -> float:
    """Return the time of a clock that stops while kernels are compiled; only differences are meaningful."""
    return time.perf_counter() - _watch.seconds


@contextmanager
def compiling() -> Iterator[None]:
    """Count the time of the block as compilation: on GPUs, since Numba reports its own."""
    _watch.on_start()
    try:
        yield
    finally:
        _watch.on_end()


@contextmanager
def watched_compilation(listener: Listener) -> Iterator[None]:
    """Call a function without arguments, in the thread that compiles, before each kernel that is compiled meanwhile."""
    _watch.listeners.append(listener)
    try:
        yield
    finally:
        _watch.listeners.remove(listener)
