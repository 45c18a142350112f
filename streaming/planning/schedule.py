"""Defines the order of transfers and computations, and a checker that finds hazards in it without running it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from penstock.spmv import InputError

#: How successive sweeps are connected: see :class:`Schedule`.
SweepOrder = Literal["alternate", "cyclic", "restart"]


@dataclass(frozen=True)
class Copy:
    """Transfer a subdivision into a slot. May run concurrently with computations; copies keep their order.

    Parameters
    ----------
    subdivision, slot : int

    Examples
    --------
    >>> from penstock.streaming import Schedule
    >>> Schedule(subdivisions=3, resident=frozenset(), slots=2).prologue()
    [Copy(subdivision=0, slot=0), Copy(subdivision=1, slot=1)]
    """

    subdivision: int
    slot: int


@dataclass(frozen=True)
class Compute:
    """Compute with a subdivision in a slot, or with a resident one.

    Parameters
    ----------
    subdivision : int
    slot : int or None
        None for a resident subdivision.
    stage : int
        Number among the consecutive computations of one sweep.

    Examples
    --------
    >>> from penstock.streaming import Schedule
    >>> Schedule(subdivisions=2, resident=frozenset({0}), slots=2).sweep(0)[0]
    Compute(subdivision=0, slot=None, stage=0)
    """

    subdivision: int
    slot: int | None
    stage: int = 0


@dataclass(frozen=True)
class Release:
    """Free a slot: no later step reads its present data.

    Parameters
    ----------
    slot : int

    Examples
    --------
    >>> from penstock.streaming import Schedule
    >>> Schedule(subdivisions=3, resident=frozenset(), slots=2).sweep(0)[:2]
    [Compute(subdivision=0, slot=0, stage=0), Release(slot=0)]
    """

    slot: int


Step = Copy | Compute | Release


class HazardError(InputError):
    """A schedule reads a slot before its data arrive, overwrites data still needed, or never releases a slot.

    Examples
    --------
    >>> from penstock.streaming import Compute, HazardError, check_hazards
    >>> try:
    ...     check_hazards([Compute(0, slot=1)], subdivisions=1, slots=2)
    ... except HazardError as error:
    ...     print(error)
    step 0: Compute(subdivision=0, slot=1, stage=0) reads slot 1 before its data were requested
    """


def check_sweep_order(sweeps: str) -> None:
    """Raise an InputError if this is not a :data:`SweepOrder`."""
    if sweeps not in get_args(SweepOrder):
        raise InputError(f"sweeps must be one of {', '.join(get_args(SweepOrder))}, not {sweeps!r}")


@dataclass(frozen=True)
class Schedule:
    """Sweeps over all subdivisions through a ring of slots.

    Parameters
    ----------
    subdivisions : int
        Their number.
    resident : frozenset of int
        Subdivisions that stay in memory.
    slots : int
        Length of the ring.
    overlap : bool
        True: a transfer is issued as soon as a slot is free. False: a transfer is issued when its data are needed, and
        computations wait for it.
    sweeps : {"cyclic", "alternate", "restart"}
        How successive sweeps are connected. ``cyclic``: at the end of a sweep the ring already receives the first
        subdivisions of the next one, so that the link never waits. ``alternate``: every other sweep runs backwards and reuses
        the subdivisions that are still in the slots. ``restart``: each sweep starts with an empty ring.

    Raises
    ------
    InputError
        If ``sweeps`` is none of these.

    Notes
    -----
    A run is ``prologue()``, any number of ``sweep(0), sweep(1), ...`` and ``epilogue(sweeps)`` with their number. The streamed
    subdivision at position n, counted over all sweeps, is put in slot ``n % slots``; when the direction changes, slots keep
    their data, so positions run backwards with the sweep.

    Examples
    --------
    >>> from penstock.streaming import Schedule, check_hazards
    >>> schedule = Schedule(subdivisions=4, resident=frozenset({1}), slots=2, sweeps="alternate")
    >>> list(schedule.order(0)), list(schedule.order(1)), schedule.transfers(1)
    ([0, 1, 2, 3], [3, 2, 1, 0], (0,))
    >>> steps = [*schedule.prologue(), *schedule.sweep(0), *schedule.sweep(1), *schedule.epilogue(2)]
    >>> check_hazards(steps, subdivisions=4, slots=2, resident={1})
    """

    subdivisions: int
    resident: frozenset[int]
    slots: int
    overlap: bool = True
    sweeps: SweepOrder = "cyclic"

    def __post_init__(self) -> None:
        check_sweep_order(self.sweeps)

    @cached_property
    def streamed(self) -> tuple[int, ...]:
        """The streamed subdivisions, in row order."""
        return tuple(number for number in range(self.subdivisions) if number not in self.resident)

    @property
    def _reused(self) -> int:
        """Number of streamed subdivisions that stay in the slots from one sweep to the next."""
        return min(self.slots, len(self.streamed)) if self.sweeps == "alternate" else 0

    def direction(self, number: int) -> int:
        """Return 1 if sweep ``number`` visits the rows in ascending order, else -1."""
        return -1 if self.sweeps == "alternate" and number % 2 else 1

    def order(self, number: int) -> range:
        """Return the order in which sweep ``number`` visits the subdivisions."""
        everything = range(self.subdivisions)
        return everything if self.direction(number) == 1 else everything[::-1]

    def transfers(self, number: int) -> tuple[int, ...]:
        """Return the subdivisions that sweep ``number`` must transfer, in the order of their use."""
        return self.streamed[:: self.direction(number)][self._reused if number else 0 :]

    def _copy(self, sweep: int, position: int) -> Copy:
        """Return the transfer of the streamed subdivision at a position of a sweep, possibly in the sweep after it."""
        count = len(self.streamed)
        if position >= count:
            sweep, position = sweep + position // count, position % count
        if self.direction(sweep) == -1:
            position = count - 1 - position
            # Backwards, a subdivision is put in the slot of the one that leaves: positions count from the change of direction.
            return Copy(self.streamed[position], (count - 1 - (count - 1 - position) % self.slots) % self.slots)
        passed = sweep * count if self.sweeps == "cyclic" else 0
        return Copy(self.streamed[position], (passed + position) % self.slots)

    def prologue(self, first: int = 0) -> list[Step]:
        """Return the steps that fill the ring for a run beginning with sweep ``first``: 0, or 1 to begin backwards."""
        if self.sweeps == "alternate" and (self.overlap or first):
            return [self._copy(first, position) for position in range(self._reused)]
        if self.sweeps == "cyclic" and self.overlap and self.streamed:
            return [self._copy(0, position) for position in range(self.slots)]
        return []

    def sweep(self, number: int, stages: int = 1, reach: int = 1) -> list[Step]:
        """Return the steps of a sweep that computes with every subdivision in several consecutive stages.

        Parameters
        ----------
        number : int
        stages : int
            Stage s computes with a subdivision after stage s - 1 has computed with it and with all subdivisions within reach.
        reach : int
            Number of subdivisions to either side on which a computation needs the previous stage. Subdivisions stay in the
            slots until the last stage has used them, ``(stages - 1) reach + 1`` at a time.

        Raises
        ------
        InputError
            If the ring is too short for them.
        """
        behind = (stages - 1) * reach
        if self.streamed and behind >= self.slots:
            raise InputError(
                f"{stages} powers per sweep need {behind + 1} slots, but the ring has {self.slots}; plan with more slots"
            )
        steps: list[Step] = []
        count, position = len(self.streamed), 0
        # Number of positions whose transfers are issued by the end of this sweep.
        issued = count + self.slots if self.sweeps == "cyclic" else count
        if self.overlap and self.sweeps == "restart":
            steps += [self._copy(number, ahead) for ahead in range(min(self.slots, count))]
        arrived: list[tuple[int, int | None, int]] = []  # subdivision, slot and position in the ring
        order = self.order(number)
        for time in range(len(order) + behind):
            if time < len(order):
                subdivision, slot = order[time], None
                if subdivision not in self.resident:
                    copy = self._copy(number, position)
                    slot = copy.slot
                    if not self.overlap and (position >= self._reused or not number):
                        steps.append(copy)
                arrived.append((subdivision, slot, position))
                position += slot is not None
            for stage in range(stages):
                place = time - stage * reach
                if 0 <= place < len(order):
                    steps.append(Compute(*arrived[place][:2], stage))
            if time >= behind:
                _, slot, leaving = arrived[time - behind]
                if slot is not None and leaving < count - self._reused:
                    steps.append(Release(slot))
                    if self.overlap and leaving + self.slots < issued:
                        steps.append(self._copy(number, leaving + self.slots))
        return steps

    def epilogue(self, sweeps: int) -> list[Step]:
        """Return the steps that release the slots already filled, or being filled, for the next sweep."""
        if not self.streamed or self.sweeps == "restart":
            return []
        if self.sweeps == "cyclic":
            held = [self._copy(sweeps, position) for position in range(self.slots)] if self.overlap else []
        else:
            held = [self._copy(sweeps, position) for position in range(self._reused)] if self.overlap or sweeps else []
        return [Release(copy.slot) for copy in held]


def check_hazards(steps: Iterable[Step], *, subdivisions: int, slots: int, resident: Iterable[int] = ()) -> None:
    """Verify a run from its first step to its last.

    Parameters
    ----------
    steps : iterable of Step
    subdivisions, slots : int
        How many of each there are.
    resident : iterable of int
        Subdivisions without a slot.

    Raises
    ------
    HazardError
        If a computation reads a slot that does not hold its subdivision, or a subdivision without a slot that is not resident;
        if a copy overwrites a slot in use; if a slot is released twice or does not exist, or is still in use at the end.

    Examples
    --------
    >>> from penstock.streaming import Compute, Copy, Release, check_hazards
    >>> check_hazards([Copy(0, slot=0), Compute(0, slot=0), Release(0)], subdivisions=1, slots=1)
    >>> check_hazards([Copy(0, slot=0), Copy(1, slot=0)], subdivisions=2, slots=1)
    Traceback (most recent call last):
        ...
    penstock.streaming.planning.schedule.HazardError: step 1: Copy(subdivision=1, slot=0) overwrites subdivision 0, still in use
    """
    holds: dict[int, int] = {}
    residents = set(resident)
    for position, step in enumerate(steps):
        match step:
            case Copy(subdivision, slot):
                if not (0 <= slot < slots and 0 <= subdivision < subdivisions):
                    raise HazardError(f"step {position}: {step} names a slot or subdivision that does not exist")
                if slot in holds:
                    raise HazardError(f"step {position}: {step} overwrites subdivision {holds[slot]}, still in use")
                holds[slot] = subdivision
            case Compute(subdivision, None, _):
                if subdivision not in residents:
                    raise HazardError(f"step {position}: {step} reads a subdivision that is not resident")
            case Compute(subdivision, slot, _):
                if slot is None or holds.get(slot) != subdivision:
                    raise HazardError(f"step {position}: {step} reads slot {slot} before its data were requested")
            case Release(slot):
                if slot not in holds:
                    raise HazardError(f"step {position}: {step} releases a slot that holds nothing")
                del holds[slot]
    if holds:
        raise HazardError(f"slots {sorted(holds)} are never released")
