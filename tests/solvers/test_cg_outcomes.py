"""Nothing is called converged that is not, and every failure says why."""

import math

import numpy as np
import pytest
import scipy.sparse

from penstock.fem import Cantilever
from penstock.solvers import StopReason, cg, jacobi
from penstock.spmv import BsrMatrix, CsrMatrix, FunctionOperator, StoreError, as_operator

# The residual is recomputed with the same kernel; only its norm is summed in another order, over at most n terms.
NORM_SLACK = 1 + 1e-12
# How far the estimate u || |A||x| || may lie from the residual that is really reached, either way.
FLOOR_FACTOR = 100

# What may stop a solve of a symmetric positive definite system short of its tolerance.
HONEST_FAILURES = {
    StopReason.MAXITER,
    StopReason.ROUNDING_FLOOR,
    StopReason.STAGNATED,
    StopReason.NOT_POSITIVE_DEFINITE,  # curvature lost to rounding at condition numbers beyond 1 / u
}


def true_residual(A, b, x):
    """``||b - A x||`` in the precision of the operator."""
    operator = as_operator(A)
    residual = operator.apply(x, b.copy(), alpha=-1.0, beta=1.0)
    return np.linalg.norm(residual.astype(np.float64))  # of float32 vectors too, as the solver sums in float64


def check_honest(A, b, result, rtol, atol=0.0):
    tolerance = max(rtol * np.linalg.norm(b), atol)
    residual = true_residual(A, b, result.x)
    assert result.true_residual * np.linalg.norm(b) == pytest.approx(
        residual, rel=1e-6 if b.dtype == np.float32 else 1e-9
    )
    assert f"iteration {result.iterations}" in result.message
    assert f"true relative residual {result.true_residual:.3g}" in result.message
    if result.converged:
        assert result.info == 0
        assert residual <= tolerance * NORM_SLACK
    else:
        assert result.info != 0
        assert result.message.startswith(result.reason.value)
    if result.reason is StopReason.ROUNDING_FLOOR:
        assert f"estimated floor {result.rounding_floor:.3g}" in result.message
        assert result.true_residual <= FLOOR_FACTOR * result.rounding_floor


class TestRandomSystems:
    """Condition numbers from 1 to 1e14, tolerances from 0.1 to 1e-14, scales over 12 decades."""

    @pytest.mark.parametrize("form", ["csr", "bsr", "dense", "badly scaled rows"])
    @pytest.mark.parametrize("preconditioned", [False, True])
    def test_converged_means_the_true_residual_meets_the_tolerance(self, spd, form, preconditioned):
        reasons = {}
        for seed in range(40):
            rng = np.random.default_rng(seed)
            n = 3 * int(rng.integers(2, 14))
            matrix = spd(n, 10 ** rng.uniform(0, 14), seed) * 10 ** rng.uniform(-6, 6)
            if form == "badly scaled rows":
                scale = 10 ** rng.uniform(-3, 3, n)
                matrix = scale[:, None] * spd(n, 100.0, seed) * scale
                matrix = (matrix + matrix.T) / 2
            sparse = scipy.sparse.csr_array(matrix)
            A = {"dense": matrix, "bsr": BsrMatrix.from_csr(sparse)}.get(form, CsrMatrix.from_csr(sparse))
            M = (jacobi(CsrMatrix.from_csr(sparse))) if preconditioned else None
            b = rng.standard_normal(n) * 10 ** rng.uniform(-6, 6)
            x0 = rng.standard_normal(n) if seed % 3 == 0 else None
            rtol = 10 ** rng.uniform(-14, -1)

            result = cg(A, b, x0, rtol=rtol, M=M)

            check_honest(A, b, result, rtol)
            assert result.converged or result.reason in HONEST_FAILURES
            reasons[result.reason] = reasons.get(result.reason, 0) + 1

        assert reasons[StopReason.CONVERGED] >= 10, reasons
        assert len(reasons) >= 2, "the systems are hard enough for some solves to fail"

    @pytest.mark.parametrize("seed", range(20))
    def test_benign_systems_converge(self, spd, seed):
        """Condition 1000 and rtol 1e-10 lie four decades above the rounding floor."""
        n = 5 + 2 * seed
        A, b = spd(n, 1e3, seed), np.random.default_rng(seed).standard_normal(n)

        result = cg(A, b, rtol=1e-10)

        check_honest(A, b, result, 1e-10)
        assert result.converged
        error = np.linalg.norm(result.x - np.linalg.solve(A, b)) / np.linalg.norm(result.x)
        assert error <= 1e3 * 1e-10 * 2

    @pytest.mark.parametrize("seed", range(20))
    def test_in_float32_too(self, spd, seed):
        rng = np.random.default_rng(seed)
        A = CsrMatrix.from_csr(scipy.sparse.csr_array(spd(30, 10 ** rng.uniform(0, 6), seed).astype(np.float32)))
        b, rtol = rng.standard_normal(30).astype(np.float32), 10 ** rng.uniform(-7, -1)

        result = cg(A, b, rtol=rtol)

        assert result.x.dtype == np.float32
        check_honest(A, b, result, rtol)

    def test_a_matrix_that_is_not_symmetric_is_never_called_solved_when_it_is_not(self, spd):
        converged = 0
        for seed in range(60):
            rng = np.random.default_rng(seed)
            A = spd(20, 100.0, seed) + rng.choice([1e-12, 1e-6, 1e-2, 1.0]) * rng.standard_normal((20, 20))
            b, rtol = rng.standard_normal(20), 10 ** rng.uniform(-12, -3)

            result = cg(A, b, rtol=rtol)

            check_honest(A, b, result, rtol)
            converged += result.converged

        assert 0 < converged < 60

    def test_an_indefinite_matrix_is_solved_or_named(self, spd):
        named = 0
        for seed in range(60):
            rng = np.random.default_rng(seed)
            A, b = spd(20, 100.0, seed) - rng.uniform(0.01, 0.5) * np.eye(20), rng.standard_normal(20)

            result = cg(A, b, rtol=1e-8)

            check_honest(A, b, result, 1e-8)
            named += result.reason is StopReason.NOT_POSITIVE_DEFINITE

        assert named > 40


