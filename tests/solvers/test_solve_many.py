"""Any number of right-hand sides goes through in blocks that fit."""

import numpy as np
import pytest

from penstock.solvers import (
    StopReason,
    block_cg,
    block_cg_workspace_nbytes,
    choose_block_size,
    jacobi,
    solve_many,
)
from penstock.spmv import BudgetError, InputError
from penstock.streaming import HostStore, StreamedMatrix
from penstock.streaming.planning.workload import Workload

EACH = block_cg_workspace_nbytes(252, 1)


@pytest.fixture(scope="module")
def B():
    return np.random.default_rng(0).standard_normal((252, 70))


def test_the_columns_are_those_of_blocks_one_after_the_other(A, B):
    M = jacobi(A)

    result = solve_many(A, B, M=M, rtol=1e-9, block_size=24)

    blocks = [block_cg(A, B[:, start : start + 24], M=M, rtol=1e-9) for start in (0, 24, 48)]
    np.testing.assert_array_equal(result.x, np.hstack([block.x for block in blocks]))
    assert result.converged
    assert result.info == 0
    assert len(result.columns) == 70
    assert result.iterations == sum(block.iterations for block in blocks)
    assert result.sweeps == sum(block.sweeps for block in blocks)
    for number, column in enumerate(result.columns):
        assert np.shares_memory(column.x, result.x)
        residual = np.linalg.norm(B[:, number] - A @ result.x[:, number]) / np.linalg.norm(B[:, number])
        assert residual <= 1e-9 * (1 + 1e-9)


def test_first_guesses_go_with_their_columns(A, B):
    exact = solve_many(A, B, rtol=1e-12).x

    assert solve_many(A, B, exact, rtol=1e-6, block_size=9).iterations == 0


@pytest.mark.parametrize(
    ("columns", "room", "expected"),
    [(1, 100, 1), (20, 100, 20), (32, 100, 32), (33, 100, 17), (70, 100, 24), (70, 10, 10), (64, 1, 1), (30, 16, 15)],
)
def test_blocks_are_as_large_as_fits_and_equally_large(A, columns, room, expected):
    assert choose_block_size(A, columns, room * EACH) == expected


def test_a_streamed_matrix_takes_what_its_plan_has_set_aside_and_larger_blocks(A, B, beam):
    store = HostStore.create(beam.subdivisions(8))
    ring = 2 * max(s.nbytes for s in store.index.subdivisions)
    for room, expected in ((100, 64), (5, 5)):
        with StreamedMatrix(store, ring, workload=Workload(workspace_nbytes=room * EACH)) as streamed:
            assert choose_block_size(streamed, 64) == expected
    with StreamedMatrix(store, ring, workload=Workload(workspace_nbytes=40 * EACH)) as streamed:
        result = solve_many(streamed, B, M=jacobi(streamed), rtol=1e-9)
    np.testing.assert_array_equal(result.x, solve_many(A, B, M=jacobi(A), rtol=1e-9, block_size=35).x)
    assert result.bytes_streamed > 0


def test_by_default_free_memory_is_what_there_is(A):
    assert choose_block_size(A, 32) == 32


def test_memory_that_holds_not_even_one_column_is_refused_before_anything_is_done(A, B):
    with pytest.raises(
        BudgetError, match=r"vectors of one right-hand side need 13\.78 KiB, but 1\.953 KiB are available"
    ):
        solve_many(A, B, memory=2000)


def test_a_monitor_that_stops_a_block_stops_them_all(A, B):
    seen = []

    result = solve_many(A, B, block_size=30, monitor=lambda record: seen.append(record.iteration) or len(seen) == 3)

    assert seen == [1, 2, 3]
    assert {column.reason for column in result.columns} == {StopReason.STOPPED}
    assert result.x[:, :30].any()
    assert not result.x[:, 30:].any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"B": np.ones(252)}, r"B must have shape \(252, columns\)"),
        ({"B": np.ones((252, 0))}, "at least one column"),
        ({"B": np.ones((3, 2))}, r"not \(3, 2\)"),
        ({"X0": np.ones((252, 2))}, "X0 must have the shape of B"),
        ({"block_size": 0}, "block_size must be 1 to 64"),
        ({"block_size": 65}, "block_size must be 1 to 64"),
        ({"state": object()}, "a state belongs to one block"),
    ],
)
def test_bad_input_is_refused(A, B, wrong, message):
    with pytest.raises(InputError, match=message):
        solve_many(A, **{"B": B, **wrong})
