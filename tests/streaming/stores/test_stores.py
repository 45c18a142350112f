"""What a store gives back is what was put in, or an error that names the place."""

import contextlib
import errno
import io
import json
import os
import weakref

import numpy as np
import pytest
import scipy.sparse

from penstock.fem import Cantilever
from penstock.spmv import BsrMatrix, CsrMatrix, InputError, StoreError
from penstock.streaming import FileStore, HostStore, Store, StreamedMatrix, index_of, plan_stream
from penstock.streaming.stores import file_store
from penstock.streaming.stores.buffers import aligned_buffer
from penstock.streaming.stores.packing import as_slab, pack

BOUNDS = [0, 12, 24, 60, 96]
KINDS = ("SciPy CSR", "SciPy BSR", "penstock CSR", "penstock BSR", "penstock CSR in float32")


@pytest.fixture(scope="module")
def scipy_matrix(irregular):
    return irregular(96, 60)


@pytest.fixture
def make_slabs(scipy_matrix, cut):
    """``make_slabs(kind)`` is a generator of row slabs, as a user would hand it over."""

    def make(kind):
        if kind == "SciPy CSR":
            return cut(scipy_matrix, BOUNDS)
        if kind == "SciPy BSR":
            blocks = BsrMatrix.from_csr(scipy_matrix, block_size=3)
            return (slab.to_bsr() for slab in cut(blocks, BOUNDS))
        if kind == "penstock BSR":
            return cut(BsrMatrix.from_csr(scipy_matrix, block_size=4), BOUNDS)
        values_dtype = np.float32 if "float32" in kind else np.float64
        return cut(CsrMatrix.from_csr(scipy_matrix, values_dtype=values_dtype), BOUNDS)

    return make


def read(store, number):
    buffer = aligned_buffer(store.index.subdivisions[number].nbytes)
    store.read_into(number, buffer)
    return buffer


def open_files():
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not list open files under /proc")
    return len(os.listdir("/proc/self/fd"))


def read_all(path):
    with FileStore(path) as store:
        return [read(store, number) for number in range(len(store.index.subdivisions))]


