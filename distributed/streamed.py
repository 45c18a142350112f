"""Several products in each sweep on every rank at once: neighbours sweep towards each other and away from each other."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from penstock.distributed.coupling import Coupling
from penstock.distributed.matrix import DistributedMatrix
from penstock.distributed.mpi import Exchange, MpiCommunicator
from penstock.spmv import Array, InputError, SweptOperator
from penstock.spmv.vectors.recurrence import Recurrence
from penstock.streaming import MemoryBudget, Store, StreamedMatrix, Timeline
from penstock.streaming.planning.schedule import HazardError


class DistributedStreamedMatrix(DistributedMatrix, SweptOperator):
    """A distributed matrix whose squares are streamed, each by its rank; the couplings stay in memory.

    Ranks with odd numbers sweep in the other direction than the others (*mirrored sweeps*). Two neighbours are then at their
    common boundary at the same time, at the beginning of a sweep or at its end, and each product there finds what it needs of
    the neighbour's product before it. So no rank waits until another one has ended its sweep, and no row is multiplied twice.

    Parameters
    ----------
    square : StreamedMatrix
        Own rows and columns. Sweeps of its plan must alternate.
    couplings : sequence of Coupling
    communicator : MpiCommunicator
        Constructing the matrix is collective, as products are.
    mirrored : bool
        False lets all ranks sweep in the same direction, for comparisons: they then wait for each other.

    Raises
    ------
    InputError
        On all ranks, if sweeps of one of them do not alternate, or cut blocks of couplings.

    Examples
    --------
    >>> from penstock.distributed import DistributedStreamedMatrix, MpiCommunicator, RowPartition, split_rows
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import HostStore, StreamedMatrix
    >>> beam, ranks = Cantilever(nodes=(9, 3, 3), dof=3), MpiCommunicator()
    >>> partition = RowPartition.even(beam.unknowns, ranks.size, multiple=3)
    >>> own = partition.of(ranks.rank)
    >>> square, couplings = split_rows(beam.matrix().rows(own.start, own.stop), partition, ranks, block_size=3)
    >>> with StreamedMatrix(HostStore.from_matrix(square, 8), "100 KiB") as streamed:
    ...     A = DistributedStreamedMatrix(streamed, couplings, ranks)
    ...     y = A @ beam.load()[own]
    ...     A.shape, y.shape
    ((243, 243), (243,))
    """

    square: StreamedMatrix

    def __init__(
        self,
        square: StreamedMatrix,
        couplings: Sequence[Coupling],
        communicator: MpiCommunicator,
        *,
        mirrored: bool = True,
    ) -> None:
        super().__init__(square, couplings, communicator)
        with communicator.together():
            if square.plan.slots and not square.alternates:
                raise InputError("sweeps of ranks must alternate; plan with Ring(sweeps='alternate')")
            size = max((coupling.block_size for coupling in self.couplings), default=1)
            if not square.keeps_together(size):
                raise InputError(f"subdivisions cut the couplings' blocks of {size} rows; cut at multiples of them")
        self._turned = -1 if mirrored and square.plan.slots and communicator.rank % 2 else 1
        square.turn_to(self._turned)
        # The rank with the shortest ring decides; one whose square is in memory makes as many products as others want.
        own = float(square.powers_per_sweep()) if square.plan.slots else math.inf
        # Products follow each other in a sweep only where neighbours meet within the reach of a subdivision.
        fewest = -communicator.largest(-(own if self._edges_are_narrow() else 1.0))
        self._powers = None if fewest == math.inf else int(fewest)
        self.replays = self._all_can_capture(bool(square.plan.slots) and square.plan.ring.overlap and not square.staged)
        self._edges: dict[tuple[Any, ...], _Edges] = {}

    def _edges_are_narrow(self) -> bool:
        """Return whether what couples with each neighbour lies in subdivisions that couple with each other."""
        if not self.square.plan.slots:
            return True
        starts, reach = np.array(self.square.plan.index.row_starts), self.square.reach
        for coupling in self.couplings:
            sends = coupling.sends
            sent = (sends.start, sends.stop - 1) if isinstance(sends, slice) else (int(sends[0]), int(sends[-1]))
            ends = [coupling.rows.start, coupling.rows.stop - 1, *sent]
            touched = np.searchsorted(starts, [min(ends), max(ends)], side="right")
            if touched[1] - touched[0] > reach:
                return False
        return True

    @property
    def waited_seconds(self) -> float:
        """Seconds for which the host waited for its GPU or for other ranks."""
        return self.square.waited_seconds + self.waited_for_ranks

    @property
    def store(self) -> Store:
        """Where this rank's square is."""
        return self.square.store

    @property
    def budget(self) -> MemoryBudget:
        """Memory of this rank for slots and what stays of its square."""
        return self.square.budget

    @property
    def staged(self) -> bool:
        """Whether this rank's data pass through page-locked buffers to its GPU."""
        return self.square.staged

    def recording(self) -> AbstractContextManager[Timeline]:
        """Record the times of this rank's transfers and computations in a ``with`` block."""
        return self.square.recording()

    @property
    def sweeps(self) -> int:
        """Sweeps over this rank's rows so far."""
        return self.square.sweeps

    @property
    def bytes_streamed(self) -> int:
        """Bytes that those sweeps moved over this rank's link."""
        return self.square.bytes_streamed

    @property
    def workspace_nbytes(self) -> int:
        """Bytes that this rank's plan reserves for the vectors of a solver."""
        return self.square.workspace_nbytes

    @property
    def direction(self) -> int:
        """Direction of the next sweep of the first rank."""
        return self.square.direction * self._turned

    def turn_to(self, direction: int) -> None:
        """Set the direction of the next sweep of the first rank; others follow or mirror it."""
        self.square.turn_to(direction * self._turned)

    def sweeps_of(self, products: int) -> int:
        """Return the sweeps of some consecutive products, the same on all ranks."""
        return -(-products // (self._powers or 1))

    def preferred_degree(self) -> int | None:
        """Return the planned polynomial degree of the first rank, or else the powers of one sweep."""
        degree = self.communicator.of_first(self.square.plan.workload.degree)
        return int(degree) if degree > 1 else self._powers

    def keeps_together(self, rows: int) -> bool:
        """Return whether the subdivisions of all ranks begin at multiples of ``rows``."""
        return not self.communicator.largest(float(not self.square.keeps_together(rows)))

    def advance(self, recurrence: Recurrence) -> None:
        """Perform all steps of a recurrence, several in each sweep. Collective."""
        key = (len(recurrence.steps), recurrence.v.shape[1:])
        if key not in self._edges:
            self._edges[key] = _Edges(self, len(recurrence.steps), recurrence.v)
        edges = self._edges[key]
        edges.begin(recurrence.vectors(0)[0])
        self.square.advance(_RankRecurrence.of(recurrence, edges, replays=self.replays), powers=self._powers)
        edges.end()


@dataclass
class _RankRecurrence(Recurrence):
    """A recurrence that adds the neighbours' part of a product before a step, and sends them the new vector."""

    edges: Any = None

    @classmethod
    def of(cls, recurrence: Recurrence, edges: _Edges, *, replays: bool) -> Self:
        values = {field.name: getattr(recurrence, field.name) for field in dataclasses.fields(Recurrence)}
        values["repeats"] = recurrence.repeats and replays
        return cls(**values, edges=edges)

    def _step(self, stage: int, rows: slice, image: Array, *, clears: bool) -> None:
        self.edges.add(stage, rows, image)
        super()._step(stage, rows, image, clears=clears)
        self.edges.send(stage + 1, rows, self.vectors(stage + 1)[0])


class _Edges:
    """The messages of recurrences: for every step, each neighbour's part of the vector that the step multiplies.

    Their memory stays where it is, so that sweeps can be captured in CUDA graphs. A replayed sweep runs without the calls below.
    """

    def __init__(self, A: DistributedStreamedMatrix, steps: int, v: Array) -> None:
        self._A, self._ranks, self._steps = A, A.communicator, steps
        self._halos = [A.new_halos(v) for _ in range(steps)]
        self._outgoing = [[A.device.xp.empty_like(one.outgoing(v)) for one in A.couplings] for _ in range(steps)]
        self._shares: dict[tuple[int, int, int], Any] = {}

    def begin(self, v: Array) -> None:
        """Exchange the first vector, all of whose rows are there."""
        self._exchanges: dict[tuple[int, int], Exchange] = {}
        self._waited: set[tuple[int, int]] = set()
        # Rows that a neighbour needs of the vector of a step, and that are not there yet.
        self._left = [[len(values) for values in of_step] for of_step in self._outgoing]
        self.send(0, slice(0, v.shape[0]), v)

    def add(self, step: int, rows: slice, image: Array) -> None:
        """Add the neighbours' share of the product of a step to the image of some rows."""
        for which, coupling in enumerate(self._A.couplings):
            start, stop = max(rows.start, coupling.rows.start), min(rows.stop, coupling.rows.stop)
            if start < stop:
                self._wait_for(step, which)
                part = (which, start - coupling.rows.start, stop - coupling.rows.start)
                if part not in self._shares:
                    self._shares[part] = coupling.part(*part[1:])
                target = image[start - rows.start : stop - rows.start]
                self._shares[part]._apply(self._halos[step][which], target, 1.0, 1.0)

    def _wait_for(self, step: int, which: int) -> None:
        """Wait for a message; in a CUDA graph, and where it replays the sweep before, the stream waits instead."""
        exchange = self._exchanges.get((step, which))
        if exchange is None and not self._A.replays:
            raise HazardError(f"step {step} needs a message that has not been started; this is a defect of penstock")
        if exchange is not None and (step, which) not in self._waited:
            began = time.perf_counter()
            exchange.wait()
            self._A.waited_for_ranks += time.perf_counter() - began
            self._waited.add((step, which))

    def send(self, step: int, rows: slice, v: Array) -> None:
        """Exchange the vector that a step multiplies, as soon as all rows that a neighbour needs of it are there."""
        if step == self._steps:
            return
        for which, coupling in enumerate(self._A.couplings):
            places, here, count = _selected(coupling.sends, rows)
            if count:
                values = self._outgoing[step][which]
                values[places] = v[here]  # now, because later steps overwrite v
                self._left[step][which] -= count
                if not self._left[step][which]:
                    pair = (coupling.neighbour, values, self._halos[step][which])
                    self._exchanges[step, which] = self._ranks.start_exchange([pair], step)
        for exchange in list(self._exchanges.values())[-2:]:
            exchange.progress()

    def end(self) -> None:
        """Wait until neighbours have what was sent."""
        for exchange in self._exchanges.values():
            exchange.end()


def _selected(sends: slice | Array, rows: slice) -> tuple[Any, Any, int]:
    """Return the rows to send that are among some rows: places in the message, rows, and their count."""
    if isinstance(sends, slice):
        low, high = max(sends.start, rows.start), min(sends.stop, rows.stop)
        return slice(low - sends.start, high - sends.start), slice(low, high), max(0, high - low)
    places = ((sends >= rows.start) & (sends < rows.stop)).nonzero()[0]
    return places, sends[places], int(places.size)
