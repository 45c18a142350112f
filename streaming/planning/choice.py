"""Chooses the fastest plan: number of subdivisions, format, degree and length of the ring."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.spmv import BudgetError, InputError
from penstock.streaming.planning.estimate import LinkRates
from penstock.streaming.planning.plan import StreamPlan, plan_stream
from penstock.streaming.planning.workload import Ring, Workload
from penstock.streaming.stores.matrix_index import MatrixIndex

#: Numbers of subdivisions to try.
CUTS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_RINGS = (3, 4, 2)  # the first wins ties; the last needs least memory, so its error names the smallest budget
_MOST_SWEEPS = 8  # longer rings are tried if they compute all powers in at most this many sweeps
# A transfer that products hide costs this share of its time nevertheless: estimates are rough, and others use the link, too.
_HIDDEN = 0.3


@dataclass(frozen=True)
class Candidate:
    """One choice of format, cut and workload for a matrix.

    Parameters
    ----------
    index : MatrixIndex
        Of the matrix in some format and cut.
    workload : Workload
    reach : int, optional
        As in :func:`plan_stream`.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import Candidate, Workload, choose, index_of
    >>> beam = Cantilever(nodes=32, dof=3)
    >>> choose([Candidate(index_of(beam.symbolic_slabs(n)), Workload()) for n in (2, 8, 32)], "8 MiB").slots
    3
    """

    index: MatrixIndex
    workload: Workload
    reach: int | None = None


def choose(
    candidates: Iterable[Candidate], budget: int | str, ring: Ring | None = None, *, rates: LinkRates | None = None
) -> StreamPlan:
    """Plan every candidate and return the plan with the least estimated solve time; pure, needs no device.

    Parameters
    ----------
    candidates : iterable of Candidate
        Matrices of one shape in different formats and cuts, with different degrees.
    budget : int or str
    ring : Ring, optional
        Without ``slots``, several ring lengths are tried for each candidate.
    rates : LinkRates, optional
        By default those of a PCIe 5 link and an H200's memory.

    Returns
    -------
    StreamPlan
        That of the first candidate that fits the budget as a whole, if any, since nothing is streamed then.

    Notes
    -----
    Fewer subdivisions mean fewer starts of transfers and kernels. More subdivisions mean smaller slots, more room for the
    resident part, and less time in the first transfer and the last computation, which nothing overlaps. Transfers that
    products hide count with three tenths of their time, so that of plans that are about equally fast one that moves little is
    taken. Only schedules that may be the best are simulated, see :func:`~penstock.streaming.simulate`.

    Raises
    ------
    BudgetError
        If no candidate fits; the message states the smallest budget for the last one tried.
    InputError
        If there is no candidate.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import Candidate, Workload, choose, index_of
    >>> slabs = [Cantilever(nodes=32, dof=3).symbolic_slabs(count) for count in (4, 8, 16)]
    >>> len(choose([Candidate(index_of(cut), Workload()) for cut in slabs], "16 MiB").index.subdivisions)
    8
    """
    ring = ring or Ring()
    plans: list[StreamPlan] = []
    failure: Exception = InputError("there is no way to cut this matrix; choose another format")
    for candidate in candidates:
        for slots in _ring_lengths(candidate) if ring.slots is None else (ring.slots,):
            length = replace(ring, slots=slots)
            try:
                plan = plan_stream(
                    candidate.index, budget, candidate.workload, length, reach=candidate.reach, rates=rates
                )
            except BudgetError as error:
                failure = error
                continue
            if not plan.slots:
                return plan
            plans.append(plan)
    if not plans:
        raise failure
    return _fastest(plans)


def _fastest(plans: list[StreamPlan]) -> StreamPlan:
    """Return the first of the plans with the least estimated solve time, a share of that of transfers included.

    Plans with a larger lower bound are not simulated.
    """
    hidden = [_HIDDEN * plan.link_seconds() for plan in plans]
    bounds = [plan.least_solve_seconds() + share for plan, share in zip(plans, hidden, strict=True)]
    best, fastest = math.inf, 0
    for number in sorted(range(len(plans)), key=bounds.__getitem__):
        if bounds[number] > best:
            break
        seconds = plans[number].estimated_solve_seconds() + hidden[number]
        if (seconds, number) < (best, fastest):
            best, fastest = seconds, number
    return plans[fastest]


def _ring_lengths(candidate: Candidate) -> list[int]:
    degree = candidate.workload.degree
    if degree == 1:
        return [*_RINGS]
    reach = candidate.reach or 1
    long = {(-(-degree // sweeps) - 1) * reach + 2 for sweeps in range(1, _MOST_SWEEPS + 1)}
    return list(dict.fromkeys([*sorted(long), *_RINGS]))
