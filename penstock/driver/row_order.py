"""Whether a streamed matrix is solved with lines across flat elements, and the order of its rows: by lines or by levels."""

from __future__ import annotations

from dataclasses import replace

from penstock.driver.request import Request
from penstock.solvers import SmoothedAggregationSpec
from penstock.solvers.amg.line_order import find_lines
from penstock.spmv import CsrMatrix
from penstock.streaming import LevelOrder, StreamPlan

#: Names of orders.
BY_LEVELS = "by levels (reverse Cuthill-McKee)"
BY_LINES = "by lines: nodes that are coupled strongly across flat elements follow each other, so that few lines are cut"
#: What is said where no order is better.
COUPLED = "subdivisions couple too widely: one power per sweep"
# Another order of the rows must be worth its while.
_BETTER = 0.9


def worth_reordering(
    plan: StreamPlan, ordered: StreamPlan, name: str = BY_LEVELS
) -> tuple[bool, list[tuple[str, str]]]:
    """Return whether the plan for rows in another order is worth that order, and what to say of it."""
    more = ordered.powers_per_sweep > plan.powers_per_sweep
    if more and ordered.estimated_solve_seconds() < _BETTER * plan.estimated_solve_seconds():
        powers = f"a sweep computes {ordered.powers_per_sweep} powers, in the original order {plan.powers_per_sweep}"
        return True, [("order", f"{name}: {powers}")]
    return False, [("order", COUPLED)] if 2 * ordered.reach >= len(ordered.index.subdivisions) else []


def with_lines(A: CsrMatrix, request: Request, node_size: int) -> tuple[Request, LevelOrder | None]:
    """Return the request, with lines if these are to be used, and an order in which the nodes of a line follow each other.

    Lines are used for a coarse level that was chosen here or by its name alone, if the matrix has many; where the caller asks
    for groups, only the order is. It is None if the nodes of a line follow each other already, or if lines are not used.
    ``node_size`` is the number of unknowns that stay together.
    """
    [spec, *_] = request.specs(node_size, streamed=True)
    if not isinstance(spec, SmoothedAggregationSpec) or spec.aggregates is not None:
        return request, None
    if not (isinstance(request.preconditioner, str) or spec.grouped):
        return request, None
    found = find_lines(A, node_size)
    if found is None:
        return request, None
    order = None if found.permutation is None else LevelOrder(found.permutation, node_size)
    return replace(request, has_lines=True), order
