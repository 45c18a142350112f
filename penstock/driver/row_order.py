"""The order of the rows of a streamed matrix: as it is, in layers, by levels, or by lines across flat elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from penstock.driver.request import Request
from penstock.solvers import SmoothedAggregationSpec
from penstock.solvers.amg.line_order import find_lines
from penstock.spmv import CsrMatrix
from penstock.streaming import LevelOrder, StreamPlan

#: Names of orders.
IN_LAYERS = "in layers across the longest axis"
BY_LEVELS = "by levels (reverse Cuthill-McKee)"
BY_LINES = "by lines: nodes that are coupled strongly across flat elements follow each other, so that few lines are cut"
#: What is said where no order is better.
COUPLED = "subdivisions couple too widely: one power per sweep"
_NOT_SOUGHT = "an order by levels is not sought: that would take longer than the sweeps"
# Another order of the rows must be worth its while.
_BETTER = 0.9
# Sweeps of a set-up and a solve, in those of the iterations.
_WITH_SET_UP = 1.5
# To find an order by levels and to put a matrix in it, for a node and for an entry, by one core but for copies.
_NODE_SECONDS, _ENTRY_SECONDS = 0.8e-6, 8e-9

Facts = list[tuple[str, str]]


class Planned(Protocol):
    """What is planned in an order of the rows."""

    @property
    def stream_plan(self) -> StreamPlan:
        """The plan by which it is streamed."""


Order = TypeVar("Order")
AnyPlanned = TypeVar("AnyPlanned", bound=Planned)


def in_best_order(
    planned: AnyPlanned,
    orders: Mapping[str, Callable[[], Order]],
    plan_in: Callable[[Order], AnyPlanned],
    suffices: Callable[[AnyPlanned], bool],
    may_pay: Callable[[StreamPlan], bool],
    facts: Facts,
) -> tuple[AnyPlanned, Facts]:
    """Return what is planned in the order of the rows as it is, or in one of others that is worth it, and what to say of that.

    ``orders`` are tried one after another, the one that is found soonest first, until the order ``suffices``; levels if they
    ``may_pay``. ``facts`` are said of the order of the rows as it is.
    """
    for name, order_of in orders.items():
        if suffices(planned):
            break
        plan = planned.stream_plan
        if name == BY_LEVELS and not may_pay(plan):
            return planned, facts or [("order", _NOT_SOUGHT)]
        other = plan_in(order_of())
        better, said = _worth_reordering(plan, other.stream_plan, name)
        if better:
            planned, facts = other, said
        del other  # it may hold a matrix
        facts = facts or said
    return planned, facts


def levels_may_pay(plan: StreamPlan, request: Request, nodes: int, entries: int) -> bool:
    """Return whether the sweeps of a plan take longer than finding an order by levels, which can only shorten them.

    True where the seconds of the sweeps are not known. ``nodes`` are put in order, with ``entries`` of a matrix.
    """
    if plan.rates is None or plan.workload.iterations is None:
        return True
    blocks = -(-request.columns // plan.workload.columns)
    seconds = _WITH_SET_UP * plan.estimated_solve_seconds() * blocks * request.solves
    return seconds > _NODE_SECONDS * nodes + _ENTRY_SECONDS * entries


def _worth_reordering(plan: StreamPlan, ordered: StreamPlan, name: str) -> tuple[bool, Facts]:
    """Return whether the plan for rows in another order is worth that order, and what to say of it."""
    more = ordered.powers_per_sweep > plan.powers_per_sweep
    if more and ordered.estimated_solve_seconds() < _BETTER * plan.estimated_solve_seconds():
        powers = f"a sweep computes {ordered.powers_per_sweep} powers, in the original order {plan.powers_per_sweep}"
        return True, [("order", f"{name}: {powers}")]
    return False, [("order", COUPLED)] if 2 * ordered.planned_reach >= len(ordered.index.subdivisions) else []


def as_ordered(csr: Any, A: CsrMatrix) -> CsrMatrix:
    """Return A in another order from its SciPy matrix, which has forgotten that vectors may have more digits than values."""
    return replace(CsrMatrix.from_csr(csr, check=False), dtype=A.dtype)


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
