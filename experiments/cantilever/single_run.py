"""One system of an experiment: planned, built, solved and reported."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from penstock.driver.progress import Reporter, solve_progress
from penstock.experiments.cantilever.configuration import Experiment
from penstock.experiments.cantilever.kernels import start_compilation
from penstock.experiments.cantilever.loads import load_names, right_hand_sides
from penstock.experiments.cantilever.matrix_storage import (
    measure_rates,
    open_store,
    plan_after_first_sweeps,
    plan_experiment,
    resident_format,
)
from penstock.experiments.cantilever.resumption import check_resumes, settings_of_system
from penstock.experiments.cantilever.tips import beam_theory, quantities, tips
from penstock.experiments.reporting.atomic import write_json
from penstock.experiments.reporting.checkpoint import Checkpoint, SolverState, read_checkpoint, write_checkpoint
from penstock.experiments.reporting.environment import describe_environment
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.reporting.interrupts import stop_requests
from penstock.experiments.reporting.outcome import RunOutcome
from penstock.experiments.reporting.solve_report import columns_of, describe_solve, reason_of, record_sweep
from penstock.solvers import BlockSolveResult, IterationRecord, SolveResult, StopReason, method_named
from penstock.solvers.preconditioner_spec import PreconditionerSpec
from penstock.spmv import CPU, Array, Device, Operator, StoreError
from penstock.spmv.compilation.ahead import Compilation
from penstock.spmv.compilation.watch import compile_seconds, seconds_without_compiling
from penstock.streaming import HeterogeneousMatrix, LinkRates, MemoryBudget, Store, StreamedMatrix, StreamPlan, Sweeps
from penstock.streaming.execution.budget import check_room


def resolved(experiment: Experiment) -> dict[str, Any]:
    """Return every setting in force, as it can be read again."""
    data: dict[str, Any] = experiment.model_dump(mode="json", exclude_none=True)
    if experiment.memory.budget is None:  # without a budget nothing is streamed, and options of streaming are errors
        data["memory"] = {key: data["memory"][key] for key in ("device", "format", "values")}
    if experiment.load.cases is not None:
        data["load"] = {"cases": data["load"]["cases"]}
    return data


class SingleRun:
    """One run: the experiment, where it writes, and the seconds its parts took."""

    #: Processes among which the system is shared out.
    rank_count: int = 1

    def __init__(self, experiment: Experiment, folder: ResultsFolder, reporter: Reporter) -> None:
        #: The experiment with all decisions of the run, and as requested.
        self.experiment = self.requested = experiment
        self.folder = folder
        self.reporter = reporter
        self.cantilever = experiment.cantilever()
        self.device = Device.parse(experiment.memory.device)
        self.seconds: dict[str, float] = {}
        self.began, self.compiled, self.waited = time.perf_counter(), compile_seconds(), 0.0

    def run(self, *, resume: bool) -> RunOutcome:
        """Plan, build, solve and report."""
        checkpoint = self._read_checkpoint() if resume else Checkpoint(None)
        plan = self._plan()
        self.folder.write_plan(plan.explain(), self.reporter)
        # Before the matrix is assembled, which may take long.
        self._check_room(plan.storage_nbytes + plan.workload.workspace_nbytes)
        with contextlib.ExitStack() as resources:
            resources.enter_context(self.device.current())
            with self._timed("assembly"):
                A = self._matrix(plan, resources)
            if isinstance(A, StreamedMatrix):
                plan = A.plan  # which the first sweeps may have changed
            result, spent = self._solve(A, checkpoint)
            # Also before reporting: an interrupt or a full disk from here on must not cost the solution.
            self._save(spent)
            reason = reason_of(result)
            if reason is StopReason.STOPPED:
                return RunOutcome(self.folder, reason)
            if isinstance(A, Sweeps) and plan.slots:
                record_sweep(self.folder, A, result.x)  # with all right-hand sides, as the solve does
            self._report(A, plan, result, spent, checkpoint.seconds)
        if result.converged:  # otherwise --resume with a larger maxiter may go on
            self.folder.checkpoint.unlink(missing_ok=True)
        for left in (self.folder.matrix, *self.folder.path.glob(f"{self.folder.matrix.name}.partial-*")):
            shutil.rmtree(left, ignore_errors=True)  # the other ones are of runs that were killed while they wrote
        return RunOutcome(self.folder, reason)

    def _check_room(self, nbytes: int) -> None:
        """Refuse a run whose matrix storage and vectors do not fit."""
        check_room(self.device, nbytes, "matrix storage and vectors")

    def _matrix(self, plan: StreamPlan, resources: contextlib.ExitStack) -> Operator:
        """Assemble the matrix in memory, or build and open the one that is streamed."""
        if self.experiment.memory.budget is None:
            with self.reporter.stage("assemble"):
                return self._assembled()
        store = resources.enter_context(
            open_store(self.experiment, plan, self.device, self.folder.matrix, self.reporter)
        )
        return resources.enter_context(
            self._shared(store, plan) if self.experiment.memory.devices else self._tried(self._streamed(store, plan))
        )

    def _assembled(self) -> Operator:
        """Assemble the matrix in memory."""
        name, dtype = resident_format(self.experiment), np.dtype(self.experiment.memory.values)
        return self.cantilever.matrix(name, values_dtype=dtype).to_device(self.device)

    def _budget(self) -> MemoryBudget:
        nbytes = self.experiment.memory.budget
        assert nbytes is not None, "a matrix is streamed where there is a budget"
        return MemoryBudget(nbytes)

    def _streamed(self, store: Store, plan: StreamPlan) -> StreamedMatrix:
        with self.reporter.stage("open"):
            return StreamedMatrix(store, self._budget(), device=self.device, plan=plan)

    def _tried(self, A: StreamedMatrix) -> StreamedMatrix:
        """Return the matrix, opened with another plan if its first sweeps were not as predicted."""
        again = plan_after_first_sweeps(self.requested, A, self.folder.path, self.reporter)
        if again is None:
            return A
        A.close()
        self.folder.add_to_plan(f"{'rates':<11} {again.text}", self.reporter)
        self._settle(again.plan)
        return self._streamed(A.store, again.plan)

    def _shared(self, store: Store, plan: StreamPlan) -> HeterogeneousMatrix:
        """Open a matrix that two devices share, and write down how."""
        memory = self.experiment.memory
        with self.reporter.stage("divide"):
            A = HeterogeneousMatrix(
                store,
                self._budget(),
                device=self.device,
                workload=plan.workload,
                ring=plan.ring,
                rates=plan.rates,
                gpu_subdivisions=memory.gpu_subdivisions,
            )
        memory = memory.model_copy(update={"gpu_subdivisions": A.division.count})
        self.experiment = self.experiment.model_copy(update={"memory": memory})
        self.folder.write_configuration(resolved(self.experiment))
        self.folder.add_to_plan(A.division.explain(), self.reporter)
        return A

    def _read_checkpoint(self) -> Checkpoint:
        checkpoint = read_checkpoint(self.folder.checkpoint, self.cantilever.unknowns, self.device)
        check_resumes(self.experiment, checkpoint.settings)
        return checkpoint

    def _right_hand_sides(self) -> Array:
        return self.device.asarray(right_hand_sides(self.experiment, self.cantilever))

    def _preconditioner(self) -> PreconditionerSpec:
        return self.experiment.preconditioner

    def _is_due(self, seconds: float) -> bool:
        """Return whether to write a checkpoint this many seconds after the last one."""
        return seconds > self.experiment.output.checkpoint_seconds

    def _plan(self) -> StreamPlan:
        """Plan the run, and compile the kernels of the CPU that are not cached."""
        with start_compilation(self.experiment) as compilation:
            if self.device.kind == "cpu":  # its rates are measured on idle cores
                self._wait_for(compilation)
            with self._timed("plan"):
                rates = measure_rates(self.experiment, self.device, self.folder.path)
                plan = self._planned(rates)
                self._settle(plan)
            self._wait_for(compilation)
        return plan

    def _planned(self, rates: LinkRates | None) -> StreamPlan:
        return plan_experiment(self.experiment, rates)

    def _wait_for(self, compilation: Compilation) -> None:
        began = time.perf_counter()
        if not compilation.finished:
            with self.reporter.stage("compile") as stage:
                compilation.wait(stage.advance)
        self.waited += time.perf_counter() - began

    def _settle(self, plan: StreamPlan) -> None:
        """Write down the decisions of the plan, so that resuming or repeating the run does not depend on new measurements."""
        if self.experiment.memory.budget is not None:
            decided: dict[str, Any] = {"format": plan.index.format_name, "subdivisions": len(plan.index.subdivisions)}
            if plan.slots:
                decided["slots"] = plan.slots
            memory = self.experiment.memory.model_copy(update=decided)
            solver = self.experiment.solver
            spec = self.experiment.preconditioner.with_products(plan.workload.degree)
            solver = solver.model_copy(update=solver.options_of(spec))
            self.experiment = self.experiment.model_copy(update={"memory": memory, "solver": solver})
            self.folder.write_configuration(resolved(self.experiment))

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = seconds_without_compiling()
        yield
        self.seconds[part] = seconds_without_compiling() - began

    def _save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint; a disk that is full must not end a solve that can go on."""
        try:
            write_checkpoint(self.folder.checkpoint, checkpoint)
        except StoreError as error:
            self.reporter.text("Warning", str(error))

    def _solve(self, A: Operator, checkpoint: Checkpoint) -> tuple[SolveResult | BlockSolveResult, Checkpoint]:
        """Solve, with checkpoints; return the result, and the time and traffic of this run and earlier ones."""
        solver = self.experiment.solver
        b = self._right_hand_sides()
        with self.reporter.stage("prepare"), self._timed("preconditioner"):
            M = self._preconditioner().build(A)
            self.device.synchronize()
        began = seconds_without_compiling()

        # Formats that scatter add in the order of the sweep: the direction is part of the state. It is noted between two
        # iterations, because a solve that stops sweeps once more, for the true residual.
        direction = checkpoint.direction
        if checkpoint.state is not None and isinstance(A, Sweeps):
            A.turn_to(direction)

        def spent(state: SolverState) -> Checkpoint:
            sweeps, streamed = self._traffic(A)
            seconds = checkpoint.seconds + seconds_without_compiling() - began
            return Checkpoint(
                state,
                checkpoint.sweeps + sweeps,
                checkpoint.bytes_streamed + streamed,
                seconds,
                direction,
                self.rank_count,
                settings_of_system(self.experiment),
            )

        last_write = time.perf_counter()
        with stop_requests(self.reporter) as stop, self.reporter.stage("solve") as stage:

            def monitor(record: IterationRecord) -> bool:
                nonlocal last_write, direction
                direction = A.direction if isinstance(A, Sweeps) else 1
                stage.advance(*solve_progress(record, solver.rtol))
                if self._is_due(time.perf_counter() - last_write):
                    self._save(spent(record.state))
                    last_write = time.perf_counter()
                return stop.is_set()

            solve = method_named(solver.method).solve
            result = solve(A, b, rtol=solver.rtol, maxiter=solver.maxiter, M=M, monitor=monitor, state=checkpoint.state)
        return result, spent(result.state)

    def _traffic(self, A: Operator) -> tuple[int, int]:
        """Return the sweeps so far, and the bytes that they streamed."""
        return (A.sweeps, A.bytes_streamed) if isinstance(A, Sweeps) else (0, 0)

    def _report(
        self, A: Operator, plan: StreamPlan, result: SolveResult | BlockSolveResult, spent: Checkpoint, before: float
    ) -> None:
        """Write everything a finished run leaves; ``before`` are the seconds of earlier runs that it went on from."""
        folder = self.folder
        self.seconds["solve"] = spent.seconds
        self.seconds["compile"] = self.waited + compile_seconds() - self.compiled
        self.seconds["total"] = time.perf_counter() - self.began + before
        ends = self._tips(result)
        # No mean over different load cases, nor over samples that did not converge.
        meant = [] if self.experiment.load.cases else ends
        if self.experiment.load.samples:
            meant = [tip for tip, column in zip(ends, columns_of(result), strict=True) if column.converged]
        summary = describe_solve(
            A,
            plan,
            result,
            rtol=self.experiment.solver.rtol,
            sweeps=spent.sweeps,
            bytes_streamed=spent.bytes_streamed,
            seconds=self.seconds["preconditioner"] + spent.seconds,
            links=self.rank_count,
            budget_nbytes=self.experiment.memory.budget,
        )
        summary |= {
            "unknowns": self.cantilever.unknowns,
            "matrix_nbytes": self._matrix_nbytes(plan),
            "nonzeros": self.cantilever.nnz,
            "quantity": self._quantities(result)[0],
            "tip_deflection": statistics.fmean(meant) if meant else None,
            "beam_theory": beam_theory(self.cantilever, self.experiment.load),
            "gpu_subdivisions": self.experiment.memory.gpu_subdivisions,
            "ranks": self.rank_count,
            "seconds": {
                part: self.seconds[part] for part in ("compile", "plan", "assembly", "preconditioner", "solve", "total")
            },
        }
        if self.experiment.is_block:
            summary |= self._several(columns_of(result), ends, self._quantities(result))
            summary["tip_deflection_deviation"] = statistics.stdev(meant) if len(meant) > 1 else None
        write_json(folder.environment, describe_environment())
        folder.write_residuals([column.residual_norms for column in columns_of(result)])
        if self.experiment.output.field:
            names = load_names(self.experiment.load) if self.experiment.load.cases else None
            folder.write_field(self.cantilever, self._solution(result), names=names)
        write_json(folder.result, summary)  # last of the data: a folder with a result is a whole one
        if self.experiment.output.figures:
            with self.reporter.stage("draw") as stage:
                folder.draw(self.cantilever)
                stage.advance(1.0)
        self.reporter.text("Result", folder.summary())

    def _tips(self, result: SolveResult | BlockSolveResult) -> list[float]:
        """Return the deflection of the tip for every right-hand side, or its twist under torsion."""
        x = CPU.asarray(result.x)
        return tips(self.cantilever, self._quantities(result), x.reshape(len(x), -1))

    def _quantities(self, result: SolveResult | BlockSolveResult) -> list[str]:
        return quantities(self.experiment.load, self.cantilever.dof, len(columns_of(result)))

    def _solution(self, result: SolveResult | BlockSolveResult) -> Iterable[Array]:
        """Return the solution on the host, in parts of whole planes of nodes."""
        return [CPU.asarray(result.x)]

    def _matrix_nbytes(self, plan: StreamPlan) -> int:
        return plan.index.nbytes

    def _several(self, columns: tuple[SolveResult, ...], ends: list[float], names: list[str]) -> dict[str, Any]:
        """Return the result of each load case or sample."""
        results = zip(load_names(self.experiment.load), columns, ends, names, strict=True)
        return {
            "columns": [
                {
                    "name": name,
                    "reason": column.reason.name.lower(),
                    "true_residual": column.true_residual,
                    "tip_deflection": tip,
                    "quantity": quantity,
                }
                for name, column, tip, quantity in results
            ],
            "samples": self.experiment.load.samples,
        }
