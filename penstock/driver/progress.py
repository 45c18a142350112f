"""Shows a person how a run goes; without a reporter a run is silent."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from penstock.solvers import IterationRecord
from penstock.spmv import format_nbytes
from penstock.spmv.compilation.watch import compile_seconds, seconds_without_compiling, watched_compilation

# Seconds between two lines in a log: a job of hours shows that it lives, and fills no disk.
_LOG_SECONDS = 60.0
# Seconds after which a log says what has begun: a part of a run that is over sooner gets one line.
_FIRST_SECONDS = 2.0
# Seconds between two states of a line in a notebook.
_NOTEBOOK_SECONDS = 0.25
# What results call the parts of a call.
_PARTS = {"read": "reading", "look": "looking", "survey": "looking", "plan": "planning", "try": "planning"}
_PARTS |= {"convert": "converting", "write": "converting", "move": "moving", "copy": "moving", "open": "moving"}
_PARTS |= {"image": "converting"}
_PARTS |= {"prepare": "setting up", "solve": "iterating", "update": "updating"}
# And what runs of experiments have besides.
_PARTS |= {"compile": "compiling", "assemble": "assembling", "divide": "planning", "draw": "drawing"}
_PARTS |= {"checkpoint": "writing"}
# Seconds of compilation from which on they are reported.
_NOTICED_SECONDS = 1.0
# Those from which on a result mentions them, and the share of a call below which its parts are not explained.
_NOTED_SECONDS, _TOLD = 0.1, 0.01


class Stage:
    """One part of a run; this one reports nothing."""

    def advance(self, done: float, detail: str = "") -> None:
        """Say how much is done, as a share from 0 to 1."""

    def note(self, detail: str) -> None:
        """Say what is being done, at once."""

    def remark(self, detail: str) -> None:
        """Add something to what is said at the end."""


class Reporter:
    """Receives what a run has to say; this one ignores it.

    Examples
    --------
    >>> import tempfile
    >>> from penstock.experiments import Experiment, Reporter, run_experiment
    >>> class Titles(Reporter):
    ...     def text(self, title, body):
    ...         print(title)
    >>> experiment = Experiment(model={"nodes": 3}, output={"figures": False})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     outcome = run_experiment(experiment, f"{folder}/results", reporter=Titles())
    Plan
    Result
    """

    def text(self, title: str, body: str) -> None:
        """Show a text under a title."""

    @contextmanager
    def stage(self, title: str) -> Iterator[Stage]:
        """Open a part of the run that may take a while."""
        yield Stage()

    @contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Name a part of a stage, or a short one, which is not shown."""
        yield


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

    @contextmanager
    def running(self, reporter: Reporter | None = None) -> Iterator[None]:
        """Count the time of a call, which another reporter may hear of."""
        before, began, compiled = self._reporter, time.perf_counter(), compile_seconds()
        self._reporter = reporter or before
        try:
            yield
        finally:
            self._reporter = before
            self._busy += time.perf_counter() - began
            self._compiling += compile_seconds() - compiled

    @property
    def seconds(self) -> float:
        """Seconds of the calls since the last time, without those of compiling."""
        return self._busy - self._compiling

    def take(self) -> dict[str, float]:
        """Return the seconds of each part of the calls since the last time, which they add up to.

        Parts within parts are counted once, and what is compiled meanwhile on its own.
        """
        parts = {name: max(seconds, 0.0) for name, seconds in self._parts.items()}
        parts["compiling"] = parts.get("compiling", 0.0) + self._compiling  # waited for others, and done here
        parts["rest"] = max(self._busy - sum(parts.values()), 0.0)
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
            with self._reporter.part(title):
                yield
        finally:
            seconds, within = seconds_without_compiling() - began, self._within.pop()
            self._within[-1] += seconds
            self._parts[name] = self._parts.get(name, 0.0) + seconds - within


