"""The modes of an experiment: opened like a system that is solved, searched with checkpoints, and reported."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.driver.inputs import GivenMatrix
from penstock.driver.modes_search import ModesSearch
from penstock.driver.open_system import OpenSystem
from penstock.driver.opening import open_system
from penstock.driver.request import Request
from penstock.experiments.cantilever.single_run import SingleRun
from penstock.experiments.reporting.atomic import replacing, write_json
from penstock.experiments.reporting.checkpoint import Checkpoint
from penstock.experiments.reporting.environment import describe_environment
from penstock.experiments.reporting.interrupts import stop_requests
from penstock.experiments.reporting.modes_checkpoint import read_modes_checkpoint, write_modes_checkpoint
from penstock.fem import write_vtkhdf_series
from penstock.solvers import ModesRecord, StopReason
from penstock.solvers.eigen.result import Modes
from penstock.spmv import CPU, Array, StoreError
from penstock.spmv.compilation.watch import compile_seconds, seconds_without_compiling

# Settings on which the modes depend.
_OF_BODY: dict[str, Any] = dict.fromkeys(("model", "material"), True)
_OF_BODY["analysis"] = {"kind", "count", "density", "lumped", "rotary_inertia"}
# Iterations of a block at most, unless the experiment says how many.
_MOST_ITERATIONS = 1000


class ModesRun(SingleRun):
    """A run of a cantilever whose lowest modes are found."""

    def _read_checkpoint(self, unknowns: int) -> Checkpoint:
        state, settings, seconds = read_modes_checkpoint(self.folder.checkpoint, unknowns)
        return Checkpoint(state, seconds=seconds, settings=settings)

    def _settings(self, placement: Any) -> dict[str, Any]:
        return self.experiment.model_dump(mode="json", exclude_none=True, include=_OF_BODY)

    def _lasting(self, settings: dict[str, Any]) -> dict[str, Any]:
        return settings

    def _run_with(self, matrix: GivenMatrix, request: Request) -> StopReason:
        where: dict[str, Any] = {"folder": self.streams_from, "reporter": self.reporter}
        with open_system(matrix, request, **where, announce=self._announce) as system, request.device.current():
            self._ends("open")
            system.preconditioner()
            self.device.synchronize()
            self._ends("preconditioner")
            modes = self._found(system)
            self._ends("modes")
            reason = StopReason[modes.reason.name]
            if reason is not StopReason.STOPPED:
                self._report_modes(system, modes)
        if modes.converged:
            self.folder.checkpoint.unlink(missing_ok=True)
        return reason

    def _found(self, system: OpenSystem) -> Modes:
        """Search for the modes, with checkpoints."""
        analysis, began, written = self.experiment.analysis, seconds_without_compiling(), time.perf_counter()
        with self.reporter.part("assemble"):
            mass = self.experiment.mass()

        def save(record: ModesRecord) -> None:
            spent = self.before.seconds + seconds_without_compiling() - began
            try:
                with self.reporter.part("writing"):
                    write_modes_checkpoint(self.folder.checkpoint, record.state, self._settings(system.decided), spent)
            except StoreError as error:  # a full disk must not end a search that can go on
                self.reporter.text("Warning", str(error))

        with stop_requests(self.reporter) as stop:

            def monitor(record: ModesRecord) -> bool:
                nonlocal written
                stops, last = stop.is_set(), maxiter is not None and record.iteration >= maxiter
                if stops or last or self._is_due(time.perf_counter() - written):
                    save(record)
                    written = time.perf_counter()
                return stops

            maxiter, state = self.maxiter, self.before.state
            most = _MOST_ITERATIONS if maxiter is None else maxiter
            search = ModesSearch(analysis.count, mass, analysis.tol, most, monitor, self.reporter, state)
            return search.iteratively(system)

    def _report_modes(self, system: OpenSystem, modes: Modes) -> None:
        """Write everything that a finished run leaves."""
        folder = self.folder
        if self.experiment.output.field:
            with self.reporter.part("writing"), replacing(folder.modes) as partial:
                fields = self._fields(CPU.asarray(modes.vectors))
                name = "temperature" if self.cantilever.dof == 1 else "displacement"
                write_vtkhdf_series(partial, self.cantilever.mesh, name, modes.frequencies.tolist(), fields)
        self.seconds["compile"] = compile_seconds() - self.compiled
        self.seconds["total"] = time.perf_counter() - self.began
        self._result = self._described(system, modes)
        with self.reporter.part("writing"):
            write_json(folder.environment, describe_environment())
            write_json(folder.result, self._result)  # last of the data: a folder with a result is a whole one
        if self.draws:
            with self.reporter.stage("draw") as stage:
                folder.draw(self.cantilever)
                stage.advance(1.0)

    def _fields(self, vectors: Array) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the modes one by one: displacements of nodes, or temperatures."""
        dof = self.cantilever.dof
        for number in range(vectors.shape[1]):
            of_nodes = np.ascontiguousarray(vectors[:, number]).reshape(-1, dof)
            yield of_nodes[:, 0] if dof == 1 else of_nodes[:, :3]

    def _described(self, system: OpenSystem, modes: Modes) -> dict[str, Any]:
        plan, seconds = system.decided.stream_plan, self.seconds
        totals = np.diag(modes.masses)
        return {
            "analysis": "modes",
            "converged": modes.converged,
            "reason": modes.reason.name.lower(),
            "message": modes.message,
            "unknowns": self.cantilever.unknowns,
            "nonzeros": self.cantilever.nnz,
            "matrix_nbytes": plan.index.nbytes,
            "format": plan.index.format_name,
            "device": str(system.A.device),
            "iterations": modes.iterations,
            "sweeps": modes.sweeps,
            "bytes_streamed": modes.bytes_streamed,
            "zeros": modes.zeros,
            "missed": modes.missed,
            "cuts_cluster": modes.cuts_cluster,
            "values": modes.values.tolist(),
            "frequencies": modes.frequencies.tolist(),
            "residuals": modes.residuals.tolist(),
            "errors": modes.errors.tolist(),
            "effective_mass": {
                axis: (modes.translations[:, number] ** 2 / totals[number]).tolist()
                for number, axis in enumerate("xyz"[: len(totals)])
            },
            "tol": self.experiment.analysis.tol,
            "seconds": {
                "compile": seconds["compile"] + self.waited,
                "plan": seconds["plan"] - self.waited,
                "assembly": seconds["open"],
                "preconditioner": seconds["preconditioner"],
                "solve": seconds["modes"] + self.before.seconds,
                "total": seconds["total"] + self.before.seconds,
            },
            "earlier_seconds": self.before.seconds,
        }
