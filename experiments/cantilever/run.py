"""Runs an experiment and leaves a results folder: one run, or one for each sample of a random stiffness."""

from __future__ import annotations

from pathlib import Path

from penstock.driver.progress import Reporter
from penstock.experiments.cantilever.configuration import Experiment, read_experiment
from penstock.experiments.cantilever.modes_run import ModesRun
from penstock.experiments.cantilever.monte_carlo import run_samples
from penstock.experiments.cantilever.ranked_run import run_on_ranks, runs_on_ranks
from penstock.experiments.cantilever.single_run import SingleRun, resolved
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.reporting.outcome import RunOutcome
from penstock.spmv import InputError


def run_experiment(experiment: Experiment, directory: str | Path, *, reporter: Reporter | None = None) -> RunOutcome:
    """Run an experiment from the start.

    Parameters
    ----------
    experiment : Experiment
    directory : path
        Results folder to make; it must be empty or not exist.
    reporter : Reporter, optional
        Receives progress.

    Returns
    -------
    RunOutcome
        If it was interrupted by SIGINT or SIGTERM, the folder holds a checkpoint.

    Raises
    ------
    PenstockError
        If the experiment is not possible with this budget, disk or device; then no folder is left.

    Examples
    --------
    >>> import tempfile
    >>> from penstock.experiments import Experiment, run_experiment
    >>> experiment = Experiment(model={"nodes": [9, 3, 3]}, output={"figures": False})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     outcome = run_experiment(experiment, f"{folder}/results")
    ...     outcome.reason.name, outcome.folder.result.exists()
    ('CONVERGED', True)
    """
    folder = ResultsFolder(Path(directory))
    if experiment.parallel is not None:
        return run_on_ranks(experiment, folder, reporter or Reporter(), resume=False)
    with folder.made():
        return _run(experiment, folder, reporter or Reporter())


def _run(experiment: Experiment, folder: ResultsFolder, reporter: Reporter) -> RunOutcome:
    try:
        folder.write_configuration(resolved(experiment))
        if experiment.material.samples is not None:
            return run_samples(experiment, folder, reporter)
        return _run_of(experiment, folder, reporter).run(resume=False)
    except BaseException as error:
        folder.remove_unless_saved(error)
        raise


def _run_of(experiment: Experiment, folder: ResultsFolder, reporter: Reporter) -> SingleRun:
    kind = ModesRun if experiment.analysis.is_modes else SingleRun
    return kind(experiment, folder, reporter)


def resume_experiment(
    directory: str | Path, *, maxiter: int | None = None, reporter: Reporter | None = None
) -> RunOutcome:
    """Resume a run that did not converge, or begin one anew that was killed before its first checkpoint.

    The iterates are bit-equal to those of an uninterrupted run, except for ``symmetric_bsr`` on a GPU, which adds with atomic
    operations, and with another number of ranks.

    Parameters
    ----------
    directory : path
        Results folder of the run.
    maxiter : int, optional
        Replaces that of the experiment, for a run that reached it.
    reporter : Reporter, optional
        Receives progress.

    Returns
    -------
    RunOutcome

    Raises
    ------
    InputError
        If the folder holds no run, a finished one, or one that is going on.

    Examples
    --------
    >>> import tempfile
    >>> from penstock.experiments import Experiment, resume_experiment, run_experiment
    >>> experiment = Experiment(model={"nodes": [9, 3, 3]}, solver={"maxiter": 3}, output={"figures": False})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = run_experiment(experiment, f"{folder}/results")
    ...     second = resume_experiment(f"{folder}/results", maxiter=500)
    >>> first.reason.name, second.reason.name
    ('MAXITER', 'CONVERGED')
    """
    folder, reporter = ResultsFolder(Path(directory)), reporter or Reporter()
    if runs_on_ranks(folder.path):
        _check_unfinished(folder)
        experiment = _with_maxiter(read_experiment(folder.configuration), maxiter)
        return run_on_ranks(experiment, folder, reporter, resume=True)
    with folder.resumed():
        return _resume(folder, maxiter, reporter)


def _resume(folder: ResultsFolder, maxiter: int | None, reporter: Reporter) -> RunOutcome:
    unfinished = not folder.result.exists() or any(folder.samples.glob("*/checkpoint.npz"))
    if folder.samples.exists() and unfinished:
        experiment = _with_maxiter(read_experiment(folder.configuration), maxiter)
        return run_samples(experiment, folder, reporter)
    _check_unfinished(folder)
    experiment = _with_maxiter(read_experiment(folder.configuration), maxiter)
    if folder.checkpoint.exists():
        return _run_of(experiment, folder, reporter).run(resume=True)
    folder.remove(but=folder.configuration)  # what a run left that was killed while it planned or assembled
    return _run(experiment, folder, reporter)


def _check_unfinished(folder: ResultsFolder) -> None:
    """Raise an InputError unless a folder holds a run that can be resumed."""
    if folder.solution.exists():
        raise InputError(
            f"{folder.path} is of penstock solve; repeat that command with another --output and --guess {folder.solution}"
        )
    if not folder.checkpoint.exists():
        if folder.result.exists():
            raise InputError(f"the run in {folder.path} is finished; look at it with penstock show {folder.path}")
        if not folder.configuration.exists():
            raise InputError(f"{folder.path} holds no {folder.configuration.name}; there is nothing to resume")


def _with_maxiter(experiment: Experiment, maxiter: int | None) -> Experiment:
    return experiment if maxiter is None else experiment.changed(solver={"maxiter": maxiter})