class StoreContract:
    """What every store promises. A subclass gives ``create(slabs, **options)``."""

    @pytest.fixture(params=KINDS)
    def kind(self, request):
        return request.param

    @pytest.fixture
    def slabs(self, make_slabs, kind):
        return [as_slab(slab) for slab in make_slabs(kind)]

    @pytest.fixture
    def store(self, create, make_slabs, kind):
        with create(make_slabs(kind)) as store:
            yield store

    def test_it_is_a_store(self, store):
        assert isinstance(store, Store)

    def test_its_index_is_that_of_its_slabs(self, store, slabs):
        def without_checksums(index):
            return [(s.row_start, s.row_stop, s.nnz, s.fields, s.nbytes) for s in index.subdivisions]

        expected = index_of(slabs)
        assert without_checksums(store.index) == without_checksums(expected)
        assert (store.index.shape, store.index.dtype) == (expected.shape, expected.dtype)
        assert (store.index.format_name, store.index.parameters) == (expected.format_name, expected.parameters)

    def test_a_read_gives_the_packed_bytes(self, store, slabs):
        for number, slab in enumerate(slabs):
            expected = aligned_buffer(store.index.subdivisions[number].nbytes)
            pack(slab, store.index.subdivisions[number], expected)

            np.testing.assert_array_equal(read(store, number), expected)

    def test_a_view_of_what_was_read_equals_the_slab(self, store, slabs):
        for number, slab in enumerate(slabs):
            view = store.index.view(number, read(store, number))

            for name, array in slab.arrays().items():
                np.testing.assert_array_equal(view.arrays()[name], array)

    def test_a_read_of_a_part_gives_those_bytes_of_the_whole(self, store):
        for number, subdivision in enumerate(store.index.subdivisions):
            whole = read(store, number)
            assert 0 < subdivision.values_start < subdivision.nbytes
            for part in ("structure", "values"):
                buffer = aligned_buffer(subdivision.part_nbytes(part) + 4096)
                buffer[:] = 0xA5
                store.read_into(number, buffer, part)

                np.testing.assert_array_equal(buffer[:-4096], whole[subdivision.bytes_of(part)])
                assert (buffer[-4096:] == 0xA5).all()

    def test_reads_come_in_any_order_and_repeat(self, store):
        first = [read(store, number).tobytes() for number in range(4)]

        for number in (3, 0, 0, 2, 1, 3):
            assert read(store, number).tobytes() == first[number]

    def test_a_read_into_a_longer_buffer_leaves_the_rest_of_it_alone(self, store):
        nbytes = store.index.subdivisions[1].nbytes
        buffer = aligned_buffer(nbytes + 4096)
        buffer[:] = 0xA5

        store.read_into(1, buffer)

        assert (buffer[nbytes:] == 0xA5).all()
        np.testing.assert_array_equal(buffer[:nbytes], read(store, 1))

    def test_what_the_reader_does_to_its_buffer_does_not_reach_the_store(self, store):
        before = read(store, 0)
        spoilt = read(store, 0)
        spoilt[:] = 0xFF

        np.testing.assert_array_equal(read(store, 0), before)

    def test_closing_twice_is_fine(self, store):
        store.close()
        store.close()

    @pytest.mark.parametrize("kind", ["SciPy CSR"])
    def test_the_expected_shape_is_checked(self, create, make_slabs, kind):
        with pytest.raises(InputError, match="96 rows together, but the shape says 97"):
            create(make_slabs(kind), shape=(97, 60))

        with create(make_slabs(kind), shape=(96, 60)) as store:
            assert store.index.shape == (96, 60)

    @pytest.mark.parametrize("kind", ["SciPy CSR"])
    def test_one_slab_is_held_at_a_time(self, create, make_slabs, kind):
        """When the generator makes a slab, those before it are gone: a build needs memory for one."""
        given, alive = [], []

        def slabs():
            for slab in make_slabs(kind):
                copy = slab.copy()
                given.append(weakref.ref(copy.data))
                del slab
                yield copy
                del copy
                alive.append(sum(reference() is not None for reference in given))

        with create(slabs()):
            assert alive == [0, 0, 0, 0]

    @pytest.mark.parametrize("kind", ["SciPy CSR"])
    def test_it_shares_no_memory_with_the_slabs(self, create, make_slabs, kind):
        slab = next(make_slabs(kind)).copy()
        with create([slab]) as store:
            before = read(store, 0)
            slab.data[:] = 0

            np.testing.assert_array_equal(read(store, 0), before)


class TestHostStore(StoreContract):
    @pytest.fixture
    def create(self):
        return HostStore.create

    def test_a_created_store_gives_one_segment_without_copying_that_starts_at_a_page(self, store):
        for number in range(4):
            [(offset, piece)] = store.segments(number)
            assert offset == 0
            assert np.shares_memory(piece, store.segments(number)[0][1])
            assert piece.ctypes.data % 4096 == 0
            np.testing.assert_array_equal(piece, read(store, number))

    def test_it_can_be_read_after_close(self, store):
        """Closing unlocks pages; the matrix stays in memory."""
        before = read(store, 2)
        store.close()

        np.testing.assert_array_equal(read(store, 2), before)

    def test_it_takes_over_a_whole_other_store(self, make_slabs, kind, tmp_path):
        with FileStore.create(tmp_path / "store", make_slabs(kind)) as source:
            copied = HostStore.from_store(source)

            assert copied.index == source.index
            for number in range(4):
                np.testing.assert_array_equal(read(copied, number), read(source, number))


