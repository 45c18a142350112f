"""Jacobi and block Jacobi are the inverses they claim to be."""

import itertools

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
from kernel_targets import TARGETS

from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import as_preconditioner, block_jacobi, cg, jacobi
from penstock.solvers.preconditioners import _inverted_on_gpu
from penstock.spmv import BsrMatrix, CsrMatrix, InputError, Operator
from penstock.spmv.compilation.table import find_kernel
from penstock.streaming import HostStore, StreamedMatrix
from penstock.streaming.planning.workload import Ring

SIZES = (1, 2, 3, 4, 6)
# Blocks of a shifted random matrix have condition numbers below 100: LAPACK's inverses agree to a few hundred u.
INVERSE_RTOL = 1e-12


def matrix(n=24, seed=0):
    """Symmetric positive definite and sparse, with rows of different scale."""
    rng = np.random.default_rng(seed)
    half = scipy.sparse.random_array((n, n), density=0.3, rng=rng)
    full = (half + half.T).toarray() + np.diag(5 + rng.uniform(0, 20, n))
    scale = 10 ** rng.uniform(-1, 1, n)
    return scipy.sparse.csr_array(scale[:, None] * full * scale)


def dense_inverse(A, size):
    A = A.toarray()
    return scipy.linalg.block_diag(*(np.linalg.inv(A[i : i + size, i : i + size]) for i in range(0, len(A), size)))


def make(A, size):
    return jacobi(A) if size == 1 else block_jacobi(A, size)


def columns_of(M):
    return np.stack([M @ unit for unit in np.eye(M.shape[0], dtype=M.dtype)], axis=1)


@pytest.mark.parametrize("size", SIZES)
class TestEqualsTheDenseReference:
    def test_it_is_an_operator_of_the_shape_of_the_matrix(self, size):
        M = make(matrix(), size)

        assert isinstance(M, Operator)
        assert (M.shape, M.dtype) == ((24, 24), np.float64)

    @pytest.mark.parametrize("columns", [None, 1, 3])
    @pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (-0.5, 0.0), (1.0, 1.0), (2.0, -0.25), (0.0, 3.0)])
    def test_applied_to_vectors_and_blocks_of_them(self, size, columns, alpha, beta):
        A = matrix()
        rng = np.random.default_rng(1)
        x, before = (rng.standard_normal((24,) if columns is None else (24, columns)) for _ in range(2))
        expected = alpha * (dense_inverse(A, size) @ x) + beta * before
        out = before.copy()

        returned = make(A, size).apply(x, out, alpha=alpha, beta=beta)

        assert returned is out
        np.testing.assert_allclose(out, expected, rtol=INVERSE_RTOL, atol=INVERSE_RTOL * np.abs(expected).max())

    @pytest.mark.parametrize("alpha", [1.0, -2.0])
    @pytest.mark.parametrize("columns", [None, 2])
    def test_with_beta_zero_nan_in_the_output_has_no_effect(self, size, alpha, columns):
        M = make(matrix(), size)
        x = np.ones((24,) if columns is None else (24, columns))
        out = np.full(x.shape, np.nan)

        M.apply(x, out, alpha=alpha, beta=0.0)

        np.testing.assert_array_equal(out, M.apply(x, alpha=alpha))
        assert np.isfinite(out).all()

    def test_it_is_symmetric_to_the_last_bit(self, size):
        dense = columns_of(make(matrix(), size))

        np.testing.assert_array_equal(dense, dense.T)
        assert np.linalg.eigvalsh(dense)[0] > 0

    @pytest.mark.parametrize(
        "convert", [lambda A: A, CsrMatrix.from_csr, lambda A: BsrMatrix.from_csr(A, block_size=4)]
    )
    def test_any_form_of_the_matrix_gives_the_same_bits(self, size, convert):
        A = matrix()

        np.testing.assert_array_equal(columns_of(make(convert(A), size)), columns_of(make(A, size)))

    @pytest.mark.parametrize("budget", ["16 KiB", "24 KiB", "1 MiB"])
    @pytest.mark.parametrize("overlap", [True, False])
    def test_a_streamed_matrix_gives_the_same_bits_in_one_sweep(self, size, budget, overlap):
        """Blocks that two subdivisions share are put together."""
        A = matrix()
        bounds = [0, 5, 10, 11, 19, 24]
        slabs = (A[start:stop] for start, stop in itertools.pairwise(bounds))
        with StreamedMatrix(HostStore.create(slabs), budget, ring=Ring(overlap=overlap)) as streamed:
            M = make(streamed, size)

            assert streamed.sweeps == 1
        np.testing.assert_array_equal(columns_of(M), columns_of(make(A, size)))

    def test_a_float32_system_has_a_float32_preconditioner(self, size):
        A = matrix()

        M = make(A.astype(np.float32), size)

        assert M.dtype == np.float32
        reference = dense_inverse(A, size)
        np.testing.assert_allclose(columns_of(M), reference, rtol=0, atol=1e-5 * np.abs(reference).max())


