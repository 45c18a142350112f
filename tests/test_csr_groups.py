"""Groups of CSR arrays in HDF5 and Zarr come in slabs, and whatever is wrong with one is an error in a line."""

import json
import shutil
import sys
import types

import h5py
import numpy as np
import pytest
import scipy.sparse
import zarr

import penstock
from penstock import petsc_files
from penstock.matrix_files import read_matrix, slabs_of
from penstock.spmv import InputError
from penstock.stored import store_files

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
    monkeypatch.setattr(petsc_files, "_SLAB_ENTRIES", 2000)
    shape, nnz, rows = slabs_of(tmp_path / "a")
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
    monkeypatch.setattr(petsc_files, "_SLAB_ENTRIES", 10)
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
    monkeypatch.setattr("penstock.array_files.available_nbytes", lambda: 100_000)
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
