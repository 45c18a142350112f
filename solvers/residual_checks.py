"""Chooses the number of iterations between two reads of the residual."""

from __future__ import annotations

import math

#: Maximum number of iterations between two reads: the device stores this many residual norms.
KEPT_NORMS = 256
# Reading the residual stalls a GPU for about _CHECK_SECONDS: check so rarely that stalls stay below _CHECK_SHARE of the time,
# but at least every _PATIENCE_SECONDS, so that users see progress.
_CHECK_SECONDS, _CHECK_SHARE, _PATIENCE_SECONDS = 25e-6, 0.02, 0.5


class ResidualChecks:
    """The number of iterations until the next read of the residual: ``every``, then adapted to the time of an iteration."""

    def __init__(self, every: int = 1, *, adaptive: bool = False) -> None:
        self.every, self._adaptive = every, adaptive

    def adapt(self, seconds: float, starting: float, iterations: int, left: float) -> None:
        """Choose the next number of iterations.

        The last ones and the read took ``seconds``, of which the host spent ``starting`` on starting them. Iterations started
        beyond the expected number ``left`` are wasted.
        """
        if self._adaptive:
            each = seconds / iterations
            wanted = (_CHECK_SECONDS + starting / iterations) / (_CHECK_SHARE * each)
            self.every = math.ceil(min(wanted, KEPT_NORMS, max(1.0, _PATIENCE_SECONDS / each), max(1.0, left / 3)))
