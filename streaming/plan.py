"""How a matrix goes through a memory budget, decided before any byte moves, and told in words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from penstock.spmv import format_nbytes
from penstock.streaming.forecast import EFFICIENCY, TYPICAL, Forecast, LinkRates, forecast_sweep
from penstock.streaming.layout import MatrixIndex, Part
from penstock.streaming.schedule import Schedule, SweepEnd

__all__ = ["StreamPlan", "iterations_saved"]

_HALVED = 40  # products: at so many, one is worth half of its own


@dataclass(frozen=True)
class StreamPlan:
    """How a matrix goes through a memory budget.

    Parameters
    ----------
    index : MatrixIndex
    budget_nbytes : int
        Allowed for slots, the resident part and a resident structure.
    slots, slot_nbytes : int
        The ring; no slots if everything is resident.
    resident : frozenset of int
        Subdivisions that stay, spread evenly among the streamed ones so that the link never idles for long.
    columns, repeats : int
        Vectors a product is applied to at once, and products made with each subdivision before it leaves.
    products : int
        Products that follow each other, as those of a polynomial in the matrix do.
    reach : int
        How many subdivisions to either side the entries of one reach.
    workspace_nbytes : int
        Vectors of the solver, outside the budget.
    overlap : bool
        Whether transfers run during computations.
    at_end : {"turn", "continue", "stop"}
        What happens at the end of a sweep; see :class:`Schedule`.
    resident_structure : bool
        Whether offsets and column indices of all subdivisions stay, and only values move.
    rates : LinkRates or None
        For predicted times.
    """

    index: MatrixIndex
    budget_nbytes: int
    slots: int
    slot_nbytes: int
    resident: frozenset[int]
    columns: int = 1
    repeats: int = 1
    workspace_nbytes: int = 0
    overlap: bool = True
    at_end: SweepEnd = "turn"
    resident_structure: bool = False
    rates: LinkRates | None = None
    products: int = 1
    reach: int = 1

    @property
    def products_a_sweep(self) -> int:
        """Products that one sweep makes, if subdivisions couple with ``reach`` others to either side."""
        return max(1, min(self.products, self.room_for_products)) if self.slots else 1

    @property
    def room_for_products(self) -> int:
        """Products that follow each other for which the ring has room; with overlap a slot is left to what arrives."""
        return (self.slots - (2 if self.overlap else 1)) // self.reach + 1

    @cached_property
    def schedule(self) -> Schedule:
        """The order of transfers and computations."""
        return Schedule(len(self.index.subdivisions), self.resident, self.slots, self.overlap, self.at_end)

    @property
    def part(self) -> Part:
        """What moves of a subdivision."""
        return "values" if self.resident_structure else "whole"

    def nbytes_of(self, number: int) -> int:
        """Return the bytes that move of a subdivision."""
        return self.index.subdivisions[number].part_nbytes(self.part)

    @property
    def resident_nbytes(self) -> int:
        """Bytes of the resident part."""
        return sum(self.nbytes_of(number) for number in self.resident)

    @property
    def structure_nbytes(self) -> int:
        """Bytes of offsets and column indices, where they stay apart from the values."""
        return self.index.part_nbytes("structure") if self.resident_structure else 0

    @property
    def streamed_nbytes(self) -> int:
        """Bytes over the link in the first sweep; each later one saves what is still in the slots at the turn."""
        return self.sweep_nbytes(0)

    def sweep_nbytes(self, number: int) -> int:
        """Return the bytes over the link that sweep ``number`` needs."""
        return sum(self.nbytes_of(subdivision) for subdivision in self.schedule.transfers(number))

    @property
    def storage_nbytes(self) -> int:
        """Bytes of the budget in use: slots, resident part and resident structure."""
        return self.slots * self.slot_nbytes + self.resident_nbytes + self.structure_nbytes

    def forecast(self) -> Forecast | None:
        """Return what the rates say of a sweep in the middle of many, if they are known."""
        return None if self.rates is None else forecast_sweep(self, self.rates)

    def compared_seconds(self) -> float:
        """Return the time by which plans are compared, at typical rates if none are known.

        It is that of the sweeps for all products, over how much of a solve they do: see :func:`iterations_saved`.
        """
        sweeps = -(-self.products // self.products_a_sweep)
        seconds = sweeps * forecast_sweep(self, self.rates or TYPICAL).seconds(self.overlap)
        return seconds / iterations_saved(self.products)

    def predicted_seconds(self) -> float | None:
        """Return the time of a sweep in the middle of many, if rates are known."""
        forecast = self.forecast()
        return None if forecast is None else forecast.seconds(self.overlap)

    def explain(self) -> str:
        """Return the plan in words, one line a fact."""
        index, count = self.index, len(self.index.subdivisions)
        lines = [
            f"matrix      {index.shape[0]:,} x {index.shape[1]:,}, {index.nnz:,} stored scalars, {index.format_name}, "
            f"{format_nbytes(index.nbytes)}",
            f"budget      {format_nbytes(self.budget_nbytes)} for matrix storage, {format_nbytes(self.storage_nbytes)} used; "
            f"the matrix is {index.nbytes / self.budget_nbytes:.2f} times the budget",
            f"cut         {count} subdivisions of up to {format_nbytes(max(s.nbytes for s in index.subdivisions))}",
        ]
        if self.slots:
            if self.resident_structure:
                lines.append(f"structure   {format_nbytes(self.structure_nbytes)} resident: only values move")
            lines += [
                f"ring        {self.slots} slots of {format_nbytes(self.slot_nbytes)}",
                f"resident    {len(self.resident)} subdivisions, {format_nbytes(self.resident_nbytes)}",
                f"streamed    {count - len(self.resident)} subdivisions, {format_nbytes(self.streamed_nbytes)} a sweep, "
                f"overlap {'on' if self.overlap else 'off'}",
            ]
            if self.products > 1:
                others = "their neighbours" if self.reach == 1 else f"at most {self.reach} others to either side"
                lines.append(
                    f"products    {self.products_a_sweep} of {self.products} that follow each other in one sweep, if "
                    f"subdivisions couple with {others} only"
                )
            if self.at_end == "turn":
                saved = format_nbytes(self.streamed_nbytes - self.sweep_nbytes(1))
                lines.append(
                    f"direction   every other sweep runs backwards: {saved} are still in the slots at each turn"
                )
        else:
            lines.append("resident    everything: nothing is streamed, and no larger budget would help")
        lines.append(f"vectors     {format_nbytes(self.workspace_nbytes)} beside the budget")
        if (forecast := self.forecast()) is not None:
            expected = forecast.seconds(self.overlap)
            gain = (
                f"; overlap makes it {forecast.sequential / forecast.overlapped:.2f} times as fast"
                if self.slots
                else ""
            )
            lines.append(
                f"a sweep     about {expected * 1e3:.3g} ms: link {forecast.transfer * 1e3:.3g} ms, kernels "
                f"{forecast.compute * 1e3:.3g} ms; {forecast.binding} binds{gain}"
            )
            if self.slots and self.products_a_sweep > 1:
                lines.append(self._compared_in_words())
        return "\n".join(lines)

    def _compared_in_words(self) -> str:
        alone = replace(self, products=1)
        assert self.rates is not None, "asked for with rates only"
        # An iteration of conjugate gradients with Jacobi in memory.
        iteration = self.index.nbytes + 14 * self.columns * 8 * self.index.shape[0]
        memory, mine = iteration / (EFFICIENCY * self.rates.memory), self.compared_seconds()
        return (
            f"a solve     about {alone.compared_seconds() / mine:.2g} times as fast as with one product in such a sweep, and "
            f"{mine / memory:.2g} times as long as in memory"
        )


def iterations_saved(products: int) -> float:
    """Return how many times fewer iterations a polynomial of so many products is expected to take than one product.

    The polynomial of degree m is worth a little less than m products, the less the fewer iterations are left. Fitted to a
    cantilever of 128^3 nodes, 3 degrees of freedom and lognormal stiffness, where 17, 25 and 33 products took 12.6, 16.0 and
    18.3 times fewer.
    """
    return products * (1 + 1 / _HALVED) / (1 + products / _HALVED)