class TestFileStore(StoreContract):
    @pytest.fixture(params=[None, False], ids=["default", "through the page cache"])
    def direct(self, request):
        return request.param

    @pytest.fixture
    def create(self, tmp_path, direct):
        def create(slabs, **options):
            FileStore.create(tmp_path / "store", slabs, **options).close()
            return FileStore(tmp_path / "store", direct=direct)

        return create

    @pytest.mark.parametrize("kind", ["SciPy CSR"])
    def test_reading_after_close_is_refused_for_that_reason(self, store):
        store.close()

        with pytest.raises(StoreError, match="closed"):
            read(store, 0)

    @pytest.mark.parametrize("kind", ["SciPy CSR"])
    def test_a_store_that_is_dropped_closes_its_file(self, create, make_slabs, kind):
        before = open_files()
        store = create(make_slabs(kind))
        assert open_files() > before
        del store

        assert open_files() == before

    @pytest.mark.parametrize("kind", ["SciPy CSR"])
    def test_a_slab_is_checked_when_it_is_read_first(self, store, tmp_path):
        """Which subdivision, and which rows of the matrix: what one needs to look for the cause."""
        _flip_bit(tmp_path / "store", store.index.subdivisions[0].nbytes + store.index.subdivisions[1].nbytes + 5)

        read(store, 0)
        read(store, 1)
        with pytest.raises(StoreError, match=r"subdivision 2 \(rows 24 to 59\) .* build the store again"):
            read(store, 2)
        read(store, 3)

    @pytest.mark.parametrize("damaged", ["structure", "values"])
    @pytest.mark.parametrize("kind", ["SciPy CSR", "SciPy BSR"])
    def test_a_damaged_part_does_not_keep_the_other_from_being_read(self, store, tmp_path, damaged):
        subdivision = store.index.subdivisions[1]
        other = "values" if damaged == "structure" else "structure"
        before = read(store, 1)[subdivision.bytes_of(other)]
        store.close()
        start = store.index.subdivisions[0].nbytes + subdivision.bytes_of(damaged).start
        _flip_bit(tmp_path / "store", start + 9)

        with FileStore(tmp_path / "store", direct=store.direct) as store:
            buffer = aligned_buffer(subdivision.nbytes)
            for part in (damaged, "whole", damaged):
                with pytest.raises(StoreError, match=r"subdivision 1 \(rows 12 to 23\) .* does not match its checksum"):
                    store.read_into(1, buffer, part)
            store.read_into(1, buffer, other)
            np.testing.assert_array_equal(buffer[: before.size], before)

    @pytest.mark.parametrize("parts", [["structure", "values"], ["whole"]])
    @pytest.mark.parametrize("kind", ["SciPy CSR"])
    def test_a_part_once_verified_is_not_verified_again(self, store, monkeypatch, parts):
        monkeypatch.setattr(file_store, "_CLOCK_TICK", 0)  # the store was written just now
        checked = []
        crc32 = file_store.zlib.crc32
        buffer = aligned_buffer(store.index.subdivisions[2].nbytes)
        monkeypatch.setattr(file_store.zlib, "crc32", lambda data: checked.append(len(data)) or crc32(data))

        for part in [*parts, "whole", "values", "structure", "whole"]:
            store.read_into(2, buffer, part)

        assert checked == [store.index.subdivisions[2].part_nbytes(part) for part in ("structure", "values")]

    @pytest.mark.parametrize("part", ["structure", "values"])
    @pytest.mark.parametrize("kind", ["SciPy CSR"])
    def test_a_part_cut_short_says_where_in_the_subdivision_the_file_ends(self, store, tmp_path, part):
        last = store.index.subdivisions[3]
        left = 0 if part == "structure" else last.values_start
        os.truncate(tmp_path / "store" / "slabs.bin", store.index.nbytes - last.nbytes + left)

        with pytest.raises(StoreError, match=f"ends after {left} of {last.nbytes} bytes"):
            store.read_into(3, aligned_buffer(last.nbytes), part)

    @pytest.mark.parametrize("kind", ["SciPy CSR"])
    def test_a_file_cut_short_while_it_is_open_is_noticed(self, store, tmp_path):
        os.truncate(tmp_path / "store" / "slabs.bin", store.index.nbytes - 4096)

        read(store, 0)
        with pytest.raises(StoreError, match=r"subdivision 3 \(rows 60 to 95\) .* build the store again"):
            read(store, 3)

    @pytest.mark.parametrize("kind", ["SciPy CSR"])
    def test_an_error_of_the_disk_names_the_place(self, store, monkeypatch):
        def refuse(*arguments):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "preadv", refuse)

        with pytest.raises(StoreError, match=r"subdivision 1 \(rows 12 to 23\) .* Input/output error; check the disk"):
            read(store, 1)

    @pytest.mark.parametrize("kind", ["SciPy CSR"])
    def test_reads_that_come_in_parts_are_put_together(self, store, monkeypatch):
        """A disk may return fewer bytes than asked for."""
        whole = read(store, 2)
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:4096]], offset))

        np.testing.assert_array_equal(read(store, 2), whole)


