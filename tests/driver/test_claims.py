"""Claims of :func:`penstock.solve` are about the caller's system: altered matrices, singular ones, float32, and failed solves."""

import warnings
from fractions import Fraction

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.csgraph
import scipy.sparse.linalg

import penstock
from penstock import InputError, NotConvergedError, NotConvergedWarning, solve
from penstock.fem import Cantilever
from penstock.solvers import StopReason
from penstock.solvers.amg.modes import rigid_body_modes


def line(n):
    return scipy.sparse.csr_array(scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n)))


def laplacian(m):
    """The singular Laplacian of a grid, which maps constants to zero."""
    W = scipy.sparse.csr_array(scipy.sparse.kronsum(line(m), line(m)))
    W = abs(W - scipy.sparse.diags_array(W.diagonal()))
    return scipy.sparse.csr_array(scipy.sparse.csgraph.laplacian(scipy.sparse.csr_matrix(W)))


def true_residual(A, b, x):
    """``||b - A x|| / ||b||`` in long double, of long rows in fractions."""
    C, residual = scipy.sparse.csr_array(A), np.asarray(b, np.longdouble).copy()
    entries = scipy.sparse.coo_array(C)
    np.subtract.at(
        residual, entries.row, entries.data.astype(np.longdouble) * np.asarray(x, np.longdouble)[entries.col]
    )
    for row in np.flatnonzero(np.diff(C.indptr) > 1000):
        places = range(C.indptr[row], C.indptr[row + 1])
        product = sum(Fraction(float(C.data[k])) * Fraction(float(x[C.indices[k]])) for k in places)
        residual[row] = float(Fraction(float(b[row])) - product)
    return float(np.sqrt((residual**2).sum()) / np.linalg.norm(b))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize(
    ("n", "shift", "memory"), [(3_000, 1e-6, 0), (3_000, 1e-6, 8), (20_000, 1e-6, 0), (20_000, 1e-4, 0)]
)
def test_sums_of_long_rows_are_not_trusted(n, shift, memory, columns, seed):
    """In float64 the residual of a row of thousands of terms is hardly known: the Laplacian of a star, almost singular."""
    # Streamed in subdivisions, the long row is the last one.
    hub, leaves = np.full(n - 1, n - 1 if memory else 0), np.arange(n - 1) + (not memory)
    star = scipy.sparse.coo_array((np.ones(n - 1), (hub, leaves)), shape=(n, n))
    W = scipy.sparse.csr_array(star + star.T)
    A = scipy.sparse.csr_array(scipy.sparse.diags_array(W.sum(axis=1) + shift) - W)
    B = np.random.default_rng(seed).random((n, columns))

    for precision in ("float64", "auto") if memory else ("auto",):
        given = {"memory": memory * A.nnz, "precision": precision} if memory else {}
        result = solve(A, B if columns > 1 else B[:, 0], device="cpu", on_failure="return", **given)

        assert ("streamed    " in result.explain()) == (precision == "float64")
        assert ("image of the matrix" in result.explain()) == (memory > 0 and precision == "auto")
        for number, column in enumerate(result.columns):
            true = true_residual(A, B[:, number], result.x.reshape(n, columns)[:, number])
            ends = (StopReason.ROUNDING_FLOOR, StopReason.STAGNATED)
            assert true <= 1e-8 if column.converged else column.reason in ends


