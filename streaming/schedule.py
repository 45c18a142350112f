"""The order of transfers and computations as data, and a checker that finds hazards in it without running it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from penstock.spmv import InputError

__all__ = ["Compute", "Copy", "HazardError", "Release", "Schedule", "Step", "SweepEnd", "check_hazards"]

#: What happens at the end of a sweep: see :class:`Schedule`.
SweepEnd = Literal["turn", "continue", "stop"]


@dataclass(frozen=True)
class Copy:
    """Transfer a subdivision into a slot. May run at once with computations; copies keep their order."""

    subdivision: int
    slot: int


@dataclass(frozen=True)
class Compute:
    """Compute with a subdivision in a slot, or with a resident one (``slot is None``).

    Of several computations that follow each other, ``stage`` says which one it is.
    """

    subdivision: int
    slot: int | None
    stage: int = 0


@dataclass(frozen=True)
class Release:
    """Nothing issued later reads what the slot holds now."""

    slot: int


Step = Copy | Compute | Release


class HazardError(InputError):
    """A schedule reads a slot before its data arrive, overwrites data still needed, or leaks a slot."""


def check_sweep_end(at_end: str) -> None:
    """Refuse an end of sweeps that is none."""
    if at_end not in get_args(SweepEnd):
        raise InputError(f"at_end must be one of {', '.join(get_args(SweepEnd))}, not {at_end!r}")


@dataclass(frozen=True)
class Schedule:
    """Sweeps over all subdivisions through a ring of slots.

    Parameters
    ----------
    subdivisions : int
        How many there are.
    resident : frozenset of int
        Those that never move.
    slots : int
        Length of the ring.
    overlap : bool
        True: transfers are issued as soon as there is a slot for them. False: each transfer is issued when its data are
        needed, and waited for.
    at_end : {"continue", "turn", "stop"}
        What happens at the end of a sweep. ``continue``: the ring goes on to the first subdivisions of the next sweep, so
        that the link never waits. ``turn``: every other sweep runs backwards, so that what is still in the slots at the
        turn is used twice. ``stop``: the ring runs empty, and the next sweep starts from nothing.

    Notes
    -----
    A run is ``prologue()``, any number of ``sweep(0), sweep(1), ...`` and ``epilogue(sweeps)``, ``sweeps`` being the next.
    The streamed subdivision at position n, counted over all sweeps, takes slot ``n % slots``; at a turn the slots keep what
    they hold, so positions run back with the sweep.
    """

    subdivisions: int
    resident: frozenset[int]
    slots: int
    overlap: bool = True
    at_end: SweepEnd = "continue"

    def __post_init__(self) -> None:
        check_sweep_end(self.at_end)

    @cached_property
    def streamed(self) -> tuple[int, ...]:
        """The subdivisions that move, in row order."""
        return tuple(number for number in range(self.subdivisions) if number not in self.resident)

    @property
    def _kept(self) -> int:
        """How many streamed subdivisions stay in the slots from one sweep to the next."""
        return min(self.slots, len(self.streamed)) if self.at_end == "turn" else 0

    def direction(self, number: int) -> int:
        """Return 1 if sweep ``number`` takes the rows in ascending order, else -1."""
        return -1 if self.at_end == "turn" and number % 2 else 1

    def order(self, number: int) -> range:
        """Return the order in which sweep ``number`` takes the subdivisions."""
        everything = range(self.subdivisions)
        return everything if self.direction(number) == 1 else everything[::-1]

    def transfers(self, number: int) -> tuple[int, ...]:
        """Return the streamed subdivisions that sweep ``number`` does not find in the slots, in the order of their use."""
        return self.streamed[:: self.direction(number)][self._kept if number else 0 :]

    def _copy(self, sweep: int, position: int) -> Copy:
        """Return the transfer of the streamed subdivision at a position of a sweep, which may lie in the sweep after it."""
        count = len(self.streamed)
        if position >= count:
            sweep, position = sweep + position // count, position % count
        if self.direction(sweep) == -1:
            position = count - 1 - position
            # On the way back a subdivision comes to the slot of the one that leaves: its place counted from the turn.
            return Copy(self.streamed[position], (count - 1 - (count - 1 - position) % self.slots) % self.slots)
        passed = sweep * count if self.at_end == "continue" else 0
        return Copy(self.streamed[position], (passed + position) % self.slots)

    def prologue(self, first: int = 0) -> list[Step]:
        """Fill the ring for a run that begins with sweep ``first``: 0, or, to begin backwards, 1."""
        if self.at_end == "turn" and (self.overlap or first):
            return [self._copy(first, position) for position in range(self._kept)]
        if self.at_end == "continue" and self.overlap and self.streamed:
            return [self._copy(0, position) for position in range(self.slots)]
        return []

    def sweep(self, number: int, stages: int = 1, reach: int = 1) -> list[Step]:
        """Compute with every subdivision, in several stages that follow each other like waves.

        Parameters
        ----------
        number : int
        stages : int
            Stage s computes with a subdivision when stage s - 1 has computed with it and with all within its reach.
        reach : int
            How many subdivisions to either side a computation needs the last stage of. What is needed by later stages stays
            in the slots, ``(stages - 1) reach + 1`` subdivisions at a time.

        Raises
        ------
        InputError
            If the ring does not hold them.
        """
        behind = (stages - 1) * reach
        if self.streamed and behind >= self.slots:
            raise InputError(
                f"{stages} products a sweep hold {behind + 1} subdivisions at a time, but there are {self.slots} slots; plan "
                "with more of them"
            )
        steps: list[Step] = []
        count, position = len(self.streamed), 0
        # Positions whose transfers are issued by the end of this sweep.
        issued = count + self.slots if self.at_end == "continue" else count
        if self.overlap and self.at_end == "stop":
            steps += [self._copy(number, ahead) for ahead in range(min(self.slots, count))]
        arrived: list[tuple[int, int | None, int]] = []  # subdivision, slot, and position of those that stream
        order = self.order(number)
        for time in range(len(order) + behind):
            if time < len(order):
                subdivision, slot = order[time], None
                if subdivision not in self.resident:
                    copy = self._copy(number, position)
                    slot = copy.slot
                    if not self.overlap and (position >= self._kept or not number):
                        steps.append(copy)
                arrived.append((subdivision, slot, position))
                position += slot is not None
            for stage in range(stages):
                place = time - stage * reach
                if 0 <= place < len(order):
                    steps.append(Compute(*arrived[place][:2], stage))
            if time >= behind:
                _, slot, leaving = arrived[time - behind]
                if slot is not None and leaving < count - self._kept:
                    steps.append(Release(slot))
                    if self.overlap and leaving + self.slots < issued:
                        steps.append(self._copy(number, leaving + self.slots))
        return steps

    def epilogue(self, sweeps: int) -> list[Step]:
        """Give up what is in the slots, or on its way there, for a sweep that does not come."""
        if not self.streamed or self.at_end == "stop":
            return []
        if self.at_end == "continue":
            held = [self._copy(sweeps, position) for position in range(self.slots)] if self.overlap else []
        else:
            held = [self._copy(sweeps, position) for position in range(self._kept)] if self.overlap or sweeps else []
        return [Release(copy.slot) for copy in held]


def check_hazards(steps: Iterable[Step], *, subdivisions: int, slots: int, resident: Iterable[int] = ()) -> None:
    """Verify a run from its first step to its last.

    Raises
    ------
    HazardError
        If a computation reads a slot that does not hold its subdivision or a resident that is none, a copy overwrites a
        slot not released, a slot is released twice or does not exist, or a slot is still held at the end.
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
