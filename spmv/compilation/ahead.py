"""Compiles CPU kernels ahead of a run, in several processes: within one process Numba compiles one kernel at a time."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.host.threads import usable_cores

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class CompileTask:
    """A call of ``"package.module:name"`` with plain keyword arguments that makes Numba compile and cache the named kernels."""

    function: str
    kernels: tuple[str, ...]
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def needed(self) -> bool:
        """Whether any of its kernels has not been compiled on this machine."""
        return not all(is_cached(_named(kernel)) for kernel in self.kernels)


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def is_cached(kernel: Any) -> bool:
    """Return whether Numba's cache on disk holds a compiled version of a kernel, or of both of a pair.

    Numba has no public way to ask; where its cache does not answer as expected, kernels count as cached, and are compiled when
    they are first called.
    """
    if isinstance(kernel, tuple):
        return any(map(is_cached, kernel))
    try:
        return bool(getattr(kernel, "compiled", kernel)._cache._cache_file._load_index())
    except (AttributeError, OSError):
        return True


class Compilation:
    """Processes that compile kernels, one per core, in a ``with`` statement; each takes the next task when it has ended one.

    A task that fails is ignored: its kernels are compiled when they are first called, and an error is reported then.
    """

    def __init__(self, tasks: Sequence[CompileTask]) -> None:
        self._tasks = [task for task in tasks if task.needed]
        numbers, writer = os.pipe()  # of the tasks, a byte each, which all processes read
        os.write(writer, bytes(range(len(self._tasks))))
        os.close(writer)
        self._running = [_start(self._tasks, numbers) for _ in range(min(usable_cores(), len(self._tasks)))]
        os.close(numbers)

    def __enter__(self) -> Compilation:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._running:  # interrupted: what has been compiled stays in the cache
            process.terminate()

    @property
    def finished(self) -> bool:
        """Whether every process has ended."""
        self._running = [process for process in self._running if process.poll() is None]
        return not self._running

    def wait(self, advance: Callable[[float, str], object]) -> None:
        """Wait until all processes have ended; calls ``advance(share, text)`` as tasks end."""
        while self._tasks:
            finished = self.finished
            share = 1.0 if finished else sum(not task.needed for task in self._tasks) / len(self._tasks)
            advance(share, "compiling kernels, once on a machine")
            if finished:
                return
            time.sleep(_POLL_SECONDS)


def _start(tasks: Sequence[CompileTask], numbers: int) -> subprocess.Popen[bytes]:
    code = "import sys; from penstock.spmv.compilation.ahead import run_tasks; run_tasks(sys.argv[1])"
    listed = json.dumps([(task.function, task.arguments) for task in tasks])
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # threads that wait must not slow the other processes
    return subprocess.Popen(
        [sys.executable, "-c", code, listed],
        stdin=numbers,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )


def run_tasks(listed: str) -> None:
    """Run tasks in this process, one after the other, whose numbers come from the standard input."""
    tasks = json.loads(listed)
    while number := os.read(0, 1):
        function, arguments = tasks[number[0]]
        with contextlib.suppress(Exception):
            _named(function)(**arguments)
