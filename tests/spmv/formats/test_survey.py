"""One pass over the entries of a CSR matrix, against what a slow look says."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS

from penstock.spmv.formats.survey import Defect, Survey, survey


def symmetric(n=300, density=0.05, seed=0):
    A = scipy.sparse.random_array((n, n), density=density, rng=np.random.default_rng(seed))
    A = scipy.sparse.csr_array(A + A.T + n * scipy.sparse.eye_array(n))
    A.sort_indices()
    return A


EVERYWHERE = pytest.mark.parametrize("target", TARGETS)


def surveyed(target, A, offsets=np.int64, first_row=0):
    arrays = map(target.put, (A.indptr.astype(offsets), A.indices.astype(np.int32), A.data))
    device = SimpleNamespace(kind=target.device_kind, xp=target.xp)
    with target.running():
        return survey(device, A.shape[1], *arrays, first_row)


@EVERYWHERE
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("offsets", [np.int64, np.int32])
def test_a_sound_symmetric_matrix(target, dtype, offsets):
    A = symmetric().astype(dtype)
    A.data[A.indptr[1:-1:7]] *= -1
    A = scipy.sparse.csr_array(A + A.T)

    seen = surveyed(target, A, offsets)

    lengths, positive = np.diff(A.indptr), int((A.diagonal() > 0).sum())
    assert seen == Survey(Defect.NONE, int(lengths.max()), int((lengths**2).sum()), positive, 0)
    assert 0 < positive < A.shape[0] or (A.diagonal() > 0).all()


@EVERYWHERE
@pytest.mark.parametrize("change", ["value", "last bit", "alone", "exchanged"])
def test_entries_that_differ_from_their_mirror_images(target, change):
    A = symmetric()
    row, place = 40, A.indptr[40]
    assert A.indices[place] != row
    if change == "value":
        A.data[place] += 1.0
    elif change == "last bit":
        A.data[place] = np.nextafter(A.data[place], 9.0)
    elif change == "alone":
        A = A.tolil()
        A[299, 0] = 1e-300
        A[0, 299] = 0.0
        A = A.tocsr()
        A.sort_indices()
    else:  # the values of two entries of a row: all sums of values are the same
        A.data[[place, place + 1]] = A.data[[place + 1, place]]

    assert surveyed(target, A).skew != 0


@EVERYWHERE
def test_zeros_of_either_sign_are_equal(target):
    A = symmetric()
    A.data[(A.tocoo().row == 3) & (A.indices > 3)] = -0.0
    A.data[(A.tocoo().col == 3) & (A.tocoo().row > 3)] = 0.0
    A.data[(A.tocoo().row == 5) & (A.indices == 5)] = -0.0

    seen = surveyed(target, A)

    assert seen.skew == 0
    assert seen.positive == A.shape[0] - 1


@EVERYWHERE
def test_defects(target):
    for dtype in (np.float64, np.float32):
        for value in (np.nan, np.inf, -np.inf):
            A = symmetric().astype(dtype)
            A.data[17] = value
            assert surveyed(target, A).defects == Defect.VALUES
    for column, kind in ((-1, Defect.RANGE | Defect.ORDER), (300, Defect.RANGE)):
        A = symmetric()
        A.indices[A.indptr[9] - 1] = column
        assert surveyed(target, A).defects == kind
    A = symmetric()
    first = A.indptr[20]
    A.indices[[first, first + 1]] = A.indices[[first + 1, first]]
    assert surveyed(target, A).defects == Defect.ORDER
    A = symmetric()
    A.indices[first + 1] = A.indices[first]  # twice
    assert surveyed(target, A).defects == Defect.ORDER
    for offset in (-5, 10**9):
        A = symmetric()
        A.indptr = A.indptr.copy()
        A.indptr[100] = offset
        assert Defect.OFFSETS in surveyed(target, A).defects


@EVERYWHERE
def test_surveys_of_row_slabs_add_up(target):
    A = symmetric(3000, 0.002, seed=1)
    A.data[5] = np.nextafter(A.data[5], 9.0)
    slabs = [(0, 1), (1, 1100), (1100, 3000)]

    parts = [surveyed(target, A[start:stop], first_row=start) for start, stop in slabs]

    total = parts[0] + parts[1] + parts[2]
    assert total == surveyed(target, A)
    assert total.skew


@EVERYWHERE
def test_no_rows(target):
    assert surveyed(target, scipy.sparse.csr_array((0, 7))) == Survey()
