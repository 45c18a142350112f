"""Numbers read from files with all cores, and the matrices that are read so."""

import h5py
import numpy as np
import pytest
import scipy.sparse

from penstock.fem import Cantilever
from penstock.files import hdf5, parallel_read
from penstock.files.registry import read_matrix, read_unchecked
from penstock.spmv import InputError
from penstock.spmv.unchecked import lies_in_file

A = scipy.sparse.csr_array(Cantilever(nodes=(17, 7, 6), dof=3).matrix("csr").to_csr())


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(parallel_read, "PIECE_NBYTES", 1000)
    monkeypatch.setattr(hdf5, "_LONG_NBYTES", 0)


@pytest.mark.parametrize("dtype", ["<f8", ">f8", "<i4", ">i4", ">i8", "<f4"])
@pytest.mark.parametrize("count", [0, 1, 125, 126, 7001])
def test_numbers_of_either_byte_order(tmp_path, dtype, count):
    numbers = (np.random.default_rng(0).random(count) * 1000).astype(dtype)
    (tmp_path / "numbers").write_bytes(b"abc" + numbers.tobytes())

    found = parallel_read.read_numbers(tmp_path / "numbers", 3, count, dtype)

    assert found.dtype.isnative
    assert np.array_equal(found, numbers)


def test_a_file_that_ends_early_is_an_error(tmp_path):
    (tmp_path / "numbers").write_bytes(bytes(800))

    with pytest.raises(EOFError, match="ends after 800 bytes"):
        parallel_read.read_numbers(tmp_path / "numbers", 0, 101, "<f8")


def test_reading_where_the_system_has_no_preadv(tmp_path, monkeypatch):
    (tmp_path / "numbers").write_bytes(np.arange(999.0).tobytes())
    monkeypatch.delattr("os.preadv")

    assert np.array_equal(parallel_read.read_numbers(tmp_path / "numbers", 0, 999, "<f8"), np.arange(999.0))


def write_petsc(path, matrix, integer=">i4"):
    header = np.array([1211216, *matrix.shape, matrix.nnz], integer)
    lengths = np.diff(matrix.indptr).astype(integer)
    path.write_bytes(
        header.tobytes()
        + lengths.tobytes()
        + matrix.indices.astype(integer).tobytes()
        + matrix.data.astype(">f8").tobytes()
    )


def write_hdf5(path, matrix, **options):
    with h5py.File(path, "w") as file:
        for name in ("data", "indices", "indptr"):
            file.create_dataset(name, data=getattr(matrix, name), **options)


@pytest.mark.parametrize("form", ["petsc 32", "petsc 64", "contiguous", "chunked", "big-endian"])
def test_matrices_are_read_whole(tmp_path, form):
    if form.startswith("petsc"):
        path = tmp_path / "matrix.petsc"
        write_petsc(path, A, ">i4" if form == "petsc 32" else ">i8")
    else:
        path = tmp_path / "matrix.h5"
        options = {"chunks": (777,), "compression": "gzip"} if form == "chunked" else {}
        write_hdf5(path, A, **options)
        if form == "big-endian":
            with h5py.File(path, "a") as file:
                del file["data"]
                file.create_dataset("data", data=A.data.astype(">f8"))

    matrix, canonical = read_unchecked(path)

    for found in (matrix, canonical(), read_matrix(path).matrix):
        assert np.array_equal(found.indptr, A.indptr)
        assert np.array_equal(found.indices, A.indices)
        assert np.array_equal(found.data, A.data)


def test_a_column_outside_the_matrix_is_named(tmp_path):
    damaged = A.copy()
    damaged.indices[70] = A.shape[1]
    write_petsc(tmp_path / "matrix.petsc", damaged)

    with pytest.raises(InputError, match="columns outside the matrix"):
        read_unchecked(tmp_path / "matrix.petsc")


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int16])
def test_repeated_entries_of_short_integers_are_summed_as_float64(tmp_path, dtype):
    places = np.array([0, 1, 1, 1])
    value = dtype(100)
    A = scipy.sparse.coo_array((np.full(4, value), (places, places)), shape=(2, 2))
    scipy.sparse.save_npz(tmp_path / "matrix.npz", A)

    matrix, canonical = read_unchecked(tmp_path / "matrix.npz")

    assert matrix.diagonal().tolist() == [float(value), 3 * float(value)]
    assert (canonical() != matrix).nnz == 0


def test_values_of_float32_become_float64(tmp_path):
    scipy.sparse.save_npz(tmp_path / "matrix.npz", A.astype(np.float32))

    assert read_unchecked(tmp_path / "matrix.npz")[0].dtype == np.float64


def test_the_format_of_a_matrix_may_be_text(tmp_path):
    arrays = {"data": A.data, "indices": A.indices, "indptr": A.indptr, "shape": A.shape}
    np.savez(tmp_path / "matrix.npz", format="csr", **arrays)

    assert (read_matrix(tmp_path / "matrix.npz").matrix != A).nnz == 0


def test_integers_of_24_bits_are_converted_by_hdf5(tmp_path):
    kind = h5py.h5t.STD_I32LE.copy()
    kind.set_precision(24)
    kind.set_offset(8)
    with h5py.File(tmp_path / "matrix.h5", "w") as file:
        file["indices"], file["indptr"] = np.arange(16), np.arange(17)
        space = h5py.h5s.create_simple((16,))
        h5py.h5d.create(file.id, b"data", kind, space).write(h5py.h5s.ALL, h5py.h5s.ALL, np.full(16, 4.0))

    assert read_matrix(tmp_path / "matrix.h5").matrix.diagonal().tolist() == [4.0] * 16


@pytest.mark.parametrize("byte_order", ["<", ">"])
@pytest.mark.parametrize("chunks", [None, (500,)])
def test_arrays_of_hdf5_may_stay_in_the_file(tmp_path, byte_order, chunks):
    with h5py.File(tmp_path / "A.h5", "w") as file:
        for name, array, number in (("data", A.data, "f8"), ("indices", A.indices, "i4"), ("indptr", A.indptr, "i4")):
            file.create_dataset(name, data=array.astype(byte_order + number), chunks=chunks)
        file["shape"] = A.shape

    found, sound = read_unchecked(tmp_path / "A.h5", in_file=True)

    assert (found != A).nnz == 0
    assert (sound() != A).nnz == 0
    in_file = byte_order == "<" and chunks is None
    assert lies_in_file(found.data) == in_file
    assert lies_in_file(found.indices) == in_file


def test_a_file_of_hdf5_that_ends_early_is_refused_where_its_arrays_stay(tmp_path):
    with h5py.File(tmp_path / "A.h5", "w") as file:
        for name, array in (("indptr", A.indptr), ("indices", A.indices), ("data", A.data)):
            file.create_dataset(name, data=array)
        file["shape"] = A.shape
    content = (tmp_path / "A.h5").read_bytes()
    (tmp_path / "A.h5").write_bytes(content[: len(content) // 2])

    with pytest.raises(InputError):
        read_unchecked(tmp_path / "A.h5", in_file=True)
