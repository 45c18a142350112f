"""Matrices of SciPy as callers have them become CSR where they are used."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import gpu_count

import penstock
from penstock.fem import Cantilever
from penstock.spmv import CPU, Device, InputError
from penstock.spmv.unchecked import UncheckedEntries

DEVICES = [
    CPU,
    pytest.param(
        Device("cuda"), marks=[pytest.mark.gpu, pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")]
    ),
]
BEAM = Cantilever(nodes=(9, 4, 3), dof=3)


def blocks(size):
    A = scipy.sparse.bsr_array(BEAM.matrix("csr").to_csr().tobsr((3, 3)))
    return A if size == 3 else scipy.sparse.bsr_array(scipy.sparse.kron(A.tocsr(), np.ones(size)).tobsr(size))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [3, (1, 2), (2, 1), (2, 3)])
@pytest.mark.parametrize("index", [np.int32, np.int64, np.uint64])
def test_blocks_become_the_rows_of_scipy(device, size, index):
    A = blocks(size)
    A.indptr, A.indices = A.indptr.astype(index), A.indices.astype(index)

    found = UncheckedEntries.of(A).to_device(device).to_csr()

    expected = A.tocsr()
    assert np.array_equal(found.indptr, expected.indptr)
    assert np.array_equal(found.indices, expected.indices)
    assert np.array_equal(found.data, expected.data)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", [np.int16, np.int32, np.int64])
def test_indices_of_any_width_are_those_of_32_bits(device, index):
    A = scipy.sparse.csr_array(BEAM.matrix("csr").to_csr())
    A.indptr, A.indices = A.indptr.astype(np.int64), A.indices.astype(index)

    found = UncheckedEntries.of(A).to_device(device)

    assert found.column_indices.dtype == np.int32
    assert (found.to_csr() != A).nnz == 0


def test_arrays_of_the_right_types_are_shared():
    A = scipy.sparse.csr_array(BEAM.matrix("csr").to_csr())

    found = UncheckedEntries.of(A).to_device(CPU)

    assert np.shares_memory(found.values, A.data)
    assert np.shares_memory(found.column_indices, A.indices)


def test_a_wide_index_out_of_range_is_refused():
    A = scipy.sparse.csr_array(BEAM.matrix("csr").to_csr())
    A.indices = A.indices.astype(np.int64)
    A.indices[5] += 1 << 32  # the lower half is in range

    with pytest.raises(InputError, match="column index"):
        penstock.solve(A, np.ones(A.shape[0]))


def test_blocks_with_an_index_out_of_range_are_refused():
    A = blocks(3)
    A.indices[3] = 10_000

    with pytest.raises(InputError, match="column index of a block is 10000"):
        penstock.solve(A, np.ones(A.shape[0]))


def test_blocks_of_which_one_is_not_finite_are_refused_by_row_and_column():
    A = blocks(3)
    A.data[7, 1, 2] = np.nan

    with pytest.raises(InputError, match="holds nan in row"):
        penstock.solve(A, np.ones(A.shape[0]))


def test_blocks_whose_rows_are_not_sorted_are_solved():
    A, b = blocks(3), BEAM.load()
    row = slice(A.indptr[4], A.indptr[5])
    A.indices[row], A.data[row] = A.indices[row][::-1].copy(), A.data[row][::-1].copy()
    A.has_sorted_indices = False

    result = penstock.solve(A, b)

    assert np.allclose(result.x, penstock.solve(blocks(3), b).x, rtol=1e-10, atol=1e-12)


def test_diagonals_that_lie_nowhere_are_refused():
    A = scipy.sparse.dia_array(scipy.sparse.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(144, 144)))
    A.offsets = A.offsets.astype(np.int64) + 2**32  # SciPy would write there

    with pytest.raises(InputError, match="a diagonal 4294967297 places from the main one"):
        penstock.solve(A, np.ones(144))


def test_blocks_without_three_dimensions_are_refused():
    A = blocks(3)
    A.data = A.data.reshape(-1)

    with pytest.raises(InputError, match="those of blocks have 3 dimensions"):
        penstock.solve(A, np.ones(A.shape[0]))


def test_arrays_with_gaps_are_taken():
    A, b = scipy.sparse.csr_array(BEAM.matrix("csr").to_csr()), BEAM.load()
    spread = np.zeros(2 * A.indices.size, dtype=np.int32)
    spread[::2] = A.indices
    A.indices = spread[::2]

    assert penstock.solve(A, b).converged
