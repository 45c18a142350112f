"""Stores around a store give its bytes, and what they do besides."""

import time

import numpy as np
import pytest

from penstock.spmv import StoreError
from penstock.streaming import HostStore, Store
from penstock.streaming.stores.buffers import aligned_buffer
from penstock.streaming.testing import CountingStore, FaultyStore, SlowStore, StoreWrapper

PARTS = ("whole", "structure", "values")


@pytest.fixture(scope="module")
def store(beam):
    return HostStore.create(beam.subdivisions(4), beam.shape)


def read(store, number, part):
    buffer = aligned_buffer(store.index.subdivisions[number].part_nbytes(part))
    store.read_into(number, buffer, part)
    return buffer


WRAPPERS = {
    "plain": StoreWrapper,
    "slow": SlowStore,
    "faulty": lambda store: FaultyStore(store, lambda read, number: None),
    "counting": CountingStore,
    "all": lambda store: CountingStore(FaultyStore(SlowStore(store), lambda read, number: None)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("part", PARTS)
def test_each_is_a_store_with_the_same_index_and_bytes(store, wrap, part):
    wrapped = wrap(store)

    assert isinstance(wrapped, Store)
    assert wrapped.index is store.index
    for number in range(4):
        np.testing.assert_array_equal(read(wrapped, number, part), read(store, number, part))


def test_a_counting_store_counts_reads_and_the_bytes_of_their_parts(store):
    counting = CountingStore(store)
    for number, part in ((2, "whole"), (0, "values"), (2, "structure")):
        read(counting, number, part)

    pieces = store.index.subdivisions
    assert counting.numbers == [2, 0, 2]
    assert counting.nbytes == pieces[2].nbytes + pieces[0].part_nbytes("values") + pieces[2].part_nbytes("structure")


def test_a_read_that_fails_is_not_counted(store):
    def fail(read, number):
        raise StoreError("the disk is gone")

    counting = CountingStore(FaultyStore(store, fail))
    with pytest.raises(StoreError, match="the disk is gone"):
        read(counting, 0, "whole")

    assert (counting.numbers, counting.nbytes) == ([], 0)


def test_a_faulty_store_tells_the_read_and_the_subdivision(store):
    seen = []
    faulty = FaultyStore(store, lambda read, number: seen.append((read, number)))
    for number in (3, 1, 3):
        read(faulty, number, "whole")

    assert seen == [(0, 3), (1, 1), (2, 3)]
    assert faulty.reads == 3


def test_a_slow_store_takes_its_latency_and_the_time_of_its_bytes(store):
    nbytes = store.index.subdivisions[0].part_nbytes("values")
    slow = SlowStore(store, bytes_per_second=nbytes / 0.03, latency=0.02)

    began = time.perf_counter()
    read(slow, 0, "values")

    assert 0.05 <= time.perf_counter() - began < 0.5
