"""Caches CUDA graphs of sweeps and of single visits, which are replayed when the same sweep is repeated."""

from __future__ import annotations

from collections.abc import Callable

from penstock.spmv import SparseMatrix
from penstock.spmv.compilation.cuda_graph import CapturedGraph, capture
from penstock.streaming.execution.executor import SweepKey, Visit

#: The parts of a sweep, and the number of streams in which each computes.
CapturedSweep = list[tuple[CapturedGraph, int]]

#: Cached sweeps, a few MB each: enough for a polynomial of degree 33 with two powers per sweep.
_MOST_SWEEPS = 64


class GraphCache:
    """Decides what is captured, and stores the graphs.

    Kernels cannot be loaded during a capture, so a sweep is captured only after the same kernels have been started once.
    """

    def __init__(self) -> None:
        self._sweeps: dict[SweepKey, CapturedSweep] = {}
        self._started: set[tuple[object, ...]] = set()  # kernels
        self._visited: tuple[object, ...] | None = None  # memory of the last sweep whose visits may be captured
        self._visits: dict[tuple[int, int], tuple[SparseMatrix, CapturedGraph]] = {}

    def sweep(self, key: SweepKey, capture_sweep: Callable[[], CapturedSweep]) -> CapturedSweep | None:
        """Return the captured sweep, capturing it now if its kernels have been started before; else None."""
        if key.unit != "sweep" or key.memory is None:
            return None
        if key not in self._sweeps and key.kernels in self._started:
            while len(self._sweeps) >= _MOST_SWEEPS:
                del self._sweeps[next(iter(self._sweeps))]
            self._sweeps[key] = capture_sweep()
        if key not in self._sweeps:
            return None
        self._sweeps[key] = self._sweeps.pop(key)  # the least recently used one is the first
        return self._sweeps[key]

    def note(self, key: SweepKey) -> None:
        """Note that a sweep has started its kernels and ended."""
        if key.unit == "sweep":
            self._started.add(key.kernels)
        else:
            self._visited = key.memory

    def visits(self, key: SweepKey, visit: Visit) -> Visit:
        """Return the visit, or one that replays its kernels if the previous such sweep used the same memory."""
        if key.unit != "visit" or key.memory is None:
            return visit
        if key.memory != self._visited:
            self._visits = {}
            return visit

        def replayed(number: int, slab: SparseMatrix, stage: int) -> None:
            view = (number, id(slab))  # there is one object for each pair of subdivision and slot
            if view not in self._visits:
                self._visits[view] = (slab, capture(lambda: visit(number, slab, stage)))
            self._visits[view][1].launch()

        return replayed

    def clear(self) -> None:
        """Drop all graphs."""
        self._sweeps.clear()
        self._visits.clear()
