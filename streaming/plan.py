"""Deciding, before any byte moves: how many subdivisions and slots, what stays resident, and what a sweep will take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.spmv import BudgetError, InputError, format_named, format_nbytes, parse_nbytes
from penstock.streaming.cuda_executor import LANES
from penstock.streaming.layout import MatrixIndex, Part
from penstock.streaming.product_graphs import LEAST_RECORDED
from penstock.streaming.schedule import Schedule, SweepEnd
from penstock.streaming.timeline import foretell

__all__ = [
    "Forecast",
    "LinkRates",
    "StreamPlan",
    "iterations_saved",
    "plan_products",
    "plan_stream",
    "plan_subdivisions",
]

#: Numbers of subdivisions that plans try.
CUTS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_RINGS = (3, 4, 2)  # the first of equals is taken; the last needs least, and says what would do
_MOST_SWEEPS = 8  # for products that follow each other: longer rings are tried for up to so many


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


# Numbers of products that are tried, and taken where they share no sweep; at how many one is worth half of its own.
_PRODUCTS, _PRODUCTS_IN_MEMORY, _HALVED = (5, 9, 13, 17, 21, 25, 33), 9, 40
# Of the read bandwidth, what products of the formats here reach (0.80 to 0.98 on an H200).
_EFFICIENCY = 0.85
# Where nothing was measured, plans are compared on a GPU of 2025; predictions are made from measured rates only.
_TYPICAL = LinkRates(55e9, 4.4e12, side_by_side=LANES)


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
        return None if self.rates is None else self._forecast(self.rates)

    def _forecast(self, rates: LinkRates) -> Forecast:
        def transfer(number: int) -> float:
            return self.nbytes_of(number) / rates.link + rates.transfer_start

        stages, scatters = self.products_a_sweep, format_named(self.index.format_name).scatters
        rate = rates.memory * (rates.scattering if scatters else _EFFICIENCY)

        def product(number: int) -> float:
            subdivision = self.index.subdivisions[number]
            # Its entries of the result are written, and about as many of the vector read; a step of a recurrence is a pass
            # of its own, which reads five vectors and writes one.
            values, gaps = (2, 1.0) if stages == 1 else (8, 2.0 / rates.side_by_side)
            vectors = 8 * values * self.columns * (subdivision.row_stop - subdivision.row_start)
            seconds = subdivision.nbytes / rate + vectors / (_EFFICIENCY * rates.memory) + gaps * rates.product_gap
            # Many products are started by one call.
            return seconds if stages > 1 or self.repeats >= LEAST_RECORDED else max(seconds, rates.product_start)

        def compute(number: int) -> float:
            return self.repeats * stages * product(number)

        def sweep(overlap: bool) -> float:
            """Return the mean of sweeps 1 and 2, one in each direction if they turn."""
            schedule = replace(self.schedule, overlap=overlap)
            if schedule.at_end == "stop":
                return foretell(schedule.sweep(0), transfer, compute, overlap=overlap).spans[-1].stop
            steps = schedule.prologue() + schedule.sweep(0)
            before = foretell(steps, transfer, compute, overlap=overlap).last("compute")
            steps += schedule.sweep(1) + schedule.sweep(2)
            return (foretell(steps, transfer, compute, overlap=overlap).last("compute") - before) / 2

        later = [schedule for schedule in (1, 2) if self.at_end != "stop"] or [0]
        transfers = [sum(map(transfer, self.schedule.transfers(number))) for number in later]
        numbers = range(len(self.index.subdivisions))
        transferred, computes = sum(transfers) / len(transfers), sum(map(compute, numbers))
        # Nothing arrives until the first subdivision has had all its products, nor after the last one has come.
        waiting = stages * (stages - 1) * max(map(product, numbers)) if self.at_end == "turn" else 0.0
        return Forecast(transferred, computes, max(sweep(True), transferred + waiting), sweep(False))

    def compared_seconds(self) -> float:
        """Return the time by which plans are compared, at typical rates if none are known.

        It is that of the sweeps for all products, over how much of a solve they do: see :func:`iterations_saved`.
        """
        sweeps = -(-self.products // self.products_a_sweep)
        seconds = sweeps * self._forecast(self.rates or _TYPICAL).seconds(self.overlap)
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
        memory, mine = iteration / (_EFFICIENCY * self.rates.memory), self.compared_seconds()
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


def plan_products(plan_for: Callable[[int], StreamPlan], candidates: tuple[int, ...] = _PRODUCTS) -> StreamPlan:
    """Return the plan for the number of products with which a solve is expected to take the least time.

    Parameters
    ----------
    plan_for : callable
        Returns the plan for so many products that follow each other.
    candidates : tuple of int
    """
    plans: list[StreamPlan] = []
    for products in candidates:
        plans.append(plan_for(products))
        if not plans[-1].slots:  # in memory, products cost the same however many follow each other
            return plan_for(_PRODUCTS_IN_MEMORY)
    return min(plans, key=StreamPlan.compared_seconds)


def plan_stream(
    index: MatrixIndex,
    budget: int | str | None,
    *,
    columns: int = 1,
    repeats: int = 1,
    products: int = 1,
    reach: int = 1,
    workspace_nbytes: int = 0,
    slots: int | None = None,
    overlap: bool = True,
    at_end: SweepEnd = "turn",
    resident_structure: bool = False,
    rates: LinkRates | None = None,
) -> StreamPlan:
    """Plan a matrix whose subdivisions are given.

    Parameters
    ----------
    index : MatrixIndex
        Of a store, or of outlines of a matrix that does not exist yet.
    budget : int or str or None
        Memory for slots and the resident part, such as ``"6 GiB"``. None: a ring and nothing resident, even if the matrix
        is small, as comparisons need it.
    columns, repeats : int
        Vectors a product is applied to at once, and products with each subdivision, for predicted times.
    products : int
        Products that follow each other, such as those of a :func:`~penstock.solvers.chebyshev` preconditioner: if
        subdivisions couple with their neighbours, a sweep makes one less of them than the ring has slots, without overlap
        as many.
    reach : int
        How many subdivisions to either side the entries of one reach; see :class:`Couplings`.
    workspace_nbytes : int
        Vectors of the solver, printed beside the budget.
    slots : int, optional
        Length of the ring, at least 2; by default 3 if they take at most half the budget, else 2, and for products that
        follow each other as many as one sweep needs for all of them, or as the budget holds; 3 without a budget.
    overlap : bool
        False plans for comparison runs without communication hiding; the memory is the same.
    at_end : {"turn", "continue", "stop"}
        What happens at the end of a sweep; see :class:`Schedule`.
    resident_structure : bool
        Keep offsets and column indices of all subdivisions and stream values only.
    rates : LinkRates, optional
        For predicted times.

    Returns
    -------
    StreamPlan

    Raises
    ------
    BudgetError
        If the budget holds neither the matrix nor two slots; the message gives the smallest that would do.
    """
    budget_nbytes = 0 if budget is None else parse_nbytes(budget)
    if columns < 1 or repeats < 1 or products < 1 or reach < 1:
        raise InputError(
            f"a product takes at least 1 vector and reaches 1 subdivision, and a sweep makes 1 product, not {columns}, "
            f"{reach} and {min(repeats, products)}"
        )
    plan = StreamPlan(
        index, budget_nbytes, 0, 0, frozenset(), columns, repeats, workspace_nbytes, overlap, at_end,
        rates=rates, products=products, reach=reach,
    )  # fmt: skip
    if budget is not None and index.nbytes <= budget_nbytes:
        return replace(plan, resident=frozenset(range(len(index.subdivisions))))
    plan = replace(plan, resident_structure=resident_structure)
    sizes = [plan.nbytes_of(number) for number in range(len(index.subdivisions))]
    slot_nbytes, left = max(sizes), budget_nbytes - plan.structure_nbytes
    if slots is not None and slots < 2:
        raise InputError(f"double buffering takes at least 2 slots, not {slots}")
    ring = slots if slots is not None else (3 if 6 * slot_nbytes <= left else 2)
    if slots is None and products > 1:
        ring = max(ring, min((products - 1) * reach + 2, left // slot_nbytes, len(sizes)))
    if budget is None:
        plan = replace(plan, slots=slots or 3, slot_nbytes=slot_nbytes)
        return replace(plan, budget_nbytes=plan.storage_nbytes)
    if ring * slot_nbytes > left:
        smallest = min(ring * slot_nbytes + plan.structure_nbytes, index.nbytes)
        beside = f" beside {format_nbytes(plan.structure_nbytes)} of structure" if resident_structure else ""
        raise BudgetError(
            f"a budget of {format_nbytes(budget_nbytes)} holds neither the matrix nor {ring} slots of "
            f"{format_nbytes(slot_nbytes)}{beside}; the smallest that does is {smallest} bytes ({format_nbytes(smallest)}); "
            "raise the budget or cut the matrix into smaller subdivisions"
        )
    resident = _spread_evenly(sizes, left - ring * slot_nbytes)
    return replace(plan, slots=ring, slot_nbytes=slot_nbytes, resident=resident)


def _spread_evenly(sizes: list[int], nbytes: int) -> frozenset[int]:
    """Choose as many pieces as fit, spread evenly over the sweep."""
    count = len(sizes)
    for wanted in range(min(count, nbytes // max(min(sizes), 1)), 0, -1):
        chosen = frozenset((2 * position + 1) * count // (2 * wanted) for position in range(wanted))
        if sum(sizes[number] for number in chosen) <= nbytes:
            return chosen
    return frozenset()


def plan_subdivisions(
    index_for: Callable[[int], MatrixIndex],
    budget: int | str,
    *,
    limit: int,
    columns: int = 1,
    repeats: int = 1,
    products: int = 1,
    reach_for: Callable[[MatrixIndex], int] | None = None,
    workspace_nbytes: int = 0,
    slots: int | None = None,
    overlap: bool = True,
    at_end: SweepEnd = "turn",
    resident_structure: bool = False,
    rates: LinkRates | None = None,
    counts: tuple[int, ...] = CUTS,
) -> StreamPlan:
    """Plan a matrix that can still be cut at will: choose the cut, the ring and the resident part by the time of all products.

    Parameters
    ----------
    index_for : callable
        Returns the index of the matrix cut into a given number of subdivisions.
    budget, columns, repeats, products, workspace_nbytes, slots, overlap, at_end, resident_structure
        As in :func:`plan_stream`.
    reach_for : callable, optional
        Returns the reach of such a cut; by default 1.
    limit : int
        Largest number of subdivisions possible.
    rates : LinkRates, optional
        Without them, plans are compared at the rates of a PCIe 5 link and an H200's memory.
    counts : tuple of int
        Numbers of subdivisions to try; larger ones than the limit stand for the limit.

    Returns
    -------
    StreamPlan

    Notes
    -----
    Fewer subdivisions cost fewer starts; more make the slots smaller, leave more room for the resident part, and leave less
    of the first transfer and the last computation uncovered. Every candidate's schedule is played in time
    (:func:`foretell`), and the one wins whose sweeps for all products take the least time.

    Raises
    ------
    BudgetError
        If no cut fits; the message gives the smallest budget for the finest cut tried.
    """
    plans: list[StreamPlan] = []
    refused: BudgetError | InputError | None = None
    for count in sorted({min(candidate, limit) for candidate in counts}):
        try:
            index = index_for(count)
        except InputError as error:  # too many entries for one slab
            refused = error
            continue
        reach = 1 if products == 1 or reach_for is None else reach_for(index)
        rings = [*_RINGS]
        if products > 1:
            long = {(-(-products // sweeps) - 1) * reach + 2 for sweeps in range(1, _MOST_SWEEPS + 1)}
            rings = [*sorted(long), *_RINGS]
        for ring in rings if slots is None else (slots,):
            try:
                plan = plan_stream(
                    index,
                    budget,
                    columns=columns,
                    repeats=repeats,
                    products=products,
                    reach=reach,
                    workspace_nbytes=workspace_nbytes,
                    slots=ring,
                    overlap=overlap,
                    at_end=at_end,
                    resident_structure=resident_structure,
                    rates=rates,
                )
            except BudgetError as error:
                refused = error
                continue
            if not plan.slots:
                return plan
            plans.append(plan)
    if not plans:
        assert refused is not None
        raise refused
    return min(plans, key=StreamPlan.compared_seconds)
