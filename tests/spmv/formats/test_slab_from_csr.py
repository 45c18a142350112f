"""Row slabs converted one by one from slabs of a CSR matrix, without the whole."""

import itertools

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS, converting

from penstock.spmv import BsrMatrix, CsrMatrix, InputError, SlicedBsrMatrix, SymmetricBsrMatrix


def symmetric(block_rows, size, seed=0):
    """A symmetric matrix of dense blocks, a few of them in any row and more in some."""
    blocks = scipy.sparse.random_array((block_rows, block_rows), density=0.05, rng=np.random.default_rng(seed))
    pattern = scipy.sparse.kron(blocks + blocks.T + scipy.sparse.eye_array(block_rows), np.ones((size, size)))
    half = scipy.sparse.csr_array(pattern)
    half.data = np.random.default_rng(seed).standard_normal(half.nnz)
    A = (half + half.T).tocsr()
    A.sort_indices()
    return A


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("chunks", [(0, 1, 2, 4), (0, 2, 4), (0, 4)])
@pytest.mark.parametrize("values_dtype", [np.float64, np.float32])
def test_slabs_of_a_symmetric_matrix_are_those_of_its_half(size, chunks, values_dtype):
    A = symmetric(110, size)
    whole = SymmetricBsrMatrix.from_csr(A, block_size=size, values_dtype=values_dtype)
    bounds = [min(chunk * 32 * size, A.shape[0]) for chunk in chunks]
    x = np.random.default_rng(1).standard_normal(A.shape[0])
    out, expected = np.zeros_like(x), np.zeros_like(x)

    for start, stop in itertools.pairwise(bounds):
        slab = SymmetricBsrMatrix.slab_from_csr(A[start:stop], start, block_size=size, values_dtype=values_dtype)
        cut = whole.rows(start, stop)
        assert slab.shape == cut.shape == (stop - start, A.shape[1])
        for name, array in slab.arrays().items():
            assert array.dtype == cut.arrays()[name].dtype
            assert np.array_equal(array, cut.arrays()[name]), name
        slab.apply_slab(start, x, out, 1.0, 0.0)
        cut.apply_slab(start, x, expected, 1.0, 0.0)

    assert np.array_equal(out, expected)
    assert abs(out - whole.to_csr() @ x).max() < 1e-12 * abs(A).sum(axis=1).max()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", [1, 3])
def test_every_device_converts_slabs_of_a_half(target, size):
    A = symmetric(110, size)
    whole, start, stop = SymmetricBsrMatrix.from_csr(A, block_size=size), 32 * size, 96 * size
    slab = CsrMatrix.from_csr(A[start:stop])
    arrays = {name: target.put(array) for name, array in slab.arrays().items()}

    with converting(target):
        matrix = CsrMatrix.from_arrays(slab.shape, slab.dtype, arrays, slab.parameters())
        converted = SymmetricBsrMatrix.slab_from_csr(matrix, start, block_size=size)

    for name, array in whole.rows(start, stop).arrays().items():
        assert np.array_equal(target.get(converted.arrays()[name]), array), name


def test_a_slab_that_begins_inside_a_block_is_refused():
    A = symmetric(64, 3)

    with pytest.raises(InputError, match="must begin at a multiple of the block size 3, not at row 97"):
        SymmetricBsrMatrix.slab_from_csr(A[97:190], 97, block_size=3)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(BsrMatrix, {"block_size": 3}), (SlicedBsrMatrix, {"block_size": 3, "sorting_scope": 1})],
    ids=["bsr", "sliced_bsr"],
)
def test_where_its_first_row_lies_is_nothing_to_a_slab_of_whole_rows(kind, options):
    A = symmetric(64, 3)[96:]
    slab, converted = kind.slab_from_csr(A, 96, **options), kind.from_csr(A, **options)

    assert all(np.array_equal(array, converted.arrays()[name]) for name, array in slab.arrays().items())
