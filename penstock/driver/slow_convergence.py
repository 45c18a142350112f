"""Watches how fast Jacobi converges, and tells when multigrid is worth its set-up.

Nothing but iterations shows what a matrix is like, and the first ones are not lost: multigrid goes on from their iterate. So a
solve for which the choice was left open begins with Jacobi; where that is soon seen to be slow, it costs these iterations more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.driver.progress import first_residual_norm
from penstock.driver.request import Placement, Request
from penstock.solvers import IterationRecord, PreconditionerSpec, preconditioner_spec
from penstock.spmv.model.suggestion import NOMINAL_BANDWIDTH

# Iterations before the convergence is judged, and after which each look judges it anew.
_TRIED = 50
# Multigrid's set-up and solve take about as long as this many iterations with Jacobi, of a scalar matrix and of blocks, whose
# coarse levels have relatively fewer entries; and some time that no matrix is too small for.
_WORTH_SCALAR, _WORTH_BLOCKS, _OVERHEAD_SECONDS = 400, 250, {"cpu": 0.02, "cuda": 0.06}
# To start an iteration with Jacobi.
_START_SECONDS = {"cpu": 20e-6, "cuda": 40e-6}


def may_change(placement: Placement | None, request: Request) -> bool:
    """Return whether multigrid may take the place of Jacobi: in memory, if nothing was known by which to choose."""
    if placement is None or not request.is_auto or request.options or not request.chosen_method.definite:
        return False
    return not placement.plan.slots and placement.spec.name in ("jacobi", "block_jacobi")


def multigrid_instead(placement: Placement) -> PreconditionerSpec:
    """Return what takes the place of Jacobi."""
    return preconditioner_spec("multigrid", block_size=placement.spec.block_size)


def worthwhile_iterations(storage_nbytes: int, block_size: int, device_kind: str) -> int:
    """Return the number of Jacobi iterations that cost about as much as set-up and solve with multigrid."""
    seconds = storage_nbytes / NOMINAL_BANDWIDTH[device_kind] + _START_SECONDS[device_kind]
    return (_WORTH_SCALAR if block_size == 1 else _WORTH_BLOCKS) + round(_OVERHEAD_SECONDS[device_kind] / seconds)


@dataclass
class ConvergenceWatch:
    """A monitor that stops a solve which promises to take more than some iterations to a tolerance."""

    worth: int
    rtol: float
    monitor: Callable[[IterationRecord], object] | None
    expected: float = field(default=0.0, init=False)  # iterations, once it has stopped the solve

    def __call__(self, record: IterationRecord) -> bool:
        """Ask the caller's monitor, and judge the convergence so far."""
        if self.monitor is not None and self.monitor(record):
            return True
        if record.iteration >= _TRIED:
            expected = self._expected(record)
            if expected > max(self.worth, 2 * record.iteration):
                self.expected = expected
        return self.expected > 0

    def _expected(self, record: IterationRecord) -> float:
        """Return how many iterations the tolerance takes at the mean rate of those so far."""
        first = first_residual_norm(record)
        if not (0 < record.residual_norm < math.inf and self.rtol > 0 and first > 0):
            return 0.0
        reached = math.log(first / record.residual_norm)
        return record.iteration * math.log(first / self.rtol) / reached if reached > 0 else math.inf
