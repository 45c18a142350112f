"""Solves for samples of a random stiffness, one after another, and estimates mean and deviation of the deflection."""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from penstock.driver.progress import CallClock, Reporter, Stage
from penstock.experiments.cantilever.configuration import Experiment, read_experiment
from penstock.experiments.cantilever.sample_fields import write_statistics
from penstock.experiments.cantilever.single_run import SingleRun, resolved
from penstock.experiments.reporting.atomic import write_json, write_text
from penstock.experiments.reporting.environment import describe_environment
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.reporting.outcome import RunOutcome
from penstock.experiments.reporting.study import Record, Study, StudyStopped
from penstock.experiments.reporting.summary import solve_seconds
from penstock.host.start import take_starting_seconds
from penstock.solvers import StopReason

_FROM_RESULT = ("seed", "tip_deflection", "iterations", "true_residual", "sweeps", "bytes_streamed", "converged")


class SampleStudy(Study[int, ResultsFolder]):
    """Solves for each seed of ``material.samples``; a point is the number of a sample, from 0 on.

    Each sample has a results folder of its own in that of the study. Finished samples are not solved again, and those that did
    not converge are resumed.
    """

    stops_between_points: ClassVar[bool] = False  # a run stops between two iterations

    def __init__(self, experiment: Experiment, folder: ResultsFolder, reporter: Reporter | None = None) -> None:
        super().__init__(folder, reporter)
        self.experiment = experiment
        self.reason = StopReason.CONVERGED
        #: Adds up the parts of the runs of all samples, which go on below one bar.
        self.clock = CallClock(Reporter())
        self._stage = Stage()
        #: Of all samples together, once it is written.
        self.result: dict[str, Any] = {}

    def points(self) -> Sequence[int]:
        """Return the numbers of the samples."""
        return range(self.experiment.material.samples or 0)

    def is_done(self, point: int) -> bool:
        """Return whether a sample has a result and cannot be resumed."""
        return any(record["seed"] == self._seed(point) for record in self.records)

    def load(self) -> list[Record]:
        """Return the results of finished samples."""
        folders = {number: self._folder_of(number) for number in self.points()}
        finished = [n for n, folder in folders.items() if folder.result.exists() and not folder.checkpoint.exists()]
        return [self._record(number) for number in finished]

    def save(self) -> None:
        """Do nothing: each sample writes its own result."""

    def prepare(self, missing: Sequence[int]) -> None:
        """Begin the progress bar of all samples."""
        self._stage = self.resources.enter_context(self.reporter.stage("samples"))

    def measure(self, point: int) -> list[Record]:
        """Solve for a sample, or resume it."""
        count = len(self.points())
        reporter = _SampleReporter(self._stage, self.clock, point, count)
        outcome = _run_sample(self.experiment, self._seed(point), self._folder_of(point), reporter)
        if outcome.interrupted:
            self.reason = outcome.reason
            raise StudyStopped
        self._stage.advance((point + 1) / count, f"sample {point + 1} of {count}")
        return [self._record(point)]

    def report(self) -> None:
        """Write plan, result and figures of all samples together."""
        results = sorted(self.records, key=lambda record: int(record["seed"]))
        failed = [result["reason"] for result in results if not result["converged"]]
        self.reason = StopReason[failed[0].upper()] if failed else StopReason.CONVERGED
        with self.clock.part("writing"):
            write_text(self.folder.plan, self._folder_of(0).plan.read_text(encoding="utf-8"))
            write_json(self.folder.environment, describe_environment())
            self._write_field({int(result["seed"]) for result in results if result["converged"]})
            self.result = _summary(self.experiment, results, self.reason)
            write_json(self.folder.result, self.result)
        if self.experiment.output.figures:
            with self.clock.part("drawing"):
                self.folder.draw(None)

    def _write_field(self, converged: set[int]) -> None:
        """Write mean and deviation of the samples' fields, unless a sample of an older version has none."""
        files = [self._folder_of(number).field for number in self.points() if self._seed(number) in converged]
        if self.experiment.output.field and files and all(file.exists() for file in files):
            write_statistics(self.folder.field, files)

    def _seed(self, number: int) -> int:
        return self.experiment.material.seed + number

    def _folder_of(self, number: int) -> ResultsFolder:
        return ResultsFolder(self.folder.samples / f"{number + 1:04d}")

    def _record(self, number: int) -> Record:
        folder = self._folder_of(number)
        return {"seed": self._seed(number), **folder.read_json(folder.result)}


class _SampleReporter(Reporter):
    """Shows the progress of one sample on the bar of all samples."""

    def __init__(self, stage: Stage, clock: CallClock, number: int, count: int) -> None:
        self._stage, self._clock, self._number, self._count = stage, clock, number, count

    @contextlib.contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Count the time of a part of all runs."""
        with self._clock.part(title):
            yield

    @contextlib.contextmanager
    def stage(self, title: str) -> Iterator[Stage]:
        """Report a part of a sample's run as a part of all runs."""
        whole, number, count = self._stage, self._number, self._count

        class Part(Stage):
            def advance(self, done: float, detail: str = "") -> None:
                fraction = done if title == "solve" else 0.0
                whole.advance((number + fraction) / count, f"sample {number + 1} of {count}: {title} {detail}")

        part = Part()
        part.advance(0.0)
        yield part


def run_samples(experiment: Experiment, folder: ResultsFolder, reporter: Reporter) -> RunOutcome:
    """Solve for all samples missing in the folder, and return the outcome with the first reason other than convergence."""
    study, starting = SampleStudy(experiment, folder, reporter), take_starting_seconds()
    with study.clock.running():
        finished = study.run()
    if finished:
        folder.conclude(study.result, {"starting": starting, **study.clock.take()}, reporter)
    return RunOutcome(folder, study.reason)


def _run_sample(experiment: Experiment, seed: int, sample: ResultsFolder, reporter: Reporter) -> RunOutcome:
    if sample.checkpoint.exists():  # resume with the plan of that time, whatever would be measured now
        planned = read_experiment(sample.configuration)
        one = planned.model_copy(update={"solver": experiment.solver})
        return SingleRun(one, sample, reporter).run(resume=True)
    shutil.rmtree(sample.path, ignore_errors=True)  # left by a run that was killed
    sample.path.mkdir(parents=True)
    one = experiment.changed(material={"seed": seed, "samples": None}, output={"figures": False})
    sample.write_configuration(resolved(one))
    return SingleRun(one, sample, reporter).run(resume=False)


def _summary(experiment: Experiment, results: list[Record], reason: StopReason) -> dict[str, Any]:
    """Return the result of all samples together; those that did not converge are left out of mean and deviation."""
    samples = [
        {**{name: result[name] for name in _FROM_RESULT}, "seconds": solve_seconds(result)} for result in results
    ]
    tips = [float(sample["tip_deflection"]) for sample in samples if sample["converged"]]
    residuals = [sample["true_residual"] for sample in samples]
    deviation = statistics.stdev(tips) if len(tips) > 1 else None
    return {
        "converged": reason is StopReason.CONVERGED,
        "reason": reason.name.lower(),
        "stiffness_samples": samples,
        "tip_deflection": statistics.fmean(tips) if tips else None,
        "tip_deflection_deviation": deviation,
        "true_residual": None if None in residuals else max(residuals),
        "standard_error": None if deviation is None else deviation / math.sqrt(len(tips)),
        "rtol": experiment.solver.rtol,
        "quantity": results[0]["quantity"],
        "unknowns": results[0]["unknowns"],
        "device": results[0]["device"],
        "seconds": {"solve": sum(float(sample["seconds"]) for sample in samples)},
    }
