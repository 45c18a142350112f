"""Matrices of other programs become stores without being read whole, and are read as they were written."""

import h5py
import numpy as np
import pytest
import scipy.io
import scipy.sparse
import zarr
from typer.testing import CliRunner

from penstock import prepare
from penstock.commands.app import app
from penstock.experiments.systems.system_files import read_right_hand_sides
from penstock.fem import Cantilever
from penstock.files import petsc as petsc_files
from penstock.files import slabs as slab_files
from penstock.files.registry import read_matrix
from penstock.files.to_store import store_files
from penstock.spmv import InputError, StoreError
from penstock.streaming import FileStore, StoreBuilder, StreamedMatrix
from penstock.streaming.image import can_be_joined
from penstock.streaming.stores.whole import read_whole

BEAM = Cantilever(nodes=(33, 5, 5), dof=3)


@pytest.fixture(scope="module")
def A():
    return scipy.sparse.csr_array(BEAM.matrix("csr").to_csr())


def write_petsc(path, A, integer=">i4"):
    """Write a matrix as PETSc's MatView does."""
    with open(path, "wb") as file:
        header = [1211216, *A.shape, A.nnz]
        for numbers, kind in ((header, integer), (np.diff(A.indptr), integer), (A.indices, integer), (A.data, ">f8")):
            file.write(np.asarray(numbers).astype(kind).tobytes())


def write_zarr(path, A, version=3, group="system/K", **options):
    K = zarr.open_group(path, mode="a", zarr_format=version).require_group(group)
    for name in ("data", "indices", "indptr"):
        array = getattr(A, name)
        K.create_array(name, data=array, **{"chunks": (5000,)} | options)
    K.attrs.update({"shape": list(A.shape), "encoding-type": "csr_matrix"})


def write_hdf5(path, A, group="system/K"):
    with h5py.File(path, "w") as file:
        for name in ("data", "indices", "indptr"):
            file[f"{group}/{name}"] = getattr(A, name)
        file[group].attrs["shape"] = A.shape


@pytest.fixture(scope="module")
def files(A, tmp_path_factory):
    """One matrix in every kind of file."""
    folder = tmp_path_factory.mktemp("files")
    write_petsc(folder / "stiffness.petsc", A)
    write_petsc(folder / "long", A, ">i8")
    write_hdf5(folder / "a.h5", A)
    write_zarr(folder / "a.zarr", A)
    write_zarr(folder / "zarr-2", A, 2, compressors=None)
    scipy.io.savemat(folder / "a.mat", {"Problem": {"A": A.tocsc(), "name": "beam"}})
    scipy.io.savemat(folder / "b.mat", {"K": A.tocsc()})
    scipy.sparse.save_npz(folder / "a.npz", A)
    scipy.io.mmwrite(folder / "a.mtx", A, symmetry="symmetric", precision=17)
    FileStore.create(folder / "store", BEAM.subdivisions(3, "bsr")).close()
    FileStore.create(folder / "half", BEAM.subdivisions(3, "symmetric_bsr")).close()
    return folder


NAMES = ["stiffness.petsc", "long", "a.h5", "a.zarr", "zarr-2", "a.mat", "b.mat", "a.npz", "a.mtx"]


def same(found, expected, tolerance=0.0):
    difference = scipy.sparse.csr_array(found - expected)
    assert difference.nnz == 0 or abs(difference).max() <= tolerance * abs(expected).max()


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_is_read_as_a_matrix(files, A, name):
    same(read_matrix(files / name).matrix, A)


@pytest.mark.parametrize("name", [*NAMES, "store", "half"])
@pytest.mark.parametrize("options", [{}, {"format": "csr", "slab": "100 KiB", "memory": "400 KiB"}])
def test_every_kind_is_stored(files, A, tmp_path, name, options):
    with store_files([files / name], tmp_path / "made", **options) as store:
        same(read_whole(store), A, 1e-15)
        assert store.index.format_name == options.get("format", "symmetric_bsr" if name == "half" else "bsr")
        if options:
            assert len(store.index.subdivisions) > 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["made"]


