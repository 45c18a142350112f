"""A plan keeps its budget, uses it, and says what it decided. Nothing here moves a byte of a matrix."""

import contextlib
import itertools
import math
import re

import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.fem import Cantilever
from penstock.spmv import BudgetError, InputError, PenstockError, format_nbytes
from penstock.streaming import (
    Compute,
    Copy,
    LinkRates,
    MatrixIndex,
    Release,
    Ring,
    Subdivision,
    Workload,
    index_of,
    plan_stream,
)
from penstock.streaming.stores.buffers import PAGE_NBYTES
from penstock.streaming.stores.packing import as_slab

pure = settings(deadline=None, max_examples=300, database=None)

RATES = LinkRates(link=1e9, memory=3e9)


def index_with(sizes):
    """An index of one row and one entry a subdivision; a plan looks at nothing but sizes."""
    subdivisions = tuple(Subdivision(n, n + 1, 1, (), nbytes) for n, nbytes in enumerate(sizes))
    return MatrixIndex((len(sizes), len(sizes)), "float64", "csr", {}, subdivisions)


def smallest_budget(error):
    return int(re.search(r"the smallest that does is (\d+) bytes", str(error))[1])


page_sizes = st.lists(st.integers(1, 40).map(lambda pages: pages * PAGE_NBYTES), min_size=1, max_size=40)
budgets = st.integers(1, 2000 * PAGE_NBYTES)
rings = st.none() | st.integers(2, 6)


@pure
@given(page_sizes, budgets, rings)
def test_a_plan_never_exceeds_its_budget_and_leaves_nothing_out(sizes, budget, slots):
    if budget < min(sum(sizes), (slots or 2) * max(sizes)):
        with pytest.raises(BudgetError, match="cut the matrix into smaller"):
            plan_stream(index_with(sizes), budget, ring=Ring(slots=slots))
        return
    plan = plan_stream(index_with(sizes), budget, ring=Ring(slots=slots))

    streamed = set(plan.schedule.streamed)
    assert plan.storage_nbytes <= budget
    assert plan.storage_nbytes == plan.slots * plan.slot_nbytes + sum(sizes[n] for n in plan.resident)
    assert streamed | plan.resident == set(range(len(sizes)))
    assert not streamed & plan.resident
    assert plan.streamed_nbytes == sum(sizes[n] for n in streamed)
    assert plan.streamed_nbytes + plan.resident_nbytes == sum(sizes)
    assert all(sizes[n] <= plan.slot_nbytes for n in streamed)


@pure
@given(page_sizes, st.integers(-1, 1))
def test_everything_is_resident_exactly_when_it_fits(sizes, spare):
    sizes = 3 * sizes  # so that two slots of the largest always fit

    plan = plan_stream(index_with(sizes), sum(sizes) + spare)

    assert (plan.slots == 0) == (plan.streamed_nbytes == 0) == (spare >= 0)


@pure
@given(st.integers(1, 100), st.integers(3, 100))
def test_residents_are_spread_evenly(residents, streamed):
    """The longest run of streamed subdivisions, around the end of the sweep too, is as short as counts allow."""
    count = residents + streamed
    plan = plan_stream(index_with([PAGE_NBYTES] * count), (2 + residents) * PAGE_NBYTES, ring=Ring(slots=2))

    positions = sorted(plan.resident)
    gaps = [b - a - 1 for a, b in itertools.pairwise([*positions, positions[0] + count])]

    assert len(positions) == residents
    assert max(gaps) <= math.ceil(streamed / residents)


@pure
@given(st.integers(2, 40), st.integers(1, 60))
def test_equal_subdivisions_leave_no_room_for_one_more_resident(pages, too_many):
    plan = plan_stream(index_with([PAGE_NBYTES] * (pages + too_many)), pages * PAGE_NBYTES + 7)

    assert plan.budget_nbytes - plan.storage_nbytes < PAGE_NBYTES


