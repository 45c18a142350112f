"""The whole path on a real GPU: streamed products, solves and experiments."""

import json

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import gpu_count

from penstock.experiments import Experiment, run_experiment
from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import block_jacobi, cg, jacobi
from penstock.spmv import BudgetError, CsrMatrix, InputError
from penstock.streaming import FileStore, HostStore, MemoryBudget, StreamedMatrix

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpu_count() == 0, reason="no CUDA device")]

BEAM = Cantilever(nodes=(41, 9, 9), dof=3, lengths=5.0, material=LognormalMaterial(0.5, 1))
SUBDIVISIONS = 16
BUDGET_SHARES = (0.2, 0.4, 0.8)


@pytest.fixture(scope="module")
def stores():
    built = {name: HostStore.create(BEAM.subdivisions(SUBDIVISIONS, name), BEAM.shape) for name in ("bsr", "csr")}
    yield built
    for store in built.values():
        store.close()


def gpu_array(array):
    import cupy

    return cupy.asarray(array)


@pytest.mark.parametrize("format_name", ["bsr", "csr"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("share", BUDGET_SHARES)
@pytest.mark.parametrize("columns", [None, 3])
def test_streamed_products_are_bit_equal_to_resident_ones(stores, format_name, overlap, share, columns):
    store = stores[format_name]
    resident = BEAM.matrix(format_name).to_device("cuda")
    shape = BEAM.unknowns if columns is None else (BEAM.unknowns, columns)
    x = gpu_array(np.random.default_rng(0).standard_normal(shape))
    expected = (resident @ x).get()

    with StreamedMatrix(store, int(share * store.index.nbytes), device="cuda", overlap=overlap) as A:
        products = [(A @ x).get() for _ in range(5)]

        assert A.bytes_streamed == 5 * A.plan.streamed_nbytes > 0
    for product in products:
        np.testing.assert_array_equal(product, expected)


def test_a_streamed_solve_is_bit_equal_to_the_resident_one(stores):
    resident = BEAM.matrix().to_device("cuda")
    b = gpu_array(BEAM.load())
    expected = cg(resident, b, M=block_jacobi(resident, 3), rtol=1e-9)

    with StreamedMatrix(stores["bsr"], stores["bsr"].index.nbytes // 3, device="cuda") as A:
        result = cg(A, b, M=block_jacobi(A, 3), rtol=1e-9)

    assert result.converged
    np.testing.assert_array_equal(result.x.get(), expected.x.get())


def test_the_gpu_solution_agrees_with_the_cpu_one():
    A, b = BEAM.matrix(), BEAM.load()

    on_cpu = cg(A, b, M=jacobi(A), rtol=1e-11).x
    on_gpu = cg(A.to_device("cuda"), gpu_array(b), M=jacobi(A.to_device("cuda")), rtol=1e-11).x.get()

    np.testing.assert_allclose(on_gpu, on_cpu, rtol=0, atol=1e-6 * np.abs(on_cpu).max())


def test_the_budget_is_enforced_by_the_allocator(stores):
    budget = MemoryBudget(stores["bsr"].index.nbytes // 3)

    with StreamedMatrix(stores["bsr"], budget, device="cuda") as A:
        assert A.plan.storage_nbytes <= budget._pool.total_bytes() <= budget.limit_nbytes
        with pytest.raises(BudgetError, match="raise the budget"):
            budget.allocate("more", budget.limit_nbytes, A.device)

    assert budget.used_nbytes == 0
    assert budget._pool.total_bytes() == 0


def test_transfers_overlap_kernels_in_the_recorded_timeline(stores):
    x = gpu_array(np.random.default_rng(0).standard_normal((BEAM.unknowns, 64)))

    with StreamedMatrix(stores["bsr"], stores["bsr"].index.nbytes // 3, device="cuda") as A:
        A @ x
        with A.recording() as timeline:
            A @ x

    transfers = [span for span in timeline.spans if span.kind == "transfer"]
    kernels = [span for span in timeline.spans if span.kind == "compute"]
    assert len(kernels) == SUBDIVISIONS
    assert len(transfers) == SUBDIVISIONS - len(A.plan.resident)
    assert any(t.start < k.stop and k.start < t.stop for t in transfers for k in kernels)


def test_a_gpu_does_not_stream_from_a_file_and_says_what_to_do(tmp_path):
    store = FileStore.create(tmp_path / "store", BEAM.subdivisions(8), shape=BEAM.shape)

    with store, pytest.raises(InputError, match=r"HostStore\.from_store"):
        StreamedMatrix(store, store.index.nbytes // 2, device="cuda")


def test_an_experiment_runs_on_the_gpu_within_its_budget(tmp_path):
    experiment = Experiment.model_validate(
        {"model": {"nodes": [33, 9, 9]}, "memory": {"device": "cuda", "budget": "1 MiB"}}
    )

    folder = run_experiment(experiment, tmp_path / "run").folder

    result = json.loads(folder.result.read_text())
    assert result["converged"]
    assert result["device"] == "cuda:0"
    assert result["peak_budget_nbytes"] <= 2**20 < result["matrix_nbytes"]
    assert result["bytes_streamed"] == result["sweeps"] * result["streamed_nbytes_per_sweep"]
    assert (folder.path / "timeline.png").exists()


def test_int64_offsets_work_on_the_gpu():
    A = scipy.sparse.random_array((999, 700), density=0.02, rng=np.random.default_rng(0), format="csr")
    x = np.random.default_rng(1).standard_normal(700)

    matrix = CsrMatrix.from_csr(A).to_device("cuda")

    assert matrix.row_offsets.dtype == np.int64
    np.testing.assert_allclose((matrix @ gpu_array(x)).get(), A @ x, rtol=1e-12, atol=1e-12)
