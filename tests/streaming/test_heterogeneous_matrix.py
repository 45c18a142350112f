"""A matrix shared between two devices computes what the whole one does; here both parts run on the CPU, or one on a GPU."""

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import DEVICES

from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import block_cg, block_jacobi, cg
from penstock.spmv import BudgetError, CsrMatrix, HasAbsoluteProduct, HasDiagonalBlocks, InputError, SweptOperator
from penstock.streaming import (
    FileStore,
    HeterogeneousMatrix,
    HostStore,
    LinkRates,
    Ring,
    StreamedMatrix,
    Workload,
    divide,
    index_of,
)
from penstock.streaming.planning.division import division_at

FORMATS = ("csr", "bsr", "sliced_bsr", "symmetric_bsr")
SLABS = 8


@pytest.fixture(scope="module")
def beam():
    return Cantilever(nodes=(16, 6, 5), dof=3, material=LognormalMaterial(sigma=0.5))


def stored(beam, name="bsr"):
    return HostStore.create(beam.subdivisions(SLABS, name))


def ring_nbytes(store):
    return 2 * max(subdivision.nbytes for subdivision in store.index.subdivisions)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 3, SLABS])
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_whole_matrix(beam, name, count, device):
    whole, random = beam.matrix(name), np.random.default_rng(1)
    with (
        stored(beam, name) as store,
        HeterogeneousMatrix(store, ring_nbytes(store), device=device, gpu_subdivisions=count) as A,
    ):
        for shape in ((beam.unknowns,), (beam.unknowns, 3)):
            x, out = random.normal(size=shape), random.normal(size=shape)
            expected = 2.0 * (whole @ x) - 0.5 * out

            found = A.device.asarray(out)
            A.apply(A.device.asarray(x), found, alpha=2.0, beta=-0.5)
            again = A.apply(A.device.asarray(x), A.device.xp.full(shape, np.nan))

            scale = np.abs(expected).max()
            np.testing.assert_allclose(A.device.to_host(found), expected, rtol=0, atol=1e-14 * scale)
            np.testing.assert_allclose(A.device.to_host(again), whole @ x, rtol=0, atol=1e-14 * scale)
        x = A.device.asarray(np.abs(random.normal(size=beam.unknowns)))
        absolute = abs(whole.to_csr()) @ A.device.to_host(x)
        np.testing.assert_allclose(A.device.to_host(A.apply_absolute(x)), absolute, rtol=1e-13)
        np.testing.assert_array_equal(A.device.to_host(A.diagonal_blocks(3)), whole.diagonal_blocks(3))
        assert isinstance(A, SweptOperator)
        assert isinstance(A, HasAbsoluteProduct)
        assert isinstance(A, HasDiagonalBlocks)
        assert A.sweeps == 6
        assert f"{count} of 8 subdivisions on" in repr(A)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["bsr", "symmetric_bsr"])
def test_solves_take_the_iterations_of_the_streamed_matrix(beam, name, device):
    b = beam.load()
    B = np.stack([b, beam.load("axial")], axis=1)
    with stored(beam, name) as store:
        budget = ring_nbytes(store)
        with StreamedMatrix(store, budget) as alone:
            expected = cg(alone, b, M=block_jacobi(alone, 3), rtol=1e-10)
        with HeterogeneousMatrix(store, budget, device=device) as A:
            found = cg(A, A.device.asarray(b), M=block_jacobi(A, 3), rtol=1e-10)
            several = block_cg(A, A.device.asarray(B), M=block_jacobi(A, 3), rtol=1e-10)

    assert found.converged
    assert several.converged
    assert abs(found.iterations - expected.iterations) <= 1
    residual = b - beam.matrix() @ A.device.to_host(found.x)
    assert np.linalg.norm(residual) <= 1.01e-10 * np.linalg.norm(b)


