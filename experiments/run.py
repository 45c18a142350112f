"""From an experiment to a results folder: plan, build, solve, report."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from penstock.experiments.bandwidth import measure_disk, measure_link, measure_memory
from penstock.experiments.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from penstock.experiments.configuration import Experiment, read_experiment
from penstock.experiments.environment import describe_environment
from penstock.experiments.progress import Reporter, solve_progress
from penstock.experiments.results import ResultsFolder
from penstock.solvers import (
    CgState,
    IterationRecord,
    SolveResult,
    StopReason,
    block_jacobi,
    cg,
    cg_workspace_nbytes,
)
from penstock.spmv import Device, InputError, Operator, StoreError, format_nbytes
from penstock.spmv.formats.base import INT32_MAX
from penstock.streaming import (
    FileStore,
    HostStore,
    LinkRates,
    MatrixIndex,
    MemoryBudget,
    Store,
    StreamedMatrix,
    StreamPlan,
    index_of,
    plan_stream,
    plan_subdivisions,
)

# Below this size a measurement would take longer than what it tells about.
_MEASURED_FROM_NBYTES = 64 << 20

__all__ = ["RunOutcome", "plan_experiment", "resume_experiment", "run_experiment"]


@dataclass(frozen=True)
class RunOutcome:
    """What a run came to: its results folder and the solver's reason to stop."""

    folder: ResultsFolder
    reason: StopReason

    @property
    def interrupted(self) -> bool:
        """Whether it stopped on request, leaving a checkpoint."""
        return self.reason is StopReason.STOPPED