class TestSymmetricToRounding:
    """Half of such a matrix is another matrix, and with a large x the difference decides."""

    @pytest.mark.parametrize("rounding", [1e-15, 1e-14, 4e-13])
    @pytest.mark.parametrize("columns", [1, 3])
    def test_claims_are_about_the_given_matrix(self, rounding, columns):
        A, rng = line(20_000), np.random.default_rng(0)
        A.data *= 1 + rounding * np.sign(rng.standard_normal(A.nnz))
        B = np.ones((20_000, columns)) * np.arange(1, columns + 1)
        b = B[:, 0] if columns == 1 else B

        result = solve(A, b, device="cpu", memory=400_000)

        assert "upper triangle" in result.explain()
        for number, column in enumerate(result.columns):
            assert column.converged
            true = true_residual(A, B[:, number], np.reshape(result.x, B.shape)[:, number])
            assert true <= 1e-8
            assert column.true_residual == pytest.approx(true, rel=0.02, abs=3e-9)  # rounding of b - A x in float64

    def test_what_corrections_cannot_reach_is_not_claimed(self):
        A, rng = line(20_000), np.random.default_rng(0)
        A.data *= 1 + 4e-13 * np.sign(rng.standard_normal(A.nnz))

        result = solve(
            A, np.ones(20_000), device="cpu", memory=400_000, rtol=1e-13, maxiter=100_000, on_failure="return"
        )

        assert not result.converged
        assert result.true_residual == pytest.approx(true_residual(A, np.ones(20_000), result.x), rel=1e-3)

    def test_a_monitor_that_stops_a_correction_is_heard(self):
        A, rng, seen = line(20_000), np.random.default_rng(0), []
        A.data *= 1 + 4e-13 * np.sign(rng.standard_normal(A.nnz))
        plain = solve(A, np.ones(20_000), device="cpu", memory=400_000)

        solve(A, np.ones(20_000), device="cpu", memory=400_000, monitor=lambda record: seen.append(record.iteration))

        assert len(seen) >= plain.iterations  # looks of corrections, too
        assert seen == sorted(seen)

    def test_a_stop_in_a_correction_is_a_stop(self):
        A, rng = line(20_000), np.random.default_rng(0)
        A.data *= 1 + 4e-13 * np.sign(rng.standard_normal(A.nnz))
        plain = solve(A, np.ones(20_000), device="cpu", memory=400_000, rtol=1e-11, on_failure="return")
        looks = []

        def stop(record):
            looks.append(record.iteration)
            return len(looks) > 1 and looks[-1] == looks[-2]  # the solve is over, so this is a correction

        result = solve(A, np.ones(20_000), device="cpu", memory=400_000, rtol=1e-11, monitor=stop, on_failure="return")

        assert plain.iterations > 0
        assert all(type(norm) is float for norm in plain.residual_norms)
        assert result.reason in (StopReason.STOPPED, plain.reason)
        assert (result.reason is StopReason.STOPPED) == (len(looks) > 1 and looks[-1] == looks[-2])


