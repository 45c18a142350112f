"""A Chebyshev polynomial in A is a symmetric positive definite preconditioner, whatever was assumed of the spectrum."""

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse

from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import block_cg, block_jacobi, cg, chebyshev, jacobi
from penstock.solvers.chebyshev import SETTLED, largest_eigenvalue
from penstock.solvers.preconditioners import DiagonalBlocks
from penstock.spmv import FunctionOperator, InputError, as_operator
from penstock.streaming import HostStore, StreamedMatrix
from penstock.streaming.planning.workload import Ring, Workload


@pytest.fixture(scope="module")
def rough():
    return Cantilever(nodes=(17, 5, 5), dof=3, material=LognormalMaterial(0.5, 1))


def dense(M):
    return M.apply(np.eye(M.shape[0]))


def eigenvalues(A):
    """Of the inverse diagonal times A."""
    matrix = A.to_csr().toarray()
    return scipy.linalg.eigh(matrix, np.diag(np.diag(matrix)), eigvals_only=True)


@pytest.mark.parametrize("products", [1, 3, 5, 9])
def test_it_is_the_polynomial_that_textbooks_give(A, products):
    """1 - t q(t) = T((c - t) / r) / T(c / r) on eigenvectors of the inverse diagonal times A."""
    M = chebyshev(A, products, low=0.3, high=2.5)
    matrix = A.to_csr().toarray()
    values, vectors = scipy.linalg.eigh(matrix, np.diag(np.diag(matrix)))

    def polynomial(t):
        return np.polynomial.chebyshev.Chebyshev.basis(products)((1.4 - t) / 1.1)

    # vectors^T diag(A) vectors = I, so M = vectors q(values) vectors^T.
    q = (1 - polynomial(values) / polynomial(0.0)) / values
    expected = vectors @ (q[:, None] * vectors.T)

    np.testing.assert_allclose(dense(M), expected, rtol=0, atol=1e-10 * np.abs(expected).max())


@pytest.mark.parametrize("share", [0.3, 0.9, 1.0, 3.0])
@pytest.mark.parametrize("products", [3, 9])
def test_it_is_symmetric_and_positive_for_any_bound(A, products, share):
    largest = eigenvalues(A)[-1]
    M = dense(chebyshev(A, products, high=share * largest))

    np.testing.assert_allclose(M, M.T, rtol=0, atol=1e-12 * np.abs(M).max())
    assert np.linalg.eigvalsh((M + M.T) / 2)[0] > 0


@pytest.mark.parametrize("share", [0.5, 1.0, 3.0])
def test_a_wrong_bound_costs_iterations_not_correctness(A, b, share):
    largest = eigenvalues(A)[-1]

    wrong = cg(A, b, M=chebyshev(A, 5, high=share * largest), rtol=1e-9)
    right = cg(A, b, M=chebyshev(A, 5), rtol=1e-9)

    assert wrong.converged
    assert right.converged
    assert right.iterations <= 1.1 * wrong.iterations


@pytest.mark.parametrize(("products", "fewer"), [(3, 2.2), (9, 6.0), (17, 8.0)])
def test_iterations_fall_almost_as_products_rise(products, fewer):
    cube = Cantilever(nodes=(16, 16, 16), dof=3, material=LognormalMaterial(0.5, 1))
    A, b = cube.matrix(), cube.load()

    plain, polynomial = cg(A, b, M=jacobi(A), rtol=1e-8), cg(A, b, M=chebyshev(A, products), rtol=1e-8)

    assert polynomial.converged
    assert plain.iterations >= fewer * polynomial.iterations
    assert polynomial.iterations * products <= 2 * plain.iterations


def test_the_bound_lies_between_the_largest_eigenvalue_and_the_rigorous_norm(rough, A):
    for matrix in (rough.matrix(), A):
        largest, D = eigenvalues(matrix)[-1], jacobi(matrix)
        csr = matrix.to_csr()
        norm = float((np.asarray(abs(csr).sum(axis=1)).ravel() / csr.diagonal()).max())

        assert largest_eigenvalue(matrix, D, 0) == pytest.approx(norm, rel=1e-12)
        assert largest <= largest_eigenvalue(matrix, D, 2) <= min(norm, 1.06 * largest)
        few, many = largest_eigenvalue(matrix, D, 1), largest_eigenvalue(matrix, D, 3)
        assert few <= many <= norm


