"""The order of transfers and computations as data, and a checker that finds hazards in it without running it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from penstock.spmv import InputError

__all__ = ["Compute", "Copy", "HazardError", "Release", "Schedule", "Step", "check_hazards"]


@dataclass(frozen=True)
class Copy:
    """Transfer a subdivision into a slot. May run at once with computations; copies keep their order."""

    subdivision: int
    slot: int


@dataclass(frozen=True)
class Compute:
    """Compute with a subdivision in a slot, or with a resident one (``slot is None``)."""

    subdivision: int
    slot: int | None


@dataclass(frozen=True)
class Release:
    """Nothing issued later reads what the slot holds now."""

    slot: int


Step = Copy | Compute | Release


class HazardError(InputError):
    """A schedule reads a slot before its data arrive, overwrites data still needed, or leaks a slot."""


@dataclass(frozen=True)
class Schedule:
    """Sweeps over all subdivisions in row order, through a ring of slots.

    Parameters
    ----------
    subdivisions : int
        How many there are.
    resident : frozenset of int
        Those that never move.
    slots : int
        Length of the ring.
    overlap : bool
        True: ``slots`` transfers are issued ahead, across the ends of sweeps too, since every sweep reads the same bytes:
        the link never waits for a scalar. False: each transfer is issued when its data are needed, and waited for.

    Notes
    -----
    The n-th transfer since the start goes to slot ``n % slots`` (slot 0 without overlap). A run is ``prologue()``, any
    number of ``sweep(0), sweep(1), ...`` and ``epilogue(sweeps)``.
    """

    subdivisions: int
    resident: frozenset[int]
    slots: int
    overlap: bool = True

    @cached_property
    def streamed(self) -> tuple[int, ...]:
        """The subdivisions that move, in the order of a sweep."""
        return tuple(number for number in range(self.subdivisions) if number not in self.resident)

    def _copy(self, transfer: int) -> Copy:
        return Copy(self.streamed[transfer % len(self.streamed)], transfer % self.slots)

    def prologue(self) -> list[Step]:
        """Fill the ring."""
        return [self._copy(transfer) for transfer in range(self.slots)] if self.overlap and self.streamed else []

    def sweep(self, number: int) -> list[Step]:
        """Compute once with every subdivision; each slot given free is filled with what is needed next."""
        steps: list[Step] = []
        transfer = number * len(self.streamed)
        for subdivision in range(self.subdivisions):
            if subdivision in self.resident:
                steps.append(Compute(subdivision, None))
            elif self.overlap:
                slot = transfer % self.slots
                steps += [Compute(subdivision, slot), Release(slot), self._copy(transfer + self.slots)]
                transfer += 1
            else:
                steps += [Copy(subdivision, 0), Compute(subdivision, 0), Release(0)]
        return steps

    def epilogue(self, sweeps: int) -> list[Step]:
        """Give up what was fetched ahead of a sweep that does not come."""
        ahead = range(sweeps * len(self.streamed), sweeps * len(self.streamed) + self.slots)
        return [Release(transfer % self.slots) for transfer in ahead] if self.overlap and self.streamed else []


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
            case Compute(subdivision, None):
                if subdivision not in residents:
                    raise HazardError(f"step {position}: {step} reads a subdivision that is not resident")
            case Compute(subdivision, slot):
                if slot is None or holds.get(slot) != subdivision:
                    raise HazardError(f"step {position}: {step} reads slot {slot} before its data were requested")
            case Release(slot):
                if slot not in holds:
                    raise HazardError(f"step {position}: {step} releases a slot that holds nothing")
                del holds[slot]
    if holds:
        raise HazardError(f"slots {sorted(holds)} are never released")