class TestSingular:
    A = laplacian(20)
    b = np.random.default_rng(0).standard_normal(400) + 0.1

    @pytest.mark.parametrize("preconditioner", ["auto", "jacobi", "smoothed_aggregation", "multigrid"])
    def test_what_no_x_reaches_is_inconsistent_at_once(self, preconditioner):
        result = solve(self.A, self.b, device="cpu", preconditioner=preconditioner, on_failure="return")

        share = abs(self.b.mean()) * 20 / np.linalg.norm(self.b)
        assert (result.reason, result.iterations, result.true_residual) == (StopReason.INCONSISTENT, 0, 1.0)
        assert f"{share:.3g} of b lies in the null space" in result.message
        assert not result.x.any()

    def test_of_several_right_hand_sides_the_others_are_solved(self):
        B = np.stack([self.b, self.b - self.b.mean()], axis=1)

        result = solve(self.A, B, device="cpu", on_failure="return")

        assert [column.reason.name for column in result.columns] == ["INCONSISTENT", "CONVERGED"]
        assert true_residual(self.A, B[:, 1], result.x[:, 1]) <= 1e-8

    @pytest.mark.parametrize("null_space", ["constants", np.full(400, 3.0), np.ones((400, 1))])
    @pytest.mark.parametrize("memory", [None, 24_000])
    def test_a_given_null_space_is_removed_from_b_and_x(self, null_space, memory):
        result = solve(self.A, self.b, device="cpu", null_space=null_space, memory=memory)

        assert result.converged
        assert true_residual(self.A, self.b - self.b.mean(), result.x) <= 1e-8
        assert abs(result.x.mean()) <= 1e-12
        assert "removed from b" in result.explain()

    def test_motions_of_a_free_body(self):
        X = np.stack(np.meshgrid(*[np.arange(4.0)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
        K = np.zeros((192, 192))
        for i in range(64):
            for j in range(i):
                d = X[i] - X[j]
                if (length := np.linalg.norm(d)) < 1.8:
                    k = np.outer(d, d) / length**3
                    for a, b, sign in ((i, i, 1), (j, j, 1), (i, j, -1), (j, i, -1)):
                        K[3 * a : 3 * a + 3, 3 * b : 3 * b + 3] += sign * k
        K, N = scipy.sparse.csr_array(K), rigid_body_modes(X, 3)
        load = np.random.default_rng(1).standard_normal(192)

        free = solve(K, load, device="cpu", coordinates=X, on_failure="return")
        held = solve(K, load, device="cpu", coordinates=X, null_space=N)

        assert free.reason is StopReason.INCONSISTENT
        assert held.converged
        assert np.abs(N.T @ held.x).max() <= 1e-9 * np.abs(held.x).max()

    @pytest.mark.parametrize(
        ("null_space", "told"),
        [
            ("ones", "must be 'constants'"),
            (np.ones(7), r"of shape \(400, k\)"),
            (np.zeros(400), "none may be zero"),
            (np.ones((400, 2)), "linearly dependent"),
            (np.arange(400.0), "vector 0 of null_space is not mapped to zero"),
        ],
    )
    def test_what_is_no_null_space_is_refused(self, null_space, told):
        with pytest.raises(InputError, match=told):
            solve(self.A, self.b, device="cpu", null_space=null_space)

    def test_one_that_is_nearly_such_costs_no_claim(self):
        A = scipy.sparse.csr_array(self.A + scipy.sparse.diags_array(1e-6 * np.random.default_rng(7).random(400)))
        b = self.b - self.b.mean()

        result = solve(A, self.b, device="cpu", null_space="constants", on_failure="return")

        assert result.converged == (true_residual(A, b, result.x) <= 1e-8)
        assert result.true_residual == pytest.approx(true_residual(A, b, result.x), rel=1e-3)

    @pytest.mark.parametrize("b", [np.ones(400), 1e9 + b, (100 + b).astype(np.float32)])
    def test_a_right_hand_side_that_is_mostly_in_it(self, b):
        result = solve(self.A, b, device="cpu", null_space="constants")

        assert result.converged
        assert np.abs(result.x).max() < 1e3

    def test_a_matrix_of_float32_is_singular_only_if_its_entries_are(self):
        A = scipy.sparse.csr_array((self.A + 1e-5 * scipy.sparse.eye_array(400)).astype(np.float32))

        assert solve(A, np.ones(400), device="cpu").converged

    def test_modes_that_depend_on_each_other_are_no_null_space(self):
        A = scipy.sparse.csr_array(scipy.sparse.kronsum(line(20), line(20)))

        assert solve(A, self.b, device="cpu", near_null_space=np.ones((400, 2))).converged

    def test_b_is_checked_before_the_null_space_is_removed(self):
        with pytest.raises(InputError, match="nan at row 3"):
            solve(self.A, np.where(np.arange(400) == 3, np.nan, self.b), device="cpu", null_space="constants")

    def test_a_small_one_has_a_coarse_level_with_a_pseudo_inverse(self):
        A = laplacian(3)
        b = A @ np.arange(9.0)

        for preconditioner in ("smoothed_aggregation", "multigrid"):
            result = solve(A, b, device="cpu", preconditioner=preconditioner)
            assert result.converged
            assert true_residual(A, b, result.x) <= 1e-8
            assert np.abs(result.x).max() < 100


class TestFailure:
    A, b = line(50), np.ones(50)

    def test_is_warned_of_by_default(self):
        with pytest.warns(NotConvergedWarning, match="did not converge: stopped at maxiter"):
            result = solve(self.A, self.b, device="cpu", maxiter=3)
        assert not result.converged

    def test_may_be_an_error_or_nothing(self):
        with pytest.raises(NotConvergedError, match="stopped at maxiter"):
            solve(self.A, self.b, device="cpu", maxiter=3, on_failure="raise")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = solve(self.A, self.b, device="cpu", maxiter=3, on_failure="return")
        with pytest.raises(NotConvergedError, match="stopped at maxiter"):
            result.check()
        with pytest.raises(InputError, match="on_failure must be"):
            solve(self.A, self.b, device="cpu", on_failure="ignore")

    def test_of_a_block_names_the_first_column(self):
        result = solve(self.A, np.ones((50, 2)), device="cpu", maxiter=3, on_failure="return")
        with pytest.raises(NotConvergedError, match="2 of 2 right-hand sides did not converge; column 0: stopped"):
            result.check()

    def test_a_converged_result_is_its_own(self):
        result = solve(self.A, self.b, device="cpu")
        assert result.check() is result

    def test_one_stopped_by_the_caller_is_no_failure(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = solve(self.A, self.b, device="cpu", monitor=lambda record: True)
        assert result.reason is StopReason.STOPPED


class TestSinglePrecision:
    @pytest.mark.parametrize("memory", [None, 30_000])
    @pytest.mark.parametrize("columns", [1, 3])
    def test_is_solved_in_double_and_rounded(self, memory, columns):
        A = scipy.sparse.csr_array(scipy.sparse.kronsum(line(30), line(30)).astype(np.float32))
        B = np.random.default_rng(0).standard_normal((900, columns)).astype(np.float32)
        b = B[:, 0] if columns == 1 else B

        result = solve(A, b, device="cpu", memory=memory)

        assert result.converged
        assert result.x.dtype == np.float32
        assert "A and b are float32" in result.explain()
        for number, column in enumerate(result.columns):
            x = np.reshape(result.x, B.shape)[:, number].astype(float)
            assert column.true_residual == pytest.approx(
                true_residual(A.astype(float), B[:, number].astype(float), x), rel=1e-3
            )
            assert column.true_residual < 1e-4
            assert "rounding leaves a residual" in column.message

    def test_operators_too(self):
        A = scipy.sparse.csr_array(scipy.sparse.kronsum(line(20), line(20)).astype(np.float32))
        b = np.ones(400, dtype=np.float32)

        for operator in (A.toarray(), scipy.sparse.linalg.aslinearoperator(A)):
            result = solve(operator, b, device="cpu")
            assert result.converged
            assert result.x.dtype == np.float32

    def test_a_solution_beyond_its_range_stays_in_double(self):
        A = scipy.sparse.csr_array((line(20) * 1e-30).astype(np.float32))

        result = solve(A, np.full(20, 1e10, dtype=np.float32), device="cpu")

        assert result.converged
        assert result.x.dtype == np.float64
        assert np.isfinite(result.x).all()


@pytest.mark.parametrize("exponent", [10, 24, 60, 300])
@pytest.mark.parametrize("preconditioner", ["auto", "incomplete_cholesky", "multigrid", "smoothed_aggregation"])
def test_badly_scaled_systems_have_a_result(exponent, preconditioner):
    D = scipy.sparse.diags_array(10.0 ** np.random.default_rng(1).uniform(-exponent / 2, exponent / 2, 20))
    A = scipy.sparse.csr_array(D @ line(20) @ D)
    A = scipy.sparse.csr_array(scipy.sparse.triu(A) + scipy.sparse.triu(A, 1).T)

    result = solve(A, np.ones(20), device="cpu", preconditioner=preconditioner, maxiter=500, on_failure="return")

    assert np.isfinite(result.x).all()


def test_any_memory_near_the_size_of_the_matrix_is_enough():
    A = scipy.sparse.csr_array(scipy.sparse.kronsum(line(20), line(20)))
    size = 12 * A.nnz + 4 * 400

    for memory in range(size - 2048, size + 10_240, 2048):
        for preconditioner in ("auto", "chebyshev", "smoothed_aggregation"):
            assert solve(A, np.ones(400), device="cpu", memory=memory, preconditioner=preconditioner).converged


class TestAdvice:
    def test_boundary_values_in_rows_only(self):
        A, b = scipy.sparse.kronsum(line(20), line(20), format="lil"), np.ones(400)
        A[:20, :] = 0
        A.setdiag(np.where(np.arange(400) < 20, 1.0, A.diagonal()))
        b[:20], A = 0.5, scipy.sparse.csr_array(A)
        exact = scipy.sparse.linalg.spsolve(A.tocsc(), b)

        with pytest.raises(InputError, match=r"20 rows, the first is 0, hold only their diagonal .* penstock\.fix"):
            solve(A, b, device="cpu")
        reduced = penstock.fix(A, b, np.arange(20), 0.5)
        x = reduced.restore(solve(*list(reduced)[:2], device="cpu", rtol=1e-12).x)

        assert np.linalg.norm(x - exact) <= 1e-10 * np.linalg.norm(exact)

    def test_a_matrix_that_is_not_symmetric_at_all(self):
        A = line(10)
        A[0, 1] = 5.0
        with pytest.raises(InputError, match="GMRES or BiCGStab") as told:
            solve(A, np.ones(10), device="cpu")
        assert "(A + A.T) / 2" not in str(told.value)

    @pytest.mark.parametrize(
        ("A", "told"),
        [
            (
                scipy.sparse.block_array([[line(4), np.ones((4, 1))], [np.ones((1, 4)), None]]),
                "saddle point.*method='minres'",
            ),
            (-line(4), "pass -A and -b"),
            (scipy.sparse.diags_array([1.0, -1.0, 1.0]), "indefinite are solved by method='minres'"),
            (line(4) * (1 + 0j), r"real system \[\[B, -C\]"),
        ],
    )
    def test_what_the_thing_is_and_where_to_go(self, A, told):
        A = scipy.sparse.csr_array(A)
        with pytest.raises(InputError, match=told):
            solve(A, np.ones(A.shape[0]), device="cpu")

    @pytest.mark.parametrize(
        ("A", "b", "told"),
        [
            (line(4), None, "b is None"),
            (line(4), scipy.sparse.csc_array(np.ones((4, 1))), r"make it dense: b.toarray\(\)"),
            (np.ones(4), line(4), "are they exchanged"),
            (line(4), np.ones(4) * 1j, r"real system \[\[B, -C\]"),
        ],
    )
    def test_what_is_no_right_hand_side(self, A, b, told):
        with pytest.raises(InputError, match=told):
            solve(A, b, device="cpu")

    def test_nan_is_named_by_row_and_column(self):
        A = line(10)
        A[4, 5] = np.nan
        with pytest.raises(InputError, match="row 4, column 5"):
            solve(A, np.ones(10), device="cpu")


class TestFix:
    def test_several_right_hand_sides_and_truth_values(self):
        A, B = line(6), np.ones((6, 2))
        mask = np.array([True, False, False, False, False, True])

        reduced = penstock.fix(A, B, mask, np.array([1.0, 2.0]))

        x = reduced.restore(solve(reduced.A, reduced.b, device="cpu").x)
        assert x.shape == (6, 2)
        np.testing.assert_array_equal(x[[0, 5]], [[1, 1], [2, 2]])
        np.testing.assert_allclose((A @ x)[1:5], 1.0, atol=1e-7)

    @pytest.mark.parametrize(
        ("unknowns", "values", "told"),
        [
            ([6], 0, "0 to 5"),
            ([-1], 0, "0 to 5"),
            ([1, 1], 0, "different"),
            ([0.5], 0, "numbers"),
            ([0], [1, 2], "do not fit"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, unknowns, values, told):
        with pytest.raises(InputError, match=told):
            penstock.fix(line(6), np.ones(6), unknowns, values)


def test_operators_may_return_arrays_of_other_libraries():
    """As those of JAX do, which NumPy's ``+=`` gives way to: the result must be added in place all the same."""

    class Foreign:
        """An array that is exchanged by DLPack, and takes over NumPy's operators."""

        __array_ufunc__ = None

        def __init__(self, array):
            self.array, self.shape, self.dtype = array, array.shape, array.dtype

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

        def __rmul__(self, factor):
            return Foreign(factor * self.array)

        def __radd__(self, other):
            return Foreign(other + self.array)

    class Matrix:
        shape, dtype = (100, 100), np.dtype(float)

        def __matmul__(self, x):
            return Foreign(A @ np.asarray(x))

    A = scipy.sparse.csr_array(scipy.sparse.kronsum(line(10), line(10)))
    result = solve(Matrix(), np.ones(100))
    assert result.converged
    assert true_residual(A, np.ones(100), result.x) <= 1e-8


def test_the_residual_does_not_grow_after_the_floor_of_a_coarse_level():
    beam = Cantilever(nodes=(25, 5, 5), dof=3)
    A, b = beam.matrix("csr").to_csr(), beam.load()

    result = solve(
        A, b, device="cpu", coordinates=beam.mesh.coordinates(), rtol=1e-15, maxiter=200, on_failure="return"
    )

    assert result.reason is StopReason.ROUNDING_FLOOR
    assert result.true_residual <= 2 * min(result.residual_norms[:20]) + 1e-11


def test_a_badly_scaled_system_that_conjugate_gradients_solve_is_solved():
    scales = np.where(np.arange(300) % 2, 10**4.2, 10**-4.2)
    S = scipy.sparse.diags_array(scales)
    A = scipy.sparse.csr_array(S @ scipy.sparse.csr_array(line(300) + 0.5 * scipy.sparse.eye_array(300)) @ S)
    b = np.zeros(300)
    b[::30] = 1.0

    assert solve(A, b, device="cpu", rtol=1e-5).converged


def test_bad_arguments_are_refused_before_the_matrix_is_opened(monkeypatch):
    A = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(20, 20))
    monkeypatch.setattr("penstock.driver.opening.place_matrix", lambda *a, **k: pytest.fail("the matrix was placed"))
    with pytest.raises(InputError, match="none may be zero"):
        solve(A, np.ones(20), device="cpu", null_space=np.zeros(20))


@pytest.mark.parametrize(
    ("options", "message"), [({"x0": np.full(20, np.nan)}, "x0 holds nan"), ({"maxiter": -1}, "maxiter must be")]
)
def test_bad_options_are_refused_for_inconsistent_systems_too(options, message):
    A = scipy.sparse.csgraph.laplacian(scipy.sparse.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(20, 20)).tocsr())
    with pytest.raises(InputError, match=message):
        solve(A, np.ones(20), device="cpu", **options)


def test_corrections_count_towards_maxiter():
    rng = np.random.default_rng(5)
    A = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(1000, 1000)).tocsr()
    noise = scipy.sparse.csr_array((1e-13 * rng.standard_normal(A.nnz), A.indices, A.indptr), shape=A.shape)
    options = {"device": "cpu", "memory": "20 KiB", "rtol": 1e-9, "on_failure": "return"}
    b = np.ones(1000)
    unlimited = solve(A + noise, b, **options)
    stored = solve(A, b, **options)
    assert unlimited.iterations > stored.iterations  # there were corrections
    for limit in (40, stored.iterations + 1):
        assert solve(A + noise, b, maxiter=limit, **options).iterations <= limit
