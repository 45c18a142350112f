"""One system solved in memory, streamed without and with overlap, and with products that share sweeps: what each way costs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.experiments import figures
from penstock.experiments.configuration import Experiment, read_experiment
from penstock.experiments.progress import Reporter
from penstock.experiments.results import ResultsFolder, write_json, write_text
from penstock.experiments.run import resume_experiment, run_experiment
from penstock.experiments.single_run import resolved
from penstock.spmv import InputError, format_nbytes

__all__ = ["WAYS", "ComparisonFolder", "compare_experiment"]

_BRIEF_SECONDS = 1.0  # A solve that takes less is repeated: the first one may have taken as long to load kernels.


@dataclass(frozen=True)
class Way:
    """A way to solve the system of an experiment.

    Parameters
    ----------
    title : str
    memory, solver : callable
        From the sections of the experiment, what is different.
    """

    title: str
    memory: Callable[[Experiment], dict[str, Any]]
    solver: Callable[[Experiment], dict[str, Any]]


def _plain(experiment: Experiment) -> dict[str, Any]:
    """Return a preconditioner whose iterations take one product."""
    kind = experiment.solver.preconditioner
    return {"preconditioner": "block_jacobi" if kind == "chebyshev" else kind}


def _in_memory(experiment: Experiment) -> dict[str, Any]:
    """Return what leaves the matrix resident, without all that says how to stream."""
    defaults = type(experiment.memory)().model_dump(exclude={"device", "format", "values"})
    return {**defaults, "budget": None}


WAYS: dict[str, Way] = {
    "memory": Way("in memory", _in_memory, _plain),
    "no_overlap": Way("streamed, no overlap", lambda of: {"overlap": False}, _plain),
    "overlap": Way("streamed, overlap", lambda of: {"overlap": True}, _plain),
    "wavefront": Way(
        "streamed, many products a sweep", lambda of: {"overlap": True}, lambda of: {"preconditioner": "chebyshev"}
    ),
}


class ComparisonFolder:
    """Names of everything that a comparison leaves: a results folder for each way, and what they come to together.

    Parameters
    ----------
    path : path
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.configuration = path / "experiment.yaml"  # another name than in the folder of a run
        self.records = path / "comparison.json"
        self.table = path / "comparison.md"
        self.figure = path / "comparison.png"

    def way(self, name: str) -> ResultsFolder:
        """Return the results folder of a way."""
        return ResultsFolder(self.path / name)


def compare_experiment(
    experiment: Experiment | None, directory: str | Path, *, reporter: Reporter | None = None
) -> tuple[ComparisonFolder, bool]:
    """Solve the system of an experiment in all :data:`WAYS`.

    Parameters
    ----------
    experiment : Experiment or None
        One system and one right-hand side. Without ``memory.budget``, a quarter of its matrix is taken. None goes on with
        the comparison in the folder, where finished ways stay as they are.
    directory : path
    reporter : Reporter, optional
        Told how it goes.

    Returns
    -------
    ComparisonFolder, bool
        The folder, and whether all ways have ended: an interrupt leaves the rest for later. A way that is refused, such as a
        matrix that does not fit the memory, is noted with its reason. A solve of less than a second is made twice.

    Raises
    ------
    InputError
        If the experiment has samples or several right-hand sides, or there is nothing to go on with.
    """
    reporter, folder = reporter or Reporter(), ComparisonFolder(Path(directory))
    if experiment is None:
        if not folder.configuration.exists():
            raise InputError(
                f"{folder.path} holds no {folder.configuration.name}; there is no comparison to go on with"
            )
        experiment = read_experiment(folder.configuration)
    else:
        experiment = _with_budget(experiment)
        ResultsFolder(folder.path).make("choose another --output, or go on there with --resume")
        write_text(folder.configuration, yaml.safe_dump(resolved(experiment), sort_keys=False))
    records: list[dict[str, Any]] = []
    for name, way in WAYS.items():
        reporter.text("Way", way.title)
        record = _solved(name, way, experiment, folder.way(name), reporter)
        if record is None:
            return folder, False
        records.append(record)
        _write(folder, records)  # what is done stays done
    return folder, True


