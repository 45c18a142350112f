"""What ``block_cg`` says of every column is true, however a solve ends."""

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
from block_solves import PRECONDITIONERS, check_honest, lengths, right_hand_sides

from penstock.solvers import StopReason, block_cg, jacobi
from penstock.spmv import CsrMatrix, FunctionOperator, InputError, StoreError

# What may stop a solve of a symmetric positive definite system short of its tolerance.
HONEST_FAILURES = {
    StopReason.MAXITER,
    StopReason.ROUNDING_FLOOR,
    StopReason.STAGNATED,
    StopReason.NOT_POSITIVE_DEFINITE,  # curvature lost to rounding
}


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


class TestRefused:
    @pytest.mark.parametrize("columns", [0, 65])
    def test_too_few_or_too_many_columns(self, A, columns):
        with pytest.raises(InputError, match=f"1 to 64 columns, B has {columns}; solve_many solves for any number"):
            block_cg(A, np.ones((252, columns)))

    @pytest.mark.parametrize("name", ["B", "X0"])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_numbers_that_are_none_with_their_row_and_column(self, A, name, value):
        blocks = {"B": np.ones((252, 4)), "X0": np.ones((252, 4))}
        blocks[name][17, 2] = value

        with pytest.raises(InputError, match=f"{name} holds {value} at row 17 of column 2; all entries must be finite"):
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

    def test_what_is_no_square_matrix(self):
        with pytest.raises(InputError, match="a square matrix, not one of shape"):
            block_cg(np.ones((3, 4)), np.ones((3, 2)))

    @pytest.mark.parametrize("tolerance", [{"rtol": -1e-5}, {"atol": -1.0}, {"rtol": np.nan}])
    def test_negative_tolerances(self, A, tolerance):
        with pytest.raises(InputError, match="must be a number, finite and not negative"):
            block_cg(A, np.ones((252, 2)), **tolerance)

    def test_a_negative_maxiter(self, A):
        with pytest.raises(InputError, match="not negative, not -1"):
            block_cg(A, np.ones((252, 2)), maxiter=-1)

    def test_a_float64_block_for_a_float32_system(self, A):
        with pytest.raises(InputError, match="cast one of them, digits would be lost"):
            block_cg(CsrMatrix.from_csr(A.to_csr().astype(np.float32)), np.ones((252, 2)))

    def test_a_preconditioner_of_another_shape(self, A):
        with pytest.raises(InputError, match=r"the preconditioner has shape \(3, 3\), the matrix \(252, 252\)"):
            block_cg(A, np.ones((252, 2)), M=np.eye(3))
