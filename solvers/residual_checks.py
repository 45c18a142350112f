"""Chooses the number of iterations between two reads of the residual."""

from __future__ import annotations

import math

__all__ = ["KEPT_NORMS", "ResidualChecks"]

#: Maximum number of iterations between two reads: the device stores this many residual norms.
KEPT_NORMS = 256
# Reading the residual stalls a GPU for about _CHECK_SECONDS: check so rarely that stalls stay below _CHECK_SHARE of the time,
# but at least every _PATIENCE_SECONDS, so that users see progress.
_CHECK_SECONDS, _CHECK_SHARE, _PATIENCE_SECONDS = 25e-6, 0.02, 0.5


class ResidualChecks:
    """The number of iterations until the next read of the residual.

    Parameters
    ----------
    every : int
        Iterations before the first read, and with ``adaptive=False`` before every read.
    adaptive : bool
        Adapt the number to the measured time of an iteration.
    """

    def __init__(self, every: int = 1, *, adaptive: bool = False) -> None:
        self.every, self._adaptive = every, adaptive

    def adapt(self, seconds: float, starting: float, iterations: int, left: float) -> None:
        """Choose the next number of iterations.

        Parameters
        ----------
        seconds : float
            Time for the last iterations and the read.
        starting : float
            The part in which the host started the iterations.
        iterations : int
        left : float
            Expected number of further iterations; iterations started beyond them are wasted.
        """
        if self._adaptive:
            each = seconds / iterations
            wanted = (_CHECK_SECONDS + starting / iterations) / (_CHECK_SHARE * each)
            self.every = math.ceil(min(wanted, KEPT_NORMS, max(1.0, _PATIENCE_SECONDS / each), max(1.0, left / 3)))
