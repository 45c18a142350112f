"""``block_cg`` solves every column as ``cg`` would, with fewer products, whatever the columns have to do with each other."""

import copy
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg

from penstock.solvers import StopReason, block_cg, block_cg_workspace_nbytes, block_jacobi, cg, jacobi
from penstock.solvers.gram_factors import GramFactors, GramFault, factor_gram
from penstock.spmv import CsrMatrix, FunctionOperator, InputError, StoreError, as_operator
from penstock.streaming import HostStore, StreamedMatrix

# The residuals are recomputed with the same product; only their norms are summed in another order.
NORM_SLACK = 1 + 1e-12
# What may stop a solve of a symmetric positive definite system short of its tolerance.
HONEST_FAILURES = {
    StopReason.MAXITER,
    StopReason.ROUNDING_FLOOR,
    StopReason.STAGNATED,
    StopReason.NOT_POSITIVE_DEFINITE,  # curvature lost to rounding
}


def mixing(A):
    """A positive definite function that couples neighbouring unknowns, on top of their diagonal."""
    scale = 1 / np.sqrt(A.to_csr().diagonal())
    kernel = scipy.sparse.csr_array(
        scipy.sparse.diags_array([0.2, 1.0, 0.2], offsets=[-1, 0, 1], shape=A.shape, dtype=A.dtype)
    )
    half = scale.astype(A.dtype)

    def apply(r):
        factors = half.reshape(-1, *[1] * (r.ndim - 1))
        return factors * (kernel @ (factors * r))

    return apply


PRECONDITIONERS = {
    "none": lambda A: None,
    "jacobi": jacobi,
    "block jacobi": lambda A: block_jacobi(A, 3),
    "function": mixing,
}


def lengths(block):
    return np.linalg.norm(block.astype(np.float64), axis=0)


def true_residuals(A, B, X):
    """``||b - A x||`` of each column, in the precision of the operator."""
    return lengths(as_operator(A).apply(X, B.copy(), alpha=-1.0, beta=1.0))


def check_honest(A, B, result, rtol, atol=0.0):
    """Converged if and only if the true residual says so, and every number told is that of the solution."""
    norms, residuals = lengths(B), true_residuals(A, B, result.x)
    assert len(result.columns) == B.shape[1]
    for column, (of, norm, residual) in enumerate(zip(result.columns, norms, residuals, strict=True)):
        np.testing.assert_array_equal(of.x, result.x[:, column])
        told = of.true_residual * (norm or 1.0)
        assert told == pytest.approx(residual, rel=1e-9, abs=1e-300)
        assert of.converged == (told <= max(rtol * norm, atol) * NORM_SLACK), of.message
        assert (of.info == 0) == of.converged
        assert of.message.startswith(of.reason.value)
        assert len(of.residual_norms) == result.iterations + 1
    assert np.isfinite(result.x).all()
    assert result.converged == all(of.converged for of in result.columns)


