"""A solve that is left open begins with Jacobi, and goes on with multigrid where that promises to be faster."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse

import penstock
from penstock.driver import slow_convergence
from penstock.driver.slow_convergence import ConvergenceWatch, worthwhile_iterations
from penstock.solvers import IterationRecord, StopReason
from penstock.spmv import BudgetError, InputError

N = 70
LINE = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(N, N))
SLOW = (scipy.sparse.kronsum(LINE, LINE) + 1e-6 * scipy.sparse.eye_array(N * N)).tocsr()  # two dimensions
QUICK = (SLOW + 2.0 * scipy.sparse.eye_array(N * N)).tocsr()
RNG = np.random.default_rng(0)
B = RNG.normal(size=(N * N, 3))


@pytest.fixture(autouse=True)
def small_matrices_are_worth_it(monkeypatch):
    monkeypatch.setitem(slow_convergence._OVERHEAD_SECONDS, "cpu", 0.0)
    monkeypatch.setattr(slow_convergence, "_WORTH_SCALAR", 70)


@pytest.mark.parametrize("b", [B[:, 0], B], ids=["one", "several"])
def test_a_slow_system_gets_multigrid_and_goes_on_from_its_iterate(b):
    result = penstock.solve(SLOW, b, device="cpu")

    assert result.converged
    assert "choice      multigrid: jacobi promised more than 70 iterations" in result.explain()
    assert 50 <= result.iterations < 75
    for column in result.columns:
        assert len(column.residual_norms) >= 50
    x = result.x.reshape(N * N, -1)
    assert (
        np.linalg.norm(b.reshape(N * N, -1) - SLOW @ x, axis=0) <= 1e-8 * np.linalg.norm(b.reshape(N * N, -1), axis=0)
    ).all()


def test_a_quick_system_keeps_jacobi():
    result = penstock.solve(QUICK, B[:, 0], device="cpu")

    assert result.converged
    assert result.iterations < 50
    assert "choice      jacobi" in result.explain()


def test_a_prepared_system_learns_once():
    with penstock.prepare(SLOW, device="cpu") as system:
        first, second = system.solve(B[:, 0]), system.solve(B[:, 1])
        assert first.converged
        assert second.converged
        assert second.iterations < 15
        system.update(3.0 * SLOW)
        third = system.solve(B[:, 1])
    assert third.converged
    assert third.iterations < 15
    assert np.allclose(3 * third.x, second.x, atol=1e-6 * abs(second.x).max())


def test_the_callers_choice_and_monitor_and_limit_are_kept():
    named = penstock.solve(SLOW, B[:, 0], device="cpu", preconditioner="jacobi")
    assert named.converged
    assert named.iterations > 100
    seen = []
    stopped = penstock.solve(SLOW, B[:, 0], device="cpu", monitor=lambda record: seen.append(1) or len(seen) == 20)
    assert stopped.columns[0].reason is StopReason.STOPPED
    assert "jacobi" in stopped.explain()
    limited = penstock.solve(SLOW, B[:, 0], device="cpu", maxiter=53, on_failure="return")
    assert limited.iterations == 53
    assert limited.columns[0].reason is StopReason.MAXITER


@pytest.mark.parametrize("failure", [MemoryError("none"), InputError("no level"), BudgetError("no room")])
def test_jacobi_goes_on_where_multigrid_cannot_be_made(monkeypatch, failure):
    from penstock.solvers.amg.specs import MultigridSpec

    def refused(self, A):
        raise failure

    monkeypatch.setattr(MultigridSpec, "build", refused)
    result = penstock.solve(SLOW, B[:, 0], device="cpu")

    assert result.converged
    assert "choice      jacobi" in result.explain()


def test_the_mean_rate_promises():
    state = SimpleNamespace(residual_norms=[1.0])

    def judged(iteration, norm, worth=100):
        watch = ConvergenceWatch(worth, 1e-8, None)
        return watch(IterationRecord(iteration, norm, 0.0, 0, state)), watch.expected

    assert judged(10, 0.9) == (False, 0.0)  # too early
    assert judged(50, 1e-4) == (False, 0.0)  # promises 100
    assert judged(50, 1e-2) == (True, pytest.approx(200))
    assert judged(50, 2.0) == (True, np.inf)
    assert judged(180, 1e-5) == (False, 0.0)  # more than half is done
    assert judged(50, np.nan) == (False, 0.0)


def test_large_matrices_are_worth_fewer_iterations():
    assert worthwhile_iterations(10**6, 1, "cuda") > worthwhile_iterations(10**10, 1, "cuda") >= 70
    assert worthwhile_iterations(10**10, 3, "cuda") == 250 + round(0.06 / (1e10 / 4.4e12 + 40e-6))
