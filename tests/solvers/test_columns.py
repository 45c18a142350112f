"""What a solve knows of its right-hand sides, and that one and several of them end for the same reasons."""

import math

import numpy as np
import pytest
import scipy.sparse

from penstock.solvers import LinearProblem, StopReason, block_cg, cg, minres
from penstock.solvers.columns import BestIterate, Columns, ColumnSpace


def columns_of(B):
    problem = LinearProblem(2.0 * scipy.sparse.eye_array(4, format="csr"), B, rtol=1e-6, atol=0.0)
    problem.set_norms(abs(B).max(axis=0) * 2.0)  # all entries of a column are equal
    return Columns(problem)


def test_columns_that_need_no_solve_stand_aside_and_others_end_by_their_first_residual():
    B = np.ones((4, 5))
    B[:, 1], B[:, 2] = 0.0, 1e200

    columns = columns_of(B)
    columns.begin([2.0, 7.0, 7.0, 1e-7, math.nan])

    assert columns.aside == {1: StopReason.CONVERGED, 2: StopReason.NOT_FINITE}
    assert columns.running == [0]
    assert columns.reasons[3:] == [StopReason.CONVERGED, StopReason.NOT_FINITE]
    assert columns.last[:4] == [1.0, 0.0, 1.0, 0.5e-7]
    assert columns.residuals[:4].tolist() == [2.0, 0.0, 2e200, 1e-7]


def test_the_residual_to_report_is_the_largest_of_those_that_run():
    columns = columns_of(np.ones((4, 3)))
    columns.begin([2.0, 1.0, 0.5])
    columns.end(0, StopReason.STAGNATED)

    assert columns.residual_norm == 0.5
    for column in columns.running:
        columns.end(column, StopReason.MAXITER)
    assert columns.residual_norm == 1.0


def test_the_expected_end_is_that_of_the_slowest_column():
    columns = columns_of(np.ones((4, 2)))
    columns.begin([2.0, 2.0])
    assert columns.iterations_left == math.inf

    columns.append([2e-3, 2e-2])

    assert columns.iterations_left == pytest.approx(2.0)


def test_a_true_residual_that_meets_the_tolerance_is_the_last_word():
    columns = columns_of(np.ones((4, 3)))
    columns.begin([2.0, 2.0, 2.0])

    columns.stop(StopReason.MAXITER, np.array([1e-6, 1.0, math.nan]))

    assert columns.reasons == [StopReason.CONVERGED, StopReason.MAXITER, StopReason.NOT_FINITE]


def test_the_better_iterate_is_chosen_column_by_column():
    B = np.ones((4, 3))
    columns, x = columns_of(B), np.column_stack([np.full(4, value) for value in (0.5, 3.0, 9.0)])
    columns.begin([2.0, 2.0, 2.0])
    best = BestIterate(np.column_stack([np.full(4, value) for value in (0.4, 0.6, 0.0)]), [0.2, 0.2, 1.0])
    best.last = [0.0, 5.0, 17.0]
    for column, residual in enumerate([0.0, 10.0, 34.0]):
        columns.end(column, StopReason.STAGNATED if column else StopReason.CONVERGED, residual)

    chosen = columns.choose(x, best)

    assert chosen[0].tolist() == [0.5, 0.6, 0.0]
    assert columns.residuals == pytest.approx([0.0, 0.4, 2.0])
    assert x[0].tolist() == [0.5, 3.0, 9.0]


@pytest.mark.parametrize(("shape", "single"), [((50,), False), ((50, 1), False), ((50, 1), True), ((50, 3), False)])
def test_inner_products_and_updates_are_those_of_each_column(shape, single):
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=shape), rng.normal(size=shape)
    alpha, beta = rng.normal(size=(2, *shape[1:])) if len(shape) == 2 else rng.normal(size=(2, 1))
    space, expected = ColumnSpace(x, single=single), alpha * x + beta * y

    assert space.dots((x, y), (y, y)) == pytest.approx(
        np.array([(x * y).sum(axis=0), (y * y).sum(axis=0)]).reshape(2, -1)
    )
    assert space.norms(x) == pytest.approx(np.linalg.norm(x.reshape(50, -1), axis=0))
    assert np.allclose(x * space.factor(alpha), alpha * x, rtol=1e-14)
    space.combine(alpha, x, beta, y)
    assert np.allclose(y, expected, rtol=0, atol=1e-14)


def test_one_and_several_right_hand_sides_that_break_down_name_what_is_not_symmetric():
    n = 60
    A = scipy.sparse.diags_array([-0.7, 2.0, -1.3], offsets=[-1, 0, 1], shape=(n, n)).tocsr()
    b = np.random.default_rng(0).normal(size=n)

    results = [solve(A, b, M=lambda r: -r) for solve in (cg, minres)]
    blocks = [solve(A, np.column_stack([b, -b]), M=lambda r: -r) for solve in (block_cg, minres)]

    assert {result.reason for result in results} == {StopReason.NOT_SYMMETRIC}
    assert {column.reason for block in blocks for column in block.columns} == {StopReason.NOT_SYMMETRIC}