class TestBreakdown:
    def test_a_negative_definite_matrix(self, A, b):
        result = cg(-A.to_csr(), b)

        assert result.reason is StopReason.NOT_POSITIVE_DEFINITE
        assert "check its sign and its boundary conditions" in result.message
        assert (result.iterations, result.info) == (0, -1)
        np.testing.assert_array_equal(result.x, np.zeros_like(b))

    def test_an_indefinite_matrix_found_later(self):
        A = np.diag([10.0, 9.0, 8.0, 7.0, 6.0, -0.01])

        result = cg(A, np.ones(6), rtol=1e-10)

        assert result.reason is StopReason.NOT_POSITIVE_DEFINITE
        assert result.iterations > 0
        check_honest(A, np.ones(6), result, 1e-10)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize("product", [1, 2, 30])
    def test_an_operator_that_returns_no_number(self, A, b, value, product):
        """The last iterate made of numbers is given back."""
        count = 0

        def apply(x):
            nonlocal count
            count += 1
            image = A @ x
            if count >= product:
                image[7] = value
            return image

        result = cg(FunctionOperator(apply, A.shape, np.float64), b)

        assert result.reason is StopReason.NOT_FINITE
        assert "check the matrix for NaN and scale the system" in result.message
        assert (result.iterations, result.info) == (product - 1, -1)
        assert np.isfinite(result.x).all()
        np.testing.assert_array_equal(result.x, cg(A, b, maxiter=product - 1).x)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize("application", [1, 2, 30])
    def test_a_preconditioner_that_returns_no_number(self, A, b, value, application):
        count = 0

        def precondition(r):
            nonlocal count
            count += 1
            z = r.copy()
            if count >= application:
                z[7] = value
            return z

        result = cg(A, b, M=precondition)

        assert result.reason is StopReason.NOT_FINITE
        assert result.info < 0
        assert np.isfinite(result.x).all()
        np.testing.assert_array_equal(result.x, cg(A, b, maxiter=application - 1).x)

    @pytest.mark.parametrize("sign", ["negative definite", "indefinite"])
    def test_a_preconditioner_that_is_not_positive_definite(self, A, b, sign):
        factors = -np.ones(b.size)
        if sign == "indefinite":
            factors[: b.size - 12] = 1e-6

        result = cg(A, b, M=lambda r: factors * r)

        assert result.reason is StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE
        assert "check it, or leave it out" in result.message
        assert result.info < 0
        check_honest(A, b, result, 1e-5)

    @pytest.mark.parametrize("as_function", [False, True])
    def test_a_zero_matrix_with_a_load(self, as_function):
        zero = CsrMatrix.from_csr(scipy.sparse.csr_array((5, 5)))
        A = FunctionOperator(np.zeros_like, (5, 5), np.float64) if as_function else zero

        result = cg(A, np.ones(5))

        assert result.reason is StopReason.INCONSISTENT
        assert "fix the missing supports, or give penstock.solve null_space='constants'" in result.message
        assert result.info < 0
        np.testing.assert_array_equal(result.x, np.zeros(5))

    def test_a_zero_matrix_without_a_load_is_solved_by_zero(self):
        assert cg(np.zeros((5, 5)), np.zeros(5)).converged

    def test_errors_of_the_operator_come_through(self, b, A):
        def fail(x):
            raise StoreError("the disk is gone")

        with pytest.raises(StoreError, match="the disk is gone"):
            cg(FunctionOperator(fail, A.shape, np.float64), b)


