"""A host store made of a caller's matrix streams from the caller's own arrays."""

import gc
import sys
import types
import weakref

import numpy as np
import pytest
import scipy.sparse

from penstock.spmv import BsrMatrix, CsrMatrix, DeviceError, InputError, format_named
from penstock.streaming import HostStore, Ring, StreamedMatrix, index_of
from penstock.streaming.stores import host_store
from penstock.streaming.stores.buffers import PAGE_NBYTES, aligned_buffer

PARTS = ("whole", "structure", "values")
KINDS = {
    "csr": {},
    "bsr": {"block_size": 3},
    "sliced_bsr": {"block_size": 3, "sorting_scope": 32},
    "symmetric_bsr": {"block_size": 3},
    "sell": {"chunk_height": 4, "sorting_scope": 4},
    "ell": {},
    "coo": {},
}
SUBDIVISIONS = 4


@pytest.fixture(params=["SciPy CSR", "SciPy BSR", *KINDS])
def given(request, beam):
    """What a caller has, and the resident matrix it stands for."""
    A = beam.matrix("csr").to_csr()
    if request.param.startswith("SciPy"):
        scipy_matrix = A if request.param == "SciPy CSR" else scipy.sparse.bsr_array(A.tobsr((3, 3)))
        format_name = request.param.split()[1].lower()
        return scipy_matrix, beam.matrix(format_name)
    matrix = format_named(request.param).from_csr(A, **KINDS[request.param])
    return matrix, matrix


@pytest.fixture(autouse=True)
def arrays_of_a_mebibyte_are_big(monkeypatch):
    """The real bound would take matrices of some 100 MB."""
    monkeypatch.setattr(host_store, "_LEAST_LENT_NBYTES", 1 << 20)


@pytest.fixture(params=["all copied", "lent", "lent in short regions"])
def lending(request, monkeypatch):
    """Arrays of these small matrices count as big, and locked regions are as short as the slabs."""
    if request.param != "all copied":
        monkeypatch.setattr(host_store, "_LEAST_LENT_NBYTES", PAGE_NBYTES)
    if request.param == "lent in short regions":
        monkeypatch.setattr(host_store, "_LOCKED_AT_ONCE_NBYTES", 3 * PAGE_NBYTES)
    return request.param


def spans(segments):
    return sorted((offset, offset + piece.nbytes) for offset, piece in segments)


def merged(ranges):
    found = []
    for start, stop in sorted(ranges):
        if found and start == found[-1][1]:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return found


