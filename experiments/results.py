"""The folder a run leaves behind: written once, shown any number of times."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from penstock.experiments import figures
from penstock.experiments.progress import Reporter
from penstock.fem import Cantilever, write_vtkhdf
from penstock.spmv import InputError, StoreError, format_nbytes
from penstock.streaming import Timeline

__all__ = ["ResultsFolder", "write_json", "write_text"]

_FIELD = {1: "temperature", 3: "displacement", 6: "displacement"}


class ResultsFolder:
    """Names and formats of everything in a results folder.

    Parameters
    ----------
    path : path
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.configuration = path / "configuration.yaml"
        self.plan = path / "plan.txt"
        self.result = path / "result.json"
        self.residuals = path / "residuals.csv"
        self.environment = path / "environment.json"
        self.timeline = path / "timeline.json"
        self.trace = path / "timeline.trace.json"
        self.field = path / "solution.vtkhdf"
        self.solution = path / "solution.npy"
        self.checkpoint = path / "checkpoint.npz"
        self.matrix = path / "matrix"
        self.samples = path / "samples"

    def make(self, advice: str) -> None:
        """Make the folder.

        Raises
        ------
        InputError
            If there is something in it, or it is a file; the advice follows.
        StoreError
            If it cannot be made.
        """
        if self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
            raise InputError(f"{self.path} is not an empty folder; {advice}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make {self.path}: {error.strerror or error}") from error

    def write_plan(self, text: str, reporter: Reporter) -> None:
        """Write a plan and show it."""
        write_text(self.plan, text + "\n")
        reporter.text("Plan", text)

    def write_residuals(self, histories: list[list[float]]) -> None:
        """Write the residual histories of all right-hand sides, one line an iteration; a shorter one keeps its last value."""
        names = ["relative_residual", *(f"relative_residual_{number}" for number in range(2, len(histories) + 1))]
        rows = range(max(map(len, histories)))
        lines = [f"{k}," + ",".join(repr(norms[min(k, len(norms) - 1)]) for norms in histories) for k in rows]
        write_text(self.residuals, "\n".join([",".join(["iteration", *names]), *lines]) + "\n")

    def read_residuals(self) -> list[list[float]]:
        """Read what :meth:`write_residuals` wrote."""
        with open(self.residuals, encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))[1:]
        return [[float(row[column]) for row in rows] for column in range(1, len(rows[0]))]

    def read_json(self, file: Path) -> Any:
        """Read a JSON file of this folder.

        Raises
        ------
        InputError
            If it is not there or damaged.
        """
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(
                f"{self.path} holds no {file.name}: not a finished run; see penstock run --resume"
            ) from None
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {file}: {error}") from error

    def write_field(self, cantilever: Cantilever, solution: np.ndarray[Any, Any], *, samples: bool = False) -> None:
        """Write the solution for ParaView: of several load cases each under its number, of samples mean and deviation."""
        name, fields = _FIELD[cantilever.dof], {}
        columns = solution.reshape(len(solution), -1)
        named = {f"_{number}": column for number, column in enumerate(columns.T[1:], 2)}
        if samples:
            named = {"_deviation": columns.std(axis=1, ddof=1)} if columns.shape[1] > 1 else {}
        for suffix, column in {"": columns.mean(axis=1) if samples else columns[:, 0], **named}.items():
            values = column.reshape(-1, cantilever.dof)
            fields[name + suffix] = values[:, 0] if cantilever.dof == 1 else values[:, :3]
            if cantilever.dof == 6:
                fields["rotation" + suffix] = values[:, 3:]
        temporary = self.field.with_name(self.field.name + ".partial")
        try:
            write_vtkhdf(temporary, cantilever.mesh, fields)
            temporary.replace(self.field)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StoreError(f"cannot write {self.field}: {error}") from error

    def draw(self, cantilever: Cantilever | None) -> list[Path]:
        """Draw every picture for which the folder holds data, and return their paths; without a body, none of it."""
        result, drawn = self.read_json(self.result), []
        if "stiffness_samples" in result:
            drawn.append(self.path / "monte_carlo.png")
            tips = [sample["tip_deflection"] for sample in result["stiffness_samples"] if sample["converged"]]
            figures.draw_monte_carlo(drawn[-1], tips, _quantity(result))
            return drawn
        if "columns" in result:
            drawn.append(self.path / "tip_deflections.png")
            named = {column["name"]: column["tip_deflection"] for column in result["columns"]}
            figures.draw_tip_deflections(drawn[-1], named, _quantity(result), samples=bool(result["samples"]))
        drawn.append(self.path / "convergence.png")
        figures.draw_convergence(drawn[-1], self.read_residuals(), result["true_residual"] or 0.0, result["rtol"])
        if self.timeline.exists():
            drawn.append(self.path / "timeline.png")
            title = f"one sweep, overlap {'on' if result['overlap'] else 'off'}, {result['device']}"
            figures.draw_timeline(drawn[-1], Timeline.from_json(self.read_json(self.timeline)), title)
        if cantilever is not None and self.field.exists():
            drawn.append(self.path / "deformed.png")
            with h5py.File(self.field) as file:
                values = np.asarray(file["VTKHDF/PointData"][_FIELD[cantilever.dof]]).swapaxes(0, 2)
            if np.isfinite(values).all():
                shown = (
                    "mean of the samples" if result.get("samples") else result.get("columns", [{}])[0].get("name", "")
                )
                figures.draw_deformed(drawn[-1], cantilever.mesh, values, shown.replace("_", " ", 1))
            else:
                drawn.pop()
        return drawn

    def summary(self) -> str:
        """Return the result in words, one line a fact."""
        result = self.read_json(self.result)
        seconds = result["seconds"]
        if "stiffness_samples" in result:
            return _samples_summary(result)
        lines = [
            f"{result['message']}",
            f"unknowns         {result['unknowns']:,}, {result['nonzeros']:,} nonzeros, "
            f"matrix of {format_nbytes(result['matrix_nbytes'])} as {result['format']}",
            f"iterations       {result['iterations']}, true relative residual {_number(result['true_residual'])}",
        ]
        if result.get("tip_deflection") is not None:
            lines.append(f"{_quantity(result):<16} {_deflection(result)}")
        if result.get("columns") and not result["samples"]:
            lines.append(f"{_quantity(result):<16} of each load case")
            lines += [f"  {column['name']:<14} {_number(column['tip_deflection'])}" for column in result["columns"]]
        if result.get("largest_error") is not None:
            lines.append(
                f"error            {result['largest_error']:.3g} at most, against the known solution, all ones"
            )
        if result["budget_nbytes"] is not None:
            lines.append(
                f"matrix storage   {format_nbytes(result['peak_budget_nbytes'])} at most, of a budget of "
                f"{format_nbytes(result['budget_nbytes'])}"
            )
        if result["bytes_streamed"]:
            lines.append(
                f"streamed         {format_nbytes(result['bytes_streamed'])} in {result['sweeps']} sweeps, "
                f"{result['bytes_streamed'] / max(seconds['solve'], 1e-9) / 1e9:.3g} GB/s over the whole solve"
                + (", read around the page cache" if result["direct_reads"] else "")
            )
        if result["link_fraction"] is not None:
            predicted, measured = result["predicted_sweep_seconds"], result["sweep_seconds"]
            memory = result["memory_fraction"]
            lines.append(
                f"a sweep          {measured * 1e3:.3g} ms with all vector work"
                + ("" if predicted is None else f", {predicted * 1e3:.3g} ms predicted")
                + f"; {100 * result['link_fraction']:.3g} % of the link's rate"
                + ("" if memory is None else f", {100 * memory:.3g} % of the memory's")
                + (", through staging buffers" if result["staged"] else "")
            )
        lines.append("seconds          " + ", ".join(f"{name} {value:.2f}" for name, value in seconds.items()))
        return "\n".join(lines)


