"""FileStore, HostStore and the wrappers pass the contract that penstock ships for stores of its users."""

import numpy as np
import pytest

from penstock.spmv import BsrMatrix, CsrMatrix
from penstock.streaming import FileStore, HostPlaneStore, HostStore
from penstock.streaming.stores import host_store
from penstock.streaming.stores.buffers import PAGE_NBYTES, aligned_buffer
from penstock.streaming.stores.packing import index_of, pack
from penstock.streaming.testing import CountingStore, FaultyStore, SlowStore, StoreContract, StoreWrapper

BOUNDS = [0, 12, 24, 60, 96]
MATRICES = {
    "CSR": CsrMatrix.from_csr,
    "CSR in float32": lambda A: CsrMatrix.from_csr(A, values_dtype=np.float32),
    "BSR": lambda A: BsrMatrix.from_csr(A, block_size=4),
}


class Contract(StoreContract):
    """The contract for a matrix with rows of very different lengths."""

    @pytest.fixture(params=MATRICES.values(), ids=MATRICES)
    def matrix(self, request, irregular):
        return request.param(irregular(96, 60))

    @pytest.fixture
    def slabs(self, matrix, cut):
        return list(cut(matrix, BOUNDS))


class TestHostStore(Contract):
    @pytest.fixture
    def open_store(self, slabs):
        return lambda: HostStore.create(slabs)


class TestHostStoreOfArrays(Contract):
    """A store that shares the arrays of the caller."""

    @pytest.fixture
    def open_store(self, matrix, monkeypatch):
        monkeypatch.setattr(host_store, "_LEAST_LENT_NBYTES", PAGE_NBYTES)
        return lambda: HostStore.from_matrix(matrix, BOUNDS)


class TestHostPlaneStore(Contract):
    @pytest.fixture
    def open_store(self, slabs):
        if slabs[0].values_dtype != np.float64:
            pytest.skip("has no planes")
        return lambda: HostPlaneStore.create(slabs)


class TestFileStore(Contract):
    @pytest.fixture(params=[None, False], ids=["default", "through the page cache"])
    def open_store(self, request, slabs, tmp_path):
        FileStore.create(tmp_path / "store", slabs).close()
        return lambda: FileStore(tmp_path / "store", direct=request.param)


class TestHostStoreOfAFile(Contract):
    """A store in host memory with the checksums of a file."""

    @pytest.fixture
    def open_store(self, slabs, tmp_path):
        with FileStore.create(tmp_path / "store", slabs) as source:
            copy = HostStore.from_store(source)
        return lambda: copy


WRAPPERS = {
    "plain": StoreWrapper,
    "slow": SlowStore,
    "faulty": lambda store: FaultyStore(store, lambda read, number: None),
    "counting": CountingStore,
}


class TestWrappers(Contract):
    @pytest.fixture(params=WRAPPERS.values(), ids=WRAPPERS)
    def open_store(self, request, slabs):
        return lambda: request.param(HostStore.create(slabs))


class Broken:
    """A store with one fault, which the contract must find."""

    def __init__(self, slabs, fault):
        self.index, self.fault, self.reads = index_of(slabs), fault, 0
        self.pieces = [aligned_buffer(subdivision.nbytes) for subdivision in self.index.subdivisions]
        for slab, subdivision, piece in zip(slabs, self.index.subdivisions, self.pieces, strict=True):
            pack(slab, subdivision, piece)

    def read_into(self, number, buffer, part="whole"):
        self.reads += 1
        where = self.index.subdivisions[number].bytes_of("whole" if self.fault == "ignores parts" else part)
        source = self.pieces[number][where][: buffer.size]
        buffer[: source.size] = source
        if self.fault == "writes too much":
            buffer[source.size :] = 0
        if self.fault == "changes" and self.reads > len(self.pieces):
            buffer[0] ^= 1


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("ignores parts", "test_every_part_equals_the_packed_slab"),
        ("writes too much", "test_a_read_fills_only_its_part_of_a_page_aligned_buffer"),
        ("changes", "test_reads_can_be_repeated_in_any_order"),
    ],
)
def test_the_contract_finds_a_fault(fault, test, irregular, cut):
    slabs = list(cut(CsrMatrix.from_csr(irregular(96, 60)), BOUNDS))
    arguments = {"slabs": slabs} if "slab" in test else {}

    getattr(StoreContract(), test)(lambda: Broken(slabs, None), **arguments)
    with pytest.raises(AssertionError):
        getattr(StoreContract(), test)(lambda: Broken(slabs, fault), **arguments)
