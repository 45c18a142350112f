"""Every schedule is free of hazards, and the checker finds each kind of hazard planted in one."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.spmv import InputError
from penstock.streaming import Compute, Copy, HazardError, Release, Schedule, check_hazards

pure = settings(deadline=None, max_examples=200, database=None)


ENDS = ("cyclic", "alternate", "restart")


@st.composite
def schedules(draw, ends=ENDS):
    subdivisions = draw(st.integers(1, 9))
    resident = draw(st.frozensets(st.integers(0, subdivisions - 1)))
    slots, overlap, sweep_order = draw(st.integers(1, 4)), draw(st.booleans()), draw(st.sampled_from(ends))
    return Schedule(subdivisions, resident, slots, overlap, sweep_order)


def run_of(schedule, sweeps, first=0):
    """A run of ``sweeps`` sweeps; where sweeps turn it may begin backwards."""
    first = first if schedule.sweeps == "alternate" else 0
    steps = schedule.prologue(first)
    for number in range(first, first + sweeps):
        steps += schedule.sweep(number)
    return steps + schedule.epilogue(first + sweeps)


def check(steps, schedule):
    check_hazards(steps, subdivisions=schedule.subdivisions, slots=schedule.slots, resident=schedule.resident)


def copies_of(steps):
    return [step.subdivision for step in steps if isinstance(step, Copy)]


firsts = st.integers(0, 1)


@pure
@given(schedules(), st.integers(0, 5), firsts)
def test_any_run_is_free_of_hazards(schedule, sweeps, first):
    check(run_of(schedule, sweeps, first if sweeps else 0), schedule)


@pure
@given(schedules(), st.integers(1, 5), firsts)
def test_every_computation_finds_its_subdivision_in_its_slot(schedule, sweeps, first):
    """The same claim as the checker's, by playing the steps."""
    slots = {}
    for step in run_of(schedule, sweeps, first):
        match step:
            case Copy(subdivision, slot):
                assert 0 <= slot < schedule.slots
                assert slots.get(slot) is None
                slots[slot] = subdivision
            case Compute(subdivision, None):
                assert subdivision in schedule.resident
            case Compute(subdivision, slot):
                assert slots[slot] == subdivision
            case Release(slot):
                slots[slot] = None
    assert not any(held is not None for held in slots.values())


@pure
@given(schedules(), st.integers(0, 5))
def test_a_sweep_computes_each_subdivision_once_in_its_order(schedule, number):
    computed = [step.subdivision for step in schedule.sweep(number) if isinstance(step, Compute)]

    there = list(range(schedule.subdivisions))
    backwards = schedule.sweeps == "alternate" and number % 2 == 1
    assert schedule.direction(number) == (-1 if backwards else 1)
    assert computed == list(schedule.order(number)) == (there[::-1] if backwards else there)
    assert set(schedule.streamed) == set(there) - schedule.resident


@st.composite
def staged_runs(draw):
    """A schedule and sweeps of several stages, each with as many as the ring holds, or fewer."""
    schedule, reach = draw(schedules()), draw(st.integers(1, 3))
    most = (schedule.slots - 1) // reach + 1 if schedule.streamed else 4
    return schedule, reach, draw(st.lists(st.integers(1, most), min_size=1, max_size=4))


@pure
@given(staged_runs())
def test_any_run_of_several_stages_a_sweep_is_free_of_hazards(run):
    schedule, reach, stages = run
    steps = schedule.prologue()
    for number, count in enumerate(stages):
        steps += schedule.sweep(number, count, reach)

    check(steps + schedule.epilogue(len(stages)), schedule)


@pure
@given(staged_runs())
def test_a_stage_follows_the_one_before_on_all_that_it_reaches(run):
    """And with it may overwrite what that one read: every stage is done once with every subdivision."""
    schedule, reach, stages = run
    for number, count in enumerate(stages):
        done = set()
        for step in schedule.sweep(number, count, reach):
            if not isinstance(step, Compute):
                continue
            for near in range(step.subdivision - reach, step.subdivision + reach + 1):
                if step.stage and 0 <= near < schedule.subdivisions:
                    assert (near, step.stage - 1) in done
            assert (step.subdivision, step.stage) not in done
            done.add((step.subdivision, step.stage))
        assert len(done) == count * schedule.subdivisions


@pure
@given(staged_runs())
def test_stages_move_nothing_more(run):
    schedule, reach, stages = run
    for number, count in enumerate(stages):
        assert copies_of(schedule.sweep(number, count, reach)) == copies_of(schedule.sweep(number))


