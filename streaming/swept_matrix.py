"""The part shared by operators that sweep over a stored matrix: sweeps, their direction, their traffic and their end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from penstock.spmv import SweptOperator, format_named, format_nbytes
from penstock.streaming.execution.budget import MemoryBudget
from penstock.streaming.execution.sweeper import Sweeper
from penstock.streaming.planning.plan import StreamPlan
from penstock.streaming.planning.timeline import Timeline
from penstock.streaming.stores.base import Store


class SweptMatrix(SweptOperator):
    """An operator whose products pass over a stored matrix, subdivision by subdivision.

    Attributes
    ----------
    store : Store
    budget : MemoryBudget
    plan : StreamPlan
        Of what is streamed to the device.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import HostStore, StreamedMatrix, SweptMatrix
    >>> beam = Cantilever(nodes=4, dof=3)
    >>> with StreamedMatrix(HostStore.create(beam.subdivisions(4)), "64 KiB") as A, A.recording() as timeline:
    ...     y = A @ beam.load()
    >>> isinstance(A, SweptMatrix), [span.subdivision for span in timeline.spans if span.kind == "compute"]
    (True, [0, 1, 2, 3])
    """

    store: Store
    budget: MemoryBudget
    plan: StreamPlan
    _sweeper: Sweeper

    @property
    def sweeps(self) -> int:
        """Number of sweeps so far."""
        return self._sweeper.sweeps

    @property
    def bytes_streamed(self) -> int:
        """Bytes that these sweeps moved over the link."""
        return self._sweeper.bytes_streamed

    @property
    def staged(self) -> bool:
        """Whether data pass through page-locked buffers to a GPU, because the store is on disk or cannot be page-locked."""
        executor = self._sweeper.executor
        return executor is not None and executor.staged

    @property
    def waited_seconds(self) -> float:
        """Seconds that the host has waited for a GPU while starting sweeps, or for transfers while it computed them."""
        executor = self._sweeper.executor
        return 0.0 if executor is None else executor.waited_seconds

    @property
    def workspace_nbytes(self) -> int:
        """Bytes that the plan reserves for the vectors of a solver."""
        return self.plan.workload.workspace_nbytes

    @property
    def alternates(self) -> bool:
        """Whether sweeps alternate in direction."""
        return self.plan.ring.sweeps == "alternate"

    @property
    def direction(self) -> int:
        """Direction of the next sweep: 1 for ascending rows, -1 for descending rows."""
        return self._sweeper.direction

    def turn_to(self, direction: int) -> None:
        """Set the direction of the next sweep; a change of direction refills the ring.

        Raises
        ------
        InputError
            If the direction differs and this plan's sweeps do not alternate.
        """
        self._sweeper.turn_to(direction)

    def _rows(self, number: int) -> slice:
        subdivision = self.store.index.subdivisions[number]
        return slice(subdivision.row_start, subdivision.row_stop)

    @property
    def _is_half(self) -> bool:
        return format_named(self.store.index.format_name).traits.half

    @property
    def T(self) -> Self:
        """The transpose of a matrix whose upper half is stored, which is the matrix itself; others have none."""
        if not self._is_half:
            raise AttributeError("only a matrix that is stored by half is known to be its own transpose")
        return self

    @contextmanager
    def recording(self) -> Iterator[Timeline]:
        """Record the times of all transfers and computations in a ``with`` block, which ends with a synchronisation."""
        with self.device.current(), self._sweeper.trace() as timeline:
            yield timeline

    def _facts(self) -> list[str]:
        shape, *rest = super()._facts()
        plan = self.plan
        index, cut = plan.index, f"{len(plan.index.subdivisions)} subdivisions"
        matrix = f"{index.format_name} of {format_nbytes(index.nbytes)} in {cut}"
        way = f"streamed through {plan.slots} slots" if plan.slots else "all in memory"
        return [shape, matrix, f"{way}, {format_nbytes(plan.storage_nbytes)}", *rest]

    def close(self) -> None:
        """Stop transfers and release the budget; the store stays open."""
        self._sweeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Not closed by the caller: the reader thread must not outlive the matrix. At interpreter exit it has ended already.
        sweeper = getattr(self, "_sweeper", None)
        if sweeper is not None and sweeper.executor is not None and not sys.is_finalizing():
            self.close()