@pytest.mark.parametrize("name", ["a.npz", "a.mtx", "store", "half"])
def test_half_a_matrix_is_cut_where_an_image_of_it_can_be_joined(files, A, tmp_path, name):
    with store_files([files / name], tmp_path / "made", format="symmetric_bsr", slab="20 KiB") as store:
        index, planes = store.index, store.planes
    with store_files([tmp_path / "made"], tmp_path / "again", slab="200 KiB") as again:
        assert (again.index.format_name, again.index.block_size, again.planes) == ("symmetric_bsr", 3, True)
        assert len(again.index.subdivisions) < len(index.subdivisions)
        same(read_whole(again), A, 1e-15)

    assert index.block_size == 3
    assert planes
    assert index.row_granularity == 96
    assert can_be_joined(index)
    assert max(of.nbytes for of in index.subdivisions) < 64 << 10
    with (
        FileStore(tmp_path / "made") as store,
        prepare(store, memory=int(0.6 * index.nbytes), precision="int16") as system,
    ):
        assert "an image of the matrix in int16" in system.explain()
        b = np.ones(A.shape[0])
        assert np.linalg.norm(b - A @ system.solve(b).x) <= 1e-8 * np.linalg.norm(b)


@pytest.mark.parametrize("rows", [0, 1, 4, 126])
@pytest.mark.parametrize("block_size", ["auto", 3])
def test_blocks_are_told_by_more_than_a_short_first_slab(A, tmp_path, rows, block_size):
    names = [tmp_path / "first.npz", tmp_path / "rest.npz"]
    for name, part in zip(names, (A[:rows], A[rows:]), strict=True):
        scipy.sparse.save_npz(name, part)
    with store_files(names, tmp_path / "made", format="symmetric_bsr", block_size=block_size, slab="100 KiB") as store:
        assert store.index.block_size == 3
        assert can_be_joined(store.index)
        same(read_whole(store), A, 1e-15)


def test_half_of_a_matrix_that_is_not_square_is_refused(A, tmp_path):
    scipy.sparse.save_npz(tmp_path / "a.npz", A[:, :840])
    with pytest.raises(InputError, match="stores half of a square matrix; this one has 2475 rows, 840 columns"):
        store_files([tmp_path / "a.npz"], tmp_path / "made", format="symmetric_bsr")


def test_a_store_that_is_cut_inside_chunks_is_streamed_in_float64(A, tmp_path):
    """Such stores were made of files until slabs ended at whole chunks."""
    slabs, b = (A[start : start + 330] for start in range(0, A.shape[0], 330)), np.ones(A.shape[0])
    with FileStore.create(tmp_path / "cut", slabs, format="symmetric_bsr", block_size=3) as store:
        memory = int(0.6 * store.index.nbytes)
        with pytest.raises(
            InputError, match=r"begin inside chunks of 96 rows; 'penstock store STORE ANOTHER' cuts it anew"
        ):
            prepare(store, memory=memory, precision="int16")
        with prepare(store, memory=memory) as system:
            assert np.linalg.norm(b - A @ system.solve(b).x) <= 1e-8 * np.linalg.norm(b)
    with store_files([tmp_path / "cut"], tmp_path / "anew", slab="50 KiB") as anew:
        prepare(anew, memory=memory, precision="int16").close()


@pytest.mark.parametrize("suffix", ["npz", "mtx", "petsc", "zarr"])
def test_rows_in_several_files_are_one_matrix(A, tmp_path, suffix):
    write = {
        "npz": scipy.sparse.save_npz,
        "petsc": write_petsc,
        "zarr": write_zarr,
        "mtx": lambda path, of: scipy.io.mmwrite(path, of, precision=17),
    }
    names = [tmp_path / f"{number}.{suffix}" for number in range(3)]
    for name, start, stop in zip(names, (0, 900, 1500), (900, 1500, A.shape[0]), strict=True):
        write[suffix](name, A[start:stop])
    with store_files(names, tmp_path / "made") as store:
        same(read_whole(store), A)
    write[suffix](tmp_path / f"other.{suffix}", A[:, :840])
    with pytest.raises(InputError, match="those of one matrix have the same number"):
        store_files([names[0], tmp_path / f"other.{suffix}"], tmp_path / "never")


