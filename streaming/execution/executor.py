"""The interface of executors, which execute schedules, and code that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock.spmv import Array, Device, SparseMatrix
from penstock.streaming.planning.schedule import Compute, Step
from penstock.streaming.planning.timeline import Timeline
from penstock.streaming.stores.base import Store
from penstock.streaming.stores.matrix_index import MatrixIndex, Part

#: ``visit(number, slab, stage)``, called for each computation of a sweep.
Visit = Callable[[int, SparseMatrix, int], None]

#: The offsets and column indices of every subdivision, by name.
Structures = list[dict[str, Array]]

#: The resident subdivisions, by number.
Residents = dict[int, SparseMatrix]


@dataclass(frozen=True)
class SweepKey:
    """Identifies a sweep that may be repeated, so that a GPU can replay it as a CUDA graph.

    Parameters
    ----------
    kernels : tuple
        Identifies the kernels that run; they must have been started once before they can be captured.
    memory : tuple or None
        Identifies the memory they use. None: do not capture this sweep, only note its kernels.
    unit : {"sweep", "visit"}
        Capture the sweep as a whole, or the kernels of each visit.
    filling : bool
        Capture also a sweep that begins with an empty ring, which is rare in most methods.

    Examples
    --------
    >>> from penstock.streaming import SweepKey
    >>> one, four = (SweepKey(kernels=("bsr", columns), memory=None) for columns in (1, 4))
    >>> one == four  # other kernels: another graph
    False
    """

    kernels: tuple[object, ...]
    memory: tuple[object, ...] | None
    unit: Literal["sweep", "visit"] = "sweep"
    filling: bool = False


@dataclass(frozen=True)
class ExecutorSetup:
    """The arguments for creating an executor.

    Parameters
    ----------
    store : Store
    device : Device
        Runs the computations and holds the slots.
    slots : list of uint8 arrays
        Each has room for the largest streamed part of a subdivision.
    structures : list of dict or None
        The offsets and column indices of every subdivision, by name, if only values are streamed.
    part : Part
        The part of each subdivision that is streamed.
    overlap : bool
        Transfer while computations run.
    stall_seconds : float
        A read that lasts longer is an error.
    link_binds : bool
        Whether transfers are expected to take much longer than computations.
    host_computes : bool
        The host computes during sweeps, so replaying one must not make it wait.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.spmv import CPU
    >>> from penstock.streaming import ExecutorSetup, HostStore
    >>> setup = ExecutorSetup(HostStore.create(Cantilever(nodes=4).subdivisions(4)), CPU, slots=[])
    >>> setup.overlap, setup.part, setup.stall_seconds
    (True, 'whole', 60.0)
    """

    store: Store
    device: Device
    slots: list[Array]
    structures: Structures | None = None
    part: Part = "whole"
    overlap: bool = True
    stall_seconds: float = 60.0
    link_binds: bool = False
    host_computes: bool = False


class Executor(Protocol):
    """Transfers subdivisions to slots and calls a function for each that has arrived.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import HostStore, StreamedMatrix
    >>> with StreamedMatrix(HostStore.create(Cantilever(nodes=4).subdivisions(4)), "64 KiB") as A:
    ...     A.staged, A.waited_seconds
    (False, 0.0)
    """

    @property
    def staged(self) -> bool:
        """Whether data pass through page-locked buffers between the store and the device."""

    @property
    def waited_seconds(self) -> float:
        """Seconds that the host has waited for a GPU while starting sweeps, or for transfers while it computed them."""

    def load(self, number: int, buffer: Array, part: Part) -> None:
        """Read a part of a subdivision into a resident buffer."""

    def play(
        self, steps: Callable[[], Sequence[Step]], residents: Residents, visit: Visit, key: SweepKey | None = None
    ) -> None:
        """Execute the steps in order; an error or an interrupt leaves the executor idle, with all slots free.

        Parameters
        ----------
        steps : callable
            Returns the steps; not called if the sweep is replayed.
        residents : dict
        visit : callable
            ``visit(number, slab, stage)`` computes, or starts the computation on a device.
        key : SweepKey, optional
            Allows the executor to capture the sweep and to replay it when the same key is used again.
        """

    def trace(self) -> AbstractContextManager[Timeline]:
        """Return a context in which the times of transfers and computations are recorded."""

    def drain(self) -> None:
        """Wait for all transfers and computations, and discard data in flight."""

    def close(self) -> None:
        """Stop threads and release the slots; the store stays open."""


ExecutorFactory = Callable[[ExecutorSetup], Executor]


class SlabViews:
    """Views of slots as matrices; one object for each pair of subdivision and slot."""

    def __init__(self, index: MatrixIndex, slots: list[Array], structures: Structures | None) -> None:
        self._index, self._slots, self._structures = index, slots, structures
        self._views: dict[tuple[int, int], SparseMatrix] = {}
        self._arrays: dict[tuple[int, int, Part], dict[str, Array]] = {}

    def slab(self, step: Compute, residents: Residents) -> SparseMatrix:
        """Return the matrix for a step."""
        if step.slot is None:
            return residents[step.subdivision]
        key = (step.subdivision, step.slot)
        if key not in self._views:
            structure = None if self._structures is None else self._structures[step.subdivision]
            self._views[key] = self._index.view(step.subdivision, self._slots[step.slot], structure)
        return self._views[key]

    def arrays(self, number: int, slot: int, part: Part) -> dict[str, Array]:
        """Return the arrays of a part of a subdivision in a slot."""
        key = (number, slot, part)
        if key not in self._arrays:
            self._arrays[key] = self._index.arrays(number, self._slots[slot], part)
        return self._arrays[key]

    def clear(self) -> None:
        """Drop all references to the slots."""
        self._views.clear()
        self._arrays.clear()
        self._slots.clear()
        self._structures = None