def time_facts(cost: str, parts: dict[str, float]) -> list[str]:
    """Return lines of what a call has cost, with its larger parts, which a :class:`CallClock` has taken."""
    if parts["compiling"] >= _NOTED_SECONDS:
        cost += f", {parts['compiling']:.3g} s more for compiling kernels, once on a machine"
    shares = ", ".join(f"{part} {of:.3g}" for part, of in parts.items() if of > _TOLD * sum(parts.values()))
    return [f"{'time':<11} {cost}", f"{'of which':<11} {shares} s"]


class _LineStage(Stage, ABC):
    """Shows a line every ``every`` seconds, and one at the end."""

    def __init__(self, title: str, every: float) -> None:
        self._title, self._every = title, every
        self._began = self._last = time.perf_counter()
        self.detail = ""

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def advance(self, done: float, detail: str = "") -> None:
        self.detail = detail
        if time.perf_counter() - self._last >= self._every:
            self._last = time.perf_counter()
            self._show(f"{self._share(min(max(done, 0.0), 1.0))}  {detail}")

    def note(self, detail: str) -> None:
        self._show(detail)

    def remark(self, detail: str) -> None:
        self.detail = f"{self.detail}; {detail}" if self.detail else detail

    def end(self) -> None:
        self._show(self.detail)

    def _share(self, done: float) -> str:
        return f"{done:4.0%}"

    def _line(self, text: str) -> str:
        return f"{self._title:<10} {self.seconds:8.2f} s  {text}"

    @abstractmethod
    def _show(self, text: str) -> None:
        """Show a line."""


class _LogStage(_LineStage):
    """Prints lines in a log, the first one soon after the beginning."""

    def __init__(self, console: Console, title: str, every: float) -> None:
        super().__init__(title, every)
        self._console = console
        # By the clock and not at an advance, which may take long to come.
        self._first = threading.Timer(_FIRST_SECONDS, self._begin)
        self._first.daemon = True

    def __enter__(self) -> Self:
        with contextlib.suppress(RuntimeError):  # no thread is to be had: the first line comes at an advance
            self._first.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._first.cancel()

    def _begin(self) -> None:
        self._show(self.detail or "begun")

    def _show(self, text: str) -> None:
        self._first.cancel()  # one line is enough to tell what has begun
        self._console.print(self._line(text), highlight=False, soft_wrap=True)


class _NotebookStage(_LineStage):
    """Keeps one line of a notebook up to date; bars of rich would need ipywidgets there."""

    def __init__(self, console: Console, title: str) -> None:
        from IPython.display import display

        super().__init__(title, _NOTEBOOK_SECONDS)
        self._display = display({"text/plain": self._line("")}, raw=True, display_id=True)

    def _share(self, done: float) -> str:
        full = round(20 * done)
        return f"{'█' * full}{'░' * (20 - full)} {done:4.0%}"

    def _show(self, text: str) -> None:
        self._display.update({"text/plain": self._line(text)}, raw=True)


class _RichStage(Stage):
    def __init__(self, progress: Progress, title: str, log: Stage) -> None:
        self._progress, self._task, self._log = progress, progress.add_task(title, total=1.0, detail=""), log
        self._detail = ""

    def advance(self, done: float, detail: str = "") -> None:
        self._detail = detail
        self._progress.update(self._task, completed=min(max(done, 0.0), 1.0), detail=detail)
        self._log.advance(done, detail)

    def note(self, detail: str) -> None:
        self._progress.update(self._task, detail=f"{self._detail}; {detail}" if self._detail else detail)
        self._log.note(detail)

    def remark(self, detail: str) -> None:
        self.note(detail)


