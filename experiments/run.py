"""One run: a system is opened, solved with checkpoints, and reported; or resumed. What differs stands with each kind of run."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from penstock.driver.inputs import GivenMatrix, GivenVectors
from penstock.driver.open_system import AnyResult, OpenSystem
from penstock.driver.opening import open_system
from penstock.driver.progress import CallClock, Reporter
from penstock.driver.request import Placement, Request
from penstock.experiments.reporting.atomic import write_json
from penstock.experiments.reporting.checkpoint import (
    Checkpoint,
    SolverState,
    check_settings,
    read_checkpoint,
    write_checkpoint,
)
from penstock.experiments.reporting.environment import describe_environment
from penstock.experiments.reporting.figures_ahead import load_figures_ahead
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.reporting.interrupts import stop_requests
from penstock.experiments.reporting.outcome import RunOutcome
from penstock.experiments.reporting.solve_report import columns_of, describe_solve, reason_of, record_sweep
from penstock.fem import Cantilever
from penstock.host.start import take_starting_seconds
from penstock.solvers import IterationRecord, StopReason
from penstock.solvers.image_solve import tried_with_image
from penstock.spmv import Operator, StoreError, SweptOperator
from penstock.spmv.compilation.watch import compile_seconds, seconds_without_compiling

# Seconds of waiting for a checkpoint from which on that is shown.
_UNSEEN_SECONDS = 1.0


class Run(ABC):
    """A solve that leaves a results folder. A subclass says where the system comes from, and what is left besides."""

    rtol: float
    maxiter: int | None
    checkpoint_seconds: float = 60.0
    #: Processes among which the system is shared out.
    rank_count: int = 1
    #: The body that is drawn, and whether anything is.
    cantilever: Cantilever | None = None
    draws: bool = True
    #: Where the settings are written beside a checkpoint.
    settings_file: Path | None = None
    #: Whether a solve that was stopped is reported too; otherwise it leaves its checkpoint only.
    reports_stopped: ClassVar[bool] = False
    #: Whether it goes on from what an earlier run has left.
    resumes: bool = False
    #: What a user can do if a run cannot be resumed with these settings.
    advice: ClassVar[str]

    def __init__(self, folder: ResultsFolder, reporter: Reporter) -> None:
        self.folder = folder
        #: Hands on what is reported, and adds up the seconds of all parts.
        self.reporter = CallClock(reporter)
        #: A folder on the disk from which the matrix is streamed.
        self.streams_from = folder.path
        #: What earlier runs left, from which this one resumes.
        self.before = Checkpoint(None)
        #: Seconds of the parts of the run, without compilation.
        self.seconds: dict[str, float] = {}
        self._result: dict[str, Any] | None = None
        self._writing: Future[None] | None = None  # of a checkpoint, while the report is made
        self.began, self.compiled = time.perf_counter(), compile_seconds()
        self._part_began = seconds_without_compiling()

    def run(self, *, resume: bool) -> RunOutcome:
        """Open the system, solve and report."""
        starting = take_starting_seconds()
        with self.reporter.running():
            reason = self._run(resume=resume)
        if self._result is not None:
            self.folder.conclude(self._result, {"starting": starting, **self.reporter.take()}, self.reporter)
        return RunOutcome(self.folder, reason)

    def _run(self, *, resume: bool) -> StopReason:
        """Open the system, solve and report, except for what all of this takes."""
        self.resumes = resume
        matrix, request = self._asked()
        if resume:
            with self.reporter.stage("read"):
                self.before = self._read_checkpoint(matrix.rows)
        reason, unfit = tried_with_image(lambda: self._run_with(matrix, request))
        if unfit is not None:
            self.reporter.text("Precision", f"float64 from here on: an image in fewer digits was tried, but {unfit}")
            self.before = replace(self.before, state=None)  # which is one of the image, as that on disk is
            self.folder.checkpoint.unlink(missing_ok=True)
            reason = self._run_with(matrix, replace(request, precision="float64"))
        assert reason is not None, "a run ends for a reason"
        return reason

    def _run_with(self, matrix: GivenMatrix, request: Request) -> StopReason:
        where: dict[str, Any] = {"folder": self.streams_from, "reporter": self.reporter}
        with open_system(matrix, request, **where, announce=self._announce) as system, request.device.current():
            self._ends("open")
            result, spent = self._solve(system)
            reason = reason_of(result)
            try:
                # Also before reporting: an interrupt or a full disk from here on must not cost the solution.
                with self.reporter.part("writing"):
                    self._keep(result, spent)
                if reason is not StopReason.STOPPED or self.reports_stopped:
                    if isinstance(system.matrix, SweptOperator) and system.matrix.bytes_streamed:
                        self._finish_writing()  # transfers are recorded without another one beside them
                    with self.reporter.part("recording"):
                        record_sweep(self.folder, system, result)
                    self._report(system, result, spent)
            finally:
                self._finish_writing()
        if result.converged:  # otherwise a resumed run with a larger maxiter may go on
            self.folder.checkpoint.unlink(missing_ok=True)
        return reason

    @abstractmethod
    def _asked(self) -> tuple[GivenMatrix, Request]:
        """Return the matrix, or what makes it, and what is asked for."""

    @abstractmethod
    def _write_plan(self, placement: Placement) -> None:
        """Write down what was decided, before memory for the matrix is taken and again if the first sweeps change it."""

    @abstractmethod
    def _posed(self, system: OpenSystem) -> tuple[GivenVectors, GivenVectors | None]:
        """Return the right-hand sides and the first guess."""

    @abstractmethod
    def _settings(self, placement: Placement) -> dict[str, Any]:
        """Return, as plain values, the settings on which the system and the iterations depend."""

    @abstractmethod
    def _facts(self, system: OpenSystem, result: AnyResult, spent: Checkpoint) -> dict[str, Any]:
        """Return what the report says besides what all reports say."""

    def _ends(self, part: str) -> None:
        """Note the seconds of a part of the run, which ends now."""
        now = seconds_without_compiling()
        self.seconds[part], self._part_began = now - self._part_began, now

    # Resuming

    def _read_checkpoint(self, unknowns: int) -> Checkpoint:
        """Read a checkpoint to the host, from where the solve takes it when it has its memory."""
        return read_checkpoint(self.folder.checkpoint, unknowns)

    def _announce(self, placement: Placement) -> None:
        """Refuse to resume a run of another system or with other decisions, and write down the plan."""
        if self.before.state is not None:
            before, now = self._lasting(self.before.settings), self._lasting(self._settings(placement))
            check_settings(before, now, self.advice)
        self._write_plan(placement)
        if self.draws:  # not sooner: rates are measured on idle cores
            load_figures_ahead()

    def _lasting(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings that must be the same when a run is resumed."""
        return settings

    def _is_due(self, seconds: float) -> bool:
        """Return whether to write a checkpoint this many seconds after the last one."""
        return seconds > self.checkpoint_seconds

    def _save(self, checkpoint: Checkpoint, *, aside: bool = False) -> None:
        """Write a checkpoint, perhaps ``aside``, while the run goes on; a full disk must not end a solve that can go on."""
        with self.reporter.part("writing"), self._warns_of_disk():
            if self.settings_file is not None:
                write_json(self.settings_file, checkpoint.settings)
            self._writing = write_checkpoint(self.folder.checkpoint, checkpoint, aside=aside)

    def _finish_writing(self) -> None:
        """Wait for a checkpoint that is being written, also where somebody interrupts that: the folder would be removed."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        with self.reporter.part("writing"), self._warns_of_disk():
            try:
                if not wait([writing], _UNSEEN_SECONDS).done:
                    with self.reporter.stage("checkpoint"):
                        wait([writing])
            finally:
                writing.result()

    @contextmanager
    def _warns_of_disk(self) -> Iterator[None]:
        try:
            yield
        except (StoreError, MemoryError) as error:
            self.reporter.text("Warning", str(error) or "there is too little memory for a checkpoint")

    def _keep(self, result: AnyResult, spent: Checkpoint) -> None:
        """Begin to write what the solve has reached, which :meth:`_finish_writing` waits for when the report is made."""
        self._save(spent, aside=True)

    # The solve and its report

    def _solve(self, system: OpenSystem) -> tuple[AnyResult, Checkpoint]:
        """Solve, with checkpoints; return the result, and the time and traffic of this run and earlier ones."""
        b, guess = self._posed(system)
        A, matrix, before = system.A, system.matrix, self.before
        whole = b.columns <= system.decided.together  # a solve in several blocks has no state
        swept = A if isinstance(A, SweptOperator) else None
        began, written = seconds_without_compiling(), time.perf_counter()
        # Formats that scatter add in the order of the sweep: the direction is part of the state. It is noted between two
        # iterations, because a solve that stops sweeps once more, for the true residual.
        direction = before.direction

        def spent(state: SolverState) -> Checkpoint:
            sweeps, streamed = self._traffic(matrix, state)
            return Checkpoint(
                state,
                before.sweeps + sweeps,
                before.bytes_streamed + streamed,
                before.seconds + seconds_without_compiling() - began,
                direction,
                self.rank_count,
                self._settings(system.decided),  # which building the preconditioner may have changed
            )

        with stop_requests(self.reporter) as stop:

            def monitor(record: IterationRecord) -> bool:
                nonlocal written, direction
                direction = 1 if swept is None else swept.direction
                if whole and self._is_due(time.perf_counter() - written):
                    self._save(spent(record.state))
                    written = time.perf_counter()
                return stop.is_set()

            limits: dict[str, Any] = {"rtol": self.rtol, "maxiter": self.maxiter}
            result = system.solve(b, guess, **limits, monitor=monitor, state=before.state, direction=direction)
        return result, spent(result.state if whole else None)

    def _traffic(self, A: Operator, state: SolverState) -> tuple[int, int]:
        """Return the sweeps of this run so far, and the bytes that they streamed."""
        return (A.sweeps, A.bytes_streamed) if isinstance(A, SweptOperator) else (0, 0)

    def _report(self, system: OpenSystem, result: AnyResult, spent: Checkpoint) -> None:
        """Write everything that a finished run leaves."""
        folder, setup = self.folder, self.seconds.get("preconditioner", 0.0)
        self.seconds["compile"] = compile_seconds() - self.compiled
        self.seconds["total"] = time.perf_counter() - self.began
        summary = describe_solve(system, result, spent, rtol=self.rtol, setup_seconds=setup)
        summary |= {**self._facts(system, result, spent), "earlier_seconds": self.before.seconds}
        with self.reporter.part("writing"):
            write_json(folder.environment, describe_environment())
            folder.write_residuals([column.residual_norms for column in columns_of(result)])
            write_json(folder.result, summary)  # last of the data: a folder with a result is a whole one
        self._result = summary
        if self.draws:
            with self.reporter.stage("draw") as stage:
                folder.draw(self.cantilever)
                stage.advance(1.0)