def test_block_jacobi_of_size_one_is_jacobi():
    A = matrix()

    np.testing.assert_array_equal(columns_of(block_jacobi(A, 1)), columns_of(jacobi(A)))


def test_block_jacobi_of_a_block_diagonal_matrix_is_its_inverse():
    """Then CG has nothing left to do."""
    blocks = [matrix(6, seed).toarray() for seed in range(5)]
    A = scipy.sparse.csr_array(scipy.linalg.block_diag(*blocks))

    assert cg(A, np.ones(30), M=block_jacobi(A, 6), rtol=1e-10).iterations == 1


@pytest.mark.parametrize("size", SIZES)
class TestRefused:
    @pytest.mark.parametrize("value", [0.0, -1.0])
    @pytest.mark.parametrize("row", [0, 13, 23])
    def test_a_diagonal_that_is_not_positive_with_its_row(self, size, value, row):
        A = matrix().tolil()
        A[row, row] = value

        with pytest.raises(InputError, match=rf"at row {row - row % size} is not positive definite.* check that row"):
            make(A.tocsr(), size)

    def test_a_diagonal_that_is_not_stored(self, size):
        A = matrix().tolil()
        A[:, 6] = 0
        A[6, :] = 0
        A = A.tocsr()
        A.eliminate_zeros()

        with pytest.raises(InputError, match=rf"at row {6 - 6 % size} is not positive definite"):
            make(A, size)

    def test_the_first_of_several_rows_is_named(self, size):
        A = matrix().tolil()
        A[20, 20] = A[8, 8] = -1

        with pytest.raises(InputError, match=f"at row {8 - 8 % size} "):
            make(A.tocsr(), size)

    def test_nan_in_the_diagonal_with_its_row(self, size):
        A = matrix()
        A.data[A.indptr[12] : A.indptr[13]] = np.nan

        with pytest.raises(InputError, match="at row 12 is not positive definite"):
            make(CsrMatrix.from_csr(A, check=False), size)

    def test_an_operator_that_does_not_know_its_diagonal(self, size):
        with pytest.raises(
            InputError, match="build the preconditioner from the matrix, or pass your own operator as M"
        ):
            make(matrix().toarray(), size)


def test_an_indefinite_block_of_positive_diagonal_is_refused_with_its_row():
    A = scipy.sparse.csr_array(scipy.linalg.block_diag(np.eye(2), [[1.0, 2.0], [2.0, 1.0]], np.eye(2)))

    assert jacobi(A).shape == (6, 6)
    with pytest.raises(InputError, match="at row 2 is not positive definite"):
        block_jacobi(A, 2)


@pytest.mark.parametrize("size", [5, 7])
def test_a_block_size_that_does_not_divide_the_rows_is_refused(size):
    with pytest.raises(InputError, match=f"must divide the 24 rows of the matrix; {size} does not"):
        block_jacobi(matrix(), size)


@pytest.mark.parametrize("size", [0, -3, 12, 25])
def test_a_block_size_of_none_or_above_eight_is_refused(size):
    with pytest.raises(InputError, match=f"1 to 8 rows, not {size}"):
        block_jacobi(matrix(), size)


class TestAsPreconditioner:
    def test_a_shape_that_is_not_that_of_the_matrix_is_refused(self):
        A = CsrMatrix.from_csr(matrix())

        for wrong in (np.eye(23), jacobi(matrix(18)), scipy.sparse.eye_array(24, 25, format="csr")):
            with pytest.raises(InputError, match=r"the preconditioner has shape .*, the matrix \(24, 24\)"):
                as_preconditioner(wrong, A)

    def test_what_is_no_operator_is_refused(self):
        with pytest.raises(InputError, match="cannot use dict as an operator; pass"):
            as_preconditioner({}, CsrMatrix.from_csr(matrix()))
        with pytest.raises(InputError, match="'jacoby'"):
            as_preconditioner("jacoby", CsrMatrix.from_csr(matrix()))

    def test_a_function_becomes_an_operator_of_the_shape_and_type_of_the_matrix(self):
        A = CsrMatrix.from_csr(matrix().astype(np.float32))

        M = as_preconditioner(lambda r: 2 * r, A)

        assert (M.shape, M.dtype) == ((24, 24), np.float32)
        np.testing.assert_array_equal(M @ np.ones(24, dtype=np.float32), np.full(24, 2, dtype=np.float32))


