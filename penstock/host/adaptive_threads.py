"""Chooses how many threads kernels use on the CPU while other processes take its cores."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import numba
import psutil

from penstock.host.threads import bound_cores

# Seconds of work in one measurement: several time slices of the system, ten of the ticks by which it counts time.
_WINDOW = 0.1
# Seconds at the beginning of a solve that are not representative: kernels are loaded or compiled, and reading the load of all
# cores takes 0.2 ms.
_BEGINNING = 0.02
# How many times as long an iteration may take with fewer threads for these to stay in use: about as much as iterations differ
# beside busy processes.
_LARGEST_LOSS = 1.15
# Seconds until the next trial after one that failed: the first time, and the longest.
_PAUSE, _LONGEST_PAUSE = 2.0, 8.0

# ``most``: the threads on a quiet machine of the outermost solve that this Python thread is in.
_CALLER = threading.local()


class ThreadChoice:
    """The number of threads to compute with: one per core that other processes leave, if that is faster.

    The threads of a kernel wait for the slowest of them, so that a process which has taken one core holds all of them up:
    beside busy processes fewer threads are faster. A smaller number, at least half as many, is tried, and given up if
    iterations take clearly longer; a greater one is used as soon as there are cores for it.

    ``others = watch()`` starts to observe ``cores`` cores; ``others()`` returns how many of them other processes have used, on
    average, since then or since its last call. ``fewer_seconds`` are those observed with fewer threads than ``most``.
    """

    def __init__(self, most: int, cores: int, watch: Callable[[], Callable[[], float]]) -> None:
        self.most = self.threads = most
        self.fewer_seconds = 0.0
        self._cores, self._watch = cores, watch
        self._others: Callable[[], float] | None = None
        self._iterations, self._seconds = 0, 0.0
        # Threads, and seconds of an iteration, before the trial that is under way.
        self._trial_after: tuple[int, float] | None = None
        self._pause, self._until_trial = _PAUSE, 0.0

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Compute with the chosen number of threads in the block."""
        before = numba.get_num_threads()
        numba.set_num_threads(self.threads)
        try:
            yield
        finally:
            numba.set_num_threads(before)

    def observe(self, iterations: int, seconds: float) -> None:
        """Choose the number of threads from the iterations since the last call and their seconds, without waits for transfers."""
        if self.threads < self.most:
            self.fewer_seconds += seconds
        self._iterations += iterations
        self._seconds += seconds
        if self._others is None:
            if self._seconds >= _BEGINNING:
                self._others, self._iterations, self._seconds = self._watch(), 0, 0.0
        elif self._seconds >= _WINDOW and self._iterations:
            self._choose(self._seconds / self._iterations, self._others())
            self._until_trial -= self._seconds
            self._iterations, self._seconds = 0, 0.0

    def _choose(self, pace: float, others: float) -> None:
        """Choose the threads of the next window, given the seconds of an iteration and the cores that others used in this one."""
        if self._trial_after is not None:
            (before, pace_before), self._trial_after = self._trial_after, None
            if pace > _LARGEST_LOSS * pace_before:
                self.threads, self._until_trial = before, self._pause
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
                return
            self._pause = _PAUSE
        # With more processes and threads than cores, each gets about the same share of a core: the demand of the others exceeds
        # what they get by the same factor as that of our threads.
        share = min(1.0, max(self._cores - others, 1e-3) / self.threads)
        left = min(self.most, round(self._cores - others / share))
        if left > self.threads:
            self.threads = left
        elif left < self.threads > 1 and self._until_trial <= 0:
            self._trial_after, self.threads = (self.threads, pace), max(left, self.threads // 2)


def most_threads() -> int:
    """Return the number of threads that this Python thread's kernels use on a quiet machine.

    Sums that depend on the number of their parts are cut into this many, so that their bits do not depend on other processes.
    """
    return int(getattr(_CALLER, "most", 0) or numba.get_num_threads())


@contextlib.contextmanager
def adaptive_threads() -> Iterator[ThreadChoice]:
    """Yield a choice of threads for a solve, which begins with the present number of them."""
    outer = getattr(_CALLER, "most", 0)
    _CALLER.most = most_threads()
    try:
        yield ThreadChoice(numba.get_num_threads(), len(bound_cores()), cores_of_others)
    finally:
        _CALLER.most = outer


def cores_of_others() -> Callable[[], float]:
    """Return a function for the average number of this process's cores that others have used since now or its last call.

    The function returns 0 where the system does not report how busy its cores are.
    """
    last = _busy_and_all()

    def used() -> float:
        nonlocal last
        now = _busy_and_all()
        own, busy, whole, seconds = (new - old for new, old in zip(now, last, strict=True))
        last = now
        if not (whole > 0 and seconds > 0):
            return 0.0
        return max(0.0, len(bound_cores()) * busy / whole - own / seconds)

    return used


def _busy_and_all() -> tuple[float, float, float, float]:
    """Return the seconds that this process computed, that its cores were busy, that they were counted, and of the clock."""
    try:
        counted = psutil.cpu_times(percpu=True)
    except Exception:  # a sandbox without /proc/stat, or with a strange one, which is no reason to end a solve
        counted = []
    # Core numbers are indices of the list only if all cores are counted; otherwise ours are taken to be as busy as the average.
    cores = [counted[core] for core in bound_cores()] if len(counted) == os.cpu_count() else counted
    # Time as the host of a virtual machine is part of that of the user.
    busy = sum(
        getattr(core, kind, 0.0) for core in cores for kind in ("user", "nice", "system", "irq", "softirq", "steal")
    )
    idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)
    return time.process_time(), busy, busy + idle, time.perf_counter()
