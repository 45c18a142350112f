"""What users hand over by mistake, and numbers near the ends of their range."""

import copy
import math

import numpy as np
import pytest
import scipy.sparse

from penstock.solvers import StopReason, block_cg, block_jacobi, cg, chebyshev, choose_block_size, jacobi, solve_many
from penstock.spmv import InputError
from penstock.streaming import HostStore, StreamedMatrix


def laplacian(n):
    return scipy.sparse.diags_array([-1.0, 2.1, -1.0], offsets=[-1, 0, 1], shape=(n, n), format="csr")


@pytest.fixture(scope="module")
def L():
    return laplacian(300)


@pytest.fixture(scope="module")
def R():
    return np.random.default_rng(0).standard_normal((300, 70))


class TestSolveMany:
    @pytest.mark.parametrize("ended", [3, 0])
    def test_begins_no_block_after_a_monitor_stopped_one(self, L, R, ended):
        """Even where the last column of that block was found solved before."""
        B, seen = R[:, :8].copy(), []
        B[:, ended] = 0

        result = solve_many(L, B, block_size=4, monitor=lambda record: (seen.append(record.iteration), True)[1])

        assert seen == [1]
        assert {column.reason for column in result.columns[4:]} == {StopReason.STOPPED}

    def test_columns_not_begun_keep_their_guesses(self, L, R):
        X0 = 1.001 * np.linalg.solve(L.toarray(), R[:, :6])

        result = solve_many(L, R[:, :6], X0, block_size=3, monitor=lambda record: True)

        np.testing.assert_array_equal(result.x[:, 3:], X0[:, 3:])
        assert math.isnan(result.columns[3].true_residual)

    @pytest.mark.parametrize("name", ["B", "X0"])
    def test_finds_what_is_not_finite_before_anything_is_solved(self, L, R, name):
        given = {"B": R.copy(), "X0": np.zeros_like(R)}
        given[name][3, 50] = np.nan

        with pytest.raises(InputError, match=f"{name} holds nan at row 3 of column 50"):
            solve_many(L, given["B"], given["X0"], monitor=lambda record: pytest.fail("a block was begun"))

    def test_takes_lists(self, L, R):
        X = solve_many(L, R[:, :3].tolist(), R[:, :3].tolist()).x

        np.testing.assert_array_equal(X, solve_many(L, R[:, :3].copy(), R[:, :3].copy()).x)

    @pytest.mark.parametrize("columns", [0, -3])
    def test_no_column_is_none_to_choose_for(self, L, columns):
        with pytest.raises(InputError, match="at least one right-hand side"):
            choose_block_size(L, columns, "1 GiB")

    def test_a_block_is_chosen_for_a_scipy_matrix(self, L):
        assert choose_block_size(L, 3) == 3


class TestBlocks:
    def test_a_guess_that_overflows_leaves_the_other_columns_alone(self, L, R):
        X0 = np.zeros((300, 3))
        X0[:, 2] = 1e308

        result = block_cg(L, R[:, :3].copy(), X0)

        assert [column.reason.name for column in result.columns] == ["CONVERGED", "CONVERGED", "NOT_FINITE"]

    @pytest.mark.parametrize("M", [lambda r: 0 * r, scipy.sparse.csr_array((300, 300))], ids=["function", "matrix"])
    def test_a_preconditioner_that_loses_all_residuals_is_named(self, L, R, M):
        result = block_cg(L, R[:, :4].copy(), M=M)

        assert {column.reason for column in result.columns} == {StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE}

    def test_what_overflows_is_told_and_warns_of_nothing(self, R):
        singular = scipy.sparse.diags_array(np.r_[np.ones(299), 0.0]).tocsr()

        result = block_cg(singular, R[:, :6].copy())

        assert not result.converged
        block_cg(laplacian(300), np.c_[R[:, 0], 1e200 * R[:, 0]], rtol=0.0, atol=1e-8)


@pytest.mark.parametrize("solve", [cg, lambda A, b: block_cg(A, b).columns[0]], ids=["cg", "block_cg"])
def test_a_residual_that_grows_out_of_all_bounds_is_that_of_a_system_without_solution(solve, R):
    """A Laplacian with both ends free; the load has a mean."""
    L = laplacian(50) - 0.1 * scipy.sparse.eye_array(50)
    L = L.tolil()
    L[0, 0] = L[49, 49] = 1.0

    assert solve(L.tocsr(), R[:50, 0].copy()).reason in (StopReason.INCONSISTENT, StopReason.NOT_POSITIVE_DEFINITE)
    assert cg(laplacian(50), R[:50, 0].copy(), 1e100 * R[:50, 1], maxiter=2).reason is StopReason.MAXITER


