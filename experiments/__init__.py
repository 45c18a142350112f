"""Runs described in YAML: read, plan, run, report.

An :class:`Experiment` is read from a file, or made from keyword arguments: its sections and their keys are those of the file.

>>> from penstock.experiments import Experiment
>>> experiment = Experiment(model={"nodes": [9, 3, 3], "dof": 3}, solver={"rtol": 1e-6})
>>> experiment.cantilever().shape, experiment.solver.preconditioner, experiment.columns
((243, 243), 'block_jacobi', 1)
"""

from penstock.driver.progress import Reporter, RichReporter
from penstock.experiments.cantilever.configuration import Experiment, read_experiment
from penstock.experiments.cantilever.matrix_storage import plan_experiment
from penstock.experiments.cantilever.run import resume_experiment, run_experiment
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.reporting.outcome import RunOutcome

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
