"""Simulates the times of a schedule on one link and one processor."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.streaming.planning.schedule import Compute, Copy, Release, Step
from penstock.streaming.planning.timeline import Timeline


def simulate(
    steps: Iterable[Step],
    transfer_seconds: Callable[[int], float],
    compute_seconds: Callable[[int], float],
    *,
    overlap: bool,
) -> Timeline:
    """Simulate the times of a schedule on a link and a processor that each do one thing at a time.

    Parameters
    ----------
    steps : iterable of Step
        A run without hazards.
    transfer_seconds, compute_seconds : callable
        Time for a subdivision.
    overlap : bool
        False: a transfer waits for all computations issued before it.

    Returns
    -------
    Timeline

    Examples
    --------
    >>> from penstock.streaming import Schedule, simulate
    >>> for overlap in (True, False):
    ...     schedule = Schedule(subdivisions=4, resident=frozenset(), slots=2, overlap=overlap)
    ...     steps = [*schedule.prologue(), *schedule.sweep(0)]
    ...     simulate(steps, lambda number: 2.0, lambda number: 1.0, overlap=overlap).last("compute")
    9.0
    12.0
    """
    timeline = Timeline()
    link = processor = 0.0  # when each is free
    arrived: dict[int, float] = {}
    released: dict[int, float] = {}
    for step in steps:
        match step:
            case Copy(subdivision, slot):
                start = max(link, released.get(slot, 0.0), 0.0 if overlap else processor)
                link = arrived[slot] = start + transfer_seconds(subdivision)
                timeline.add("transfer", subdivision, slot, start, link)
            case Compute(subdivision, slot):
                start = max(processor, 0.0 if slot is None else arrived[slot])
                processor = start + compute_seconds(subdivision)
                timeline.add("compute", subdivision, slot, start, processor)
            case Release(slot):
                released[slot] = processor
    return timeline
