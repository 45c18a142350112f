"""Products of sparse matrices are those of SciPy, entries of zero sum included."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import DEVICES, TARGETS

from penstock.fem import Cantilever
from penstock.solvers import galerkin, galerkin_pattern, multiply, product_pattern, transpose
from penstock.spmv import BsrMatrix, BudgetError, CsrMatrix, InputError
from penstock.spmv.products import block_products, hashing
from penstock.spmv.products import multiply as module
from penstock.spmv.products.block_rows import BlockRows

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = np.finfo(np.float64).eps


def random_csr(shape, density, rng, dtype=np.float64):
    """A matrix of uneven rows: a few are ten times as full as the others, some are empty."""
    fill = np.minimum(1.0, density * rng.choice([0.0, 1.0, 1.0, 1.0, 10.0], size=(shape[0], 1)))
    return scipy.sparse.csr_array(np.where(rng.random(shape) < fill, rng.uniform(-1, 1, shape), 0.0).astype(dtype))


def structure(A, B):
    """Where a product has entries; SciPy drops sums of zero."""
    ones = [scipy.sparse.csr_array((np.ones(M.nnz), M.indices, M.indptr), shape=M.shape) for M in (A, B)]
    return (ones[0] @ ones[1]).toarray() > 0


def assert_product(found, A, B):
    """The same entries, and values within the rounding of a sum of so many terms."""
    assert (np.diff(found.indices.astype(np.int64)) > 0)[
        np.setdiff1d(np.arange(found.nnz - 1), found.indptr[1:-1].astype(np.int64) - 1)
    ].all()
    pattern = np.zeros(found.shape, dtype=bool)
    pattern[np.repeat(np.arange(found.shape[0]), np.diff(found.indptr)), found.indices] = True
    assert np.array_equal(pattern, structure(A, B))
    terms = np.diff(A.indptr).max(initial=0)
    bound = (terms + 1) * EPS * (abs(A).astype(np.float64) @ abs(B).astype(np.float64)).toarray()
    assert (abs(found.toarray() - (A.astype(np.float64) @ B.astype(np.float64)).toarray()) <= bound + 1e-300).all()


def product_of_numbers(target, A, B, *, again=False):
    """The product by the kernels of a target; ``again`` by its pattern."""
    with target.running():
        left, right, width, _ = module._rows_of(*(target.put_matrix(CsrMatrix.from_csr(M)) for M in (A, B)))
        if target.device_kind == "cpu":
            C = module._product(left, right, width, None)
        else:
            pattern = None
            if again:
                offsets, columns = module.find_kernel("block_rows", "pattern", "cuda")(left, right, width)
                factors = (left.offsets, left.columns, right.offsets, right.columns)
                pattern = module.ProductPattern(offsets, columns, hashing.bins_of_offsets(offsets), width, factors)
            C = module._product_of_numbers(left, right, width, pattern)
        arrays = (C.blocks.reshape(-1), C.columns, C.offsets)
        return scipy.sparse.csr_array(tuple(target.get(array) for array in arrays), shape=(A.shape[0], B.shape[1]))


CASES = {
    "short": ((70, 60), (60, 50), 0.05, 0.05),
    "long": ((12, 40), (40, 900), 0.4, 0.3),
    "block": ((5, 60), (60, 3000), 0.5, 0.2),
    "dense": ((3, 30), (30, 9000), 0.9, 0.4),
    "parts": ((2, 700), (700, 9000), 0.9, 0.1),
    "mixed": ((40, 300), (300, 2500), 0.02, 0.02),
    "one": ((1, 1), (1, 1), 1.0, 1.0),
    "empty": ((4, 5), (5, 6), 0.0, 0.5),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_products_of_every_length_of_rows(target, again, name):
    of_a, of_b, density_a, density_b = CASES[name]
    rng = np.random.default_rng(1)
    A, B = random_csr(of_a, density_a, rng), random_csr(of_b, density_b, rng)

    assert_product(product_of_numbers(target, A, B, again=again), A, B)


@pytest.mark.parametrize("target", [*TARGETS[1:]])
def test_sums_are_formed_in_the_order_of_the_entries(target):
    """In every lane layout the same bits as the obvious loop."""
    rng = np.random.default_rng(2)
    A, B = random_csr((30, 50), 0.2, rng), random_csr((50, 700), 0.2, rng)
    expected = np.zeros((30, 700))
    for row in range(30):
        for entry in range(A.indptr[row], A.indptr[row + 1]):
            other = slice(B.indptr[A.indices[entry]], B.indptr[A.indices[entry] + 1])
            expected[row, B.indices[other]] += A.data[entry] * B.data[other]

    found = product_of_numbers(target, A, B).toarray()

    if target.name == "gpu":  # multiplications and additions are fused there
        assert np.allclose(found, expected, rtol=0, atol=1e-14)
        assert np.array_equal(found, product_of_numbers(target, A, B).toarray())
    else:
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("target", TARGETS)
def test_float32(target):
    rng = np.random.default_rng(3)
    A, B = (random_csr(shape, 0.2, rng, np.float32) for shape in ((20, 30), (30, 40)))

    found = product_of_numbers(target, A, B)

    assert found.dtype == np.float32
    assert np.allclose(found.toarray(), (A.astype(np.float64) @ B.astype(np.float64)).toarray(), atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_three_hundred_random_pairs(device):
    rng = np.random.default_rng(4)
    for _ in range(300):
        m, n, k = rng.integers(1, 60, 3)
        A, B = random_csr((m, n), rng.random() * 0.3, rng), random_csr((n, k), rng.random() * 0.3, rng)
        C = multiply(*(CsrMatrix.from_csr(M).to_device(device) for M in (A, B)))
        assert_product(C.to_csr() if C.nnz else scipy.sparse.csr_array((m, k)), A, B)


def test_a_pattern_serves_other_values():
    rng = np.random.default_rng(5)
    A, B = random_csr((40, 30), 0.1, rng), random_csr((30, 50), 0.1, rng)
    pattern = product_pattern(A, B)
    A.data[:] = rng.normal(size=A.nnz)

    assert_product(multiply(A, B, pattern=pattern).to_csr(), A, B)
    with pytest.raises(InputError, match="other matrices"):
        multiply(B.T.tocsr(), A.T.tocsr()[:, :7], pattern=pattern)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_blocks_are_multiplied_whole(size):
    rng = np.random.default_rng(6)
    A, B = (
        scipy.sparse.bsr_array(
            scipy.sparse.kron(random_csr((9, 9), 0.3, rng), rng.normal(size=(size, size))).tobsr((size, size))
        )
        for _ in range(2)
    )

    C = multiply(BsrMatrix.from_bsr(A), B)

    assert isinstance(C, BsrMatrix)
    assert C.row_granularity == size
    assert np.allclose(C.to_csr().toarray(), (A @ B).toarray())


def test_rectangular_blocks_and_triple_products():
    beam = Cantilever(nodes=(5, 4, 4), dof=3)
    A, modes = beam.matrix("bsr"), beam.rigid_body_modes()
    aggregate = np.arange(80) // 10
    blocks = modes.reshape(80, 3, 6)
    P = scipy.sparse.bsr_array((blocks, aggregate, np.arange(81)), shape=(240, 48))
    expected = P.T @ A.to_csr() @ P

    image = multiply(A, P)
    coarse = galerkin(A, P)

    assert isinstance(image, BlockRows)
    assert image.blocks.shape[1:] == (3, 6)
    assert coarse.row_granularity == 6
    assert np.allclose(coarse.to_csr().toarray(), expected.toarray(), atol=1e-11 * abs(expected).max())
    pattern = galerkin_pattern(A, P)
    again = galerkin(A, P, pattern=pattern)
    assert np.array_equal(again.values, coarse.values)
    scalars = galerkin(A.to_csr(), P.tocsr())
    assert isinstance(scalars, CsrMatrix)
    assert np.allclose(scalars.to_csr().toarray(), expected.toarray(), atol=1e-11 * abs(expected).max())
    mixed = multiply(A, P.tocsr())  # blocks that do not fit are taken apart
    assert np.allclose(mixed.to_csr().toarray(), (A.to_csr() @ P).toarray())


def test_transposes():
    rng = np.random.default_rng(7)
    A = random_csr((30, 20), 0.2, rng)
    beam = Cantilever(nodes=(4, 3, 3), dof=3).matrix("bsr")

    assert np.array_equal(transpose(A).to_csr().toarray(), A.toarray().T)
    assert transpose(A).shape == (20, 30)
    assert np.array_equal(transpose(beam).to_csr().toarray(), beam.to_csr().toarray().T)


def test_refusals(monkeypatch):
    square = scipy.sparse.eye_array(4, format="csr")
    with pytest.raises(InputError, match="4 columns, the second 5 rows"):
        multiply(square, scipy.sparse.eye_array(5, format="csr"))
    with pytest.raises(InputError, match="not at hand"):
        multiply(square, np.eye(4))
    monkeypatch.setattr("penstock.spmv.Device.free_nbytes", lambda self: 15)
    with pytest.raises(BudgetError, match="takes 32 B in one array, more than cpu has"):
        multiply(square, square)


def test_patterns_of_other_matrices_are_refused():
    """Of as many entries, too: a kernel would write where the product has none."""
    ones, same = np.ones(3), np.array([0, 1, 2])
    diagonal = scipy.sparse.csr_array((ones, same, np.array([0, 1, 2, 3])), shape=(3, 3))
    row = scipy.sparse.csr_array((ones, same, np.array([0, 3, 3, 3])), shape=(3, 3))
    with pytest.raises(InputError, match="other matrices"):
        multiply(row, diagonal, pattern=product_pattern(diagonal, diagonal))
    with pytest.raises(InputError, match="other matrices"):
        galerkin(row, diagonal, pattern=galerkin_pattern(diagonal, diagonal))
    larger = scipy.sparse.eye_array(6, format="csr")
    with pytest.raises(InputError, match="other matrices"):
        galerkin(larger, larger, pattern=galerkin_pattern(diagonal, diagonal))
    with pytest.raises(InputError, match="square matrix A"):
        galerkin(scipy.sparse.csr_array((3, 4)), scipy.sparse.csr_array((4, 2)))


def test_products_of_products_keep_their_empty_columns():
    P = scipy.sparse.bsr_array((np.ones((1, 2, 3)), np.array([0]), np.array([0, 1, 1])), shape=(4, 9))

    back = transpose(P)

    assert len(back.offsets) == 4
    assert len(transpose(back).offsets) == 3
    product = multiply(back, scipy.sparse.eye_array(4, format="csr"))
    assert product.shape == (9, 4)
    assert np.array_equal(product.to_csr().toarray(), P.T.toarray())


def test_scipy_blocks_get_the_checks_of_other_matrices():
    unsorted = scipy.sparse.bsr_array(
        (np.stack([np.ones((2, 2)), 2 * np.ones((2, 2))]), np.array([1, 0]), np.array([0, 2, 2])), shape=(4, 4)
    )
    small = scipy.sparse.bsr_array(np.full((2, 2), 100, np.int8), blocksize=(2, 2))

    assert np.array_equal(multiply(unsorted, unsorted).to_csr().toarray(), (unsorted @ unsorted).toarray())
    assert unsorted.indices.tolist() == [1, 0]
    assert multiply(small, small).to_csr().toarray().tolist() == [[20000.0, 20000.0], [20000.0, 20000.0]]
    for wrong in (np.eye(2) * 1j, np.array([[np.nan, 1.0], [1.0, 1.0]])):
        with pytest.raises(InputError):
            multiply(scipy.sparse.bsr_array(wrong, blocksize=(2, 2)), small)


def test_slabs_and_types_of_vectors():
    beam = Cantilever(nodes=(4, 3, 3), dof=3)
    A = beam.matrix("bsr")
    slab = A.rows(0, 27)
    narrow = CsrMatrix.from_csr(A.to_csr(), values_dtype=np.float32)

    assert np.allclose(multiply(slab, A).to_csr().toarray(), (slab.to_csr() @ A.to_csr()).toarray())
    assert multiply(narrow, narrow).dtype == np.float64
    assert multiply(narrow, narrow).values_dtype == np.float32


def test_products_without_entries():
    none = scipy.sparse.csr_array((3, 4))
    C = multiply(none, scipy.sparse.csr_array((4, 2)))

    assert C.shape == (3, 2)
    assert C.nnz == 0


@pytest.mark.parametrize("shape", [(90, 70, 80), (5, 3, 4), (0, 6, 5)])
def test_the_columns_of_a_product_are_the_same_whether_they_are_counted_first_or_not(shape, monkeypatch):
    rng = np.random.default_rng(7)
    A, B = random_csr(shape[:2], 0.1, rng), random_csr(shape[1:], 0.1, rng)
    at_once = multiply(A, B).to_csr()
    monkeypatch.setattr(block_products, "_FOUND_AT_ONCE", -1)
    counted = multiply(A, B).to_csr()
    for name in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(at_once, name), getattr(counted, name))
