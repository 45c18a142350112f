"""Places a matrix that does not fit: an image of it in fewer digits in memory, for all iterations, and A streamed for residuals.

Both are of the format that has the fewest bytes where it is streamed, which :class:`Smallest` finds.

See :mod:`penstock.solvers.image_solve` for what is computed with the two.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from penstock.driver.request import ImagePlacement, Placement, Request, Resident, Vectors, room_for_matrix
from penstock.driver.row_order import BY_LEVELS, IN_LAYERS, as_ordered
from penstock.solvers import PreconditionerSpec
from penstock.solvers.amg.grid_points import GridPoints
from penstock.solvers.image_solve import image_workspace_nbytes
from penstock.spmv import (
    CPU,
    BudgetError,
    CsrMatrix,
    InputError,
    SparseMatrix,
    device_of,
    format_named,
    format_nbytes,
)
from penstock.spmv.formats.partition import count_granules, row_slabs
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.model.suggestion import Suggestion, rank_formats
from penstock.streaming import (
    CUTS,
    LevelOrder,
    MatrixIndex,
    Ring,
    StreamPlan,
    Workload,
    index_of,
    layer_order,
    level_order,
    plan_stream,
)
from penstock.streaming.image import can_be_joined, can_be_rounded, corrections_nbytes, image_nbytes, joining_nbytes

# Bytes of a stored value in the matrix and in the smallest image, and of an index.
_FULL, _ITEMSIZE, _INDEX = 8, 2, 4
# CSR is streamed if it has at most this share of the bytes of other formats, which another order of the rows may make smaller.
_FEWER = 0.6
# Rows are put in another order for an image if it fits then: if these times the bytes without padding are enough, and the padding
# is more than that.
_IN_ORDER, _PADDED = 1.1, 1.2
#: Of the values of images, the first choice first.
IMAGE_PRECISIONS = ("float32", "int16")


def image_is_wanted(request: Request, dtype: object) -> bool:
    """Return whether a matrix of this type that does not fit may have an image."""
    if request.precision == "float64" or not request.chosen_method.definite or dtype != np.float64:
        return False
    # Rounding takes a null space from the image.
    return request.precision != "auto" or request.null_space is None


def image_fits(nbytes: int, block_size: int, request: Request, vectors_nbytes: int) -> bool:
    """Return whether the smallest image of a matrix of ``nbytes`` bytes is expected to fit, with two subdivisions of it."""
    try:
        room = room_for_matrix(request, vectors_nbytes)
    except BudgetError:
        return False
    index = _INDEX / block_size**2
    share = (_ITEMSIZE + index) / (_FULL + index)
    return (share + 2 / CUTS[-1]) * nbytes <= room


def refuse_without_image(request: Request, index: MatrixIndex | None) -> None:
    """Refuse a matrix that has no image where one is asked for, and say why."""
    precision = request.precision
    if precision not in IMAGE_PRECISIONS:
        return
    advice = "choose precision='auto'"
    if not request.chosen_method.definite:
        raise InputError(f"precision={precision!r} is for cg, not for {request.method}; {advice}")
    if index is not None and index.values_dtype != np.float64:
        raise InputError(f"{request.name} is stored in {index.values_dtype}, and images are of float64; {advice}")
    if index is not None and not (can_be_joined(index) and can_be_rounded(index, precision)):
        raise InputError(f"{request.name} has no image in {precision}: {_why_no_image(index, precision)}; {advice}")
    needed = "" if index is None else f" of {format_nbytes(image_nbytes(index, precision))}"
    raise BudgetError(
        f"an image of {request.name} in {precision}{needed} and two subdivisions of the matrix do not fit the memory; allow "
        f"more, or {advice}"
    )


def _why_no_image(index: MatrixIndex, precision: str) -> str:
    if can_be_rounded(index, precision) and index.cuts_chunks:
        rows = index.row_granularity
        return f"its subdivisions begin inside chunks of {rows} rows; 'penstock store STORE ANOTHER' cuts it anew"
    of_kind = "csr or bsr, or half of it (symmetric_bsr)"
    if precision == "int16":
        of_kind = "dense blocks of several unknowns, half of it (symmetric_bsr)"
    blocks = f" with {index.block_size} a block" if format_named(index.format_name).traits.blocked else ""
    return f"that is for symmetric matrices stored in {of_kind}, and this one is stored in {index.format_name}{blocks}"


def place_image(
    index_for: Callable[[int], MatrixIndex],
    counts: Sequence[int],
    sizes: tuple[int, int],
    request: Request,
    specs: Sequence[PreconditionerSpec],
    vectors: Vectors,
    nonzeros: int,
    whole: SparseMatrix | None = None,
    ring: Ring | None = None,
) -> Placement | None:
    """Place a matrix that can be cut into any of some numbers of subdivisions; None if there is no room.

    ``sizes`` are the bytes of the matrix and of its values. ``whole`` is the matrix on the host, unless it is in a store, and
    ``ring`` what is prescribed for the slots through which it is streamed.
    """
    precisions = IMAGE_PRECISIONS if request.precision == "auto" else (request.precision,)
    for precision, spec in itertools.product(precisions, specs):
        more = image_workspace_nbytes(vectors.n, vectors.together)
        try:
            room = room_for_matrix(request, vectors.nbytes(request, spec) + more)
        except BudgetError:
            continue
        planned = _plan(index_for, counts, sizes, room, precision, Workload(vectors.together), ring)
        if planned is None:
            continue
        plan, image = planned
        index, more = plan.index, more + corrections_nbytes(plan.index)
        if request.device.kind == "cuda":
            more += joining_nbytes(index)
        [products, *_] = spec.products_per_iteration(streamed=False)
        spec = spec.with_products(products)
        workload = vectors.workload(request, spec, products)
        workspace = workload.workspace_nbytes + more
        resident = Resident(
            index.shape, nonzeros, index.format_name, image, request.memory, workspace, workload.parts, precision
        )
        facts = (("residuals", _explained(plan, request.verify)),)
        reasons = {spec.name: request.reason(spec, [spec])}
        decided = (resident, spec, vectors.together, vectors.solver_nbytes, nonzeros, facts)
        method = request.chosen_method.described(vectors.together)
        return Placement(*decided, reasons=reasons, method=method, image=ImagePlacement(plan, whole))
    return None


def _plan(
    index_for: Callable[[int], MatrixIndex],
    counts: Sequence[int],
    sizes: tuple[int, int],
    room: int,
    precision: str,
    workload: Workload,
    ring: Ring | None,
) -> tuple[StreamPlan, int] | None:
    """Return the plan for single products with the fewest subdivisions that fit beside an image, if any do, and its bytes."""
    nbytes, of_values = sizes
    least = nbytes - of_values * (1 - np.dtype(precision).itemsize / _FULL)
    for count in counts:
        if count != counts[-1] and least + 2 * of_values / count > room:
            continue  # at once: an index is made in a pass over the matrix
        with suppress(BudgetError, InputError):  # there may be fewer pieces to cut
            index = index_for(count)
            if not (can_be_joined(index) and can_be_rounded(index, precision)):
                return None
            image = image_nbytes(index, precision)
            ring = replace(ring or Ring(), shared_structure=True)
            return plan_stream(index, max(room - image, 1), workload, ring), image
    return None


def _explained(plan: StreamPlan, verify: str) -> str:
    count = len(plan.index.subdivisions)
    if not plan.slots:
        return f"computed with A in float64, {format_nbytes(plan.storage_nbytes)}, which is in memory too"
    return (
        f"computed with A in float64, streamed in {count} subdivisions through {plan.slots} slots, "
        f"{format_nbytes(plan.storage_nbytes)}"
        + ("; the last one is a bound where that meets the tolerance" if verify == "bound" else "")
    )


def place_image_of(
    smallest: Smallest, request: Request, specs: Sequence[PreconditionerSpec], vectors: Vectors
) -> Placement | None:
    """Place an image of a matrix that does not fit, and the matrix itself for residuals; None without room for both.

    Rows in random order, whose chunks are padded, are put in another order if an image fits in that.
    """
    if not image_is_wanted(request, smallest.statistics.values_dtype):
        return None
    needed = min(vectors.nbytes(request, spec) for spec in specs)
    if placed := _placed_as_it_is(smallest, request, specs, vectors, needed):
        return placed
    least, nbytes = smallest.least_nbytes, smallest.suggestion.nbytes
    if (
        smallest.block_size == 1
        or nbytes < _PADDED * least
        or not image_fits(int(_IN_ORDER * least), smallest.block_size, request, needed)
    ):
        return None
    for name, order_of in smallest.orders(request).items():
        order = order_of()
        if placed := _placed_as_it_is(smallest.in_order(order, request), request, specs, vectors, needed):
            said = f"{name}: rows are padded less, so that an image fits"
            return replace(placed, order=order, facts=(("order", said), *placed.facts))
    return None


def _placed_as_it_is(
    smallest: Smallest, request: Request, specs: Sequence[PreconditionerSpec], vectors: Vectors, needed: int
) -> Placement | None:
    of, statistics = smallest.suggestion, smallest.statistics
    if not image_fits(of.nbytes, smallest.block_size, request, needed):
        return None
    whole = smallest.whole
    most = count_granules(whole, smallest.together)
    counts = sorted({min(count, most) for count in CUTS})

    def index_for(count: int) -> MatrixIndex:
        return index_of(row_slabs(whole, count, smallest.together), whole.shape)

    placed = place_image(
        index_for, counts, (whole.nbytes, whole.values.nbytes), request, specs, vectors, statistics.nnz, whole
    )
    if placed is None:
        return None
    fact = request.format_fact(of, statistics.symmetry.exact, "the fewest bytes")
    return replace(placed, facts=(fact, *placed.facts), difference=smallest.difference)


class Smallest:
    """A matrix in the format in which it has the fewest bytes to stream, or in the caller's; it is converted once."""

    def __init__(self, statistics: MatrixStatistics, request: Request, node_size: int) -> None:
        smaller: list[Suggestion] = []

        def streaming() -> Iterator[Suggestion]:
            for one in rank_formats(statistics, "cpu", by_bytes=True):
                if format_named(one.format_name).traits.streams or one.format_name == request.format == CsrMatrix.name:
                    yield one
                elif one.format_name == CsrMatrix.name:
                    smaller.append(one)

        self.suggestion, self.statistics = _first_suitable(streaming(), request), statistics
        if request.format is None and smaller and smaller[0].nbytes < _FEWER * self.suggestion.nbytes:
            self.suggestion = smaller[0]  # chunks with the long rows of hubs are mostly padding
        self.block_size = int(self.suggestion.parameters.get("block_size", 1))
        self._node_size = node_size
        #: Rows that subdivisions keep together: those of blocks and of nodes.
        self.together = math.lcm(self.block_size, node_size)

    @functools.cached_property
    def whole(self) -> SparseMatrix:
        """The matrix on the host."""
        return self.suggestion.of_statistics(self.statistics).to_device(CPU)

    @property
    def difference(self) -> float:
        """Bound of the norm of its difference from the caller's matrix."""
        half = format_named(self.suggestion.format_name).traits.half
        return self.statistics.symmetry.skew_norm if half else 0.0

    @property
    def least_nbytes(self) -> float:
        """Bytes that it would have without padding, about."""
        of = self.suggestion
        return format_named(of.format_name).least_nbytes(self.statistics, **of.parameters)

    def in_order(self, order: LevelOrder, request: Request) -> Smallest:
        """Return the matrix with its rows in another order."""
        A = self.statistics.matrix
        ordered = as_ordered(order.matrix(A.to_csr()), A)
        return Smallest(MatrixStatistics.of(ordered), request, self._node_size)

    @functools.cached_property
    def _by_levels(self) -> LevelOrder:
        return level_order(self.statistics.matrix.to_csr(), self.together)

    def orders(self, request: Request) -> dict[str, Callable[[], LevelOrder]]:
        """Return what finds other orders of its rows; the unknowns of a node and the rows of a block stay together."""
        size, by_levels = self.together, {BY_LEVELS: lambda: self._by_levels}
        points = request.options.get("coordinates")
        if points is None or isinstance(points, GridPoints) or len(points) * size != self.statistics.shape[0]:
            return by_levels
        return {IN_LAYERS: lambda: layer_order(device_of(points).to_host(points), size), **by_levels}


def _first_suitable(ranking: Iterator[Suggestion], request: Request) -> Suggestion:
    """Return the first suggestion of the requested format, or of any."""
    names = set()
    for one in ranking:
        if request.format in (None, one.format_name):
            return one
        names.add(one.format_name)
    raise InputError(
        f"the format {request.format} does not suit {request.name} here; choose auto or one of {', '.join(sorted(names))}"
    )