def test_only_the_part_of_the_gpu_crosses_the_link(beam):
    with (
        stored(beam) as store,
        HeterogeneousMatrix(
            store, ring_nbytes(store), device="cpu", ring=Ring(sweeps="cyclic"), gpu_subdivisions=3
        ) as A,
    ):
        A @ beam.load()
        first = A.bytes_streamed
        assert first == sum(subdivision.nbytes for subdivision in store.index.subdivisions[:3])
        A @ beam.load()
        assert A.bytes_streamed == 2 * first


def test_a_recording_has_both_parts(beam):
    with stored(beam) as store, HeterogeneousMatrix(store, ring_nbytes(store), device="cpu", gpu_subdivisions=3) as A:
        with A.recording() as timeline:
            A @ beam.load()
        A @ beam.load()
    assert sorted(span.subdivision for span in timeline.spans if span.kind == "host") == [3, 4, 5, 6, 7]
    assert sorted(span.subdivision for span in timeline.spans if span.kind == "compute") == [0, 1, 2]


def test_a_matrix_of_the_caller_is_shared_where_it_lies():
    random = np.random.default_rng(3)
    matrix = scipy.sparse.random_array((3000, 3000), density=0.3, format="csr", rng=random)  # more than 32 MiB
    whole, x = CsrMatrix.from_csr(matrix), random.normal(size=3000)
    with (
        HostStore.from_matrix(whole, 6) as store,
        HeterogeneousMatrix(store, "16 MiB", device="cpu", gpu_subdivisions=2) as A,
    ):
        assert np.shares_memory(store.slab(5).values, whole.values)
        np.testing.assert_allclose(A @ x, whole @ x, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rates", [(55e9, 5e9), (55e9, 77e9), (5e9, 77e9), (1e9, 1e12), (1e12, 1e9)])
@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_division_is_the_best_of_all(rates, part):
    link, cpu = rates
    cantilever = Cantilever(nodes=(64, 32, 32), dof=3)
    index = index_of(cantilever.symbolic_slabs(64, "bsr"), cantilever.shape)
    budget = int(part * index.nbytes)

    rates = LinkRates(link, 4e12)
    found = divide(index, budget, Workload(), Ring(), cpu_rate=cpu, rates=rates)

    def at(count):
        return division_at(index, count, budget, Workload(), Ring(), cpu_rate=cpu, rates=rates)

    assert found.seconds == min(at(count).seconds for count in range(1, 65))
    assert found.cpu_nbytes + found.plan.index.nbytes == index.nbytes
    assert f"{found.count} of 64 subdivisions" in found.explain()


def test_refusals(beam, tmp_path):
    with stored(beam) as store:
        with pytest.raises(InputError, match="the GPU takes 1 to 8 subdivisions, not 9"):
            HeterogeneousMatrix(store, "1 MiB", device="cpu", gpu_subdivisions=9)
        with pytest.raises(BudgetError, match="holds neither"):
            HeterogeneousMatrix(store, "1 KiB", device="cpu")
        with (
            FileStore.create(tmp_path / "A", beam.subdivisions(2)) as on_disk,
            pytest.raises(InputError, match=r"a FileStore does not: HostStore.from_store"),
        ):
            HeterogeneousMatrix(on_disk, "1 MiB", device="cpu")
    with HostStore.create([scipy.sparse.csr_array(np.ones((3, 4)))]) as wide, pytest.raises(InputError, match="square"):
        HeterogeneousMatrix(wide, "1 MiB", device="cpu")


def test_an_error_of_either_part_leaves_the_matrix_usable(beam):
    with stored(beam) as store, HeterogeneousMatrix(store, ring_nbytes(store), device="cpu", gpu_subdivisions=4) as A:
        x, expected = beam.load(), beam.matrix() @ beam.load()
        slabs, A._slabs = A._slabs, [None]
        with pytest.raises(AttributeError):
            A @ x
        A._slabs = slabs
        np.testing.assert_allclose(A @ x, expected, rtol=0, atol=1e-14 * np.abs(expected).max())