@pytest.fixture(scope="module")
def free():
    """A body that nothing holds: rigid motions are the null space."""
    return Cantilever(nodes=(7, 4, 3), dof=3, clamped=False)


@pytest.fixture(scope="module")
def balanced(free):
    """Random forces without resultant force or moment."""
    modes, _ = np.linalg.qr(free.rigid_body_modes())
    load = np.random.default_rng(0).standard_normal(free.unknowns)
    for _ in range(2):  # the second pass removes what rounding left
        load -= modes @ (modes.T @ load)
    return load


class TestSingularSystems:
    @pytest.mark.parametrize("rtol", [1e-5, 1e-10])
    def test_a_load_in_equilibrium_is_solved(self, free, balanced, rtol):
        A = free.matrix()
        result = cg(A, balanced, rtol=rtol)

        check_honest(A, balanced, result, rtol)
        assert result.converged
        modes, _ = np.linalg.qr(free.rigid_body_modes())
        assert np.linalg.norm(modes.T @ result.x) <= 1e-6 * np.linalg.norm(result.x), "CG adds no rigid motion"

    def test_a_load_out_of_equilibrium_is_not(self, free):
        A, b = free.matrix(), np.random.default_rng(0).standard_normal(free.unknowns)

        result = cg(A, b, rtol=1e-8)

        check_honest(A, b, result, 1e-8)
        assert not result.converged


class TestRoundingFloor:
    @pytest.mark.parametrize("preconditioned", [False, True])
    @pytest.mark.parametrize("rtol", [1e-16, 1e-30])
    def test_a_tolerance_below_rounding_ends_at_an_estimated_floor(self, A, b, rtol, preconditioned):
        result = cg(A, b, rtol=rtol, M=jacobi(A) if preconditioned else None, maxiter=20 * b.size)

        assert result.reason is StopReason.ROUNDING_FLOOR
        assert "loosen rtol above the true residual" in result.message
        assert result.info > 0
        check_honest(A, b, result, rtol)
        assert result.rounding_floor / FLOOR_FACTOR <= result.true_residual <= FLOOR_FACTOR * result.rounding_floor

    def test_the_floor_is_that_of_the_solution(self, A, b):
        result = cg(A, b, rtol=1e-30)
        unit = np.finfo(np.float64).eps / 2

        floor = unit * np.linalg.norm(abs(A.to_csr()) @ np.abs(result.x)) / np.linalg.norm(b)

        assert result.rounding_floor == pytest.approx(floor, rel=1e-6)

    def test_the_advice_is_good(self, A, b):
        floor = cg(A, b, rtol=1e-30).rounding_floor

        assert cg(A, b, rtol=5 * floor).converged

    @pytest.mark.parametrize("M", [None, "jacobi", "chebyshev"])
    @pytest.mark.parametrize("nodes", [3, 5, 8, 20])
    def test_a_body_that_hardly_anything_holds_ends_at_the_floor(self, nodes, M):
        """A path on springs a billionth as stiff: the residual can rise again far above the floor that it has reached."""
        stiffness = scipy.sparse.diags_array(
            [-np.ones(nodes - 1), 2 * np.ones(nodes), -np.ones(nodes - 1)], offsets=[-1, 0, 1]
        )
        A = scipy.sparse.csr_array(stiffness)
        A[0, 0] = A[-1, -1] = 1
        A = A + 6.4e-10 * scipy.sparse.eye_array(nodes)
        for seed in range(5):
            b = np.random.default_rng(seed).standard_normal(nodes)

            result = cg(A, b, M=M, rtol=1e-8, maxiter=2000)

            assert result.reason in (StopReason.CONVERGED, StopReason.ROUNDING_FLOOR), (seed, result.message)
            assert result.true_residual < 1e-5
            check_honest(A, b, result, 1e-8)

    @pytest.mark.parametrize("seed", [3, 8, 19])
    def test_a_body_of_soft_and_hard_parts_is_not_left_above_its_floor(self, seed):
        """A chain of springs over ten decades: the energy falls by rounding long before the residual has come down."""
        generator = np.random.default_rng(seed)
        nodes, decades = int(generator.choice([50, 100])), generator.uniform(4, 6)
        springs = 10.0 ** generator.uniform(-decades, decades, nodes + 1)
        diagonals = [-springs[1:-1], springs[:-1] + springs[1:], -springs[1:-1]]
        A = scipy.sparse.csr_array(scipy.sparse.diags_array(diagonals, offsets=[-1, 0, 1]))
        b = generator.standard_normal(nodes)

        result = cg(A, b, M="chebyshev", rtol=1e-9, maxiter=15000)

        assert result.reason is StopReason.ROUNDING_FLOOR
        assert result.true_residual < 1e-3
        check_honest(A, b, result, 1e-9)

    @pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
    @pytest.mark.parametrize("preconditioned", [False, True])
    def test_a_tolerance_of_zero_ends_at_the_floor_too_in_any_units(self, A, b, scale, preconditioned):
        """The recursive residual falls for ever; its square must not leave the range of numbers unnoticed."""
        scaled = CsrMatrix.from_csr(A.to_csr() * scale)

        result = cg(scaled, b, rtol=0.0, maxiter=100 * b.size, M=jacobi(scaled) if preconditioned else None)

        assert result.true_residual <= 1e-10
        assert result.reason is StopReason.ROUNDING_FLOOR

    def test_without_an_absolute_product_it_is_called_stagnation(self, A, b):
        result = cg(FunctionOperator(lambda x: A @ x, A.shape, np.float64), b, rtol=1e-30)

        assert result.reason is StopReason.STAGNATED
        assert "no longer falls, and rounding in b - A x is not known to be the cause" in result.message
        assert result.rounding_floor is None
        assert result.info > 0
        check_honest(A, b, result, 1e-30)

    def test_an_operator_less_accurate_than_the_tolerance_is_not_called_solved(self, A, b):
        """Products rounded to float32 hide behind a recursive residual that goes on falling."""
        rounded = FunctionOperator(lambda x: (A @ x).astype(np.float32).astype(np.float64), A.shape, np.float64)

        result = cg(rounded, b, rtol=1e-12)

        assert result.reason in {StopReason.STAGNATED, StopReason.MAXITER}
        check_honest(rounded, b, result, 1e-12)

    def test_a_residual_far_above_the_floor_is_not_blamed_on_rounding(self, A, b):
        """The same operator, which now knows its absolute product: what float64 allows lies seven digits lower."""

        class Rounded(FunctionOperator):
            def apply_absolute(self, x):
                return A.apply_absolute(x)

        rounded = Rounded(lambda x: (A @ x).astype(np.float32).astype(np.float64), A.shape, np.float64)

        result = cg(rounded, b, rtol=1e-12)

        assert result.reason is StopReason.STAGNATED
        assert "reduced storage" in result.message
        assert result.true_residual > FLOOR_FACTOR * result.rounding_floor

    def test_a_first_guess_that_costs_digits_is_corrected(self, A, b):
        """Starting 1e8 away, the recursive residual drifts; the true one takes its place and the solve goes on."""
        x0 = 1e8 * np.random.default_rng(0).standard_normal(b.size)

        result = cg(A, b, x0, rtol=1e-10)

        assert result.converged
        assert math.isfinite(result.state.last_true_residual), "a true residual took the place of the recursive one"
        check_honest(A, b, result, 1e-10)


