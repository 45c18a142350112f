"""Plays the schedules of several ranks together, without running them: whether one waits for another, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.streaming.planning.schedule import Compute, Copy, HazardError, Step

__all__ = ["arrivals_of_sweep"]

#: A computation: rank, subdivision and stage.
Done = dict[tuple[int, int, int], float]


def arrivals_of_sweep(steps: Sequence[Sequence[Step]], subdivisions: int, reach: int = 1) -> float:
    """Return how long a sweep of all ranks lasts, in transfers of a subdivision.

    Every rank has a link that transfers one subdivision after the other; computations take no time of their own, but wait for
    what they need: their subdivision and, from the second stage on, the stage before on the subdivisions of a neighbour within
    reach.

    Parameters
    ----------
    steps : sequence of sequences of Step
        Prologue and sweep of each rank; ranks k and k + 1 are neighbours.
    subdivisions : int
        Of each rank.
    reach : int
        Number of subdivisions to either side on which a computation needs the previous stage.

    Raises
    ------
    HazardError
        If ranks wait for each other for ever, because of a stage that is not computed before it is needed.
    """
    ranks = [_Rank(number, own, subdivisions, reach) for number, own in enumerate(steps)]
    done: Done = {}
    while any(not rank.ended for rank in ranks):
        moved = [rank.run(done, len(ranks)) for rank in ranks]
        if not any(moved):
            waiting = next(rank for rank in ranks if not rank.ended)
            raise HazardError(f"rank {waiting.number} waits for ever before its step {waiting.position}")
    return max(rank.now for rank in ranks)


class _Rank:
    def __init__(self, number: int, steps: Sequence[Step], subdivisions: int, reach: int) -> None:
        self.number, self.position, self.now = number, 0, 0.0
        self._steps, self._subdivisions, self._reach = steps, subdivisions, reach
        self._link = 0.0  # when it has ended its last transfer
        self._arrived: dict[int | None, float] = {None: 0.0}

    @property
    def ended(self) -> bool:
        return self.position == len(self._steps)

    def run(self, done: Done, ranks: int) -> bool:
        """Play steps until one has to wait for a neighbour; return whether any was played."""
        before = self.position
        while not self.ended:
            match self._steps[self.position]:
                case Copy(_, slot):
                    self._link = self._arrived[slot] = max(self._link, self.now) + 1.0
                case Compute(subdivision, slot, stage):
                    needed = self._needed(subdivision, stage, ranks)
                    if any(one not in done for one in needed):
                        break
                    self.now = max([self.now, self._arrived[slot], *(done[one] for one in needed)])
                    done[self.number, subdivision, stage] = self.now
            self.position += 1
        return self.position > before

    def _needed(self, subdivision: int, stage: int, ranks: int) -> list[tuple[int, int, int]]:
        """Return the computations of neighbours that one needs."""
        if not stage:
            return []
        near = range(self._reach)
        below = [
            (self.number - 1, self._subdivisions - 1 - n, stage - 1) for n in near if subdivision + n < self._reach
        ]
        last = self._subdivisions - 1
        above = [(self.number + 1, n, stage - 1) for n in near if last - subdivision + n < self._reach]
        return [*(below if self.number else []), *(above if self.number + 1 < ranks else [])]