def _flip_bit(store_path, position):
    with open(store_path / "slabs.bin", "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def built(path, make_slabs):
    """The path of a finished, closed store."""
    FileStore.create(path, make_slabs("SciPy CSR"), label="irregular").close()
    return path


class TestAnUnfinishedBuildLeavesNothing:
    @pytest.mark.parametrize("after", [0, 1, 4])
    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit, FileNotFoundError, MemoryError])
    def test_when_the_generator_fails(self, path, make_slabs, error, after):
        """The caller's own error comes through as it is, whatever its type."""

        def slabs():
            for number, slab in enumerate(make_slabs("SciPy CSR")):
                if number == after:
                    break
                yield slab
            raise error("the generator's own")

        with pytest.raises(error, match="the generator's own"):
            FileStore.create(path, slabs())

        assert list(path.parent.iterdir()) == []

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_when_progress_fails(self, path, make_slabs, error):
        def progress(nbytes):
            raise error

        with pytest.raises(error):
            FileStore.create(path, make_slabs("SciPy CSR"), progress=progress)

        assert list(path.parent.iterdir()) == []

    def test_when_a_slab_is_refused(self, path, scipy_matrix):
        with pytest.raises(InputError, match="slab 1 has 59 columns"):
            FileStore.create(path, [scipy_matrix[:12], scipy_matrix[12:24, :59]])

        assert list(path.parent.iterdir()) == []

    def test_when_the_slabs_do_not_add_up(self, path, make_slabs):
        with pytest.raises(InputError, match="the shape says 95"):
            FileStore.create(path, make_slabs("SciPy CSR"), shape=(95, 60))

        assert list(path.parent.iterdir()) == []

    @pytest.mark.parametrize("capacity", [0, 5000, 10_000])
    def test_when_the_disk_is_full(self, path, make_slabs, capacity, monkeypatch):
        """A file that takes what fits, in short writes as a disk may, and then refuses."""

        class SmallDisk(io.FileIO):
            def write(self, data):
                room = capacity - self.tell()
                if room <= 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return super().write(bytes(data)[: min(room, 3000)])

        def open_on_small_disk(file, mode="r", **options):
            return SmallDisk(file, mode) if os.fspath(file).endswith("slabs.bin") else open(file, mode, **options)

        monkeypatch.setattr("penstock.streaming.stores.store_files.open", open_on_small_disk, raising=False)

        with pytest.raises(StoreError, match=r"(?i)no space left on device; .* free there; nothing was left") as caught:
            FileStore.create(path, make_slabs("SciPy CSR"))

        assert str(path) in str(caught.value)
        assert list(path.parent.iterdir()) == []

    def test_when_a_folder_cannot_be_made(self, tmp_path, make_slabs):
        (tmp_path / "file").write_text("not a folder")

        with pytest.raises(StoreError, match=r"cannot write the store .* nothing was left"):
            FileStore.create(tmp_path / "file" / "store", make_slabs("SciPy CSR"))

    def test_and_the_same_call_works_afterwards(self, path, make_slabs):
        def slabs():
            yield next(make_slabs("SciPy CSR"))
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            FileStore.create(path, slabs())

        with FileStore.create(path, make_slabs("SciPy CSR")) as store:
            assert store.index.shape == (96, 60)