@pytest.fixture(scope="module")
def rough():
    """Stiffness that varies by a factor of a thousand from element to element."""
    beam = Cantilever(nodes=(13, 4, 4), dof=3, material=LognormalMaterial(sigma=2.0, seed=5))
    return beam.matrix(), beam.load()


class TestWorth:
    def test_fewer_iterations_than_plain_cg_on_a_rough_cantilever(self, rough):
        A, b = rough
        plain, point, block = (cg(A, b, M=M, rtol=1e-8) for M in (None, jacobi(A), block_jacobi(A, 3)))

        assert plain.converged
        assert point.converged
        assert block.converged
        assert point.iterations < 0.7 * plain.iterations
        assert block.iterations <= point.iterations

    def test_the_solution_is_the_same(self, rough):
        A, b = rough
        reference = scipy.sparse.linalg.spsolve(A.to_csr().tocsc(), b)

        for M in (None, jacobi(A), block_jacobi(A, 3)):
            error = cg(A, b, M=M, rtol=1e-10).x - reference
            # In the norm of energy, which CG minimises; 1e-10 times the condition number of the rough beam.
            assert error @ (A @ error) <= 1e-8 * (reference @ b)

    def test_it_makes_iterations_independent_of_units(self):
        """Rows in other units (metres and radians, say) cost plain CG dearly and Jacobi nothing."""
        A, b = matrix(seed=2), np.random.default_rng(0).standard_normal(24)
        units = 10 ** np.random.default_rng(1).uniform(-3, 3, 24)
        other = scipy.sparse.csr_array(units[:, None] * A.toarray() * units)

        before = cg(A, b, M=jacobi(A), rtol=1e-10).iterations
        after = cg(other, units * b, M=jacobi(other), rtol=1e-10, maxiter=10 * before)

        assert after.converged
        assert after.iterations <= 2 * before


@pytest.mark.parametrize("target", [target for target in TARGETS if target.id != "cpu"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_blocks_are_inverted_on_a_gpu_as_on_the_host(target, dtype, size):
    rng = np.random.default_rng(size)
    factors = rng.standard_normal((300, size, size)) + 2 * np.eye(size)
    blocks = (factors @ factors.swapaxes(1, 2)).astype(dtype)

    with target.running():
        inverses, indefinite, infinite = _inverted_on_gpu(target.put(blocks), target.xp)

    inverses = target.get(inverses)
    assert (indefinite, infinite) == (300, 300)
    assert np.array_equal(inverses, inverses.swapaxes(1, 2))
    products = inverses.astype(np.float64) @ blocks.astype(np.float64)
    conditions = np.linalg.cond(blocks.astype(np.float64))
    unit = np.finfo(dtype).eps
    assert (abs(products - np.eye(size)).max(axis=(1, 2)) <= 16 * size**2 * unit * conditions).all()


@pytest.mark.parametrize("target", [target for target in TARGETS if target.id != "cpu"])
def test_the_first_bad_block_is_named(target):
    blocks = np.tile(np.eye(3), (500, 1, 1))
    # Normal numbers also in float32, whose denormals a GPU may take for zero, but their inverse is not finite there.
    tiny = 2e-38 * np.eye(3)
    tiny[0, 1] = tiny[1, 0] = 1.9999e-38
    blocks[[77, 301], 1, 1], blocks[[40, 200]] = -1.0, tiny

    with target.running():
        found = _inverted_on_gpu(target.put(blocks), target.xp)
        narrow = _inverted_on_gpu(target.put(blocks.astype(np.float32)), target.xp)

    assert found[1:] == (77, 500)
    assert narrow[1:] == (77, 40)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("count", [0, 700])
def test_norms_of_blocks(target, dtype, size, count):
    blocks = np.random.default_rng(size).standard_normal((count, size, size)).astype(dtype)
    blocks[:5] = 0.0

    with target.running():
        on_target = target.put(np.empty(count))
        find_kernel("blocks", "norms", target.device_kind)(target.put(blocks), on_target)

    np.testing.assert_allclose(
        target.get(on_target), np.linalg.norm(blocks.astype(np.float64), axis=(1, 2)), rtol=8 * np.finfo(float).eps
    )