def plan_experiment(experiment: Experiment) -> StreamPlan:
    """Plan an experiment without allocating anything of its size.

    Raises
    ------
    BudgetError
        If the budget is too small; the message gives the smallest that would do.
    """
    cantilever, memory = experiment.cantilever(), experiment.memory
    dtype = np.dtype(memory.values)

    def index_for(count: int) -> MatrixIndex:
        return index_of(cantilever.outlines(count, memory.format, values_dtype=dtype), cantilever.shape)

    options: dict[str, Any] = {"workspace_nbytes": cg_workspace_nbytes(cantilever.unknowns)}
    if memory.budget is None:
        index = index_for(1 + cantilever.nnz // INT32_MAX)
        return plan_stream(index, index.nbytes, **options)
    options |= {"slots": memory.slots, "overlap": memory.overlap}
    if memory.store is not None and memory.store.exists():
        with FileStore(memory.store) as store:
            _check_store(store, experiment)
            return plan_stream(store.index, memory.budget, **options)
    if memory.subdivisions is not None:
        return plan_stream(index_for(memory.subdivisions), memory.budget, **options)
    return plan_subdivisions(index_for, memory.budget, limit=cantilever.mesh.node_count, **options)


def _store_label(experiment: Experiment) -> str:
    """Return what determines every entry of the stored matrix."""
    memory = experiment.memory
    return f"{experiment.model!r} {experiment.material!r} {memory.format} {memory.values}"


def _check_store(store: FileStore, experiment: Experiment) -> None:
    """Refuse a store that holds another matrix, or another cut than the experiment asks for."""
    if store.label != _store_label(experiment):
        raise InputError(f"the store {store.path} holds another matrix ({store.label}); name another memory.store")
    count, wanted = len(store.index.subdivisions), experiment.memory.subdivisions
    if wanted is not None and wanted != count:
        raise InputError(
            f"the store {store.path} has {count} subdivisions instead of {wanted}; name another memory.store"
        )


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
        folder.write_text(folder.configuration, yaml.safe_dump(_resolved(experiment), sort_keys=False))
        return _Run(experiment, folder, reporter or Reporter()).run(resume=False)
    except BaseException as error:
        _remove_unless_checkpointed(folder, error)
        raise


def resume_experiment(
    directory: str | Path, *, maxiter: int | None = None, reporter: Reporter | None = None
) -> RunOutcome:
    """Go on with a run that did not converge; the iterates are bit-equal to those of an uninterrupted run.

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
        with self._timed("plan"):
            plan = dataclasses.replace(plan_experiment(self.experiment), rates=self._rates())
        self.folder.write_text(self.folder.plan, plan.explain() + "\n")
        self.reporter.text("Plan", plan.explain())
        checkpoint = Checkpoint(None)
        if resume:
            checkpoint = read_checkpoint(self.folder.checkpoint, self.cantilever.unknowns, self.device)
        with contextlib.ExitStack() as resources:
            resources.enter_context(self.device.current())
            A: Operator
            if self.experiment.memory.budget is None:
                with self._timed("assembly"), self.reporter.stage("assemble"):
                    dtype = np.dtype(self.experiment.memory.values)
                    A = self.cantilever.matrix(self.experiment.memory.format, values_dtype=dtype).to_device(self.device)
            else:
                with self._timed("assembly"):
                    store = resources.enter_context(self._store(plan))
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

    def _rates(self) -> LinkRates | None:
        """Measure link and memory, so that the plan can tell the time of a sweep; not for what takes no time."""
        nbytes = self.cantilever.nnz * np.dtype(self.experiment.memory.values).itemsize
        if self.experiment.memory.budget is None or nbytes < _MEASURED_FROM_NBYTES:
            return None
        with self.device.current():
            on_disk = self.device.kind == "cpu"
            link = measure_disk(self.folder.path)[0] if on_disk else measure_link(self.device)
            return LinkRates(link, measure_memory(self.device))

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - began

    @contextlib.contextmanager
    def _store(self, plan: StreamPlan) -> Iterator[Store]:
        """Build the matrix where it is streamed from: on disk for the CPU, in host memory for a GPU."""
        memory, count = self.experiment.memory, len(plan.index.subdivisions)
        if self.device.kind == "cuda" and memory.store is None:
            with self.reporter.stage("assemble") as stage:
                slabs = self._slabs(count, lambda done: stage.advance(done / count))
                host_store = HostStore.create(slabs, self.cantilever.shape)
            with host_store:
                yield host_store
            return
        path = memory.store or self.folder.matrix
        if not path.exists():
            existing = next(folder for folder in path.absolute().parents if folder.exists())
            free = shutil.disk_usage(existing).free
            if free < plan.index.nbytes:
                raise StoreError(
                    f"the matrix needs {format_nbytes(plan.index.nbytes)} of disk, {existing} has {format_nbytes(free)} free; "
                    "name another place as memory.store"
                )
            with self.reporter.stage("assemble") as stage:
                total = plan.index.nbytes
                FileStore.create(
                    path,
                    self._slabs(count),
                    shape=self.cantilever.shape,
                    label=_store_label(self.experiment),
                    progress=lambda written: stage.advance(written / total, f"{format_nbytes(written)} written"),
                ).close()
        with FileStore(path) as file_store:
            _check_store(file_store, self.experiment)
            if self.device.kind == "cpu":
                yield file_store
                return
            with HostStore.from_store(file_store) as host_store:
                yield host_store

    def _save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint; a disk that is full must not end a solve that can go on."""
        try:
            write_checkpoint(self.folder.checkpoint, checkpoint, self.device)
        except StoreError as error:
            self.reporter.text("Warning", str(error))

    def _slabs(self, count: int, progress: Any = None) -> Iterator[Any]:
        dtype = np.dtype(self.experiment.memory.values)
        for number, slab in enumerate(
            self.cantilever.subdivisions(count, self.experiment.memory.format, values_dtype=dtype)
        ):
            yield slab
            if progress is not None:
                progress(number + 1)

    def _solve(self, A: Operator, checkpoint: Checkpoint) -> tuple[SolveResult, Checkpoint]:
        """Solve, with checkpoints, and return the result and all that was spent, earlier runs included."""
        solver = self.experiment.solver
        b = self.device.asarray(
            self.cantilever.load(*self.experiment.load_kinds(), magnitude=self.experiment.load.magnitude)
        )
        size = {"none": None, "jacobi": 1, "block_jacobi": self.cantilever.dof}[solver.preconditioner]
        M = None if size is None else block_jacobi(A, size)
        began = time.perf_counter()

        def spent(state: CgState) -> Checkpoint:
            sweeps = A.sweeps if isinstance(A, StreamedMatrix) else 0
            streamed = A.bytes_streamed if isinstance(A, StreamedMatrix) else 0
            seconds = checkpoint.seconds + time.perf_counter() - began
            return Checkpoint(state, checkpoint.sweeps + sweeps, checkpoint.bytes_streamed + streamed, seconds)

        last_write = time.perf_counter()
        with _stop_requests(self.reporter) as stop, self.reporter.stage("solve") as stage:

            def monitor(record: IterationRecord) -> bool:
                nonlocal last_write
                stage.advance(*solve_progress(record, record.state.residual_norms[0], solver.rtol))
                if time.perf_counter() - last_write > self.experiment.output.checkpoint_seconds:
                    self._save(spent(record.state))
                    last_write = time.perf_counter()
                return stop.is_set()

            result = cg(A, b, rtol=solver.rtol, maxiter=solver.maxiter, M=M, monitor=monitor, state=checkpoint.state)
        return result, spent(result.state)

    def _report(self, A: Operator, plan: StreamPlan, result: SolveResult, spent: Checkpoint, before: float) -> None:
        """Write everything a finished run leaves; ``before`` are the seconds of earlier runs that it went on from."""
        folder, streamed = self.folder, isinstance(A, StreamedMatrix) and bool(plan.slots)
        x = self.device.to_host(result.x)
        if streamed:
            assert isinstance(A, StreamedMatrix)
            with A.recording() as timeline:  # a sweep of its own, so that recording costs the solve nothing
                A.apply(result.x)
            folder.write_json(folder.timeline, timeline.to_json())
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
            "direct_reads": isinstance(A, StreamedMatrix) and getattr(A.store, "direct", False),
            "unknowns": self.cantilever.unknowns,
            "nonzeros": self.cantilever.nnz,
            "tip_deflection": self.cantilever.tip_deflection(x),
            "seconds": {part: self.seconds[part] for part in ("plan", "assembly", "solve", "total")},
            "device": str(self.device),
        }
        folder.write_json(folder.environment, describe_environment())
        folder.write_residuals(result.residual_norms)
        if self.experiment.output.field:
            folder.write_field(self.cantilever, x)
        folder.write_json(folder.result, summary)  # last of the data: a folder with a result is a whole one
        if self.experiment.output.figures:
            with self.reporter.stage("draw") as stage:
                folder.draw(self.cantilever)
                stage.advance(1.0)
        self.reporter.text("Result", folder.summary())


@contextlib.contextmanager
def _stop_requests(reporter: Reporter) -> Iterator[threading.Event]:
    """Turn SIGINT and SIGTERM into an event; a second one acts at once, as if there were no handler."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        reporter.text("Stopping after this iteration", "Interrupt again to stop at once.")

    for number in signals:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