@pytest.mark.parametrize("products", [1, 9, 33])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_bound_of_a_matrix_with_one_large_eigenvalue_is_found(products, dtype):
    """That of a constant vector is half as many times the average as there are rows."""
    n = 3000
    A = FunctionOperator(lambda x: x + x.sum(), (n, n), dtype)

    found = largest_eigenvalue(A, DiagonalBlocks(np.full((n, 1, 1), 0.5, dtype)), 2, products)

    assert found == pytest.approx(1.05 * (n + 1) / 2, rel=1e-3)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_bound_in_float32_is_that_in_float64_whatever_the_scale(rough, scale):
    csr = rough.matrix().to_csr() * scale
    one, other = (as_operator(csr.astype(dtype)) for dtype in (np.float32, np.float64))

    found, expected = (largest_eigenvalue(A, block_jacobi(A, 3), 2, 33) for A in (one, other))

    assert found == pytest.approx(expected, rel=1e-3)


def test_what_cannot_be_measured_leaves_the_rigorous_bound(rough):
    A = rough.matrix()
    D = jacobi(A)
    broken = FunctionOperator(lambda x: x * np.nan, A.shape, A.dtype)

    assert largest_eigenvalue(broken, D, 2) == np.inf
    assert largest_eigenvalue(A, DiagonalBlocks(-D.blocks), 2) == largest_eigenvalue(A, D, 0)


def test_no_more_is_measured_than_the_diagonal_of_a_diagonal_matrix():
    A = scipy.sparse.diags_array(np.linspace(1.0, 100.0, 40)).tocsr()

    assert largest_eigenvalue(as_operator(A), jacobi(A), 2) == 1.0


