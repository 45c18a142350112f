"""Decides how a matrix is stored and used: format, order, cut, plan, powers per sweep, preconditioner, right-hand sides."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.driver.image_placement import (
    IMAGE_PRECISIONS,
    Smallest,
    image_is_wanted,
    place_image,
    place_image_of,
    refuse_without_image,
)
from penstock.driver.matrix_checks import DENSE, check_matrix, check_numbering, check_square
from penstock.driver.predicted import cheap_factorisation
from penstock.driver.progress import Reporter
from penstock.driver.request import Placement, Request, Resident, Vectors, room_for_matrix
from penstock.driver.row_order import BY_LINES, COUPLED, as_ordered, in_best_order, levels_may_pay, with_lines
from penstock.driver.slow_modes import constants_are_slow, has_band, is_worth_measuring
from penstock.solvers import PreconditionerSpec
from penstock.solvers.amg.modes import checked_near_null_space
from penstock.solvers.solve_many import LARGEST_RESIDENT_BLOCK
from penstock.spmv import CPU, BudgetError, CsrMatrix, InputError, SparseMatrix, format_named
from penstock.spmv.formats.limits import LARGEST_DENSE_BLOCK
from penstock.spmv.formats.partition import count_granules, row_slabs
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.model.suggestion import Suggestion, rank_formats
from penstock.spmv.vectors.block_space import LARGEST_VECTOR_BLOCK
from penstock.streaming import (
    CUTS,
    Candidate,
    ColumnExtents,
    LevelOrder,
    LinkRates,
    MatrixIndex,
    Ring,
    StreamPlan,
    Workload,
    choose,
    index_of,
    plan_stream,
)
from penstock.streaming.stores.packing import PADDING_NBYTES, rough_index

# Rows, about, by which the blocks of a matrix in a scalar format are recognised.
_LOOKED_AT = 10_000
# With more rows than this a rough cut is as good as an exact one, of whole chunks of rows.
_FINELY_CUT = 500_000
#: ``rates(nbytes)`` returns the measured rates of the machine, or None for a matrix too small to measure for.
Rates = Callable[[int], LinkRates | None]
_SLOW = ("coarse", "a coarse level: A nearly maps constants to zero, so they are its slow modes")


def solve_candidates(
    index_for: Callable[[int], MatrixIndex],
    counts: Iterable[int],
    specs: Iterable[PreconditionerSpec],
    workload: Callable[[PreconditionerSpec, int], Workload],
    reach_for: Callable[[MatrixIndex], int],
) -> Iterator[Candidate]:
    """Yield a candidate for every preconditioner, degree and number of subdivisions.

    ``index_for(count)`` returns the index of the matrix in a number of subdivisions, and is called once for each. ``reach_for``
    returns the reach of such a cut, and is called for degrees above 1 only.
    """
    cached, numbers = functools.cache(index_for), list(counts)
    reach_cached: dict[int, int] = {}
    for spec in specs:
        for degree in spec.products_per_iteration(streamed=True):
            for count in numbers:
                try:
                    index = cached(count)
                except InputError:  # too many entries for one slab
                    continue
                reach = None
                if degree > 1:
                    reach = reach_cached[count] = reach_cached.get(count) or reach_for(index)
                yield Candidate(index, workload(spec, degree), reach)


def place_index(
    index: MatrixIndex,
    request: Request,
    *,
    reach_for: Callable[[MatrixIndex], int],
    rates: Rates,
    index_for: Callable[[int], MatrixIndex] | None = None,
    dense_blocks: Callable[[], int] | None = None,
    ring: Ring | None = None,
    beside: tuple[tuple[str, int], ...] = (),
    entries: bool = False,
    symmetry: str = "not checked: the matrix is used as it is stored, and taken to be symmetric",
) -> Placement:
    """Place a matrix whose format is fixed, as that of a store or of a penstock matrix is.

    ``reach_for`` returns the reach of a cut, and is called only if the matrix does not fit. ``rates(nbytes)`` returns the
    measured rates, or None for a small matrix. ``index_for`` returns the index in another number of subdivisions, if the matrix
    can still be cut. ``dense_blocks`` finds the size of the dense blocks of a scalar format, which count where nothing is cut.
    ``ring`` prescribes how slots are run, ``beside`` names what else lies on the device with its bytes, ``entries`` says that a
    matrix in memory will be a :class:`SparseMatrix`, of which a CPU can make multigrid, and ``symmetry`` is said of the matrix.
    """
    check_square(index.shape, request.name)
    block_size = request.node_size(index.block_size)
    whole_size = block_size
    if request.block_size == "auto" and block_size == 1 and dense_blocks is not None:
        whole_size = dense_blocks()
    vectors = replace(Vectors.fitting(request, index.shape[0], index.dtype, LARGEST_VECTOR_BLOCK), beside=beside)
    facts = [("symmetry", symmetry)]
    bases = request.specs_held(whole_size, entries=entries)
    for base in bases if request.precision not in IMAGE_PRECISIONS else ():
        try:
            room = room_for_matrix(request, vectors.nbytes(request, base))
        except BudgetError:
            if base is bases[-1]:
                raise
            continue
        if index.nbytes <= room:
            [products, *_] = base.products_per_iteration(streamed=False)
            plan = plan_stream(index, room, vectors.workload(request, base, products))
            return _resident(request, plan, base.with_products(products), vectors, index.nnz, facts)
    limit = index.shape[0] // math.lcm(int(index.parameters.get("block_size", 1)), block_size)
    counts = [1] if index_for is None else sorted({min(count, limit) for count in CUTS})
    if image_is_wanted(request, index.values_dtype):
        specs = request.specs_in_memory(whole_size)
        cut = index_for or (lambda count: index)
        sizes = (index.nbytes, index.part_nbytes("values"))
        placed = place_image(cut, counts, sizes, request, specs, vectors, index.nnz, ring=ring)
        if placed is not None:
            return replace(placed, facts=(*facts, *placed.facts))
    refuse_without_image(request, index)
    specs = request.specs_that_stream(block_size)
    room = room_for_matrix(request, max(vectors.nbytes(request, spec) for spec in specs))
    workload = functools.partial(vectors.workload, request)
    candidates = solve_candidates(index_for or (lambda count: index), counts, specs, workload, reach_for)
    plan = choose(candidates, room, ring or Ring(), rates=rates(index.nbytes))
    if plan.reach is not None and 2 * plan.reach >= len(plan.index.subdivisions):
        facts.append(("order", COUPLED))
    return _streamed(request, plan, specs, vectors, index.nnz, facts, ring=ring)


def place_matrix(
    statistics: MatrixStatistics, request: Request, *, rates: Rates, reporter: Reporter | None = None
) -> Placement:
    """Place a valid CSR matrix in memory, on the host or the device, with its statistics: one conversion."""
    A, reporter = statistics.matrix, reporter or Reporter()
    with reporter.part("look"):
        symmetry = check_matrix(statistics, request.name, definite=request.chosen_method.definite)
        check_numbering(statistics, request.options.get("coordinates"), request.name)
    facts = [("symmetry", symmetry.description)]
    block_size = _dense_block_size(statistics) if request.block_size == "auto" else request.block_size
    vectors = Vectors.fitting(request, A.shape[0], A.dtype, LARGEST_RESIDENT_BLOCK)
    undecided = request.is_auto and not request.options and request.chosen_method.definite
    measured = functools.cache(functools.partial(constants_are_slow, A, block_size))
    worth_it = undecided and is_worth_measuring(A.shape[0], streamed=False)
    slow = worth_it and has_band(A) and measured()
    without, request = request, replace(request, constants_are_slow=slow)

    def fitting_for(spec: PreconditionerSpec) -> Suggestion | None:
        """Return the format in which the matrix is used with a preconditioner, or None if there is no room for both."""
        try:
            most = room_for_matrix(request, vectors.nbytes(request, spec)) - PADDING_NBYTES
        except BudgetError:
            if spec is specs[-1]:
                raise
            return None
        names: Sequence[tuple[str, ...]] = (spec.formats, ()) if spec.formats else ((),)
        if request.format is not None:
            names = ((request.format,),)
        rankings = (
            rank_formats(statistics, request.device.kind, vectors.together, names=of, most_nbytes=most) for of in names
        )
        return next(itertools.chain.from_iterable(rankings), None)

    specs = request.specs_in_memory(block_size)
    base, fitting = next(((spec, one) for spec in specs if (one := fitting_for(spec))), (specs[-1], None))
    facts_in_memory = [*facts, *([_SLOW] * slow)]
    if fitting is not None and request.precision not in IMAGE_PRECISIONS:
        cheaper = _cheap_factorisation(A, request, base, block_size)
        if cheaper is not None and (its_fitting := fitting_for(cheaper)):
            base, fitting = cheaper, its_fitting
        with reporter.part("convert"):
            return _place_resident(statistics, request, base, fitting, vectors, facts_in_memory)
    smallest = Smallest(statistics, request, block_size)
    with reporter.part("convert"):
        image = place_image_of(smallest, request, specs, vectors)
    if image is not None:
        return replace(image, facts=(*facts_in_memory, *image.facts))
    if request.precision in IMAGE_PRECISIONS:
        refuse_without_image(request, index_of([smallest.whole], A.shape))
    if undecided and is_worth_measuring(A.shape[0], streamed=True) and measured():
        coarse = replace(without, constants_are_slow=True)
        placed = _place_streamed(statistics, smallest, coarse, block_size, [*facts, _SLOW], rates, reporter)
        if placed.stream_plan.powers_per_sweep > 1:
            return placed  # otherwise rows couple so widely that its set-up would hold most of the matrix
        del placed  # it holds the matrix in another order
    return _place_streamed(statistics, smallest, without, block_size, facts, rates, reporter)


def _place_resident(
    statistics: MatrixStatistics,
    request: Request,
    base: PreconditionerSpec,
    fitting: Suggestion,
    vectors: Vectors,
    facts: list[tuple[str, str]],
) -> Placement:
    """Convert a matrix to the format in which it is held in memory."""
    matrix, symmetry = fitting.of_statistics(statistics), statistics.symmetry
    why = f"as {base.name} uses it" if fitting.format_name in base.formats else "fastest by the roofline model"
    facts.append(request.format_fact(fitting, symmetry.exact, why))
    difference = symmetry.skew_norm if format_named(fitting.format_name).traits.half else 0.0
    [products, *_] = base.products_per_iteration(streamed=False)
    spec, workload = base.with_products(products), vectors.workload(request, base, products)
    plan = Resident.of(matrix, statistics.nnz, request.memory, workload.workspace_nbytes, workload.parts)
    return _resident(request, plan, spec, vectors, statistics.nnz, facts, matrix=matrix, difference=difference)


class _InOrder(NamedTuple):
    """A matrix in an order of its rows, and the plan by which it is streamed."""

    order: LevelOrder | None
    csr: Any
    extents: ColumnExtents
    stream_plan: StreamPlan


def _cheap_factorisation(
    A: CsrMatrix, request: Request, chosen: PreconditionerSpec, block_size: int
) -> PreconditionerSpec | None:
    """Return a factorisation if ``auto`` has chosen multigrid, which is predicted to take longer."""
    if not request.is_auto or chosen.name != "multigrid":
        return None
    found = cheap_factorisation(A, block_size, near_null_space_known=True)
    if found is None:
        return None
    # A factorisation has no use for them, but what does not fit the matrix is refused in any case.
    checked_near_null_space(A, block_size, request.options.get("near_null_space"), request.options.get("coordinates"))
    return found[0]


def _place_streamed(
    statistics: MatrixStatistics,
    smallest: Smallest,
    request: Request,
    block_size: int,
    facts: list[tuple[str, str]],
    rates: Rates,
    reporter: Reporter,
) -> Placement:
    A: CsrMatrix = statistics.matrix
    vectors = Vectors.fitting(request, A.shape[0], A.dtype, LARGEST_VECTOR_BLOCK)
    request, by_lines = with_lines(A, request, math.lcm(_dense_block_size(statistics), block_size))
    specs = request.specs_that_stream(block_size)
    room = room_for_matrix(request, max(vectors.nbytes(request, spec) for spec in specs))
    suggestion, granularity = smallest.suggestion, smallest.block_size
    facts.append(request.format_fact(suggestion, statistics.symmetry.exact, "the fewest bytes a sweep"))
    workload = functools.partial(vectors.workload, request)
    best_plan = functools.partial(_best_plan, specs, workload, room, rates(suggestion.nbytes))
    given, rows = A.to_csr(), A.shape[0] // granularity
    first = given if by_lines is None else by_lines.matrix(given)
    facts += [] if by_lines is None else [("order", BY_LINES)]
    rough = functools.cache(functools.partial(rough_index, suggestion, A.shape, A.dtype, first.indptr[1:]))
    cuts: Sequence[int] = CUTS
    most = max(max(spec.products_per_iteration(streamed=True)) for spec in specs)

    def in_order(order: LevelOrder) -> _InOrder:
        csr = order.matrix(given)
        extents = ColumnExtents.of(csr, granularity)
        return _InOrder(order, csr, extents, best_plan(rough, extents, rows))

    def suffices(one: _InOrder) -> bool:
        return one.stream_plan.powers_per_sweep >= most or _has_room(rough, one.extents, room, most)

    order, csr, extents = by_lines, first, ColumnExtents.of(first, granularity)
    orders = smallest.orders(request) if by_lines is None else {}
    may_pay = functools.partial(levels_may_pay, request=request, nodes=rows, entries=statistics.nnz)
    with contextlib.suppress(BudgetError):  # of which only exact cuts can tell
        chosen = _InOrder(order, csr, extents, best_plan(rough, extents, rows))
        chosen, said = in_best_order(chosen, orders, in_order, suffices, may_pay, [])
        order, csr, extents, plan = chosen
        facts, cuts = [*facts, *said], _cuts_like(plan)
    with reporter.part("convert"):
        if order is not None:
            statistics.take_converted(0, None)  # in the order before: its memory is needed
            reordered = MatrixStatistics.of(as_ordered(csr, A))
        # On the host, to be cut there, and streamed from there.
        whole = (smallest.whole if order is None else suggestion.of_statistics(reordered)).to_device(CPU)
    plan = _exact_plan(best_plan, whole, extents, cuts, smallest.together)
    converted = {"matrix": whole, "order": order, "difference": smallest.difference}
    return _streamed(request, plan, specs, vectors, statistics.nnz, facts, **converted)


def _best_plan(
    specs: Sequence[PreconditionerSpec],
    workload: Callable[[PreconditionerSpec, int], Workload],
    room: int,
    measured: LinkRates | None,
    index_for: Callable[[int], MatrixIndex],
    extents: ColumnExtents,
    limit: int,
    cuts: Sequence[int] = CUTS,
) -> StreamPlan:
    counts = sorted({min(count, limit) for count in cuts})
    reach_for: Callable[[MatrixIndex], int] = lambda index: extents.reach(index.row_starts)  # noqa: E731
    return choose(solve_candidates(index_for, counts, specs, workload, reach_for), room, Ring(), rates=measured)


def _exact_plan(
    best_plan: Callable[..., StreamPlan],
    whole: SparseMatrix,
    extents: ColumnExtents,
    cuts: Sequence[int],
    together: int,
) -> StreamPlan:
    """Return the best plan for a converted matrix, with one of some numbers of subdivisions if it fits so."""
    exact = functools.cache(lambda count: index_of(row_slabs(whole, count, together), whole.shape))
    limit = count_granules(whole, together)
    try:
        return best_plan(exact, extents, limit, cuts)
    except BudgetError:
        return best_plan(exact, extents, limit)


def _has_room(index_for: Callable[[int], MatrixIndex], extents: ColumnExtents, room: int, products: int) -> bool:
    """Return whether a sweep could compute all products in the order of the rows as it is, if that were the fastest way."""
    for count in CUTS:
        index = index_for(count)
        slots = (products - 1) * extents.reach(index.row_starts) + 2
        if slots * max(index.sizes["whole"]) <= room:
            return True
    return False


def _cuts_like(plan: StreamPlan) -> Sequence[int]:
    """Return the number of subdivisions of a plan for rough cuts; all numbers, if whole chunks of rows matter."""
    if plan.index.shape[0] <= _FINELY_CUT:
        return CUTS
    nearest = bisect.bisect_left(CUTS, len(plan.index.subdivisions))
    return CUTS[nearest : nearest + 1]


def _resident(
    request: Request,
    plan: StreamPlan | Resident,
    spec: PreconditionerSpec,
    vectors: Vectors,
    nonzeros: int,
    facts: list[tuple[str, str]],
    **converted: Any,
) -> Placement:
    converted |= {
        "reasons": {spec.name: request.reason(spec, [spec])},
        "method": request.chosen_method.described(vectors.together),
    }
    return Placement(plan, spec, vectors.together, vectors.solver_nbytes, nonzeros, tuple(facts), **converted)


def _streamed(
    request: Request,
    plan: StreamPlan,
    specs: list[PreconditionerSpec],
    vectors: Vectors,
    nonzeros: int,
    facts: list[tuple[str, str]],
    **converted: Any,
) -> Placement:
    choices = vectors.choices(request, specs)
    spec = next(spec for spec, workload in choices if workload.degree == plan.workload.degree)
    reasons = {of.name: request.reason(of, specs) for of in specs}
    decided = (plan, spec, vectors.together, vectors.solver_nbytes, nonzeros, tuple(facts))
    converted["method"] = request.chosen_method.described(vectors.together)
    # With one choice only, the first sweeps are not worth a measurement.
    return Placement(*decided, choices=choices if len(choices) > 1 else (), reasons=reasons, **converted)


def _dense_block_size(statistics: MatrixStatistics) -> int:
    """Return the size of the dense blocks that a matrix consists of; 1 without blocks."""
    dense = {size: fill for size, fill in statistics.fills.items() if fill > DENSE}
    return max(dense, key=lambda size: (dense[size], size), default=1)


def dense_block_size(A: SparseMatrix) -> int:
    """Return the size of the dense blocks that some rows in the middle of a matrix on the CPU consist of; 1 without blocks."""
    granule = math.lcm(A.row_granularity, *range(2, LARGEST_DENSE_BLOCK + 1))
    count, start = granule * -(-_LOOKED_AT // granule), A.shape[0] // 2 // granule * granule
    some = A.rows(start, start + count) if start + count < A.shape[0] else A
    return _dense_block_size(MatrixStatistics.of(CsrMatrix.from_csr(some.to_csr(), check=False)))
