"""Half of a matrix with three unknowns a node, whose rows are multiplied four at a time where their columns follow each other."""

from __future__ import annotations

from itertools import pairwise

import numba
import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS

from penstock.spmv import SymmetricBsrMatrix
from penstock.spmv.compilation.table import find_kernel
from penstock.spmv.formats import base
from penstock.spmv.formats.symmetric_image import SymmetricImageMatrix

NODES = 167  # the last chunk is short
OFFSETS = (1, 3, 30, 31, 33, 64)


@pytest.fixture(scope="module")
def banded():
    """Long runs of columns that follow each other, interrupted where nodes lack some of their neighbours."""
    rng = np.random.default_rng(0)
    pattern = np.eye(NODES, dtype=bool)
    for offset in OFFSETS:
        rows = np.flatnonzero(rng.random(NODES - offset) < 0.95)
        pattern[rows, rows + offset] = pattern[rows + offset, rows] = True
    values = rng.standard_normal((3 * NODES, 3 * NODES)) * np.kron(pattern, np.ones((3, 3)))
    return scipy.sparse.csr_array(values + values.T)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = numba.get_num_threads()
    if request.param > numba.config.NUMBA_NUM_THREADS:
        pytest.skip("this machine has fewer threads")
    numba.set_num_threads(request.param)
    yield request.param
    numba.set_num_threads(before)


@pytest.mark.parametrize("cuts", [(), (96,), (33 * 3, 128 * 3, 129 * 3), (4 * 3, 160 * 3)])
@pytest.mark.parametrize("values", [np.float64, np.float32])
@pytest.mark.parametrize("vectors", [np.float64, np.float32])
def test_products_of_slabs_agree_with_those_of_the_definition(banded, threads, cuts, values, vectors):
    A = banded.astype(vectors)
    x, start = np.random.default_rng(1).standard_normal((2, A.shape[0])).astype(vectors)
    stored = A.toarray().astype(values).astype(np.float64)
    expected = start - 1.7 * (stored @ x.astype(np.float64))
    found, bounds = start.copy(), (0, *cuts, A.shape[0])
    for first, stop in pairwise(bounds):
        slab = SymmetricBsrMatrix.slab_from_csr(A[first:stop], first, values_dtype=values, check=False)
        slab.apply_slab(first, x, found, -1.7, 1.0)

    unit = np.finfo(vectors).eps
    bound = 60 * unit * (np.abs(start) + 1.7 * np.abs(stored) @ np.abs(x.astype(np.float64)))
    assert (np.abs(found - expected) <= bound).all()


@pytest.mark.parametrize("values", [None, np.float32, np.int16])
@pytest.mark.parametrize(
    ("stored", "size"), [(3, 1), (3, 2), (3, 3), (3, 5), (3, 6), (6, 1), (6, 2), (6, 3), (4, 2), (2, 1)]
)
def test_blocks_on_the_diagonal_are_those_of_the_matrix_wherever_slabs_begin(banded, stored, size, values, monkeypatch):
    monkeypatch.setattr(base, "_SLAB_NBYTES", 40_000)
    n = banded.shape[0] // (size * stored) * size * stored
    A, blocks = banded[:n, :n].tocsr(), np.zeros((n // size, size, size))
    if values is None:
        for first, stop in pairwise((0, 32 * stored, 33 * stored, n)):
            slab = SymmetricBsrMatrix.slab_from_csr(A[first:stop], first, block_size=stored, check=False)
            slab.add_diagonal_blocks(first, blocks)
    else:
        A = A + 50 * scipy.sparse.eye_array(n)  # an image has all blocks on the diagonal
        image = SymmetricImageMatrix.of(SymmetricBsrMatrix.from_csr(A, block_size=stored), values)
        A, blocks = image.to_csr(), image.diagonal_blocks(size)

    dense = A.toarray()
    np.testing.assert_array_equal(blocks, np.stack([dense[k : k + size, k : k + size] for k in range(0, n, size)]))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("values", [np.float64, np.float32])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_blocks_that_are_stored_on_the_diagonal_are_copied(size, values, target):
    """Also those of rows without one, which are zero, and of slabs that begin anywhere."""
    rng, nodes = np.random.default_rng(size), 150
    pattern = scipy.sparse.random_array((nodes, nodes), density=0.03, rng=rng) + scipy.sparse.diags_array(
        (rng.random(nodes) < 0.8).astype(float)
    )
    full = scipy.sparse.kron(pattern, np.ones((size, size)), format="csr")
    full.data = rng.standard_normal(full.nnz)
    full = scipy.sparse.csr_array(full + full.T)
    expected = full.toarray().reshape(nodes, size, nodes, size)[np.arange(nodes), :, np.arange(nodes), :]
    blocks = target.put(np.zeros((nodes, size, size)))

    with target.running():
        for first, stop in ((0, 64), (64, nodes)):
            rows = full[first * size : stop * size]
            slab = SymmetricBsrMatrix.slab_from_csr(
                rows, first * size, block_size=size, values_dtype=values, check=False
            )
            find_kernel("symmetric_bsr", "stored_diagonal", target.device_kind)(
                target.put_matrix(slab), first * size, blocks[first:stop]
            )

    np.testing.assert_array_equal(target.get(blocks), expected.astype(values).astype(np.float64))
