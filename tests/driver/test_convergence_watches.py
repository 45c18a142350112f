"""What watches of a solve make of its residuals: whether it promises to be slow, and whether it had a fair try."""

from types import SimpleNamespace

import numpy as np
import pytest

from penstock.driver.going_on import CountingOn
from penstock.driver.slow_convergence import ConvergenceWatch, FactorisationWatch, FairTry
from penstock.solvers import IterationRecord, StopReason


def looked(iteration, *norms, b_norms=None, reasons=None):
    """Return what a monitor sees of right-hand sides that began with the residual 1, a list of them if there are several."""
    histories = [[1.0, norm] for norm in norms]
    mark = SimpleNamespace(b_norms=b_norms or (1.0,) * len(norms))
    state = SimpleNamespace(residual_norms=histories[0], iteration=iteration, system=mark)
    if len(norms) > 1:
        state.residual_norms, state.reasons = histories, reasons or [None] * len(norms)
    return IterationRecord(iteration, max(norms), 0.0, 0, state)


def judged(record, rtol=1e-8, atol=0.0, maxiter=None, worth=100):
    watch = ConvergenceWatch(worth, 50, rtol, atol, maxiter, None)
    return watch(record), watch.expected


def test_the_mean_rate_promises():
    assert judged(looked(10, 0.9)) == (False, 0.0)  # too early
    assert judged(looked(50, 1e-4)) == (False, 0.0)  # promises 100
    assert judged(looked(50, 1e-2)) == (True, pytest.approx(200))
    assert judged(looked(50, 2.0)) == (True, np.inf)
    assert judged(looked(180, 1e-5), worth=190) == (False, 0.0)  # more than half is done
    assert judged(looked(50, np.nan)) == (False, 0.0)


def test_a_residual_that_stood_still_at_first_is_told_by_its_last_rate():
    """As with Jacobi and a smooth right-hand side, until the slowest mode is found."""
    record = looked(50, 1e-3)
    record.state.residual_norms[:] = [1.0] * 26 + [10.0 ** (-3 * k / 25) for k in range(1, 26)]
    verdicts = []
    for stands_still in (False, True):
        watch = ConvergenceWatch(120, 50, 1e-8, 0.0, None, None, stands_still=stands_still)
        verdicts.append(watch(record))

    assert verdicts == [True, False]  # the mean rate promises 133 iterations, the last one 92


@pytest.mark.parametrize(
    ("iteration", "norm", "stops"),
    [(24, 0.9, False), (25, 0.9, True), (25, 0.03, False), (25, 1.1, False), (30, 0.9, True)],  # 0.03 promises 131
)
def test_half_of_the_iterations_suffice_where_far_more_are_promised(iteration, norm, stops):
    record = looked(iteration, norm)
    record.state.residual_norms[:] = [norm ** (k / iteration) for k in range(iteration + 1)]
    watch = ConvergenceWatch(100, 50, 1e-8, 0.0, None, None, stands_still=True)

    assert watch(record) == stops
    assert (watch.left_seconds > 0) == stops
    assert not ConvergenceWatch(100, 50, 1e-8, 0.0, None, None)(record)


def test_what_takes_much_less_is_not_waited_for():
    asked = []
    watch = ConvergenceWatch(1000, 50, 1e-8, 0.0, None, None, sooner=lambda left: asked.append(left) or len(asked) > 1)
    assert not watch(looked(49, 1e-3))
    assert not watch(looked(60, 1e-4))  # half is done
    assert not asked
    assert not watch(looked(50, 1e-3))
    assert watch(looked(51, 1e-3))
    assert watch.expected == pytest.approx(51 * 8 / 3)
    assert asked[1] == watch.left_seconds > 0


def test_the_tolerance_is_that_of_the_solve():
    slow = looked(50, 1e-2, b_norms=(1e3,))
    assert judged(slow, rtol=0.0, atol=1e-5) == (True, pytest.approx(200))
    assert judged(slow, rtol=1e-8, atol=1.0) == (False, 0.0)  # promises 75
    assert judged(slow, rtol=1e-8, atol=100.0) == (False, 0.0)  # is about to be tested
    assert judged(slow, rtol=0.0, atol=0.0) == (True, pytest.approx(50 * np.log(2.0**53) / np.log(100)))


