"""From an experiment to a results folder: plan, build, solve, report."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from penstock.experiments.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from penstock.experiments.configuration import Experiment, read_experiment
from penstock.experiments.environment import describe_environment
from penstock.experiments.interrupts import stop_requests
from penstock.experiments.matrix_storage import measure_rates, open_store, plan_experiment, resident_format
from penstock.experiments.progress import Reporter, solve_progress
from penstock.experiments.results import ResultsFolder, write_json, write_text
from penstock.solvers import (
    CgState,
    IterationRecord,
    SolveResult,
    StopReason,
    block_jacobi,
    cg,
)
from penstock.spmv import Device, InputError, Operator, StoreError
from penstock.streaming import (
    MemoryBudget,
    StreamedMatrix,
    StreamPlan,
)
from penstock.streaming.budget import check_room

__all__ = ["RunOutcome", "resume_experiment", "run_experiment"]


@dataclass(frozen=True)
class RunOutcome:
    """What a run came to: its results folder and the solver's reason to stop."""

    folder: ResultsFolder
    reason: StopReason

    @property
    def interrupted(self) -> bool:
        """Whether it stopped on request, leaving a checkpoint."""
        return self.reason is StopReason.STOPPED


def run_experiment(experiment: Experiment, directory: str | Path, *, reporter: Reporter | None = None) -> RunOutcome:
    """Run an experiment from the start.

    Parameters
    ----------
    experiment : Experiment
    directory : path
        Results folder to make; it must not exist or be empty.
    reporter : Reporter, optional
        Told how it goes.

    Returns
    -------
    RunOutcome
        If it was interrupted by SIGINT or SIGTERM, the folder holds a checkpoint.

    Raises
    ------
    PenstockError
        If something is wrong with the experiment, the budget, the disk or the device; no folder is left then.
    """
    folder = ResultsFolder(Path(directory))
    if folder.path.exists() and any(folder.path.iterdir()):
        raise InputError(f"{folder.path} is not empty; choose another --output, or go on there with --resume")
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make {folder.path}: {error.strerror or error}") from error
    try:
        write_text(folder.configuration, yaml.safe_dump(_resolved(experiment), sort_keys=False))
        return _Run(experiment, folder, reporter or Reporter()).run(resume=False)
    except BaseException as error:
        _remove_unless_checkpointed(folder, error)
        raise


def resume_experiment(
    directory: str | Path, *, maxiter: int | None = None, reporter: Reporter | None = None
) -> RunOutcome:
    """Go on with a run that did not converge.

    The iterates are bit-equal to those of an uninterrupted run, but for ``symmetric_bsr`` on a GPU, which adds by atomics.

    Parameters
    ----------
    directory : path
        Its results folder.
    maxiter : int, optional
        Instead of the experiment's, for a run that ended there.
    reporter : Reporter, optional
        Told how it goes.

    Raises
    ------
    InputError
        If the folder holds no checkpoint.
    """
    folder = ResultsFolder(Path(directory))
    if not folder.checkpoint.exists():
        if folder.result.exists():
            raise InputError(f"the run in {folder.path} is finished; look at it with penstock show {folder.path}")
        raise InputError(f"{folder.path} holds no {folder.checkpoint.name}; there is nothing to resume")
    experiment = read_experiment(folder.configuration)
    if maxiter is not None:
        solver = experiment.solver.model_copy(update={"maxiter": maxiter})
        experiment = experiment.model_copy(update={"solver": solver})
    return _Run(experiment, folder, reporter or Reporter()).run(resume=True)


def _resolved(experiment: Experiment) -> dict[str, Any]:
    """Return every setting in force, as it can be read again."""
    data: dict[str, Any] = experiment.model_dump(mode="json", exclude_none=True)
    if experiment.memory.budget is None:  # without a budget nothing is streamed, and how may not be said
        data["memory"] = {key: data["memory"][key] for key in ("device", "format", "values")}
    return data


def _remove_unless_checkpointed(folder: ResultsFolder, error: BaseException) -> None:
    if folder.checkpoint.exists():
        error.add_note(f"A checkpoint was kept; go on with: penstock run --resume {folder.path}")
    else:
        shutil.rmtree(folder.path, ignore_errors=True)


