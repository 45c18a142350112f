"""Stores are data: offsets and indices that lead out of a slab are refused when it is first read, though checksums fit."""

import json
import shutil
import zlib

import numpy as np
import pytest

from penstock.fem import Cantilever
from penstock.spmv import StoreError
from penstock.spmv.formats.base import format_names
from penstock.streaming import FileStore, StreamedMatrix
from penstock.streaming.stores import file_store

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
    checksum = file_store._json_checksum(data)
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
