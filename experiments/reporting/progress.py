"""Shows the progress of a run; see :mod:`penstock.progress`."""

from penstock.progress import Reporter, RichReporter, Stage, solve_progress

__all__ = ["Reporter", "RichReporter", "Stage", "solve_progress"]