@pytest.mark.parametrize("shape", [(252,), (252, 1), (252, 5)])
def test_apply_scales_adds_and_takes_blocks(A, shape):
    rng = np.random.default_rng(0)
    M, r, out = chebyshev(A, 5), rng.standard_normal(shape), rng.standard_normal(shape)
    plain = np.stack([M @ column for column in r.reshape(252, -1).T], axis=1).reshape(shape)

    np.testing.assert_allclose(M @ r, plain, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(
        M.apply(r, out.copy(), alpha=2.0, beta=-3.0), 2 * plain - 3 * out, rtol=1e-12, atol=1e-14
    )
    np.testing.assert_array_equal(M.apply(r, np.full(shape, np.nan)), M @ r)


def test_streamed_it_has_the_same_bits_and_its_sweeps_are_counted(beam, b):
    A = beam.matrix("bsr")
    expected = cg(A, b, M=chebyshev(A, 5), rtol=1e-8)
    store = HostStore.create(beam.subdivisions(8, "bsr"))
    with StreamedMatrix(store, 2 * max(s.nbytes for s in store.index.subdivisions)) as streamed:
        M = chebyshev(streamed, 5)
        before = streamed.sweeps

        result = cg(streamed, b, M=M, rtol=1e-8)

        np.testing.assert_array_equal(result.x, expected.x)
        assert streamed.sweeps - before == result.sweeps
        # Four more an application, of which there is one at the start, and one in each iteration but the last.
        assert result.sweeps - expected.sweeps == 4 * result.iterations


def test_it_preconditions_blocks(rough):
    A = rough.matrix()
    B = np.random.default_rng(0).standard_normal((rough.unknowns, 3))

    with_it, without = block_cg(A, B, M=chebyshev(A, 7), rtol=1e-8), block_cg(A, B, M=jacobi(A), rtol=1e-8)

    assert with_it.converged
    assert 2.5 * with_it.iterations < without.iterations


def test_it_works_in_float32(beam):
    A = beam.matrix("csr").to_csr().astype(np.float32)
    b = beam.load().astype(np.float32)

    result = cg(A, b, M=chebyshev(A, 5), rtol=1e-3)

    assert result.converged
    assert result.x.dtype == np.float32


@pytest.mark.parametrize("products", [0, 2, -1, 16])
def test_an_even_degree_is_refused_with_the_reason(A, products):
    with pytest.raises(InputError, match=f"degree must be odd and positive, or auto, not {products}"):
        chebyshev(A, products)


@pytest.mark.parametrize("bounds", [{"low": 3.0, "high": 2.0}, {"low": 0.0}, {"high": np.nan}, {"high": np.inf}])
def test_bounds_out_of_order_are_refused(A, bounds):
    with pytest.raises(InputError, match="eigenvalue bounds must be positive and in order"):
        chebyshev(A, 3, **bounds)


def test_an_operator_that_knows_nothing_of_itself_is_refused(A):
    with pytest.raises(InputError, match="does not know its diagonal"):
        chebyshev(FunctionOperator(lambda x: A @ x, A.shape, np.float64))


class TestBlocks:
    """The inverse of the blocks of a node's unknowns in the place of that of the diagonal."""

    def test_is_the_polynomial_in_the_matrix_that_they_scale(self, rough):
        A = rough.matrix()
        matrix, D = A.to_csr().toarray(), np.kron(np.eye(A.shape[0] // 3), np.ones((3, 3)))
        D = np.linalg.inv(matrix * D)
        M, r = chebyshev(A, 3, block_size=3, low=0.1, high=4.0), np.random.default_rng(0).standard_normal(A.shape[0])
        centre, radius = 2.05, 1.95
        first = 1 / centre
        rho = radius / centre
        z0, z = np.zeros_like(r), first * D @ r
        for _ in range(2):
            following = 1 / (2 * centre / radius - rho)
            z, z0 = z + following * rho * (z - z0) + 2 * following / radius * D @ (r - matrix @ z), z
            rho = following

        np.testing.assert_allclose(M @ r, z, rtol=1e-10, atol=1e-12 * np.abs(z).max())

    def test_saves_iterations_as_block_jacobi_does(self, rough):
        A, b = rough.matrix(), rough.load()
        of_blocks, of_diagonal = (cg(A, b, M=chebyshev(A, 9, block_size=size), rtol=1e-8).iterations for size in (3, 1))

        assert of_blocks <= of_diagonal

    @pytest.mark.parametrize("size", [1, 3])
    def test_the_eigenvalue_is_that_of_a_dense_solver_from_below_with_a_margin(self, rough, size):
        A = rough.matrix()
        D = block_jacobi(A, size)
        matrix = A.to_csr().toarray()
        inverse = np.linalg.inv(matrix * np.kron(np.eye(A.shape[0] // size), np.ones((size, size))))
        largest = float(np.linalg.eigvals(inverse @ matrix).real.max())

        assert largest <= largest_eigenvalue(A, D, 0)
        assert 0.95 * largest <= largest_eigenvalue(A, D, 12) <= 1.06 * largest

    def test_streamed_it_has_the_same_bits(self, rough):
        A = rough.matrix("bsr")
        r = np.random.default_rng(0).standard_normal(A.shape[0])
        store = HostStore.create(rough.subdivisions(7, "bsr"))
        with StreamedMatrix(
            store, 5 * max(s.nbytes for s in store.index.subdivisions), workload=Workload(degree=5)
        ) as streamed:
            z = chebyshev(streamed, 5, block_size=3) @ r
        np.testing.assert_array_equal(z, chebyshev(A, 5, block_size=3) @ r)

    def test_blocks_that_a_subdivision_cuts_are_refused(self, rough):
        A = rough.matrix("csr").to_csr()
        store = HostStore.create([A[:10], A[10:]])
        with (
            StreamedMatrix(store, store.index.nbytes) as streamed,
            pytest.raises(InputError, match="subdivisions of the matrix cut blocks of 3 rows"),
        ):
            chebyshev(streamed, 5, block_size=3)


class TestBlocksOfRightHandSides:
    """The product of an iteration comes with the preconditioner's."""

    def problem(self, rough, columns=4):
        A = rough.matrix("bsr")
        return A, np.random.default_rng(3).standard_normal((A.shape[0], columns))

    def test_an_iteration_is_one_sweep(self, rough):
        A, B = self.problem(rough)
        planes = [A.rows(start, start + 75) for start in range(0, A.shape[0], 75)]
        store = HostStore.create(planes)
        budget = 8 * max(subdivision.nbytes for subdivision in store.index.subdivisions)
        with StreamedMatrix(store, budget, workload=Workload(degree=5), ring=Ring(slots=6)) as streamed:
            M = chebyshev(streamed, 5)
            streamed.powers_per_sweep()
            result = block_cg(streamed, B, M=M, rtol=1e-8)

            assert result.converged
            assert result.sweeps <= result.iterations + 6
        expected = block_cg(A, B, M=chebyshev(A, 5), rtol=1e-8)
        np.testing.assert_array_equal(result.x, expected.x)

    @pytest.mark.parametrize("columns", [1, 4])
    def test_they_are_solved_as_with_a_product_of_its_own(self, rough, columns):
        A, B = self.problem(rough, columns)
        M = chebyshev(A, 7, low=0.01, high=4.2)
        plain = FunctionOperator(lambda r: M @ r, A.shape, A.dtype, A.device)

        one, other = block_cg(A, B, M=M, rtol=1e-9), block_cg(A, B, M=plain, rtol=1e-9)

        assert one.converged
        assert abs(one.iterations - other.iterations) <= 2
        scale = np.abs(other.x).max()
        np.testing.assert_allclose(one.x, other.x, rtol=0, atol=1e-6 * scale)

    def test_repeated_zero_and_dependent_columns_converge(self, rough):
        A, B = self.problem(rough, 3)
        B = np.column_stack([B, B[:, 0], np.zeros(A.shape[0]), B @ [1.0, 2.0, -1.0], 1e-9 * B[:, 1]])

        result = block_cg(A, B, M=chebyshev(A, 5), rtol=1e-8)

        assert result.converged
        residuals = np.linalg.norm(B - A @ result.x, axis=0)
        assert (residuals <= 1.01e-8 * np.linalg.norm(B, axis=0)).all()

    def test_a_state_goes_on_bit_for_bit(self, rough):
        A, B = self.problem(rough)
        M = chebyshev(A, 5)
        whole = block_cg(A, B, M=M, rtol=1e-8)
        half = block_cg(A, B, M=M, rtol=1e-8, maxiter=whole.iterations // 2)
        state = half.state
        assert state.s is not None

        again = block_cg(A, B, M=M, rtol=1e-8, state=state)

        np.testing.assert_array_equal(again.x, whole.x)
        assert again.iterations == whole.iterations

    def test_a_state_of_another_preconditioner_is_refused_and_its_iterate_taken(self, rough):
        A, B = self.problem(rough)
        half = block_cg(A, B, M=jacobi(A), rtol=1e-8, maxiter=20)
        with pytest.raises(
            InputError, match=r"preconditioner DiagonalBlocks, and this one has Chebyshev; .* x0=state\.x"
        ):
            block_cg(A, B, M=chebyshev(A, 5), rtol=1e-8, state=half.state)
        assert block_cg(A, B, half.state.x, M=chebyshev(A, 5), rtol=1e-8).converged


def test_a_largest_eigenvalue_that_stands_alone_is_found_where_the_bound_is_settled():
    """Rounds that start from a random vector miss it among thousands of others that are nearly as large."""
    n = 20_000
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
    alone = scipy.sparse.csr_array(np.eye(3) * 0.45 + 0.55)  # eigenvalues .45, .45 and 2.1
    A = as_operator(scipy.sparse.csr_array(scipy.sparse.block_diag([line, alone])))
    D = block_jacobi(A, 1)

    missed, found = (
        largest_eigenvalue(A, D, 1, settled=settled, row_sums=np.full(1, 9.0)) for settled in (None, SETTLED)
    )

    assert missed < 2.1 <= found <= 2.1 * 1.06


@pytest.mark.parametrize("penalty", [1e14, 1e20, 1e30])
@pytest.mark.parametrize("block_size", [1, 3])
def test_rows_that_a_penalty_holds_do_not_hide_the_others(rough, penalty, block_size):
    csr = rough.matrix().to_csr()
    held = np.zeros(csr.shape[0])
    held[-3 * 25 :] = penalty * csr.diagonal().max()  # the free end, whose rows couple with those before
    A = as_operator(scipy.sparse.csr_array(csr + scipy.sparse.diags_array(held)))
    free = as_operator(scipy.sparse.csr_array(csr[: -3 * 25, : -3 * 25]))

    found, expected = (largest_eigenvalue(matrix, block_jacobi(matrix, block_size), 2) for matrix in (A, free))

    assert found == pytest.approx(expected, rel=0.05)
    b = np.where(held > 0, 0.0, 1.0)
    assert cg(A, b, M=chebyshev(A, block_size=block_size), rtol=1e-8).iterations < 60