def test_more_stages_than_the_ring_holds_are_refused():
    with pytest.raises(InputError, match="5 powers per sweep need 9 slots, but the ring has 8"):
        Schedule(20, frozenset(), 8).sweep(0, 5, 2)


@pure
@given(schedules(ends=["cyclic"]), st.integers(0, 5))
def test_a_sweep_of_a_ring_that_goes_on_copies_each_streamed_subdivision_once(schedule, number):
    assert Counter(copies_of(schedule.sweep(number))) == Counter(schedule.streamed)


@pure
@given(schedules(), st.integers(1, 5))
def test_the_copies_of_a_run_are_the_transfers_its_sweeps_need(schedule, sweeps):
    """In the order of their use; a ring that goes on has the next ones on their way at the end."""
    needed = [number for sweep in range(sweeps) for number in schedule.transfers(sweep)]
    copies = copies_of(run_of(schedule, sweeps))

    ahead = schedule.slots if schedule.sweeps == "cyclic" and schedule.overlap and schedule.streamed else 0
    assert copies[: len(needed)] == needed
    assert len(copies) == len(needed) + ahead


@pure
@given(schedules(), st.integers(1, 5))
def test_a_turn_saves_the_copies_of_what_the_slots_hold(schedule, number):
    """Even if nothing overlaps; what is saved is what the sweep before used last, so first on the way back."""
    kept = min(schedule.slots, len(schedule.streamed)) if schedule.sweeps == "alternate" else 0

    assert schedule.transfers(0) == schedule.streamed
    assert schedule.transfers(number) == schedule.streamed[:: schedule.direction(number)][kept:]
    if schedule.sweeps == "alternate":
        assert copies_of(schedule.sweep(number)) == list(schedule.transfers(number))


@pure
@given(schedules(ends=["alternate"]), st.integers(1, 5))
def test_a_run_that_begins_backwards_is_a_run_of_its_own_from_an_empty_ring(schedule, sweeps):
    run = run_of(schedule, sweeps, first=1)

    needed = [*schedule.streamed[::-1], *(n for sweep in range(2, 1 + sweeps) for n in schedule.transfers(sweep))]
    assert copies_of(run) == needed


@pure
@given(schedules(ends=["cyclic"]), st.integers(1, 4))
def test_with_overlap_every_slot_is_filled_or_filling_when_a_streamed_subdivision_is_computed(schedule, sweeps):
    """The link never waits: as many transfers as there are slots have been issued, across the ends of sweeps too."""
    held = 0
    for step in run_of(schedule, sweeps):
        if isinstance(step, Compute) and step.slot is not None:
            assert held == (schedule.slots if schedule.overlap else 1)
        held += isinstance(step, Copy) - isinstance(step, Release)


@pure
@given(schedules(ends=["alternate"]), st.integers(1, 4), firsts)
def test_with_overlap_and_turns_too(schedule, sweeps, first):
    """Once filled, no slot is ever free while something is computed: there is nothing else to fetch ahead."""
    held = 0
    for step in run_of(schedule, sweeps, first):
        if schedule.overlap and isinstance(step, Compute) and step.slot is not None:
            assert held == min(schedule.slots, len(schedule.streamed))
        held += isinstance(step, Copy) - isinstance(step, Release)


@pure
@given(schedules(), st.integers(1, 3))
def test_without_overlap_each_transfer_directly_precedes_its_computation(schedule, sweeps):
    schedule = Schedule(schedule.subdivisions, schedule.resident, schedule.slots, False, schedule.sweeps)
    steps = run_of(schedule, sweeps)

    assert schedule.prologue() == []
    for position, step in enumerate(steps):
        if isinstance(step, Copy):
            assert steps[position + 1] == Compute(step.subdivision, step.slot)
            assert schedule.sweeps == "alternate" or steps[position + 2] == Release(step.slot)


def test_all_resident_moves_nothing():
    schedule = Schedule(3, frozenset(range(3)), slots=0)

    assert run_of(schedule, 2) == 2 * [Compute(0, None), Compute(1, None), Compute(2, None)]


# Five subdivisions, one resident, and a ring whose length does not divide the four streamed ones.
GOOD = Schedule(5, frozenset({2}), slots=3)
SWEEPS = 3


