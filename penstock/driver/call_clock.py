"""Tells the wall time of calls and runs apart, in the words of results."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from penstock.driver.progress import Reporter, Stage
from penstock.spmv.compilation.watch import compile_seconds, seconds_without_compiling

#: What is left of a call when all its parts are counted.
REST = "rest"
# What results call the parts of a call.
_PARTS = {"read": "reading", "look": "looking", "survey": "looking", "plan": "planning", "try": "planning"}
_PARTS |= {"convert": "converting", "write": "converting", "move": "moving", "copy": "moving", "open": "moving"}
_PARTS |= {"prepare": "setting up", "solve": "iterating", "update": "updating", "compile": "compiling"}
_PARTS |= {"assemble": "assembling", "divide": "planning", "draw": "drawing", "samples": REST}


class CallClock(Reporter):
    """Hands everything on to a reporter, and adds up what the parts of calls take.

    Examples
    --------
    >>> clock = CallClock(Reporter())
    >>> with clock.running(), clock.stage("convert"), clock.part("plan"):
    ...     pass
    >>> sorted(clock.take())
    ['compiling', 'converting', 'planning', 'rest']
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter, self._within = reporter, [0.0]
        self._busy = self._compiling = 0.0
        self._parts: dict[str, float] = {}
        # When the call that is running began, and the seconds of compilation before it.
        self._since: tuple[float, float] | None = None

    @classmethod
    def of(cls, reporter: Reporter) -> Self:
        """Return a reporter that is a clock already, or a clock that hands on to it."""
        return reporter if isinstance(reporter, cls) else cls(reporter)

    @classmethod
    def of_command(cls, reporter: Reporter, starting: float) -> Self:
        """Return a clock that runs from now on, for a process whose start has taken some seconds."""
        clock = cls(reporter)
        clock._parts["starting"] = clock._busy = starting
        clock._since = time.perf_counter(), compile_seconds()
        return clock

    @contextmanager
    def running(self, reporter: Reporter | None = None) -> Iterator[None]:
        """Count the time of a call, of which another reporter may hear; within another call it is that one's time."""
        if self._since is not None:
            yield
            return
        before, self._reporter = self._reporter, reporter or self._reporter
        self._since = time.perf_counter(), compile_seconds()
        try:
            yield
        finally:
            self._reporter = before
            self._count()
            self._since = None

    def _count(self) -> None:
        """Count the time of the call that is running until now."""
        if self._since is not None:
            (began, compiled), now = self._since, (time.perf_counter(), compile_seconds())
            self._busy += now[0] - began
            self._compiling += now[1] - compiled
            self._since = now

    @property
    def seconds(self) -> float:
        """Seconds of the calls since the last time, without those of compiling."""
        return self._busy - self._compiling

    def take(self) -> dict[str, float]:
        """Return the seconds of each part of the calls since the last time, which they add up to.

        Parts within parts are counted once, and what is compiled meanwhile on its own.
        """
        self._count()
        self._parts.pop(REST, None)
        parts = {name: max(seconds, 0.0) for name, seconds in self._parts.items()}
        parts["compiling"] = parts.get("compiling", 0.0) + self._compiling
        parts[REST] = max(self._busy - sum(parts.values()), 0.0)
        self._parts, self._busy, self._compiling = {}, 0.0, 0.0
        return parts

    def text(self, title: str, body: str) -> None:
        """Show a text under a title."""
        self._reporter.text(title, body)

    @contextmanager
    def stage(self, title: str) -> Iterator[Stage]:
        """Open a stage of the call, and count its time."""
        with self.part(title), self._reporter.stage(title) as stage:
            yield stage

    @contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Count the time of a part of the call."""
        began, name = seconds_without_compiling(), _PARTS.get(title, title)
        self._within.append(0.0)
        try:
            yield
        finally:
            seconds, within = seconds_without_compiling() - began, self._within.pop()
            self._within[-1] += seconds
            self._parts[name] = self._parts.get(name, 0.0) + seconds - within
