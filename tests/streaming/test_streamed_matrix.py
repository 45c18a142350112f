"""A streamed matrix computes what the resident one does, to the last bit, within its budget and through failures."""

import copy
import gc
import itertools
import pickle
import signal
import threading
import time

import numpy as np
import pytest

from penstock import spmv, streaming
from penstock.spmv import BudgetError, CsrMatrix, HasAbsoluteProduct, InputError, StoreError, SweptOperator
from penstock.streaming import FileStore, HostStore, MemoryBudget, Ring, StreamedMatrix, Timeline, index_of, plan_stream
from penstock.streaming.testing import CountingStore, FaultyStore, SlowStore

NAMES = (
    "beam csr float64 storage",
    "beam csr float32 storage",
    "beam bsr float64 storage",
    "beam bsr float32 storage",
    "irregular csr",
    "irregular bsr",
    "irregular csr float32 vectors",
)
BUDGETS = ("smallest", "half resident", "all resident")

# A reader that is told to stop ends within one read of these small slabs; this is ample on a busy machine.
PATIENCE_SECONDS = 10.0


def budget_nbytes(kind, index):
    ring = 2 * max(subdivision.nbytes for subdivision in index.subdivisions)
    return {"smallest": ring, "half resident": ring + (index.nbytes - ring) // 2, "all resident": index.nbytes}[kind]


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "penstock-reader"]


@pytest.fixture(autouse=True)
def no_reader_is_left():
    """Every test closes what it opens, so a reader found afterwards is a leak."""
    yield
    deadline = time.monotonic() + PATIENCE_SECONDS
    while reader_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reader_threads() == []


@pytest.fixture(scope="session")
def open_store(matrices, tmp_path_factory):
    """``open_store(kind, name)`` gives a store of a named matrix, built once and kept open."""
    stores = {}

    def opened(kind, name):
        if (kind, name) not in stores:
            slabs = iter(matrices[name][1])
            if kind == "HostStore":
                stores[kind, name] = HostStore.create(slabs)
            else:
                stores[kind, name] = FileStore.create(tmp_path_factory.mktemp("stores") / "store", slabs)
        return stores[kind, name]

    yield opened
    for store in stores.values():
        store.close()


@pytest.fixture(params=["HostStore", "FileStore"])
def store_kind(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["overlap", "in turn"])
def overlap(request):
    return request.param


@pytest.fixture(params=BUDGETS)
def budget_kind(request):
    return request.param


@pytest.fixture
def store(open_store):
    """The store that tests of behaviour, rather than of numbers, use."""
    return open_store("HostStore", "irregular csr")


@pytest.fixture
def smallest(store):
    """The smallest budget of that store: two slots, nothing resident."""
    return budget_nbytes("smallest", store.index)


@pytest.fixture
def resident(matrices):
    return matrices["irregular csr"][0]


def random_vectors(matrix, columns=None, seed=1):
    shape = (matrix.shape[1],) if columns is None else (matrix.shape[1], columns)
    return np.random.default_rng(seed).standard_normal(shape).astype(matrix.dtype)


