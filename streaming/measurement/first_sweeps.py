"""Plans again where the first sweeps show that the rates of a plan were wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.streaming.planning.choice import Candidate, choose
from penstock.streaming.planning.estimate import LinkRates, estimate_sweep
from penstock.streaming.planning.learned import APART, learned_rates
from penstock.streaming.planning.plan import StreamPlan
from penstock.streaming.planning.workload import Ring, Workload
from penstock.streaming.streamed_matrix import StreamedMatrix

__all__ = ["Replanned", "plan_again"]

# Another plan must be worth opening the matrix again.
_BETTER = 0.8


@dataclass(frozen=True)
class Replanned:
    """What the first sweeps led to.

    Parameters
    ----------
    rates : LinkRates
        Corrected.
    plan : StreamPlan
        Of the same cut; the one there was, at these rates, if no other is a fifth faster.
    text : str
        What was found, in a sentence.
    """

    rates: LinkRates
    plan: StreamPlan
    text: str


def plan_again(A: StreamedMatrix, workloads: Iterable[Workload], ring: Ring) -> Replanned | None:
    """Sweep twice with one product, and choose degree and slots anew if that shows the planned rates to be wrong.

    Parameters
    ----------
    A : StreamedMatrix
        Just opened; it sweeps in the same direction afterwards as before.
    workloads : iterable of Workload
        Between which the plan chose.
    ring : Ring
        As asked for, with or without a number of slots.

    Returns
    -------
    Replanned or None
        None if the plan has no rates, or they predict the second sweep within one and a half. (What another transfer or product
        hides may be predicted wrongly.)
    """
    choices, measured = list(workloads), A.plan.rates
    if measured is None or not A.plan.slots:
        return None
    columns = A.plan.workload.columns
    vectors = A.device.xp.ones((A.shape[1], columns) if columns > 1 else A.shape[1], dtype=A.dtype)
    product = A @ vectors  # kernels are compiled
    with A.recording() as timeline:
        A.apply(vectors, out=product)
    plan, was = A.plan, A.plan.powers_per_sweep
    taken = max(span.stop for span in timeline.spans) - min(span.start for span in timeline.spans)
    single = replace(plan, workload=replace(plan.workload, degree=1, repeats=1))
    predicted = estimate_sweep(single, measured).seconds(plan.ring.overlap)
    if 1 / APART < taken / predicted < APART or (rates := learned_rates(plan, timeline)) is None:
        return None
    same = replace(plan, rates=rates)
    found = choose(
        [Candidate(plan.index, workload, A.reach) for workload in choices], plan.budget_nbytes, ring, rates=rates
    )
    better = found.estimated_solve_seconds() < _BETTER * same.estimated_solve_seconds()
    text = f"the second sweep took {1e3 * taken:.3g} ms instead of {1e3 * predicted:.3g}: "
    if not better:
        return Replanned(rates, same, f"{text}the rates are corrected, the plan stays")
    products = f"{found.powers_per_sweep} products a sweep in {found.slots} slots"
    return Replanned(rates, found, f"{text}planned again with {products} instead of {was} in {plan.slots}")
