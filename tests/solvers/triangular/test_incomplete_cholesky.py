"""Incomplete factors reproduce A where they have entries, and are exact where nothing is left out."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS, gpu_count

from penstock.fem import Cantilever
from penstock.solvers import block_cg, block_jacobi, cg, incomplete_cholesky, preconditioner_spec
from penstock.solvers.triangular.block_entries import block_entries
from penstock.solvers.triangular.colours import colour_rows, order_by_colour
from penstock.solvers.triangular.factor_rows import factored, lower_pattern
from penstock.solvers.triangular.permutation import permuted, transposed
from penstock.spmv import BsrMatrix, CsrMatrix, InputError

# Kershaw (1978): positive definite, but without a shift a pivot of the incomplete factor is negative.
KERSHAW = scipy.sparse.csr_array(
    np.array([[3.0, -2.0, 0.0, 2.0], [-2.0, 3.0, -2.0, 0.0], [0.0, -2.0, 3.0, -2.0], [2.0, 0.0, -2.0, 3.0]])
)


def dense_of(entries, target):
    """A matrix of blocks as a dense one."""
    arrays = (target.get(array) for array in (entries.values, entries.columns, entries.offsets))
    n = entries.rows * entries.size
    return scipy.sparse.bsr_array(tuple(arrays), shape=(n, n)).toarray()


def factor_on(target, matrix, fill, shift=0.0, colours=False):
    """The factor by the kernels of a target, the matrix, its pattern in blocks, the first bad row, and the factor's blocks."""
    kind = target.device_kind
    with target.running():
        entries = block_entries(target.put_matrix(matrix))
        if colours:
            entries = permuted(entries, order_by_colour(colour_rows(entries, kind), False)[0])
        factor, bad = factored(lower_pattern(entries, fill, kind), entries, shift, kind)
        columns, offsets = target.get(entries.columns), target.get(entries.offsets)
        pattern = (
            scipy.sparse.csr_array((np.ones(len(columns)), columns, offsets), shape=(entries.rows,) * 2).toarray() > 0
        )
        return dense_of(factor, target), dense_of(entries, target), pattern, bad, len(factor.columns)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_full_pattern_gives_the_cholesky_factor(target, size):
    rng = np.random.default_rng(1)
    root = rng.normal(size=(36, 36))
    A = root @ root.T + 36 * np.eye(36)
    blocks = scipy.sparse.bsr_array(scipy.sparse.csr_array(A), blocksize=(size, size))
    matrix = CsrMatrix.from_csr(scipy.sparse.csr_array(A)) if size == 1 else BsrMatrix.from_bsr(blocks)

    L, _, _, bad, _ = factor_on(target, matrix, 0)

    assert bad == 36 // size
    assert np.allclose(L, np.linalg.cholesky(A), atol=1e-12)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("colours", [False, True])
@pytest.mark.parametrize(("dof", "fill"), [(1, 0), (1, 1), (3, 0), (3, 1)])
def test_the_product_is_a_where_the_factor_has_entries(target, colours, dof, fill):
    matrix = Cantilever(nodes=(5, 4, 4), dof=dof).matrix("bsr" if dof > 1 else "csr")

    L, A, pattern, bad, count = factor_on(target, matrix, fill, colours=colours)

    in_lower = np.tril(pattern)
    if fill:
        strict = np.tril(in_lower, -1)
        in_lower |= np.tril(strict.astype(int) @ strict.T.astype(int) > 0)
    places = np.kron(in_lower, np.ones((dof, dof), dtype=bool))
    assert bad == in_lower.shape[0]
    assert count == in_lower.sum()
    assert not L[~places].any()
    symmetric = places | places.T
    assert np.allclose((L @ L.T)[symmetric], A[symmetric], atol=1e-12 * abs(A).max())


@pytest.mark.parametrize("target", TARGETS)
def test_a_pivot_that_is_not_positive_is_found(target):
    matrix = CsrMatrix.from_csr(KERSHAW)

    assert factor_on(target, matrix, 0)[3] == 3
    assert factor_on(target, matrix, 0, shift=1.0)[3] == 4


