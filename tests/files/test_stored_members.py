"""Large stored members of zip archives, read with all cores."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import gpu_count

import penstock
from penstock.fem import Cantilever
from penstock.files import parallel_read, stored_members
from penstock.files.arrays import ArrayArchive
from penstock.files.registry import read_unchecked
from penstock.files.slabs import narrow_offsets
from penstock.host import checksums
from penstock.spmv import CPU, InputError
from penstock.spmv.unchecked import UncheckedEntries, lies_in_file


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(stored_members, "LEAST_NBYTES", 0)
    monkeypatch.setattr(parallel_read, "PIECE_NBYTES", 1000)
    monkeypatch.setattr(checksums, "PIECE_NBYTES", 1000)


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8])
def test_arrays_are_those_of_numpy(tmp_path, dtype, order, in_file):
    array = np.asarray(np.random.default_rng(2).random((123, 45)) * 100, dtype=dtype, order=order)
    np.savez(tmp_path / "arrays.npz", one=array, empty=np.empty((0, 3)), two=array[:1])

    with ArrayArchive(tmp_path / "arrays.npz") as archive:
        found = [archive.read(name, in_file=in_file) for name in ("one", "empty", "two")]

    assert all(np.array_equal(*pair) for pair in zip(found, (array, np.empty((0, 3)), array[:1]), strict=True))
    assert found[0].flags.f_contiguous == (order == "F")


@pytest.mark.parametrize("in_file", [False, True])
def test_a_flipped_bit_is_found(tmp_path, in_file):
    np.savez(tmp_path / "arrays.npz", one=np.arange(5000.0))
    content = bytearray((tmp_path / "arrays.npz").read_bytes())
    content[20_000] ^= 1
    (tmp_path / "arrays.npz").write_bytes(content)

    with (
        ArrayArchive(tmp_path / "arrays.npz") as archive,
        pytest.raises(InputError, match=r"checksum of one\.npy is wrong"),
    ):
        archive.read("one", in_file=in_file)


def test_a_matrix_for_a_gpu_stays_in_the_file_until_a_host_needs_it(tmp_path):
    A = scipy.sparse.random_array((300, 300), density=0.1, rng=3).tocsr()
    A.indices, A.indptr = A.indices.astype(np.int32), A.indptr.astype(np.int32)
    scipy.sparse.save_npz(tmp_path / "matrix.npz", A, compressed=False)

    matrix, _ = read_unchecked(tmp_path / "matrix.npz", in_file=True)
    entries = UncheckedEntries.of(matrix, in_file=True)

    assert all(lies_in_file(array) for array in entries.arrays().values())
    assert not any(lies_in_file(array) for array in read_unchecked(tmp_path / "matrix.npz")[0].__dict__.values())
    assert not any(lies_in_file(array) for array in entries.owned().arrays().values())
    on_host = entries.to_device(CPU)
    assert not any(lies_in_file(array) for array in on_host.arrays().values())
    assert all(array.flags.aligned for array in on_host.arrays().values())
    assert (on_host.to_csr() != A).nnz == 0


def test_what_has_been_read_into_memory_is_not_copied(tmp_path):
    A = scipy.sparse.random_array((300, 300), density=0.1, rng=3).tocsr()
    scipy.sparse.save_npz(tmp_path / "matrix.npz", A)

    entries = UncheckedEntries.of(read_unchecked(tmp_path / "matrix.npz", in_file=True)[0], in_file=True)

    assert np.shares_memory(entries.owned().values, entries.values)


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


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")
@pytest.mark.parametrize("form", ["csr", "bsr"])
@pytest.mark.parametrize("memory", [None, 200_000])
def test_a_gpu_solves_with_a_matrix_in_a_file(tmp_path, form, memory):
    A = Cantilever(nodes=(9, 6, 5), dof=3).matrix("csr").to_csr().asformat(form)
    scipy.sparse.save_npz(tmp_path / "matrix.npz", A, compressed=False)
    b = np.random.default_rng(0).standard_normal(A.shape[0])

    found = penstock.solve(tmp_path / "matrix.npz", b, device="cuda", memory=memory)

    assert np.linalg.norm(A @ found.x - b) <= 1e-8 * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("change", "stays"),
    [
        ({}, True),
        ({"data": np.float32}, False),
        ({"data": ">f8"}, False),
        ({"indices": ">i4", "indptr": ">i4"}, True),
        ({"indptr": np.int64}, True),
    ],
)
def test_only_what_is_used_as_it_is_stays_in_a_file_and_needs_no_memory(tmp_path, monkeypatch, change, stays):
    A = scipy.sparse.random_array((300, 300), density=0.1, rng=3).tocsr()
    arrays = {"data": A.data, "indices": A.indices.astype(np.int32), "indptr": A.indptr.astype(np.int32)}
    arrays |= {name: arrays[name].astype(dtype) for name, dtype in change.items()}
    np.savez(tmp_path / "matrix.npz", format=b"csr", shape=A.shape, **arrays)

    matrix, _ = read_unchecked(tmp_path / "matrix.npz", in_file=True)

    assert (matrix != A.astype(arrays["data"].dtype.newbyteorder("=")).astype(np.float64)).nnz == 0
    assert lies_in_file(matrix.data) == stays
    monkeypatch.setattr("penstock.files.arrays.available_nbytes", lambda: 30_000)
    if stays and lies_in_file(matrix.indices):
        read_unchecked(tmp_path / "matrix.npz", in_file=True)
    else:
        with pytest.raises(InputError, match="are available"):
            read_unchecked(tmp_path / "matrix.npz", in_file=True)


def test_what_the_system_does_not_map_is_read(tmp_path, monkeypatch):
    A = scipy.sparse.random_array((300, 300), density=0.1, rng=3).tocsr()
    scipy.sparse.save_npz(tmp_path / "matrix.npz", A, compressed=False)

    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("penstock.files.arrays.map_stored", refuse)

    assert (read_unchecked(tmp_path / "matrix.npz", in_file=True)[0] != A).nnz == 0


def test_offsets_beyond_32_bits_are_not_wrapped():
    columns = np.zeros(3, dtype=np.int32)

    assert narrow_offsets(np.array([0, 1, 3]), columns).dtype == np.int32
    for damaged in ([0, (1 << 32) + 1, 3], [0, -1, 3]):
        assert np.array_equal(narrow_offsets(np.array(damaged), columns), damaged)
