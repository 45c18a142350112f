"""Rows that kernels complete from the upper half are those of the whole matrix, wherever it is cut."""

import itertools

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS, converting

from penstock.spmv import SymmetricBsrMatrix
from penstock.spmv.formats.symmetric_image import SymmetricImageMatrix
from penstock.spmv.products.completion import Completion

pytestmark = pytest.mark.usefixtures("one_thread")

#: Block rows; the last chunk of 32 is not full.
ROWS = 150


def awkward_matrix(size, seed=3):
    """Hubs, rows of many and of no couplings, and couplings over any distance; row 140 has many blocks left of the diagonal."""
    rng = np.random.default_rng(seed)
    rows = [*rng.integers(0, ROWS, 400), *[7] * 60, *range(40, 60), *[140] * 100]
    columns = [*rng.integers(0, ROWS, 400), *rng.choice(ROWS, 60, replace=False), *range(60, 80)]
    columns += rng.choice(ROWS, 100, replace=False).tolist()
    couplings = scipy.sparse.coo_array((np.ones(len(rows)), (rows, columns)), shape=(ROWS, ROWS)).tobsr((1, 1))
    blocks = scipy.sparse.kron(couplings, np.ones((size, size)), format="csr")
    blocks.data = rng.uniform(-1, 1, blocks.nnz)
    blocks.sum_duplicates()
    blocks = (blocks + blocks.T + scipy.sparse.eye_array(ROWS * size) * 200).tocsr()
    empty = np.setdiff1d(np.arange(ROWS * size), np.arange(size * 100, size * 105))
    keep = scipy.sparse.diags_array(np.isin(np.arange(ROWS * size), empty).astype(float))
    return (keep @ blocks @ keep + scipy.sparse.eye_array(ROWS * size)).tocsr()


def completed(target, half, size, cuts, enough=0):
    """All rows, visited one after another, as one SciPy matrix, and where each visit began."""
    found, starts, offsets, at = [], [], [np.zeros(1, dtype=np.int64)], 0

    def visit(rows):
        nonlocal at
        starts.append(rows.start)
        columns, blocks = target.get(rows.columns), target.get(rows.blocks)
        of_rows = target.get(rows.offsets)
        assert rows.start == at
        at = rows.stop
        for first, stop in itertools.pairwise(of_rows):
            assert (np.diff(columns[first:stop]) > 0).all()
        found.append((columns, blocks))
        offsets.append(offsets[-1][-1] + of_rows[1:])

    completion = Completion(size, visit, enough)
    for start, stop in itertools.pairwise(cuts):
        completion.add(start * size, half.rows(start * size, stop * size))
    columns, blocks = (np.concatenate(parts) for parts in zip(*found, strict=True))
    arrays = (blocks, columns, np.concatenate(offsets))
    return scipy.sparse.bsr_array(arrays, shape=(ROWS * size, ROWS * size)).tocsr(), starts


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("cuts", "enough"), [((0, 150), 0), ((0, 32, 96, 150), 0), ((0, 32, 64, 96, 128, 150), 10_000)]
)
def test_rows_are_those_of_the_whole_matrix(target, size, cuts, enough):
    A = awkward_matrix(size)
    half = target.put_matrix(SymmetricBsrMatrix.from_csr(A, block_size=size))

    with converting(target):
        found, starts = completed(target, half, size, cuts, enough * size**2)

    assert abs(found - A).max() == 0
    assert 1 < len(starts) < len(cuts) - 1 if enough else len(starts) == len(cuts) - 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_rows_of_an_image_are_those_that_it_multiplies_by(target, dtype):
    image = SymmetricImageMatrix.of(SymmetricBsrMatrix.from_csr(awkward_matrix(3), block_size=3), dtype)
    expected = image.to_csr()

    with converting(target):
        found, _ = completed(target, target.put_matrix(image), 3, (0, 64, 150))

    assert abs(found - expected).max() == 0


@pytest.mark.parametrize("target", TARGETS[1:])
def test_kept_slabs_may_be_overwritten(target):
    """As the slots are through which a matrix is streamed."""
    A = awkward_matrix(3)
    half = target.put_matrix(SymmetricBsrMatrix.from_csr(A, block_size=3))
    found = []

    with converting(target):
        completion = Completion(3, found.append, enough=1 << 30)
        for start, stop in ((0, 64), (64, 150)):
            slab = half.rows(3 * start, 3 * stop)
            arrays = {name: array.copy() for name, array in slab.arrays().items()}
            again = slab.from_arrays(slab.shape, slab.dtype, arrays, slab.parameters())
            completion.add(3 * start, again)
            if not found:
                again.values[...] = np.nan
                again.column_indices[...] = -1

    [rows] = found
    expected = A.tobsr((3, 3))
    assert np.array_equal(target.get(rows.columns), expected.indices)
    assert np.array_equal(target.get(rows.blocks), expected.data)
