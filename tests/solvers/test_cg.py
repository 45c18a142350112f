"""``cg`` means what SciPy's ``cg`` means, for every way a real system can be given."""

import tracemalloc

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg

from penstock.solvers import StopReason, cg, cg_workspace_nbytes, jacobi
from penstock.spmv import CsrMatrix, FunctionOperator, InputError

# Norms are summed in another order here than in the solver; over a few hundred terms that is far below this.
NORM_SLACK = 1 + 1e-12


def residual(A, b, x):
    return np.linalg.norm(b - A @ x)


def system(n=40, seed=0):
    """A symmetric, strictly diagonally dominant matrix as a SciPy CSR array, and a right-hand side."""
    rng = np.random.default_rng(seed)
    half = scipy.sparse.random_array((n, n), density=0.1, rng=rng)
    matrix = half + half.T
    matrix = matrix + scipy.sparse.diags_array(np.asarray(abs(matrix).sum(axis=1)) + 1.0)
    return scipy.sparse.csr_array(matrix), rng.standard_normal(n)


class TestAgainstScipy:
    @pytest.mark.parametrize("rtol", [1e-2, 1e-5, 1e-9])
    @pytest.mark.parametrize("preconditioned", [False, True])
    @pytest.mark.parametrize("guess", [False, True])
    def test_same_convergence_in_as_many_iterations_with_the_same_iterates(self, A, b, rtol, preconditioned, guess):
        matrix = A.to_csr()
        M = scipy.sparse.diags_array(1 / matrix.diagonal()) if preconditioned else None
        x0 = np.random.default_rng(0).standard_normal(b.size) if guess else None
        theirs, ours = [], []

        __, info_theirs = scipy.sparse.linalg.cg(
            matrix, b, x0, rtol=rtol, M=M, callback=lambda x: theirs.append(x.copy())
        )
        x_ours, info_ours = cg(A, b, x0, rtol=rtol, M=M, callback=lambda x: ours.append(x.copy()))

        assert info_ours == info_theirs == 0
        assert residual(matrix, b, x_ours) <= rtol * np.linalg.norm(b) * NORM_SLACK
        # Rounding moves the last step by a few iterations of the 200 or so.
        assert abs(len(ours) - len(theirs)) <= max(2, len(theirs) // 20)
        # In exact arithmetic the iterates are the same; rounding has not grown yet in the first ones.
        for mine, other in zip(ours[:10], theirs[:10], strict=False):
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-9 * np.abs(other).max())

    @pytest.mark.parametrize("maxiter", [1, 2, 7])
    def test_info_is_the_number_of_iterations_when_they_run_out(self, A, b, maxiter):
        _, theirs = scipy.sparse.linalg.cg(A.to_csr(), b, rtol=1e-9, maxiter=maxiter)
        result = cg(A, b, rtol=1e-9, maxiter=maxiter)

        assert result.info == theirs == maxiter
        assert result.iterations == maxiter
        assert result.reason is StopReason.MAXITER

    def test_info_is_negative_for_a_breakdown(self):
        assert cg(-np.eye(4), np.ones(4)).info < 0

    def test_x_and_info_unpack(self):
        A, b = system()

        x, info = cg(A, b)

        assert info == 0
        assert residual(A, b, x) <= 1e-5 * np.linalg.norm(b) * NORM_SLACK

    def test_a_zero_right_hand_side_has_the_solution_zero(self, A, b):
        x0, calls = np.ones_like(b), []

        result = cg(A, np.zeros_like(b), x0, callback=calls.append)

        assert (result.info, result.iterations, result.true_residual, calls) == (0, 0, 0.0, [])
        np.testing.assert_array_equal(result.x, np.zeros_like(b))

    @pytest.mark.parametrize("shape", [(40,), (40, 1)])
    def test_x_has_the_shape_of_b(self, shape):
        A, b = system()

        for maxiter in (0, 3, None):
            assert cg(A, b.reshape(shape), maxiter=maxiter).x.shape == shape
        assert cg(A, np.zeros(shape)).x.shape == shape
        np.testing.assert_array_equal(cg(A, b.reshape(shape)).x.ravel(), cg(A, b).x)


