"""Places a matrix that does not fit: an image of it in fewer digits in memory, for all iterations, and A streamed for residuals.

See :mod:`penstock.solvers.image_solve` for what is computed with the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from penstock.driver.request import ImagePlacement, Placement, Request, Resident, Vectors, room_for_matrix
from penstock.solvers import PreconditionerSpec
from penstock.solvers.image_solve import image_workspace_nbytes
from penstock.spmv import BudgetError, InputError, SparseMatrix, format_nbytes
from penstock.streaming import CUTS, MatrixIndex, Ring, StreamPlan, Workload, plan_stream
from penstock.streaming.image import can_be_joined, can_be_rounded, corrections_nbytes, image_nbytes

# Bytes of a stored value in the matrix and in the smallest image, and of an index.
_FULL, _ITEMSIZE, _INDEX = 8, 2, 4
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
        raise InputError(
            f"{request.name} has no image in {precision}: that is for symmetric matrices stored in dense blocks of several "
            f"unknowns (symmetric_bsr), and this one is stored in {index.format_name} with {index.block_size} a block; {advice}"
        )
    needed = "" if index is None else f" of {format_nbytes(image_nbytes(index, precision))}"
    raise BudgetError(
        f"an image of {request.name} in {precision}{needed} and two subdivisions of the matrix do not fit the memory; allow "
        f"more, or {advice}"
    )


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
        if count != counts[-1] and least + 2 * nbytes / count > room:
            continue  # at once: an index is made in a pass over the matrix
        with suppress(BudgetError, InputError):  # there may be fewer pieces to cut
            index = index_for(count)
            if not (can_be_joined(index) and can_be_rounded(index, precision)):
                return None
            image = image_nbytes(index, precision)
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
