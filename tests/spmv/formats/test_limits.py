"""Indices of 64 bits are looked at and converted in pieces, as they would be at once."""

import numpy as np
import pytest
import scipy.sparse

import penstock
from penstock.spmv import CsrMatrix, InputError
from penstock.spmv.formats import limits
from penstock.spmv.formats.limits import as_type, ascend, longest_row, narrowed, within

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("piece", [7, 1000, 1 << 21])
@pytest.mark.parametrize("size", [0, 1, 7, 1000, 1001])
def test_pieces_make_no_difference(piece, size, monkeypatch):
    monkeypatch.setattr(limits, "_PIECE", piece)
    indices = RNG.integers(0, 50, size)

    assert np.array_equal(narrowed(indices), indices)
    assert narrowed(indices).dtype == np.int32
    assert within(indices, 50)
    if size:
        assert not within(indices, int(indices.max()))
        indices[size // 2] = -1
        assert not within(indices, 50)


@pytest.mark.parametrize("piece", [7, 1000])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 1000, 1001])
def test_pieces_of_offsets_make_no_difference(piece, rows, monkeypatch):
    monkeypatch.setattr(limits, "_PIECE", piece)
    lengths = RNG.integers(0, 9, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    wide = as_type(offsets, np.int64)

    assert np.array_equal(wide, offsets)
    assert wide.dtype == np.int64
    assert as_type(wide, np.int64) is wide
    assert longest_row(offsets) == lengths.max(initial=0)
    assert ascend(offsets)
    for row in {rows // 2, max(0, rows - 1), min(6, rows - 1)} if rows else ():
        lengths[row] = 40
        descending = offsets.copy()
        descending[row] = offsets[row + 1] + 1
        assert longest_row(np.concatenate([[0], np.cumsum(lengths)])) == 40
        assert not ascend(descending)


def test_narrow_indices_are_shared():
    indices = RNG.integers(0, 50, 30).astype(np.int32)

    assert np.shares_memory(narrowed(indices), indices)


def test_a_matrix_with_wide_indices_is_solved_and_a_damaged_one_is_refused(monkeypatch):
    monkeypatch.setattr(limits, "_PIECE", 16)
    A = scipy.sparse.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(60, 60)).tocsr()
    wide = scipy.sparse.csr_array((A.data, A.indices.astype(np.int64), A.indptr.astype(np.int64)), shape=A.shape)
    b = RNG.normal(size=60)

    assert wide.indices.dtype == np.int64
    assert np.array_equal(CsrMatrix.unchecked(wide).column_indices, A.indices)
    assert np.array_equal(penstock.solve(wide, b, device="cpu").x, penstock.solve(A, b, device="cpu").x)
    wide.indices[70] = 2**40
    with pytest.raises(InputError, match="column index"):
        penstock.solve(wide, b, device="cpu")
