"""Plans how a matrix is streamed through a memory budget."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.spmv import BudgetError, InputError, format_nbytes, parse_nbytes
from penstock.spmv.explanations import as_table
from penstock.streaming.planning.estimate import (
    EFFICIENCY,
    TYPICAL,
    LinkRates,
    SweepEstimate,
    estimate_sweep,
    sweep_bound,
)
from penstock.streaming.planning.schedule import Schedule
from penstock.streaming.planning.workload import Ring, Workload
from penstock.streaming.stores.matrix_index import MatrixIndex, Part

# Starts of a kernel for each product with a subdivision before sweeps are replayed: those of the set-up, of a sweep in each
# direction, and of their captures. On H200s set-ups and first solves took 8 to 14 longer than the same later.
_STARTS = 12
# What an iteration with a coarse level takes beside the sweeps: bytes for each row and vector, and on a GPU starts of kernels. On
# an H100, 1.6, 6.3 and 50 million rows took 3.4, 5.2 and 11 ms.
_ITERATION_BYTES, _ITERATION_STARTS = 500, 150
_HALVED = 40  # at this degree a product saves half as many iterations


@dataclass(frozen=True, repr=False)
class StreamPlan:
    """How a matrix is streamed through a memory budget.

    Parameters
    ----------
    index : MatrixIndex
    budget_nbytes : int
        Limit for slots, the resident part and a resident structure.
    workload : Workload
    ring : Ring
        As requested.
    slots, slot_nbytes : int
        The planned ring; no slots if everything is resident.
    resident : frozenset of int
        Subdivisions that stay in memory, spread evenly among the streamed ones so that the link never idles for long.
    reach : int or None
        Number of subdivisions to either side that the entries of one couple with; None: not known, and taken to be 1 here.
    rates : LinkRates or None
        For predicted times.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.spmv import format_nbytes
    >>> from penstock.streaming import index_of, plan_stream
    >>> plan = plan_stream(index_of(Cantilever(nodes=64, dof=3).symbolic_slabs(16)), "128 MiB")
    >>> plan.slots, sorted(plan.resident), format_nbytes(plan.streamed_nbytes)
    (2, [4, 12], '435.3 MiB')
    """

    index: MatrixIndex
    budget_nbytes: int
    workload: Workload
    ring: Ring
    slots: int = 0
    slot_nbytes: int = 0
    resident: frozenset[int] = frozenset()
    reach: int | None = None
    rates: LinkRates | None = None

    def __repr__(self) -> str:
        powers = self.powers_per_sweep
        way = (
            f"through {self.slots} slots, {powers} product{'s' * (powers > 1)} a sweep"
            if self.slots
            else "all in memory"
        )
        return f"<StreamPlan {self.index}, {way}, {format_nbytes(self.storage_nbytes)}>"

    def _repr_html_(self) -> str:
        return as_table(self.explain())

    @property
    def powers_per_sweep(self) -> int:
        """Number of consecutive powers of the matrix that one sweep computes if subdivisions couple within ``reach``."""
        return max(1, min(self.workload.degree, self.room_for_powers)) if self.slots else 1

    @property
    def room_for_powers(self) -> int:
        """Number of consecutive powers the ring has room for; with overlap, one slot receives the next subdivision."""
        return (self.slots - (2 if self.ring.overlap else 1)) // self.planned_reach + 1

    @property
    def planned_reach(self) -> int:
        """The reach, or 1 where it is not known."""
        return self.reach or 1

    @cached_property
    def schedule(self) -> Schedule:
        """The order of transfers and computations."""
        return Schedule(len(self.index.subdivisions), self.resident, self.slots, self.ring.overlap, self.ring.sweeps)

    @property
    def part(self) -> Part:
        """The part of a subdivision that is streamed."""
        return "values" if self.resident_structure or self.shared_structure else "whole"

    @property
    def resident_structure(self) -> bool:
        """Whether a copy of offsets and column indices stays resident and only values are streamed."""
        return self.ring.resident_structure and self.slots > 0

    @property
    def shared_structure(self) -> bool:
        """Whether another matrix on the device has offsets and column indices, and only values are held or streamed."""
        return self.ring.shared_structure

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the budget that the matrix takes if nothing is streamed."""
        return self.index.part_nbytes("values" if self.shared_structure else "whole")

    def nbytes_of(self, number: int) -> int:
        """Return the bytes of a subdivision that are streamed."""
        return self.streamed_sizes[number]

    @cached_property
    def streamed_sizes(self) -> Sequence[int]:
        """The bytes of every subdivision that are streamed, unless it is resident."""
        return self.index.sizes[self.part]

    @property
    def workspace_nbytes(self) -> int:
        """Bytes of the vectors of a solver, beside the budget."""
        return self.workload.workspace_nbytes

    @property
    def resident_nbytes(self) -> int:
        """Bytes of the resident subdivisions."""
        return sum(self.nbytes_of(number) for number in self.resident)

    @property
    def structure_nbytes(self) -> int:
        """Bytes of a resident structure: the offsets and column indices of all subdivisions."""
        return self.index.part_nbytes("structure") if self.resident_structure else 0

    @property
    def streamed_nbytes(self) -> int:
        """Bytes over the link in the first sweep; later alternating sweeps reuse what is still in the slots."""
        return self.sweep_nbytes(0)

    def sweep_nbytes(self, number: int) -> int:
        """Return the bytes over the link in sweep ``number``."""
        return round(self.made_or_moved_nbytes(number) * (self.ring.moved_share if self.ring.on_arrival else 1.0))

    def made_or_moved_nbytes(self, number: int) -> int:
        """Return the bytes that sweep ``number`` brings into the slots, over the link or by making them there."""
        return sum(self.nbytes_of(subdivision) for subdivision in self.schedule.transfers(number))

    @property
    def storage_nbytes(self) -> int:
        """Bytes of the budget that are used: slots, resident part and resident structure."""
        return self.slots * self.slot_nbytes + self.resident_nbytes + self.structure_nbytes

    @cached_property
    def _estimate_at_typical_rates(self) -> SweepEstimate:
        return estimate_sweep(self, self._rates_or_typical)

    @property
    def _rates_or_typical(self) -> LinkRates:
        return self.rates or (TYPICAL.on_arrival(self.ring.moved_share) if self.ring.on_arrival else TYPICAL)

    def estimate(self) -> SweepEstimate | None:
        """Return the predicted times of a sweep in steady state, if rates are known."""
        return None if self.rates is None else self._estimate_at_typical_rates

    def estimated_solve_seconds(self) -> float:
        """Return the estimate by which plans are compared, at typical rates if none are known.

        It is the time of all sweeps of the expected iterations, plus what the host does before sweeps are replayed. Without
        expected iterations it is the time of the sweeps for all powers, divided by the factor of
        ``penstock.streaming.planning.plan.iterations_saved``.
        """
        return self._solve_seconds(self._estimate_at_typical_rates.seconds(self.ring.overlap))

    def least_solve_seconds(self) -> float:
        """Return a lower bound of :meth:`estimated_solve_seconds` that needs no simulation."""
        return self._solve_seconds(self._bound_at_typical_rates[0])

    def link_seconds(self) -> float:
        """Return the seconds of the transfers of a solve alone, in the unit of :meth:`estimated_solve_seconds`."""
        return self._sweeps_of_solve * self._bound_at_typical_rates[1]

    @cached_property
    def _bound_at_typical_rates(self) -> tuple[float, float]:
        return sweep_bound(self, self._rates_or_typical)

    @property
    def _sweeps_of_solve(self) -> float:
        """Expected sweeps, or their share of those without a polynomial."""
        sweeps, expected = -(-self.workload.degree // self.powers_per_sweep), self.workload.iterations
        return sweeps / iterations_saved(self.workload.degree) if expected is None else sweeps * expected

    def _solve_seconds(self, sweep_seconds: float) -> float:
        iterations, rows = self.workload.iterations, self.index.shape[0]
        if iterations is None:
            return self._sweeps_of_solve * sweep_seconds
        rates = self._rates_or_typical
        beside = _ITERATION_BYTES * rows * self.workload.columns / rates.memory
        if rates.side_by_side > 1:  # a GPU
            beside += _ITERATION_STARTS * rates.product_start
        return self._sweeps_of_solve * sweep_seconds + iterations * beside + self._starting_seconds

    @property
    def _starting_seconds(self) -> float:
        """Seconds in which the host starts kernels one by one, until a GPU replays sweeps; measured rates tell a GPU."""
        rates = self.rates
        if rates is None or rates.side_by_side <= 1 or self.powers_per_sweep == 1:
            return 0.0
        workload = self.workload
        return _STARTS * rates.product_start * len(self.index.subdivisions) * workload.degree / workload.solves

    def predicted_seconds(self) -> float | None:
        """Return the predicted time of a sweep in steady state, if rates are known."""
        estimate = self.estimate()
        return None if estimate is None else estimate.seconds(self.ring.overlap)

    def explain(self) -> str:
        """Return a description of the plan, one fact per line."""
        index, count = self.index, len(self.index.subdivisions)
        lines = [
            f"matrix      {index.shape[0]:,} x {index.shape[1]:,}, {index.nnz:,} stored scalars, {index.format_name}, "
            f"{format_nbytes(index.nbytes)}",
            f"budget      {format_nbytes(self.budget_nbytes)} for matrix storage, {format_nbytes(self.storage_nbytes)} used; "
            f"the matrix is {index.nbytes / self.budget_nbytes:.2f} times the budget",
            f"cut         {count} subdivisions of up to {format_nbytes(max(s.nbytes for s in index.subdivisions))}",
            *(
                self._explained_ring()
                if self.slots
                else ["resident    everything: nothing is streamed, and a larger budget would not help"]
            ),
            f"vectors     {format_nbytes(self.workload.workspace_nbytes)} beside the budget{self._explained_parts()}",
        ]
        if (estimate := self.estimate()) is not None:
            expected, gain = estimate.seconds(self.ring.overlap), ""
            if self.slots and not self.ring.on_arrival:
                gain = f"; overlap makes it {estimate.sequential / estimate.overlapped:.2f} times as fast"
            lines.append(
                f"a sweep     about {expected * 1e3:.3g} ms: {self._source} {estimate.transfer * 1e3:.3g} ms, kernels "
                f"{estimate.compute * 1e3:.3g} ms; {self._binding(estimate)} binds{gain}"
            )
            if self.slots and self.workload.iterations is not None:
                seconds = self.estimated_solve_seconds()
                lines.append(f"a solve     about {self.workload.iterations:.0f} iterations, {seconds:.3g} s")
            elif self.slots and self.powers_per_sweep > 1:
                lines.append(self._explained_comparison(self._rates_or_typical))
        return "\n".join(lines)

    @property
    def _source(self) -> str:
        if self.ring.moves_nothing:
            return "assembly"
        return "link and assembly" if self.ring.on_arrival else "link"

    def _binding(self, estimate: SweepEstimate) -> str:
        return self._source if self.ring.on_arrival and estimate.binding == "the link" else estimate.binding

    def _explained_parts(self) -> str:
        parts = ", ".join(f"{format_nbytes(nbytes)} for {name}" for name, nbytes in self.workload.parts)
        return f", with {parts}" if parts else ""

    def _explained_making(self) -> str:
        if not self.ring.on_arrival:
            return ""
        if self.ring.moves_nothing:
            return ", in their slots"
        return f", in their slots; {format_nbytes(self.sweep_nbytes(0))} that they are made from move over the link"

    def _explained_ring(self) -> list[str]:
        lines = []
        if self.resident_structure:
            lines.append(f"structure   {format_nbytes(self.structure_nbytes)} resident: only values move")
        if self.shared_structure:
            lines.append("structure   that of the image: only values move")
        lines += [
            f"ring        {self.slots} slots of {format_nbytes(self.slot_nbytes)}",
            f"resident    {len(self.resident)} subdivisions, {format_nbytes(self.resident_nbytes)}",
            f"{'made' if self.ring.on_arrival else 'streamed':<11} {len(self.index.subdivisions) - len(self.resident)} "
            f"subdivisions, {format_nbytes(self.made_or_moved_nbytes(0))} a sweep"
            f"{self._explained_making()}, overlap {'on' if self.ring.overlap else 'off'}",
        ]
        if self.workload.degree > 1:
            far = self.planned_reach
            reach = "their neighbours" if far == 1 else f"the next {far} on either side"
            lines.append(
                f"powers      {self.powers_per_sweep} of {self.workload.degree} consecutive powers of A in one sweep, if "
                f"subdivisions couple only with {reach}"
            )
        if self.ring.sweeps == "alternate":
            saved = format_nbytes(self.made_or_moved_nbytes(0) - self.made_or_moved_nbytes(1))
            lines.append(f"direction   every other sweep runs backwards and reuses {saved} that are still in the slots")
        return lines

    def _explained_comparison(self, rates: LinkRates) -> str:
        alone = replace(self, workload=replace(self.workload, degree=1))
        # Bytes of an iteration of CG with a Jacobi preconditioner and a resident matrix.
        iteration = self.index.nbytes + 14 * self.workload.columns * 8 * self.index.shape[0]
        memory, mine = iteration / (EFFICIENCY * rates.memory), self.estimated_solve_seconds()
        return (
            f"a solve     about {alone.estimated_solve_seconds() / mine:.2g} times as fast as with one power per sweep, and "
            f"{mine / memory:.2g} times as long as in memory"
        )


def iterations_saved(degree: int) -> float:
    """Return the factor by which a polynomial of this degree is expected to reduce the iterations of block Jacobi.

    The factor is a little less than the degree, the more so the fewer iterations remain. Fitted to a cantilever of 128^3
    nodes, 3 degrees of freedom and lognormal stiffness, where degrees 17, 25 and 33 needed 12.6, 16.0 and 18.3 times fewer
    iterations.
    """
    return degree * (1 + 1 / _HALVED) / (1 + degree / _HALVED)


def plan_stream(
    index: MatrixIndex,
    budget: int | str | None,
    workload: Workload | None = None,
    ring: Ring | None = None,
    *,
    reach: int | None = None,
    rates: LinkRates | None = None,
) -> StreamPlan:
    """Plan how a matrix with this index is streamed; pure, needs no device.

    Parameters
    ----------
    index : MatrixIndex
        Of a store, or of symbolic slabs of a matrix that does not exist yet.
    budget : int or str or None
        Memory for slots and the resident part, for example ``"6 GiB"``. None: a ring and nothing resident, even if the
        matrix is small; used for comparisons.
    workload : Workload, optional
        What is computed with the matrix; by default one product at a time.
    ring : Ring, optional
        How the ring of slots is run.
    reach : int, optional
        Number of subdivisions to either side that the entries of one couple with; see :class:`ColumnExtents`. A matrix that is
        streamed by the plan relies on it. By default it is not known, and measured in a sweep before products share sweeps.
    rates : LinkRates, optional
        For predicted times.

    Returns
    -------
    StreamPlan

    Raises
    ------
    BudgetError
        If neither the matrix nor two slots fit the budget; the message states the smallest sufficient budget.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import index_of, plan_stream
    >>> index = index_of(Cantilever(nodes=64, dof=3).symbolic_slabs(16))
    >>> print(plan_stream(index, "128 MiB").explain())
    matrix      786,432 x 786,432, 61,731,000 stored scalars, bsr, 498.2 MiB
    budget      128 MiB for matrix storage, 125.9 MiB used; the matrix is 3.89 times the budget
    cut         16 subdivisions of up to 31.46 MiB
    ring        2 slots of 31.46 MiB
    resident    2 subdivisions, 62.93 MiB
    streamed    14 subdivisions, 435.3 MiB a sweep, overlap on
    direction   every other sweep runs backwards and reuses 60.31 MiB that are still in the slots
    vectors     0 B beside the budget
    """
    workload, ring = workload or Workload(), ring or Ring()
    if reach is not None and (reach < 1 or reach % 1):
        raise InputError(f"reach must be a whole number, at least 1; got reach={reach}")
    budget_nbytes = 0 if budget is None else parse_nbytes(budget)
    plan = StreamPlan(index, budget_nbytes, workload, ring, reach=reach, rates=rates)
    if budget is not None and plan.whole_nbytes <= budget_nbytes:
        return replace(plan, resident=frozenset(range(len(index.subdivisions))))
    plan = replace(plan, slots=ring.slots or 2)  # from here on only the streamed part of a subdivision counts
    sizes = index.sizes[plan.part]
    slot_nbytes, available = max(sizes), budget_nbytes - plan.structure_nbytes
    if budget is None:
        plan = replace(plan, slots=ring.slots or 3, slot_nbytes=slot_nbytes)
        return replace(plan, budget_nbytes=plan.storage_nbytes)
    slots = ring.slots or _default_slots(workload.degree, plan.planned_reach, sizes, available)
    if slots * slot_nbytes > available:
        raise _too_small(plan, slots, slot_nbytes)
    resident = _spread_evenly(sizes, available - slots * slot_nbytes)
    return replace(plan, slots=slots, slot_nbytes=slot_nbytes, resident=resident)


def _too_small(plan: StreamPlan, slots: int, slot_nbytes: int) -> BudgetError:
    """Return the error of a budget that holds neither the matrix nor the slots."""
    whole = plan.whole_nbytes
    smallest = min(slots * slot_nbytes + plan.structure_nbytes, whole)
    beside = f" beside {format_nbytes(plan.structure_nbytes)} of structure" if plan.resident_structure else ""
    holds = "the matrix" if smallest == whole else f"{slots} slots"
    return BudgetError(
        f"a budget of {format_nbytes(plan.budget_nbytes)} holds neither the matrix of {format_nbytes(whole)} nor {slots} slots "
        f"for subdivisions of up to {format_nbytes(slot_nbytes)} each{beside}; the smallest that does is {smallest} bytes "
        f"({format_nbytes(smallest)}), for {holds}; raise the budget or cut the matrix into smaller subdivisions"
    )


def _default_slots(degree: int, reach: int, sizes: list[int], available: int) -> int:
    """Return the length of the ring for this degree, limited by the memory available."""
    slots = 3 if 6 * max(sizes) <= available else 2
    if degree > 1:
        slots = max(slots, min((degree - 1) * reach + 2, available // max(sizes), len(sizes)))
    return slots


def _spread_evenly(sizes: list[int], nbytes: int) -> frozenset[int]:
    """Return the largest set of pieces that fits, spread evenly over the sweep."""
    total = len(sizes)
    most = bisect.bisect_right(list(itertools.accumulate(sorted(sizes))), nbytes)  # of the smallest pieces
    for count in range(most, 0, -1):
        pieces = frozenset((2 * position + 1) * total // (2 * count) for position in range(count))
        if sum(sizes[number] for number in pieces) <= nbytes:
            return pieces
    return frozenset()