def right_hand_sides(n, columns, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal((n, columns)).astype(dtype)


def staggered(n=252, columns=5):
    """Right-hand sides and an atol which they meet one after the other: each is a hundred times the next."""
    B = right_hand_sides(n, columns) * 100.0 ** -np.arange(columns)
    return B, 1e-3 * 100.0 ** -(columns - 1) * math.sqrt(n)


@pytest.fixture(scope="module")
def dense(A):
    return A.to_csr().toarray()


@pytest.fixture(params=PRECONDITIONERS)
def preconditioner(request):
    return PRECONDITIONERS[request.param]


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
        assert block_cg_workspace_nbytes(1000, 8) == 6 * 8 * 8000
        assert block_cg_workspace_nbytes(1000, 8, np.float32, preconditioned=False) == 5 * 8 * 4000


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


class TestHonesty:
    @pytest.mark.parametrize("form", ["csr", "dense", "badly scaled rows"])
    def test_converged_means_the_true_residuals_meet_the_tolerance(self, spd, form):
        """Condition numbers from 1 to 1e14, tolerances from 0.1 to 1e-14, units over 12 decades."""
        reasons = {}
        for seed in range(40):
            rng = np.random.default_rng(seed)
            n, columns = 3 * int(rng.integers(2, 9)), int(rng.integers(1, 10))
            matrix = spd(n, 10 ** rng.uniform(0, 14), seed) * 10 ** rng.uniform(-6, 6)
            if form == "badly scaled rows":
                scale = 10 ** rng.uniform(-3, 3, n)
                matrix = scale[:, None] * spd(n, 100.0, seed) * scale
                matrix = (matrix + matrix.T) / 2
            csr = CsrMatrix.from_csr(scipy.sparse.csr_array(matrix))
            A = matrix if form == "dense" else csr
            M = list(PRECONDITIONERS.values())[seed % 4](csr)
            B = rng.standard_normal((n, columns)) * 10 ** rng.uniform(-6, 6, columns)
            X0 = rng.standard_normal((n, columns)) if seed % 3 == 0 else None
            rtol = 10 ** rng.uniform(-14, -1)

            result = block_cg(A, B, X0, rtol=rtol, M=M, maxiter=3 * n)

            check_honest(A, B, result, rtol)
            for of in result.columns:
                assert of.converged or of.reason in HONEST_FAILURES
                if of.reason is StopReason.ROUNDING_FLOOR:
                    assert of.true_residual <= 100 * of.rounding_floor
                reasons[of.reason] = reasons.get(of.reason, 0) + 1

        assert reasons[StopReason.CONVERGED] >= 100, reasons
        assert len(reasons) >= 3, "the systems are hard enough for some solves to fail"

    @pytest.mark.parametrize("columns", [2, 8])
    def test_in_float32_too(self, spd, columns):
        for seed in range(30):
            rng = np.random.default_rng(seed)
            A = CsrMatrix.from_csr(scipy.sparse.csr_array(spd(30, 10 ** rng.uniform(0, 6), seed).astype(np.float32)))
            B, rtol = right_hand_sides(30, columns, seed, np.float32), 10 ** rng.uniform(-7, -1)

            result = block_cg(A, B, rtol=rtol, M=jacobi(A) if seed % 2 else None)

            check_honest(A, B, result, rtol)
            assert all(of.converged or of.reason in HONEST_FAILURES for of in result.columns)

    def test_a_tolerance_below_rounding_ends_at_an_estimated_floor(self, A, preconditioner):
        B = right_hand_sides(252, 4)

        result = block_cg(A, B, rtol=1e-30, M=preconditioner(A))

        absolute = abs(A.to_csr()) @ np.abs(result.x)
        floors = np.finfo(np.float64).eps / 2 * lengths(absolute) / lengths(B)
        assert {of.reason for of in result.columns} == {StopReason.ROUNDING_FLOOR}
        assert result.info > 0
        assert [of.rounding_floor for of in result.columns] == pytest.approx(floors, rel=1e-9)
        for of in result.columns:
            assert of.true_residual <= 100 * of.rounding_floor
            assert f"estimated floor {of.rounding_floor:.3g}" in of.message
        check_honest(A, B, result, 1e-30)

    def test_an_operator_less_accurate_than_the_tolerance_stagnates(self, dense):
        """Products rounded to float32 hide behind recursive residuals that go on falling."""
        rounded = FunctionOperator(lambda x: (dense @ x).astype(np.float32).astype(np.float64), dense.shape, np.float64)
        B = right_hand_sides(252, 4)

        result = block_cg(rounded, B, rtol=1e-12)

        assert {of.reason for of in result.columns} <= {StopReason.STAGNATED, StopReason.MAXITER}
        assert all(of.rounding_floor is None for of in result.columns)
        check_honest(rounded, B, result, 1e-12)

    def test_a_first_guess_that_costs_digits_is_corrected(self, A):
        """Starting 1e8 away, recursive residuals drift; the search starts again from the true ones."""
        B, X0 = right_hand_sides(252, 4), 1e8 * right_hand_sides(252, 4, seed=1)

        result = block_cg(A, B, X0, rtol=1e-9)

        assert result.converged
        assert result.sweeps > result.iterations + 2, "the first residuals, useless ones, and the last"
        check_honest(A, B, result, 1e-9)

    def test_a_column_whose_square_overflows_leaves_the_others_alone(self, A):
        B = right_hand_sides(252, 3) * np.array([1.0, 1e200, 1.0])

        result = block_cg(A, B)

        reasons = [of.reason for of in result.columns]
        assert reasons == [StopReason.CONVERGED, StopReason.NOT_FINITE, StopReason.CONVERGED]

    def test_a_column_whose_square_underflows_leaves_the_others_alone(self, A):
        B = right_hand_sides(252, 3) * np.array([1.0, 1e-120, 1.0])

        result = block_cg(A, B)

        reasons = [of.reason for of in result.columns]
        assert reasons == [StopReason.CONVERGED, StopReason.NOT_FINITE, StopReason.CONVERGED]
        assert result.info < 0
        assert not result.x[:, 1].any()
        check_honest(A, B, result, 1e-5)


class TestBreakdown:
    def test_a_negative_definite_matrix(self, A):
        B = right_hand_sides(252, 4)

        result = block_cg(-A.to_csr(), B)

        assert {of.reason for of in result.columns} == {StopReason.NOT_POSITIVE_DEFINITE}
        assert (result.iterations, result.info) == (0, -1)
        assert not result.x.any()

    @pytest.mark.parametrize("columns", [1, 3])
    def test_an_indefinite_matrix_found_later(self, columns):
        A = np.diag([10.0, 9.0, 8.0, 7.0, 6.0, 5.5, 5.2, 5.1, -0.001])
        B = 1.0 + 0.1 * right_hand_sides(9, columns)

        result = block_cg(A, B, rtol=1e-10)

        assert {of.reason for of in result.columns} == {StopReason.NOT_POSITIVE_DEFINITE}
        assert result.iterations > 0
        assert result.info < 0
        check_honest(A, B, result, 1e-10)

    def test_curvature_of_both_signs_that_cancels(self):
        """Every search direction has ``p.Ap = 0``, but A is not zero."""
        result = block_cg(np.array([[0.0, 1.0], [1.0, 0.0]]), np.eye(2))

        assert {of.reason for of in result.columns} == {StopReason.NOT_POSITIVE_DEFINITE}

    def test_indefinite_matrices_are_solved_or_named(self, spd):
        named = 0
        for seed in range(40):
            shift = np.random.default_rng(seed).uniform(0.01, 0.5)
            A, B = spd(20, 100.0, seed) - shift * np.eye(20), right_hand_sides(20, 1 + seed % 5, seed)

            result = block_cg(A, B, rtol=1e-8)

            check_honest(A, B, result, 1e-8)
            named += all(of.reason is StopReason.NOT_POSITIVE_DEFINITE for of in result.columns)
        assert named > 30

    @pytest.mark.parametrize("columns", [1, 3, 5])
    def test_a_zero_matrix_with_a_load(self, columns):
        result = block_cg(np.zeros((5, 5)), np.eye(5)[:, :columns] + 1)

        assert {of.reason for of in result.columns} == {StopReason.INCONSISTENT}
        assert result.info < 0
        assert not result.x.any()

    def test_columns_in_the_range_of_a_singular_matrix_are_solved_and_the_other_is_named(self):
        result = block_cg(np.diag([1.0, 2.0, 0.0]), np.eye(3))

        assert [of.reason for of in result.columns] == [StopReason.CONVERGED] * 2 + [StopReason.INCONSISTENT]
        np.testing.assert_allclose(result.x, np.diag([1.0, 0.5, 0.0]), atol=1e-15)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize("product", [1, 2, 30])
    @pytest.mark.parametrize("lasting", [True, False])
    def test_an_operator_that_returns_no_number(self, dense, value, product, lasting):
        """The last iterates made of numbers are given back."""
        count, B = 0, right_hand_sides(252, 4)

        def apply(X):
            nonlocal count
            count += 1
            image = dense @ X
            if count == product or (lasting and count > product):
                image[7, -1] = value
            return image

        result = block_cg(FunctionOperator(apply, dense.shape, np.float64, blocks=True), B)

        assert {of.reason for of in result.columns} == {StopReason.NOT_FINITE}
        assert (result.iterations, result.info) == (product - 1, -1)
        exact = FunctionOperator(dense.__matmul__, dense.shape, np.float64, blocks=True)
        np.testing.assert_array_equal(result.x, block_cg(exact, B, maxiter=product - 1).x)

    def test_a_true_residual_that_is_no_number_convicts_its_column_only(self, spd):
        """The product that tests convergence fails in one column; the search has no fault."""
        A, B = spd(20, 10.0), right_hand_sides(20, 4)
        search = block_cg(A, B, rtol=1e-8).iterations
        count = 0

        def apply(X):
            nonlocal count
            count += 1
            image = A @ X
            if count == search + 1:
                image[3, 2] = np.nan
            return image

        result = block_cg(FunctionOperator(apply, A.shape, np.float64, blocks=True), B, rtol=1e-8)

        reasons = [of.reason for of in result.columns]
        assert reasons == [StopReason.CONVERGED] * 2 + [StopReason.NOT_FINITE, StopReason.CONVERGED]
        assert np.isfinite(result.x).all()

    @pytest.mark.parametrize("value", [np.nan, np.inf, -1e3])
    @pytest.mark.parametrize("application", [1, 2, 20])
    def test_a_preconditioner_that_fails(self, A, value, application):
        """With no number, or with the wrong sign."""
        count, B = 0, right_hand_sides(252, 4)

        def precondition(R):
            nonlocal count
            count += 1
            return R * value if count >= application else R.copy()

        M = FunctionOperator(precondition, A.shape, np.float64, blocks=True)
        with np.errstate(invalid="ignore"):
            result = block_cg(A, B, M=M)

        wanted = StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE if value == -1e3 else StopReason.NOT_FINITE
        assert {of.reason for of in result.columns} == {wanted}
        assert result.info < 0
        np.testing.assert_array_equal(result.x, block_cg(A, B, M=lambda R: R.copy(), maxiter=application - 1).x)
        check_honest(A, B, result, 1e-5)

    @pytest.mark.parametrize("value", [np.nan, -1.0])
    def test_a_preconditioner_that_fails_in_a_second_pass(self, A, value):
        """Repeated columns need one, which applies the preconditioner again."""
        count, B = 0, np.tile(right_hand_sides(252, 2), 2)

        def precondition(R):
            nonlocal count
            count += 1
            return R * value if count == 2 else R.copy()

        result = block_cg(A, B, M=FunctionOperator(precondition, A.shape, np.float64, blocks=True))

        assert result.info < 0
        assert np.isfinite(result.x).all()

    @pytest.mark.parametrize("form", ["matrix", "function"])
    @pytest.mark.parametrize("columns", [1, 4, 33])
    def test_a_preconditioner_that_is_indefinite(self, A, form, columns):
        factors = np.where(np.arange(252) < 240, 1e-6, -1.0)
        B = right_hand_sides(252, columns)

        result = block_cg(A, B, M=np.diag(factors) if form == "matrix" else lambda r: factors * r)

        assert {of.reason for of in result.columns} == {StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE}
        assert result.info < 0
        check_honest(A, B, result, 1e-5)

    def test_errors_of_the_operator_come_through(self):
        def fail(x):
            raise StoreError("the disk is gone")

        with pytest.raises(StoreError, match="the disk is gone"):
            block_cg(FunctionOperator(fail, (5, 5), np.float64), np.ones((5, 2)))


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


def same_solve(one, other):
    assert one.iterations == other.iterations
    np.testing.assert_array_equal(one.x, other.x)
    for mine, theirs in zip(one.columns, other.columns, strict=True):
        assert mine.reason is theirs.reason
        assert mine.residual_norms == theirs.residual_norms
        assert mine.true_residual == theirs.true_residual


@pytest.fixture(scope="module")
def hard():
    """Five columns that leave the block one by one, of which one starts so far away that the search starts again."""
    B, atol = staggered()
    X0 = np.zeros_like(B)
    X0[:, 1] = 1e10 * right_hand_sides(252, 1, seed=1)[:, 0]
    return B, X0, atol


class TestState:
    @pytest.mark.parametrize("kind", PRECONDITIONERS)
    def test_a_state_copied_by_the_monitor_goes_on_bit_equal(self, A, hard, kind):
        """From before and after every change of the block, and a restart."""
        B, X0, atol = hard
        M, shapes = PRECONDITIONERS[kind](A), []
        monitor = lambda record: shapes.append((len(record.state.active), record.state.reasons.count(None)))  # noqa: E731
        whole = block_cg(A, B, X0, rtol=0.0, atol=atol, M=M, monitor=monitor)
        assert whole.converged
        changes = [at for at in range(1, len(shapes)) if shapes[at] != shapes[at - 1]]
        assert len(changes) >= 4
        assert any(0 < pending < 5 for _, pending in shapes), "some columns were found solved, others started again"
        stops = sorted({1, 2, *(at + shift for at in changes for shift in (0, 1, 2))} & set(range(1, len(shapes))))[::4]
        checkpoints = {}

        def keep(record):
            if record.iteration in stops:
                checkpoints[record.iteration] = copy.deepcopy(record.state)

        same_solve(block_cg(A, B, X0, rtol=0.0, atol=atol, M=M, monitor=keep), whole)
        assert list(checkpoints) == stops
        for iteration, state in checkpoints.items():
            assert state.iteration == iteration
            result = block_cg(A, B, rtol=0.0, atol=atol, M=M, state=state)
            same_solve(result, whole)
            assert result.state is state

    @pytest.mark.parametrize("kind", PRECONDITIONERS)
    def test_every_single_iteration_may_be_a_call_of_its_own(self, A, kind):
        B, atol = staggered(columns=3)
        arguments = {"rtol": 0.0, "atol": atol, "M": PRECONDITIONERS[kind](A)}
        whole = block_cg(A, B, **arguments)
        result, calls = block_cg(A, B, monitor=lambda record: True, **arguments), 1
        while not result.converged:
            assert StopReason.STOPPED in {of.reason for of in result.columns}
            assert result.info == result.iterations == calls
            state = copy.deepcopy(result.state)
            result, calls = block_cg(A, B, state=state, monitor=lambda record: True, **arguments), calls + 1

        same_solve(result, whole)

    @pytest.mark.parametrize("after", [1, 10, 40])
    def test_a_solve_out_of_iterations_goes_on_bit_equal(self, A, hard, after):
        B, X0, atol = hard
        whole = block_cg(A, B, X0, rtol=0.0, atol=atol, M=jacobi(A))
        part = block_cg(A, B, X0, rtol=0.0, atol=atol, M=jacobi(A), maxiter=after)
        assert StopReason.MAXITER in {of.reason for of in part.columns}

        same_solve(block_cg(A, B, rtol=0.0, atol=atol, M=jacobi(A), state=part.state), whole)

    @pytest.mark.parametrize("loose", [1e-2, 1e-5])
    def test_a_converged_state_goes_on_to_a_tighter_tolerance(self, A, preconditioner, loose):
        B, M = right_hand_sides(252, 4), preconditioner(A)
        direct = block_cg(A, B, M=M, rtol=1e-9).iterations
        state = block_cg(A, B, M=M, rtol=loose).state
        before = state.iteration

        result = block_cg(A, B, M=M, rtol=1e-9, state=state)

        assert result.converged
        check_honest(A, B, result, 1e-9)
        assert 0 < result.iterations - before <= direct * 1.1

    def test_a_stopped_state_goes_on_to_a_tighter_tolerance(self, A, hard):
        """Some columns have left the block by the looser one."""
        B, X0, atol = hard
        part = block_cg(A, B, X0, rtol=0.0, atol=atol, monitor=lambda r: len(r.state.active) == 3)
        assert {of.reason for of in part.columns} >= {StopReason.STOPPED}

        result = block_cg(A, B, rtol=0.0, atol=atol / 100, state=part.state)

        assert result.converged
        check_honest(A, B, result, 0.0, atol / 100)

    def test_a_converged_state_is_not_iterated_again(self, A):
        B = right_hand_sides(252, 4)
        done = block_cg(A, B, rtol=1e-8)
        X = done.x.copy()

        again = block_cg(A, B, rtol=1e-8, state=done.state)

        assert again.converged
        assert again.iterations == done.iterations
        np.testing.assert_array_equal(again.x, X)
        check_honest(A, B, again, 1e-8)

    @pytest.mark.parametrize("rtol", [1e-30, 1e-8])
    def test_a_state_that_ended_at_a_floor_tells_its_true_residual_and_whether_it_meets_a_looser_tolerance(
        self, A, rtol
    ):
        B = right_hand_sides(252, 3)
        floor = block_cg(A, B, rtol=1e-30)
        assert {of.reason for of in floor.columns} == {StopReason.ROUNDING_FLOOR}

        check_honest(A, B, block_cg(A, B, rtol=rtol, state=floor.state), rtol)

    def test_maxiter_counts_the_iterations_before_the_stop(self, A):
        B = right_hand_sides(252, 3)
        state = block_cg(A, B, rtol=1e-9, monitor=lambda record: record.iteration == 5).state

        assert block_cg(A, B, rtol=1e-9, maxiter=5, state=copy.deepcopy(state)).iterations == 5
        assert block_cg(A, B, rtol=1e-9, maxiter=12, state=copy.deepcopy(state)).iterations == 12

    def test_a_state_and_a_first_guess_are_refused_together(self, A):
        B = right_hand_sides(252, 3)
        state = block_cg(A, B, maxiter=2).state

        with pytest.raises(InputError, match="give X0 or state, not both"):
            block_cg(A, B, B, state=state)


class TestMonitorAndCallback:
    def test_are_called_once_an_iteration(self, A, hard):
        B, X0, atol = hard
        records, iterates = [], []

        result = block_cg(
            A, B, X0, rtol=0.0, atol=atol, monitor=records.append, callback=lambda X: iterates.append(X.copy())
        )

        assert [record.iteration for record in records] == list(range(1, result.iterations + 1))
        assert len(iterates) == result.iterations
        np.testing.assert_array_equal(iterates[-1], result.x)
        assert all(record.state is result.state and record.bytes_streamed == 0 for record in records)
        seconds = [record.seconds for record in records]
        assert 0 <= seconds[0] <= seconds[-1] <= result.timings["total"]
        assert seconds == sorted(seconds)

    def test_records_tell_the_largest_residual_of_all_columns(self, A):
        B, told = np.insert(right_hand_sides(252, 3), 1, 0.0, axis=1), []

        result = block_cg(A, B, rtol=1e-8, monitor=lambda record: told.append(record.residual_norm))

        histories = np.array([of.residual_norms for of in result.columns])
        np.testing.assert_array_equal(told, histories.max(axis=0)[1:])

    def test_recursive_residuals_are_those_of_the_iterates(self, A, dense):
        B, iterates = right_hand_sides(252, 4), []

        result = block_cg(A, B, rtol=1e-6, M=mixing(A), callback=lambda X: iterates.append(X.copy()))

        histories = np.array([of.residual_norms for of in result.columns]).T
        np.testing.assert_array_equal(histories[0], 1.0)
        for norms, X in zip(histories[1:], iterates, strict=True):
            active = norms > 1e-6  # those of columns that left the block stay, though their iterates do too
            np.testing.assert_allclose(norms[active], (lengths(B - dense @ X) / lengths(B))[active], rtol=1e-5)

    def test_monitor_does_not_stop_a_solve_that_has_converged(self, A):
        B = right_hand_sides(252, 3)
        wanted = block_cg(A, B).iterations

        assert block_cg(A, B, monitor=lambda record: record.iteration == wanted).converged

    def test_callback_is_not_called_for_an_iteration_that_breaks_down(self):
        A = np.diag([10.0, 9.0, 8.0, 7.0, 6.0, 5.5, 5.2, 5.1, -0.001])
        calls = []

        result = block_cg(A, 1.0 + 0.1 * right_hand_sides(9, 2), rtol=1e-10, callback=calls.append)

        assert {of.reason for of in result.columns} == {StopReason.NOT_POSITIVE_DEFINITE}
        assert len(calls) == result.iterations > 0

    def test_callback_is_called_for_the_iterates_before_a_preconditioner_fails(self, A):
        """As by ``cg``: the iterates moved, and the iteration is counted."""
        count, calls = 0, []

        def precondition(R):
            nonlocal count
            count += 1
            return -R if count == 3 else R.copy()

        M = FunctionOperator(precondition, A.shape, np.float64, blocks=True)
        result = block_cg(A, right_hand_sides(252, 2), M=M, callback=calls.append)

        assert result.info < 0
        assert len(calls) == result.iterations


def ring_nbytes(store):
    return 2 * max(subdivision.nbytes for subdivision in store.index.subdivisions)


@pytest.fixture(scope="module", params=["csr", "bsr"])
def store(request, beam):
    return request.param, HostStore.create(beam.subdivisions(8, request.param))


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
        assert (part.sweeps, rest.sweeps) == (5, whole.iterations - 4 + 1)
        same_solve(rest, whole)


class TestRefused:
    @pytest.mark.parametrize("columns", [0, 65])
    def test_too_few_or_too_many_columns(self, A, columns):
        with pytest.raises(InputError, match=f"1 to 64 columns, B has {columns}; solve_many takes any number"):
            block_cg(A, np.ones((252, columns)))

    @pytest.mark.parametrize("name", ["B", "X0"])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_numbers_that_are_none_with_their_row_and_column(self, A, name, value):
        blocks = {"B": np.ones((252, 4)), "X0": np.ones((252, 4))}
        blocks[name][17, 2] = value

        with pytest.raises(InputError, match=f"{name} holds {value} at row 17 of column 2; NaN and Inf cannot"):
            block_cg(A, **blocks)

    @pytest.mark.parametrize(
        "B", [np.ones((251, 2)), np.ones((2, 252)), np.ones((252, 2, 1)), None, np.ones((252, 2), dtype=complex)]
    )
    def test_right_hand_sides_that_do_not_fit(self, A, B):
        with pytest.raises(InputError, match=r"^B "):
            block_cg(A, B)

    @pytest.mark.parametrize("X0", [np.ones((252, 2)), np.ones(252), np.ones((251, 3)), np.ones((3, 252))])
    def test_first_guesses_that_do_not_fit(self, A, X0):
        with pytest.raises(InputError, match=r"^X0 "):
            block_cg(A, np.ones((252, 3)), X0)

    @pytest.mark.parametrize("matrix", [np.ones((3, 4)), np.zeros((0, 0))])
    def test_what_is_no_square_matrix(self, matrix):
        with pytest.raises(InputError, match="a square matrix with at least one row"):
            block_cg(matrix, np.ones((len(matrix), 2)))

    @pytest.mark.parametrize("tolerance", [{"rtol": -1e-5}, {"atol": -1.0}, {"rtol": np.nan}])
    def test_negative_tolerances(self, A, tolerance):
        with pytest.raises(InputError, match="must be a number, finite and not negative"):
            block_cg(A, np.ones((252, 2)), **tolerance)

    def test_a_negative_maxiter(self, A):
        with pytest.raises(InputError, match="not negative, not -1"):
            block_cg(A, np.ones((252, 2)), maxiter=-1)

    def test_a_float64_block_for_a_float32_system(self, A):
        with pytest.raises(InputError, match="cast one of them, digits would be lost"):
            block_cg(A.to_csr().astype(np.float32), np.ones((252, 2)))

    def test_a_preconditioner_of_another_shape(self, A):
        with pytest.raises(InputError, match=r"the preconditioner has shape \(3, 3\), the matrix \(252, 252\)"):
            block_cg(A, np.ones((252, 2)), M=np.eye(3))


class TestGramFactors:
    @pytest.mark.parametrize("columns", [1, 2, 5, 16, 64])
    @pytest.mark.parametrize("deficit", [0, 1, "half"])
    def test_vectors_are_those_of_an_orthonormal_basis(self, columns, deficit):
        rank = max(1, columns - (columns // 2 if deficit == "half" else deficit))
        for seed in range(10):
            rng = np.random.default_rng(seed)
            W = rng.standard_normal((200, rank))
            if rank < columns:
                W = W @ np.linalg.qr(rng.standard_normal((columns, rank)))[0].T
            W *= 10 ** rng.uniform(-8, 8, columns)

            factors = factor_gram(W.T @ W)

            assert isinstance(factors, GramFactors)
            assert factors.rank == rank
            assert factors.well == (rank == columns)
            assert (factors.t.shape, factors.c.shape) == ((columns, rank), (rank, columns))
            Q = W @ factors.t
            # What is dropped is told from zero by the Gram matrix, which has half of the digits.
            tolerance = 1e-12 if factors.well else 1e-6
            assert (lengths(Q @ factors.c - W) <= tolerance * lengths(W)).all()
            np.testing.assert_allclose(Q.T @ Q, np.eye(rank), rtol=0, atol=1e-9 if factors.well else 1e-3)
            np.testing.assert_allclose(factors.t @ factors.t.T, factors.inverse, rtol=1e-14)

    @pytest.mark.parametrize("closeness", np.arange(0, 17))
    def test_orthonormal_to_nine_digits_if_called_well_whatever_the_angle(self, closeness):
        """One column that nears the span of the others digit by digit, until it cannot be told from it."""
        rng = np.random.default_rng(int(closeness))
        W = rng.standard_normal((300, 4))
        W[:, 3] = W[:, :3].sum(axis=1) + 10.0**-closeness * W[:, 3]

        factors = factor_gram(W.T @ W)

        Q = W @ factors.t
        assert (lengths(Q @ factors.c - W) <= 3e-6 * lengths(W)).all()
        deviation = np.abs(Q.T @ Q - np.eye(factors.rank)).max()
        assert deviation <= (1e-9 if factors.well else 1e-3)
        assert factors.well == (closeness <= 2) or closeness == 3
        assert factors.rank == (4 if closeness <= 5 else 3) or closeness == 6

    def test_a_second_pass_mends_what_the_first_left(self):
        rng = np.random.default_rng(0)
        W = rng.standard_normal((300, 6)) * 10.0 ** np.arange(-8, 4, 2)
        W[:, 5] = W[:, 0] * 1e3 + 1e-12 * W[:, 5]
        first = factor_gram(W.T @ W)
        assert not first.well
        Q = W @ first.t

        second = factor_gram(Q.T @ Q)

        assert second.well
        Q = Q @ second.t
        np.testing.assert_allclose(Q.T @ Q, np.eye(first.rank), rtol=0, atol=1e-12)
        assert (lengths(Q @ second.c @ first.c - W) <= 1e-6 * lengths(W)).all()

    def test_zero_columns_are_dropped(self):
        W = np.insert(np.random.default_rng(0).standard_normal((50, 3)), [1, 3], 0.0, axis=1)

        factors = factor_gram(W.T @ W)

        assert factors.rank == 3
        assert not factors.t[[1, 4]].any()
        np.testing.assert_allclose(W @ factors.t @ factors.c, W, rtol=0, atol=1e-12)
        assert factor_gram(np.zeros((4, 4))).rank == 0

    def test_the_inverse_is_that_of_the_matrix(self, spd):
        gram = spd(6, 1e4) * np.outer(*[10.0 ** np.arange(-6, 6, 2)] * 2)

        np.testing.assert_allclose(factor_gram(gram).inverse @ gram, np.eye(6), rtol=0, atol=1e-2)
        np.testing.assert_allclose(gram @ factor_gram(gram).inverse @ gram, gram, rtol=1e-9)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_is_told(self, value):
        gram = np.eye(4)
        gram[2, 1] = gram[1, 2] = value

        assert factor_gram(gram) is GramFault.NOT_FINITE

    @pytest.mark.parametrize(
        "gram",
        [
            -np.eye(3),
            np.diag([1.0, 1.0, -1e-30]),
            np.array([[1.0, 2.0], [2.0, 1.0]]),
            np.array([[1.0, 1.0 + 1e-7], [1.0 + 1e-7, 1.0]]) * 1e-12,
            np.array([[1.0, 2e8], [2e8, 1e16]]),
        ],
        ids=["negative", "a negative square", "indefinite", "slightly indefinite", "indefinite once scaled"],
    )
    def test_what_is_not_positive_is_told(self, gram):
        assert factor_gram(gram) is GramFault.NOT_POSITIVE

    def test_rounding_is_not_taken_for_a_negative_square(self):
        gram = np.array([[1.0, 1.0 + 1e-15], [1.0 + 1e-15, 1.0]])

        assert factor_gram(gram).rank == 1
