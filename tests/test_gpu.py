"""The whole path on a real GPU: streamed products, solves and experiments."""

import json
import threading
import time

import numpy as np
import pytest
import scipy.sparse
from kernel_targets import gpu_count

from penstock.experiments import Experiment, plan_experiment, run_experiment
from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import block_jacobi, cg, jacobi
from penstock.solvers.cg_iteration import CgRecurrence
from penstock.solvers.cg_kernels import Scalar
from penstock.spmv import BudgetError, CsrMatrix, DeviceError, InputError, StoreError
from penstock.streaming import FileStore, HostStore, MemoryBudget, Ring, StreamedMatrix, plan_stream
from penstock.streaming.stores import host_store
from penstock.streaming.stores.buffers import aligned_buffer
from penstock.streaming.testing import FaultyStore

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

    with StreamedMatrix(store, int(share * store.index.nbytes), ring=Ring(overlap=overlap), device="cuda") as A:
        products = [(A @ x).get() for _ in range(5)]

        assert A.bytes_streamed == sum(map(A.plan.sweep_nbytes, range(5))) > 0
    for product in products:
        np.testing.assert_array_equal(product, expected)


@pytest.mark.parametrize("preconditioner", [None, jacobi, lambda A: block_jacobi(A, 3), lambda A: jacobi(A).apply])
@pytest.mark.parametrize("format_name", ["bsr", "csr"])
def test_how_often_the_host_looks_changes_no_bit_of_a_solve(preconditioner, format_name):
    A, b = BEAM.matrix(format_name).to_device("cuda"), gpu_array(BEAM.load())
    M = None if preconditioner is None else preconditioner(A)

    results = [cg(A, b, M=M, rtol=1e-9, check_every=every) for every in (1, 7, 256, None)]

    assert results[0].converged
    for result in results[1:]:
        assert result.residual_norms == results[0].residual_norms
        assert (result.x == results[0].x).all()
        assert result.sweeps < results[0].sweeps + 256 * result.state.replacements


def test_iterations_allocate_nothing_and_the_host_runs_ahead_of_them():
    import cupy

    class Counter(cupy.cuda.MemoryHook):
        count = 0

        def malloc_preprocess(self, **_):
            self.count += 1

    beam = Cantilever(nodes=(48, 48, 48), dof=3)
    A, b = beam.matrix("sliced_bsr").to_device("cuda"), gpu_array(beam.load())
    M, counts = jacobi(A), []
    for iterations in (10, 60):  # after 64 a slow solve tests once whether A is symmetric
        with Counter() as counter:
            cg(A, b, M=M, rtol=1e-14, maxiter=iterations, check_every=5)
        counts.append(counter.count)
    assert counts[0] == counts[1] > 0

    r = b.copy()
    recurrence = CgRecurrence(A, M, cupy.zeros_like(b), r, r.copy(), cupy.empty_like(b), cupy.empty_like(b))
    recurrence.put(next_rho=float(r @ r), unit=1e-16)
    recurrence.advance(3)
    recurrence.look()
    recurrence.advance(200)
    assert not cupy.cuda.get_current_stream().done, "the host waited for the iterations"
    assert recurrence.look()[Scalar.ITERATION] == 203


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


