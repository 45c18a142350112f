"""Runs described in YAML: read, plan, run, report."""

from penstock.experiments.cantilever.configuration import Experiment, read_experiment
from penstock.experiments.cantilever.matrix_storage import plan_experiment
from penstock.experiments.cantilever.run import RunOutcome, resume_experiment, run_experiment
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.reporting.progress import Reporter, RichReporter

__all__ = [
    "Experiment",
    "Reporter",
    "ResultsFolder",
    "RichReporter",
    "RunOutcome",
    "plan_experiment",
    "read_experiment",
    "resume_experiment",
    "run_experiment",
]
