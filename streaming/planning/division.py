"""Divides the subdivisions of a matrix between a GPU, which streams its part, and the CPU, which reads the rest in place."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.spmv import InputError, format_named, format_nbytes
from penstock.streaming.planning.estimate import TYPICAL, LinkRates
from penstock.streaming.planning.plan import StreamPlan, plan_stream
from penstock.streaming.planning.workload import Ring, Workload
from penstock.streaming.stores.matrix_index import MatrixIndex


@dataclass(frozen=True)
class Division:
    """The first subdivisions for the GPU and the others for the CPU, with the seconds that a product is expected to take.

    Parameters
    ----------
    index : MatrixIndex
        Of the whole matrix.
    plan : StreamPlan
        Of the GPU's part.
    cpu_rate : float
        Bytes of the matrix that the CPU multiplies per second while the GPU streams.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import Ring, Workload, divide, index_of
    >>> index = index_of(Cantilever(nodes=64, dof=3).symbolic_slabs(64))
    >>> division = divide(index, 64 << 20, Workload(), Ring(), cpu_rate=55e9)
    >>> division.count, round(division.cpu_nbytes / index.part_nbytes("whole"), 2)
    (35, 0.45)
    """

    index: MatrixIndex
    plan: StreamPlan
    cpu_rate: float

    @property
    def count(self) -> int:
        """Subdivisions of the GPU."""
        return len(self.plan.index.subdivisions)

    @property
    def cpu_nbytes(self) -> int:
        """Bytes that the CPU multiplies."""
        return self.index.nbytes - self.plan.index.nbytes

    @property
    def gpu_seconds(self) -> float:
        """Seconds of the GPU's part of a product."""
        return self.plan.predicted_seconds() or 0.0

    @property
    def cpu_seconds(self) -> float:
        """Seconds of the CPU's part of a product: its subdivisions, and both vectors over the link.

        It needs x before it can begin, of which half of a symmetric matrix needs its own rows only, and its rows of the product
        cross the link when it has ended.
        """
        rates = self.plan.rates
        if rates is None or not self.cpu_nbytes:
            return 0.0
        rows = self.index.shape[0] - self.plan.index.shape[0]
        needed = rows if format_named(self.index.format_name).traits.half else self.index.shape[1]
        vectors = 8 * self.plan.workload.columns * (needed + rows)
        return self.cpu_nbytes / self.cpu_rate + vectors / rates.link

    @property
    def seconds(self) -> float:
        """Seconds of a product."""
        return max(self.gpu_seconds, self.cpu_seconds)

    def explain(self) -> str:
        """Return a description, one fact per line."""
        subdivisions = len(self.index.subdivisions)
        return "\n".join(
            [
                f"GPU         {self.count} of {subdivisions} subdivisions, {format_nbytes(self.plan.index.nbytes)}, of which "
                f"{format_nbytes(self.plan.resident_nbytes)} stay: {1e3 * self.gpu_seconds:.3g} ms",
                f"CPU         {subdivisions - self.count} of {subdivisions} subdivisions, {format_nbytes(self.cpu_nbytes)}, read "
                f"in host memory at {self.cpu_rate / 1e9:.3g} GB/s: {1e3 * self.cpu_seconds:.3g} ms",
            ]
        )


def division_at(
    index: MatrixIndex,
    count: int,
    budget: int,
    workload: Workload,
    ring: Ring,
    *,
    cpu_rate: float,
    rates: LinkRates = TYPICAL,
) -> Division:
    """Return the division that gives the GPU ``count`` subdivisions."""
    if not 1 <= count <= len(index.subdivisions):
        raise InputError(f"the GPU takes 1 to {len(index.subdivisions)} subdivisions, not {count}")
    first = index.subdivisions[:count]
    part = replace(index, subdivisions=first, shape=(first[-1].row_stop, index.shape[1]))
    return Division(index, plan_stream(part, budget, workload, ring, rates=rates), cpu_rate)


def divide(
    index: MatrixIndex, budget: int, workload: Workload, ring: Ring, *, cpu_rate: float, rates: LinkRates = TYPICAL
) -> Division:
    """Return the division with the shortest product: the one at which GPU and CPU end at the same time, as nearly as cuts allow.

    Parameters
    ----------
    index : MatrixIndex
    budget : int
        Bytes of GPU memory for the matrix.
    workload : Workload
    ring : Ring
    cpu_rate : float
        Bytes of the matrix that the CPU multiplies per second while the GPU streams.
    rates : LinkRates
        Of the GPU, while the CPU multiplies.

    Returns
    -------
    Division

    Raises
    ------
    BudgetError
        If the budget does not hold the slots for one subdivision.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import Ring, Workload, divide, index_of
    >>> index = index_of(Cantilever(nodes=64, dof=3).symbolic_slabs(64))
    >>> [divide(index, 64 << 20, Workload(), Ring(), cpu_rate=rate).count for rate in (10e9, 50e9, 90e9)]
    [55, 37, 29]
    """

    def at(count: int) -> Division:
        return division_at(index, count, budget, workload, ring, cpu_rate=cpu_rate, rates=rates)

    # The GPU's seconds grow with its part, and the CPU's shrink: bisect for the first part at which the GPU ends later.
    low, high = 1, len(index.subdivisions)
    while low < high:
        middle = (low + high) // 2
        division = at(middle)
        if division.gpu_seconds < division.cpu_seconds:
            low = middle + 1
        else:
            high = middle
    return min((at(count) for count in (max(1, low - 1), low)), key=lambda division: division.seconds)
