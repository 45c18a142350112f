"""Matrices of MATLAB files: those of SciPy come back, and what is damaged or too large is one error before it is made."""

import struct
import zlib

import numpy as np
import pytest
import scipy.io
import scipy.sparse

from penstock.files import arrays as array_files
from penstock.files.registry import read_matrix
from penstock.files.to_store import store_files
from penstock.spmv import InputError

N = 50
LINE = scipy.sparse.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(N, N)).tocsc()
HEADER = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
CELLS, SPARSE = 1, 5


def element(kind, data):
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


def array(kind, shape, name, *parts, flags=0):
    header = element(6, struct.pack("<II", kind | flags, 0)) + element(5, struct.pack(f"<{len(shape)}i", *shape))
    return element(14, header + element(1, name.encode()) + b"".join(parts))


def sparse(shape, rows, offsets, values, name="A", **options):
    parts = (element(5, np.asarray(of, "<i4").tobytes()) for of in (rows, offsets))
    return array(SPARSE, shape, name, *parts, element(9, np.asarray(values, "<f8").tobytes()), **options)


def compressed(text):
    packed = zlib.compress(text)
    return struct.pack("<II", 15, len(packed)) + packed


@pytest.fixture
def read(tmp_path):
    def write_and_read(*variables, header=HEADER):
        (tmp_path / "a.mat").write_bytes(header + b"".join(variables))
        return read_matrix(tmp_path / "a.mat").matrix

    return write_and_read


@pytest.mark.parametrize("do_compression", [False, True])
@pytest.mark.parametrize("kind", ["f8", "f4", "i2", "?"])
@pytest.mark.parametrize("beside", [{}, {"text": "words", "dense": np.eye(3), "of": {"a": [1, 2, "x"]}}])
def test_what_scipy_writes_comes_back(tmp_path, do_compression, kind, beside):
    A = abs(LINE).astype(kind)
    scipy.io.savemat(tmp_path / "a.mat", {**beside, "A": A}, do_compression=do_compression)
    assert abs(read_matrix(tmp_path / "a.mat").matrix - A.astype(float)).nnz == 0


@pytest.mark.parametrize("do_compression", [False, True])
def test_problem_a_is_read_whatever_is_beside_it(tmp_path, do_compression):
    problem = {
        "name": "HB/line",
        "notes": np.array(["a", "bc"]),
        "aux": {"b": np.ones(3), "M": LINE},
        "A": LINE,
        "id": 7,
    }
    scipy.io.savemat(tmp_path / "a.mat", {"other": LINE, "Problem": problem}, do_compression=do_compression)
    assert abs(read_matrix(tmp_path / "a.mat").matrix - LINE).nnz == 0


def test_version_4_is_read(tmp_path):
    scipy.io.savemat(tmp_path / "a.mat", {"A": LINE}, format="4")
    assert abs(read_matrix(tmp_path / "a.mat").matrix - LINE).nnz == 0


def test_room_for_more_entries_is_no_entry(read):
    assert read(sparse((2, 2), [0, 1, 7, 7], [0, 1, 2], [3.0, 4.0, 9, 9])).toarray().tolist() == [[3, 0], [0, 4]]


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        (sparse((2, 2), [0, 2], [0, 1, 2], [3.0, 4.0]), "a row index is 2, outside 0 to 1"),
        (sparse((2, 2), [0, -1], [0, 1, 2], [3.0, 4.0]), "a row index is -1, outside 0 to 1"),
        (sparse((2, 2), [0, 1], [0, 2, 1], [3.0, 4.0]), "index pointer|offsets|same size"),
        (sparse((2, 2), [0, 1], [0, 1, 9], [3.0, 4.0]), "index pointer|offsets"),
        (sparse((2, 3), [0, 1], [0, 1, 2], [3.0, 4.0]), "index pointer size 3 should be 4"),
        (sparse((2, 2), [0, 1], [0, 1, 2], [3.0, 4.0], flags=0x0800), "complex"),
        (sparse((2**31 - 1, 2), [0, 1], [0, 1, 2], [3.0, 4.0]), "nearly all rows would be empty"),
        (sparse((-2, 2), [0, 1], [0, 1, 2], [3.0, 4.0]), "damaged"),
        (sparse((2, 2), [0, 1], [0, 1, 2], [3.0, 4.0])[:-9], "ends before"),
        (array(SPARSE, (2, 2), "A", element(5, b""), element(14, b"")), "damaged"),
        (array(CELLS, (2**31 - 1, 1), "A"), "holds 0 sparse matrices"),
        (compressed(array(CELLS, (2**31 - 1, 1), "A")), "holds 0 sparse matrices"),
        (element(6, bytes(8)), "element of type 6"),
        (sparse((2, 2), [0], [0, 1, 1], [3.0]) + sparse((2, 2), [0], [0, 1, 1], [3.0], name="B"), "holds 2 sparse"),
    ],
)
def test_a_damaged_file_is_one_error(read, variable, advice):
    with pytest.raises(InputError, match=rf"a\.mat.*({advice})"):
        read(variable)


def read_or_refused(path, content):
    """Return what is read of a file, or None if it is refused."""
    path.write_bytes(content)
    try:
        return read_matrix(path).matrix
    except InputError as error:
        return None if path.name in str(error) else pytest.fail(f"{error} names no file")


def test_a_file_cut_off_is_refused_unless_only_padding_is_lost(tmp_path):
    for packed in (False, True):
        scipy.io.savemat(tmp_path / "whole.mat", {"x": 1.0, "A": LINE}, do_compression=packed)
        whole = (tmp_path / "whole.mat").read_bytes()
        for length in range(0, len(whole), 7):
            A = read_or_refused(tmp_path / "a.mat", whole[:length])
            assert A is None or (not packed and len(whole) - length < 8 and abs(A - LINE).nnz == 0)


def test_an_altered_byte_of_a_compressed_file_is_noticed_or_without_effect(tmp_path):
    scipy.io.savemat(tmp_path / "a.mat", {"A": LINE}, do_compression=True)
    whole, read = (tmp_path / "a.mat").read_bytes(), 0
    for place in range(136, len(whole)):
        A = read_or_refused(tmp_path / "a.mat", whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        assert A is None or abs(A - LINE).nnz == 0
        read += A is not None
    assert read < 5


@pytest.mark.parametrize("use", [read_matrix, lambda path: store_files([path], path.parent / "store")])
def test_what_is_compressed_a_thousandfold_is_refused_before_it_is_made(tmp_path, monkeypatch, use):
    count = 1 << 20
    text = compressed(sparse((1, 1), np.zeros(count), [0, count], np.zeros(count)))
    (tmp_path / "a.mat").write_bytes(HEADER + text)
    assert len(text) < 1 << 15
    monkeypatch.setattr(array_files, "available_nbytes", lambda: 4 << 20)
    with pytest.raises(InputError, match=r"takes 8 MiB, but 4 MiB of memory are available"):
        use(tmp_path / "a.mat")
    monkeypatch.setattr(array_files, "available_nbytes", lambda: 100 << 20)
    with pytest.raises(InputError, match=r"1 rows with 1048576 entries takes 112 MiB, but 100 MiB"):
        store_files([tmp_path / "a.mat"], tmp_path / "store")
    assert not (tmp_path / "store").exists()
