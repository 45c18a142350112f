"""Deciding, before any byte moves: how many subdivisions and slots, and what stays resident."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.spmv import BudgetError, InputError, format_nbytes, parse_nbytes
from penstock.streaming.layout import MatrixIndex
from penstock.streaming.schedule import Schedule

__all__ = ["LinkRates", "StreamPlan", "plan_stream", "plan_subdivisions"]

_CANDIDATES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# What starting one transfer costs, in bytes the link could have moved meanwhile: 11 us at 55 GB/s is 0.6 MB (PCIe 5,
# from the measured rates of 1 MiB and 256 MiB pieces), and unbuffered disk reads behave alike.
_PIECE_OVERHEAD_NBYTES = 600_000


@dataclass(frozen=True)
class LinkRates:
    """Measured rates, in bytes a second, from which a plan tells the time of a sweep."""

    link: float
    memory: float


@dataclass(frozen=True)
class StreamPlan:
    """How a matrix goes through a memory budget.

    Parameters
    ----------
    index : MatrixIndex
    budget_nbytes : int
        Allowed for slots and the resident part.
    slots, slot_nbytes : int
        The ring; no slots if everything is resident.
    resident : frozenset of int
        Subdivisions that stay, spread evenly among the streamed ones so that the link never idles for long.
    columns : int
        Vectors a product is applied to.
    workspace_nbytes : int
        Vectors of the solver, outside the budget.
    overlap : bool
        Whether transfers run during computations.
    rates : LinkRates or None
        For predicted times.
    """

    index: MatrixIndex
    budget_nbytes: int
    slots: int
    slot_nbytes: int
    resident: frozenset[int]
    columns: int = 1
    workspace_nbytes: int = 0
    overlap: bool = True
    rates: LinkRates | None = None

    @property
    def schedule(self) -> Schedule:
        """The order of transfers and computations."""
        return Schedule(len(self.index.subdivisions), self.resident, self.slots, self.overlap)

    @property
    def resident_nbytes(self) -> int:
        """Bytes of the resident part."""
        return sum(self.index.subdivisions[number].nbytes for number in self.resident)

    @property
    def streamed_nbytes(self) -> int:
        """Bytes over the link in one sweep."""
        return self.index.nbytes - self.resident_nbytes

    @property
    def storage_nbytes(self) -> int:
        """Bytes of the budget in use: slots and resident part."""
        return self.slots * self.slot_nbytes + self.resident_nbytes

    def predicted_seconds(self) -> tuple[float, float] | None:
        """Return the time of a sweep that the link allows and the one that the memory allows, if rates are known."""
        if self.rates is None:
            return None
        vectors = self.columns * sum(self.index.shape) * 8
        return self.streamed_nbytes / self.rates.link, (self.index.nbytes + vectors) / self.rates.memory

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
            lines += [
                f"ring        {self.slots} slots of {format_nbytes(self.slot_nbytes)}",
                f"resident    {len(self.resident)} subdivisions, {format_nbytes(self.resident_nbytes)}",
                f"streamed    {count - len(self.resident)} subdivisions, {format_nbytes(self.streamed_nbytes)} a sweep, "
                f"overlap {'on' if self.overlap else 'off'}",
            ]
        else:
            lines.append("resident    everything: nothing is streamed, and no larger budget would help")
        lines.append(f"vectors     {format_nbytes(self.workspace_nbytes)} beside the budget")
        if (seconds := self.predicted_seconds()) is not None:
            link, memory = seconds
            expected = max(link, memory) if self.overlap else link + memory
            binding = "the link" if link > memory else "memory"
            lines.append(
                f"a sweep     about {expected * 1e3:.3g} ms: link {link * 1e3:.3g} ms, kernels at least {memory * 1e3:.3g} ms; "
                f"{binding} binds"
            )
        return "\n".join(lines)


def plan_stream(
    index: MatrixIndex,
    budget: int | str,
    *,
    columns: int = 1,
    workspace_nbytes: int = 0,
    slots: int | None = None,
    overlap: bool = True,
    rates: LinkRates | None = None,
) -> StreamPlan:
    """Plan a matrix whose subdivisions are given.

    Parameters
    ----------
    index : MatrixIndex
        Of a store, or of outlines of a matrix that does not exist yet.
    budget : int or str
        Memory for slots and the resident part, such as ``"6 GiB"``.
    columns : int
        Vectors a product is applied to.
    workspace_nbytes : int
        Vectors of the solver, printed beside the budget.
    slots : int, optional
        Length of the ring, at least 2; by default 3 if they take at most half the budget, else 2.
    overlap : bool
        False plans for comparison runs without communication hiding; the memory is the same.
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
    budget_nbytes = parse_nbytes(budget)
    sizes = [subdivision.nbytes for subdivision in index.subdivisions]
    common = {"columns": columns, "workspace_nbytes": workspace_nbytes, "overlap": overlap, "rates": rates}
    if sum(sizes) <= budget_nbytes:
        return StreamPlan(index, budget_nbytes, 0, 0, frozenset(range(len(sizes))), **common)  # type: ignore[arg-type]
    slot_nbytes = max(sizes)
    if slots is not None and slots < 2:
        raise InputError(f"double buffering takes at least 2 slots, not {slots}")
    ring = slots if slots is not None else (3 if 6 * slot_nbytes <= budget_nbytes else 2)
    if ring * slot_nbytes > budget_nbytes:
        smallest = min(ring * slot_nbytes, sum(sizes))
        raise BudgetError(
            f"a budget of {format_nbytes(budget_nbytes)} holds neither the matrix nor {ring} slots of "
            f"{format_nbytes(slot_nbytes)}; the smallest that does is {smallest} bytes ({format_nbytes(smallest)}); raise "
            "the budget or cut the matrix into smaller subdivisions"
        )
    resident = _spread_evenly(sizes, budget_nbytes - ring * slot_nbytes)
    return StreamPlan(index, budget_nbytes, ring, slot_nbytes, resident, **common)  # type: ignore[arg-type]