def test_of_several_right_hand_sides_the_slowest_that_still_runs_counts():
    two = looked(50, 1e-4, 1e-2, b_norms=(1.0, 1e3))
    assert judged(two) == (True, pytest.approx(200))
    assert judged(two, atol=1.0) == (False, 0.0)
    assert judged(looked(50, 1e-4, 1e-2, reasons=[None, StopReason.CONVERGED])) == (False, 0.0)


def test_with_hardly_an_iteration_left_jacobi_stays():
    assert judged(looked(50, 1e-2), maxiter=55) == (False, 0.0)
    assert judged(looked(50, 1e-2), maxiter=150) == (True, pytest.approx(200))


def test_a_try_is_fair():
    def judged(record):
        watch = FairTry(200, 1e-8, 0.0, None)
        return watch(record)

    assert not judged(looked(199, 0.9))
    assert judged(looked(200, 0.9))
    assert not judged(looked(200, 1e-5))  # more than half is done
    assert not judged(looked(20, 1e7))
    assert judged(looked(20, 1e9))  # no system with a solution has such a residual
    assert judged(looked(20, 1e9, 0.1))


def judged_against_a_factorisation(iteration, *norms, look=0.0, seconds=0.6, maxiter=None):
    """Return what multigrid, an iteration of which takes 0.01 s, promises to need when a factorisation takes less."""
    asked = []
    watch = FactorisationWatch(0.01, look, lambda: asked.append(1) or seconds, 1e-8, 0.0, maxiter, None)
    record = looked(iteration, norms[-1])
    record.state.residual_norms = list(norms)
    assert watch(record) == (watch.expected > 0)
    return watch.expected, len(asked)


def falling(rate, iterations):
    return [10.0 ** (-rate * iteration) for iteration in range(iterations + 1)]


def test_multigrid_that_takes_longer_than_a_factorisation_is_stopped():
    assert judged_against_a_factorisation(15, *falling(0.04, 15)) == (pytest.approx(200), 1)
    assert judged_against_a_factorisation(14, *falling(0.04, 14)) == (0.0, 0)  # too early
    assert judged_against_a_factorisation(15, *falling(0.4, 15)) == (0.0, 0)  # is nearly done
    assert judged_against_a_factorisation(15, *falling(0.08, 15)) == (0.0, 1)  # takes 0.85 s
    assert judged_against_a_factorisation(15, *falling(0.04, 15), look=0.7) == (0.0, 0)  # to look would take as long
    assert judged_against_a_factorisation(15, *falling(0.04, 15), maxiter=17) == (0.0, 0)
    assert judged_against_a_factorisation(15, *falling(0.04, 15), maxiter=18) == (pytest.approx(200), 1)


def test_multigrid_that_gathers_speed_is_not_stopped():
    norms = [*falling(-0.05, 8), *(10.0 ** (0.4 - 0.4 * iteration) for iteration in range(1, 10))]
    assert judged_against_a_factorisation(16, *norms) == (0.0, 0)


def test_a_residual_that_hardly_falls_any_more_is_not_waited_for():
    """More than half of the digits came at once: the mean rate promises well, the last half of the iterations does not."""
    norms = [10.0 ** -min(0.1 * i, 5 + 1e-3 * i) for i in range(400)]
    records = {}
    for iteration in (150, 260):
        records[iteration] = looked(iteration, norms[iteration])
        records[iteration].state.residual_norms = norms[: iteration + 1]

    assert judged(records[150], worth=200) == (False, 0.0)  # not more than what another way costs has been spent
    assert judged(records[260], worth=200) == (True, pytest.approx(260 + 2740, rel=0.02))
    assert judged(records[260], worth=3000) == (False, 0.0)


def test_a_solve_that_goes_on_is_judged_by_its_own_iterations():
    watch = ConvergenceWatch(100, 25, 1e-8, 0.0, None, None)
    counted = CountingOn(watch, 25, 0.0, 0)
    assert not counted(looked(1, 0.9))
    assert watch.expected == 0.0
    assert counted(looked(25, 0.9))