class TestTolerance:
    @pytest.mark.parametrize("rtol", [1e-1, 1e-4, 1e-8])
    def test_rtol_is_relative_to_the_right_hand_side(self, A, b, rtol):
        for scale in (1e-6, 1.0, 1e6):
            result = cg(A, scale * b, rtol=rtol)

            assert result.converged
            assert residual(A, scale * b, result.x) <= rtol * np.linalg.norm(scale * b) * NORM_SLACK
            assert result.residual_norms[-2] > rtol, "it stopped at the first iterate that met the tolerance"

    @pytest.mark.parametrize("atol", [1e-1, 1e-4])
    def test_atol_is_absolute_and_the_larger_one_counts(self, A, b, atol):
        loose, tight = cg(A, b, rtol=1e-12, atol=atol), cg(A, b, rtol=1e-12, atol=1e-30)

        assert loose.converged
        assert 1e-12 * np.linalg.norm(b) < residual(A, b, loose.x) <= atol * NORM_SLACK
        assert loose.iterations < tight.iterations

    @pytest.mark.parametrize("rtol", [1e-2, 1e-4, 1e-6])
    def test_two_equal_tolerances_are_no_looser_than_one(self, A, b, rtol):
        atol = rtol * np.linalg.norm(b)

        both, one = cg(A, b, rtol=rtol, atol=atol), cg(A, b, rtol=rtol)

        assert one.iterations == both.iterations < cg(A, b, rtol=rtol / 2).iterations

    def test_the_default_is_a_relative_1e_5(self, A, b):
        np.testing.assert_array_equal(cg(A, b).x, cg(A, b, rtol=1e-5, atol=0.0).x)

    @pytest.mark.parametrize("tolerance", [{"rtol": 1.0}, {"atol": 1e9}])
    def test_a_tolerance_that_zero_meets_takes_no_iteration(self, A, b, tolerance):
        result = cg(A, b, **tolerance)

        assert (result.info, result.iterations) == (0, 0)
        np.testing.assert_array_equal(result.x, np.zeros_like(b))

    @pytest.mark.parametrize("tolerance", [{"rtol": -1e-5}, {"atol": -1.0}, {"rtol": np.nan}, {"atol": np.nan}])
    def test_a_negative_one_is_refused(self, A, b, tolerance):
        with pytest.raises(InputError, match="must be a number, finite and not negative"):
            cg(A, b, **tolerance)


class TestFirstGuess:
    def test_it_is_left_unchanged(self, A, b):
        x0 = np.random.default_rng(0).standard_normal(b.size)
        before = x0.copy()

        result = cg(A, b, x0)

        np.testing.assert_array_equal(x0, before)
        assert not np.shares_memory(result.x, x0)

    def test_a_good_one_takes_no_iteration_and_one_product(self, A, b):
        good, calls = cg(A, b, rtol=1e-10).x, []

        result = cg(A, b, good, rtol=1e-5, callback=calls.append)

        assert (result.info, result.iterations, result.sweeps, calls) == (0, 0, 1, [])
        np.testing.assert_array_equal(result.x, good)

    def test_a_near_one_saves_iterations(self, A, b):
        near = cg(A, b, rtol=1e-5).x

        assert cg(A, b, near, rtol=1e-8).iterations < 0.8 * cg(A, b, rtol=1e-8).iterations

    def test_zero_is_the_default(self, A, b):
        np.testing.assert_array_equal(cg(A, b, np.zeros_like(b)).x, cg(A, b).x)

    def test_it_may_be_a_column_or_integers(self, A, b):
        ones = np.ones(b.size)

        for x0 in (ones[:, None], ones.astype(int), ones.tolist()):
            np.testing.assert_array_equal(cg(A, b, x0).x, cg(A, b, ones).x)


class TestMaxiter:
    def test_zero_returns_the_first_guess(self, A, b):
        x0 = np.random.default_rng(0).standard_normal(b.size)

        for guess in (None, x0):
            result = cg(A, b, guess, maxiter=0)
            assert result.iterations == 0
            assert result.info > 0
            np.testing.assert_array_equal(result.x, np.zeros_like(b) if guess is None else guess)

    def test_the_default_is_ten_times_the_number_of_rows(self):
        """A skew part keeps p.Ap positive and CG from ever converging."""
        rng = np.random.default_rng(1)
        skew = rng.standard_normal((6, 6))

        result = cg(np.eye(6) + 10 * (skew - skew.T), np.ones(6), rtol=1e-12)

        assert result.reason is StopReason.MAXITER
        assert result.iterations == result.info == 60

    def test_convergence_in_the_last_iteration_allowed_counts(self, A, b):
        enough = cg(A, b).iterations

        assert cg(A, b, maxiter=enough).info == 0
        assert cg(A, b, maxiter=enough - 1).info == enough - 1

    def test_a_negative_one_is_refused(self, A, b):
        with pytest.raises(InputError, match="not negative, not -1"):
            cg(A, b, maxiter=-1)


