"""Stores are data: offsets and indices that lead out of a slab are refused when it is first read, though checksums fit."""

import json
import os
import shutil
import time
import zlib

import numpy as np
import pytest

from penstock.fem import Cantilever
from penstock.spmv import InputError, StoreError
from penstock.spmv.formats.base import format_names
from penstock.streaming import FileStore, StreamedMatrix
from penstock.streaming.stores import file_store, store_files
from penstock.streaming.stores.matrix_index import MatrixIndex

BEAM = Cantilever(nodes=(9, 5, 5), dof=3)
FORMATS = [name for name in format_names() if name in ("coo", "csr", "ell", "sell", "hyb", "sliced_ell")]
BLOCKED = ["bsr", "sliced_bsr", "symmetric_bsr"]


@pytest.fixture(scope="module")
def A():
    return BEAM.matrix("csr").to_csr()


@pytest.fixture(scope="module", params=FORMATS + BLOCKED)
def whole(request, A, tmp_path_factory):
    options = {"block_size": 3} if request.param in BLOCKED else {}
    slabs = [A[:288], A[288:576], A[576:]]
    path = tmp_path_factory.mktemp("stores") / request.param
    FileStore.create(path, slabs, format=request.param, **options).close()
    return path


def altered(whole, path, name, change):
    """Copy a store, change one array of its second subdivision, and make the checksums fit."""
    shutil.copytree(whole, path)
    data = json.loads((path / "index.json").read_text())
    version = data.pop("penstock_store")
    data.pop("checksum")
    content = bytearray((path / "slabs.bin").read_bytes())
    first, second = data["subdivisions"][:2]
    fields = {field["name"]: field for field in second["fields"]}
    if name not in fields:
        pytest.skip(f"there are no {name} in this format")
    field = fields[name]
    start = first["nbytes"] + field["offset"]
    array = np.frombuffer(content, field["dtype"], int(np.prod(field["shape"])), start).copy()
    if not array.size:
        pytest.skip(f"there are no {name} in this store")
    change(array)
    content[start : start + array.nbytes] = array.tobytes()
    values = min(of["offset"] for of in second["fields"] if of["dtype"].startswith("float"))
    piece = content[first["nbytes"] : first["nbytes"] + second["nbytes"]]
    second["checksums"] = [zlib.crc32(piece[:values]), zlib.crc32(piece[values:])]
    checksum = store_files._json_checksum(data)
    (path / "index.json").write_text(json.dumps({"penstock_store": version, "checksum": checksum, **data}))
    (path / "slabs.bin").write_bytes(content)


def set_to(place, value):
    def change(array):
        array[place] = value

    return change


OFFSETS = [set_to(0, 5), set_to(-1, 10**9), set_to(2, 2**31 - 1), set_to(2, -7), set_to(3, 1)]
INDICES = [set_to(7, 2**31 - 1), set_to(7, 675), set_to(slice(None), 2**30)]


def test_a_whole_store_is_read(whole, A, tmp_path):
    x = np.random.default_rng(0).standard_normal(A.shape[1])
    with FileStore(whole) as store, StreamedMatrix(store, "1 MiB") as streamed:
        np.testing.assert_allclose(streamed @ x, A @ x, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("row_offsets", change) for change in OFFSETS),
        *(("chunk_offsets", change) for change in OFFSETS),
        *(("column_indices", change) for change in INDICES),
        *(("ell_column_indices", change) for change in INDICES),
        *(("row_indices", change) for change in (*INDICES, set_to(7, -1), set_to(0, 200))),
        *(("permutation", change) for change in (*INDICES, set_to(1, -1), set_to(slice(None), 3))),
    ],
)
@pytest.mark.parametrize("resident", [True, False])
def test_what_leads_out_of_a_slab_is_refused(whole, name, change, resident, tmp_path):
    altered(whole, tmp_path / "s", name, change)
    x = np.ones(BEAM.unknowns)

    with FileStore(tmp_path / "s") as store:
        budget = store.index.nbytes if resident else 2 * max(store.index.sizes["whole"])
        with (
            pytest.raises(StoreError, match=rf"subdivision 1 .*rows 288 to 575.* is damaged: .*{name}"),
            StreamedMatrix(store, budget) as streamed,
        ):
            streamed @ x


def refuse(path, told):
    with (
        FileStore(path) as store,
        pytest.raises(StoreError, match=told),
        StreamedMatrix(store, "1 MiB") as streamed,
    ):
        streamed @ np.ones(BEAM.unknowns)


