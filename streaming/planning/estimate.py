"""Predicts the time of a sweep from measured rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from penstock.spmv import format_named
from penstock.streaming.planning.schedule import Schedule
from penstock.streaming.planning.simulate import simulate
from penstock.streaming.planning.workload import Ring, Workload
from penstock.streaming.stores.matrix_index import MatrixIndex

#: Streams in which a captured sweep computes: one subdivision alone does not fill the GPU.
LANES = 4
#: With fewer products of separate vectors per subdivision a CUDA graph is not worth capturing.
LEAST_CAPTURED = 4
#: Fraction of the read bandwidth that products reach (0.80 to 0.98 on an H200).
EFFICIENCY = 0.85


@dataclass(frozen=True)
class LinkRates:
    """Measured rates of a machine.

    Parameters
    ----------
    link, memory : float
        Bytes per second over the link (or from the disk, or at which subdivisions are made), and read by kernels from memory.
    transfer_start, product_start : float
        Seconds that the host needs to start a transfer and a product. The defaults are those of a PCIe 5 link, from the
        measured rates of pieces of 1 and 256 MiB, and of a kernel launched from Python.
    product_gap : float
        Seconds of a product beyond the time for its bytes: until the whole GPU is busy, and until its last part has ended; on
        a CPU, until all threads work.
    scattering : float
        Fraction of the memory rate that products with half of a symmetric matrix reach. Others reach 0.80 to 0.98.
    side_by_side : float
        Number of products of one sweep that run concurrently and fill each other's gaps.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import LinkRates, index_of, plan_stream
    >>> index = index_of(Cantilever(nodes=64, dof=3).symbolic_slabs(16))
    >>> plan = plan_stream(index, "128 MiB", rates=LinkRates(link=25e9, memory=1.5e12))
    >>> plan.estimate().binding, f"{plan.predicted_seconds():.3f} s"
    ('the link', '0.016 s')
    """

    link: float
    memory: float
    transfer_start: float = 11e-6
    product_start: float = 10e-6
    product_gap: float = 4e-6
    scattering: float = 0.7
    side_by_side: float = 1.0

    def on_arrival(self, moved_share: float = 0.0) -> LinkRates:
        """Return the rates with which subdivisions are made where they are used, instead of the link to another memory.

        ``moved_share`` are bytes that move over the link for each byte that is made.
        """
        made = self.memory * (_MADE if self.side_by_side > 1 else _MADE_ON_CPU)
        return replace(self, link=1.0 / (1.0 / made + moved_share / self.link))


# Shares of the rate of memory at which finite-element rows are assembled.
_MADE, _MADE_ON_CPU = 0.7, 0.2


#: An H200 behind PCIe 5. Plans are compared at these rates if none were measured; predicted times use measured rates only.
TYPICAL = LinkRates(55e9, 4.4e12, side_by_side=LANES)


@dataclass(frozen=True)
class SweepEstimate:
    """Predicted seconds of a sweep in steady state.

    Parameters
    ----------
    transfer, compute : float
        All transfers alone, and all computations alone.
    overlapped, sequential : float
        The sweep with overlap on and off, simulated with the plan's schedule.

    Examples
    --------
    >>> from penstock.streaming import SweepEstimate
    >>> sweep = SweepEstimate(transfer=0.5, compute=0.1, overlapped=0.51, sequential=0.6)
    >>> sweep.seconds(overlap=True), sweep.binding
    (0.51, 'the link')
    """

    transfer: float
    compute: float
    overlapped: float
    sequential: float

    def seconds(self, overlap: bool) -> float:
        """Return the time of a sweep with or without overlap."""
        return self.overlapped if overlap else self.sequential

    @property
    def binding(self) -> str:
        """The bottleneck of a sweep with overlap."""
        return "the link" if self.transfer > self.compute else "memory"


class _PlannedSweeps(Protocol):
    """The part of a :class:`StreamPlan` that determines the time of a sweep."""

    @property
    def index(self) -> MatrixIndex: ...

    @property
    def workload(self) -> Workload: ...

    @property
    def ring(self) -> Ring: ...

    @property
    def schedule(self) -> Schedule: ...

    @property
    def powers_per_sweep(self) -> int: ...

    @property
    def streamed_sizes(self) -> Sequence[int]: ...


class SweepTimes:
    """The times of single transfers and computations of a sweep in steady state."""

    def __init__(self, plan: _PlannedSweeps, rates: LinkRates) -> None:
        self._plan, self._rates = plan, rates
        self._stages = plan.powers_per_sweep
        self._transfers = [nbytes / rates.link + rates.transfer_start for nbytes in plan.streamed_sizes]
        traits = format_named(plan.index.format_name).traits
        self._memory_rate = rates.memory * (rates.scattering if traits.half else EFFICIENCY)
        if rates.side_by_side > 1:  # a GPU
            self._memory_rate /= traits.slowdown(plan.workload.columns)

    def transfer(self, number: int) -> float:
        """Return the seconds to transfer a subdivision."""
        return self._transfers[number]

    def product(self, number: int) -> float:
        """Return the seconds of one product with a subdivision."""
        subdivision = self._plan.index.subdivisions[number]
        return float(self._seconds_of(subdivision.nbytes, subdivision.row_stop - subdivision.row_start))

    def _seconds_of(self, nbytes: Any, rows: Any) -> Any:
        plan, rates = self._plan, self._rates
        # A product writes its rows of the result and reads about the same number of vector entries. A step of a recurrence
        # is a separate pass that reads five vectors and writes one.
        values, gaps = (2, 1.0) if self._stages == 1 else (8, 2.0 / rates.side_by_side)
        vectors = 8 * values * plan.workload.columns * rows
        bandwidths = nbytes / self._memory_rate + vectors / (EFFICIENCY * rates.memory)
        seconds = bandwidths + gaps * rates.product_gap
        # One call starts many products.
        one_call = self._stages > 1 or plan.workload.repeats >= LEAST_CAPTURED
        return seconds if one_call else np.maximum(seconds, rates.product_start)

    def _products(self) -> list[float]:
        """Return the seconds of one product with each subdivision."""
        index = self._plan.index
        nbytes = np.array([subdivision.nbytes for subdivision in index.subdivisions])
        rows = np.diff(index.row_bounds)
        seconds: list[float] = self._seconds_of(nbytes, rows).tolist()
        return seconds

    def compute(self, number: int) -> float:
        """Return the seconds of all products with a subdivision in a sweep."""
        return self._plan.workload.repeats * self._stages * self.product(number)

    def totals(self) -> tuple[float, float, float]:
        """Return the mean seconds of all transfers and of all computations, and those for which the link must wait."""
        schedule, products = self._plan.schedule, self._products()
        later = [number for number in (1, 2) if schedule.sweeps != "restart"] or [0]
        transferred = sum(sum(map(self._transfers.__getitem__, schedule.transfers(number))) for number in later) / len(
            later
        )
        # No transfer runs until all products with the first subdivision are done, nor after the last one has arrived.
        alternate, stages = schedule.sweeps == "alternate", self._stages
        waiting = stages * (stages - 1) * max(products) if alternate else 0.0
        workload = self._plan.workload
        # The last sweep for all powers computes those that are left.
        powers = workload.degree / -(-workload.degree // stages)
        return transferred, workload.repeats * powers * sum(products), waiting

    def simulated(self, overlap: bool) -> float:
        """Return the mean of sweeps 1 and 2, one in each direction if they alternate."""
        schedule = replace(self._plan.schedule, overlap=overlap)
        if schedule.sweeps == "restart":
            return simulate(schedule.sweep(0), self.transfer, self.compute, overlap=overlap).spans[-1].stop
        steps = schedule.prologue() + schedule.sweep(0)
        before = simulate(steps, self.transfer, self.compute, overlap=overlap).last("compute")
        steps += schedule.sweep(1) + schedule.sweep(2)
        return (simulate(steps, self.transfer, self.compute, overlap=overlap).last("compute") - before) / 2


def estimate_sweep(plan: _PlannedSweeps, rates: LinkRates) -> SweepEstimate:
    """Predict the time of a sweep in steady state."""
    sweep = SweepTimes(plan, rates)
    transferred, computed, waiting = sweep.totals()
    if plan.ring.moves_nothing:  # making subdivisions and multiplying by them share one memory
        return SweepEstimate(transferred, computed, transferred + computed, transferred + computed)
    overlapped = max(sweep.simulated(True), transferred + waiting)
    return SweepEstimate(transferred, computed, overlapped, sweep.simulated(False))


def sweep_bound(plan: _PlannedSweeps, rates: LinkRates) -> tuple[float, float]:
    """Return a lower bound of the time of a sweep, and the time of its transfers alone, without simulating it."""
    transferred, computed, waiting = SweepTimes(plan, rates).totals()
    if plan.ring.moves_nothing:
        return transferred + computed, transferred
    return max(computed, transferred + waiting if plan.schedule.overlap else transferred + computed), transferred
