"""Solves one system in memory, streamed without and with overlap, with several powers of A per sweep and with an image of A."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from penstock.driver.progress import Reporter
from penstock.experiments.cantilever.configuration import Experiment, read_experiment
from penstock.experiments.cantilever.matrix_storage import place_with_image, request_of
from penstock.experiments.cantilever.run import resume_experiment, run_experiment
from penstock.experiments.cantilever.single_run import resolved
from penstock.experiments.reporting.atomic import write_json, write_text
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.reporting.study import Record, Study, StudyFolder, StudyStopped
from penstock.experiments.reporting.summary import solve_seconds
from penstock.spmv import BudgetError, InputError, format_nbytes

_BRIEF_SECONDS = 1.0  # a shorter solve is repeated, because the first one may include loading kernels
_FROM_RESULT = (
    "converged", "iterations", "sweeps", "products_a_sweep", "bytes_streamed", "true_residual", "format", "sweep_seconds",
    "device", "precision",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A way to solve the system of an experiment; its functions return the sections of the experiment that differ."""

    title: str
    memory: Callable[[Experiment], dict[str, Any]]
    solver: Callable[[Experiment], dict[str, Any]]


def _one_power(experiment: Experiment) -> dict[str, Any]:
    """Return a preconditioner that needs one product per iteration."""
    polynomial = experiment.preconditioner.products_per_iteration(streamed=True) != (1,)
    return {"preconditioner": "block_jacobi" if polynomial else experiment.solver.chosen}


def _in_memory(experiment: Experiment) -> dict[str, Any]:
    """Return memory settings without a budget, and without all settings that need one."""
    defaults = type(experiment.memory)().model_dump(exclude={"device", "format", "values", "matrix"})
    return {**defaults, "budget": None}


def _streamed(*, overlap: bool = True, precision: str = "float64") -> dict[str, Any]:
    """Return memory settings with a budget, which do not depend on those of the experiment."""
    return {"overlap": overlap, "precision": precision, "matrix": "stored"}


#: The variants by name, which is also the name of their folder.
VARIANTS: dict[str, Variant] = {
    "memory": Variant("in memory", _in_memory, _one_power),
    "no_overlap": Variant("streamed, no overlap", lambda experiment: _streamed(overlap=False), _one_power),
    "overlap": Variant("streamed, overlap", lambda experiment: _streamed(), _one_power),
    "wavefront": Variant(
        "streamed, several powers per sweep",
        lambda experiment: _streamed(),
        lambda experiment: {"preconditioner": "chebyshev"},
    ),
    "coarse_level": Variant(
        "streamed, with a coarse level",
        lambda experiment: _streamed(),
        lambda experiment: {"preconditioner": "smoothed_aggregation"},
    ),
    "on_arrival": Variant(
        "assembled on arrival, with a coarse level",
        lambda experiment: {**_streamed(), "matrix": "on_arrival"},
        lambda experiment: {"preconditioner": "smoothed_aggregation"},
    ),
    "image_no_overlap": Variant(
        "image in memory, residuals streamed, no overlap",
        lambda experiment: _streamed(overlap=False, precision="auto"),
        lambda experiment: {"preconditioner": "smoothed_aggregation"},
    ),
    "image": Variant(
        "image in memory, residuals streamed, overlap",
        lambda experiment: _streamed(precision="auto"),
        lambda experiment: {"preconditioner": "smoothed_aggregation"},
    ),
}


class ComparisonFolder(StudyFolder):
    """The folder of a comparison: a results folder for each variant, the records, a table and a figure."""

    configuration_name: ClassVar[str] = "experiment.yaml"  # unlike in the folder of a run
    records_name: ClassVar[str] = "comparison.json"
    is_list: ClassVar[bool] = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.table = path / "comparison.md"
        self.figure = path / "comparison.png"

    def variant(self, name: str) -> ResultsFolder:
        """Return the results folder of a variant."""
        return ResultsFolder(self.path / name)