def _spread_evenly(sizes: list[int], nbytes: int) -> frozenset[int]:
    """Choose as many pieces as fit, spread evenly over the sweep."""
    count = len(sizes)
    for wanted in range(min(count, nbytes // min(sizes)), 0, -1):
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
    workspace_nbytes: int = 0,
    slots: int | None = None,
    overlap: bool = True,
    rates: LinkRates | None = None,
) -> StreamPlan:
    """Plan a matrix that can still be cut at will: choose the number of subdivisions that makes a sweep shortest.

    Parameters
    ----------
    index_for : callable
        Returns the index of the matrix cut into a given number of subdivisions.
    budget, columns, workspace_nbytes, slots, overlap, rates
        As in :func:`plan_stream`.
    limit : int
        Largest number of subdivisions possible.

    Returns
    -------
    StreamPlan

    Notes
    -----
    Fewer subdivisions cost fewer starts of a transfer; more make the slots smaller and leave more room for the resident
    part. The smallest sum of bytes streamed and starts, each counted as 0.6 MB, wins.

    Raises
    ------
    BudgetError
        If no cut fits; the message gives the smallest budget for the finest cut tried.
    """
    best: StreamPlan | None = None
    refused: BudgetError | InputError | None = None
    for count in sorted({min(candidate, limit) for candidate in _CANDIDATES}):
        try:
            plan = plan_stream(
                index_for(count),
                budget,
                columns=columns,
                workspace_nbytes=workspace_nbytes,
                slots=slots,
                overlap=overlap,
                rates=rates,
            )
        except (BudgetError, InputError) as error:  # slots too large, or too many entries for one slab
            refused = error
            continue
        if best is None or _cost(plan) < _cost(best):
            best = plan
        if not plan.slots:
            break
    if best is None:
        assert refused is not None
        raise refused
    return best


def _cost(plan: StreamPlan) -> int:
    return plan.streamed_nbytes + _PIECE_OVERHEAD_NBYTES * (len(plan.index.subdivisions) - len(plan.resident))