class TestReducedStorage:
    """A matrix stored in float32 is another matrix; the solver answers for the one it was given."""

    def test_its_own_system_is_solved_to_1e_12_and_the_original_one_is_not(self, beam, b):
        stored, original = beam.matrix(values_dtype=np.float32), beam.matrix()

        result = cg(stored, b, rtol=1e-12)

        assert result.converged
        assert result.x.dtype == np.float64
        norm = np.linalg.norm(b)
        given = stored.to_csr().astype(np.float64)
        # The check uses another order of summation, whose rounding is at the floor, 1e-12 here.
        assert np.linalg.norm(b - given @ result.x) / norm <= 1e-11
        assert np.linalg.norm(b - original @ result.x) / norm >= 1e-7

    def test_the_error_it_brings_is_that_of_single_precision(self, beam, b):
        exact = cg(beam.matrix(), b, rtol=1e-11).x
        stored = cg(beam.matrix(values_dtype=np.float32), b, rtol=1e-11).x

        error = np.linalg.norm(stored - exact) / np.linalg.norm(exact)
        assert 1e-9 < error < 1e-2


class TestExtremeScales:
    @pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e-170, 1e-158, 1e-100, 1e100])
    def test_a_tiny_or_huge_load_is_not_called_solved_when_it_is_not(self, A, b, scale):
        """Squares of such numbers leave the range of float64, their ratios do not."""
        load = scale * b
        peak = np.abs(load).max()

        result = cg(A, load, rtol=1e-6)

        residual = np.linalg.norm((load - A @ result.x) / peak) / np.linalg.norm(load / peak)
        assert not result.converged or residual <= 1e-6 * 1.01
        assert not result.converged or result.x.any()

    def test_a_load_whose_square_overflows_is_refused_with_advice(self, A, b):
        result = cg(A, 1e200 * b)

        assert result.reason is StopReason.NOT_FINITE
        assert "scale the system" in result.message