@pure
@given(page_sizes, st.integers(2, 5), st.integers(1, PAGE_NBYTES))
def test_a_refusal_names_the_smallest_budget_that_would_do(sizes, slots, below):
    sizes = sizes + [max(sizes)] * (slots + 1)  # so that a ring is smaller than the matrix
    needed = slots * max(sizes)
    with pytest.raises(BudgetError, match="or cut the matrix into smaller") as caught:
        plan_stream(index_with(sizes), needed - below, ring=Ring(slots=slots))

    assert smallest_budget(caught.value) == needed
    assert plan_stream(index_with(sizes), needed, ring=Ring(slots=slots)).slots == slots
    with pytest.raises(BudgetError):
        plan_stream(index_with(sizes), needed - 1, ring=Ring(slots=slots))


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_matrix_in_few_pieces_is_not_told_to_take_more_than_its_own_size(pieces):
    """Two or three slots may hold more than the whole matrix; resident it needs less."""
    index = index_with([10 * PAGE_NBYTES] * pieces)
    with pytest.raises(BudgetError, match="the smallest that does is") as caught:
        plan_stream(index, PAGE_NBYTES, ring=Ring(slots=3))

    assert smallest_budget(caught.value) == index.nbytes
    assert f"neither the matrix of {format_nbytes(index.nbytes)} nor" in str(caught.value)
    assert "for the matrix;" in str(caught.value)
    assert plan_stream(index, index.nbytes).streamed_nbytes == 0


@pytest.mark.parametrize(("pages", "slots"), [(5, 2), (6, 3), (9, 3)])
def test_by_default_three_slots_are_taken_if_they_use_at_most_half_the_budget(pages, slots):
    assert plan_stream(index_with([PAGE_NBYTES] * 20), pages * PAGE_NBYTES).slots == slots


@pytest.mark.parametrize("slots", [2, 3, 4, 7])
def test_the_number_of_slots_asked_for_is_kept(slots):
    plan = plan_stream(index_with([PAGE_NBYTES] * 20), 9 * PAGE_NBYTES, ring=Ring(slots=slots))

    assert plan.slots == plan.schedule.slots == slots
    assert len(plan.resident) == 9 - slots


@pytest.mark.parametrize("slots", [1, 0, -2])
def test_fewer_than_two_slots_are_refused_for_what_they_are(slots):
    """The budget here is ample, so the message must not blame it."""
    with pytest.raises(InputError, match="at least 2"):
        plan_stream(index_with([PAGE_NBYTES] * 20), 9 * PAGE_NBYTES, ring=Ring(slots=slots))


@pytest.mark.parametrize(
    "refused",
    [
        lambda index: plan_stream(index, 9 * PAGE_NBYTES, Workload(degree=2.5)),
        lambda index: plan_stream(index, 9 * PAGE_NBYTES, Workload(columns=0)),
        lambda index: plan_stream(index, 9 * PAGE_NBYTES, Workload(repeats=-1)),
        lambda index: plan_stream(index, 9 * PAGE_NBYTES, ring=Ring(slots=3.5)),
        lambda index: plan_stream(index, 9 * PAGE_NBYTES, ring=Ring(sweeps="sideways")),
        lambda index: plan_stream(index, 9 * PAGE_NBYTES, reach=1.5),
        lambda index: plan_stream(index, 9 * PAGE_NBYTES, reach=0),
    ],
    ids=[
        "part of a power",
        "no columns",
        "fewer than no repeats",
        "part of a slot",
        "no order",
        "half a reach",
        "no reach",
    ],
)
def test_what_cannot_be_counted_or_is_no_order_of_sweeps_is_refused(refused):
    message = r"must be (a )?whole numbers?, at least 1; got|a whole number; got slots=3\.5|sweeps must be one of"
    with pytest.raises(InputError, match=message):
        refused(index_with([PAGE_NBYTES] * 20))


def test_all_that_cannot_be_counted_is_told_at_once():
    with pytest.raises(InputError, match=r"at least 1; got repeats=0, degree=2\.5$"):
        Workload(repeats=0, degree=2.5)