def write_text(file: Path, text: str) -> None:
    """Write a text whole or not at all."""
    temporary = file.with_name(file.name + ".partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write {file}: {error.strerror or error}") from error


def write_json(file: Path, data: Any) -> None:
    """Write plain values as JSON; numbers that are not finite become null, as JSON has none."""
    write_text(file, json.dumps(_without_nan(data), indent=2) + "\n")


def _number(value: float | None) -> str:
    return "not a finite number" if value is None else f"{value:.6g}"


def _quantity(result: dict[str, Any]) -> str:
    return str(result.get("quantity", "tip deflection"))  # older folders do not say


def _deflection(result: dict[str, Any]) -> str:
    """Return the deflection, and of samples what is known of its mean."""
    text, deviation = _number(result["tip_deflection"]), result.get("tip_deflection_deviation")
    if deviation is None:
        return text
    samples = result.get("stiffness_samples")
    converged = [column["reason"] == "converged" for column in result.get("columns", ())]
    count = sum(converged) if samples is None else sum(sample["converged"] for sample in samples)
    return f"mean {text} +- {deviation / count**0.5:.2g}, standard deviation {deviation:.4g}, of {count} samples"


def _samples_summary(result: dict[str, Any]) -> str:
    samples = result["stiffness_samples"]
    failed = [str(sample["seed"]) for sample in samples if not sample["converged"]]
    iterations = [sample["iterations"] for sample in samples]
    lines = [
        f"{len(samples) - len(failed)} of {len(samples)} samples of the stiffness converged"
        + (f"; not those of seeds {', '.join(failed)}" if failed else ""),
        f"{_quantity(result):<16} {_deflection(result)}",
        f"iterations       {min(iterations)} to {max(iterations)} a sample, {result['unknowns']:,} unknowns",
        f"seconds          {result['seconds']['solve']:.2f} for the solves",
    ]
    return "\n".join(lines)


def _without_nan(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_nan(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without_nan(value) for value in data]
    if isinstance(data, float) and not np.isfinite(data):
        return None
    return data
