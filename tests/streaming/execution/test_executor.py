"""Any executor carries out a plan, and what a GPU captures is decided apart from it: both played by stand-ins, without a GPU."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.fem import Cantilever
from penstock.spmv import StoreError, VectorSpace
from penstock.spmv.vectors.recurrence import Recurrence, RecurrenceStep
from penstock.streaming import (
    Compute,
    Copy,
    ExecutorSetup,
    HostStore,
    LinkRates,
    MemoryBudget,
    Ring,
    StreamedMatrix,
    SweepKey,
    Timeline,
    check_hazards,
    plan_stream,
)
from penstock.streaming.execution import graph_cache
from penstock.streaming.execution.graph_cache import GraphCache
from penstock.streaming.testing import FaultyStore


class PlainExecutor:
    """Reads each subdivision when its step comes, and remembers the steps played since the ring was last empty."""

    staged = False
    waited_seconds = 1.5

    def __init__(self, setup):
        self.setup, self.steps, self.sweeps, self.loaded, self.closed = setup, [], 0, [], False

    def load(self, number, buffer, part):
        self.setup.store.read_into(number, buffer, part)
        self.loaded.append((number, part))

    def play(self, steps, residents, visit, key=None):
        setup = self.setup
        for step in steps():
            self.steps.append(step)
            if isinstance(step, Copy):
                setup.store.read_into(step.subdivision, setup.slots[step.slot], setup.part)
            elif isinstance(step, Compute):
                slab = residents[step.subdivision] if step.slot is None else self.view(step.subdivision, step.slot)
                visit(step.subdivision, slab, step.stage)
        self.sweeps += 1

    def view(self, number, slot):
        structures = self.setup.structures
        return self.setup.store.index.view(number, self.setup.slots[slot], structures and structures[number])

    @contextlib.contextmanager
    def trace(self):
        yield Timeline()

    def drain(self):
        self.steps, self.sweeps = [], 0

    def close(self):
        self.closed = True


def check_played(A, first=0):
    """Verify all steps since the ring was last empty, and give up what is in the slots, as the checker wants it."""
    executor, plan = A._sweeper.executor, A.plan
    assert executor.steps
    steps = executor.steps + plan.schedule.epilogue(first + executor.sweeps)
    check_hazards(steps, subdivisions=len(plan.index.subdivisions), slots=plan.slots, resident=plan.resident)


def budget_of(store, slots, share=0.0):
    """Bytes of a ring of so many slots, and of a share of the rest of the matrix."""
    ring = slots * max(subdivision.nbytes for subdivision in store.index.subdivisions)
    return ring + int(share * (store.index.nbytes - ring))


@pytest.fixture(scope="module")
def store(beam):
    return HostStore.create(beam.subdivisions(7, "bsr"))


@pytest.fixture(scope="module")
def resident(beam):
    return beam.matrix("bsr")


@pytest.fixture
def x(resident):
    return np.random.default_rng(0).standard_normal(resident.shape[1])


class TestAnExecutorOfOnesOwn:
    @pytest.mark.parametrize("overlap", [True, False])
    @pytest.mark.parametrize("sweep_order", ["alternate", "cyclic", "restart"])
    @pytest.mark.parametrize("slots", [2, 3])
    @pytest.mark.parametrize("share", [0.0, 0.5])
    def test_gives_the_products_of_the_resident_matrix_by_steps_without_hazards(
        self, store, resident, x, overlap, sweep_order, slots, share
    ):
        ring = Ring(slots=slots, overlap=overlap, sweeps=sweep_order)
        with StreamedMatrix(store, budget_of(store, slots, share), ring=ring, executor=PlainExecutor) as A:
            assert bool(A.plan.resident) == bool(share)
            for sweeps in range(1, 5):
                np.testing.assert_array_equal(A @ x, resident @ x)
                check_played(A)
                assert A._sweeper.executor.sweeps == A.sweeps == sweeps

    @pytest.mark.parametrize("overlap", [True, False])
    def test_takes_many_steps_of_a_recurrence_in_one_sweep(self, store, resident, x, overlap):
        def powers(A, count):
            steps = [RecurrenceStep(-1.0, 0.0, 0.0, scaled=False, driven=False)] * count
            vectors = (np.full_like(x, np.nan) for _ in range(4))
            return Recurrence(steps, x.copy(), *vectors, VectorSpace(A.device)).run(A)

        with StreamedMatrix(
            store, budget_of(store, 5), ring=Ring(slots=5, overlap=overlap), executor=PlainExecutor
        ) as A:
            count = A.powers_per_sweep()
            assert count > 1
            A.turn_to(-A.direction)
            first, sweeps = 0 if A.direction == 1 else 1, A.sweeps
            np.testing.assert_array_equal(powers(A, 2 * count), powers(resident, 2 * count))

            assert A.sweeps == sweeps + 2
            assert {step.stage for step in A._sweeper.executor.steps if isinstance(step, Compute)} == set(range(count))
            check_played(A, first)

    @pytest.mark.parametrize("overlap", [True, False])
    def test_keeps_the_structure_and_moves_values_only(self, store, resident, x, overlap):
        budget = store.index.part_nbytes("structure") + 3 * max(
            s.part_nbytes("values") for s in store.index.subdivisions
        )
        ring = Ring(slots=2, overlap=overlap, resident_structure=True)
        with StreamedMatrix(store, budget, ring=ring, executor=PlainExecutor) as A:
            executor = A._sweeper.executor
            structures = [(number, "structure") for number in range(7)]
            assert executor.loaded == structures + [(number, "values") for number in sorted(A.plan.resident)]
            for _ in range(3):
                np.testing.assert_array_equal(A @ x, resident @ x)
            check_played(A)

    def test_is_given_what_the_plan_decided_and_closed_with_the_matrix(self, store):
        given = []

        def make(setup):
            given.append(setup)
            return PlainExecutor(setup)

        rates = LinkRates(1e6, 1e12)
        plan = plan_stream(store.index, budget_of(store, 3, 0.5), ring=Ring(slots=3, sweeps="cyclic"), rates=rates)
        budget = MemoryBudget(plan.storage_nbytes)
        with StreamedMatrix(store, budget, plan=plan, stall_seconds=7.0, executor=make) as A:
            executor = A._sweeper.executor
            assert (A.staged, A.waited_seconds) == (False, 1.5)
            with A.recording() as timeline:
                assert timeline.spans == []

        [setup] = given
        assert isinstance(setup, ExecutorSetup)
        assert (setup.store, setup.device, setup.part, setup.overlap) == (store, A.device, "whole", True)
        assert [slot.nbytes for slot in setup.slots] == [plan.slot_nbytes] * 3
        assert (setup.structures, setup.stall_seconds, setup.link_binds) == (None, 7.0, True)
        assert executor.closed
        assert budget.used_nbytes == 0

    @pytest.mark.parametrize(("link", "binds"), [(1e6, True), (1e12, False), (None, False)])
    def test_is_told_whether_the_link_is_expected_to_bind(self, store, link, binds):
        rates = None if link is None else LinkRates(link, 1e10)
        plan = plan_stream(store.index, budget_of(store, 2), ring=Ring(slots=2), rates=rates)
        with StreamedMatrix(store, plan.storage_nbytes, plan=plan, executor=PlainExecutor) as A:
            assert A._sweeper.executor.setup.link_binds is binds

    def test_that_cannot_be_made_leaves_the_budget_free(self, store):
        def refuse(setup):
            raise RuntimeError("not today")

        budget = MemoryBudget(budget_of(store, 2))
        with pytest.raises(RuntimeError, match="not today"):
            StreamedMatrix(store, budget, executor=refuse)

        assert budget.used_nbytes == 0

    @pytest.mark.parametrize("fault", [0, 1, 4, 9])
    def test_that_fails_starts_from_an_empty_ring(self, store, resident, x, fault):
        def fail(read, number):
            if read == fault:
                raise StoreError("the disk is gone")

        with StreamedMatrix(FaultyStore(store, fail), budget_of(store, 2), executor=PlainExecutor) as A:
            errors, first = 0, 0
            for _ in range(5):
                try:
                    np.testing.assert_array_equal(A @ x, resident @ x)
                except StoreError:
                    errors, first = errors + 1, 0 if A.direction == 1 else 1
                else:
                    check_played(A, first)

            assert (errors, A.sweeps) == (1, 4)


def sweep_key(kernels=("csr",), memory=(1, 2), unit="sweep"):
    return SweepKey(kernels, memory, unit)


class TestGraphCache:
    """What is captured, and when; stand-ins for graphs count how often they were captured and launched."""

    @pytest.fixture
    def captured(self, monkeypatch):
        """The graphs of visits captured so far; a capture issues its kernels, which do not run."""
        graphs = []

        def capture(issue):
            issue()
            graph = SimpleNamespace(launches=0)
            graph.launch = lambda: setattr(graph, "launches", graph.launches + 1)
            graphs.append(graph)
            return graph

        monkeypatch.setattr(graph_cache, "capture", capture)
        return graphs

    @pytest.fixture
    def cache(self):
        return GraphCache()

    @pytest.fixture
    def capture_sweep(self):
        """``capture_sweep(name)`` is a function that captures a sweep; ``capture_sweep.done`` has the names of those captured."""

        def named(name):
            def capture():
                named.done.append(name)
                return [(SimpleNamespace(name=name), 1)]

            return capture

        named.done = []
        return named

    def test_a_sweep_is_captured_only_when_its_kernels_have_been_started(self, cache, capture_sweep):
        key = sweep_key()
        assert cache.sweep(key, capture_sweep("early")) is None
        assert cache.sweep(key, capture_sweep("early")) is None, "asked for, but not started"
        cache.note(sweep_key(kernels=("bsr",)))
        assert cache.sweep(key, capture_sweep("others started")) is None

        cache.note(key)
        [(graph, lanes)] = cache.sweep(key, capture_sweep("in time"))

        assert (graph.name, lanes) == ("in time", 1)
        assert capture_sweep.done == ["in time"]

    def test_it_is_captured_once_for_each_memory(self, cache, capture_sweep):
        keys = [sweep_key(memory=(address,)) for address in range(3)]
        cache.note(keys[0])  # the same kernels, wherever they worked
        first = [cache.sweep(key, capture_sweep(key.memory)) for key in keys]
        again = [cache.sweep(key, capture_sweep("again")) for key in keys]

        assert all(one is other for one, other in zip(first, again, strict=True))
        assert capture_sweep.done == [key.memory for key in keys]

    def test_without_memory_kernels_are_only_noted(self, cache, capture_sweep):
        nowhere = sweep_key(memory=None)
        for _ in range(3):
            assert cache.sweep(nowhere, capture_sweep("nowhere")) is None
            cache.note(nowhere)
        assert capture_sweep.done == []

        assert cache.sweep(sweep_key(), capture_sweep("here")) is not None

    def test_the_least_recently_used_gives_way_to_the_65th(self, cache, capture_sweep):
        keys = [sweep_key(memory=(address,)) for address in range(65)]
        cache.note(keys[0])
        for key in keys:
            cache.sweep(key, capture_sweep(key.memory))
        assert len(cache._sweeps) == 64

        for key in reversed(keys[1:]):
            cache.sweep(key, capture_sweep("kept"))
        assert capture_sweep.done == [key.memory for key in keys]
        cache.sweep(keys[0], capture_sweep("anew"))
        assert capture_sweep.done[65:] == ["anew"]
        assert len(cache._sweeps) == 64

    def test_keys_of_visits_capture_no_sweep_nor_allow_one(self, cache, capture_sweep):
        of_visits = sweep_key(unit="visit")
        cache.note(of_visits)

        assert cache.sweep(of_visits, capture_sweep("visits")) is None
        assert cache.sweep(sweep_key(), capture_sweep("sweep")) is None
        assert capture_sweep.done == []

    def test_visits_are_captured_when_the_same_memory_comes_twice(self, cache, captured):
        issued, slabs = [], [object(), object()]

        def visit(number, slab, stage):
            issued.append((number, slab, stage))

        def sweep(memory):
            run = cache.visits(sweep_key((), memory, "visit"), visit)
            for number, slab in enumerate(slabs):
                run(number, slab, 0)
            cache.note(sweep_key((), memory, "visit"))
            return run

        assert sweep((1,)) is visit
        assert captured == []
        assert sweep((1,)) is not visit
        assert [graph.launches for graph in captured] == [1, 1]
        everything = [(number, slab, 0) for number, slab in enumerate(slabs)]
        assert issued == 2 * everything, "once started, once captured"

        sweep((1,))
        assert issued == 2 * everything
        assert [graph.launches for graph in captured] == [2, 2]

        assert sweep((2,)) is visit, "other memory is started first"
        assert sweep((1,)) is visit, "and the graphs of the first one are gone"
        assert [graph.launches for graph in captured] == [2, 2]

    def test_a_subdivision_in_another_slot_is_captured_anew(self, cache, captured):
        key, here, there = sweep_key((), (1,), "visit"), object(), object()
        cache.visits(key, lambda number, slab, stage: None)
        cache.note(key)
        run = cache.visits(key, lambda number, slab, stage: None)
        for slab in (here, there, here, there):
            run(0, slab, 0)

        assert [graph.launches for graph in captured] == [2, 2]

    def test_the_visits_of_a_sweep_that_is_captured_as_a_whole_are_left_alone(self, cache, captured):
        def visit(number, slab, stage):
            raise AssertionError("nobody called it")

        for _ in range(3):
            assert cache.visits(sweep_key(), visit) is visit
        assert captured == []

    def test_nothing_is_kept_after_it_is_cleared(self, cache, capture_sweep, captured):
        cache.note(sweep_key())
        cache.sweep(sweep_key(), capture_sweep("one"))
        cache.clear()
        cache.sweep(sweep_key(), capture_sweep("two"))

        assert capture_sweep.done == ["one", "two"]


def test_a_process_that_may_start_no_thread_gets_one_error_that_says_so(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    with HostStore.create(Cantilever(nodes=(17, 3, 3)).subdivisions(8)) as store:
        with pytest.raises(StoreError, match="no thread could be started to read a HostStore: can't start new thread"):
            StreamedMatrix(store, int(0.6 * store.index.nbytes))
        with StreamedMatrix(store, int(0.6 * store.index.nbytes), ring=Ring(overlap=False)) as streamed:
            assert np.isfinite(streamed @ np.ones(streamed.shape[1])).all()
