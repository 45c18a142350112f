"""The upper half that is made of pieces, with a stand-in for a GPU, is that of the whole matrix."""

import contextlib

import numpy as np
import pytest

from penstock.fem import Cantilever, LognormalMaterial
from penstock.spmv import CPU, CsrMatrix, SymmetricBsrMatrix
from penstock.spmv.formats import through_device, upper_half
from penstock.spmv.formats.convert import _fill_blocks
from penstock.spmv.formats.statistics import count_blocks
from penstock.spmv.formats.through_device import Rows
from penstock.spmv.formats.upper_half import UpperHalf


class HostAsGpu:
    """Does on the host what a GPU does."""

    kind, xp = "cpu", np

    def current(self):
        return contextlib.nullcontext()

    def to_host(self, array):
        return array


@pytest.fixture
def device(monkeypatch):
    def fill(block_rows, kept, height, size, source, permutation, offsets, *arrays):
        _fill_blocks(block_rows, size, kept, height, *source, permutation, offsets, *arrays)

    def fetch(pairs):
        for source, target in pairs:
            target[:] = source

    monkeypatch.setattr(upper_half, "launch_fill_blocks", fill)
    monkeypatch.setattr(through_device, "copy_all_from_gpu", fetch)
    return HostAsGpu()


def half_of(A, size, device, blocks, pieces):
    """The arrays of the upper half, made of at most ``pieces`` pieces."""
    rows = A.shape[0]
    with UpperHalf(device, size, blocks, np.float64) as half:
        step = -(-rows // pieces // half.granularity) * half.granularity
        for start in range(0, rows, step):
            piece = A[start : start + step]
            arrays = piece.indptr.astype(np.int64), piece.indices.astype(np.int32), piece.data
            shape = piece.shape
            counts = count_blocks(CPU, shape, arrays[0], arrays[1], size, upper=start // size)
            half.add(Rows(start, *arrays), counts)
        return half.arrays(rows)


@pytest.mark.parametrize("pieces", [1, 3, 40])
@pytest.mark.parametrize("dof", [3, 6])
def test_it_is_that_of_the_whole_matrix(device, dof, pieces):
    A = Cantilever(nodes=(17, 6, 5), dof=dof, material=LognormalMaterial(0.5, 1)).matrix("csr").to_csr()
    expected = SymmetricBsrMatrix.from_csr(CsrMatrix.from_csr(A), block_size=dof)

    offsets, columns, values = half_of(A, dof, device, expected.column_indices.size, pieces)

    assert np.array_equal(offsets, expected.chunk_offsets)
    assert np.array_equal(columns, expected.column_indices)
    assert np.array_equal(values, expected.values)


def test_it_is_given_up_where_it_is_larger_than_expected(device):
    A = Cantilever(nodes=(17, 6, 5), dof=3).matrix("csr").to_csr()

    for blocks in (0, 100, 2000):
        assert half_of(A, 3, device, blocks, 8) is None
