"""``block_cg`` solves every column as ``cg`` would, with fewer products, whatever the columns have to do with each other."""

import copy

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
from block_solves import (
    NORM_SLACK,
    PRECONDITIONERS,
    check_honest,
    lengths,
    right_hand_sides,
    same_solve,
    staggered,
    true_residuals,
)

from penstock.solvers import StopReason, block_cg, block_cg_workspace_nbytes, cg, jacobi
from penstock.spmv import CsrMatrix, FunctionOperator
from penstock.streaming import HostStore, StreamedMatrix


@st.composite
def troubled_blocks(draw):
    """Rows, seed, and right-hand sides that are combinations, repetitions, zero, and of very different size."""
    n, columns, seed = draw(st.integers(2, 20)), draw(st.integers(1, 14)), draw(st.integers(0, 999))
    rng = np.random.default_rng(seed)
    rank = draw(st.integers(1, min(n, columns)))
    B = rng.standard_normal((n, rank)) @ rng.standard_normal((rank, columns))
    for column in range(columns):
        kind = draw(st.sampled_from(["as it is", "zero", "repeated", "nearly repeated", "scaled"]))
        if kind == "zero":
            B[:, column] = 0.0
        elif "repeated" in kind:
            B[:, column] = B[:, draw(st.integers(0, column))]
        if kind == "nearly repeated":
            B[:, column] += 10.0 ** -draw(st.integers(2, 16)) * rng.standard_normal(n) * np.abs(B[:, column]).max()
        elif kind == "scaled":
            B[:, column] *= 10.0 ** draw(st.integers(-6, 6))
    return n, seed, B


def ring_nbytes(store):
    return 2 * max(subdivision.nbytes for subdivision in store.index.subdivisions)


@pytest.fixture(scope="module", params=["csr", "bsr"])
def store(request, beam):
    return request.param, HostStore.create(beam.subdivisions(8, request.param))


