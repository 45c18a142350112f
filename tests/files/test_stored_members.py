"""Large stored members of zip archives, read with all cores."""

import zlib

import numpy as np
import pytest
import scipy.sparse

from penstock.files import parallel_read, stored_members
from penstock.files.arrays import ArrayArchive
from penstock.spmv import InputError


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(stored_members, "LEAST_NBYTES", 0)
    monkeypatch.setattr(parallel_read, "_PIECE_NBYTES", 1000)


@pytest.mark.parametrize("length", [0, 1, 7, 1000, 12_345])
def test_checksums_of_pieces_are_joined_as_zlib_joins_them(length):
    first, second = np.random.default_rng(0).bytes(333), np.random.default_rng(1).bytes(length)

    joined = stored_members._shifted(zlib.crc32(first), length) ^ zlib.crc32(second)

    assert joined == zlib.crc32(first + second)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8])
def test_arrays_are_those_of_numpy(tmp_path, dtype, order):
    array = np.asarray(np.random.default_rng(2).random((123, 45)) * 100, dtype=dtype, order=order)
    np.savez(tmp_path / "arrays.npz", one=array, empty=np.empty((0, 3)), two=array[:1])

    with ArrayArchive(tmp_path / "arrays.npz") as archive:
        found = [archive.read(name) for name in ("one", "empty", "two")]

    assert all(np.array_equal(*pair) for pair in zip(found, (array, np.empty((0, 3)), array[:1]), strict=True))
    assert found[0].flags.f_contiguous == (order == "F")


def test_a_flipped_bit_is_found(tmp_path):
    np.savez(tmp_path / "arrays.npz", one=np.arange(5000.0))
    content = bytearray((tmp_path / "arrays.npz").read_bytes())
    content[20_000] ^= 1
    (tmp_path / "arrays.npz").write_bytes(content)

    with (
        ArrayArchive(tmp_path / "arrays.npz") as archive,
        pytest.raises(InputError, match=r"checksum of one\.npy is wrong"),
    ):
        archive.read("one")


def test_compressed_members_are_read_too(tmp_path):
    np.savez_compressed(tmp_path / "arrays.npz", one=np.arange(5000.0))

    with ArrayArchive(tmp_path / "arrays.npz") as archive:
        assert np.array_equal(archive.read("one"), np.arange(5000.0))


@pytest.mark.parametrize("form", ["csr", "bsr"])
def test_matrices_of_scipy(tmp_path, form):
    A = scipy.sparse.random_array((300, 300), density=0.1, rng=3).asformat(form)
    scipy.sparse.save_npz(tmp_path / "matrix.npz", A, compressed=False)
    from penstock.files.registry import read_matrix

    assert (read_matrix(tmp_path / "matrix.npz").matrix != A).nnz == 0