def test_shifts_are_chosen():
    M = incomplete_cholesky(KERSHAW)

    assert M.shift > 0
    assert np.linalg.eigvalsh(M @ np.eye(4)).min() > 0
    with pytest.raises(InputError, match=r"pivot of row 3 is not positive with a shift of 0.001: pass a larger shift"):
        incomplete_cholesky(KERSHAW, shift=0.001)
    assert incomplete_cholesky(KERSHAW, shift=2).shift == 2.0


@pytest.mark.parametrize("order", ["natural", "levels", "colours", "auto"])
@pytest.mark.parametrize("fill", [0, 1])
def test_cg_takes_fewer_iterations(order, fill):
    beam = Cantilever(nodes=(9, 7, 7), dof=3)
    A, b = beam.matrix("bsr"), beam.load()
    plain = cg(A, b, M=block_jacobi(A, 3), rtol=1e-10)

    M = incomplete_cholesky(A, fill, order=order)
    found = cg(A, b, M=M, rtol=1e-10)

    assert found.converged
    assert found.iterations < (0.5 if fill else 0.85) * plain.iterations
    assert np.allclose(found.x, plain.x, atol=1e-7 * abs(plain.x).max())
    dense = M @ np.eye(A.shape[0])[:, :40].copy()
    assert np.allclose(dense[:40], dense[:40].T, atol=1e-12 * abs(dense).max())


def test_blocks_of_vectors_other_formats_and_scalars():
    beam = Cantilever(nodes=(6, 5, 5), dof=3)
    A, B = beam.matrix("bsr"), np.random.default_rng(2).normal(size=(beam.unknowns, 4))
    M = incomplete_cholesky(A)

    assert np.allclose(incomplete_cholesky(beam.matrix("symmetric_bsr"), block_size=3) @ B, M @ B, rtol=1e-10)
    assert np.allclose(M.apply(B, 2.0 * B, alpha=0.5, beta=3.0), 0.5 * (M @ B) + 6.0 * B, rtol=1e-10)
    assert incomplete_cholesky(beam.matrix("csr")).nnz < M.nnz
    assert block_cg(A, B, M=M, rtol=1e-9).converged
    spec = preconditioner_spec("incomplete_cholesky", fill=1).with_block_size(3)
    assert np.array_equal(spec.build(A) @ B, incomplete_cholesky(A, 1) @ B)
    assert spec.workspace_nbytes(A.shape[0], 1) > A.nbytes


def test_transposes():
    A = scipy.sparse.random_array((30, 30), density=0.2, rng=np.random.default_rng(3), format="csr")
    entries = transposed(block_entries(A))
    back = scipy.sparse.csr_array((entries.values.ravel(), entries.columns, entries.offsets), shape=(30, 30))
    assert np.array_equal(back.toarray(), A.toarray().T)


def test_refusals():
    with pytest.raises(InputError, match="fill must be 0 or 1"):
        incomplete_cholesky(KERSHAW, 2)
    for shift in (-1.0, "AUTO", None, [1]):
        with pytest.raises(InputError, match="shift must be"):
            incomplete_cholesky(KERSHAW, shift=shift)
    with pytest.raises(InputError, match="row 1 has an entry without a mirror image"):
        incomplete_cholesky(scipy.sparse.csr_array(np.array([[2.0, 0.0], [1.0, 2.0]])))
    with pytest.raises(InputError, match="row 1 has no diagonal entry"):
        incomplete_cholesky(scipy.sparse.csr_array(np.array([[1.0, 1.0], [1.0, 0.0]])))
    with pytest.raises(InputError, match=r"pivot of row 0 is not positive .* the matrix is hardly positive definite"):
        incomplete_cholesky(scipy.sparse.csr_array(-np.eye(3)))


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")
@pytest.mark.parametrize("fill", [0, 1])
@pytest.mark.parametrize("order", ["colours", "levels"])
def test_on_a_gpu_as_on_the_host(fill, order):
    beam = Cantilever(nodes=(12, 11, 10), dof=3)
    A, r = beam.matrix("bsr"), np.random.default_rng(4).normal(size=beam.unknowns)
    on_gpu = A.to_device("cuda")

    expected = incomplete_cholesky(A, fill, order=order) @ r
    found = (incomplete_cholesky(on_gpu, fill, order=order) @ on_gpu.device.asarray(r)).get()

    assert np.allclose(found, expected, rtol=0, atol=1e-10 * abs(expected).max())
