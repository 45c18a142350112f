"""What a streamed matrix can do beside plain products: turn, keep its structure, repeat products, and tell what failed."""

import contextlib
import itertools
import json
import threading
import time

import numpy as np
import pytest

from penstock.spmv import InputError, StoreError, format_named, format_names
from penstock.spmv.formats.partition import cut_rows
from penstock.streaming import FileStore, HostStore, MemoryBudget, Ring, StreamedMatrix, plan_stream
from penstock.streaming.testing import CountingStore, FaultyStore, SlowStore

KEYWORDS = {
    "bsr": {"block_size": 3},
    "sliced_bsr": {"block_size": 3, "sorting_scope": 32},
    "symmetric_bsr": {"block_size": 3},
    "sell": {"chunk_height": 4, "sorting_scope": 4},
}
SUBDIVISIONS = 5
STALL_SECONDS = 0.2
PATIENCE_SECONDS = 10.0


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "penstock-reader"]


@pytest.fixture(autouse=True)
def no_reader_is_left():
    yield
    deadline = time.monotonic() + PATIENCE_SECONDS
    while reader_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reader_threads() == []


@pytest.fixture(scope="module")
def resident(beam):
    """``resident(format_name)`` is the beam's matrix in that format."""
    A, made = beam.matrix("csr").to_csr(), {}

    def get(name):
        if name not in made:
            made[name] = format_named(name).from_csr(A, **KEYWORDS.get(name, {}))
        return made[name]

    return get


@pytest.fixture(scope="module")
def stored(resident, tmp_path_factory):
    """``stored(kind, format_name)`` is a store of it in five pieces."""
    made = {}

    def get(kind, name):
        if (kind, name) not in made:
            matrix = resident(name)
            bounds = cut_rows(matrix, SUBDIVISIONS)
            slabs = (matrix.rows(start, stop) for start, stop in itertools.pairwise(bounds))
            if kind == "HostStore":
                made[kind, name] = HostStore.create(slabs)
            else:
                made[kind, name] = FileStore.create(tmp_path_factory.mktemp("stores") / "store", slabs)
        return made[kind, name]

    yield get
    for store in made.values():
        store.close()


@pytest.fixture
def store(stored):
    return stored("HostStore", "csr")


@pytest.fixture(params=[True, False], ids=["overlap", "in turn"])
def overlap(request):
    return request.param


def ring(store, slots=2):
    return slots * max(subdivision.nbytes for subdivision in store.index.subdivisions)


