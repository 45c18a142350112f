"""The results folder of a run: written once, shown any number of times."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np

from penstock.driver.progress import Reporter
from penstock.experiments.reporting.atomic import replacing, write_json, write_text
from penstock.experiments.reporting.base_folder import BaseFolder
from penstock.experiments.reporting.summary import quantity_of, summary_of
from penstock.fem import Cantilever, vtkhdf_writer
from penstock.spmv import StoreError
from penstock.streaming import Timeline

FIELD_NAMES = {1: "temperature", 3: "displacement", 6: "displacement"}


class ResultsFolder(BaseFolder):
    """Names and formats of all files in the results folder of a run.

    Parameters
    ----------
    path : path

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from penstock.experiments import ResultsFolder
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     results = ResultsFolder(pathlib.Path(folder))
    ...     results.write_residuals([[1.0, 0.1]])
    ...     results.residuals.name, results.read_residuals()
    ('residuals.csv', [[1.0, 0.1]])
    """

    missing_advice: ClassVar[str] = ": not a finished run; see penstock run --resume"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.plan = path / "plan.txt"
        self.result = path / "result.json"
        self.residuals = path / "residuals.csv"
        self.environment = path / "environment.json"
        self.timeline = path / "timeline.json"
        self.trace = path / "timeline.trace.json"
        self.field = path / "solution.vtkhdf"
        self.modes = path / "modes.vtkhdf"
        self.solution = path / "solution.npy"
        self.solve = path / "solve.json"
        self.checkpoint = path / "checkpoint.npz"
        self.matrix = path / "matrix"
        self.samples = path / "samples"

    def remove_unless_saved(self, error: BaseException) -> None:
        """Remove the folder of a run that failed, or say in the error where its work is and how to resume it."""
        parts = (self.samples.glob(f"*/{name}") for name in (self.result.name, self.checkpoint.name))
        if self.checkpoint.exists() or any(itertools.chain(*parts)):
            command = "solve" if self.solve.exists() else "run"
            error.add_note(f"the work so far is saved; resume with: penstock {command} --resume {self.path}")
        elif self.solution.exists():
            error.add_note(f"the solution is saved in {self.solution}")
        elif self.result.exists():
            error.add_note(f"the results are in {self.path}")
        else:
            self.remove()

    def made_by_runs(self) -> list[Path]:
        """Return what a run may have made in the folder, stores of ranks and partial files included."""
        return [*super().made_by_runs(), *self.path.glob(f"{self.matrix.name}-of-rank-*")]

    def write_plan(self, text: str, reporter: Reporter) -> None:
        """Write a plan and show it."""
        write_text(self.plan, text + "\n")
        reporter.text("Plan", text)

    def add_to_plan(self, text: str, reporter: Reporter) -> None:
        """Write and show what was decided after planning."""
        write_text(self.plan, self.plan.read_text(encoding="utf-8") + text + "\n")
        reporter.text("Division", text)

    def write_residuals(self, histories: list[list[float]]) -> None:
        """Write the residual histories, one line per iteration; where a shorter history has ended, its last value is repeated."""
        names = ["relative_residual", *(f"relative_residual_{number}" for number in range(2, len(histories) + 1))]
        rows = range(max(map(len, histories)))
        lines = [f"{k}," + ",".join(repr(norms[min(k, len(norms) - 1)]) for norms in histories) for k in rows]
        write_text(self.residuals, "\n".join([",".join(["iteration", *names]), *lines]) + "\n")

    def read_residuals(self) -> list[list[float]]:
        """Return the residual histories of all right-hand sides."""
        with open(self.residuals, encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))[1:]
        return [[float(row[column]) for row in rows] for column in range(1, len(rows[0]))]

    def write_field(
        self, cantilever: Cantilever, solution: Iterable[np.ndarray[Any, Any]], *, names: list[str] | None = None
    ) -> None:
        """Write the solution for ParaView: of load cases each under its name, of samples the mean and the deviation.

        The solution comes in parts of whole planes of nodes, one after the other.
        """
        with replacing(self.field) as partial, vtkhdf_writer(partial, cantilever.mesh) as write:
            for part in solution:
                write(_fields_of(part, cantilever.dof, names))

    def draw(self, cantilever: Cantilever | None) -> list[Path]:
        """Draw all pictures for which the folder has data and return their paths; without a body, none of the body."""
        from penstock.experiments.reporting import figures  # here, because importing Matplotlib takes half a second

        result = self.read_json(self.result)
        if result.get("analysis") == "modes":
            return [] if cantilever is None else self._draw_modes(cantilever, result["frequencies"])
        if "stiffness_samples" in result:
            path = self.path / "monte_carlo.png"
            tips = [sample["tip_deflection"] for sample in result["stiffness_samples"] if sample["converged"]]
            figures.draw_monte_carlo(path, tips, quantity_of(result))
            return [path]
        drawn = []
        if "columns" in result:
            drawn.append(self.path / "tip_deflections.png")
            tips_by_name = {column["name"]: column["tip_deflection"] for column in result["columns"]}
            quantities = [quantity_of(column) for column in result["columns"]]
            figures.draw_tip_deflections(drawn[-1], tips_by_name, quantities, samples=bool(result["samples"]))
        drawn.append(self.path / "convergence.png")
        figures.draw_convergence(drawn[-1], self.read_residuals(), result["true_residual"] or 0.0, result["rtol"])
        if self.timeline.exists():
            drawn.append(self.path / "timeline.png")
            powers = result.get("products_a_sweep", 1)
            of = f" of {powers} products" if powers > 1 else ""
            title = f"one sweep{of}, overlap {'on' if result['overlap'] else 'off'}, {result['device']}"
            figures.draw_timeline(drawn[-1], Timeline.from_json(self.read_json(self.timeline)), title)
        if cantilever is not None and self.field.exists():
            drawn += self._draw_body(cantilever, result)
        return drawn

    def _draw_body(self, cantilever: Cantilever, result: dict[str, Any]) -> list[Path]:
        """Draw the deformed body, unless the solution has values that are not finite."""
        from penstock.experiments.reporting import figures

        with h5py.File(self.field) as file:
            fields = file["VTKHDF/PointData"]
            first = result.get("columns", [{}])[0].get("name", "")
            name = FIELD_NAMES[cantilever.dof]
            values = np.asarray(fields[name if name in fields else f"{name}_{first}"]).swapaxes(0, 2)
        if not np.isfinite(values).all():
            return []
        path = self.path / "deformed.png"
        title = "mean of the samples" if result.get("samples") else first.replace("_", " ", 1)
        figures.draw_deformed(path, cantilever.mesh, values, title)
        return [path]

    def _draw_modes(self, cantilever: Cantilever, frequencies: list[float]) -> list[Path]:
        """Draw the first modes that were written."""
        from penstock.experiments.reporting import figures

        if not self.modes.exists():
            return []
        path = self.path / "modes.png"
        with h5py.File(self.modes) as file:
            fields = file["VTKHDF/PointData"][FIELD_NAMES[cantilever.dof]]
            shapes = [
                np.asarray(fields[number]).swapaxes(0, 2) for number in range(min(len(frequencies), figures.MODES))
            ]
        figures.draw_modes(path, cantilever.mesh, shapes, frequencies)
        return [path]

    def conclude(self, result: dict[str, Any], timings: dict[str, float], reporter: Reporter) -> None:
        """Add to a result, which is written, what the parts of the command took until now, and show it."""
        result = {**result, "timings": timings}
        try:
            write_json(self.result, result)
        except StoreError as error:  # the result is there without them
            reporter.text("Warning", str(error))
        reporter.text("Result", summary_of(result))

    def summary(self) -> str:
        """Return the result in words, one line per fact."""
        return summary_of(self.read_json(self.result))


def _fields_of(rows: np.ndarray[Any, Any], dof: int, names: list[str] | None) -> dict[str, np.ndarray[Any, Any]]:
    """Return the fields of some rows of a solution, of load cases by their names, else of the mean of the columns."""
    fields, columns = {}, rows.reshape(len(rows), -1)
    if names is not None:
        named = {f"_{name}": column for name, column in zip(names, columns.T, strict=True)}
    else:
        named = {"": columns.mean(axis=1)}
        if columns.shape[1] > 1:
            named["_deviation"] = columns.std(axis=1, ddof=1)
    for suffix, column in named.items():
        values = column.reshape(-1, dof)
        fields[FIELD_NAMES[dof] + suffix] = values[:, 0] if dof == 1 else values[:, :3]
        if dof == 6:
            fields["rotation" + suffix] = values[:, 3:]
    return fields