def test_a_petsc_file_is_read_in_slabs(files, A, monkeypatch):
    monkeypatch.setattr(slab_files, "_SLAB_ENTRIES", 20_000)
    slabs = list(petsc_files.PetscMatrix.open(files / "stiffness.petsc").slabs())
    assert len(slabs) == 3
    same(scipy.sparse.vstack(slabs), A)


def test_a_petsc_vector_is_a_right_hand_side(tmp_path):
    b = np.random.default_rng(0).normal(size=50)
    (tmp_path / "b.petsc").write_bytes(np.array([1211214, 50], ">i4").tobytes() + b.astype(">f8").tobytes())
    np.testing.assert_array_equal(read_right_hand_sides(tmp_path / "b.petsc")[:, 0], b)
    (tmp_path / "short").write_bytes(np.array([1211214, 50], ">i4").tobytes() + bytes(80))
    with pytest.raises(InputError, match="another length"):
        read_right_hand_sides(tmp_path / "short")


def damaged(content, place, number):
    return content[:place] + int(number).to_bytes(4, "big", signed=True) + content[place + 4 :]


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (lambda content: content[:-8], "was cut off"),
        (lambda content: damaged(content, 12, -1), "dense"),
        (lambda content: damaged(content, 16, 99), "do not add up"),
        (lambda content: damaged(content, 16 + 4 * 2475, 5000), "columns outside"),
        (lambda content: b"1234" + content[4:], "cannot tell what matrix"),
    ],
)
def test_a_damaged_petsc_file_is_one_error_and_leaves_nothing(files, tmp_path, change, advice):
    (tmp_path / "a").write_bytes(change((files / "stiffness.petsc").read_bytes()))
    for read in (read_matrix, lambda path: store_files([path], tmp_path / "made")):
        with pytest.raises((InputError, StoreError), match=advice):
            read(tmp_path / "a")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["indptr", "indices", "data"])
def test_a_damaged_hdf5_file_is_one_error(A, tmp_path, name):
    write_hdf5(tmp_path / "a.h5", A)
    with h5py.File(tmp_path / "a.h5", "a") as file:
        if name == "data":
            del file["system/K/data"]
        else:
            file[f"system/K/{name}"][3] = 10**6
    with pytest.raises(InputError, match=r"damaged|no group"):
        read_matrix(tmp_path / "a.h5")


def test_the_command_stores_and_solve_streams(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored = CliRunner().invoke(app, ["store", str(files / "stiffness.petsc"), "K", "--slab", "100 KiB"])
    assert stored.exit_code == 0, stored.output
    assert "/K: 2,475 x 2,475, 147,537 entries, bsr in" in stored.output
    solved = CliRunner().invoke(app, ["solve", "K", "--memory", "900 KiB", "--rtol", "1e-6"])
    assert solved.exit_code == 0, solved.output
    assert "streamed" in solved.output


@pytest.mark.parametrize("way", ["files", "builder", "create"])
def test_half_of_a_matrix_that_is_not_symmetric_is_refused(A, tmp_path, way):
    wrong = A.tolil()
    wrong[7, 8] += 1.0
    wrong = wrong.tocsr()
    options = {"format": "symmetric_bsr", "block_size": 3}
    scipy.sparse.save_npz(tmp_path / "a.npz", wrong)

    def built():
        with StoreBuilder(tmp_path / "made", wrong.shape, **options) as builder:
            builder.add_matrix(wrong)
            builder.finish()

    ways = {
        "files": lambda: store_files([tmp_path / "a.npz"], tmp_path / "made", **options),
        "create": lambda: FileStore.create(tmp_path / "made", wrong, **options),
        "builder": built,
    }
    with pytest.raises(InputError, match=r"not symmetric: column and row [78] differ"):
        ways[way]()
    assert not (tmp_path / "made").exists()


def test_a_file_given_for_a_store_is_told_what_to_do(files):
    with pytest.raises(InputError, match="penstock store"):
        StreamedMatrix(files / "a.npz", "1 MiB")
