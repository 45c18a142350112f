"""What a finished solve came to, as plain values: the part of a report that all kinds of solves share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.experiments.results import ResultsFolder, write_json, write_text
from penstock.solvers import BlockSolveResult, SolveResult, StopReason
from penstock.spmv import Array, Operator
from penstock.streaming import StreamedMatrix, StreamPlan

__all__ = ["columns_of", "describe_solve", "reason_of", "record_sweep", "worst"]


def columns_of(result: SolveResult | BlockSolveResult) -> tuple[SolveResult, ...]:
    """Return the results of all right-hand sides."""
    return result.columns if isinstance(result, BlockSolveResult) else (result,)


def reason_of(result: SolveResult | BlockSolveResult) -> StopReason:
    """Return why a solve ended: stopped, if any right-hand side was, else that of the one that says most."""
    stopped = any(column.reason is StopReason.STOPPED for column in columns_of(result))
    return StopReason.STOPPED if stopped else worst(result).reason


def worst(result: SolveResult | BlockSolveResult) -> SolveResult:
    """Return the right-hand side that says most of the whole: one that did not converge, or the largest residual."""

    def badness(column: SolveResult) -> tuple[bool, float]:
        residual = column.true_residual
        return not column.converged, math.inf if math.isnan(residual) else residual

    return max(columns_of(result), key=badness)


def describe_solve(
    A: Operator,
    plan: StreamPlan,
    result: SolveResult | BlockSolveResult,
    *,
    rtol: float,
    sweeps: int,
    bytes_streamed: int,
    seconds: float,
    budget_nbytes: int | None,
) -> dict[str, Any]:
    """Return the solver's result, what it took, and how near that came to the rates that were measured.

    Parameters
    ----------
    A : Operator
        A :class:`StreamedMatrix`, or a resident matrix.
    plan : StreamPlan
    result : SolveResult or BlockSolveResult
    rtol : float
    sweeps, bytes_streamed : int
        Of the whole solve, earlier runs that it went on from included.
    seconds : float
        The same.
    budget_nbytes : int or None
        That was given for matrix storage, if any.
    """
    streamed = A if isinstance(A, StreamedMatrix) else None
    nbytes, rates, named = plan.index.nbytes, plan.rates, worst(result)

    def share(moved: int, rate: float | None) -> float | None:
        return moved / seconds / rate if rate and seconds else None

    return {
        "converged": result.converged,
        "reason": named.reason.name.lower(),
        "message": named.message,
        "iterations": result.iterations,
        "true_residual": float(np.max([column.true_residual for column in columns_of(result)])),  # NaN if one is
        "rounding_floor": named.rounding_floor,
        "rtol": rtol,
        "sweeps": sweeps,
        "bytes_streamed": bytes_streamed,
        "matrix_nbytes": nbytes,
        "budget_nbytes": budget_nbytes,
        "peak_budget_nbytes": streamed.budget.peak_nbytes if streamed else nbytes,
        "resident_nbytes": plan.resident_nbytes,
        "streamed_nbytes_per_sweep": plan.streamed_nbytes,
        "subdivisions": len(plan.index.subdivisions),
        "slots": plan.slots,
        "products_a_sweep": plan.products_a_sweep,
        "overlap": plan.overlap,
        "format": plan.index.format_name,
        # Where products share sweeps, these are of two kinds.
        "predicted_sweep_seconds": None if plan.products_a_sweep > 1 else plan.predicted_seconds(),
        "sweep_seconds": seconds / sweeps if sweeps else None,
        "link_fraction": share(bytes_streamed, rates.link if rates else None),
        "memory_fraction": share(sweeps * nbytes, rates.memory if rates and plan.products_a_sweep == 1 else None),
        "staged": streamed is not None and streamed.staged,
        "direct_reads": streamed is not None and getattr(streamed.store, "direct", False),
        "unknowns": A.shape[0],
        "device": str(A.device),
    }


def record_sweep(folder: ResultsFolder, A: StreamedMatrix, x: Array) -> None:
    """Write when transfers and kernels ran in a sweep of its own, so that recording costs the solve nothing."""
    with A.recording() as timeline:
        A.apply(x)
    write_json(folder.timeline, timeline.to_json())
    write_text(folder.trace, timeline.to_chrome_trace())