@pytest.mark.parametrize("name", NAMES)
class TestEqualsTheResidentMatrix:
    @pytest.fixture
    def both(self, open_store, matrices, store_kind, name, budget_kind, overlap):
        store = open_store(store_kind, name)
        budget = budget_nbytes(budget_kind, store.index)
        with StreamedMatrix(store, budget, ring=Ring(overlap=overlap)) as streamed:
            yield streamed, matrices[name][0]

    @pytest.mark.parametrize("columns", [None, 3], ids=["vector", "block of vectors"])
    def test_products_are_bit_equal_sweep_after_sweep(self, both, columns):
        streamed, resident = both
        assert (streamed.shape, streamed.dtype) == (resident.shape, resident.dtype)

        for seed in range(3):
            x = random_vectors(resident, columns, seed)
            product = streamed @ x

            np.testing.assert_array_equal(product, resident @ x, strict=True)
            assert np.abs(product).max() > 0

    def test_alpha_and_beta_are_bit_equal_too(self, both):
        streamed, resident = both
        x, before = random_vectors(resident), np.linspace(-1, 1, resident.shape[0]).astype(resident.dtype)
        expected, out = before.copy(), before.copy()

        streamed.apply(x, out, alpha=-0.75, beta=1.5)

        np.testing.assert_array_equal(out, resident.apply(x, expected, alpha=-0.75, beta=1.5))

    def test_with_beta_zero_the_old_content_has_no_effect(self, both):
        streamed, resident = both
        x = random_vectors(resident)
        out = np.full(resident.shape[0], np.nan, dtype=resident.dtype)

        assert streamed.apply(x, out) is out
        np.testing.assert_array_equal(out, resident @ x)

    def test_the_absolute_product_is_bit_equal(self, both):
        streamed, resident = both
        x = np.abs(random_vectors(resident))

        np.testing.assert_array_equal(streamed.apply_absolute(x), resident.apply_absolute(x), strict=True)

    @pytest.mark.parametrize("size", [1, 2, 3, 12])
    def test_diagonal_blocks_are_bit_equal_wherever_the_cuts_lie(self, both, size):
        streamed, resident = both

        np.testing.assert_array_equal(streamed.diagonal_blocks(size), resident.diagonal_blocks(size), strict=True)


@pytest.mark.parametrize("name", ["beam bsr float64 storage", "irregular csr"])
@pytest.mark.parametrize("slots", [2, 3, 4, 5])
def test_the_ring_may_have_any_length_against_the_streamed_pieces(open_store, matrices, name, slots, overlap):
    """Many sweeps, so that every subdivision meets every slot."""
    resident = matrices[name][0]
    store = open_store("FileStore", name)
    slot = max(subdivision.nbytes for subdivision in store.index.subdivisions)
    uneven = 0
    for spare in range(3):
        budget = slots * slot + spare * slot
        if budget >= store.index.nbytes:
            continue
        with StreamedMatrix(store, budget, ring=Ring(slots=slots, overlap=overlap)) as streamed:
            assert streamed.plan.slots == slots
            uneven += len(streamed.plan.schedule.streamed) % slots != 0
            for seed in range(slots + 2):
                x = random_vectors(resident, seed=seed)
                np.testing.assert_array_equal(streamed @ x, resident @ x)
    assert uneven, "no run had a number of streamed pieces that the ring does not divide"


def test_it_is_an_operator_with_counters_and_an_absolute_product(store, smallest):
    with StreamedMatrix(store, smallest) as A:
        assert isinstance(A, SweptOperator)
        assert isinstance(A, HasAbsoluteProduct)


