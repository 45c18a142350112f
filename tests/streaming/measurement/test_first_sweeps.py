"""Rates that were measured on a busy machine make a bad plan; the first sweeps show it, and it is made again."""

import numpy as np
import pytest

from penstock.fem import Cantilever
from penstock.streaming import HostStore, LinkRates, Ring, StreamedMatrix, Workload, choose
from penstock.streaming.measurement.first_sweeps import plan_again
from penstock.streaming.planning.choice import Candidate
from penstock.streaming.testing import SlowStore

BEAM = Cantilever(nodes=(65, 9, 9), dof=3)
WORKLOADS = [Workload(degree=degree) for degree in (1, 5, 9)]
# A product takes a second to start, as on cores where many threads spin; or hours to compute.
BUSY = LinkRates(3e7, 2e10, product_start=1.0, product_gap=1.0)


@pytest.fixture(scope="module")
def store():
    """A matrix that comes so slowly that many products are worth while."""
    with HostStore.create(BEAM.subdivisions(16, "bsr")) as store:
        yield SlowStore(store, bytes_per_second=3e7)


def planned(store, rates):
    candidates = [Candidate(store.index, workload) for workload in WORKLOADS]
    return choose(candidates, int(0.7 * store.index.nbytes), rates=rates)


def test_too_slow_kernels_are_found_out(store):
    plan = planned(store, BUSY)
    assert plan.powers_per_sweep == 1

    with StreamedMatrix(store, plan.budget_nbytes, plan=plan) as A:
        direction = A.direction
        again = plan_again(A, WORKLOADS, Ring())
        assert A.direction == direction

    assert again.rates.product_gap < 0.1
    assert again.plan.powers_per_sweep > 1
    assert again.plan.index is plan.index
    assert f"planned again with {again.plan.powers_per_sweep} products a sweep" in again.text
    with StreamedMatrix(store, plan.budget_nbytes, plan=again.plan) as A:
        v = np.ones(A.shape[1])
        np.testing.assert_allclose(A @ v, BEAM.matrix() @ v, atol=1e-12)


def test_a_plan_that_left_no_choice_stays_with_other_rates(store):
    plan = planned(store, BUSY)
    with StreamedMatrix(store, plan.budget_nbytes, plan=plan) as A:
        again = plan_again(A, [plan.workload], Ring(slots=plan.slots))
    assert again.plan.slots == plan.slots
    assert again.plan.rates == again.rates != BUSY
    assert "the plan stays" in again.text


def test_a_plan_without_rates_is_not_tried(store):
    with StreamedMatrix(store, int(0.7 * store.index.nbytes)) as A:
        assert plan_again(A, WORKLOADS, Ring()) is None
        assert A.sweeps == 0
