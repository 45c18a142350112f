"""Plans again where the first sweeps show that the rates of a plan were wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.streaming.planning.choice import Candidate, choose
from penstock.streaming.planning.estimate import LinkRates, estimate_sweep
from penstock.streaming.planning.learned import APART, learned_rates
from penstock.streaming.planning.plan import StreamPlan
from penstock.streaming.planning.timeline import Timeline
from penstock.streaming.planning.workload import Ring, Workload
from penstock.streaming.streamed_matrix import StreamedMatrix

# Another plan must be worth opening the matrix again.
_BETTER = 0.8
# Sweeps that are predicted to be shorter than this are measured several times, of which the shortest counts: what the host does
# for the first time may take longer than a sweep. An odd number, so that with the one before the direction is the first again.
_SHORT_SECONDS, _SHORT_SWEEPS = 0.05, 3


@dataclass(frozen=True)
class Replanned:
    """The corrected rates, a plan of the same cut (a new one only if a fifth faster), and a sentence that says what changed."""

    rates: LinkRates
    plan: StreamPlan
    text: str


def plan_again(A: StreamedMatrix, workloads: Iterable[Workload], ring: Ring) -> Replanned | None:
    """Sweep twice with one product, and choose degree and slots anew if that shows the planned rates to be wrong.

    Returns None if the plan has no rates, or they predict the second sweep within a factor of one and a half. (What another
    transfer or product hides may be predicted wrongly.) Later sweeps go in the same direction as without this measurement.
    """
    choices, measured = list(workloads), A.plan.rates
    if measured is None or not A.plan.slots:
        return None
    columns = A.plan.workload.columns
    vectors = A.device.xp.ones((A.shape[1], columns) if columns > 1 else A.shape[1], dtype=A.dtype)
    product = A @ vectors  # kernels are compiled
    plan, was = A.plan, A.plan.powers_per_sweep
    single = replace(plan, workload=replace(plan.workload, degree=1, repeats=1))
    predicted = estimate_sweep(single, measured).seconds(plan.ring.overlap)
    taken, timeline = math.inf, Timeline()
    for _ in range(_SHORT_SWEEPS if predicted < _SHORT_SECONDS else 1):
        with A.recording() as recorded:
            A.apply(vectors, out=product)
        seconds = max(span.stop for span in recorded.spans) - min(span.start for span in recorded.spans)
        if seconds < taken:
            taken, timeline = seconds, recorded
    if 1 / APART < taken / predicted < APART or (rates := learned_rates(plan, timeline)) is None:
        return None
    same = replace(plan, rates=rates)
    best = choose(
        [Candidate(plan.index, workload, A.reach) for workload in choices], plan.budget_nbytes, ring, rates=rates
    )
    better = best.estimated_solve_seconds() < _BETTER * same.estimated_solve_seconds()
    text = f"the second sweep took {1e3 * taken:.3g} ms instead of {1e3 * predicted:.3g}: "
    if not better:
        return Replanned(rates, same, f"{text}the rates are corrected, the plan stays")
    products = f"{best.powers_per_sweep} products a sweep in {best.slots} slots"
    return Replanned(rates, best, f"{text}planned again with {products} instead of {was} in {plan.slots}")
