"""Chooses how many threads kernels use on the CPU while other processes take its cores."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numba

__all__ = ["ThreadChoice", "adaptive_threads", "most_threads"]

# Seconds of work that one judgement rests on, several time slices of the system.
_WINDOW = 0.1
# The share of their time that threads compute, below which fewer are tried: 0.85 to 0.9 on a quiet machine, the rest is waiting
# for each other; 0.35 beside as many busy processes as threads.
_LEAST_SHARE = 0.6
# Twice as many threads have to be so many times as fast to be kept.
_LEAST_GAIN = 1.15
# Seconds until the next trial: the first, and the longest after trials that failed.
_PAUSE, _LONGEST_PAUSE = 2.0, 8.0

_CALLER = threading.local()


class ThreadChoice:
    """The number of threads with which iterations are fastest, found by trying half as many and twice as many.

    The threads of a kernel wait for the slowest of them, so that a process which has taken one core holds them all up: beside
    busy processes fewer threads are faster. Half as many are tried when the threads compute for less than 0.6 of their time,
    twice as many from time to time, and what was faster is kept.

    Parameters
    ----------
    most : int
        Threads on a quiet machine, where the choice begins.

    Attributes
    ----------
    threads : int
        The number to use now.
    fewer_seconds : float
        Seconds observed so far with fewer threads than the most.
    """

    def __init__(self, most: int) -> None:
        self.most = self.threads = most
        self.fewer_seconds = 0.0
        self._begun = False
        self._iterations, self._seconds, self._computed = 0, 0.0, 0.0
        self._before: tuple[int, float] | None = None  # threads and seconds of an iteration before a trial
        self._last_failed = 0  # threads of the last trial, if it failed
        self._pause, self._until_trial = _PAUSE, 0.0

    def observe(self, iterations: int, seconds: float, computed: float) -> int:
        """Return the number of threads to use from now on.

        Parameters
        ----------
        iterations : int
            Done since the last call.
        seconds : float
            That they took, without waiting for transfers.
        computed : float
            Seconds that all threads of this process computed in them.
        """
        if self.threads < self.most:
            self.fewer_seconds += seconds
        if not self._begun:  # kernels were loaded or compiled
            self._begun = True
            return self.threads
        self._iterations += iterations
        self._seconds += seconds
        self._computed += computed
        if self._seconds >= _WINDOW and self._iterations:
            pace, share = self._seconds / self._iterations, self._computed / (self._seconds * self.threads)
            self._until_trial -= self._seconds
            self._iterations, self._seconds, self._computed = 0, 0.0, 0.0
            self._judge(pace) if self._before else self._try(pace, share)
        return self.threads

    def _try(self, pace: float, share: float) -> None:
        """Begin a trial if it is time for one."""
        if self._until_trial > 0:
            return
        half, twice = max(1, self.threads // 2), min(self.most, 2 * self.threads)
        down = share < _LEAST_SHARE and half < self.threads and half != self._last_failed
        wanted = half if down else twice
        self._last_failed = 0
        if wanted != self.threads:
            self._before, self.threads = (self.threads, pace), wanted

    def _judge(self, pace: float) -> None:
        """End a trial: keep the greater number of threads if it was clearly faster, else the smaller."""
        assert self._before is not None
        (before, pace_before), tried = self._before, self.threads
        gain = pace / pace_before if tried < before else pace_before / pace
        self.threads = max(before, tried) if gain >= _LEAST_GAIN else min(before, tried)
        failed = self.threads == before
        self._last_failed = tried if failed else 0
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if failed else _PAUSE
        self._before, self._until_trial = None, self._pause


def most_threads() -> int:
    """Return the number of threads that this Python thread's kernels use on a quiet machine.

    Sums that depend on the number of their parts are cut into this many, so that their bits do not depend on other processes.
    """
    return int(getattr(_CALLER, "most", 0) or numba.get_num_threads())


@contextlib.contextmanager
def adaptive_threads() -> Iterator[ThreadChoice]:
    """Yield a choice of threads, in a block in which the number of threads may change; restore the number after it."""
    outer, before = getattr(_CALLER, "most", 0), numba.get_num_threads()
    _CALLER.most = most_threads()
    try:
        yield ThreadChoice(before)
    finally:
        _CALLER.most = outer
        numba.set_num_threads(before)