class Comparison(Study[str, ComparisonFolder]):
    """Solves the system of an experiment in all variants; a point is the name of a variant."""

    refusals: ClassVar[tuple[type[Exception], ...]] = (InputError, MemoryError)  # other errors may not occur again
    stops_between_points: ClassVar[bool] = False  # a run stops between two iterations

    def __init__(self, experiment: Experiment, folder: ComparisonFolder, reporter: Reporter | None = None) -> None:
        super().__init__(folder, reporter)
        self.experiment = experiment

    def points(self) -> list[str]:
        """Return the names of all variants; those with an image only where the matrix has one that fits."""
        return [name for name in VARIANTS if self._is_possible(self._changed(name))]

    @staticmethod
    def _is_possible(experiment: Experiment) -> bool:
        if experiment.memory.precision == "float64":
            return True
        try:
            return place_with_image(experiment, request_of(experiment)) is not None
        except (BudgetError, InputError):
            return False

    def _changed(self, name: str) -> Experiment:
        """Return the experiment of a variant."""
        variant, experiment = VARIANTS[name], self.experiment
        return experiment.changed(memory=variant.memory(experiment), solver=variant.solver(experiment))

    def is_done(self, point: str) -> bool:
        """Return whether there is a record of a variant."""
        return any(record["way"] == point for record in self.records)

    def measure(self, point: str) -> list[Record]:
        """Solve in one variant, or resume there, and return its record."""
        folder, title = self.folder.variant(point), VARIANTS[point].title
        self.reporter.text("Variant", title)
        refused = self._refused_file(point)
        if refused.exists():
            return [folder.read_json(refused)]
        if not folder.result.exists():
            self._solve(point, folder)
        result, spec = folder.read_json(folder.result), read_experiment(folder.configuration).preconditioner
        return [
            {
                "way": point,
                "title": title,
                **{key: result[key] for key in _FROM_RESULT},
                "seconds": solve_seconds(result),
                "setup_seconds": result["seconds"].get("preconditioner"),
                "preconditioner": spec.name,
                "products": spec.products_per_iteration(streamed=True)[0],
            }
        ]

    def _solve(self, name: str, folder: ResultsFolder) -> None:
        if folder.checkpoint.exists():
            if resume_experiment(folder.path, reporter=self.reporter).interrupted:
                raise StudyStopped
            return
        changed = self._changed(name)
        for _ in range(2):
            # Remove a run that was killed before its first checkpoint, or a brief one.
            shutil.rmtree(folder.path, ignore_errors=True)
            if run_experiment(changed, folder.path, reporter=self.reporter).interrupted:
                raise StudyStopped
            if solve_seconds(folder.read_json(folder.result)) >= _BRIEF_SECONDS:
                break

    def _refused_file(self, point: str) -> Path:
        return self.folder.variant(point).path / "refused.json"

    def refused(self, point: str, error: Exception) -> list[Record]:
        """Record why a variant is not possible, for example because the matrix does not fit in memory."""
        record = {"way": point, "title": VARIANTS[point].title, "refused": str(error)}
        path = self._refused_file(point)
        path.parent.mkdir(exist_ok=True)
        write_json(path, record)
        self.reporter.text("Refused", str(error))
        return [record]

    def save(self) -> None:
        """Write the records, the table and the figure."""
        super().save()
        self.report()

    def report(self) -> None:
        """Write the table and the figure."""
        from penstock.experiments.reporting import figures  # here, because importing Matplotlib takes half a second

        write_text(self.folder.table, _table(self.records))
        solved = [record for record in self.records if "refused" not in record]
        if solved:
            histories = [self.folder.variant(record["way"]).read_residuals()[0] for record in solved]
            figures.draw_comparison(self.folder.figure, solved, histories)