def _with_budget(experiment: Experiment) -> Experiment:
    """Refuse what is not one system, and take a quarter of the matrix for a budget that is not given."""
    if experiment.material.samples is not None or experiment.is_block:
        raise InputError("a comparison takes one system and one right-hand side; leave out samples and cases")
    if experiment.memory.store is not None:
        raise InputError("memory.store keeps one cut of the matrix, but every way has its own; leave it out")
    if experiment.memory.budget is not None:
        return experiment
    nbytes = experiment.cantilever().nnz * (4 if experiment.memory.values == "float32" else 8)
    return _changed(experiment, memory={"budget": nbytes // 4})


def _changed(experiment: Experiment, **sections: dict[str, Any]) -> Experiment:
    """Return an experiment with other values in some sections."""
    update = {name: getattr(experiment, name).model_copy(update=values) for name, values in sections.items()}
    return experiment.model_copy(update=update)


def _solved(
    name: str, way: Way, experiment: Experiment, folder: ResultsFolder, reporter: Reporter
) -> dict[str, Any] | None:
    """Solve in one way, or go on there, and return what it took; None if it was interrupted."""
    refused = folder.path / "refused.json"
    if refused.exists():
        return dict(folder.read_json(refused))
    if not folder.result.exists():
        try:
            if folder.checkpoint.exists():
                outcome = resume_experiment(folder.path, reporter=reporter)
            else:
                changed = _changed(experiment, memory=way.memory(experiment), solver=way.solver(experiment))
                for _ in range(2):
                    # Of a run that was killed before its first checkpoint, or was brief.
                    shutil.rmtree(folder.path, ignore_errors=True)
                    outcome = run_experiment(changed, folder.path, reporter=reporter)
                    if outcome.interrupted or folder.read_json(folder.result)["seconds"]["solve"] >= _BRIEF_SECONDS:
                        break
        except (InputError, MemoryError) as error:  # of others the cause may pass
            record = {"way": name, "title": way.title, "refused": str(error)}
            folder.path.mkdir(exist_ok=True)
            write_json(refused, record)
            reporter.text("Refused", str(error))
            return record
        if outcome.interrupted:
            return None
    result, solver = folder.read_json(folder.result), read_experiment(folder.configuration).solver
    kept = ("converged", "iterations", "sweeps", "products_a_sweep", "bytes_streamed", "true_residual", "format",
            "sweep_seconds", "device")  # fmt: skip
    return {
        "way": name,
        "title": way.title,
        **{key: result[key] for key in kept},
        "seconds": result["seconds"]["solve"],
        "preconditioner": solver.preconditioner,
        "products": solver.products if solver.preconditioner == "chebyshev" else 1,
    }


def _write(folder: ComparisonFolder, records: list[dict[str, Any]]) -> None:
    write_text(folder.records, json.dumps(records, indent=1) + "\n")
    write_text(folder.table, _table(records))
    ended = [record for record in records if "refused" not in record]
    if ended:
        histories = [folder.way(record["way"]).read_residuals()[0] for record in ended]
        figures.draw_comparison(folder.figure, ended, histories)


def _table(records: list[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    by_way = {record["way"]: record for record in records if "refused" not in record}
    converged = {way: record["seconds"] for way, record in by_way.items() if record["converged"]}
    memory, overlap = converged.get("memory"), converged.get("overlap")
    lines = [
        "| way | solve | x memory | x faster than overlap alone | format | products an iteration | of them in a sweep "
        "| iterations | sweeps | moved | a sweep | true residual |",
        "|" + "---|" * 12,
    ]
    for record in records:
        if "refused" in record:
            lines.append(f"| {record['title']} | refused: {record['refused']} |" + " |" * 10)
            continue
        seconds = record["seconds"]
        whole = record["converged"]
        over = f"{seconds / memory:.2f}" if memory and whole else "-"
        gain = f"{overlap / seconds:.2f}" if overlap and whole else "-"
        ended = "" if whole else ", not converged"
        cells = (
            record["title"], f"{seconds:.3g} s{ended}", over, gain, record["format"], record["products"],
            record["products_a_sweep"], record["iterations"], record["sweeps"], format_nbytes(record["bytes_streamed"]),
            f"{1e3 * (record['sweep_seconds'] or 0):.3g} ms", f"{record['true_residual']:.2e}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"
