"""Runs described in YAML: read, plan, run, report."""

from penstock.experiments.configuration import Experiment, read_experiment
from penstock.experiments.matrix_storage import plan_experiment
from penstock.experiments.progress import Reporter, RichReporter
from penstock.experiments.results import ResultsFolder
from penstock.experiments.run import RunOutcome, resume_experiment, run_experiment

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
