"""The outcome of a run."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.experiments.reporting.folder import ResultsFolder
from penstock.solvers import StopReason


@dataclass(frozen=True)
class RunOutcome:
    """The results folder of a run, and why the solver stopped.

    Parameters
    ----------
    folder : ResultsFolder
    reason : StopReason

    Examples
    --------
    >>> import pathlib
    >>> from penstock.experiments import ResultsFolder, RunOutcome
    >>> from penstock.solvers import StopReason
    >>> RunOutcome(ResultsFolder(pathlib.Path("results")), StopReason.STOPPED).interrupted
    True
    """

    folder: ResultsFolder
    reason: StopReason

    @property
    def interrupted(self) -> bool:
        """Whether it stopped on request; the folder then holds what is needed to continue."""
        return self.reason is StopReason.STOPPED