@contextmanager
def _reporting_compilation(stage: Stage, advise: Callable[[], object]) -> Iterator[Stage]:
    """Say that kernels are being compiled, and at the end how long that took, if it takes long enough to be noticed."""
    before, announced, timer = compile_seconds(), False, threading.Timer(0.0, lambda: None)

    def announce_if_noticed() -> None:
        nonlocal announced
        if compile_seconds() - before >= _NOTICED_SECONDS:  # else that kernel was compiled sooner
            announced = True
            advise()
            stage.note("compiling kernels")

    def wait() -> None:
        nonlocal timer
        timer.cancel()
        if not announced:
            timer = threading.Timer(max(0.0, _NOTICED_SECONDS - (compile_seconds() - before)), announce_if_noticed)
            timer.daemon = True
            timer.start()

    try:
        with watched_compilation(wait):
            yield stage
    finally:
        timer.cancel()
    if (seconds := compile_seconds() - before) >= _NOTICED_SECONDS:
        stage.remark(f"{seconds:.1f} s of it compiling kernels")


class RichReporter(Reporter):
    """Shows texts and progress bars on a terminal, and a line that changes in a notebook.

    Elsewhere it prints texts and, for each part of a run, a line after two seconds, one a minute and one at the end.

    Parameters
    ----------
    console : Console
    every : float, optional
        Seconds between two lines about a part of a run, on a terminal above its bar. By default 60, and none on a terminal.

    Examples
    --------
    >>> import sys
    >>> from penstock.experiments import RichReporter
    >>> from rich.console import Console
    >>> RichReporter(Console(file=sys.stdout)).text("plan", "everything is resident")
    plan
    everything is resident
    <BLANKLINE>
    """

    def __init__(self, console: Console, every: float | None = None) -> None:
        self.console, self._every, self._advised = console, every, False

    @classmethod
    def on_terminal(cls) -> RichReporter:
        """Return a reporter on the standard error stream."""
        return cls(Console(stderr=True))

    def text(self, title: str, body: str) -> None:
        """Print a title in bold and the text below it."""
        self.console.print(f"[bold]{title}[/bold]")
        self.console.print(body, highlight=False, markup=False, soft_wrap=True)
        self.console.print()

    @contextmanager
    def stage(self, title: str) -> Iterator[Stage]:
        """Show a bar with times until the part is over; a notebook and a log get one line instead."""
        with self._shown(title) as shown, _reporting_compilation(shown, self._advise) as stage:
            yield stage

    def _advise(self) -> None:
        if not self._advised:
            self._advised = True
            advice = "Kernels are compiled once on a machine; 'penstock warm-up' does it ahead."
            self.console.print(advice, highlight=False, soft_wrap=True)

    @contextmanager
    def _shown(self, title: str) -> Iterator[Stage]:
        if self.console.is_jupyter and self._every is None:
            line = _NotebookStage(self.console, title)
            yield line
            line.end()
            return
        if not self.console.is_terminal:
            with _LogStage(self.console, title, _LOG_SECONDS if self._every is None else self._every) as log:
                yield log
            log.end()
            return
        columns = (
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"),
        )
        with Progress(*columns, console=self.console, refresh_per_second=4) as progress:
            lines = Stage() if self._every is None else _LogStage(progress.console, title, self._every)
            yield _RichStage(progress, title, lines)


def solve_progress(record: IterationRecord, rtol: float) -> tuple[float, str]:
    """Return the share done, on a logarithmic scale of the residual, and a line with residual and bytes."""
    norms = record.state.residual_norms
    first = float(max(of[0] for of in norms) if isinstance(norms[0], list) else norms[0])  # of several, the largest
    goal, reached = (math.log(max(first, 1e-300)) - math.log(max(to, 1e-300)) for to in (rtol, record.residual_norm))
    share = reached / goal if goal > 0 else 1.0
    streamed = f", {format_nbytes(record.bytes_streamed)} streamed" if record.bytes_streamed else ""
    detail = f"iteration {record.iteration}, residual {record.residual_norm:.2e}{streamed}"
    return (share if math.isfinite(share) else 0.0), detail  # residuals of badly scaled systems may be infinite