def test_short_writes_are_continued(path, make_slabs, monkeypatch):
    class HesitantFile(io.FileIO):
        def write(self, data):
            return super().write(bytes(data)[:3000])

    def open_hesitantly(file, mode="r", **options):
        return HesitantFile(file, mode) if os.fspath(file).endswith("slabs.bin") else open(file, mode, **options)

    monkeypatch.setattr("penstock.streaming.stores.store_files.open", open_hesitantly, raising=False)

    with (
        FileStore.create(path, make_slabs("SciPy CSR")) as store,
        HostStore.create(make_slabs("SciPy CSR")) as expected,
    ):
        for number in range(4):
            np.testing.assert_array_equal(read(store, number), read(expected, number))


def test_data_and_index_are_on_the_disk_before_the_store_has_its_name(path, make_slabs, monkeypatch):
    """A power failure leaves a whole store or none."""
    synced = set()

    def fsync(descriptor):
        assert not path.exists()
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)

    FileStore.create(path, make_slabs("SciPy CSR")).close()

    assert {(path / name).stat().st_ino for name in ("slabs.bin", "index.json")} <= synced


class TestNames:
    def test_an_existing_store_is_not_replaced_without_being_asked(self, built, make_slabs):
        with pytest.raises(InputError, match=r"choose another name or replace it \(overwrite=True"):
            FileStore.create(built, make_slabs("penstock BSR"))

        with FileStore(built) as store:
            assert store.index.format_name == "csr"

    def test_an_existing_store_is_replaced_on_request(self, built, make_slabs):
        with FileStore.create(built, make_slabs("penstock BSR"), overwrite=True) as store:
            assert store.index.format_name == "bsr"
            read(store, 3)
        assert [entry.name for entry in built.parent.iterdir()] == ["store"]

    def test_a_replacement_that_fails_leaves_the_old_store(self, built):
        with pytest.raises(InputError, match="not COO"):
            FileStore.create(built, [scipy.sparse.coo_array(np.eye(3))], overwrite=True)

        with FileStore(built) as store:
            read(store, 3)
        assert [entry.name for entry in built.parent.iterdir()] == ["store"]

    def test_a_store_in_use_can_be_replaced(self, built, make_slabs):
        with FileStore(built) as old:
            before = read(old, 1)
            FileStore.create(built, make_slabs("penstock BSR"), overwrite=True).close()

            np.testing.assert_array_equal(read(old, 1), before)

    def test_a_folder_that_is_no_store_is_never_replaced(self, tmp_path, make_slabs):
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis" / "chapter.tex").write_text("years of work")

        with pytest.raises(InputError, match="exists; choose another name"):
            FileStore.create(tmp_path / "thesis", make_slabs("SciPy CSR"), overwrite=True)

        assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"

    def test_folders_above_are_made(self, tmp_path, make_slabs):
        with FileStore.create(tmp_path / "new" / "folders" / "store", make_slabs("SciPy CSR")) as store:
            read(store, 0)

    def test_a_path_may_be_a_string(self, tmp_path, make_slabs):
        FileStore.create(str(tmp_path / "store"), make_slabs("SciPy CSR")).close()

        with FileStore(str(tmp_path / "store")) as store:
            read(store, 0)


def test_the_label_and_the_index_are_kept(built, make_slabs):
    with FileStore(built) as store, HostStore.create(make_slabs("SciPy CSR")) as same:
        assert store.label == "irregular"
        assert store.index.parameters == same.index.parameters
        assert all(subdivision.checksums is not None for subdivision in store.index.subdivisions)


def test_progress_tells_the_bytes_written_so_far(path, make_slabs):
    told = []

    with FileStore.create(path, make_slabs("SciPy CSR"), progress=told.append) as store:
        lengths = [subdivision.nbytes for subdivision in store.index.subdivisions]

    assert told == np.cumsum(lengths).tolist()


def test_reads_around_the_page_cache_give_the_same_bytes_or_are_refused_with_advice(built):
    with FileStore(built) as chosen, FileStore(built, direct=False) as cached:
        assert not cached.direct
        if not chosen.direct:
            with pytest.raises(StoreError, match="leave direct=None"):
                FileStore(built, direct=True)
            return
        with FileStore(built, direct=True) as direct:
            assert direct.direct
            np.testing.assert_array_equal(read(direct, 2), read(cached, 2))


