"""Shows the progress of a run; see :mod:`penstock.driver.progress`."""

from penstock.driver.progress import Reporter, RichReporter, Stage, solve_progress

__all__ = ["Reporter", "RichReporter", "Stage", "solve_progress"]
