"""Groups of CSR arrays in HDF5 and Zarr come in slabs, and whatever is wrong with one is an error in a line."""

import json
import os
import shutil
import sys
import types

import h5py
import numpy as np
import pytest
import scipy.sparse
import zarr

import penstock
from penstock.files import arrays as array_files
from penstock.files import slabs as slab_files
from penstock.files.registry import read_matrix, slabs_of
from penstock.files.to_store import store_files
from penstock.spmv import InputError

N = 3000
LINE = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(N, N)).tocsr()


def zarr_with(path, group="", version=3, **options):
    inside = zarr.open_group(path, mode="a", zarr_format=version)
    inside = inside.require_group(group) if group else inside
    for name in ("data", "indices", "indptr"):
        inside.create_array(name, data=getattr(LINE, name), **{"chunks": (1000,)} | options)
    return inside


def described(path, name, **changes):
    """Alter the description of an array of version 2 or 3."""
    file = next(file for file in (path / name / ".zarray", path / name / "zarr.json") if file.exists())
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("version", [2, 3])
def test_a_matrix_in_the_folder_itself_comes_in_slabs(tmp_path, monkeypatch, version):
    zarr_with(tmp_path / "a", version=version)
    monkeypatch.setattr(slab_files, "_SLAB_ENTRIES", 2000)
    shape, nnz, rows, _ = slabs_of(tmp_path / "a")
    slabs = list(rows)
    assert (shape, nnz, len(slabs)) == (LINE.shape, LINE.nnz, 4)
    assert abs(scipy.sparse.vstack(slabs) - LINE).nnz == 0


