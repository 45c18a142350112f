"""Samples of a random stiffness, solved one after another, and what they say of the deflection."""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
from collections.abc import Iterator
from typing import Any

import yaml

from penstock.experiments.configuration import Experiment, read_experiment
from penstock.experiments.environment import describe_environment
from penstock.experiments.progress import Reporter, Stage
from penstock.experiments.results import ResultsFolder, write_json, write_text
from penstock.experiments.single_run import RunOutcome, SingleRun, resolved
from penstock.solvers import StopReason

__all__ = ["run_samples"]


class _SampleReporter(Reporter):
    """Shows one bar for all samples, with what the sample at hand is doing."""

    def __init__(self, stage: Stage, number: int, count: int) -> None:
        self._stage, self._number, self._count = stage, number, count

    @contextlib.contextmanager
    def stage(self, title: str) -> Iterator[Stage]:
        """Report a part of a sample's run as a part of all of them."""
        whole, number, count = self._stage, self._number, self._count

        class Part(Stage):
            def advance(self, done: float, detail: str = "") -> None:
                share = done if title == "solve" else 0.0
                whole.advance((number + share) / count, f"sample {number + 1} of {count}: {title} {detail}")

        part = Part()
        part.advance(0.0)
        yield part


def run_samples(experiment: Experiment, folder: ResultsFolder, reporter: Reporter) -> RunOutcome:
    """Solve for every seed of ``material.samples``; each run has a folder of its own, and those that are done stay done.

    Parameters
    ----------
    experiment : Experiment
    folder : ResultsFolder
        Of all samples together; it may hold some of them, also such that ended without converging.
    reporter : Reporter

    Returns
    -------
    RunOutcome
        With the first reason that was not convergence, if any.
    """
    count = experiment.material.samples
    assert count is not None
    results = []
    reason = StopReason.CONVERGED
    with reporter.stage("samples") as stage:
        for number in range(count):
            sample = ResultsFolder(folder.samples / f"{number + 1:04d}")
            seed = experiment.material.seed + number
            if not sample.result.exists() or sample.checkpoint.exists():  # one that did not converge may go on
                outcome = _run_sample(experiment, seed, sample, _SampleReporter(stage, number, count))
                if outcome.interrupted:
                    return RunOutcome(folder, outcome.reason)
            result = sample.read_json(sample.result)
            if not result["converged"] and reason is StopReason.CONVERGED:
                reason = StopReason[result["reason"].upper()]
            results.append({"seed": seed, **result})
            if number == 0:
                write_text(folder.plan, sample.plan.read_text(encoding="utf-8"))
            stage.advance((number + 1) / count, f"sample {number + 1} of {count}")
    _report(experiment, folder, results, reason)
    if experiment.output.figures:
        folder.draw(None)
    reporter.text("Result", folder.summary())
    return RunOutcome(folder, reason)


def _run_sample(experiment: Experiment, seed: int, sample: ResultsFolder, reporter: Reporter) -> RunOutcome:
    if sample.checkpoint.exists():  # go on as was planned then, whatever would be measured now
        solver = experiment.solver
        one = read_experiment(sample.configuration).model_copy(update={"solver": solver})
        return SingleRun(one, sample, reporter).run(resume=True)
    shutil.rmtree(sample.path, ignore_errors=True)  # what a killed run left
    sample.path.mkdir(parents=True)
    material = experiment.material.model_copy(update={"seed": seed, "samples": None})
    output = experiment.output.model_copy(update={"field": False, "figures": False})
    one = experiment.model_copy(update={"material": material, "output": output})
    write_text(sample.configuration, yaml.safe_dump(resolved(one), sort_keys=False))
    return SingleRun(one, sample, reporter).run(resume=False)


def _report(experiment: Experiment, folder: ResultsFolder, results: list[dict[str, Any]], reason: StopReason) -> None:
    """Write what all samples say together."""
    names = ("seed", "tip_deflection", "iterations", "true_residual", "sweeps", "bytes_streamed", "converged")
    samples = [{**{name: result[name] for name in names}, "seconds": result["seconds"]["solve"]} for result in results]
    tips = [float(sample["tip_deflection"]) for sample in samples if sample["converged"]]  # others mean nothing
    residuals = [sample["true_residual"] for sample in samples]
    deviation = statistics.stdev(tips) if len(tips) > 1 else None
    write_json(folder.environment, describe_environment())
    write_json(
        folder.result,
        {
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
        },
    )
