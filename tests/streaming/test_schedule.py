"""Every schedule is free of hazards, and the checker finds each kind of hazard planted in one."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.streaming import Compute, Copy, HazardError, Release, Schedule, check_hazards

pure = settings(deadline=None, max_examples=200, database=None)


@st.composite
def schedules(draw):
    subdivisions = draw(st.integers(1, 9))
    resident = draw(st.frozensets(st.integers(0, subdivisions - 1)))
    return Schedule(subdivisions, resident, slots=draw(st.integers(1, 4)), overlap=draw(st.booleans()))


def run_of(schedule, sweeps):
    steps = schedule.prologue()
    for number in range(sweeps):
        steps += schedule.sweep(number)
    return steps + schedule.epilogue(sweeps)


def check(steps, schedule):
    check_hazards(steps, subdivisions=schedule.subdivisions, slots=schedule.slots, resident=schedule.resident)


@pure
@given(schedules(), st.integers(0, 5))
def test_any_run_is_free_of_hazards(schedule, sweeps):
    check(run_of(schedule, sweeps), schedule)


@pure
@given(schedules(), st.integers(1, 5))
def test_every_computation_finds_its_subdivision_in_its_slot(schedule, sweeps):
    """The same claim as the checker's, by playing the steps."""
    slots = {}
    for step in run_of(schedule, sweeps):
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
def test_a_sweep_computes_each_subdivision_once_in_order_and_copies_each_streamed_one_once(schedule, number):
    steps = schedule.sweep(number)

    assert [step.subdivision for step in steps if isinstance(step, Compute)] == list(range(schedule.subdivisions))
    copied = Counter(step.subdivision for step in steps if isinstance(step, Copy))
    assert copied == Counter(schedule.streamed)
    assert set(schedule.streamed) == set(range(schedule.subdivisions)) - schedule.resident


@pure
@given(schedules(), st.integers(1, 4))
def test_with_overlap_every_slot_is_filled_or_filling_when_a_streamed_subdivision_is_computed(schedule, sweeps):
    """The link never waits: as many transfers as there are slots have been issued, across the ends of sweeps too."""
    held = 0
    for step in run_of(schedule, sweeps):
        if isinstance(step, Compute) and step.slot is not None:
            assert held == (schedule.slots if schedule.overlap else 1)
        held += isinstance(step, Copy) - isinstance(step, Release)


@pure
@given(schedules())
def test_without_overlap_each_transfer_directly_precedes_its_computation(schedule):
    schedule = Schedule(schedule.subdivisions, schedule.resident, schedule.slots, overlap=False)
    steps = schedule.sweep(0)

    assert schedule.prologue() == schedule.epilogue(1) == []
    for position, step in enumerate(steps):
        if isinstance(step, Copy):
            assert steps[position + 1] == Compute(step.subdivision, step.slot)
            assert steps[position + 2] == Release(step.slot)


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