def test_shards_and_arrays_of_other_byte_orders_are_read(tmp_path):
    zarr_with(tmp_path / "a.zarr", chunks=(100,), shards=(1000,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, kind in (("data", ">f4"), ("indices", ">u8"), ("indptr", ">i8")):
            file[name] = getattr(LINE, name).astype(kind)
        file["shape"] = LINE.shape
    for name in ("a.zarr", "a.h5"):
        assert abs(read_matrix(tmp_path / name).matrix - LINE).nnz == 0


def test_a_slab_is_as_long_as_a_chunk_which_is_then_read_once(tmp_path, monkeypatch):
    zarr_with(tmp_path / "a", chunks=(4000,))
    monkeypatch.setattr(slab_files, "_SLAB_ENTRIES", 10)
    assert len(list(slabs_of(tmp_path / "a").rows)) == 4


def test_a_system_is_solved_from_zarr(tmp_path):
    zarr_with(tmp_path / "a.zarr")
    result = penstock.solve(tmp_path / "a.zarr", np.ones(N), device="cpu", rtol=1e-6)
    assert result.converged


def test_of_several_matrices_one_is_named(tmp_path):
    for group in ("X", "obsp/connectivities"):
        zarr_with(tmp_path / "a", group)
    with pytest.raises(InputError, match="2 matrices: X, obsp/connectivities; add one of them to the path"):
        read_matrix(tmp_path / "a")
    assert read_matrix(tmp_path / "a" / "obsp" / "connectivities").matrix.nnz == LINE.nnz


def lost_chunk(path):
    (path / "indices" / "c" / "3").unlink()


def strange_file(path):
    lost_chunk(path)
    (path / "indices" / "c" / ".3.AbCdEf").write_bytes(b"left by a copy that was interrupted")
    (path / "indices" / "c" / "17").write_bytes(b"left from when the array was longer")


def shape_array(length, **options):
    return lambda path: zarr.open_group(path).create_array(
        "shape", shape=(length,), dtype="int64", chunks=(1,), fill_value=N, **options
    )


ATTACKS = {
    "a chunk is lost": (lost_chunk, "8 of 9 chunks of indices"),
    "a chunk is lost and other files lie there": (strange_file, "8 of 9 chunks of indices"),
    "a shape of many numbers": (shape_array(10**12), "of 1000000000000 chunks of shape"),
    "a shape that was not written": (shape_array(2), "0 of 2 chunks of shape"),
    "sizes that no memory holds": (
        lambda path: described(
            path, "indptr", shape=[10**15], chunk_grid={"name": "regular", "configuration": {"chunk_shape": [10**15]}}
        ),
        "of memory are available",
    ),
    "more chunks than files": (lambda path: described(path, "indptr", shape=[10**15]), "of 1000000000000 chunks"),
    "other entries": (lambda path: described(path, "data", shape=[10]), "do not fit its entries"),
    "two dimensions": (lambda path: described(path, "indptr", shape=[1, 2]), "number of dimensions"),
    "of text": (lambda path: described(path, "indices", data_type="string"), "string"),
    "no JSON": (lambda path: (path / "data" / "zarr.json").write_text("{"), "expected an undamaged matrix in Zarr"),
    "an array lost": (lambda path: shutil.rmtree(path / "data"), "no group with data, indices and indptr"),
    "a chunk cut off": (lambda path: (path / "data" / "c" / "1").write_bytes(b"123"), "cannot read"),
    "another shape": (lambda path: zarr.open_group(path).attrs.update(shape=[5, 5]), "offsets of 3000 rows"),
    "too few columns": (lambda path: zarr.open_group(path).attrs.update(shape=[N, 5]), "columns outside"),
    "of columns": (lambda path: zarr.open_group(path).attrs.update({"encoding-type": "csc_matrix"}), "write it in CSR"),
    "offsets that fall": (lambda path: zarr.open_group(path)["indptr"].__setitem__(7, 10**6), "do not fit its entries"),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("way", ["read", "store"])
def test_what_is_wrong_is_one_error_and_leaves_nothing(tmp_path, attack, way):
    path, (act, advice) = tmp_path / "a", ATTACKS[attack]
    zarr_with(path)
    act(path)
    with pytest.raises(InputError, match=advice) as caught:
        read_matrix(path) if way == "read" else store_files([path], tmp_path / "made")
    assert str(path) in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("version", [2, 3])
def test_no_codec_may_run_code(tmp_path, version):
    """Zarr refuses pickles of numbers itself; a codec that it takes and penstock does not know is refused here."""
    path = tmp_path / "a"
    zarr_with(path, version=version, **({"compressors": None} if version == 2 else {}))
    if version == 2:
        described(path, "data", filters=[{"id": "base64"}])
        advice = "data with the codec base64; write it with zstd"
    else:
        described(path, "data", codecs=[{"name": "bytes"}, {"name": "numcodecs.pickle", "configuration": {}}])
        advice = "pickle"
    with pytest.raises(InputError, match=advice):
        read_matrix(path)


def test_a_matrix_that_does_not_fit_is_refused_before_it_is_read(tmp_path, monkeypatch):
    zarr_with(tmp_path / "a")
    monkeypatch.setattr("penstock.files.arrays.available_nbytes", lambda: 100_000)
    with pytest.raises(InputError, match=r"the matrix in .* takes .* but 97"):
        read_matrix(tmp_path / "a")


@pytest.mark.parametrize(
    ("version", "advice"), [(None, "not installed"), ("2.18.7", "of version 2.18.7"), ("3.0.10", "of version 3.0.10")]
)
def test_without_zarr_the_error_says_how_to_install_it(tmp_path, monkeypatch, version, advice):
    zarr_with(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "zarr", version and types.SimpleNamespace(__version__=version))
    with pytest.raises(InputError, match=rf"{advice}: pip install 'penstock\[files\]'"):
        read_matrix(tmp_path / "a")


def test_a_folder_that_is_linked_to_itself_ends(tmp_path):
    zarr.open_group(tmp_path / "a", mode="w")
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")
    with pytest.raises(InputError, match="no group with"):
        read_matrix(tmp_path / "a")


def hdf5_with(path, **replaced):
    """Write a matrix in HDF5, of which some arrays are written by functions of the file."""
    with h5py.File(path, "w") as file:
        for name in ("data", "indices", "indptr"):
            replaced.get(name, lambda file, name=name: file.create_dataset(name, data=getattr(LINE, name)))(file)
    return path


def half_written(file):
    file.create_dataset("data", (LINE.nnz,), dtype="f8", chunks=(1000,))[:5000] = LINE.data[:5000]


def never_written(file):
    file.create_dataset("data", (LINE.nnz,), dtype="f8")


def virtual(file):
    layout = h5py.VirtualLayout((LINE.nnz,), "f8")
    layout[:] = h5py.VirtualSource("gone.h5", "d", (LINE.nnz,))
    file.create_virtual_dataset("data", layout)


def external(file):
    file.create_dataset("data", (LINE.nnz,), dtype="f8", external=[("/dev/zero", 0, LINE.nnz * 8)])


def external_link(file):
    file["data"] = h5py.ExternalLink("other.h5", "/data")


def link(file):
    file["data"] = h5py.SoftLink("/elsewhere")


def compressed_twice(file):
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_chunk((1000,))
    created.set_deflate(9)
    created.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (9,))
    space = h5py.h5s.create_simple((LINE.nnz,))
    data = h5py.h5d.create(file.id, b"data", h5py.h5t.NATIVE_DOUBLE, space, created)
    h5py.Dataset(data)[:] = LINE.data


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        (half_written, "has 5 of 9 chunks of data, and HDF5 takes missing ones for zeros"),
        (never_written, "has 0 of 71984 bytes of data"),
        (virtual, "takes data from other places"),
        (external, "takes data from other places"),
        (external_link, "has a link instead of data"),
        (link, "has a link instead of data"),
        (compressed_twice, "has data compressed several times"),
        (lambda file: file.create_group("data"), "its data is a group, not an array"),
    ],
)
def test_hdf5_that_is_not_whole_or_lies_elsewhere_is_refused(tmp_path, data, advice):
    with pytest.raises(InputError, match=advice):
        read_matrix(hdf5_with(tmp_path / "a.h5", data=data))


