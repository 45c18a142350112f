"""Sweeps of many ranks, played without running them."""

import pytest
from played_schedules import arrivals_of_sweep

from penstock.streaming.planning.schedule import Compute, HazardError, Schedule


def sweeps(ranks, subdivisions, stages, *, mirrored, reach=1, number=0):
    """The steps of a sweep of each rank: odd ranks are one sweep ahead, so they sweep the other way."""
    schedule = Schedule(subdivisions, frozenset(), (stages - 1) * reach + 2, sweeps="alternate")
    numbers = [number + mirrored * (rank % 2) for rank in range(ranks)]
    return [[*schedule.prologue(one % 2), *schedule.sweep(one % 2, stages, reach)] for one in numbers]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("subdivisions", "stages", "reach"), [(16, 5, 1), (64, 17, 1), (24, 4, 3), (5, 1, 1)])
def test_mirrored_sweeps_last_as_long_as_that_of_one_rank(ranks, number, subdivisions, stages, reach):
    alone = arrivals_of_sweep(sweeps(1, subdivisions, stages, mirrored=True, reach=reach), subdivisions, reach)
    together = sweeps(ranks, subdivisions, stages, mirrored=True, reach=reach, number=number)

    assert alone == subdivisions
    assert arrivals_of_sweep(together, subdivisions, reach) == alone


@pytest.mark.parametrize(("ranks", "expected"), [(2, 16 + 16 - 6), (4, 16 + 3 * (16 - 6))])
def test_ranks_that_sweep_the_same_way_wait_for_each_other(ranks, expected):
    assert arrivals_of_sweep(sweeps(ranks, 16, 5, mirrored=False), 16) >= expected


def test_ranks_that_wait_for_ever_are_found():
    steps = sweeps(2, 8, 3, mirrored=True)
    steps[1] = [step for step in steps[1] if not (isinstance(step, Compute) and step.stage == 1)]

    with pytest.raises(HazardError, match="rank 0 waits for ever"):
        arrivals_of_sweep(steps, 8)
