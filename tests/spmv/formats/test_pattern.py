"""Whether two CSR matrices store the same entries."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import TARGETS

from penstock.fem import Cantilever
from penstock.spmv import CsrMatrix, InputError
from penstock.spmv.formats import pattern
from penstock.spmv.formats.pattern import Pattern


@pytest.fixture
def A():
    return Cantilever(nodes=(9, 5, 5), dof=3).matrix().to_csr()


def _csr(A):
    return CsrMatrix.from_csr(A, check=False)


def test_the_same_entries_with_other_values_are_the_same_pattern(A):
    Pattern.of(_csr(A)).check(_csr(2.0 * A))
    empty = scipy.sparse.csr_array((5, 5))
    Pattern.of(_csr(empty)).check(_csr(empty.copy()))


def test_offsets_of_64_bits_are_the_same_pattern(A):
    of = _csr(A)
    wide = CsrMatrix(of.shape, of.dtype, of.row_offsets.astype(np.int64), of.column_indices, of.values)
    Pattern.of(of).check(wide)


@pytest.mark.parametrize("row", [0, 300, -1])
def test_one_moved_entry_is_found(A, row):
    row %= A.shape[0]
    B = A.copy()
    stop = B.indptr[row + 1] - 1
    last, other = B.indices[stop], B.indices[B.indptr[row] : stop]
    free = next(column for column in range(A.shape[1]) if column not in other and column != last)
    B.indices[stop] = free
    with pytest.raises(
        InputError, match=r"entries like the prepared one, but at other places: the patterns differ first in rows"
    ) as caught:
        Pattern.of(_csr(A)).check(_csr(B))
    first, last = (int(word.strip(";")) for word in str(caught.value).split("in rows ")[1].split()[:3:2])
    assert first <= row <= last
    assert last - first < pattern._PIECE


def test_a_missing_entry_is_found_with_its_row(A):
    row = 200
    keep = np.ones(A.nnz, dtype=bool)
    keep[A.indptr[row]] = False
    B = scipy.sparse.csr_array(
        (A.data[keep], A.indices[keep], A.indptr - (np.arange(A.shape[0] + 1) > row)), shape=A.shape
    )
    with pytest.raises(InputError, match=f"stores {A.nnz - 1} entries, the prepared one {A.nnz}: "):
        Pattern.of(_csr(A)).check(_csr(B))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("count", [0, 1, 4096, 10_000])
def test_checksums_are_the_same_everywhere(target, dtype, count):
    numbers = np.random.default_rng(count).integers(0, 1 << 31, count).astype(dtype)
    with target.running():
        device = SimpleNamespace(kind=target.device_kind, xp=target.xp)
        found = target.get(pattern.checksums(device, target.put(numbers)))
    bits = [(int(number) + (place + 1) * 0x9E3779B97F4A7C15) % 2**64 for place, number in enumerate(numbers)]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = [(one ^ (one >> shift)) * factor % 2**64 for one in bits]
    expected = [sum(one ^ (one >> 31) for one in bits[k : k + 4096]) % 2**64 for k in range(0, count, 4096)]
    assert [int(one) for one in found] == expected


def test_another_shape_is_found(A):
    with pytest.raises(InputError, match="has shape"):
        Pattern.of(_csr(A)).check(_csr(A[:, :-1]))