class TestAgainstOneByOne:
    @pytest.mark.parametrize("columns", [1, 2, 5, 8, 9, 16, 33, 64])
    def test_every_column_is_that_of_a_direct_solve(self, A, dense, preconditioner, columns):
        B, rtol = right_hand_sides(252, columns), 1e-9

        result = block_cg(A, B, rtol=rtol, M=preconditioner(A))

        assert result.converged
        assert result.info == 0
        check_honest(A, B, result, rtol)
        assert result.x.shape == B.shape
        # ||x - x*|| <= ||b - A x|| / the smallest eigenvalue.
        bound = rtol * lengths(B) / np.linalg.eigvalsh(dense)[0]
        assert (lengths(result.x - np.linalg.solve(dense, B)) <= 1.01 * bound).all()

    def test_one_column_takes_the_steps_of_cg(self, A, b, preconditioner):
        b, M, ours, theirs = b.copy(), preconditioner(A), [], []

        block = block_cg(A, b[:, None], rtol=1e-8, M=M, callback=lambda X: ours.append(X[:, 0].copy()))
        single = cg(A, b, rtol=1e-8, M=M, callback=lambda x: theirs.append(x.copy()))

        assert abs(block.iterations - single.iterations) <= max(2, single.iterations // 20)
        for mine, other in zip(ours[:10], theirs[:10], strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-9 * np.abs(other).max())

    @pytest.mark.parametrize("preconditioned", [False, "jacobi", "function"])
    def test_iterates_are_the_best_of_the_block_krylov_space(self, spd, preconditioned):
        """Of all combinations of ``(M A)^i M B`` the one nearest to the solution in the norm of A."""
        n, columns = 40, 3
        A, B = spd(n, 100.0), right_hand_sides(n, columns)
        inverse = np.eye(n)
        if preconditioned:
            inverse = np.diag(1 / np.diag(A)) if preconditioned == "jacobi" else spd(n, 5.0, seed=1)
        M = {"jacobi": jacobi(CsrMatrix.from_csr(scipy.sparse.csr_array(A))), "function": lambda r: inverse @ r}

        basis, newest = np.zeros((n, 0)), inverse @ B
        for steps in range(1, 7):
            basis = np.linalg.qr(np.hstack([basis, newest]))[0]
            newest = inverse @ A @ basis[:, -columns:]
            best = basis @ np.linalg.solve(basis.T @ A @ basis, basis.T @ B)

            X = block_cg(A, B, rtol=0.0, maxiter=steps, M=M.get(preconditioned)).x

            np.testing.assert_allclose(X, best, rtol=0, atol=1e-9 * np.abs(best).max())

    @pytest.mark.parametrize("columns", [12, 64])
    @pytest.mark.parametrize("preconditioned", [False, True])
    def test_more_columns_than_rows(self, spd, columns, preconditioned):
        """All are combinations of as many vectors as there are rows, whose products solve everything at once."""
        A, B = spd(9, 100.0), right_hand_sides(9, columns)

        result = block_cg(A, B, rtol=1e-10, M=(lambda r: r / 3) if preconditioned else None)

        assert result.converged
        assert result.iterations <= 3
        check_honest(A, B, result, 1e-10)
        np.testing.assert_allclose(result.x, np.linalg.solve(A, B), rtol=0, atol=1e-7)

    @pytest.mark.parametrize("columns", [1, 9, 33])
    def test_a_float32_system_is_solved_in_float32(self, A, preconditioner, columns):
        narrow, B = CsrMatrix.from_csr(A.to_csr().astype(np.float32)), right_hand_sides(252, columns, 1, np.float32)

        result = block_cg(narrow, B, rtol=1e-3, M=preconditioner(narrow))

        assert result.x.dtype == np.float32
        assert result.converged
        check_honest(narrow, B, result, 1e-3)

    def test_a_float32_preconditioner_is_not_called_indefinite_for_its_rounding(self, spd):
        """The diagonal that is applied in passing has no such trouble; a function that does the same has."""
        for seed in range(10):
            A, B = spd(9, 100.0, seed).astype(np.float32), right_hand_sides(9, 14, seed, np.float32)
            M = scipy.sparse.linalg.aslinearoperator(np.diag(1 / A.diagonal()))

            result = block_cg(A, B, rtol=1e-3, M=M)

            assert {of.reason for of in result.columns} == {StopReason.CONVERGED}

    @pytest.mark.parametrize("guess", [False, True])
    def test_right_hand_sides_are_left_unchanged(self, A, preconditioner, guess):
        B = np.tile(right_hand_sides(252, 2), 2)
        before = B.copy()

        result = block_cg(A, B, np.ones_like(B) if guess else None, M=preconditioner(A))

        np.testing.assert_array_equal(B, before)
        assert not np.shares_memory(result.x, B)

    def test_right_hand_sides_may_be_read_only(self, A, b):
        np.testing.assert_array_equal(block_cg(A, b[:, None]).x, block_cg(A, b[:, None].copy()).x)

    def test_a_vector_is_a_block_of_one_column(self, A, b):
        b = b.copy()
        result = block_cg(A, b)

        assert result.x.shape == (252, 1)
        np.testing.assert_array_equal(result.x, block_cg(A, b[:, None]).x)
        X, info = result
        assert X is result.x
        assert info == 0

    def test_the_memory_told_is_that_of_the_blocks(self):
        assert block_cg_workspace_nbytes(1000, 8) == 7 * 8 * 8000
        assert block_cg_workspace_nbytes(1000, 8, np.float32, preconditioned=False) == 6 * 8 * 4000


class TestTolerance:
    @pytest.mark.parametrize("rtol", [1e-2, 1e-5, 1e-8])
    def test_rtol_is_relative_to_each_column(self, A, rtol):
        B = right_hand_sides(252, 6) * 10.0 ** np.arange(-6, 6, 2)

        result = block_cg(A, B, rtol=rtol, M=jacobi(A))

        assert result.converged
        assert (true_residuals(A, B, result.x) <= rtol * lengths(B) * NORM_SLACK).all()
        for of in result.columns:
            assert of.residual_norms[-1] <= rtol
            assert max(of.residual_norms[:-1]) > rtol

    def test_atol_is_absolute_and_the_larger_one_counts(self, A):
        B, atol = right_hand_sides(252, 5) * 2.0 ** np.arange(5), 1e-3

        loose, tight = block_cg(A, B, rtol=1e-9, atol=atol), block_cg(A, B, rtol=1e-9, atol=1e-30)

        assert loose.converged
        assert (true_residuals(A, B, loose.x) <= np.maximum(1e-9 * lengths(B), atol) * NORM_SLACK).all()
        assert true_residuals(A, B, loose.x)[-1] > 1e-9 * lengths(B)[-1]
        assert loose.iterations < tight.iterations

    def test_two_equal_tolerances_are_no_looser_than_one(self, A, b):
        b, rtol = b[:, None].copy(), 1e-4
        one = block_cg(A, b, rtol=rtol)

        both = block_cg(A, b, rtol=rtol, atol=rtol * np.linalg.norm(b))

        assert one.iterations == both.iterations < block_cg(A, b, rtol=rtol / 2).iterations

    def test_the_default_is_a_relative_1e_5(self, A):
        B = right_hand_sides(252, 3)

        np.testing.assert_array_equal(block_cg(A, B).x, block_cg(A, B, rtol=1e-5, atol=0.0).x)

    def test_zero_columns_are_solved_by_zero_and_take_part_in_nothing(self, A):
        B = np.insert(right_hand_sides(252, 3), [0, 2], 0.0, axis=1)

        result = block_cg(A, B, np.ones_like(B), rtol=1e-8)

        assert result.converged
        assert not result.x[:, [0, 3]].any()
        check_honest(A, B, result, 1e-8)
        nothing = block_cg(A, np.zeros((252, 4)), np.ones((252, 4)))
        assert (nothing.info, nothing.iterations, [of.true_residual for of in nothing.columns]) == (0, 0, [0.0] * 4)
        assert not nothing.x.any()

    @pytest.mark.parametrize("tolerance", [{"rtol": 1.0}, {"atol": 1e9}])
    def test_a_tolerance_that_zero_meets_takes_no_product(self, A, tolerance):
        result = block_cg(A, right_hand_sides(252, 3), **tolerance)

        assert (result.info, result.iterations, result.sweeps) == (0, 0, 0)
        assert not result.x.any()

    def test_every_column_has_its_own_first_guess_which_is_left_unchanged(self, A, dense):
        B = right_hand_sides(252, 4)
        X0 = right_hand_sides(252, 4, seed=1).copy()
        X0[:, 2] = np.linalg.solve(dense, B[:, 2])
        before, widths = X0.copy(), []
        operator = FunctionOperator(lambda X: widths.append(X.shape[1]) or dense @ X, A.shape, np.float64, blocks=True)

        result = block_cg(operator, B, X0, rtol=1e-8)

        np.testing.assert_array_equal(X0, before)
        assert not np.shares_memory(result.x, X0)
        assert result.converged
        np.testing.assert_array_equal(result.x[:, 2], X0[:, 2])
        assert widths[:2] == [4, 3], "the first residuals, and the search without the column that is solved"
        starts = [of.residual_norms[0] for of in result.columns]
        np.testing.assert_allclose(starts, lengths(B - dense @ X0) / lengths(B), rtol=1e-6, atol=1e-12)
        check_honest(operator, B, result, 1e-8)

    def test_a_first_guess_of_zero_is_the_default(self, A):
        B = right_hand_sides(252, 3)

        np.testing.assert_array_equal(block_cg(A, B, np.zeros_like(B)).x, block_cg(A, B).x)

    @pytest.mark.parametrize("maxiter", [0, 1, 7])
    def test_maxiter_ends_the_search_and_says_so(self, A, maxiter):
        B = right_hand_sides(252, 3)

        result = block_cg(A, B, rtol=1e-9, maxiter=maxiter)

        assert [of.reason for of in result.columns] == [StopReason.MAXITER] * 3
        assert (result.iterations, result.info) == (maxiter, max(maxiter, 1))
        check_honest(A, B, result, 1e-9)

    def test_convergence_in_the_last_iteration_allowed_counts(self, A):
        B = right_hand_sides(252, 3)
        enough = block_cg(A, B).iterations

        assert block_cg(A, B, maxiter=enough).info == 0
        assert block_cg(A, B, maxiter=enough - 1).info == enough - 1


class TestRankTrouble:
    @hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
    @hypothesis.given(
        troubled_blocks(),
        st.sampled_from([1e-2, 1e-5, 1e-10]),
        st.sampled_from(["none", "jacobi", "function"]),
        st.booleans(),
    )
    def test_whatever_the_columns_have_in_common_all_of_a_benign_system_converge(self, spd, block, rtol, M, guess):
        n, seed, B = block
        A = CsrMatrix.from_csr(scipy.sparse.csr_array(spd(n, 50.0, seed)))
        X0 = np.random.default_rng(seed).standard_normal(B.shape) * lengths(B) if guess else None

        result = block_cg(A, B, X0, rtol=rtol, M=PRECONDITIONERS[M](A))

        check_honest(A, B, result, rtol)
        assert result.converged, [of.message for of in result.columns]

    @pytest.mark.parametrize("distinct", [1, 3])
    def test_repeated_columns_cost_no_products(self, A, dense, preconditioner, distinct):
        widths = []
        operator = FunctionOperator(lambda X: widths.append(X.shape[1]) or dense @ X, A.shape, np.float64, blocks=True)
        B = np.tile(right_hand_sides(252, distinct), 4) * np.repeat(10.0 ** np.arange(-4, 8, 3), distinct)

        result = block_cg(operator, B, rtol=1e-8, M=preconditioner(A))

        assert result.converged
        assert set(widths[:-1]) <= set(range(1, distinct + 1))
        assert widths[0] == distinct
        np.testing.assert_allclose(result.x[:, -1] * 1e-9, result.x[:, distinct - 1], rtol=0, atol=1e-5)

    def test_scaling_columns_by_powers_of_two_scales_the_solutions(self, A, preconditioner):
        B, scales = right_hand_sides(252, 4), 2.0 ** np.array([-20, 0, 7, 20])

        scaled, plain = (block_cg(A, block, rtol=1e-8, M=preconditioner(A)) for block in (B * scales, B))

        np.testing.assert_allclose(scaled.x / scales, plain.x, rtol=0, atol=1e-9 * np.abs(plain.x).max())


class TestInvariants:
    """What the recurrences keep true in every iteration, seen in the state."""

    @pytest.mark.parametrize("kind", ["none", "jacobi", "function"])
    @pytest.mark.parametrize("trouble", ["none", "close at first", "close after an iteration", "shrinking"])
    def test_residuals_are_orthonormal_and_directions_conjugate(self, spd, kind, trouble):
        n, atol = 60, 0.0
        A = spd(n, 30.0)
        M = PRECONDITIONERS[kind](CsrMatrix.from_csr(scipy.sparse.csr_array(A)))
        inverse = np.eye(n) if M is None else M(np.eye(n)) if kind == "function" else np.diag(1 / np.diag(A))
        B = right_hand_sides(n, 4)
        if trouble == "close at first":
            B[:, 3] = B[:, 0] + B[:, 1] + 1e-5 * B[:, 3]
        elif trouble == "close after an iteration":
            # One combination of the columns is nearly an eigenvector of A M, which takes one iteration.
            _, vectors = scipy.linalg.eigh(A, np.linalg.inv(inverse))
            B[:, 3] = np.linalg.solve(inverse, vectors[:, -1]) + 1e-5 * B[:, 3]
            B = B @ np.linalg.qr(right_hand_sides(4, 4, seed=1))[0]
        elif trouble == "shrinking":
            B[:, 1:3] *= 1e-2
            atol = 2e-2
        passes, previous = [], None

        def check(record):
            nonlocal previous
            state = record.state
            if not state.active:
                return True
            Q, P = state.w @ state.t, state.p.copy()
            np.testing.assert_allclose(Q.T @ inverse @ Q, np.eye(Q.shape[1]), rtol=0, atol=1e-11)
            residuals = (B - A @ state.x)[:, state.active]
            np.testing.assert_allclose(Q @ state.phi, residuals, rtol=0, atol=1e-11 * np.abs(B).max())
            if previous is not None:
                scale = np.sqrt(np.outer(np.diag(P.T @ A @ P), np.diag(previous.T @ A @ previous)))
                np.testing.assert_allclose(P.T @ A @ previous / scale, 0, atol=1e-9)
            passes.append(P.shape[1])
            previous = P
            return record.iteration == 5

        block_cg(A, B, rtol=0.0, atol=atol, M=M, monitor=check)

        assert len(passes) >= 4
        assert (len(set(passes)) > 1) == (trouble == "shrinking")


class TestProducts:
    def test_columns_that_converge_leave_the_block(self, A, dense, preconditioner):
        B, atol = staggered()
        widths = []
        operator = FunctionOperator(lambda X: widths.append(X.shape[1]) or dense @ X, A.shape, np.float64, blocks=True)

        result = block_cg(operator, B, rtol=0.0, atol=atol, M=preconditioner(A))

        assert result.converged
        assert len(widths) == result.sweeps == result.iterations + 1, "one an iteration and one for the true residuals"
        search = widths[: result.iterations]
        assert widths[result.iterations] == 5
        assert search == sorted(search, reverse=True)
        assert len(set(search)) >= 4
        assert search[0] == 5
        assert search[-1] < 3
        check_honest(operator, B, result, 0.0, atol)

    @pytest.mark.parametrize(("columns", "share"), [(2, 0.8), (5, 0.5), (16, 0.25)])
    def test_together_columns_need_fewer_iterations_than_each_alone(self, A, columns, share):
        B = right_hand_sides(252, columns)
        alone = [cg(A, column, rtol=1e-8).iterations for column in B.T[:3]]

        assert block_cg(A, B, rtol=1e-8).iterations < share * min(alone)

    def test_timings_are_told(self, A):
        result = block_cg(A, right_hand_sides(252, 2))

        assert 0 <= result.timings["matrix"] <= result.timings["total"]
        assert all(of.timings == result.timings and of.sweeps == result.sweeps for of in result.columns)


class TestStreamed:
    @pytest.mark.parametrize("kind", PRECONDITIONERS)
    def test_is_bit_equal_to_the_resident_solve_and_counts_its_traffic(self, beam, store, hard, kind):
        name, store = store
        B, X0, atol = hard
        resident = beam.matrix(name)
        M, told = PRECONDITIONERS[kind](resident), []
        expected = block_cg(resident, B, X0, rtol=0.0, atol=atol, M=M)
        with StreamedMatrix(store, ring_nbytes(store) + 20_000) as A:
            assert A.plan.slots
            A @ B
            sweeps, nbytes = A.sweeps, A.bytes_streamed

            result = block_cg(
                A, B, X0, rtol=0.0, atol=atol, M=M, monitor=lambda r: told.append((A.bytes_streamed - nbytes, r))
            )

            assert result.sweeps == A.sweeps - sweeps
            assert result.bytes_streamed == A.bytes_streamed - nbytes
            assert result.bytes_streamed == sum(map(A.plan.sweep_nbytes, range(sweeps, A.sweeps))) > 0
        same_solve(result, expected)
        assert result.sweeps == expected.sweeps
        assert [record.bytes_streamed for _, record in told] == [counted for counted, _ in told]

    def test_takes_one_sweep_an_iteration_and_goes_on_from_a_state(self, store):
        _, store = store
        B = right_hand_sides(252, 16)
        with StreamedMatrix(store, ring_nbytes(store)) as A:
            whole = block_cg(A, B, rtol=1e-8, M=jacobi(A))
            part = block_cg(A, B, rtol=1e-8, M=jacobi(A), monitor=lambda record: record.iteration == 4)
            state = copy.deepcopy(part.state)
        with StreamedMatrix(store, ring_nbytes(store)) as A:
            rest = block_cg(A, B, rtol=1e-8, M=jacobi(A), state=state)

        assert whole.converged
        assert whole.sweeps == whole.iterations + 1
        # Before it goes on, it compares the residuals that the state records with those of its iterates.
        assert (part.sweeps, rest.sweeps) == (5, 1 + whole.iterations - 4 + 1)
        same_solve(rest, whole)


class TestFloat32:
    """Right-hand sides of a tiny system depend on each other, and in float32 rounding hides on how many."""

    @pytest.mark.parametrize("n", [1, 2, 3, 4])
    @pytest.mark.parametrize("seed", range(6))
    def test_more_right_hand_sides_than_unknowns_are_solved(self, n, seed):
        rng = np.random.default_rng(seed)
        A = rng.standard_normal((n, n))
        A = scipy.sparse.csr_array(
            (A @ A.T + n * np.eye(n)).astype(np.float32) * np.float32(10.0 ** rng.uniform(-8, 8))
        )
        B = rng.standard_normal((n, 8)).astype(np.float32)

        result = block_cg(CsrMatrix.from_csr(A), B, M="chebyshev", rtol=1e-5)

        assert result.converged, [column.message for column in result.columns]
        assert (np.linalg.norm(B - A @ result.x, axis=0) <= 2e-5 * np.linalg.norm(B, axis=0)).all()

    def test_what_is_beyond_float32_is_not_finite_instead_of_unfinished(self):
        i = np.arange(1, 9)
        hilbert = scipy.sparse.csr_array((1 / (i[:, None] + i - 1)).astype(np.float32))
        B = np.random.default_rng(1).standard_normal((8, 3)).astype(np.float32)

        result = block_cg(CsrMatrix.from_csr(hilbert), B, rtol=1e-6, maxiter=2000)

        for column, of in enumerate(result.columns):
            if not np.isfinite(result.x[:, column]).all():
                assert of.reason is StopReason.NOT_FINITE
