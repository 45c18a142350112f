"""A solve that goes on with another preconditioner is one solve for its caller."""

import numpy as np
import pytest
import scipy.sparse

import penstock
from penstock.driver.going_on import CountingOn
from penstock.solvers import IterationRecord, SolveResult, StopReason
from penstock.solvers.result import joined_results

N = 70
LINE = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(N, N))
SLOW = (scipy.sparse.kronsum(LINE, LINE) + 1e-6 * scipy.sparse.eye_array(N * N)).tocsr()
B = np.random.default_rng(0).normal(size=(N * N, 3))


pytestmark = pytest.mark.usefixtures("small_matrices_are_worth_it")


@pytest.mark.parametrize("b", [B[:, 0], B], ids=["one", "several"])
def test_the_message_tells_the_iterations_of_both(b):
    result = penstock.solve(SLOW, b, device="cpu")

    assert "choice      multigrid" in result.explain()
    assert result.iterations > 50
    for column in result.columns:
        assert f"(iteration {column.iterations}, " in column.message


@pytest.mark.parametrize("b", [B[:, 0], B], ids=["one", "several"])
def test_a_monitor_sees_iterations_and_seconds_count_on(b):
    seen = []
    result = penstock.solve(SLOW, b, device="cpu", monitor=seen.append)

    assert [record.iteration for record in seen] == list(range(1, result.iterations + 1))
    seconds = [record.seconds for record in seen]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("b", [B[:, 0], B], ids=["one", "several"])
def test_a_monitor_that_waits_for_an_iteration_sees_it(b):
    stopped = penstock.solve(SLOW, b, device="cpu", monitor=lambda record: record.iteration >= 53)

    assert stopped.iterations == 53
    assert stopped.columns[0].reason is StopReason.STOPPED
    assert "choice      multigrid" in stopped.explain()


def test_blocks_that_were_not_begun_count_from_one():
    seen = []
    going = CountingOn(seen.append, 50, 2.0, 100)
    for iteration in (1, 3, 3, 1, 2):  # a correction repeats the last look
        going(IterationRecord(iteration, 1.0, 0.5, 10))

    assert [record.iteration for record in seen] == [51, 53, 53, 1, 2]
    assert [record.seconds for record in seen] == [2.5, 2.5, 2.5, 0.5, 0.5]
    assert [record.bytes_streamed for record in seen] == [110, 110, 110, 10, 10]


def test_blocks_of_right_hand_sides_go_on_from_where_each_was():
    b = np.random.default_rng(1).normal(size=(N * N, 40))
    with penstock.prepare(SLOW, device="cpu") as system:  # one right-hand side at a time
        result = system.solve(b, maxiter=90)
        assert "choice      multigrid" in result.explain()
    assert result.converged
    assert (np.linalg.norm(b - SLOW @ result.x, axis=0) <= 1e-8 * np.linalg.norm(b, axis=0)).all()


def of(x, reason, norms, residual):
    cost = {"sweeps": len(norms), "bytes_streamed": 5, "timings": {"total": 1.0}}
    return SolveResult.of(np.full(2, x), reason, norms, residual, None, **cost)


@pytest.mark.parametrize(
    ("before", "after", "x", "reason", "residual"),
    [
        (("STOPPED", 0.1), ("CONVERGED", 0.2), 2.0, "CONVERGED", 0.2),
        (("STOPPED", 0.1), ("MAXITER", 0.01), 2.0, "MAXITER", 0.01),
        (("STOPPED", 0.1), ("NOT_FINITE", 0.3), 1.0, "NOT_FINITE", 0.1),
        (("STOPPED", 0.1), ("STOPPED", np.nan), 1.0, "STOPPED", 0.1),
        (("CONVERGED", 0.1), ("STOPPED", np.nan), 1.0, "CONVERGED", 0.1),
    ],
)
def test_the_better_solution_is_returned(before, after, x, reason, residual):
    one = of(1.0, StopReason[before[0]], [1.0, 0.5, before[1]], before[1])
    other = of(2.0, StopReason[after[0]], [before[1], after[1]], after[1])
    joined = joined_results(one, other)

    assert joined.x.tolist() == [x, x]
    assert joined.reason is StopReason[reason]
    assert joined.true_residual == residual
    assert joined.message.startswith(StopReason[reason].value)
    assert f"(iteration 3, true relative residual {residual:.3g}" in joined.message
    assert (joined.iterations, joined.sweeps, joined.bytes_streamed, joined.timings) == (3, 5, 10, {"total": 2.0})
