"""The product of a stored matrix and one in memory is that of SciPy, in a store of its own."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import DEVICES

import penstock
from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import multiply
from penstock.spmv import BsrMatrix, CsrMatrix, InputError, StoreError
from penstock.streaming import FileStore, HostStore, StreamedMatrix
from penstock.streaming.stores.whole import read_whole
from penstock.streaming.testing import FaultyStore


@pytest.fixture(scope="module")
def stiffness():
    """72 nodes with 3 unknowns, and CSR of it."""
    A = Cantilever((6, 4, 3), dof=3, material=LognormalMaterial(sigma=0.5)).matrix("bsr")
    return scipy.sparse.csr_array(A.to_csr())


def random_factor(rows, columns, seed=0):
    return scipy.sparse.random_array((rows, columns), density=0.1, format="csr", rng=np.random.default_rng(seed))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format_name", ["csr", "bsr", "symmetric_bsr", "sell"])
def test_products_of_every_format_are_those_of_scipy(tmp_path, stiffness, format_name, device):
    size = 3 if "bsr" in format_name else 1
    slabs = [stiffness[start : start + 54] for start in range(0, 216, 54)]
    B, shares = random_factor(216, 40), []

    with HostStore.create(slabs, format=format_name, block_size=size) as store:
        assert store.index.format_name == format_name
        product = penstock.multiply_store(store, B, tmp_path / "AB", device=device, label="A B", progress=shares.append)

    with product:
        found = read_whole(product)
        assert (product.index.format_name, product.label) == ("csr", "A B")
        assert len(product.index.subdivisions) == 4
    expected = stiffness @ B
    assert abs(found - expected).max() <= 1e-14 * abs(expected).max()
    assert shares == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format_name", ["bsr", "symmetric_bsr"])
def test_square_blocks_stay_blocks_and_can_be_streamed(tmp_path, stiffness, format_name, device):
    slabs = [stiffness[start : start + 54] for start in range(0, 216, 54)]
    A = BsrMatrix.from_csr(stiffness, block_size=3)
    v = np.random.default_rng(2).normal(size=216)

    with FileStore.create(tmp_path / "A", slabs, format=format_name, block_size=3) as store:
        square = penstock.multiply_store(store, A, tmp_path / "AA", device=device)
    with square, StreamedMatrix(square, budget="200 KiB") as streamed:
        assert square.index.format_name == "bsr"
        assert np.allclose(
            streamed @ v, stiffness @ (stiffness @ v), rtol=1e-13, atol=1e-12 * abs(stiffness).max() ** 2
        )


def test_rows_that_slabs_cut_anywhere_and_an_empty_slab(tmp_path):
    A, B = random_factor(30, 20, 3), random_factor(20, 5, 4)
    with (
        HostStore.create([A[:1], A[1:1], A[1:29], A[29:]]) as store,
        penstock.multiply_store(store, CsrMatrix.from_csr(B), tmp_path / "AB") as product,
    ):
        assert abs(read_whole(product) - A @ B).max() < 1e-15


def test_refusals_leave_nothing(tmp_path, stiffness):
    with HostStore.create([stiffness]) as store:
        with pytest.raises(InputError, match="216 columns, the second one 200 rows"):
            penstock.multiply_store(store, random_factor(200, 4), tmp_path / "AB")
        (tmp_path / "there").mkdir()
        with pytest.raises(InputError, match="exists; choose another name"):
            penstock.multiply_store(store, random_factor(216, 4), tmp_path / "there")
        with (
            StreamedMatrix(store, budget="1 MiB") as A,
            pytest.raises(InputError, match="or a store to penstock"),
        ):
            multiply(A, random_factor(216, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_disk_that_fails_leaves_nothing(tmp_path, stiffness):
    def fail(read, number):
        if number == 1:
            raise StoreError("the disk is gone")

    with HostStore.create([stiffness[:108], stiffness[108:]]) as store, pytest.raises(StoreError, match="gone"):
        penstock.multiply_store(FaultyStore(store, fail), random_factor(216, 4), tmp_path / "AB")
    assert not list(tmp_path.iterdir())
