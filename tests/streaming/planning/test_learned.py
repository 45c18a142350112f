"""Rates are corrected by a recorded sweep, where it was not as predicted."""

from dataclasses import replace

import pytest

from penstock.fem import Cantilever
from penstock.streaming import LinkRates, Timeline, Workload, index_of, plan_stream, simulate
from penstock.streaming.planning.estimate import SweepTimes
from penstock.streaming.planning.learned import learned_rates

BEAM = Cantilever(nodes=(65, 9, 9), dof=3)
RATES = LinkRates(1e9, 2e10, transfer_start=1e-5, product_start=1e-6, product_gap=1e-6)


@pytest.fixture(scope="module")
def plan():
    index = index_of(BEAM.symbolic_slabs(16, "bsr"), BEAM.shape)
    return plan_stream(index, index.nbytes // 2, Workload(degree=5), rates=RATES)


def recorded(plan, *, link=1.0, kernels=1.0):
    """Return the timeline of a sweep with one product, where transfers and products take so many times as long."""
    times = SweepTimes(replace(plan, workload=Workload()), plan.rates)
    return simulate(
        plan.schedule.prologue() + plan.schedule.sweep(0),
        lambda number: link * times.transfer(number),
        lambda number: kernels * times.product(number),
        overlap=True,
    )


@pytest.mark.parametrize("factors", [{}, {"link": 1.4}, {"kernels": 0.7}, {"link": 0.7, "kernels": 1.4}])
def test_a_sweep_about_as_predicted_changes_nothing(plan, factors):
    assert learned_rates(plan, recorded(plan, **factors)) is None


def test_slow_transfers_correct_the_link_and_nothing_else(plan):
    found = learned_rates(plan, recorded(plan, link=4.0, kernels=1.2))
    assert found.link == pytest.approx(RATES.link / 4)
    assert found.transfer_start == pytest.approx(RATES.transfer_start * 4)
    assert found == replace(RATES, link=found.link, transfer_start=found.transfer_start)


def test_fast_products_correct_their_starts_if_that_explains_it(plan):
    slow_starts = replace(RATES, product_start=0.05, product_gap=0.1)
    found = learned_rates(replace(plan, rates=slow_starts), recorded(plan))
    assert found.memory == RATES.memory
    assert found.product_gap == pytest.approx(RATES.product_gap)


@pytest.mark.parametrize("factor", [0.01, 0.5, 3.0, 1000.0])
def test_corrected_rates_predict_the_products_that_were_recorded(plan, factor):
    found = learned_rates(plan, recorded(plan, kernels=factor))
    single = replace(plan, workload=Workload())
    for number in range(16):
        expected = factor * SweepTimes(single, RATES).product(number)
        assert SweepTimes(single, found).product(number) == pytest.approx(expected)
    assert learned_rates(replace(plan, rates=found), recorded(plan, kernels=factor)) is None


def test_without_rates_or_spans_nothing_is_learned(plan):
    assert learned_rates(replace(plan, rates=None), recorded(plan, link=9.0)) is None
    assert learned_rates(plan, Timeline()) is None