def test_transfers_overlap_kernels_in_the_recorded_timeline():
    # Large enough that transfers and kernels last longer than the host takes to issue them.
    beam = Cantilever(nodes=(97, 25, 25), dof=3)
    x = gpu_array(np.random.default_rng(0).standard_normal((beam.unknowns, 64)))

    with (
        HostStore.create(beam.subdivisions(SUBDIVISIONS), beam.shape) as store,
        StreamedMatrix(store, store.index.nbytes // 3, device="cuda") as A,
    ):
        A @ x
        with A.recording() as timeline:
            A @ x

    transfers = [span for span in timeline.spans if span.kind == "transfer"]
    kernels = [span for span in timeline.spans if span.kind == "compute"]
    assert len(kernels) == SUBDIVISIONS
    assert len(transfers) == len(A.plan.schedule.transfers(1))
    assert any(t.start < k.stop and k.start < t.stop for t in transfers for k in kernels)


def same_products(store, expected, x, ring=None, budget=None, sweeps=5):
    """Stream products, compare them bit by bit, and return the matrix, closed, for its plan and counters."""
    with StreamedMatrix(store, budget or store.index.nbytes // 3, device="cuda", ring=ring) as A:
        for _ in range(sweeps):
            np.testing.assert_array_equal((A @ x).get(), expected)
        assert A.bytes_streamed == sum(map(A.plan.sweep_nbytes, range(sweeps))) > 0
    return A


@pytest.fixture(scope="module")
def product():
    """A vector on the GPU and the resident product with it."""
    x = gpu_array(np.random.default_rng(0).standard_normal(BEAM.unknowns))
    return x, (BEAM.matrix().to_device("cuda") @ x).get()


@pytest.fixture(scope="module")
def file_store(tmp_path_factory):
    path = tmp_path_factory.mktemp("stores") / "store"
    with FileStore.create(path, BEAM.subdivisions(SUBDIVISIONS), shape=BEAM.shape) as store:
        yield store


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sweep_order", ["alternate", "cyclic", "restart"])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_whatever_sweeps_do_at_their_end_the_bits_are_the_same(stores, product, overlap, sweep_order, slots):
    x, expected = product

    same_products(stores["bsr"], expected, x, Ring(slots=slots, overlap=overlap, sweeps=sweep_order))


def test_a_run_may_turn_at_will(stores, product):
    x, expected = product
    with StreamedMatrix(stores["bsr"], stores["bsr"].index.nbytes // 3, device="cuda") as A:
        for direction in (-1, -1, 1, 1, -1, 1):
            A.turn_to(direction)
            np.testing.assert_array_equal((A @ x).get(), expected)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", ["HostStore", "FileStore"])
def test_with_a_resident_structure_only_values_move(stores, file_store, product, overlap, kind):
    x, expected = product
    store = stores["bsr"] if kind == "HostStore" else file_store
    structure, values = store.index.part_nbytes("structure"), store.index.part_nbytes("values")

    ring = Ring(overlap=overlap, resident_structure=True)
    A = same_products(store, expected, x, ring, budget=structure + values // 3)

    assert A.plan.streamed_nbytes + A.plan.resident_nbytes == values
    assert A.budget.peak_nbytes <= structure + values // 3


@pytest.mark.parametrize("columns", [(), (3,)], ids=["vectors", "blocks of vectors"])
def test_products_repeated_with_each_subdivision_are_bit_equal_to_those_of_their_own(stores, columns):
    X = gpu_array(np.random.default_rng(0).standard_normal((4, BEAM.unknowns, *columns)))
    resident = BEAM.matrix().to_device("cuda")
    with StreamedMatrix(stores["bsr"], stores["bsr"].index.nbytes // 3, device="cuda") as A:
        for _ in range(3):
            products = A.apply_each(X)
            for product, x in zip(products, X, strict=True):
                np.testing.assert_array_equal(product.get(), (resident @ x).get())
        assert A.sweeps == 3
        with pytest.raises(InputError, match="X and out overlap"):
            A.apply_each(X, X)


def on_own_pages(array):
    """A copy in whole pages, as the C library allocates arrays that are large enough to be lent."""
    copy = aligned_buffer(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def callers_csr():
    A = BEAM.matrix("csr").to_csr()
    A.data, A.indices = on_own_pages(A.data), on_own_pages(A.indices)
    return A


def callers_bsr():
    A = BEAM.matrix()
    arrays = {name: on_own_pages(array) for name, array in A.arrays().items()}
    return A.from_arrays(A.shape, A.dtype, arrays, A.parameters())


@pytest.mark.parametrize("make", [callers_csr, callers_bsr], ids=["SciPy CSR", "bsr"])
@pytest.mark.parametrize("region", [None, 1 << 16], ids=["one region", "short regions"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_callers_matrix_streams_from_where_it_lies(make, region, overlap, monkeypatch):
    monkeypatch.setattr(host_store, "_LEAST_LENT_NBYTES", 1 << 20)
    if region is not None:
        monkeypatch.setattr(host_store, "_LOCKED_AT_ONCE_NBYTES", region)
    A = make()
    arrays = [A.data, A.indices] if scipy.sparse.issparse(A) else [A.values, A.column_indices]
    resident = (CsrMatrix.from_csr(A) if scipy.sparse.issparse(A) else A).to_device("cuda")
    x = gpu_array(np.random.default_rng(0).standard_normal(BEAM.unknowns))

    with HostStore.from_matrix(A, SUBDIVISIONS) as store:
        pieces = [piece for number in range(SUBDIVISIONS) for _, piece in store.segments(number)]
        assert any(np.shares_memory(piece, array) for piece in pieces for array in arrays)
        streamed = same_products(store, (resident @ x).get(), x, Ring(overlap=overlap))
        assert store.page_locked
        assert streamed.plan.slots
        same_products(store, (resident @ x).get(), x, Ring(resident_structure=True), budget=store.index.nbytes * 2 // 3)
    assert not store.page_locked


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sweep_order", ["alternate", "cyclic", "restart"])
def test_a_file_streams_through_page_locked_buffers(file_store, product, overlap, sweep_order):
    x, expected = product
    with StreamedMatrix(file_store, file_store.index.nbytes // 3, ring=Ring(overlap=overlap), device="cuda") as A:
        assert A.staged is True

    same_products(file_store, expected, x, Ring(overlap=overlap, sweeps=sweep_order))


def test_host_memory_is_not_staged(stores):
    with StreamedMatrix(stores["bsr"], stores["bsr"].index.nbytes // 3, device="cuda") as A:
        assert A.staged is False


@pytest.mark.parametrize("overlap", [True, False])
def test_memory_that_the_system_refuses_to_lock_is_staged(product, overlap, monkeypatch):
    def refuse(self):
        raise DeviceError("the system refused to page-lock")

    monkeypatch.setattr(HostStore, "page_lock", refuse)
    x, expected = product
    store = HostStore.create(BEAM.subdivisions(SUBDIVISIONS))
    with pytest.warns(UserWarning, match="refused to page-lock"):
        A = StreamedMatrix(store, store.index.nbytes // 3, ring=Ring(overlap=overlap), device="cuda")
    with A:
        assert A.staged is True
        for _ in range(5):
            np.testing.assert_array_equal((A @ x).get(), expected)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sweep_order", ["alternate", "cyclic"])
@pytest.mark.parametrize("fault", [0, 3, 11, 17, 29])
def test_a_staged_read_that_fails_is_one_error_and_the_matrix_stays_usable(
    file_store, product, overlap, sweep_order, fault
):
    def fail(read, number):
        if read == residents + fault:
            raise StoreError("the disk is gone")

    x, expected = product
    budget = file_store.index.nbytes // 3
    residents = len(plan_stream(file_store.index, budget).resident)
    errors = 0
    ring = Ring(overlap=overlap, sweeps=sweep_order)
    with StreamedMatrix(FaultyStore(file_store, fail), budget, device="cuda", ring=ring) as A:
        for _ in range(6):
            try:
                np.testing.assert_array_equal((A @ x).get(), expected)
            except StoreError:
                errors += 1
        assert (errors, A.sweeps) == (1, 5)
    assert A.budget.used_nbytes == 0


def test_a_staged_read_that_stalls_is_an_error_in_time(file_store, product):
    going_on = threading.Event()

    def stall(read, number):
        if read == residents + 5:
            going_on.wait(30)

    x, expected = product
    budget = file_store.index.nbytes // 3
    residents = len(plan_stream(file_store.index, budget).resident)
    with StreamedMatrix(FaultyStore(file_store, stall), budget, device="cuda", stall_seconds=0.3) as A:
        began = time.perf_counter()
        with pytest.raises(StoreError, match="stalls"):
            A @ x
        assert time.perf_counter() - began < 10
        going_on.set()
        for _ in range(2):
            np.testing.assert_array_equal((A @ x).get(), expected)


@pytest.mark.parametrize("at", [0, 7, SUBDIVISIONS - 1])
@pytest.mark.parametrize("kind", ["HostStore", "FileStore"])
def test_a_computation_that_fails_says_where_and_the_matrix_stays_usable(stores, file_store, product, kind, at):
    def visit(number, slab):
        if number == at:
            raise ValueError("stop here")

    x, expected = product
    store = stores["bsr"] if kind == "HostStore" else file_store
    with StreamedMatrix(store, store.index.nbytes // 3, device="cuda") as A:
        with pytest.raises(ValueError, match="stop here") as caught:
            A.sweep(visit)
        assert f"while computing with subdivision {at} " in caught.value.__notes__[0]
        for _ in range(3):
            np.testing.assert_array_equal((A @ x).get(), expected)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_recording_from_a_file_shows_reads_transfers_and_computations(file_store, product, overlap):
    x, _ = product
    with StreamedMatrix(file_store, file_store.index.nbytes // 3, ring=Ring(overlap=overlap), device="cuda") as A:
        with A.recording() as timeline:
            A @ x
            A @ x
        needed = [number for sweep in range(2) for number in A.plan.schedule.transfers(sweep)]

    def numbers(kind):
        spans = sorted((span for span in timeline.spans if span.kind == kind), key=lambda span: span.start)
        return [span.subdivision for span in spans]

    assert numbers("read") == numbers("transfer") == needed
    assert numbers("compute") == [*range(SUBDIVISIONS), *range(SUBDIVISIONS)[::-1]]
    assert all(span.start <= span.stop for span in timeline.spans)
    reads, transfers = ([span for span in timeline.spans if span.kind == kind] for kind in ("read", "transfer"))
    for read, transfer in zip(reads, sorted(transfers, key=lambda span: span.start), strict=True):
        assert read.stop <= transfer.stop + 1e-3  # two clocks, brought together at the start


@pytest.mark.parametrize("matrix", ["stored", "on_arrival"])
def test_an_experiment_runs_on_the_gpu_within_its_budget(matrix, tmp_path):
    experiment = Experiment.model_validate(
        {"model": {"nodes": [33, 9, 9]}, "memory": {"device": "cuda", "budget": "1 MiB", "matrix": matrix}}
    )

    folder = run_experiment(experiment, tmp_path / "run").folder

    result = json.loads(folder.result.read_text())
    assert result["converged"]
    assert result["device"] == "cuda:0"
    assert result["peak_budget_nbytes"] <= 2**20 < result["matrix_nbytes"]
    plan = plan_experiment(experiment)
    if plan.streamed_nbytes == result["streamed_nbytes_per_sweep"]:  # rates measured twice may choose two cuts
        assert result["bytes_streamed"] == sum(map(plan.sweep_nbytes, range(result["sweeps"])))
    if matrix == "stored":
        assert 0 < result["bytes_streamed"] < result["sweeps"] * result["streamed_nbytes_per_sweep"]
    assert (folder.path / "timeline.png").exists()


def test_int64_offsets_work_on_the_gpu():
    A = scipy.sparse.random_array((999, 700), density=0.02, rng=np.random.default_rng(0), format="csr")
    x = np.random.default_rng(1).standard_normal(700)

    matrix = CsrMatrix.from_csr(A).to_device("cuda")

    assert matrix.row_offsets.dtype == np.int64
    np.testing.assert_allclose((matrix @ gpu_array(x)).get(), A @ x, rtol=1e-12, atol=1e-12)
