"""Values may be a view of the caller's that begins anywhere, though kernels load rows of even blocks in pairs."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS, converting

from penstock.spmv import BsrMatrix
from penstock.spmv.compilation.table import find_kernel


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("size", "dtype"), [(2, np.float64), (2, np.float32), (3, np.float64), (6, np.float64)])
def test_products_with_a_view(target, size, dtype):
    rng = np.random.default_rng(size)
    pattern = scipy.sparse.random_array((9, 9), density=0.4, rng=rng, format="csr")
    blocks = np.zeros(pattern.nnz * size * size + 1, dtype=dtype)
    blocks[1:] = rng.uniform(-1, 1, blocks.size - 1)
    whole, x = target.put(blocks), target.put(rng.standard_normal(9 * size))
    arrays = {
        "row_offsets": target.put(pattern.indptr.astype(np.int32)),
        "column_indices": target.put(pattern.indices.astype(np.int32)),
        "values": whole[1:].reshape(-1, size, size),
    }
    A = BsrMatrix.from_arrays((9 * size, 9 * size), np.dtype(np.float64), arrays, {})
    out = target.put(np.full(9 * size, np.nan))

    with converting(target):
        find_kernel("bsr", "spmv", target.device_kind)(A, x, out, 1.0, 0.0)

    expected = scipy.sparse.bsr_array((blocks[1:].reshape(-1, size, size), pattern.indices, pattern.indptr))
    assert np.allclose(target.get(out), expected @ target.get(x), atol=1e-12)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("size", "dtype"), [(2, np.float64), (2, np.float32), (3, np.float64), (6, np.float64)])
def test_diagonals_that_are_a_view(target, size, dtype):
    numbers = np.random.default_rng(size).uniform(-1, 1, 9 * size * size + 1).astype(dtype)
    y, v = (target.put(np.zeros(9 * size, dtype=dtype)) for _ in range(2))
    f, out = target.put(np.ones(9 * size, dtype=dtype)), target.put(np.full(9 * size, np.nan, dtype=dtype))
    blocks = target.put(numbers)[1:].reshape(-1, size, size)

    with converting(target):
        find_kernel("vector", "three_terms", target.device_kind)(1.0, blocks, f, y, 0.0, v, 0.0, out, False)

    assert np.allclose(target.get(out), numbers[1:].reshape(-1, size).sum(axis=1), atol=1e-5)