class TestCallback:
    def test_is_called_once_an_iteration_with_the_iterate(self, A, b):
        iterates = []

        result = cg(A, b, callback=lambda x: iterates.append(x.copy()))

        assert len(iterates) == result.iterations > 0
        np.testing.assert_array_equal(iterates[-1], result.x)
        assert len({x.tobytes() for x in iterates}) == len(iterates)

    @pytest.mark.parametrize("bad_row", [0, 3])
    def test_is_not_called_for_an_iteration_that_breaks_down(self, bad_row):
        """No iterate came of it."""
        diagonal = np.array([4.0, 3.0, 2.0, 1.0])
        diagonal[bad_row] *= -0.01
        calls, records = [], []

        result = cg(np.diag(diagonal), np.ones(4), callback=calls.append, monitor=lambda r: records.append(r.iteration))

        assert result.reason is StopReason.NOT_POSITIVE_DEFINITE
        assert len(calls) == result.iterations
        assert records == list(range(1, result.iterations + 1))

    def test_its_errors_come_through(self, A, b):
        def stop(x):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            cg(A, b, callback=stop)


class TestWaysToGiveTheMatrix:
    @pytest.mark.parametrize(
        "convert",
        [
            scipy.sparse.csr_array,
            scipy.sparse.csr_matrix,
            scipy.sparse.csc_array,
            scipy.sparse.coo_array,
            lambda A: A.tobsr((2, 2)),
            lambda A: A.toarray(),
            scipy.sparse.linalg.aslinearoperator,
            CsrMatrix.from_csr,
            lambda A: FunctionOperator(lambda x: A @ x, A.shape, np.float64),
        ],
        ids=["csr", "csr_matrix", "csc", "coo", "bsr", "dense", "LinearOperator", "CsrMatrix", "function"],
    )
    def test_all_give_the_same_solution(self, convert):
        A, b = system()
        if (B := convert(A)).__class__.__name__.startswith("bsr"):
            B.sort_indices()

        result = cg(B, b, rtol=1e-12)

        assert result.converged
        np.testing.assert_allclose(result.x, np.linalg.solve(A.toarray(), b), rtol=1e-10)

    def test_a_float32_matrix_is_solved_in_float32(self):
        A, b = system()

        result = cg(A.astype(np.float32), b.astype(np.float32), rtol=1e-5)

        assert result.converged
        assert result.x.dtype == np.float32
        assert residual(A, b, result.x) <= 2e-5 * np.linalg.norm(b)

    def test_a_matrix_of_integers_is_solved_in_float64(self):
        A = np.array([[2, -1], [-1, 2]])

        np.testing.assert_allclose(cg(A, np.array([1, 1])).x, [1.0, 1.0], rtol=1e-14)


class TestWaysToGiveTheRightHandSide:
    @pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.bool_, np.float16, np.float32])
    def test_narrower_types_are_widened(self, dtype):
        A, _ = system()
        b = (np.arange(40) % 5).astype(dtype)

        result = cg(A, b)

        assert result.x.dtype == np.float64
        np.testing.assert_array_equal(result.x, cg(A, b.astype(np.float64)).x)

    def test_a_list_or_a_strided_array_will_do(self):
        A, b = system()
        wide = np.zeros((40, 2))
        wide[:, 1] = b

        np.testing.assert_array_equal(cg(A, b.tolist()).x, cg(A, b).x)
        np.testing.assert_array_equal(cg(A, wide[:, 1]).x, cg(A, b).x)

    def test_it_is_left_unchanged(self, A, b):
        before = b.copy()
        result = cg(A, b, np.ones_like(b), M=jacobi(A))

        np.testing.assert_array_equal(b, before)
        assert not np.shares_memory(result.x, b)


