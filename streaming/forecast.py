"""What measured rates say of a sweep before any byte moves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.spmv import format_named
from penstock.streaming.cuda_executor import LANES
from penstock.streaming.product_graphs import LEAST_RECORDED
from penstock.streaming.timeline import foretell

if TYPE_CHECKING:
    from penstock.streaming.plan import StreamPlan

__all__ = ["EFFICIENCY", "TYPICAL", "Forecast", "LinkRates", "forecast_sweep"]


@dataclass(frozen=True)
class LinkRates:
    """Measured rates, from which a plan tells the time of a sweep.

    Parameters
    ----------
    link, memory : float
        Bytes a second over the link (or from the disk), and read by kernels from memory.
    transfer_start, product_start : float
        Seconds that the host takes to start a transfer and a product. The defaults are those of a PCIe 5 link, from the
        measured rates of pieces of 1 and 256 MiB, and of a kernel launched from Python.
    product_gap : float
        Seconds that a product takes beyond those of its bytes: until all of the GPU works, and until the last part has
        ended; on a CPU, until all threads do.
    scattering : float
        Of the memory rate, what products of formats that ``scatter`` reach. Others reach 0.80 to 0.98.
    side_by_side : float
        Products of one sweep that run at once, so that gaps of one are filled by others.
    """

    link: float
    memory: float
    transfer_start: float = 11e-6
    product_start: float = 10e-6
    product_gap: float = 4e-6
    scattering: float = 0.7
    side_by_side: float = 1.0


#: Of the read bandwidth, what products of the formats here reach (0.80 to 0.98 on an H200).
EFFICIENCY = 0.85
#: Where nothing was measured, plans are compared on a GPU of 2025; predictions are made from measured rates only.
TYPICAL = LinkRates(55e9, 4.4e12, side_by_side=LANES)


@dataclass(frozen=True)
class Forecast:
    """What rates say of a sweep, in seconds.

    Parameters
    ----------
    transfer, compute : float
        Each alone.
    overlapped, sequential : float
        A sweep with overlap on and off, played through the plan's schedule.
    """

    transfer: float
    compute: float
    overlapped: float
    sequential: float

    def seconds(self, overlap: bool) -> float:
        """Return the time of a sweep with overlap, or without."""
        return self.overlapped if overlap else self.sequential

    @property
    def binding(self) -> str:
        """The side that a sweep with overlap waits for."""
        return "the link" if self.transfer > self.compute else "memory"


def forecast_sweep(plan: StreamPlan, rates: LinkRates) -> Forecast:
    """Return what rates say of a sweep in the middle of many."""

    def transfer(number: int) -> float:
        return plan.nbytes_of(number) / rates.link + rates.transfer_start

    stages, scatters = plan.products_a_sweep, format_named(plan.index.format_name).scatters
    rate = rates.memory * (rates.scattering if scatters else EFFICIENCY)

    def product(number: int) -> float:
        subdivision = plan.index.subdivisions[number]
        # Its entries of the result are written, and about as many of the vector read; a step of a recurrence is a pass
        # of its own, which reads five vectors and writes one.
        values, gaps = (2, 1.0) if stages == 1 else (8, 2.0 / rates.side_by_side)
        vectors = 8 * values * plan.columns * (subdivision.row_stop - subdivision.row_start)
        seconds = subdivision.nbytes / rate + vectors / (EFFICIENCY * rates.memory) + gaps * rates.product_gap
        # Many products are started by one call.
        return seconds if stages > 1 or plan.repeats >= LEAST_RECORDED else max(seconds, rates.product_start)

    def compute(number: int) -> float:
        return plan.repeats * stages * product(number)

    def sweep(overlap: bool) -> float:
        """Return the mean of sweeps 1 and 2, one in each direction if they turn."""
        schedule = replace(plan.schedule, overlap=overlap)
        if schedule.at_end == "stop":
            return foretell(schedule.sweep(0), transfer, compute, overlap=overlap).spans[-1].stop
        steps = schedule.prologue() + schedule.sweep(0)
        before = foretell(steps, transfer, compute, overlap=overlap).last("compute")
        steps += schedule.sweep(1) + schedule.sweep(2)
        return (foretell(steps, transfer, compute, overlap=overlap).last("compute") - before) / 2

    later = [schedule for schedule in (1, 2) if plan.at_end != "stop"] or [0]
    transfers = [sum(map(transfer, plan.schedule.transfers(number))) for number in later]
    numbers = range(len(plan.index.subdivisions))
    transferred, computes = sum(transfers) / len(transfers), sum(map(compute, numbers))
    # Nothing arrives until the first subdivision has had all its products, nor after the last one has come.
    waiting = stages * (stages - 1) * max(map(product, numbers)) if plan.at_end == "turn" else 0.0
    return Forecast(transferred, computes, max(sweep(True), transferred + waiting), sweep(False))
