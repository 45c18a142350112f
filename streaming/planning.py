"""Choosing a plan: how many subdivisions, slots and products that share a sweep, and what stays resident."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.spmv import BudgetError, InputError, format_nbytes, parse_nbytes
from penstock.streaming.forecast import LinkRates
from penstock.streaming.layout import MatrixIndex
from penstock.streaming.plan import StreamPlan
from penstock.streaming.schedule import SweepEnd, check_sweep_end

__all__ = ["CUTS", "plan_products", "plan_stream", "plan_subdivisions"]

#: Numbers of subdivisions that plans try.
CUTS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_RINGS = (3, 4, 2)  # the first of equals is taken; the last needs least, and says what would do
_MOST_SWEEPS = 8  # for products that follow each other: longer rings are tried for up to so many
# Numbers of products that are tried, and taken where they share no sweep.
_PRODUCTS, _PRODUCTS_IN_MEMORY = (5, 9, 13, 17, 21, 25, 33), 9


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
    if any(number % 1 for number in (columns, repeats, products, reach, slots or 2)):
        raise InputError("vectors, products, slots and subdivisions are counted in whole numbers")
    check_sweep_end(at_end)
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