def test_groups_of_hdf5_that_contain_themselves_are_searched_once(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["loop/loop"] = file["/"]
        file["loop/out"] = h5py.ExternalLink("other.h5", "/")
        for name in ("data", "indices", "indptr"):
            file[f"z/{name}"] = getattr(LINE, name)
    assert abs(read_matrix(tmp_path / "a.h5").matrix - LINE).nnz == 0


def one_row(path, entries):
    """Write a row of so many zeros in a few kilobytes."""
    with h5py.File(path, "w") as file:
        for name in ("data", "indices"):
            file.create_dataset(name, (entries,), "i1", chunks=(1 << 16,), compression=9)[:] = 0
        file["indptr"], file.attrs["shape"] = [0, entries], (1, 1)


@pytest.mark.parametrize("use", [read_matrix, lambda path: store_files([path], path.parent / "store")])
def test_a_row_that_does_not_fit_the_memory_is_refused_before_it_is_read(tmp_path, monkeypatch, use):
    one_row(tmp_path / "a.h5", 1 << 20)
    assert (tmp_path / "a.h5").stat().st_size < 1 << 15
    assert use(tmp_path / "a.h5")
    if use is read_matrix:
        refused, room = r"the matrix in .*a.h5 takes 32 MiB, but 30 MiB", 30
    else:
        refused, room = r"rows 0 to 0 of .*a.h5 with 1048576 entries takes 112 MiB, but 100 MiB", 100
        (tmp_path / "store").rename(tmp_path / "before")
    monkeypatch.setattr(array_files, "available_nbytes", lambda: room << 20)
    with pytest.raises(InputError, match=refused):
        use(tmp_path / "a.h5")


def pipe(path):
    os.mkfifo(path / "extra")


def link_outside(path):
    (path / "indices" / "c" / "0").unlink()
    (path.parent / "private").write_bytes(bytes(8000))
    (path / "indices" / "c" / "0").symlink_to(path.parent / "private")


@pytest.mark.parametrize(
    ("alter", "advice"), [(pipe, "is neither a file nor a folder"), (link_outside, "is a link to a file outside")]
)
def test_zarr_reads_only_files_of_its_folder(tmp_path, alter, advice):
    zarr_with(tmp_path / "a.zarr")
    alter(tmp_path / "a.zarr")
    with pytest.raises(InputError, match=advice):
        read_matrix(tmp_path / "a.zarr")


def test_links_inside_a_zarr_folder_are_read(tmp_path):
    zarr_with(tmp_path / "a.zarr")
    chunk = tmp_path / "a.zarr" / "data" / "c" / "1"
    chunk.rename(tmp_path / "a.zarr" / "moved")
    chunk.symlink_to(tmp_path / "a.zarr" / "moved")
    assert abs(read_matrix(tmp_path / "a.zarr").matrix - LINE).nnz == 0


def test_zarr_that_is_compressed_twice_is_refused(tmp_path):
    zarr_with(tmp_path / "a.zarr", compressors=[zarr.codecs.GzipCodec(), zarr.codecs.ZstdCodec()])
    with pytest.raises(InputError, match="compressed several times"):
        read_matrix(tmp_path / "a.zarr")
