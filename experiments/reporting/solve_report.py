"""Describes a finished solve in plain values: the part of a report that all kinds of solves share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.distributed import DistributedStreamedMatrix
from penstock.driver.open_system import AnyResult, OpenSystem
from penstock.driver.request import Resident
from penstock.experiments.reporting.atomic import write_json, write_text
from penstock.experiments.reporting.checkpoint import Checkpoint
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.solvers import BlockSolveResult, SolveResult, StopReason
from penstock.spmv import Array, Operator, SweptOperator, VectorSpace
from penstock.spmv.communicator import communicator_of
from penstock.spmv.vectors.recurrence import Recurrence, RecurrenceStep
from penstock.streaming import HeterogeneousMatrix, StreamedMatrix, StreamPlan, SweptMatrix

# Vectors that the products of a sweep take, with those that |A| takes for its norm.
_VECTORS_OF_POWERS = 5


def columns_of(result: AnyResult) -> tuple[SolveResult, ...]:
    """Return the results of all right-hand sides."""
    return result.columns if isinstance(result, BlockSolveResult) else (result,)


def reason_of(result: AnyResult) -> StopReason:
    """Return why a solve ended: STOPPED if any right-hand side was stopped, else the reason of the worst one."""
    stopped = any(column.reason is StopReason.STOPPED for column in columns_of(result))
    return StopReason.STOPPED if stopped else worst(result).reason


def worst(result: AnyResult) -> SolveResult:
    """Return the worst right-hand side: one that did not converge, or else the one with the largest true residual."""

    def badness(column: SolveResult) -> tuple[bool, float]:
        residual = column.true_residual
        return not column.converged, math.inf if math.isnan(residual) else residual

    return max(columns_of(result), key=badness)


def describe_solve(
    system: OpenSystem, result: AnyResult, spent: Checkpoint, *, rtol: float, setup_seconds: float = 0.0
) -> dict[str, Any]:
    """Return the solver's result, its time and traffic, and both as fractions of the measured rates.

    What was ``spent`` is of the whole solve, including earlier runs from which it was resumed.
    """
    A, plan = system.matrix, system.decided.plan_of_matrix
    image = 0 if system.decided.image is None else system.decided.plan.storage_nbytes
    plan = plan.as_stream_plan() if isinstance(plan, Resident) else plan
    limited = plan.slots or system.request.memory is not None
    seconds, sweeps, bytes_streamed = setup_seconds + spent.seconds, spent.sweeps, spent.bytes_streamed
    predicted = A.division.seconds if isinstance(A, HeterogeneousMatrix) else plan.predicted_seconds()
    nbytes, rates, shown = plan.index.nbytes, plan.rates, worst(result)

    def fraction(moved: int, rate: float | None) -> float | None:
        return moved / seconds / rate if rate and seconds else None

    return {
        "converged": result.converged,
        "reason": shown.reason.name.lower(),
        "message": shown.message,
        "iterations": result.iterations,
        "true_residual": float(np.max([column.true_residual for column in columns_of(result)])),  # NaN if any is NaN
        "rounding_floor": shown.rounding_floor,
        "rtol": rtol,
        "sweeps": sweeps,
        "bytes_streamed": bytes_streamed,
        "matrix_nbytes": nbytes,
        "precision": system.decided.precision,
        "image_nbytes": image,
        "budget_nbytes": image + plan.budget_nbytes if limited else None,
        **_plan_facts(plan),
        # With several powers per sweep, a solve has two kinds of sweeps, so there is no one prediction.
        "predicted_sweep_seconds": None if plan.powers_per_sweep > 1 else predicted,
        "sweep_seconds": seconds / sweeps if sweeps else None,
        "link_fraction": fraction(bytes_streamed // spent.ranks, rates.link if rates else None),
        "memory_fraction": fraction(sweeps * nbytes, rates.memory if rates and plan.powers_per_sweep == 1 else None),
        **_streaming_facts(A, plan, image),
        "unknowns": plan.index.shape[0],
        "device": str(A.device),
    }


def _streaming_facts(A: Operator, plan: StreamPlan, image_nbytes: int) -> dict[str, Any]:
    if not isinstance(A, SweptMatrix | DistributedStreamedMatrix):
        return {"peak_budget_nbytes": plan.index.nbytes, "staged": False, "direct_reads": False}
    return {
        "peak_budget_nbytes": image_nbytes + A.budget.peak_nbytes,
        "staged": A.staged,
        "direct_reads": getattr(A.store, "direct", False),
    }


def _plan_facts(plan: StreamPlan) -> dict[str, Any]:
    return {
        "resident_nbytes": plan.resident_nbytes,
        "streamed_nbytes_per_sweep": plan.streamed_nbytes,
        "subdivisions": len(plan.index.subdivisions),
        "slots": plan.slots,
        "products_a_sweep": plan.powers_per_sweep,
        "overlap": plan.ring.overlap,
        "format": plan.index.format_name,
    }


def _sweep_of_powers(A: StreamedMatrix, x: Array) -> Callable[[], object]:
    """Return an action that computes the products of one sweep of a solve, each divided by the norm of A."""
    powers, product = A.plan.powers_per_sweep, lambda: A.apply(x)
    if powers == 1 or _VECTORS_OF_POWERS * x.nbytes > A.device.free_nbytes():
        return product
    xp, space = A.device.xp, VectorSpace.of(A)
    with A.device.current():
        try:
            vectors = [xp.array(x), *(xp.zeros_like(x) for _ in range(2))]
            norm = float(A.apply_absolute(xp.ones(A.shape[1], dtype=A.dtype)).max())
        except MemoryError:
            return product
    step = RecurrenceStep(-1.0 / norm, 0.0, 0.0, scaled=False, driven=False)
    v, before, image = vectors
    return lambda: Recurrence([step] * powers, v, before, v, v, image, space).run(A)


def record_sweep(folder: ResultsFolder, system: OpenSystem, result: AnyResult) -> None:
    """Record the times of transfers and kernels in one additional sweep like those of the solve, which recording would slow."""
    A, placement = system.matrix, system.decided
    if not isinstance(A, SweptOperator) or reason_of(result) is StopReason.STOPPED:
        return
    if not communicator_of(A).largest(placement.plan_of_matrix.slots):  # the squares of some ranks may fit
        return
    x = A.device.asarray(result.x, dtype=A.dtype)
    if x.ndim > 1:
        x = A.device.xp.ascontiguousarray(x[:, : placement.together])
    sweep = _sweep_of_powers(A, x) if isinstance(A, StreamedMatrix) else lambda: A.apply(x)
    with A.recording() as timeline:  # on the device of A
        sweep()
    write_json(folder.timeline, timeline.to_json())
    write_text(folder.trace, timeline.to_chrome_trace())
