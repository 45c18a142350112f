"""Corrects measured rates by the times of a sweep: probes can be wrong, for example where other processes use the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.streaming.planning.estimate import LinkRates, SweepTimes
from penstock.streaming.planning.plan import StreamPlan
from penstock.streaming.planning.timeline import SpanKind, Timeline

#: Predictions within this factor are good enough to plan with.
APART = 1.5


def learned_rates(plan: StreamPlan, timeline: Timeline) -> LinkRates | None:
    """Return the rates of a plan, corrected so that they predict a recorded sweep with one product; None if they do already.

    The timeline is of as many vectors as the plan. Transfers and products are corrected separately. Those that took more than
    one and a half times as long as predicted correct the rate and the time to start them by that factor. Those that took less
    than two thirds of it correct the time to start them alone, if that explains it: starts are what other processes disturb
    most while rates are measured.
    """
    rates = plan.rates
    if rates is None:
        return None
    single = replace(plan, workload=replace(plan.workload, degree=1, repeats=1))
    times = SweepTimes(single, rates)
    without_starts = SweepTimes(single, replace(rates, transfer_start=0.0, product_start=0.0, product_gap=0.0))
    link, transfer_start = _factors(timeline, "transfer", times.transfer, without_starts.transfer)
    memory, product_start = _factors(timeline, "compute", times.product, without_starts.product)
    if link == transfer_start == memory == product_start == 1.0:
        return None
    return replace(
        rates,
        link=rates.link / link,
        transfer_start=rates.transfer_start * transfer_start,
        memory=rates.memory / memory,
        product_start=rates.product_start * product_start,
        product_gap=rates.product_gap * product_start,
    )


def _factors(
    timeline: Timeline, kind: SpanKind, predicted: Callable[[int], float], for_bytes: Callable[[int], float]
) -> tuple[float, float]:
    """Return measured over predicted seconds for the bytes and for the starts of a kind of spans; 1 if about right."""
    numbers = [span.subdivision for span in timeline.spans if span.kind == kind]
    expected, moving, taken = sum(map(predicted, numbers)), sum(map(for_bytes, numbers)), timeline.seconds(kind)
    if not expected or not taken or 1 / APART < taken / expected < APART:
        return 1.0, 1.0
    if moving < taken < expected:
        return 1.0, (taken - moving) / (expected - moving)
    return taken / expected, taken / expected
