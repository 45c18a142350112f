"""What a solver returns: the solution, why it stopped, and what that took."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.spmv import Array

__all__ = ["BlockSolveResult", "IterationRecord", "SolveResult", "StopReason"]


class StopReason(enum.Enum):
    """Why a solver stopped. The value of a member is what a user should know and do."""

    CONVERGED = "converged: the true residual ||b - A x|| meets the tolerance"
    MAXITER = "stopped at maxiter before the residual met the tolerance; raise maxiter or use a better preconditioner"
    STOPPED = "stopped on request between two iterations; the state in the result goes on from here"
    NOT_POSITIVE_DEFINITE = (
        "stopped because p.Ap <= 0 for a search direction p: the matrix is not positive definite; check its sign, its "
        "boundary conditions and its symmetry"
    )
    PRECONDITIONER_NOT_POSITIVE_DEFINITE = (
        "stopped because r.Mr <= 0 for a residual r: the preconditioner M is not positive definite; check it, or leave it "
        "out"
    )
    NOT_FINITE = (
        "stopped because numbers left the range of their type (NaN, Inf, or squares too large or too small): the operator "
        "or the preconditioner returned them, or the units are extreme; check the matrix for NaN and scale the system"
    )
    INCONSISTENT = (
        "stopped because A maps a search direction to zero while the residual is not zero, or because the residual grew beyond "
        "what any consistent system shows: the matrix is singular and b is outside its range; fix the missing supports or "
        "remove the null space from b"
    )
    ROUNDING_FLOOR = (
        "stopped because the true residual no longer falls: it has reached the rounding floor u || |A||x| || / ||b|| of "
        "this system, which no solver in this precision gets much below; loosen rtol above the true residual"
    )
    STAGNATED = (
        "stopped because the true residual no longer falls although the recursive one does; the operator is less accurate "
        "than the tolerance asks (reduced storage?), or A or M is not symmetric"
    )


@dataclass(frozen=True)
class IterationRecord:
    """What ``monitor`` receives whenever a solver looks at its residual.

    Parameters
    ----------
    iteration : int
        Counted from 1.
    residual_norm : float
        Recursive ``||r||`` relative to ``||b||``.
    seconds : float
        Since the solver was called.
    bytes_streamed : int
        By the matrix since the solver was called; 0 if it is resident.
    state : Any
        What the solver needs to go on from here; valid until the monitor returns, so copy what you keep.
    """

    iteration: int
    residual_norm: float
    seconds: float
    bytes_streamed: int
    state: Any = field(repr=False, default=None)


@dataclass(frozen=True)
class SolveResult:
    """The outcome of a solve; ``x, info = result`` works with SciPy's meaning of ``info``.

    Parameters
    ----------
    x : array, (n,)
        The last iterate.
    reason : StopReason
    message : str
        The reason in words, with the numbers of this solve.
    iterations : int
    residual_norms : list of float
        Recursive ``||r|| / ||b||`` at the start and after each iteration.
    true_residual : float
        ``||b - A x|| / ||b||`` computed from A, b and x at the end (``||b - A x||`` if b is zero).
    rounding_floor : float or None
        Estimate of the smallest residual this precision allows, if it was needed.
    sweeps : int
        Passes over the matrix, those for true residuals included; of a streamed matrix also those of a preconditioner.
    bytes_streamed : int
        Bytes those sweeps moved; 0 for a resident matrix.
    timings : dict
        Seconds: ``total``; on the CPU also ``matrix``, the solver's own products, and, of ``cg``, ``preconditioner``, the
        part of it that is not fused with other work on vectors.
    state : Any
        Hand it back as ``state=`` to go on.
    """

    x: Array
    reason: StopReason
    message: str
    iterations: int
    residual_norms: list[float]
    true_residual: float
    rounding_floor: float | None
    sweeps: int
    bytes_streamed: int
    timings: dict[str, float]
    state: Any = field(repr=False, default=None)

    @classmethod
    def of(
        cls,
        x: Array,
        reason: StopReason,
        residual_norms: list[float],
        true_residual: float,
        rounding_floor: float | None,
        **spent: Any,
    ) -> Self:
        """Return a result with its iterations counted and its message written."""
        iterations = len(residual_norms) - 1
        message = f"{reason.value} (iteration {iterations}, true relative residual {true_residual:.3g}"
        message += ")" if rounding_floor is None else f", estimated floor {rounding_floor:.3g})"
        return cls(x, reason, message, iterations, residual_norms, true_residual, rounding_floor, **spent)

    @property
    def converged(self) -> bool:
        """Whether the true residual meets the tolerance."""
        return self.reason is StopReason.CONVERGED

    @property
    def info(self) -> int:
        """SciPy's code: 0 converged, the number of iterations if that ran out, negative for a breakdown."""
        if self.converged:
            return 0
        limits = (StopReason.MAXITER, StopReason.STOPPED, StopReason.ROUNDING_FLOOR, StopReason.STAGNATED)
        return max(self.iterations, 1) if self.reason in limits else -1

    def __iter__(self) -> Iterator[Any]:
        return iter((self.x, self.info))


@dataclass(frozen=True)
class BlockSolveResult:
    """The outcome of a solve with several right-hand sides; ``X, info = result`` works too.

    Parameters
    ----------
    x : array, (n, columns)
        The last iterates.
    columns : tuple of SolveResult
        One for each right-hand side, with what all of them took together.
    iterations : int
        Of the block.
    sweeps, bytes_streamed, timings
        As in :class:`SolveResult`.
    state : Any
        Hand it back as ``state=`` to go on.
    """

    x: Array
    columns: tuple[SolveResult, ...]
    iterations: int
    sweeps: int
    bytes_streamed: int
    timings: dict[str, float]
    state: Any = field(repr=False, default=None)

    @property
    def converged(self) -> bool:
        """Whether the true residuals of all columns meet the tolerance."""
        return all(column.converged for column in self.columns)

    @property
    def info(self) -> int:
        """0 if all columns converged, negative if one broke down, else the iterations."""
        codes = [column.info for column in self.columns]
        return min(codes) if min(codes) < 0 else max(codes)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.x, self.info))