def test_a_plan_keeps_workload_and_ring_as_they_were_asked_for():
    workload = Workload(columns=4, repeats=2, degree=3, workspace_nbytes=5)
    plan = plan_stream(index_with([PAGE_NBYTES] * 20), 9 * PAGE_NBYTES, workload, Ring(sweeps="cyclic"), rates=RATES)

    assert (plan.workload, plan.ring, plan.rates) == (workload, Ring(slots=None, sweeps="cyclic"), RATES)
    assert plan_stream(plan.index, None).workload == Workload()
    assert plan_stream(plan.index, None).ring == Ring()


def test_overlap_changes_the_order_of_steps_and_not_the_memory():
    index = index_with([PAGE_NBYTES] * 20)
    hidden, plain = (plan_stream(index, "40 KiB", ring=Ring(overlap=overlap)) for overlap in (True, False))

    assert hidden.storage_nbytes == plain.storage_nbytes
    assert hidden.resident == plain.resident
    assert hidden.schedule.prologue()
    assert not plain.schedule.prologue()


def test_two_slots_are_double_buffering():
    """The classic order: while one buffer is computed with, the other one fills."""
    plan = plan_stream(index_with([PAGE_NBYTES] * 4), 2 * PAGE_NBYTES, ring=Ring(slots=2, sweeps="cyclic"))

    steps = plan.schedule.prologue() + plan.schedule.sweep(0)

    expected = [Copy(0, 0), Copy(1, 1)]
    for piece, following in enumerate([2, 3, 0, 1]):
        buffer = piece % 2
        expected += [Compute(piece, buffer), Release(buffer), Copy(following, buffer)]
    assert steps == expected


def test_by_default_what_both_buffers_hold_at_the_turn_is_used_again():
    plan = plan_stream(index_with([PAGE_NBYTES] * 4), 2 * PAGE_NBYTES, ring=Ring(slots=2))

    assert plan.schedule.prologue() + plan.schedule.sweep(0) + plan.schedule.sweep(1) == [
        Copy(0, 0), Copy(1, 1),
        Compute(0, 0), Release(0), Copy(2, 0), Compute(1, 1), Release(1), Copy(3, 1), Compute(2, 0), Compute(3, 1),
        Compute(3, 1), Release(1), Copy(1, 1), Compute(2, 0), Release(0), Copy(0, 0), Compute(1, 1), Compute(0, 0),
    ]  # fmt: skip


@pure
@given(page_sizes, budgets, st.sampled_from(["alternate", "cyclic", "restart"]), st.integers(1, 6))
def test_later_sweeps_save_what_the_slots_hold_if_they_turn(sizes, budget, sweep_order, number):
    with contextlib.suppress(BudgetError):
        plan = plan_stream(index_with(sizes), budget, ring=Ring(sweeps=sweep_order))

        streamed = [sizes[n] for n in plan.schedule.streamed]
        held = streamed[len(streamed) - plan.slots :] if number % 2 else streamed[: plan.slots]
        assert plan.sweep_nbytes(0) == plan.streamed_nbytes == sum(streamed)
        assert plan.sweep_nbytes(number) == sum(streamed) - (sum(held) if sweep_order == "alternate" else 0)