def positions(kind, where=lambda step: True):
    return [n for n, step in enumerate(run_of(GOOD, SWEEPS)) if isinstance(step, kind) and where(step)]


def streamed(step):
    return step.slot is not None


def consumed(position):
    """Whether the copy at a position is computed with, not only fetched ahead and given up."""
    steps = run_of(GOOD, SWEEPS)
    for step in steps[position + 1 :]:
        if step == Release(steps[position].slot):
            return False
        if step == Compute(steps[position].subdivision, steps[position].slot):
            return True
    return False


class TestTheCheckerFinds:
    """Each hazard is planted at every place where a good run can have it."""

    def test_nothing_in_a_good_run(self):
        check(run_of(GOOD, SWEEPS), GOOD)

    def refuses(self, steps, message):
        with pytest.raises(HazardError, match=message):
            check(steps, GOOD)

    def test_a_copy_that_is_missing(self):
        for position in filter(consumed, positions(Copy)):
            steps = run_of(GOOD, SWEEPS)
            del steps[position]
            self.refuses(steps, "before its data were requested")

    def test_a_computation_before_its_copy(self):
        for position in positions(Compute, streamed):
            steps = run_of(GOOD, SWEEPS)
            copy = max(
                n for n in range(position) if steps[n] == Copy(steps[position].subdivision, steps[position].slot)
            )
            steps.insert(copy, steps.pop(position))
            self.refuses(steps, "before its data were requested")

    def test_a_computation_after_the_release(self):
        for position in positions(Compute, streamed):
            steps = run_of(GOOD, SWEEPS)
            assert isinstance(steps[position + 1], Release)
            steps[position], steps[position + 1] = steps[position + 1], steps[position]
            self.refuses(steps, "before its data were requested")

    def test_a_computation_with_another_subdivision_than_the_slot_holds(self):
        for position in positions(Compute, streamed):
            steps = run_of(GOOD, SWEEPS)
            steps[position] = Compute((steps[position].subdivision + 1) % 5, steps[position].slot)
            self.refuses(steps, "before its data were requested")

    def test_an_overwrite_before_the_release(self):
        for position in positions(Compute, streamed):
            steps = run_of(GOOD, SWEEPS)
            position += 1
            assert [type(step) for step in steps[position : position + 2]] == [Release, Copy]
            steps[position], steps[position + 1] = steps[position + 1], steps[position]
            self.refuses(steps, "still in use")

    def test_a_release_that_is_missing(self):
        for position in positions(Release):
            steps = run_of(GOOD, SWEEPS)
            slot = steps.pop(position).slot
            refilled = any(isinstance(step, Copy) and step.slot == slot for step in steps[position:])
            self.refuses(steps, "still in use" if refilled else rf"slots \[{slot}\] are never released")

    def test_a_slot_released_twice(self):
        for position in positions(Release):
            steps = run_of(GOOD, SWEEPS)
            steps.insert(position, steps[position])
            self.refuses(steps, "releases a slot that holds nothing")

    def test_a_read_of_a_resident_that_is_none(self):
        for position in positions(Compute, streamed):
            steps = run_of(GOOD, SWEEPS)
            steps[position] = Compute(steps[position].subdivision, None)
            self.refuses(steps, "not resident")

    @pytest.mark.parametrize("slot", [-1, 3])
    def test_a_slot_that_does_not_exist(self, slot):
        for position in positions((Copy, Release)) + positions(Compute, streamed):
            steps = run_of(GOOD, SWEEPS)
            step = steps[position]
            steps[position] = Release(slot) if isinstance(step, Release) else type(step)(step.subdivision, slot)
            self.refuses(steps, "does not exist|before its data were requested|holds nothing")

    @pytest.mark.parametrize("subdivision", [-1, 5])
    def test_a_subdivision_that_does_not_exist(self, subdivision):
        for position in positions(Copy):
            steps = run_of(GOOD, SWEEPS)
            steps[position] = Copy(subdivision, steps[position].slot)
            self.refuses(steps, "does not exist")

    def test_a_run_that_ends_without_its_epilogue(self):
        self.refuses([*GOOD.prologue(), *GOOD.sweep(0)], r"slots \[0, 1, 2\] are never released")


def test_an_end_of_sweeps_that_does_not_exist_is_refused():
    """Taken for another one, it would compute with slots that nothing was copied to."""
    with pytest.raises(InputError, match="alternate, cyclic, restart, not 'cycli'"):
        Schedule(4, frozenset(), slots=2, sweeps="cycli")
