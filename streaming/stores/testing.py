"""Tests that every matrix store must pass, to inherit in the pytest suite of a store."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np

from penstock.spmv import format_named
from penstock.streaming.stores.base import Store
from penstock.streaming.stores.buffers import PAGE_NBYTES, aligned_buffer
from penstock.streaming.stores.matrix_index import Part
from penstock.streaming.stores.packing import as_slab, index_of, pack

Bytes = np.ndarray[Any, Any]
OpenStore = Callable[[], Store]

_PARTS: tuple[Part, ...] = get_args(Part)
_FILL = 0xA5


class StoreContract:
    """Tests of the :class:`~penstock.streaming.Store` interface.

    A subclass defines two pytest fixtures: ``slabs``, the row slabs of a matrix in the format of the store, and
    ``open_store``, a function without arguments that opens a store of these slabs. The tests call it several times and close
    each store that has a ``close`` method::

        class TestMyStore(StoreContract):
            @pytest.fixture
            def slabs(self):
                return list(Cantilever(nodes=(7, 5, 4)).subdivisions(4))

            @pytest.fixture
            def open_store(self, slabs, tmp_path):
                MyStore.write(tmp_path / "matrix", slabs)
                return lambda: MyStore(tmp_path / "matrix")
    """

    def test_it_has_the_methods_of_a_store(self, open_store: OpenStore) -> None:
        """A store has ``index`` and ``read_into``."""
        with _opened(open_store) as store:
            assert isinstance(store, Store), f"{type(store).__name__} needs index and read_into"

    def test_the_index_describes_the_slabs(self, open_store: OpenStore, slabs: Sequence[Any]) -> None:
        """Shape, types, format, parameters and layout are those of the slabs."""
        expected = index_of(map(as_slab, slabs))
        with _opened(open_store) as store:
            index = store.index
            assert index.shape == expected.shape
            assert index.dtype == expected.dtype
            assert index.format_name == expected.format_name
            assert index.parameters == expected.parameters
            assert index.nnz == expected.nnz
            assert index.same_layout(expected), "the subdivisions do not have the layout of the slabs"
            assert isinstance(as_slab(slabs[0]), format_named(index.format_name))

    def test_every_part_equals_the_packed_slab(self, open_store: OpenStore, slabs: Sequence[Any]) -> None:
        """The whole, the structure and the values are the bytes that ``pack`` writes."""
        with _opened(open_store) as store:
            for number, slab in enumerate(slabs):
                subdivision = store.index.subdivisions[number]
                packed = aligned_buffer(subdivision.nbytes)
                pack(as_slab(slab), subdivision, packed)
                for part in _PARTS:
                    where = f"{part} of subdivision {number}"
                    np.testing.assert_array_equal(_read(store, number, part), packed[subdivision.bytes_of(part)], where)

    def test_a_view_of_a_read_equals_the_slab(self, open_store: OpenStore, slabs: Sequence[Any]) -> None:
        """A matrix made of the bytes read has the arrays of the slab, also if structure and values are read separately."""
        with _opened(open_store) as store:
            for number, slab in enumerate(map(as_slab, slabs)):
                whole = store.index.view(number, _read(store, number))
                structure = store.index.arrays(number, _read(store, number, "structure"), "structure")
                separate = store.index.view(number, _read(store, number, "values"), structure)
                for name, array in slab.arrays().items():
                    np.testing.assert_array_equal(whole.arrays()[name], array, name)
                    np.testing.assert_array_equal(separate.arrays()[name], array, name)

    def test_reads_can_be_repeated_in_any_order(self, open_store: OpenStore) -> None:
        """Every read of a subdivision returns the same bytes."""
        with _opened(open_store) as store:
            numbers = range(len(store.index.subdivisions))
            first = [_read(store, number) for number in numbers]
            for number in (*reversed(numbers), *numbers, *numbers):
                np.testing.assert_array_equal(_read(store, number), first[number], f"subdivision {number}")

    def test_a_read_fills_only_its_part_of_a_page_aligned_buffer(self, open_store: OpenStore) -> None:
        """Bytes of a longer buffer after the part are not changed; padding between arrays need not be written."""
        with _opened(open_store) as store:
            for number, subdivision in enumerate(store.index.subdivisions):
                for part in _PARTS:
                    nbytes = subdivision.part_nbytes(part)
                    assert nbytes % PAGE_NBYTES == 0, "parts must be padded to whole pages"
                    buffer = aligned_buffer(nbytes + PAGE_NBYTES)
                    buffer[:] = _FILL
                    store.read_into(number, buffer, part)
                    expected, start = _read(store, number, part), subdivision.bytes_of(part).start
                    for field in subdivision.fields:
                        if part in ("whole", field.part):
                            array = slice(field.offset - start, field.offset - start + field.nbytes)
                            np.testing.assert_array_equal(buffer[array], expected[array], field.name)
                    assert (buffer[nbytes:] == _FILL).all(), f"{part} of subdivision {number} wrote past its end"

    def test_changes_to_a_buffer_do_not_change_the_store(self, open_store: OpenStore) -> None:
        """A read copies the bytes."""
        with _opened(open_store) as store:
            before, overwritten = _read(store, 0), _read(store, 0)
            overwritten[:] = _FILL
            np.testing.assert_array_equal(_read(store, 0), before)

    def test_checksums_match_the_bytes(self, open_store: OpenStore) -> None:
        """If the index has checksums, every subdivision has them, and they are the CRC-32 of structure and values."""
        with _opened(open_store) as store:
            subdivisions = store.index.subdivisions
            present = [subdivision.checksums is not None for subdivision in subdivisions]
            assert all(present) or not any(present), "some subdivisions have checksums and others do not"
            for number, subdivision in enumerate(subdivisions):
                if subdivision.checksums is not None:
                    parts: tuple[Part, Part] = ("structure", "values")
                    checksums = tuple(zlib.crc32(_read(store, number, part).data) for part in parts)
                    assert subdivision.checksums == checksums, f"subdivision {number}"

    def test_several_stores_can_be_open_at_once(self, open_store: OpenStore) -> None:
        """Stores of the same matrix do not disturb each other, and one can still be read after another is closed."""
        with _opened(open_store) as store:
            with _opened(open_store) as other:
                assert store.index.same_layout(other.index)
                for number in range(len(store.index.subdivisions)):
                    np.testing.assert_array_equal(_read(store, number), _read(other, number))
            _read(store, 0)

    def test_another_thread_can_read(self, open_store: OpenStore) -> None:
        """Streamed matrices read in a separate thread."""
        with _opened(open_store) as store, ThreadPoolExecutor(1) as thread:
            np.testing.assert_array_equal(thread.submit(_read, store, 0).result(), _read(store, 0))


def _read(store: Store, number: int, part: Part = "whole") -> Bytes:
    buffer = aligned_buffer(store.index.subdivisions[number].part_nbytes(part))
    store.read_into(number, buffer, part)
    return buffer


@contextmanager
def _opened(open_store: OpenStore) -> Iterator[Store]:
    store = open_store()
    try:
        yield store
    finally:
        close = getattr(store, "close", None)
        if close is not None:
            close()