@pytest.mark.parametrize("call", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_cannot_be_pickled_or_copied(store, smallest, call):
    with StreamedMatrix(store, smallest) as A, pytest.raises(InputError, match="neither pickled nor copied"):
        call(A)


def test_earlier_names_still_name_what_solvers_ask_of_a_streamed_matrix():
    names = [spmv.CountsTraffic, spmv.CountsWaiting, spmv.PlansWorkspace, streaming.Sweeps]

    assert set(names) == {SweptOperator}


class TestTraffic:
    @pytest.mark.parametrize("sweep_order", ["alternate", "cyclic", "restart"])
    def test_the_bytes_counted_are_those_the_plan_says_and_the_store_gave(
        self, store, budget_kind, overlap, sweep_order
    ):
        counting = CountingStore(store)
        budget = budget_nbytes(budget_kind, store.index)
        with StreamedMatrix(counting, budget, ring=Ring(overlap=overlap, sweeps=sweep_order)) as A:
            assert counting.nbytes == A.plan.resident_nbytes
            A @ random_vectors(A)
            A.apply_absolute(random_vectors(A))
            A.diagonal_blocks(2)
            A.sweep(lambda number, slab: None)
            A @ random_vectors(A, columns=2)
            plan, told, sweeps = A.plan, A.bytes_streamed, A.sweeps

        ahead = plan.schedule.streamed[: plan.slots] if overlap and sweep_order == "cyclic" else ()
        assert sweeps == 5
        assert told == sum(plan.sweep_nbytes(number) for number in range(5))
        assert (told == 0) == (budget_kind == "all resident")
        assert counting.nbytes == plan.resident_nbytes + told + sum(map(plan.nbytes_of, ahead))
        needed = [number for sweep in range(5) for number in plan.schedule.transfers(sweep)]
        assert counting.numbers == [*sorted(plan.resident), *needed, *ahead]

    @pytest.mark.parametrize("kind", ["smallest", "half resident"])
    def test_a_turn_saves_what_the_slots_hold(self, store, kind):
        budget = budget_nbytes(kind, store.index)
        with StreamedMatrix(store, budget, ring=Ring(sweeps="cyclic")) as A, StreamedMatrix(store, budget) as turning:
            for _ in range(4):
                A.sweep(lambda number, slab: None)
                turning.sweep(lambda number, slab: None)
            plan = turning.plan
            first, last = plan.schedule.streamed[: plan.slots], plan.schedule.streamed[-plan.slots :]

            assert A.bytes_streamed == 4 * A.plan.streamed_nbytes
            saved = 2 * sum(map(plan.nbytes_of, last)) + sum(map(plan.nbytes_of, first))
            assert A.bytes_streamed - turning.bytes_streamed == saved > 0

    def test_a_refused_product_moves_nothing(self, store, smallest):
        with StreamedMatrix(store, smallest) as A:
            with pytest.raises(InputError, match="x must have shape"):
                A @ np.ones(A.shape[1] + 1)

            assert (A.sweeps, A.bytes_streamed) == (0, 0)


class TestSweep:
    @pytest.mark.parametrize("sweep_order", ["alternate", "cyclic", "restart"])
    def test_visits_every_subdivision_once_in_order_with_its_rows(
        self, store, resident, budget_kind, overlap, sweep_order
    ):
        seen = []

        def visit(number, slab):
            subdivision = store.index.subdivisions[number]
            rows = resident.rows(subdivision.row_start, subdivision.row_stop)
            np.testing.assert_array_equal(slab.values, rows.values)
            np.testing.assert_array_equal(slab.column_indices, rows.column_indices)
            seen.append(number)

        with StreamedMatrix(
            store, budget_nbytes(budget_kind, store.index), ring=Ring(overlap=overlap, sweeps=sweep_order)
        ) as A:
            for _ in range(3):
                A.sweep(visit)

        there, back = list(range(9)), list(range(9))[::-1]
        assert seen == [*there, *(back if sweep_order == "alternate" else there), *there]

    def test_inside_a_sweep_is_refused_and_the_matrix_stays_usable(self, store, smallest, resident, overlap):
        """Its slots are in use: a product from within a visit would overwrite them."""
        x = random_vectors(resident)
        with StreamedMatrix(store, smallest, ring=Ring(overlap=overlap)) as A:
            with pytest.raises(InputError, match="sweep"):
                A.sweep(lambda number, slab: A @ x)

            np.testing.assert_array_equal(A @ x, resident @ x)


def test_the_absolute_product_takes_one_vector_and_says_so(store, smallest):
    with (
        StreamedMatrix(store, smallest) as A,
        pytest.raises(InputError, match=r"x must have shape \(312,\)"),
    ):
        A.apply_absolute(np.ones((312, 2)))


class CountingBudget(MemoryBudget):
    """Remembers what it handed out."""

    def __init__(self, device):
        super().__init__(device)
        self.buffers = []

    def allocate(self, purpose, nbytes, device):
        self.buffers.append(super().allocate(purpose, nbytes, device))
        return self.buffers[-1]


class TestBudget:
    def test_all_matrix_storage_is_one_allocation_within_the_budget(self, store, budget_kind, overlap):
        budget = CountingBudget(budget_nbytes(budget_kind, store.index))
        with StreamedMatrix(store, budget, ring=Ring(overlap=overlap)) as A:
            (storage,) = budget.buffers
            start, stop = storage.ctypes.data, storage.ctypes.data + storage.nbytes

            def visit(number, slab):
                for array in slab.arrays().values():
                    assert start <= array.ctypes.data
                    assert array.ctypes.data + array.nbytes <= stop

            for _ in range(3):
                A.sweep(visit)

            assert len(budget.buffers) == 1
            assert storage.nbytes == A.plan.storage_nbytes == budget.used_nbytes
        assert budget.peak_nbytes <= budget.limit_nbytes

    def test_close_gives_it_back(self, store, smallest):
        budget = MemoryBudget(smallest)
        for _ in range(3):
            with StreamedMatrix(store, budget) as A:
                assert budget.used_nbytes == A.plan.storage_nbytes
            assert budget.used_nbytes == 0

    def test_two_matrices_share_one_budget_and_no_more(self, store, smallest):
        budget = MemoryBudget(2 * smallest)
        plan = plan_stream(store.index, smallest)
        with StreamedMatrix(store, budget, plan=plan), StreamedMatrix(store, budget, plan=plan):
            with pytest.raises(BudgetError, match="raise the budget"):
                StreamedMatrix(store, budget, plan=plan)
            assert budget.used_nbytes == 2 * plan.storage_nbytes
        assert budget.used_nbytes == 0

    def test_a_plan_larger_than_the_budget_is_refused(self, store):
        plan = plan_stream(store.index, budget_nbytes("half resident", store.index))

        with pytest.raises(BudgetError, match="raise the budget"):
            StreamedMatrix(store, plan.storage_nbytes - 1, plan=plan)

    def test_a_budget_below_two_slots_is_refused_with_the_smallest_that_does(self, store, smallest, resident):
        with pytest.raises(BudgetError, match=f"the smallest that does is {smallest} bytes"):
            StreamedMatrix(store, smallest - 1)

        x = random_vectors(resident)
        with StreamedMatrix(store, smallest) as A:
            np.testing.assert_array_equal(A @ x, resident @ x)


class TestAPlanMadeForAnotherCut:
    """Its slots and rows would not be those of the store."""

    def test_of_another_number_of_pieces_is_refused(self, store, resident, cut):
        other = HostStore.create(cut(resident, [0, 120, 240]))

        with pytest.raises(InputError, match=r"plan again from store\.index"):
            StreamedMatrix(store, "1 MiB", plan=plan_stream(other.index, "1 MiB"))

    def test_of_other_rows_in_pieces_of_the_same_length_is_refused(self, irregular, cut):
        """Small slabs fill two pages each wherever they are cut, so lengths alone tell nothing."""
        matrix = irregular(60, 20)
        store, other = (HostStore.create(cut(matrix, bounds)) for bounds in ([0, 24, 48, 60], [0, 12, 36, 60]))
        lengths = [[subdivision.nbytes for subdivision in each.index.subdivisions] for each in (store, other)]
        assert lengths[0] == lengths[1]

        with pytest.raises(InputError, match=r"plan again from store\.index"):
            StreamedMatrix(store, "16 KiB", plan=plan_stream(other.index, "16 KiB"))

    def test_from_symbolic_slabs_of_the_same_cut_is_accepted(self, beam, open_store, matrices):
        store = open_store("FileStore", "beam bsr float64 storage")
        plan = plan_stream(index_of(beam.symbolic_slabs(10), beam.shape), budget_nbytes("smallest", store.index))
        x = random_vectors(matrices["beam bsr float64 storage"][0])

        with StreamedMatrix(store, plan.storage_nbytes, plan=plan) as A:
            np.testing.assert_array_equal(A @ x, matrices["beam bsr float64 storage"][0] @ x)


class TestFailures:
    """One error for one fault; afterwards the matrix works as before."""

    @pytest.mark.parametrize("fault", range(30))
    def test_a_read_that_fails_gives_one_error_and_the_next_sweep_works(
        self, store, smallest, resident, overlap, fault
    ):
        def fail(read, number):
            if read == fault:
                raise StoreError("the disk is gone")

        x, expected, full = random_vectors(resident), 0, True
        with StreamedMatrix(FaultyStore(store, fail), smallest, ring=Ring(overlap=overlap)) as A:
            errors, good = 0, 0
            for _ in range(6):
                later = A.plan.sweep_nbytes(2 if A.direction == 1 else 1)
                try:
                    np.testing.assert_array_equal(A @ x, resident @ x)
                except StoreError:
                    errors, full = errors + 1, True
                else:
                    good += 1
                    expected += A.plan.streamed_nbytes if full else later
                    full = False

            assert (errors, good) == (1, 5)
            assert A.sweeps == 5
            assert A.bytes_streamed == expected

    @pytest.mark.parametrize("sweep_order", ["cyclic", "restart"])
    @pytest.mark.parametrize("fault", [0, 1, 5, 8, 9, 10, 20])
    def test_so_it_does_if_sweeps_do_not_turn(self, store, smallest, resident, overlap, sweep_order, fault):
        def fail(read, number):
            if read == fault:
                raise StoreError("the disk is gone")

        x, errors = random_vectors(resident), 0
        with StreamedMatrix(FaultyStore(store, fail), smallest, ring=Ring(overlap=overlap, sweeps=sweep_order)) as A:
            for _ in range(5):
                try:
                    np.testing.assert_array_equal(A @ x, resident @ x)
                except StoreError:
                    errors += 1

            assert (errors, A.sweeps) == (1, 4)
            assert A.bytes_streamed == 4 * A.plan.streamed_nbytes

    def test_a_resident_that_cannot_be_read_leaves_neither_thread_nor_memory(self, store, overlap):
        def fail(read, number):
            if read == 1:
                raise StoreError("the disk is gone")

        budget = MemoryBudget(budget_nbytes("half resident", store.index))
        with pytest.raises(StoreError, match="the disk is gone") as caught:
            StreamedMatrix(FaultyStore(store, fail), budget, ring=Ring(overlap=overlap))

        assert budget.used_nbytes == 0
        assert reader_threads() == []
        del caught  # until here its traceback kept the half-open matrix, so nothing was left to the garbage collector

    def test_a_disk_that_stays_away_fails_every_sweep_and_close_works(self, store, smallest, overlap):
        def fail(read, number):
            raise StoreError("the disk is gone")

        with StreamedMatrix(FaultyStore(store, fail), smallest, ring=Ring(overlap=overlap)) as A:
            for _ in range(3):
                with pytest.raises(StoreError, match="the disk is gone"):
                    A @ random_vectors(A)

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
    @pytest.mark.parametrize("at", [0, 1, 4, 8])
    def test_an_error_while_computing_comes_through_and_the_next_sweep_works(
        self, store, resident, budget_kind, overlap, error, at
    ):
        x = random_vectors(resident)

        def visit(number, slab):
            if number == at:
                raise error("stop here")

        with StreamedMatrix(store, budget_nbytes(budget_kind, store.index), ring=Ring(overlap=overlap)) as A:
            for _ in range(2):
                with pytest.raises(error, match="stop here"):
                    A.sweep(visit)

                np.testing.assert_array_equal(A @ x, resident @ x)
            assert A.sweeps == 2

    @pytest.fixture
    def ctrl_c_interrupts(self):
        """As in a terminal; a process started in the background may ignore the signal."""
        if threading.current_thread() is not threading.main_thread():
            pytest.skip("signals reach the main thread only")
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    @pytest.mark.usefixtures("ctrl_c_interrupts")
    @pytest.mark.timeout(60, method="thread")
    def test_ctrl_c_while_waiting_for_data_leaves_it_usable(self, store, smallest, resident, overlap):
        """A real signal, sent when the main thread waits for the fourth read or performs it."""

        def interrupt(read, number):
            if read == 3:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                time.sleep(0.05)

        x = random_vectors(resident)
        wrapped = FaultyStore(store, interrupt)
        with StreamedMatrix(wrapped, smallest, ring=Ring(overlap=overlap)) as A:
            with pytest.raises(KeyboardInterrupt):
                A @ x

            for _ in range(2):
                np.testing.assert_array_equal(A @ x, resident @ x)

    def test_a_file_altered_after_opening_names_subdivision_and_rows(self, matrices, tmp_path, overlap):
        with FileStore.create(tmp_path / "store", matrices["irregular csr"][1]) as store:
            start = sum(subdivision.nbytes for subdivision in store.index.subdivisions[:3])
            with open(tmp_path / "store" / "slabs.bin", "r+b") as file:
                file.seek(start)
                file.write(b"\xff" * 8)
            with (
                StreamedMatrix(store, budget_nbytes("smallest", store.index), ring=Ring(overlap=overlap)) as A,
                pytest.raises(StoreError, match=r"subdivision 3 \(rows 24 to 79\)"),
            ):
                A @ random_vectors(A)


class TestClose:
    def test_stops_the_reader_and_drops_what_was_fetched_ahead(self, store, smallest):
        A = StreamedMatrix(store, smallest, ring=Ring(overlap=True, slots=2))
        (reader,) = reader_threads()
        A @ random_vectors(A)

        A.close()

        assert not reader.is_alive()
        assert reader_threads() == []

    def test_without_overlap_there_is_no_reader(self, store, budget_kind):
        with StreamedMatrix(store, budget_nbytes(budget_kind, store.index), ring=Ring(overlap=False)):
            assert reader_threads() == []

    def test_all_resident_needs_no_reader(self, store):
        with StreamedMatrix(store, store.index.nbytes, ring=Ring(overlap=True)):
            assert reader_threads() == []

    def test_twice_is_fine(self, store, smallest, overlap):
        A = StreamedMatrix(store, smallest, ring=Ring(overlap=overlap))
        A.close()
        A.close()

        assert A.budget.used_nbytes == 0

    def test_leaves_the_store_open(self, store, smallest, resident):
        x = random_vectors(resident)
        for _ in range(2):
            with StreamedMatrix(store, smallest) as A:
                np.testing.assert_array_equal(A @ x, resident @ x)

    def test_use_afterwards_is_refused_with_advice(self, store, smallest, overlap):
        with StreamedMatrix(store, smallest, ring=Ring(overlap=overlap)) as A:
            A @ random_vectors(A)

        uses = [
            lambda: A @ np.ones(A.shape[1]),
            lambda: A.apply_absolute(np.ones(A.shape[1])),
            lambda: A.diagonal_blocks(1),
            lambda: A.sweep(lambda number, slab: None),
            lambda: A.recording().__enter__(),
        ]
        for use in uses:
            with pytest.raises(InputError, match="is closed; open a new one on its store"):
                use()

    def test_a_matrix_dropped_without_close_gives_thread_and_memory_back(self, store, smallest):
        """As when a notebook's variable is assigned anew."""
        budget = MemoryBudget(smallest)
        A = StreamedMatrix(store, budget, ring=Ring(overlap=True))
        A @ random_vectors(A)
        (reader,), executor = reader_threads(), A._sweeper.executor

        del A
        gc.collect()
        reader.join(PATIENCE_SECONDS / 10)
        left = reader.is_alive(), budget.used_nbytes
        executor.close()  # so that a leak here is not found again by every later test

        assert left == (False, 0)


class TestRecording:
    SWEEPS = 3

    @pytest.fixture
    def recorded(self, store, overlap):
        """Spans of three sweeps with reads of 4 ms and computations of 4 ms."""
        slow = SlowStore(store, latency=0.004)
        with StreamedMatrix(
            slow, budget_nbytes("smallest", store.index) + 8192, ring=Ring(slots=2, overlap=overlap)
        ) as A:
            with A.recording() as timeline:
                for _ in range(self.SWEEPS):
                    A.sweep(lambda number, slab: time.sleep(0.004))
            yield A.plan, timeline

    def split(self, timeline):
        by_start = sorted(timeline.spans, key=lambda span: span.start)
        return [[span for span in by_start if span.kind == kind] for kind in ("transfer", "compute")]

    def test_there_is_a_span_for_every_computation_and_every_transfer(self, recorded):
        plan, timeline = recorded
        assert plan.resident
        transfers, computations = self.split(timeline)

        sweeps = range(self.SWEEPS)
        order = [number for sweep in sweeps for number in plan.schedule.order(sweep)]
        assert [span.subdivision for span in computations] == order
        assert {span.subdivision for span in computations if span.slot is None} == plan.resident
        needed = [number for sweep in sweeps for number in plan.schedule.transfers(sweep)]
        assert [span.subdivision for span in transfers] == needed
        assert all(span.stop - span.start >= 0.004 for span in timeline.spans)

    def test_a_transfer_ends_before_its_computations_and_starts_after_the_last_use_of_its_slot(self, recorded):
        _, timeline = recorded
        transfers, computations = self.split(timeline)

        for compute in computations:
            if compute.slot is not None:
                fills = [span for span in transfers if span.slot == compute.slot]
                assert all(fill.stop <= compute.start or compute.stop <= fill.start for fill in fills)
                assert [fill for fill in fills if fill.stop <= compute.start][-1].subdivision == compute.subdivision

    def test_transfers_run_during_computations_if_and_only_if_asked_to(self, recorded, overlap):
        _, timeline = recorded
        transfers, computations = self.split(timeline)

        during = [
            transfer
            for transfer, compute in itertools.product(transfers, computations)
            if transfer.start < compute.stop and compute.start < transfer.stop
        ]
        assert bool(during) == overlap

    def test_spans_survive_json(self, recorded):
        _, timeline = recorded

        assert Timeline.from_json(timeline.to_json()) == timeline

    def test_times_count_from_the_start_of_the_recording(self, store, smallest, overlap):
        with StreamedMatrix(store, smallest, ring=Ring(overlap=overlap)) as A:
            time.sleep(0.2)
            with A.recording() as timeline:
                began = time.perf_counter()
                A @ random_vectors(A)
                lasted = time.perf_counter() - began

        assert min(span.start for span in timeline.spans) >= 0
        assert max(span.stop for span in timeline.spans) <= lasted + 0.1

    def test_nothing_is_recorded_outside_of_it(self, store, smallest, overlap):
        with StreamedMatrix(store, smallest, ring=Ring(overlap=overlap)) as A:
            A @ random_vectors(A)
            with A.recording() as timeline:
                A @ random_vectors(A)
            # Reads under way at the end may still be noted; nothing issued later may.
            A.sweep(lambda number, slab: None)
            count = len(timeline.spans)
            A @ random_vectors(A)

            assert len(timeline.spans) == count
            assert sum(span.kind == "compute" for span in timeline.spans) == 9

    @pytest.mark.timeout(60, method="thread")
    def test_its_end_does_not_disturb_a_read_under_way(self, store, resident, monkeypatch):
        """The reader finishes a read, looks at the clock, and meanwhile the recording ends."""
        reading, ended = threading.Event(), threading.Event()
        clock = time.perf_counter

        def slow_clock():
            if threading.current_thread() in reader_threads() and reading.is_set():
                ended.wait(PATIENCE_SECONDS)
            return clock()

        slow = SlowStore(store, latency=0.02)
        x = random_vectors(resident)
        A = StreamedMatrix(slow, budget_nbytes("smallest", store.index), ring=Ring(overlap=True, sweeps="cyclic"))
        (reader,) = reader_threads()
        monkeypatch.setattr(time, "perf_counter", slow_clock)
        with A.recording():
            A @ x
            reading.set()  # two reads have been issued ahead: one of them is under way
            time.sleep(0.1)
        ended.set()
        monkeypatch.undo()
        reader.join(0.2)

        alive = reader.is_alive()
        if not alive:
            A._sweeper.executor = None  # closing would wait for the dead reader for ever

        assert alive, "the reader died, and the next sweep would wait for it for ever"
        with A:
            np.testing.assert_array_equal(A @ x, resident @ x)


class TestOverlap:
    """Sleeps stand for a slow disk and a slow computation; both release the interpreter, as reads and kernels do."""

    READ_SECONDS, COMPUTE_SECONDS, SWEEPS = 0.02, 0.02, 2

    def sweep_seconds(self, store, overlap):
        """Return the time of some sweeps, and that of their reads and computations one after the other."""
        slow = SlowStore(store, latency=self.READ_SECONDS)
        with StreamedMatrix(slow, budget_nbytes("smallest", store.index), ring=Ring(overlap=overlap)) as A:
            assert len(A.plan.schedule.streamed) == 9
            began = time.perf_counter()
            for _ in range(self.SWEEPS):
                A.sweep(lambda number, slab: time.sleep(self.COMPUTE_SECONDS))
            seconds = time.perf_counter() - began
            reads = sum(len(A.plan.schedule.transfers(number)) for number in range(self.SWEEPS))
        return seconds, reads * self.READ_SECONDS + self.SWEEPS * 9 * self.COMPUTE_SECONDS

    def test_hides_reading_behind_computing(self, store):
        seconds, in_sequence = self.sweep_seconds(store, overlap=True)

        # Ideal is a little over one half; 0.8 leaves room for a busy machine and still excludes running in turn.
        assert seconds < 0.8 * in_sequence

    def test_when_off_nothing_is_hidden(self, store):
        seconds, in_sequence = self.sweep_seconds(store, overlap=False)

        assert seconds >= 0.99 * in_sequence

    @pytest.mark.parametrize("sweep_order", ["alternate", "cyclic", "restart"])
    def test_between_sweeps_the_ring_goes_on_only_if_it_is_to_continue(self, store, smallest, sweep_order):
        """Transfers go on while the solver works on its vectors; at a turn the slots are full of what comes next."""
        counting = CountingStore(SlowStore(store, latency=self.READ_SECONDS))
        with StreamedMatrix(counting, smallest, ring=Ring(overlap=True, sweeps=sweep_order)) as A:
            A.sweep(lambda number, slab: None)
            time.sleep(5 * self.READ_SECONDS)

            assert len(counting.numbers) == 9 + (A.plan.slots if sweep_order == "cyclic" else 0)


def test_a_device_that_is_unknown_is_refused(store, smallest):
    with pytest.raises(InputError, match="expected 'cpu', 'cuda' or 'cuda:<number>'"):
        StreamedMatrix(store, smallest, device="tpu")


def test_a_rectangular_matrix_streams(irregular, cut):
    tall = irregular(90, 7)
    with StreamedMatrix(HostStore.create(cut(tall, [0, 30, 60, 90])), "16 KiB") as A:
        x = np.arange(7.0)

        assert A.shape == (90, 7)
        np.testing.assert_array_equal(A @ x, CsrMatrix.from_csr(tall) @ x)