class TestWaysToGiveThePreconditioner:
    def test_an_operator_a_matrix_and_a_function_are_one(self, A, b):
        inverse = 1 / A.to_csr().diagonal()
        ways = [
            jacobi(A),
            scipy.sparse.diags_array(inverse),
            scipy.sparse.linalg.LinearOperator(A.shape, matvec=lambda r: inverse * r.ravel()),
            lambda r: inverse * r,
        ]

        results = [cg(A, b, M=M, rtol=1e-8) for M in ways]

        for result in results:
            assert result.converged
            np.testing.assert_array_equal(result.x, results[0].x)

    def test_a_linear_operator_works_for_a_float32_system(self):
        """SciPy gives a LinearOperator of a function the type float64, whatever the system."""
        A, b = system()
        M = scipy.sparse.linalg.LinearOperator(A.shape, matvec=lambda r: r / A.diagonal())

        result = cg(A.astype(np.float32), b.astype(np.float32), M=M, rtol=1e-4)

        assert result.converged
        assert result.x.dtype == np.float32

    @pytest.mark.parametrize("check_every", [None, 7])
    def test_it_is_applied_to_no_residual_that_is_small(self, A, b, check_every):
        applied, diagonal = [], A.to_csr().diagonal()
        M = lambda r: applied.append(np.linalg.norm(r)) or r / diagonal  # noqa: E731
        result = cg(A, b, M=M, rtol=1e-8, check_every=check_every)

        assert result.converged
        assert len(applied) == result.iterations  # at the start, and in each iteration but the last
        assert min(applied) > 1e-8 * np.linalg.norm(b)

    def test_it_sees_a_residual_it_may_not_change(self, A, b):
        """A function that returns what it was given is the identity."""
        np.testing.assert_array_equal(cg(A, b, M=lambda r: r).x, cg(A, b).x)

    def test_one_of_another_shape_is_refused(self, A, b):
        with pytest.raises(InputError, match=r"the preconditioner has shape \(3, 3\), the matrix \(252, 252\)"):
            cg(A, b, M=np.eye(3))

    def test_one_of_a_narrower_type_is_handed_vectors_of_that_type(self, A, b):
        M = CsrMatrix.from_csr(scipy.sparse.eye_array(252, format="csr", dtype=np.float32))

        assert cg(A, b, M=M, rtol=1e-10).converged

    def test_a_function_that_returns_another_shape_is_refused(self, A, b):
        with pytest.raises(
            InputError, match=r"returned float64 of shape \(251,\) instead of real numbers of shape \(252,\)"
        ):
            cg(A, b, M=lambda r: r[1:])


class TestRefused:
    """Each with what was expected and what came."""

    @pytest.mark.parametrize(
        ("matrix", "advice"),
        [
            (np.ones((3, 4)), r"a square matrix, not one of shape \(3, 4\)"),
            (scipy.sparse.csr_array(np.ones((3, 4))), r"a square matrix, not one of shape \(3, 4\)"),
            (1j * np.eye(3), "complex128 is not real; only real numbers are supported"),
            (1j * scipy.sparse.eye_array(3, format="csr"), "only real numbers are supported"),
            (scipy.sparse.linalg.aslinearoperator(1j * np.eye(3)), "only real numbers are supported"),
            (np.eye(3).astype(object), "type object is not real; only real numbers are supported"),
            (np.ones(3), "pass a penstock format, a .*matrix, a dense array, a LinearOperator, or an object"),
            ("K", "pass a penstock format, a .*matrix, a dense array, a LinearOperator, or an object"),
            (None, "pass a penstock format, a .*matrix, a dense array, a LinearOperator, or an object"),
        ],
    )
    def test_what_is_no_square_real_matrix(self, matrix, advice):
        with pytest.raises(InputError, match=advice):
            cg(matrix, np.ones(np.shape(matrix)[0] if np.ndim(matrix) == 2 else 3))

    @pytest.mark.parametrize(
        ("b", "advice"),
        [
            (np.ones(39), r"b must have shape \(40,\)"),
            (np.ones(41), r"b must have shape \(40,\)"),
            (np.ones((1, 40)), r"b must have shape \(40,\)"),
            (np.ones((40, 1, 1)), r"b must have shape \(40,\)"),
            (np.ones((40, 2)), "b has 2 columns; use block_cg"),
            (np.array(1.0), r"b must have shape \(40,\)"),
            (None, r"b must have shape \(40,\)"),
            ([], r"b must have shape \(40,\)"),
            (np.ones(40, dtype=complex), r"b has type complex128, .* cast it with \.astype\(float64\)"),
            (np.ones(40, dtype=object), r"b has type object, .* cast it with \.astype\(float64\)"),
            (np.full(40, "a"), r"b has type <U1, .* cast it with \.astype\(float64\)"),
        ],
    )
    def test_a_right_hand_side_that_does_not_fit(self, b, advice):
        with pytest.raises(InputError, match=advice):
            cg(system()[0], b)

    @pytest.mark.parametrize("name", ["b", "x0"])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_numbers_that_are_none_with_their_row(self, name, value):
        A, b = system()
        vectors = {"b": b, "x0": np.zeros(40)}
        vectors[name] = vectors[name].copy()
        vectors[name][17] = value

        with pytest.raises(InputError, match=f"{name} holds {value} at row 17; all entries must be finite"):
            cg(A, **vectors)

    @pytest.mark.parametrize("x0", [np.ones(39), np.ones((40, 2)), np.ones(40, dtype=complex), np.ones(())])
    def test_a_first_guess_that_does_not_fit_is_called_by_its_name(self, x0):
        A, b = system()

        with pytest.raises(InputError, match="x0"):
            cg(A, b, x0)

    def test_a_float64_right_hand_side_of_a_float32_system(self):
        A, b = system()

        with pytest.raises(InputError, match="cast one of them, digits would be lost"):
            cg(CsrMatrix.from_csr(A.astype(np.float32)), b)  # a matrix of SciPy would be promoted


