"""The iterate with the smallest residual, which a solve that does not converge returns instead of its last one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.solvers.result import StopReason
from penstock.spmv import Array, device_of

# Copies cost less than a hundredth of a solve: one at each halving of the residual, and in between one in 16 looks.
_LOOKS_PER_COPY = 16
#: After these reasons the last iterate has the smallest error, although its residual may be somewhat larger.
_LAST_WILL_DO = (
    StopReason.MAXITER,
    StopReason.STOPPED,
    StopReason.NOT_FINITE,
    StopReason.NOT_POSITIVE_DEFINITE,
    StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE,
)
_EARLY = (StopReason.MAXITER, StopReason.STOPPED, StopReason.NOT_FINITE)
# A solve that breaks down with a residual above three times the norm of b has gone astray.
_BROKEN = 3.0
# Residuals of a solve that gets on rise and fall by less than this factor, as a rule.
_GROWN = 100.0


class BestIterate:
    """Keeps a copy of the iterate of each right-hand side whose relative residual was smallest; ``x`` starts as the guess.

    The copy is renewed when the residual has halved, and between halvings at most once in 16 looks: on the way down it lags by
    less than a factor of two, on a plateau hardly at all.
    """

    def __init__(self, x: Array, residuals: Sequence[float]) -> None:
        self.x, self.last, self.residuals = x.copy(), list(residuals), list(residuals)
        for column, residual in enumerate(residuals):
            if not residual <= 1.0:  # x = 0 has the relative residual 1
                (self.x if x.ndim == 1 else self.x[:, column])[...] = 0
                self.residuals[column] = 1.0
        self._looks = self._copies = 0

    def note(self, x: Array, residuals: Sequence[float]) -> None:
        """Copy the columns of an iterate that are better than the copy."""
        self._looks += 1
        self.last = list(residuals)
        pairs = list(zip(residuals, self.residuals, strict=True))
        between = _LOOKS_PER_COPY * self._copies < self._looks
        better = [residual < 0.5 * best or (between and residual < best) for residual, best in pairs]
        if not any(better):
            return
        self._copies += not any(residual < 0.5 * best for residual, best in pairs)
        if all(better):
            self.x[...] = x
        else:  # in one pass over the block
            xp = device_of(x).xp
            xp.copyto(self.x, x, where=xp.asarray(better))
        self.residuals = [residual if taken else best for taken, (residual, best) in zip(better, pairs, strict=True)]

    def is_better(self, reason: StopReason, residual: float, column: int = 0) -> bool:
        """Return whether the copy was better than the last iterate, given the reason for stopping and its relative residual.

        A solve that was merely ended early keeps the last iterate, whose error is the smallest in the norm of A, unless the
        residual has grown out of proportion.
        """
        if reason is StopReason.CONVERGED:
            return False
        last = residual if math.isfinite(residual) else self.last[column]
        factor = _GROWN if reason in _LAST_WILL_DO else 1.0
        broken = reason not in _EARLY and math.isfinite(residual) and residual > _BROKEN
        return broken or not last <= factor * self.residuals[column]