def compare_experiment(
    experiment: Experiment | None, directory: str | Path, *, reporter: Reporter | None = None
) -> tuple[ComparisonFolder, bool]:
    """Solve the system of an experiment in all :data:`VARIANTS`; return the folder, and whether all are done.

    None resumes the comparison in the folder. Without ``memory.budget``, the budget is a quarter of the matrix. A variant that
    is refused, for example because the matrix does not fit in memory, is recorded with the reason. A solve of less than a
    second is repeated once.
    """
    folder, new = ComparisonFolder(Path(directory)), False
    if experiment is not None and experiment.parallel is not None:
        raise InputError("variants are compared on one rank; leave out parallel")
    if experiment is None:
        if not folder.configuration.exists():
            raise InputError(f"{folder.path} holds no {folder.configuration.name}; there is no comparison to resume")
        experiment = read_experiment(folder.configuration)
    else:
        experiment, new = _with_budget(experiment), True
    with folder.made() if new else folder.resumed():
        if new:
            folder.write_configuration(resolved(experiment))
        return folder, Comparison(experiment, folder, reporter).run()


def _with_budget(experiment: Experiment) -> Experiment:
    """Refuse an experiment with several systems; return it with a budget, by default a quarter of the matrix."""
    if experiment.material.samples is not None or experiment.is_block:
        raise InputError("a comparison needs one system and one right-hand side; leave out samples and cases")
    if experiment.memory.store is not None:
        raise InputError("memory.store keeps one cut of the matrix, but each variant has its own; leave it out")
    if experiment.memory.budget is not None:
        return experiment
    nbytes = experiment.cantilever().nnz * (4 if experiment.memory.values == "float32" else 8)
    return experiment.changed(memory={"budget": nbytes // 4})


def _setup(record: Record) -> str:
    """Return the seconds of the set-up, which records of old versions lack."""
    seconds = record.get("setup_seconds")
    return "-" if seconds is None else f"{seconds:.3g} s"


def _precision(record: Record) -> str:
    """Return the precision with which a variant iterates, which records of old versions lack."""
    return record.get("precision") or "float64"


def _sweep(record: Record) -> str:
    """Return the milliseconds of a sweep; not with an image, where most of the time is that of iterations in memory."""
    return "-" if _precision(record) != "float64" else f"{1e3 * (record['sweep_seconds'] or 0):.3g} ms"


_ROWS = (
    "set-up and solve", "set-up", "time / in memory", "speed-up over overlap alone", "format", "iterated in",
    "products per iteration", "powers per sweep", "iterations", "sweeps", "moved", "a sweep", "true residual",
)  # fmt: skip


def _table(records: list[Record]) -> str:
    """Return the table in Markdown, with a column for each variant, and why variants were refused below it."""
    converged = {record["way"]: record["seconds"] for record in records if record.get("converged")}
    memory, overlap = converged.get("memory"), converged.get("overlap")
    columns: list[tuple[str, ...]] = [_ROWS]
    for record in records:
        if "refused" in record:
            columns.append(("refused", *["-"] * (len(_ROWS) - 1)))
            continue
        seconds, done, residual = record["seconds"], record["converged"], record["true_residual"]
        cells = (
            f"{seconds:.3g} s" + ("" if done else ", not converged"), _setup(record),
            f"{seconds / memory:.2f}" if memory and done else "-",
            f"{overlap / seconds:.2f}" if overlap and done else "-",
            record["format"], _precision(record), record["products"], record["products_a_sweep"],
            record["iterations"], record["sweeps"], format_nbytes(record["bytes_streamed"]), _sweep(record),
            "not finite" if residual is None else f"{residual:.2e}",
        )  # fmt: skip
        columns.append(tuple(map(str, cells)))
    titles = ["", *(record["title"] for record in records)]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    lines += [f"| {' | '.join(row)} |" for row in zip(*columns, strict=True)]
    for record in records:
        lines += ["", f"{record['title']} was refused: {record['refused']}"] if "refused" in record else []
    return "\n".join(lines) + "\n"