class TestADamagedStoreIsRefused:
    def refuses(self, path, advice):
        with pytest.raises(StoreError, match=advice):
            FileStore(path)

    def test_missing(self, tmp_path):
        self.refuses(tmp_path / "nothing", "is not a store: it has no index.json; make one with FileStore.create")

    def test_a_folder_without_index(self, built):
        (built / "index.json").unlink()

        self.refuses(built, "it has no index.json; make one with FileStore.create")

    def test_a_file_in_its_place(self, path):
        path.write_text("not a folder")

        self.refuses(path, "build the store again")

    @pytest.mark.parametrize("change", [-1, 1, -4096, 4096])
    def test_a_file_of_another_length(self, built, change):
        length = (built / "slabs.bin").stat().st_size
        os.truncate(built / "slabs.bin", length + change)

        self.refuses(built, f"has {length + change} bytes instead of {length}: .* build the store again")

    def test_a_missing_file(self, built):
        (built / "slabs.bin").unlink()

        self.refuses(built, "has 0 bytes instead of .* build the store again")

    @pytest.mark.parametrize("text", ["", "{", "\0\0\0\0", "[1, 2", b"\xff\xfe"])
    def test_an_index_that_is_no_json(self, built, text):
        (built / "index.json").write_bytes(text if isinstance(text, bytes) else text.encode())

        self.refuses(built, "cannot read .*index.json.* build the store again")

    def test_an_index_cut_short(self, built):
        os.truncate(built / "index.json", (built / "index.json").stat().st_size // 2)

        self.refuses(built, "build the store again")

    @pytest.mark.parametrize("data", [None, [], 3, {}, {"penstock_store": 0}, {"penstock_store": 1}])
    def test_an_index_of_another_version(self, built, data):
        (built / "index.json").write_text(json.dumps(data))

        self.refuses(built, "not an index of version 2, or 3 with planes; build the store again")

    def test_an_index_with_a_part_missing(self, built):
        self.alter(built, lambda data: data.pop("shape"))

        self.refuses(built, "index is damaged .* build the store again")

    def alter(self, built, change):
        data = json.loads((built / "index.json").read_text())
        change(data)
        (built / "index.json").write_text(json.dumps(data))

    @pytest.mark.parametrize(
        "change",
        [
            lambda data: data["shape"].__setitem__(1, 30),
            lambda data: data["subdivisions"][0].__setitem__("nnz", 1),
            lambda data: data["subdivisions"][1]["fields"][2].__setitem__("offset", 0),
            lambda data: (
                data["subdivisions"][0].__setitem__("row_stop", 13),
                data["subdivisions"][1].__setitem__("row_start", 13),
            ),
        ],
        ids=["fewer columns", "fewer entries", "arrays on top of each other", "another border between slabs"],
    )
    def test_an_index_altered_into_another_valid_one(self, built, change):
        """Kernels trust the index: with fewer columns they would read beyond the end of x."""
        self.alter(built, change)

        with pytest.raises(StoreError, match="build the store again"):
            read_all(built)

    @pytest.mark.parametrize("checksums", [None, 0, "0", [0], [0, 0], [0, 0, 0]])
    def test_a_checksum_that_is_not_that_of_the_bytes(self, built, checksums):
        self.alter(built, lambda data: data["subdivisions"][2].__setitem__("checksums", checksums))

        with pytest.raises(StoreError, match="build the store again"):
            read_all(built)


def test_a_refused_store_leaves_no_file_open(built):
    os.truncate(built / "slabs.bin", 100)
    before = open_files()
    for _ in range(20):
        with contextlib.suppress(StoreError):
            FileStore(built)

    assert open_files() == before


class TestFormatOfAStore:
    """SciPy slabs are kept in a format that moves few bytes, decided by the first one."""

    @pytest.fixture
    def A(self, beam):
        return scipy.sparse.csr_array(beam.matrix().to_csr())

    def slabs(self, A, rows=96):
        return (A[start : start + rows] for start in range(0, A.shape[0], rows))

    def product_is_right(self, store, A):
        x = np.random.default_rng(0).standard_normal(A.shape[1])
        with StreamedMatrix(store, store.index.nbytes) as streamed:
            np.testing.assert_allclose(streamed @ x, A @ x, rtol=1e-12, atol=1e-12 * abs(A @ x).max())

    @pytest.mark.parametrize("kind", ["file", "host"])
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, "bsr"),
            ({"format": "csr"}, "csr"),
            ({"format": "sliced_bsr"}, "sliced_bsr"),
            ({"format": "symmetric_bsr"}, "symmetric_bsr"),
            ({"block_size": 1}, "csr"),
            ({"format": "sell"}, "sell"),
        ],
    )
    def test_csr_slabs(self, kind, options, expected, A, tmp_path):
        slabs = self.slabs(A)
        store = (
            FileStore.create(tmp_path / "s", slabs, **options) if kind == "file" else HostStore.create(slabs, **options)
        )

        with store:
            assert store.index.format_name == expected
            assert len(store.index.subdivisions) == 5
            self.product_is_right(store, A)

    def test_slabs_without_blocks_stay_csr_and_penstock_formats_stay_as_they_are(self, A, beam):
        line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(60, 60)).tocsr()
        assert HostStore.create(self.slabs(line, 20)).index.format_name == "csr"
        assert HostStore.create([CsrMatrix.from_csr(A)]).index.format_name == "csr"

    @pytest.mark.parametrize("options", [{}, {"block_size": 3}, {"format": "csr"}, {"format": "symmetric_bsr"}])
    @pytest.mark.parametrize("form", ["scipy csr", "scipy bsr", "csr", "bsr", "sliced_bsr", "symmetric_bsr"])
    def test_a_whole_matrix_is_cut_into_slabs_of_a_size(self, form, options, tmp_path):
        beam = Cantilever(nodes=(40, 6, 6), dof=3)
        K = beam.matrix("csr").to_csr()
        whole = {"scipy csr": lambda: K, "scipy bsr": lambda: K.tobsr((3, 3))}.get(form, lambda: beam.matrix(form))()

        with FileStore.create(tmp_path / "s", whole, slab="200 KiB", **options) as store:
            sizes = [part.nbytes for part in store.index.subdivisions]
            assert len(sizes) > 4
            assert max(sizes) < 300 << 10, "padding and the multiples of rows at which it may be cut are small"
            self.product_is_right(store, K)
            plan_stream(store.index, "700 KiB")  # two slots fit

    def test_slabs_follow_the_entries_not_the_rows(self, tmp_path):
        heavy = scipy.sparse.random_array((3000, 6000), density=0.05, rng=0)
        A = scipy.sparse.vstack([heavy, scipy.sparse.eye_array(3000, 6000)], format="csr")

        with FileStore.create(tmp_path / "s", A, format="csr", slab="1 MiB") as store:
            assert max(part.nbytes for part in store.index.subdivisions) < 1.2 * (1 << 20)

    def test_slabs_are_not_cut_again(self, A, tmp_path):
        with pytest.raises(InputError, match="leave slab out, or hand over the matrix"):
            FileStore.create(tmp_path / "s", self.slabs(A), slab="1 MiB")
        assert not (tmp_path / "s").exists()

    @pytest.mark.parametrize("options", [{}, {"format": "symmetric_bsr"}, {"format": "sliced_bsr"}])
    def test_a_whole_matrix_is_cut_into_slabs(self, options):
        line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(60_000, 60_000)).tocsr()
        A = scipy.sparse.kron(line, np.array([[2.0, 1.0], [1.0, 2.0]]), format="csr")

        with HostStore.create(A, **options) as store:
            assert 1 < len(store.index.subdivisions) <= 64
            self.product_is_right(store, A)
        blocks = A.tobsr((2, 2))
        blocks.sort_indices()
        with HostStore.create(blocks) as store:
            assert 1 < len(store.index.subdivisions) <= 64
            self.product_is_right(store, A)