def test_products_equal_those_of_the_resident_matrix(given, lending):
    A, resident = given
    store = HostStore.from_matrix(A, SUBDIVISIONS)
    budget = max(2 * max(piece.nbytes for piece in store.index.subdivisions), store.index.nbytes // 2)
    assert len(store.index.subdivisions) == SUBDIVISIONS
    x = np.random.default_rng(0).standard_normal(A.shape[1])
    expected = resident @ x

    with StreamedMatrix(store, min(budget, store.index.nbytes - 1), ring=Ring(slots=2)) as streamed:
        products = [streamed @ x for _ in range(3)]

    for product in products:
        if store.index.format_name in ("symmetric_bsr", "coo"):  # contributions to a row come in another order
            np.testing.assert_allclose(product, expected, rtol=0, atol=1e-13 * np.abs(expected).max())
        else:
            np.testing.assert_array_equal(product, expected)


@pytest.mark.parametrize("part", PARTS)
def test_segments_cover_the_arrays_and_nothing_else(given, lending, part):
    A, _ = given
    store = HostStore.from_matrix(A, SUBDIVISIONS)

    for number, subdivision in enumerate(store.index.subdivisions):
        start = subdivision.bytes_of(part).start
        fields = [
            (field.offset - start, field.offset - start + field.nbytes)
            for field in subdivision.fields
            if part in ("whole", field.part)
        ]
        assert merged(spans(store.segments(number, part))) == merged(fields)


def test_a_read_gives_the_arrays_of_the_slab(given, lending):
    A, resident = given
    store = HostStore.from_matrix(A, SUBDIVISIONS)
    subdivisions = store.index.subdivisions
    slabs = [resident.rows(subdivision.row_start, subdivision.row_stop) for subdivision in subdivisions]
    assert [subdivision.fields for subdivision in index_of(slabs).subdivisions] == [s.fields for s in subdivisions]

    for number, (subdivision, slab) in enumerate(zip(subdivisions, slabs, strict=True)):
        whole, structure, values = (aligned_buffer(subdivision.part_nbytes(part)) for part in PARTS)
        for buffer, part in ((whole, "whole"), (structure, "structure"), (values, "values")):
            store.read_into(number, buffer, part)
        of_structure = store.index.arrays(number, structure, "structure")
        for view in (store.index.view(number, whole), store.index.view(number, values, of_structure)):
            for name, array in slab.arrays().items():
                np.testing.assert_array_equal(view.arrays()[name], array)


def test_what_is_lent_lies_in_regions_to_be_locked_that_are_whole_pages_and_disjoint(given, lending):
    A, _ = given
    store = HostStore.from_matrix(A, SUBDIVISIONS)
    regions = sorted(store._regions)

    for (start, nbytes), (following, _) in zip(regions, [*regions[1:], (float("inf"), 0)], strict=True):
        assert start % PAGE_NBYTES == 0
        assert start + nbytes <= following
    for number in range(SUBDIVISIONS):
        for _, piece in store.segments(number):
            address = piece.ctypes.data
            assert any(start <= address and address + piece.nbytes <= start + nbytes for start, nbytes in regions)
    if lending == "lent in short regions":
        lengths = [nbytes for start, nbytes in regions]
        assert sum(nbytes <= 3 * PAGE_NBYTES for nbytes in lengths) > 10


def test_big_arrays_are_not_copied_and_small_ones_are():
    A = scipy.sparse.random_array((1500, 1500), density=0.1, rng=np.random.default_rng(0), format="csr")
    assert A.data.nbytes > 1 << 20 > A.indices.nbytes
    store = HostStore.from_matrix(A, 5)
    pieces = [piece for number in range(5) for _, piece in store.segments(number, "values")]

    copied = [piece.nbytes for piece in pieces if not np.shares_memory(piece, A.data)]
    assert len(copied) <= 2  # at the ends, which may share a page with other arrays
    assert all(nbytes < PAGE_NBYTES for nbytes in copied)
    assert sum(piece.nbytes for piece in pieces) == A.data.nbytes
    assert not any(
        np.shares_memory(piece, A.indices) for number in range(5) for _, piece in store.segments(number, "structure")
    )

    changed = A.copy()
    changed.data[:] = 2.0
    x = np.ones(1500)
    store.refill(CsrMatrix.from_csr(changed))
    with StreamedMatrix(store, store.index.nbytes * 2 // 3) as streamed:
        np.testing.assert_array_equal(streamed @ x, 2.0 * np.diff(A.indptr))


def beside_others(A, before=24, after=5000):
    """The matrix with its values inside a longer array, and the bytes that come before and after them."""
    memory = np.zeros(A.data.nbytes + before + after, dtype=np.uint8)
    stop = before + A.data.nbytes
    values = memory[before:stop].view(A.data.dtype)
    values[:] = A.data
    A.data = values
    return A, memory[:before], memory[stop:]


def test_no_page_is_locked_that_another_array_shares():
    A = scipy.sparse.random_array((1500, 1500), density=0.1, rng=np.random.default_rng(0), format="csr")
    A, before, after = beside_others(A)
    store = HostStore.from_matrix(A, 5)

    for start, nbytes in store._regions:
        for array in (before, after):
            first, last = array.ctypes.data // PAGE_NBYTES, (array.ctypes.data + array.nbytes - 1) // PAGE_NBYTES
            assert start + nbytes <= first * PAGE_NBYTES or start >= (last + 1) * PAGE_NBYTES
    store.refill(CsrMatrix.from_csr(3.0 * A))  # the ends too, which are copies
    with StreamedMatrix(store, store.index.nbytes * 2 // 3) as streamed:
        np.testing.assert_allclose(streamed @ np.ones(1500), A @ np.ones(1500), rtol=1e-13)


@pytest.mark.gpu
def test_arrays_beside_those_that_are_lent_can_be_copied_to_and_fro():
    cupy = pytest.importorskip("cupy")
    A = scipy.sparse.random_array((1500, 1500), density=0.1, rng=np.random.default_rng(0), format="csr")
    A, _, after = beside_others(A)
    with StreamedMatrix(HostStore.from_matrix(A, 5), A.data.nbytes, device="cuda") as streamed:
        cupy.testing.assert_allclose(streamed @ cupy.ones(1500), A @ np.ones(1500), rtol=1e-12)
        cupy.full(after.size, 7, dtype=np.uint8).get(out=after)

    assert (after == 7).all()


def test_the_store_keeps_the_arrays_alive_and_gives_them_free():
    matrix = BsrMatrix.from_csr(scipy.sparse.eye_array(200_000, format="csr"), block_size=2)
    owner, before = matrix.values, matrix.values.copy()
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    alive = weakref.ref(owner)
    offsets = weakref.ref(matrix.row_offsets)  # not lent, but in what will be page-locked
    del owner
    store = HostStore.from_matrix(matrix, 2)
    del matrix
    gc.collect()

    assert alive() is not None
    assert offsets() is not None
    buffer = aligned_buffer(store.index.subdivisions[0].part_nbytes("values"))
    store.read_into(0, buffer, "values")
    np.testing.assert_array_equal(buffer.view(np.float64)[: before.size // 2], before.ravel()[: before.size // 2])
    del store
    gc.collect()
    assert alive() is None


def test_what_cannot_be_cut_into_that_many_slabs_is_refused(beam):
    with pytest.raises(InputError, match="cannot cut 140 pieces of 3 rows into 141 slabs"):
        HostStore.from_matrix(beam.matrix("bsr"), 141)


@pytest.mark.parametrize("make", [lambda A: A.tocsc(), lambda A: A.toarray()], ids=["CSC", "dense"])
def test_what_is_no_matrix_of_rows_is_refused(beam, make):
    with pytest.raises(InputError, match="must be"):
        HostStore.from_matrix(make(beam.matrix("csr").to_csr()), 2)


class FakeRuntime:
    """Page-locking as CUDA does it: a range that touches a locked one is refused."""

    class CUDARuntimeError(Exception):
        status = 712

    memoryTypeHost = 1

    def __init__(self):
        self.locked = {}

    def hostRegister(self, address, nbytes, flags):
        if any(address < start + length and start < address + nbytes for start, length in self.locked.items()):
            raise self.CUDARuntimeError
        self.locked[address] = nbytes

    def hostUnregister(self, address):
        del self.locked[address]

    def pointerGetAttributes(self, address):
        found = any(start <= address < start + length for start, length in self.locked.items())
        return types.SimpleNamespace(type=int(found))


@pytest.fixture
def runtime(monkeypatch):
    fake = FakeRuntime()
    cuda = types.SimpleNamespace(runtime=fake)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return fake


class TestPageLocking:
    matrix = BsrMatrix.from_csr(scipy.sparse.eye_array(200_000, format="csr"), block_size=2)

    def test_two_cuts_of_one_matrix_share_its_locks_until_the_last_is_closed(self, runtime):
        one, two = HostStore.from_matrix(self.matrix, 2), HostStore.from_matrix(self.matrix, 3)
        one.page_lock()
        two.page_lock()

        one.close()
        assert two.page_locked
        assert any(length > self.matrix.values.nbytes - 2 * PAGE_NBYTES for length in runtime.locked.values())
        two.close()
        assert runtime.locked == {}

    def test_memory_that_the_caller_has_locked_whole_is_taken_and_left_locked(self, runtime):
        store = HostStore.from_matrix(self.matrix, 2)
        values = self.matrix.values
        first, stop = values.ctypes.data // PAGE_NBYTES, -(-(values.ctypes.data + values.nbytes) // PAGE_NBYTES)
        theirs = {first * PAGE_NBYTES: (stop - first) * PAGE_NBYTES}
        runtime.locked.update(theirs)

        store.page_lock()
        assert store.page_locked
        store.close()
        assert runtime.locked == theirs

    def test_memory_that_is_locked_in_part_is_refused_and_nothing_stays_locked(self, runtime):
        store = HostStore.from_matrix(self.matrix, 2)
        address, _ = store._regions[0]
        runtime.locked[address] = 4096

        with pytest.raises(DeviceError, match="refused to page-lock"):
            store.page_lock()
        assert not store.page_locked
        assert runtime.locked == {address: 4096}


def test_rows_to_cut_at_may_be_given(beam):
    A = beam.matrix("bsr")
    store = HostStore.from_matrix(A, [0, 30, 33, A.shape[0]])
    assert [part.row_start for part in store.index.subdivisions] == [0, 30, 33]
    x = np.random.default_rng(0).standard_normal(A.shape[1])
    with StreamedMatrix(store, store.index.nbytes) as streamed:
        np.testing.assert_array_equal(streamed @ x, A @ x)


@pytest.mark.parametrize("bounds", [[], [0], [0, 30], [3, 30, 99_999], [0, 33, 30], [0, 31]])
def test_rows_at_which_a_matrix_cannot_be_cut_are_refused(beam, bounds):
    A = beam.matrix("bsr")
    given = [*bounds, A.shape[0]] if bounds in ([0, 33, 30], [0, 31]) else bounds
    with pytest.raises(InputError, match="rows to cut at must ascend from 0"):
        HostStore.from_matrix(A, given)
