"""A solve that goes on from the iterate of another one, with another preconditioner: for the caller they are one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.driver.inputs import GivenVectors
from penstock.driver.open_system import AnyResult, OpenSystem
from penstock.solvers import BlockSolveResult, IterationRecord
from penstock.solvers.result import joined_results
from penstock.spmv import device_of


def go_on(system: OpenSystem, before: AnyResult, b: GivenVectors, limits: dict[str, Any]) -> AnyResult:
    """Go on from the iterate of a result that has not converged, with the iterations that are left of ``maxiter``.

    The result is that of both solves: iterations and costs are sums, and a right-hand side that the second one made worse has the
    solution of the first.
    """
    # Blocks of right-hand sides count their iterations each: those of the block that was left are meant.
    done = max(column.iterations for column in before.columns if not column.converged)
    monitor, maxiter = limits["monitor"], limits["maxiter"]
    if monitor is not None:
        monitor = CountingOn(monitor, done, before.timings.get("total", 0.0), before.bytes_streamed)
    left = None if maxiter is None else maxiter - done
    after = system.solve(b, GivenVectors.of(before.x, "x0"), **{**limits, "maxiter": left, "monitor": monitor})
    joined = joined_results(before, after)
    kept = any(one.x is other.x for one, other in zip(before.columns, joined.columns, strict=True))
    if kept and isinstance(joined, BlockSolveResult):
        x = device_of(joined.columns[0].x).xp.stack([column.x for column in joined.columns], axis=1)
        joined = b.returned(joined, list(joined.columns), x)
    return joined


@dataclass
class CountingOn:
    """A caller's monitor, for which iterations, seconds and bytes of a solve count on from those of an earlier one."""

    monitor: Callable[[IterationRecord], object]
    iterations: int
    seconds: float
    bytes_streamed: int
    _last: int = field(default=0, init=False)

    def __call__(self, record: IterationRecord) -> bool:
        """Ask the caller's monitor."""
        if record.iteration < self._last:  # another block of right-hand sides, which begins
            self.iterations, self.seconds, self.bytes_streamed = 0, 0.0, 0
        self._last = record.iteration
        counted = replace(
            record,
            iteration=self.iterations + record.iteration,
            seconds=self.seconds + record.seconds,
            bytes_streamed=self.bytes_streamed + record.bytes_streamed,
        )
        return bool(self.monitor(counted))