def vectors(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("kind", ["HostStore", "FileStore"])
@pytest.mark.parametrize("name", ["csr", "bsr", "symmetric_bsr", "sell"])
class TestAResidentStructure:
    def test_gives_the_same_bits_moves_values_only_and_keeps_the_budget(self, stored, kind, name, overlap):
        store = stored(kind, name)
        index = store.index
        largest = max(piece.part_nbytes("values") for piece in index.subdivisions)
        budget = MemoryBudget(index.part_nbytes("structure") + 3 * largest)
        counting, x = CountingStore(store), vectors(index.shape[1])
        with StreamedMatrix(store, ring(store), ring=Ring(overlap=overlap, slots=2)) as whole:
            expected = [whole @ x for _ in range(4)]

        with StreamedMatrix(counting, budget, ring=Ring(overlap=overlap, slots=2, resident_structure=True)) as A:
            assert A.plan.slots == 2
            opened = counting.nbytes
            assert opened == index.part_nbytes("structure") + A.plan.resident_nbytes
            products = [A @ x for _ in range(4)]
            assert counting.nbytes - opened == A.bytes_streamed
            values = [
                index.subdivisions[n].part_nbytes("values") for s in range(4) for n in A.plan.schedule.transfers(s)
            ]
            assert A.bytes_streamed == sum(values) > 0
            assert budget.used_nbytes == A.plan.storage_nbytes

        assert budget.peak_nbytes <= budget.limit_nbytes < index.nbytes
        np.testing.assert_array_equal(products, expected)

    def test_serves_diagonal_blocks_and_absolute_products(self, stored, resident, kind, name):
        store, matrix = stored(kind, name), resident(name)
        x = vectors(matrix.shape[1])
        budget = store.index.part_nbytes("structure") + ring(store)
        with StreamedMatrix(
            store, min(budget, store.index.nbytes - 1), ring=Ring(slots=2, resident_structure=True)
        ) as A:
            np.testing.assert_array_equal(A.diagonal_blocks(3), matrix.diagonal_blocks(3))
            np.testing.assert_allclose(A.apply_absolute(x), matrix.apply_absolute(x), rtol=1e-12, atol=1e-300)


class TestApplyEach:
    @pytest.mark.parametrize("name", format_names())
    @pytest.mark.parametrize("columns", [(), (3,)], ids=["vectors", "blocks of vectors"])
    def test_is_bit_equal_to_products_of_their_own_in_a_single_sweep(self, stored, name, columns):
        store = stored("HostStore", name)
        X = vectors(4, store.index.shape[1], *columns)
        with StreamedMatrix(store, ring(store), ring=Ring(slots=2)) as A:
            expected = []
            for x in X:
                A.turn_to(1)  # what scatters adds to rows in the order of the sweep
                expected.append(A @ x)
            A.turn_to(1)
            sweeps = A.sweeps
            products = A.apply_each(X)

            assert A.sweeps == sweeps + 1
            np.testing.assert_array_equal(products, expected, strict=True)
            out = np.full_like(products, np.nan)
            A.turn_to(1)
            assert A.apply_each(X, out) is out
            np.testing.assert_array_equal(out, expected)

    @pytest.mark.parametrize("shape", [(420,), (0, 420), (2, 419), (2, 3, 420), (2, 420, 1, 1)])
    def test_another_shape_is_refused(self, store, shape):
        with StreamedMatrix(store, ring(store)) as A:
            with pytest.raises(InputError, match=r"X must have shape \(repeats, 420\)"):
                A.apply_each(np.ones(shape))
            assert (A.sweeps, A.bytes_streamed) == (0, 0)

    @pytest.mark.parametrize(
        "out",
        [
            np.ones((2, 419)),
            np.ones((3, 420)),
            np.ones((2, 420, 1)),
            np.ones((2, 420), np.float32),
            np.ones((420, 2)).T,
        ],
        ids=["rows", "repeats", "dimensions", "type", "order"],
    )
    def test_another_out_is_refused(self, store, out):
        with (
            StreamedMatrix(store, ring(store)) as A,
            pytest.raises(InputError, match=r"out must be a C-contiguous array of shape \(2, 420\)"),
        ):
            A.apply_each(np.ones((2, 420)), out)

    @pytest.mark.parametrize("first", [0, 1])
    def test_an_out_that_overlaps_is_refused(self, store, first):
        memory = np.ones((4, 420))
        with StreamedMatrix(store, ring(store)) as A, pytest.raises(InputError, match="X and out overlap"):
            A.apply_each(memory[:2], memory[first : first + 2])

    def test_a_type_that_would_lose_digits_is_refused(self, store):
        with StreamedMatrix(store, ring(store)) as A, pytest.raises(InputError, match=r"X\[r\] has type complex128"):
            A.apply_each(np.ones((2, 420), dtype=complex))


class TestDirection:
    def visited(self, A):
        seen = []
        A.sweep(lambda number, slab: seen.append(number))
        return seen

    def test_alternates_and_can_be_chosen(self, store, overlap):
        there, back = list(range(SUBDIVISIONS)), list(range(SUBDIVISIONS))[::-1]
        with StreamedMatrix(store, ring(store), ring=Ring(overlap=overlap)) as A:
            assert (A.direction, self.visited(A), A.direction) == (1, there, -1)
            A.turn_to(-1)
            assert self.visited(A) == back
            A.turn_to(-1)
            assert (A.direction, self.visited(A), self.visited(A)) == (-1, back, there)
            for direction in (1, -1, 1, -1, -1):
                A.turn_to(direction)
                assert self.visited(A) == (there if direction == 1 else back)

    def test_a_run_may_begin_backwards(self, store, resident, overlap):
        x = vectors(store.index.shape[1])
        with StreamedMatrix(store, ring(store), ring=Ring(overlap=overlap)) as A:
            A.turn_to(-1)
            for number in range(4):
                assert A.direction == (1 if number % 2 else -1)
                np.testing.assert_array_equal(A @ x, resident("csr") @ x)

    def test_turning_away_costs_the_ring_and_staying_nothing(self, store, overlap):
        counting = CountingStore(store)
        with StreamedMatrix(counting, ring(store), ring=Ring(overlap=overlap)) as A:
            plan = A.plan
            self.visited(A)
            A.turn_to(-1)
            self.visited(A)
            assert A.bytes_streamed == plan.sweep_nbytes(0) + plan.sweep_nbytes(1)
            A.turn_to(-1)
            self.visited(A)

            assert A.bytes_streamed == 2 * plan.sweep_nbytes(0) + plan.sweep_nbytes(1)
            assert counting.nbytes == A.bytes_streamed

    def test_there_and_back_again_before_a_sweep_is_correct(self, store, resident, overlap):
        x = vectors(store.index.shape[1])
        with StreamedMatrix(store, ring(store), ring=Ring(overlap=overlap)) as A:
            for direction in (-1, 1, -1, 1):
                A.turn_to(direction)
            np.testing.assert_array_equal(A @ x, resident("csr") @ x)
            A.turn_to(1)
            A.turn_to(-1)
            np.testing.assert_array_equal(A @ x, resident("csr") @ x)

    @pytest.mark.parametrize(
        ("sweep_order", "direction"), [("cyclic", -1), ("restart", -1), ("alternate", 0), ("alternate", 2)]
    )
    def test_one_that_the_plan_does_not_have_is_refused(self, store, sweep_order, direction):
        with StreamedMatrix(store, ring(store), ring=Ring(sweeps=sweep_order)) as A:
            A.turn_to(1)
            with pytest.raises(InputError, match=f"not {direction}|do not alternate"):
                A.turn_to(direction)
            assert A.direction == 1

    def test_of_a_scattering_format_decides_the_bits(self, stored, overlap):
        store = stored("HostStore", "symmetric_bsr")
        x = vectors(store.index.shape[1])
        with StreamedMatrix(store, ring(store), ring=Ring(overlap=overlap)) as A:
            alternating = [A @ x for _ in range(4)]
            A.turn_to(1)
            again = A @ x

        np.testing.assert_array_equal(alternating[0], alternating[2])
        np.testing.assert_array_equal(alternating[1], alternating[3])
        np.testing.assert_array_equal(alternating[0], again)
        np.testing.assert_allclose(alternating[0], alternating[1], rtol=1e-9)


@pytest.mark.parametrize("sweep_order", ["alternate", "cyclic", "restart"])
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_without_a_budget_of_a_plan_few_pieces_go_through_a_longer_ring(resident, sweep_order, overlap, pieces):
    store = HostStore.from_matrix(resident("csr"), pieces)
    plan = plan_stream(store.index, None, ring=Ring(sweeps=sweep_order, overlap=overlap))
    x = vectors(store.index.shape[1])

    with StreamedMatrix(store, plan.storage_nbytes, plan=plan) as A:
        for _ in range(5):
            np.testing.assert_array_equal(A @ x, resident("csr") @ x)


def test_a_ring_longer_than_the_matrix_records_the_slots_its_transfers_went_to(resident):
    store = HostStore.from_matrix(resident("csr"), 1)
    plan = plan_stream(store.index, None, ring=Ring(sweeps="cyclic"))
    slow = SlowStore(store, latency=0.02)
    with StreamedMatrix(slow, plan.storage_nbytes, plan=plan) as A, A.recording() as timeline:
        A.sweep(lambda number, slab: None)

    transfer = next(span for span in timeline.spans if span.kind == "transfer")
    compute = next(span for span in timeline.spans if span.kind == "compute")
    assert transfer.slot == compute.slot


class TestAStall:
    @pytest.fixture
    def stalling(self, store):
        """A store whose fourth read waits for an event."""
        going_on = threading.Event()

        def stall(read, number):
            if read == 3:
                going_on.wait(PATIENCE_SECONDS)

        yield FaultyStore(store, stall), going_on
        going_on.set()

    def test_is_an_error_in_time_that_names_the_subdivision_and_afterwards_all_is_well(self, stalling, resident):
        slow, going_on = stalling
        x = vectors(slow.index.shape[1])
        with StreamedMatrix(slow, ring(slow), stall_seconds=STALL_SECONDS) as A:
            began = time.perf_counter()
            with pytest.raises(StoreError, match=r"subdivision 3 \(rows \d+ to \d+\) of a FaultyStore for 0\.2 s"):
                A @ x
            assert STALL_SECONDS <= time.perf_counter() - began < PATIENCE_SECONDS / 2
            with pytest.raises(StoreError, match="nothing came from a FaultyStore"):
                A @ x
            assert (A.sweeps, len(reader_threads())) == (0, 1)

            going_on.set()
            for _ in range(3):
                np.testing.assert_array_equal(A @ x, resident("csr") @ x)
            assert (A.sweeps, len(reader_threads())) == (3, 1)
            assert A.bytes_streamed == sum(map(A.plan.sweep_nbytes, range(3)))

    def test_at_close_leaves_the_budget_free_and_a_thread_that_ends_by_itself(self, stalling):
        slow, going_on = stalling
        budget = MemoryBudget(ring(slow))
        A = StreamedMatrix(slow, budget, stall_seconds=STALL_SECONDS)
        with pytest.raises(StoreError, match="stalls"):
            A @ vectors(slow.index.shape[1])

        began = time.perf_counter()
        with contextlib.suppress(StoreError):
            A.close()
        assert time.perf_counter() - began < PATIENCE_SECONDS / 2
        assert budget.used_nbytes == 0
        [reader] = reader_threads()
        going_on.set()
        reader.join(PATIENCE_SECONDS)
        assert not reader.is_alive()

    def test_reads_that_are_slow_but_come_are_none(self, store, resident):
        x = vectors(store.index.shape[1])
        slow = SlowStore(store, latency=STALL_SECONDS / 4)
        with StreamedMatrix(slow, ring(store), stall_seconds=STALL_SECONDS) as A:  # the sweep takes longer than that
            np.testing.assert_array_equal(A @ x, resident("csr") @ x)


class TestWhatFailedIsTold:
    @pytest.mark.parametrize("kind", ["HostStore", "FileStore"])
    def test_of_a_computation(self, stored, kind, overlap):
        store = stored(kind, "csr")
        where = str(getattr(store, "path", "a HostStore"))

        def visit(number, slab):
            if number == 2:
                raise ValueError("not this one")

        with (
            StreamedMatrix(store, ring(store), ring=Ring(overlap=overlap)) as A,
            pytest.raises(ValueError, match="not this one") as caught,
        ):
            A.sweep(visit)

        assert caught.value.__notes__ == [
            f"while computing with subdivision 2 ({store.index.subdivisions[2]}) of {where}"
        ]

    def test_of_a_read_that_does_not_tell_it_itself(self, store, overlap):
        def fail(read, number):
            if number == 1:
                raise OSError("something with the network")

        with (
            StreamedMatrix(FaultyStore(store, fail), ring(store), ring=Ring(overlap=overlap)) as A,
            pytest.raises(OSError, match="network") as caught,
        ):
            A @ vectors(store.index.shape[1])

        assert caught.value.__notes__ == [
            f"while reading subdivision 1 ({store.index.subdivisions[1]}) of a FaultyStore"
        ]

    def test_once_if_the_store_tells_it_itself(self, resident, tmp_path, overlap):
        matrix = resident("csr")
        slabs = [matrix.rows(0, 120), matrix.rows(120, 240), matrix.rows(240, 420)]
        with FileStore.create(tmp_path / "store", slabs) as store:
            (tmp_path / "store" / "slabs.bin").write_bytes(b"\1" * store.index.nbytes)
            with (
                StreamedMatrix(store, ring(store), ring=Ring(overlap=overlap)) as A,
                pytest.raises(StoreError, match=r"subdivision 0 \(rows 0 to 119\)") as caught,
            ):
                A @ vectors(420)

        assert not getattr(caught.value, "__notes__", [])


def test_a_recording_is_a_chrome_trace(store, overlap):
    with StreamedMatrix(store, ring(store), ring=Ring(overlap=overlap)) as A:
        with A.recording() as timeline:
            A @ vectors(store.index.shape[1])
            A @ vectors(store.index.shape[1])
        transfers = [n for sweep in range(2) for n in A.plan.schedule.transfers(sweep)]

    events = [event for event in json.loads(timeline.to_chrome_trace())["traceEvents"] if event["ph"] == "X"]
    names = [event["name"] for event in sorted(events, key=lambda event: event["ts"])]
    assert [name for name in names if name.startswith("transfer")] == [f"transfer {number}" for number in transfers]
    there = [f"compute {number}" for number in range(SUBDIVISIONS)]
    assert [name for name in names if name.startswith("compute")] == there + there[::-1]
    assert all(event["dur"] > 0 for event in events)


def test_on_the_host_nothing_is_staged(store):
    with StreamedMatrix(store, ring(store)) as A:
        assert A.staged is False
