"""Long runs, and runs with failures, take no more of the system than short ones."""

import gc
import os
import threading

import numpy as np
import pytest
import scipy.sparse

from penstock.spmv import StoreError
from penstock.streaming import FileStore, HostStore, Ring, StreamedMatrix
from penstock.streaming.stores.buffers import aligned_buffer
from penstock.streaming.testing import FaultyStore

SWEEPS = 1000
# What the interpreter's own allocator and counters may add. The matrix of 1 MB leaked once in 10 sweeps would add 100 MB.
SPARE_RSS_NBYTES = 8 << 20


def counts():
    """Return threads, open files and resident bytes of this process."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not show a process under /proc")
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return threading.active_count(), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def matrix():
    """Of 1 MB, so that a leak shows in the resident set."""
    return scipy.sparse.random_array((3000, 3000), density=0.01, rng=np.random.default_rng(0), format="csr")


@pytest.fixture(params=["HostStore", "FileStore"])
def store(request, matrix, cut, tmp_path):
    slabs = cut(matrix, range(0, 3001, 300))
    built = HostStore.create(slabs) if request.param == "HostStore" else FileStore.create(tmp_path / "store", slabs)
    with built as store:
        yield store


def unchanged(before, after):
    assert after[:2] == before[:2]
    assert after[2] - before[2] < SPARE_RSS_NBYTES


@pytest.mark.parametrize("overlap", [True, False])
def test_a_thousand_sweeps_change_nothing(store, overlap):
    x = np.ones(store.index.shape[1])
    with StreamedMatrix(store, store.index.nbytes // 2, ring=Ring(overlap=overlap)) as A:
        out = A @ x
        before = counts()
        for _ in range(SWEEPS):
            A.apply(x, out)

        unchanged(before, counts())


def test_opening_and_closing_a_hundred_times_changes_nothing(store):
    x = np.ones(store.index.shape[1])
    before = None
    for _ in range(101):
        with StreamedMatrix(store, store.index.nbytes // 2) as A:
            A @ x
        before = before or counts()

    unchanged(before, counts())


def test_a_hundred_failed_sweeps_change_nothing(store):
    def fail(read, number):
        if read % 4 == 3:
            raise StoreError("the disk is gone")

    failing = FaultyStore(store, fail)
    x, failures, before = np.ones(store.index.shape[1]), 0, None
    with StreamedMatrix(failing, 2 * max(piece.nbytes for piece in store.index.subdivisions), ring=Ring(slots=2)) as A:
        for _ in range(101):
            try:
                A @ x
            except StoreError:
                failures += 1
            before = before or counts()

        unchanged(before, counts())
    assert failures == 101


def test_building_and_opening_file_stores_leaves_no_file_open(matrix, cut, tmp_path):
    before = None
    for _ in range(20):
        with FileStore.create(tmp_path / "store", cut(matrix[:300], [0, 100, 300]), overwrite=True) as store:
            store.read_into(0, aligned_buffer(store.index.subdivisions[0].nbytes))
        before = before or counts()

    unchanged(before, counts())