@pytest.mark.parametrize("value", [-1, -(2**31)])
def test_negative_columns_are_refused_where_they_are_no_padding(whole, value, tmp_path):
    altered(whole, tmp_path / "s", "column_indices", set_to(7, value))
    if whole.name not in ("coo", "csr", "bsr", "hyb"):
        pytest.skip("negative columns are padding")

    refuse(tmp_path / "s", f"column_indices hold {value}, outside 0 to")


def test_blocks_left_of_the_diagonal_are_refused_in_half_a_matrix(whole, tmp_path):
    if whole.name != "symmetric_bsr":
        pytest.skip("only half of a matrix has none there")
    altered(whole, tmp_path / "s", "column_indices", set_to(0, 3))

    refuse(tmp_path / "s", "block row 96 holds a block left of the diagonal")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"penstock_store": 2, "checksum": ' + "[" * 100_000, '{"penstock_store": 2}']
)
def test_an_index_that_is_nested_deeply_or_empty_is_refused(whole, text, tmp_path):
    shutil.copytree(whole, tmp_path / "s")
    (tmp_path / "s" / "index.json").write_text(text)

    with pytest.raises(StoreError, match="build the store again"):
        FileStore(tmp_path / "s")


@pytest.fixture
def settled(whole, tmp_path):
    """A copy of a store that is old enough for an alteration to show in its times."""
    shutil.copytree(whole, tmp_path / "open")
    time.sleep(0.15)
    return tmp_path / "open"


def overwrite(path, content):
    """Overwrite the second half of the slabs in place."""
    with open(path / "slabs.bin", "r+b") as file:
        half = os.path.getsize(file.name) // 2
        file.seek(half)
        file.write(np.resize(content, half // content.itemsize).tobytes())


def sweep_twice(streamed, x):
    """Sweep and sweep again, because a sweep begins with what the one before it has read ahead."""
    return [streamed @ x for _ in range(2)]


@pytest.mark.parametrize("content", [np.array([0x3FFFFFFF], "<i4"), np.array([7.0])])
def test_a_store_that_is_altered_while_it_is_open_is_refused(settled, content):
    x = np.ones(BEAM.unknowns)
    with FileStore(settled) as store, StreamedMatrix(store, 2 * max(store.index.sizes["whole"])) as streamed:
        streamed @ x
        streamed @ x
        overwrite(settled, content)
        with pytest.raises(StoreError, match=r"subdivision \d \(rows .* was altered while it was open"):
            sweep_twice(streamed, x)


def test_a_store_that_is_touched_while_it_is_open_is_verified_again(settled, monkeypatch):
    x, verified = np.ones(BEAM.unknowns), []
    check = MatrixIndex.check_structure
    monkeypatch.setattr(
        MatrixIndex,
        "check_structure",
        lambda self, number, *rest: verified.append(number) or check(self, number, *rest),
    )
    with FileStore(settled) as store, StreamedMatrix(store, 2 * max(store.index.sizes["whole"])) as streamed:
        y = streamed @ x
        for _ in range(3):
            streamed @ x
        assert sorted(verified) == [0, 1, 2]
        os.utime(settled / "slabs.bin")
        time.sleep(0.15)
        for _ in range(4):
            assert np.allclose(streamed @ x, y)
        assert {0, 2} <= set(verified[3:])
        assert len(verified[3:]) <= 5, "twice, if it was read ahead before it was touched"


def test_a_store_that_was_just_written_is_verified_until_its_times_would_show_an_alteration(settled, monkeypatch):
    monkeypatch.setattr(file_store, "_CLOCK_TICK", 10**15)  # as if everything happened in one tick
    with FileStore(settled) as store:
        buffer = np.empty(max(store.index.sizes["whole"]) + 4096, np.uint8)
        buffer = buffer[-buffer.ctypes.data % 4096 :]
        store.read_into(2, buffer)
        monkeypatch.setattr(file_store, "_state_of", lambda file: store._opened)  # the times stay
        overwrite(settled, np.array([7.0]))
        with pytest.raises(StoreError, match="does not match its checksum"):
            store.read_into(2, buffer)


def test_every_read_is_verified_if_asked_for(settled, monkeypatch):
    x = np.ones(BEAM.unknowns)
    with FileStore(settled, verify="always") as store:
        monkeypatch.setattr(
            file_store, "_state_of", lambda file: store._opened
        )  # a disk that fails leaves the times alone
        with StreamedMatrix(store, 2 * max(store.index.sizes["whole"])) as streamed:
            streamed @ x
            overwrite(settled, np.array([7.0]))
            with pytest.raises(StoreError, match="does not match its checksum"):
                sweep_twice(streamed, x)
    with pytest.raises(InputError, match="'once' or 'always'"):
        FileStore(settled, verify="never")