class TestMonitor:
    def test_receives_a_record_of_every_iteration(self, A, b):
        records = []

        result = cg(A, b, rtol=1e-8, monitor=lambda record: records.append(record))

        assert [record.iteration for record in records] == list(range(1, result.iterations + 1))
        assert [record.residual_norm for record in records] == result.residual_norms[1:]
        seconds = [record.seconds for record in records]
        assert 0 <= seconds[0] <= seconds[-1] <= result.timings["total"]
        assert seconds == sorted(seconds)
        assert all(record.bytes_streamed == 0 for record in records)
        assert all(record.state is result.state for record in records)

    @pytest.mark.parametrize("after", [1, 5])
    def test_stops_the_solve_by_returning_true(self, A, b, after):
        result = cg(A, b, rtol=1e-8, monitor=lambda record: record.iteration == after)

        assert result.reason is StopReason.STOPPED
        assert (result.iterations, result.info) == (after, after)
        np.testing.assert_array_equal(result.x, cg(A, b, rtol=1e-8, maxiter=after).x)

    def test_does_not_stop_a_solve_that_has_converged(self, A, b):
        wanted = cg(A, b).iterations

        assert cg(A, b, monitor=lambda record: record.iteration == wanted).converged


class TestResult:
    @pytest.mark.parametrize("maxiter", [0, 5, None])
    def test_numbers_describe_the_solution(self, A, b, maxiter):
        result = cg(A, b, rtol=1e-8, maxiter=maxiter)

        assert len(result.residual_norms) == result.iterations + 1
        assert result.residual_norms[0] == 1.0
        assert result.true_residual == pytest.approx(residual(A, b, result.x) / np.linalg.norm(b), rel=1e-9)
        assert result.bytes_streamed == 0
        assert set(result.timings) == {"total", "matrix", "preconditioner"}
        assert 0 <= result.timings["matrix"] <= result.timings["total"]

    def test_products_are_one_an_iteration_and_one_for_each_true_residual(self, A, b):
        products = []

        def apply(x):
            products.append(x)
            return A @ x

        result = cg(FunctionOperator(apply, A.shape, np.float64), b, rtol=1e-6)

        assert result.converged
        tested = 2  # whether A is symmetric, once, because it takes so many iterations
        assert len(products) == result.sweeps == result.iterations + result.state.replacements + tested
        assert 1 <= result.state.replacements <= 0.05 * result.iterations

    @pytest.mark.parametrize("maxiter", [3, None])
    def test_the_message_holds_reason_iterations_and_residual(self, A, b, maxiter):
        result = cg(A, b, rtol=1e-8, maxiter=maxiter)

        assert result.message.startswith(result.reason.value)
        assert f"iteration {result.iterations}" in result.message
        assert f"true relative residual {result.true_residual:.3g}" in result.message

    def test_nothing_is_printed(self, A, b, capfd):
        cg(A, b, M=jacobi(A))
        cg(A, b, maxiter=2)
        cg(-A.to_csr(), b)
        cg(A, b, rtol=1e-30)

        assert capfd.readouterr() == ("", "")


def test_the_announced_workspace_covers_what_a_solve_allocates():
    n = 200_000
    A = CsrMatrix.from_csr(scipy.sparse.diags_array(np.linspace(1, 2, n), format="csr"))
    b, M = np.ones(n), jacobi(A)
    cg(A, b, M=M)
    tracemalloc.start()
    try:
        cg(A, b, M=M, rtol=1e-10)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert cg_workspace_nbytes(n) == 7 * n * 8
    assert cg_workspace_nbytes(n, np.float32) == 7 * n * 4
    # b is the caller's, and was there before.
    assert peak <= cg_workspace_nbytes(n) - b.nbytes + b.nbytes // 2