class TestOutOfRange:
    def test_a_preconditioner_of_tiny_numbers_is_no_sign_of_a_singular_matrix(self, L, R):
        b = R[:, 0].copy()

        assert cg(L, b, M=lambda r: 1e-200 * r).reason is StopReason.NOT_FINITE
        assert cg(L, b, M=chebyshev(L, high=1e300)).reason is StopReason.NOT_FINITE

    def test_a_state_of_a_solve_that_never_began_ends_as_that_did(self, L, R):
        b, M = R[:, 0].copy(), lambda r: -r
        first = cg(L, b, M=M)
        tiny = cg(L, 1e-120 * b)

        assert cg(L, b, M=M, state=first.state).reason is first.reason
        assert cg(L, 1e-120 * b, state=tiny.state).reason is tiny.reason is StopReason.NOT_FINITE

    def test_zero_is_within_an_absolute_tolerance_of_a_tiny_right_hand_side(self, L, R):
        b = 1e-120 * R[:, 0]

        assert cg(L, b, atol=1e-5).converged
        assert block_cg(L, np.c_[R[:, 1], b], atol=1e-5).converged
        assert not block_cg(L, np.c_[R[:, 1], b]).converged

    def test_inverses_of_tiny_diagonals_are_refused(self):
        with pytest.raises(InputError, match="at row 0 leaves the range of float64"):
            jacobi(laplacian(20) * 1e-310)
        with pytest.raises(InputError, match="at row 0 leaves the range of float32"):
            jacobi((laplacian(20) * 1e-40).astype(np.float32))
        with pytest.raises(InputError, match="range of float64"):
            block_jacobi(laplacian(20) * 1e-310, 2)


class TestStates:
    def test_of_another_system_or_solver_are_refused(self, L, R):
        b, B = R[:, 0].copy(), R[:, :4].copy()
        single, block = cg(L, b, maxiter=3).state, block_cg(L, B, maxiter=3).state
        other = laplacian(10)

        for solve, state, told in (
            (lambda state: cg(L, b, state=state), block, "a CgState of an earlier call, not a BlockCgState"),
            (lambda state: cg(L, b, state=state), {}, "not a dict"),
            (lambda state: cg(other, np.ones(10), state=state), single, r"shape \(300,\)"),
            (lambda state: block_cg(L, B, state=state), single, "a BlockCgState"),
            (lambda state: block_cg(L, B[:, :2], state=state), block, r"needs \(300, 2\)"),
            (lambda state: block_cg(other, np.ones((10, 4)), state=state), block, r"needs \(10, 4\)"),
            (lambda state: cg(L.astype(np.float32), b.astype(np.float32), state=state), single, "float32"),
        ):
            with pytest.raises(InputError, match=told):
                solve(copy.deepcopy(state))

    def test_that_cannot_be_written_to_are_refused(self, L, R):
        state = cg(L, R[:, 0].copy(), maxiter=3).state
        state.x.flags.writeable = False

        with pytest.raises(InputError, match="read-only"):
            cg(L, R[:, 0].copy(), state=state)


class TestArguments:
    @pytest.mark.parametrize("solve", [cg, block_cg])
    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"rtol": None}, "rtol must be a number"),
            ({"rtol": "1e-5"}, "rtol must be a number"),
            ({"atol": math.nan}, "atol must be a number"),
            ({"rtol": math.inf}, "rtol must be a number"),
            ({"maxiter": math.inf}, "maxiter must be a whole number"),
            ({"maxiter": math.nan}, "maxiter must be a whole number"),
            ({"maxiter": "7"}, "maxiter must be a whole number"),
            ({"maxiter": 2.5}, "maxiter must be a whole number"),
        ],
    )
    def test_that_are_no_numbers_are_refused(self, solve, options, told, L, R):
        with pytest.raises(InputError, match=told):
            solve(L, R[:, 0].copy(), **options)

    @pytest.mark.parametrize("M", [lambda r: None, lambda r: r.tolist(), lambda r: 1.0, lambda r: r * (1 + 1j)])
    def test_preconditioners_that_return_no_real_vector_are_refused(self, M, L, R):
        with pytest.raises(InputError, match="instead of real numbers of shape"):
            cg(L, R[:, 0].copy(), M=M)

    def test_degrees_and_rounds_are_whole(self, L):
        for arguments in ({"degree": 2.5}, {"degree": 4}, {"rounds": -1}, {"rounds": 1.5}):
            with pytest.raises(InputError):
                chebyshev(L, **arguments)

    def test_blocks_are_whole_and_the_matrix_square(self, L):
        with pytest.raises(InputError, match=r"1 to 8 rows, not 2\.5"):
            block_jacobi(L, 2.5)
        with pytest.raises(InputError, match=r"square matrix, not of one of shape \(5, 6\)"):
            jacobi(scipy.sparse.csr_array((5, 6)))


@pytest.mark.parametrize("products", [None, 5])
def test_sweeps_and_bytes_of_a_streamed_solve_agree(products, L, R):
    store = HostStore.from_matrix(L, 6)
    with StreamedMatrix(store, store.index.nbytes // 2) as A:
        M = None if products is None else chebyshev(A, products)
        before = A.bytes_streamed, A.sweeps
        result = cg(A, R[:, 0].copy(), M=M)

        assert result.sweeps == A.sweeps - before[1]
        assert result.bytes_streamed == A.bytes_streamed - before[0]
        assert result.sweeps >= (products or 1) * result.iterations
