"""One system of an experiment: planned, assembled where it is used, and what is reported of a cantilever."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from penstock.driver.inputs import GivenMatrix, GivenVectors
from penstock.driver.open_system import AnyResult, OpenSystem
from penstock.driver.opening import WithImage, nearest
from penstock.driver.progress import Reporter
from penstock.driver.request import Placement, Request
from penstock.experiments.cantilever.configuration import Experiment
from penstock.experiments.cantilever.kernels import start_compilation
from penstock.experiments.cantilever.loads import load_names, right_hand_sides
from penstock.experiments.cantilever.matrix_storage import (
    measure_rates,
    open_store,
    place_experiment,
    place_with_image,
    plan_experiment,
    request_of,
    resident_format,
    streams_from,
)
from penstock.experiments.cantilever.tips import beam_theory, quantities, tips
from penstock.experiments.reporting.checkpoint import Checkpoint
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.reporting.solve_report import columns_of
from penstock.experiments.run import Run
from penstock.fem import Cantilever
from penstock.solvers import SolveResult, StopReason
from penstock.spmv import CPU, Array, Device, Operator
from penstock.spmv.compilation.ahead import Compilation
from penstock.streaming import HeterogeneousMatrix, MemoryBudget, Store, StreamPlan

# Settings on which the system and the iterations depend.
_OF_SYSTEM: dict[str, Any] = dict.fromkeys(("model", "material", "load"), True)
_OF_SYSTEM["memory"] = {"precision"}
_OF_SYSTEM["solver"] = {"preconditioner", "degree", "aggregate_nodes", "options"}


def resolved(experiment: Experiment) -> dict[str, Any]:
    """Return every setting in force, as it can be read again."""
    data: dict[str, Any] = experiment.model_dump(mode="json", exclude_none=True)
    if experiment.memory.budget is None:  # without a budget nothing is streamed, and options of streaming are errors
        data["memory"] = {key: data["memory"][key] for key in ("device", "format", "values", "matrix")}
    del data["load" if experiment.analysis.is_modes else "analysis"]
    if experiment.load.cases is not None:
        data["load"] = {"cases": data["load"]["cases"]}
    return data


class SingleRun(Run):
    """A run of a cantilever, which is itself the source of its matrix."""

    cantilever: Cantilever
    advice: ClassVar[str] = "undo the change in configuration.yaml, or start a run of its own"

    def __init__(self, experiment: Experiment, folder: ResultsFolder, reporter: Reporter) -> None:
        super().__init__(folder, reporter)
        #: The experiment, with the decisions of the run once they are made.
        self.experiment = self._asked_for = experiment
        self.cantilever = experiment.cantilever()
        self.shape = self.cantilever.shape
        self.device = Device.parse(experiment.memory.device)
        self.streams_from = streams_from(experiment, folder.path)
        self.waited = 0.0
        self.rtol, self.maxiter = experiment.solver.rtol, experiment.solver.maxiter
        self.draws, self.checkpoint_seconds = experiment.output.figures, experiment.output.checkpoint_seconds

    def _run(self, *, resume: bool) -> StopReason:
        """Plan, assemble, solve and report; a run that was stopped leaves the matrix to the one that resumes it."""
        reason, matrix = super()._run(resume=resume), self.folder.matrix
        if reason is not StopReason.STOPPED:
            for left in (matrix, *self.folder.path.glob(f"{matrix.name}.partial-*")):
                shutil.rmtree(left, ignore_errors=True)  # the other ones are of runs that were killed while they wrote
        return reason

    def _asked(self) -> tuple[GivenMatrix, Request]:
        return GivenMatrix(self, "source"), request_of(self.experiment, self.device)

    def place(self, request: Request) -> Placement:
        """Plan the run; without an image of the matrix, compile the kernels of the CPU that are not cached, too."""
        self._leave_image(request)
        with self.reporter.part("plan"):
            with_image = place_with_image(self.experiment, request)
            return with_image or place_experiment(self.experiment, request, self._planned(self.experiment))

    def _leave_image(self, request: Request) -> None:
        """Plan anew where an image was unfit: without its cut, which is in the configuration of a run that is resumed."""
        if request.precision == "float64" != self.experiment.memory.precision:
            cut = {"subdivisions": None, "slots": None} if self.resumes else {}
            self.experiment = self._asked_for.changed(memory={"precision": "float64", **cut})
            shutil.rmtree(self.folder.matrix, ignore_errors=True)

    def _planned(self, experiment: Experiment) -> StreamPlan:
        with start_compilation(self.experiment) as compilation:
            if self.device.kind == "cpu":  # its rates are measured on idle cores
                self._wait_for(compilation)
            rates = measure_rates(self.experiment, self.device, self.folder.path)
            plan = plan_experiment(experiment, rates)
            self._wait_for(compilation)
        return plan

    def _wait_for(self, compilation: Compilation) -> None:
        began = time.perf_counter()
        if not compilation.finished:
            with self.reporter.stage("compile") as stage:
                compilation.wait(stage.advance)
        self.waited += time.perf_counter() - began

    def _write_plan(self, placement: Placement) -> None:
        self._settle(placement)
        title, text = placement.facts[-1] if placement.facts else ("", "")
        if title == "rates":  # after the first sweeps
            self.folder.add_to_plan(f"{title:<11} {text}", self.reporter)
        else:
            if "plan" not in self.seconds:  # otherwise an image was unfit
                self._ends("plan")
            text = placement.plan.explain() if placement.image is None else placement.explain()
            self.folder.write_plan(text, self.reporter)

    def _settle(self, placement: Placement) -> None:
        """Write down the decisions of a plan, so that resuming or repeating the run does not depend on new measurements."""
        if self.experiment.memory.budget is not None:
            plan, solver = placement.plan_of_store, self.experiment.solver
            decided: dict[str, Any] = {"format": plan.index.format_name, "subdivisions": len(plan.index.subdivisions)}
            decided["precision"] = placement.precision
            decided["matrix"] = "on_arrival" if self.experiment.on_arrival else "stored"
            if plan.slots:
                decided["slots"] = plan.slots
            self._decide(memory=decided, solver=solver.options_of(placement.spec))

    def _decide(self, **sections: dict[str, Any]) -> None:
        self.experiment = self.experiment.changed(**sections)
        self.folder.write_configuration(resolved(self.experiment))

    def make(self, placement: Placement, resources: contextlib.ExitStack) -> Operator | Store | WithImage:
        """Assemble the matrix in memory, or build or open the store from which it is streamed."""
        if self.experiment.memory.budget is not None:
            return self._stored(placement, resources)
        with self.reporter.stage("assemble"):
            return self._assembled()

    def _stored(self, placement: Placement, resources: contextlib.ExitStack) -> Operator | Store | WithImage:
        """Build or open the store from which the matrix is streamed."""
        plan, planes = placement.plan_of_store, placement.wants_planes
        store = open_store(self.experiment, plan, self.device, self.folder.matrix, self.reporter, planes=planes)
        return store if self.experiment.memory.devices is None else self._shared(store, plan, resources)

    def _assembled(self) -> Operator:
        name, dtype = resident_format(self.experiment), np.dtype(self.experiment.memory.values)
        where = self.device if self.experiment.on_arrival else CPU
        return self.cantilever.matrix(name, values_dtype=dtype, device=where).to_device(self.device)

    def _budget(self) -> MemoryBudget:
        nbytes = self.experiment.memory.budget
        assert nbytes is not None, "a matrix is streamed where there is a budget"
        return MemoryBudget(nbytes)

    def _shared(self, store: Any, plan: StreamPlan, resources: contextlib.ExitStack) -> HeterogeneousMatrix:
        """Open a matrix that two devices share, and write down how."""
        near: Any = nearest(resources.enter_context(store), self.device, self.reporter)
        with self.reporter.stage("divide"):
            A = HeterogeneousMatrix(
                resources.enter_context(near),
                self._budget(),
                device=self.device,
                workload=plan.workload,
                ring=plan.ring,
                rates=plan.rates,
                gpu_subdivisions=self.experiment.memory.gpu_subdivisions,
            )
        self._decide(memory={"gpu_subdivisions": A.division.count})
        self.folder.add_to_plan(A.division.explain(), self.reporter)
        return resources.enter_context(A)

    def _settings(self, placement: Placement) -> dict[str, Any]:
        return self.experiment.model_dump(mode="json", exclude_none=True, include=_OF_SYSTEM)

    def _lasting(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {"memory": {"precision": "float64"}, **settings}  # which checkpoints lack that are older than images

    def _posed(self, system: OpenSystem) -> tuple[GivenVectors, None]:
        with self.reporter.part("loads"):
            b = self._right_hand_sides()
        self._ends("loads")
        system.preconditioner()  # which is timed by itself
        self.device.synchronize()
        self._ends("preconditioner")
        return GivenVectors(b, "b"), None

    def _right_hand_sides(self) -> Array:
        return self.device.asarray(right_hand_sides(self.experiment, self.cantilever))

    def _keep(self, result: AnyResult, spent: Checkpoint) -> None:
        """Write what the solve has reached, unless what is left to do is as quick as that would be."""
        output = self.experiment.output  # the same on all ranks, which write together
        if not (result.converged and not output.field and not output.figures):
            super()._keep(result, spent)

    def _report(self, system: OpenSystem, result: AnyResult, spent: Checkpoint) -> None:
        if self.experiment.output.field:
            names = load_names(self.experiment.load) if self.experiment.load.cases else None
            with self.reporter.part("writing"):
                self.folder.write_field(self.cantilever, self._solution(result), names=names)
        super()._report(system, result, spent)

    def _facts(self, system: OpenSystem, result: AnyResult, spent: Checkpoint) -> dict[str, Any]:
        seconds, columns = self.seconds, columns_of(result)
        ends = self._tips(result)
        # No mean over different load cases, nor over samples that did not converge.
        meant = [] if self.experiment.load.cases else ends
        if self.experiment.load.samples:
            meant = [tip for tip, column in zip(ends, columns, strict=True) if column.converged]
        facts: dict[str, Any] = {
            "nonzeros": self.cantilever.nnz,
            "quantity": self._quantities(result)[0],
            "tip_deflection": statistics.fmean(meant) if meant else None,
            "beam_theory": beam_theory(self.cantilever, self.experiment.load),
            "gpu_subdivisions": self.experiment.memory.gpu_subdivisions,
            "ranks": self.rank_count,
            "seconds": {
                "compile": seconds["compile"] + self.waited,
                "plan": seconds["plan"] - self.waited,
                "assembly": seconds["open"],
                "preconditioner": seconds["preconditioner"],
                "solve": spent.seconds,
                "total": seconds["total"] + self.before.seconds,
            },
        }
        if self.experiment.is_block:
            facts |= self._several(columns, ends, self._quantities(result))
            facts["tip_deflection_deviation"] = statistics.stdev(meant) if len(meant) > 1 else None
        return facts

    def _tips(self, result: AnyResult) -> list[float]:
        """Return the deflection of the tip for every right-hand side, or its twist under torsion."""
        x = CPU.asarray(result.x)
        return tips(self.cantilever, self._quantities(result), x.reshape(len(x), -1))

    def _quantities(self, result: AnyResult) -> list[str]:
        return quantities(self.experiment.load, self.cantilever.dof, len(columns_of(result)))

    def _solution(self, result: AnyResult) -> Iterable[Array]:
        """Return the solution on the host, in parts of whole planes of nodes."""
        return [CPU.asarray(result.x)]

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
