"""Files of NumPy from anywhere: nothing is run, nothing larger than file or memory is made, every error names the file."""

import io
import pickle
import zipfile

import numpy as np
import pytest
import scipy.sparse

from penstock.files.arrays import ArrayArchive, open_array
from penstock.files.registry import read_matrix
from penstock.spmv import InputError
from penstock.spmv.host_memory import available_nbytes


def saved(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


WHOLE = saved(np.arange(12.0).reshape(3, 4))


@pytest.mark.parametrize("array", [np.arange(5), np.zeros((0, 3)), np.asfortranarray(np.arange(6.0).reshape(2, 3))])
def test_an_array_is_mapped_as_it_was_saved(array, tmp_path):
    (tmp_path / "a.npy").write_bytes(saved(array))
    read = open_array(tmp_path / "a.npy")

    np.testing.assert_array_equal(read, array)
    assert read.dtype == array.dtype


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "cannot read"),
        (WHOLE[:-1], "bytes instead of"),
        (WHOLE + b"x", "bytes instead of"),
        (WHOLE.replace(b"(3, 4)", b"(9, 9)"), "bytes instead of"),
        (WHOLE.replace(b"(3, 4)", b"(-3, 4)"[:6]), "cannot read|bytes instead"),
        (WHOLE.replace(b"<f8", b"|O8"), "Python objects|cannot read"),
        (WHOLE.replace(b"{'descr'", b"[[[[[[[["), "cannot read"),
        (pickle.dumps(print), "cannot read"),
        (saved(np.array([{}], dtype=object), allow_pickle=True), "Python objects, which could run code"),
    ],
)
def test_a_damaged_or_dangerous_array_is_refused(content, told, tmp_path):
    (tmp_path / "a.npy").write_bytes(content)

    with pytest.raises(InputError, match=told):
        open_array(tmp_path / "a.npy")


def test_paths_that_are_none_are_refused(tmp_path):
    for path, told in (
        (tmp_path, "is not a file"),
        (tmp_path / "none.npy", "does not exist"),
        (tmp_path / "a\0", "no path|does not exist"),
    ):
        with pytest.raises(InputError, match=told):
            open_array(path)


def test_a_bomb_in_an_archive_is_seen_by_its_headers(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in {
            "format": np.array(b"csr"),
            "shape": np.array([2, 2]),
            "indptr": np.array([0, 1, 2]),
            "indices": np.array([0, 1]),
        }.items():
            archive.writestr(name + ".npy", saved(array))
        archive.writestr("data.npy", saved(np.zeros(1_000_000)))

    with pytest.raises(InputError, match="its values and indices have the shapes"):
        read_matrix(tmp_path / "bomb.npz")


def test_indices_that_are_no_whole_numbers_are_refused(tmp_path):
    np.savez(tmp_path / "m.npz", format=b"csr", shape=[2, 2], data=np.ones(2), indices=[0j, 1j], indptr=[0, 1, 2])

    with pytest.raises(InputError, match="its indices are of type complex128, not whole numbers"):
        read_matrix(tmp_path / "m.npz")


def test_an_array_that_does_not_fit_the_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", x=np.zeros(1000))
    scipy.sparse.save_npz(tmp_path / "m.npz", scipy.sparse.eye_array(1000, format="csr"))
    monkeypatch.setattr("penstock.files.arrays.available_nbytes", lambda: 5000)

    with (
        ArrayArchive(tmp_path / "a.npz") as archive,
        pytest.raises(InputError, match=r"array 'x' of .* takes 7\.8\d* KiB"),
    ):
        archive.read("x")
    with pytest.raises(InputError, match=r"the matrix in .* takes"):
        read_matrix(tmp_path / "m.npz")


def test_a_member_longer_than_its_shape_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", saved(np.zeros(4)) + b"more")

    with pytest.raises(InputError, match=r"x\.npy is not as long as its shape \(4,\) says"):
        ArrayArchive(tmp_path / "a.npz")


def test_some_memory_is_available():
    assert 1 << 20 < available_nbytes() < 1 << 50
