"""The folder a run leaves behind: written once, shown any number of times."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from penstock.experiments import figures
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
        self.checkpoint = path / "checkpoint.npz"
        self.matrix = path / "matrix"

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

    def write_field(self, cantilever: Cantilever, solution: np.ndarray[Any, Any]) -> None:
        """Write the solution for ParaView."""
        values = solution.reshape(-1, cantilever.dof)
        name = _FIELD[cantilever.dof]
        fields = {name: values[:, 0] if cantilever.dof == 1 else values[:, :3]}
        if cantilever.dof == 6:
            fields["rotation"] = values[:, 3:]
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
                figures.draw_deformed(drawn[-1], cantilever.mesh, values)
            else:
                drawn.pop()
        return drawn

    def summary(self) -> str:
        """Return the result in words, one line a fact."""
        result = self.read_json(self.result)
        seconds = result["seconds"]
        lines = [
            f"{result['message']}",
            f"unknowns         {result['unknowns']:,}, {result['nonzeros']:,} stored scalars, "
            f"matrix of {format_nbytes(result['matrix_nbytes'])}",
            f"iterations       {result['iterations']}, true relative residual {_number(result['true_residual'])}",
            f"tip deflection   {_number(result['tip_deflection'])}",
        ]
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
            lines.append(
                f"a sweep          {measured * 1e3:.3g} ms with all vector work, {predicted * 1e3:.3g} ms predicted; "
                f"{100 * result['link_fraction']:.3g} % of the link's rate, {100 * result['memory_fraction']:.3g} % of "
                "the memory's" + (", through staging buffers" if result["staged"] else "")
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


def _without_nan(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_nan(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without_nan(value) for value in data]
    if isinstance(data, float) and not np.isfinite(data):
        return None
    return data