class TestExplain:
    index = index_with([100 * PAGE_NBYTES] * 20)

    def test_names_budget_cut_slots_resident_part_streamed_bytes_and_vectors(self):
        plan = plan_stream(self.index, "2 MiB", workload=Workload(workspace_nbytes=12_345_678), ring=Ring(slots=3))
        lines = dict(line.split(maxsplit=1) for line in plan.explain().splitlines())

        assert "2 MiB" in lines["budget"]
        assert f"{format_nbytes(plan.storage_nbytes)} used" in lines["budget"]
        assert f"{self.index.nbytes / 2**21:.2f} times" in lines["budget"]
        assert "20 subdivisions" in lines["cut"]
        assert lines["ring"] == "3 slots of 400 KiB"
        assert lines["resident"] == f"2 subdivisions, {format_nbytes(plan.resident_nbytes)}"
        assert lines["streamed"] == f"18 subdivisions, {format_nbytes(plan.streamed_nbytes)} a sweep, overlap on"
        assert format_nbytes(12_345_678) in lines["vectors"]

    def test_says_that_nothing_is_streamed_when_everything_is_resident(self):
        text = plan_stream(self.index, "1 GiB").explain()

        assert "everything: nothing is streamed" in text
        assert "slots" not in text

    def test_promises_no_time_without_rates(self):
        plan = plan_stream(self.index, "2 MiB")

        assert plan.predicted_seconds() is None
        assert "a sweep  " not in plan.explain()

    @pytest.mark.parametrize(("link", "memory", "binding"), [(1e6, 1e9, "the link"), (1e9, 1e6, "memory")])
    @pytest.mark.parametrize("overlap", [True, False])
    @pytest.mark.parametrize(("sweep_order", "moved"), [("alternate", 15), ("cyclic", 18), ("restart", 18)])
    def test_predicts_the_sweep_from_rates_and_names_the_side_that_binds(
        self, link, memory, binding, overlap, sweep_order, moved
    ):
        columns, repeats = 3, 2
        rates = LinkRates(link, memory, transfer_start=0.0, product_start=0.0)
        workload, ring = Workload(columns=columns, repeats=repeats), Ring(slots=3, overlap=overlap, sweeps=sweep_order)
        plan = plan_stream(self.index, "2 MiB", workload, ring, rates=rates)

        estimate = plan.estimate()

        vectors = columns * sum(self.index.shape) * 8  # x is read and y written once, in float64
        assert estimate.transfer == pytest.approx(moved * 100 * PAGE_NBYTES / link)
        at_best = repeats * (20 * 100 * PAGE_NBYTES + vectors) / memory
        assert at_best <= estimate.compute < 1.3 * at_best  # kernels do not reach all of the bandwidth
        assert estimate.binding == binding
        longest = max(estimate.transfer, estimate.compute)
        assert longest <= estimate.overlapped * (1 + 1e-12)
        # What a sweep cannot hide is at most a piece at each end, or of a ring that has run empty.
        assert estimate.overlapped <= longest + 3 * max(estimate.transfer / moved, estimate.compute / 20)
        assert estimate.sequential == pytest.approx(estimate.transfer + estimate.compute)
        expected = estimate.overlapped if overlap else estimate.sequential
        assert plan.predicted_seconds() == expected
        assert f"{binding} binds" in plan.explain()
        assert f"about {expected * 1e3:.3g} ms" in plan.explain()

    def test_every_transfer_and_every_product_costs_a_start(self):
        rates = LinkRates(1e30, 1e30, transfer_start=0.5, product_start=0.25)

        estimate = plan_stream(
            self.index, "2 MiB", workload=Workload(repeats=2), ring=Ring(slots=3), rates=rates
        ).estimate()

        assert estimate.transfer == pytest.approx(15 * 0.5)
        assert estimate.compute == pytest.approx(20 * 2 * 0.25)

    def test_many_products_are_started_at_once_and_leave_gaps(self):
        rates = LinkRates(1e30, 1e30, product_start=0.25, product_gap=0.125)

        estimate = plan_stream(
            self.index, "2 MiB", workload=Workload(repeats=50), ring=Ring(slots=3), rates=rates
        ).estimate()

        assert estimate.compute == pytest.approx(20 * 50 * 0.125)

    def test_all_resident_takes_the_time_of_the_kernels(self):
        estimate = plan_stream(self.index, "1 GiB", rates=RATES).estimate()

        assert estimate.transfer == 0
        assert estimate.overlapped == estimate.sequential == pytest.approx(estimate.compute)

    def test_names_a_resident_structure_and_what_a_turn_saves(self, beam):
        index = index_of(beam.symbolic_slabs(10), beam.shape)
        text = plan_stream(index, index.nbytes // 2, ring=Ring(resident_structure=True)).explain()

        assert f"{format_nbytes(index.part_nbytes('structure'))} resident: only values move" in text
        assert "every other sweep runs backwards" in text
        assert "backwards" not in plan_stream(index, index.nbytes // 2, ring=Ring(sweeps="cyclic")).explain()


@pytest.mark.parametrize("format_name", ["csr", "bsr"])
def test_with_a_resident_structure_only_values_move_and_the_budget_holds(beam, format_name):
    index = index_of(beam.symbolic_slabs(10, format_name), beam.shape)
    structure, values = index.part_nbytes("structure"), index.part_nbytes("values")
    largest = max(subdivision.part_nbytes("values") for subdivision in index.subdivisions)
    assert structure + values == index.nbytes

    for budget in (structure + 2 * largest, structure + 5 * largest, index.nbytes - 1):
        plan = plan_stream(index, budget, ring=Ring(resident_structure=True))

        assert plan.part == "values"
        assert plan.streamed_nbytes + plan.resident_nbytes == values
        assert plan.storage_nbytes == plan.slots * largest + plan.resident_nbytes + structure <= budget
    with pytest.raises(BudgetError, match="of structure") as caught:
        plan_stream(index, structure + 2 * largest - 1, ring=Ring(resident_structure=True))
    assert smallest_budget(caught.value) == structure + 2 * largest
    assert plan_stream(index, index.nbytes, ring=Ring(resident_structure=True)).structure_nbytes == 0, (
        "all resident in one piece"
    )


def test_a_subdivision_without_entries_streams_beside_a_resident_structure(irregular, cut):
    empty = scipy.sparse.csr_array((20, 40))
    matrix = scipy.sparse.vstack([irregular(20, 40), empty, irregular(20, 40)], format="csr")
    index = index_of(map(as_slab, cut(matrix, [0, 10, 20, 40, 50, 60])))
    assert index.subdivisions[2].part_nbytes("values") == 0

    budget = index.part_nbytes("structure") + 2 * index.subdivisions[0].part_nbytes("values")
    assert plan_stream(index, budget, ring=Ring(resident_structure=True)).slots == 2


@pytest.mark.parametrize("budget", ["-1 GiB", "0", "abc", []])
def test_a_budget_that_is_no_size_is_refused(budget):
    with pytest.raises(PenstockError, match=r"must be positive|for example '512 MiB'"):
        plan_stream(index_with([PAGE_NBYTES] * 3), budget)


@pytest.mark.parametrize("pieces", [1, 2, 20])
def test_without_a_budget_everything_moves_through_a_ring_that_is_the_budget(pieces):
    plan = plan_stream(index_with([PAGE_NBYTES] * pieces), None, ring=Ring(sweeps="restart"))

    assert (plan.slots, plan.resident) == (3, frozenset())
    assert plan.streamed_nbytes == pieces * PAGE_NBYTES
    assert plan.budget_nbytes == plan.storage_nbytes == 3 * PAGE_NBYTES


class TestConsecutivePowers:
    """A ring of m slots computes m - 1 of them in a sweep."""

    def index(self, count):
        beam = Cantilever(nodes=(24, 5, 5), dof=3)
        return index_of(beam.symbolic_slabs(count, "bsr"), beam.shape)

    @pytest.mark.parametrize(("slots_that_fit", "made"), [(4, 3), (7, 6), (9, 8), (20, 8)])
    def test_the_ring_is_as_long_as_they_need_or_as_fits(self, slots_that_fit, made):
        index = self.index(24)
        plan = plan_stream(
            index, slots_that_fit * max(s.nbytes for s in index.subdivisions), workload=Workload(degree=8)
        )

        assert plan.powers_per_sweep == made
        assert plan.slots == made + 1
        assert f"powers      {made} of 8 consecutive powers of A in one sweep" in plan.explain()
        assert "if subdivisions couple only with their neighbours" in plan.explain()

    def test_without_overlap_no_slot_waits_for_what_arrives(self):
        index = self.index(24)
        plan = plan_stream(
            index,
            5 * max(s.nbytes for s in index.subdivisions),
            workload=Workload(degree=8),
            ring=Ring(slots=5, overlap=False),
        )

        assert plan.powers_per_sweep == 5

    def test_what_reaches_further_needs_a_longer_ring_and_makes_fewer(self):
        index = self.index(24)
        budget = 11 * max(s.nbytes for s in index.subdivisions)
        plans = [plan_stream(index, budget, workload=Workload(degree=5), reach=reach) for reach in (1, 2, 3)]

        assert [plan.slots for plan in plans] == [6, 10, 11]
        assert [plan.powers_per_sweep for plan in plans] == [5, 5, 4]
        assert "the next 3 on either side" in plans[2].explain()

    def test_none_is_refused(self):
        with pytest.raises(InputError, match=r"got degree=0$"):
            plan_stream(self.index(4), "1 MiB", workload=Workload(degree=0))


class TestWhatASolveTakes:
    """Costs beside the sweeps, and sweeps that do not compute equally many products."""

    RATES = LinkRates(1e12, 3e12, product_start=1e-5, side_by_side=4)

    def seconds(self, degree=8, slots=5, rates=RATES, **more):
        workload = Workload(degree=degree, iterations=10, **more)
        plan = plan_stream(index_with([1 << 20] * 32), slots << 20, workload, Ring(slots=slots), rates=rates)
        return plan, plan.estimated_solve_seconds()

    def test_starts_are_shared_among_solves(self):
        plan, once = self.seconds()
        _, often = self.seconds(solves=10)

        starts = 12 * self.RATES.product_start * 32 * 8
        assert plan.powers_per_sweep == 4
        assert once - often == pytest.approx(0.9 * starts)

    def test_the_last_sweep_computes_what_is_left(self):
        on_arrival = Ring(slots=5, on_arrival=True)
        index = index_with([1 << 20] * 32)
        computed = [
            plan_stream(index, 5 << 20, Workload(degree=degree, iterations=10), on_arrival, rates=self.RATES)
            .estimate()
            .compute
            for degree in (4, 6, 8)
        ]

        # One sweep of four products, sweeps of four and two, and two of four.
        assert computed == pytest.approx([computed[0], 0.75 * computed[0], computed[0]])

    def test_a_gpu_starts_kernels_beside_the_sweeps_of_an_iteration(self):
        cpu, gpu = (
            self.seconds(degree=1, rates=LinkRates(1e12, 3e12, product_start=1e-5, side_by_side=lanes))[1]
            for lanes in (1, 4)
        )

        assert gpu - cpu == pytest.approx(10 * 150 * 1e-5, rel=0.01)


def test_what_subdivisions_are_made_from_may_move_over_the_link():
    index, rates = index_with([1 << 20] * 32), LinkRates(1e9, 3e12)
    made, moved = (
        plan_stream(index, 8 << 20, ring=Ring(slots=4, on_arrival=True, moved_share=share), rates=rates)
        for share in (0.0, 0.25)
    )

    assert made.sweep_nbytes(0) == 0
    assert moved.sweep_nbytes(0) == made.made_or_moved_nbytes(0) // 4 > 0
    assert "in their slots, overlap" in made.explain()
    assert "in their slots; 7 MiB that they are made from move over the link, overlap" in moved.explain()
    assert "link and assembly binds" in moved.explain()
    # Making shares the memory with products, transfers do not.
    assert made.predicted_seconds() > moved.predicted_seconds() > 0


def test_formats_of_many_more_bytes_come_last():
    from penstock.experiments import Experiment
    from penstock.experiments.cantilever.matrix_storage import _formats

    def described(**memory):
        return Experiment.model_validate({"model": {"nodes": 12, "dof": 3}, "memory": {"budget": "1 MiB", **memory}})

    (first, is_large), *others = _formats(described())
    assert (first, is_large) == ("symmetric_bsr", False)
    assert ("bsr", True) in others
    assert _formats(described(format="bsr")) == [("bsr", False)]