class _Run:
    """One run: the experiment, where it writes, and the seconds its parts took."""

    def __init__(self, experiment: Experiment, folder: ResultsFolder, reporter: Reporter) -> None:
        self.experiment = experiment
        self.folder = folder
        self.reporter = reporter
        self.cantilever = experiment.cantilever()
        self.device = Device.parse(experiment.memory.device)
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()

    def run(self, *, resume: bool) -> RunOutcome:
        """Plan, build, solve and report."""
        checkpoint = Checkpoint(None)
        if resume:
            checkpoint = read_checkpoint(self.folder.checkpoint, self.cantilever.unknowns, self.device)
        with self._timed("plan"):
            rates = measure_rates(self.experiment, self.device, self.folder.path)
            plan = plan_experiment(self.experiment, rates)
            self._settle(plan)
        write_text(self.folder.plan, plan.explain() + "\n")
        self.reporter.text("Plan", plan.explain())
        # Before the matrix is assembled, which may take long.
        check_room(self.device, plan.storage_nbytes + plan.workspace_nbytes, "matrix storage and vectors")
        with contextlib.ExitStack() as resources:
            resources.enter_context(self.device.current())
            A: Operator
            if self.experiment.memory.budget is None:
                with self._timed("assembly"), self.reporter.stage("assemble"):
                    dtype = np.dtype(self.experiment.memory.values)
                    name = resident_format(self.experiment)
                    A = self.cantilever.matrix(name, values_dtype=dtype).to_device(self.device)
            else:
                with self._timed("assembly"):
                    opened = open_store(self.experiment, plan, self.device, self.folder.matrix, self.reporter)
                    store = resources.enter_context(opened)
                budget = MemoryBudget(self.experiment.memory.budget)
                A = resources.enter_context(StreamedMatrix(store, budget, device=self.device, plan=plan))
            with self._timed("solve"):
                result, spent = self._solve(A, checkpoint)
            # Also before reporting: an interrupt or a full disk from here on must not cost the solution.
            self._save(spent)
            if result.reason is StopReason.STOPPED:
                return RunOutcome(self.folder, result.reason)
            self._report(A, plan, result, spent, checkpoint.seconds)
        if result.converged:  # otherwise --resume with a larger maxiter may go on
            self.folder.checkpoint.unlink(missing_ok=True)
        shutil.rmtree(self.folder.matrix, ignore_errors=True)
        return RunOutcome(self.folder, result.reason)

    def _settle(self, plan: StreamPlan) -> None:
        """Write down what the plan decided, so that going on or running again does not depend on what is measured then."""
        if self.experiment.memory.budget is not None:
            decided: dict[str, Any] = {"format": plan.index.format_name, "subdivisions": len(plan.index.subdivisions)}
            if plan.slots:
                decided["slots"] = plan.slots
            memory = self.experiment.memory.model_copy(update=decided)
            self.experiment = self.experiment.model_copy(update={"memory": memory})
            write_text(self.folder.configuration, yaml.safe_dump(_resolved(self.experiment), sort_keys=False))

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - began

    def _save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint; a disk that is full must not end a solve that can go on."""
        try:
            write_checkpoint(self.folder.checkpoint, checkpoint, self.device)
        except StoreError as error:
            self.reporter.text("Warning", str(error))

    def _solve(self, A: Operator, checkpoint: Checkpoint) -> tuple[SolveResult, Checkpoint]:
        """Solve, with checkpoints, and return the result and all that was spent, earlier runs included."""
        solver = self.experiment.solver
        b = self.device.asarray(
            self.cantilever.load(*self.experiment.load_kinds(), magnitude=self.experiment.load.magnitude)
        )
        size = {"none": None, "jacobi": 1, "block_jacobi": self.cantilever.dof}[solver.preconditioner]
        M = None if size is None else block_jacobi(A, size)
        began = time.perf_counter()

        # Formats that scatter add in the order of the sweep: the direction is part of the state. It is noted between two
        # iterations, because a solve that stops sweeps once more, for the true residual.
        direction = checkpoint.direction
        if checkpoint.state is not None and isinstance(A, StreamedMatrix):
            A.turn_to(direction)

        def spent(state: CgState) -> Checkpoint:
            sweeps = A.sweeps if isinstance(A, StreamedMatrix) else 0
            streamed = A.bytes_streamed if isinstance(A, StreamedMatrix) else 0
            seconds = checkpoint.seconds + time.perf_counter() - began
            return Checkpoint(
                state, checkpoint.sweeps + sweeps, checkpoint.bytes_streamed + streamed, seconds, direction
            )

        last_write = time.perf_counter()
        with stop_requests(self.reporter) as stop, self.reporter.stage("solve") as stage:

            def monitor(record: IterationRecord) -> bool:
                nonlocal last_write, direction
                direction = A.direction if isinstance(A, StreamedMatrix) else 1
                stage.advance(*solve_progress(record, record.state.residual_norms[0], solver.rtol))
                if time.perf_counter() - last_write > self.experiment.output.checkpoint_seconds:
                    self._save(spent(record.state))
                    last_write = time.perf_counter()
                return stop.is_set()

            result = cg(A, b, rtol=solver.rtol, maxiter=solver.maxiter, M=M, monitor=monitor, state=checkpoint.state)
        return result, spent(result.state)

    @staticmethod
    def _fraction(spent: Checkpoint, nbytes: int, rate: float | None) -> float | None:
        """Return which part of a measured rate the solve made use of; None where nothing was measured."""
        return nbytes / spent.seconds / rate if rate and spent.seconds else None

    def _report(self, A: Operator, plan: StreamPlan, result: SolveResult, spent: Checkpoint, before: float) -> None:
        """Write everything a finished run leaves; ``before`` are the seconds of earlier runs that it went on from."""
        folder, streamed = self.folder, isinstance(A, StreamedMatrix) and bool(plan.slots)
        x = self.device.to_host(result.x)
        if streamed:
            assert isinstance(A, StreamedMatrix)
            with A.recording() as timeline:  # a sweep of its own, so that recording costs the solve nothing
                A.apply(result.x)
            write_json(folder.timeline, timeline.to_json())
            write_text(folder.trace, timeline.to_chrome_trace())
        self.seconds["solve"] = spent.seconds
        self.seconds["total"] = time.perf_counter() - self.began + before
        nbytes = plan.index.nbytes
        summary = {
            "converged": result.converged,
            "reason": result.reason.name.lower(),
            "message": result.message,
            "iterations": result.iterations,
            "true_residual": result.true_residual,
            "rounding_floor": result.rounding_floor,
            "rtol": self.experiment.solver.rtol,
            "sweeps": spent.sweeps,
            "bytes_streamed": spent.bytes_streamed,
            "matrix_nbytes": nbytes,
            "budget_nbytes": self.experiment.memory.budget,
            "peak_budget_nbytes": A.budget.peak_nbytes if isinstance(A, StreamedMatrix) else nbytes,
            "resident_nbytes": plan.resident_nbytes,
            "streamed_nbytes_per_sweep": plan.streamed_nbytes,
            "subdivisions": len(plan.index.subdivisions),
            "slots": plan.slots,
            "overlap": plan.overlap,
            "format": plan.index.format_name,
            "predicted_sweep_seconds": plan.predicted_seconds(),
            "sweep_seconds": spent.seconds / spent.sweeps if spent.sweeps else None,
            "link_fraction": self._fraction(spent, spent.bytes_streamed, plan.rates.link if plan.rates else None),
            "memory_fraction": self._fraction(spent, spent.sweeps * nbytes, plan.rates.memory if plan.rates else None),
            "staged": isinstance(A, StreamedMatrix) and A.staged,
            "direct_reads": isinstance(A, StreamedMatrix) and getattr(A.store, "direct", False),
            "unknowns": self.cantilever.unknowns,
            "nonzeros": self.cantilever.nnz,
            "tip_deflection": self.cantilever.tip_deflection(x),
            "seconds": {part: self.seconds[part] for part in ("plan", "assembly", "solve", "total")},
            "device": str(self.device),
        }
        write_json(folder.environment, describe_environment())
        folder.write_residuals([result.residual_norms])
        if self.experiment.output.field:
            folder.write_field(self.cantilever, x)
        write_json(folder.result, summary)  # last of the data: a folder with a result is a whole one
        if self.experiment.output.figures:
            with self.reporter.stage("draw") as stage:
                folder.draw(self.cantilever)
                stage.advance(1.0)
        self.reporter.text("Result", folder.summary())
