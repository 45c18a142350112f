"""Results of solvers: the solution, the reason for stopping, and the cost."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

from penstock.spmv import Array, NotConvergedError, format_nbytes
from penstock.spmv.explanations import as_table


class StopReason(enum.Enum):
    """Why a solver stopped. The value of a member explains the reason and what to do.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import StopReason, cg
    >>> beam = Cantilever(nodes=(5, 3, 3), dof=3)
    >>> cg(beam.matrix(), beam.load(), maxiter=3).reason is StopReason.MAXITER
    True
    >>> print(StopReason.CONVERGED.value)
    converged: the true residual ||b - A x|| meets the tolerance
    """

    CONVERGED = "converged: the true residual ||b - A x|| meets the tolerance"
    MAXITER = "stopped at maxiter before the residual met the tolerance; raise maxiter or use a better preconditioner"
    STOPPED = "stopped on request between two iterations; resume from the state in the result"
    NOT_POSITIVE_DEFINITE = (
        "stopped because p.Ap <= 0 for a search direction p: the matrix is not positive definite; check its sign and its "
        "boundary conditions. A symmetric indefinite matrix, such as one with constraints by multipliers, needs MINRES; a "
        "singular one with a b outside its range may show like this, too: give penstock.solve its null_space"
    )
    PRECONDITIONER_NOT_POSITIVE_DEFINITE = (
        "stopped because r.Mr <= 0 for a residual r: the preconditioner M is not positive definite; check it, or leave it "
        "out"
    )
    NOT_SYMMETRIC = (
        "stopped because the residual hardly falls and the matrix is not symmetric: u.A(Au) differs from Au.Au; conjugate "
        "gradients need a symmetric A, so check its assembly and boundary conditions, or use a solver for general matrices"
    )
    PRECONDITIONER_NOT_SYMMETRIC = (
        "stopped because the residual hardly falls and the preconditioner M is not symmetric: u.M(Mu) differs from Mu.Mu; use a "
        "symmetric one, such as incomplete_cholesky instead of an incomplete LU, or a symmetric smoother"
    )
    NOT_FINITE = (
        "stopped because numbers left the range of their type (NaN, Inf, or squares too large or too small): the operator "
        "or the preconditioner returned them, or the units are extreme; check the matrix for NaN and scale the system"
    )
    INCONSISTENT = (
        "stopped because A maps a search direction to zero while the residual is not zero, or because the residual grew beyond "
        "what any consistent system shows: the matrix is singular and b is outside its range; fix the missing supports, or "
        "give penstock.solve null_space='constants', or the vectors that A maps to zero, which are then removed from b"
    )
    ROUNDING_FLOOR = (
        "stopped because the true residual no longer falls: it has reached the rounding floor u || |A||x| || / ||b|| of "
        "this system, and no solver in this precision gets much lower; loosen rtol above the true residual"
    )
    STAGNATED = (
        "stopped because the true residual no longer falls, and rounding in b - A x is not known to be the cause; the "
        "operator may be less accurate than the tolerance requires (reduced storage?), the preconditioner may belong to another "
        "matrix, or it may lose too much to rounding, as a coarse level does where rows are scaled very differently: then try "
        "jacobi"
    )


#: Reasons that a matrix or a preconditioner gives that is not symmetric positive definite.
BREAKDOWNS = (StopReason.NOT_POSITIVE_DEFINITE, StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE)
#: Reasons of columns, or none, with which a resumed solve goes on where it was.
GOING_ON = (None, StopReason.STOPPED, StopReason.MAXITER)


@dataclass(frozen=True)
class IterationRecord:
    """The argument of ``monitor``, which solvers call whenever they read the residual.

    Parameters
    ----------
    iteration : int
        Counted from 1.
    residual_norm : float
        Recursive ``||r||`` relative to ``||b||``.
    seconds : float
        Time since the solver was called.
    bytes_streamed : int
        Bytes streamed since the solver was called; 0 if the matrix is resident.
    state : Any
        The state to resume from; valid until the monitor returns, so make a copy to keep it.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import cg
    >>> beam = Cantilever(nodes=(5, 3, 3), dof=3)
    >>> seen = []
    >>> result = cg(beam.matrix(), beam.load(), monitor=lambda record: seen.append(record.iteration))
    >>> seen[:3], seen[-1] == result.iterations
    ([1, 2, 3], True)
    """

    iteration: int
    residual_norm: float
    seconds: float
    bytes_streamed: int
    state: Any = field(repr=False, default=None)


@dataclass(frozen=True, repr=False)
class SolveResult:
    """The outcome of a solve; ``x, info = result`` works with SciPy's meaning of ``info``.

    Parameters
    ----------
    x : array, (n,)
        The solution. Of a solve that failed, the iterate with the smallest residual; of one that was merely ended early the last
        one, whose error is the smallest in the norm of A, unless its residual is 100 times the smallest one.
    reason : StopReason
    message : str
        The reason, with the numbers of this solve.
    iterations : int
    residual_norms : list of float
        Recursive ``||r|| / ||b||`` at the start and after each iteration.
    true_residual : float
        ``||b - A x|| / ||b||`` computed from A, b and x at the end (``||b - A x||`` if b is zero), or a bound of it.
    rounding_floor : float or None
        Estimate of the smallest residual in this precision, if it was computed.
    sweeps : int
        Sweeps over the matrix, including those for true residuals; for a streamed matrix also those of the preconditioner.
    bytes_streamed : int
        Bytes moved by these sweeps; 0 for a resident matrix.
    timings : dict
        Seconds: ``total``; on the CPU also ``matrix``, the solver's own products, and for ``cg`` ``preconditioner``, the
        part of it that is not fused with other work on vectors, and ``fewer_threads``, the time with fewer threads than
        usual because other processes used the cores.
    state : Any
        Pass it as ``state=`` to resume.
    decisions : str
        The decisions of :func:`penstock.solve`, for :meth:`explain`.
    bounded : bool
        Whether ``true_residual`` is an upper bound of the residual, as it is where A was replaced by an image of it.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import cg
    >>> beam = Cantilever(nodes=(5, 3, 3), dof=3)
    >>> result = cg(beam.matrix(), beam.load(), rtol=1e-8)
    >>> result.converged, result.reason.name, result.true_residual < 1e-8, result.sweeps > result.iterations
    (True, 'CONVERGED', True, True)
    >>> x, info = result
    >>> x.shape, info
    ((135,), 0)
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
    decisions: str = field(repr=False, default="")
    bounded: bool = field(repr=False, default=False)

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
        """Return a result with its number of iterations and its message."""
        iterations = len(residual_norms) - 1
        message = f"{reason.value} (iteration {iterations}, true relative residual {true_residual:.3g}"
        message += ")" if rounding_floor is None else f", estimated floor {rounding_floor:.3g})"
        return cls(x, reason, message, iterations, residual_norms, true_residual, rounding_floor, **spent)

    @property
    def converged(self) -> bool:
        """Whether the true residual meets the tolerance."""
        return self.reason is StopReason.CONVERGED

    @property
    def columns(self) -> tuple[Self]:
        """The results of all right-hand sides, as of several: this one."""
        return (self,)

    @property
    def info(self) -> int:
        """SciPy's code: 0 if converged, the number of iterations if stopped early, negative for a breakdown."""
        if self.converged:
            return 0
        limits = (StopReason.MAXITER, StopReason.STOPPED, StopReason.ROUNDING_FLOOR, StopReason.STAGNATED)
        return max(self.iterations, 1) if self.reason in limits else -1

    def continued(self, further: SolveResult, scale: float = 1.0) -> Self:
        """Return this result with the iterations and the cost of a further solve, whose residuals are relative to ``scale``."""
        norms = [*self.residual_norms, *(float(scale * norm) for norm in further.residual_norms[1:])]
        return replace(self, iterations=len(norms) - 1, residual_norms=norms, **_cost_of_both(self, further))

    def check(self) -> Self:
        """Return the result itself if it has converged, else raise a NotConvergedError with the message."""
        if not self.converged:
            raise NotConvergedError(self.message, self)
        return self

    def explain(self) -> str:
        """Return a description of the decisions, the outcome and the cost, one fact per line."""
        return _explanation(self, self.message, self.true_residual)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.x, self.info))

    def __getitem__(self, number: int) -> Any:
        """``cg(A, b)[0]`` is x, as of SciPy's."""
        return (self.x, self.info)[number]

    def __repr__(self) -> str:
        reason = self.reason.name.lower().replace("_", " ")
        return (
            f"<SolveResult {reason} after {self.iterations} iterations, true residual {self.true_residual:.3g}, "
            f"{len(self.x):,} unknowns>"
        )

    def _repr_html_(self) -> str:
        return as_table(self.explain())


@dataclass(frozen=True, repr=False)
class BlockSolveResult:
    """The outcome of a solve with several right-hand sides; ``X, info = result`` works too.

    Parameters
    ----------
    x : array, (n, columns)
        The solutions, each as in :class:`SolveResult`.
    columns : tuple of SolveResult
        One for each right-hand side, with the cost of all of them together.
    iterations : int
        Number of iterations of the block.
    sweeps, bytes_streamed, timings
        As in :class:`SolveResult`.
    state : Any
        Pass it as ``state=`` to resume.
    decisions : str
        The decisions of :func:`penstock.solve`, for :meth:`explain`.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import block_cg
    >>> beam = Cantilever(nodes=(5, 3, 3), dof=3)
    >>> result = block_cg(beam.matrix(), beam.load("shear", "axial"))
    >>> result.converged, result.info, result.x.shape, [column.reason.name for column in result.columns]
    (True, 0, (135, 2), ['CONVERGED', 'CONVERGED'])
    """

    x: Array
    columns: tuple[SolveResult, ...]
    iterations: int
    sweeps: int
    bytes_streamed: int
    timings: dict[str, float]
    state: Any = field(repr=False, default=None)
    decisions: str = field(repr=False, default="")

    @property
    def converged(self) -> bool:
        """Whether the true residuals of all columns meet the tolerance."""
        return all(column.converged for column in self.columns)

    @property
    def info(self) -> int:
        """0 if all columns converged, negative if one broke down, else the iterations."""
        codes = [column.info for column in self.columns]
        return min(codes) if min(codes) < 0 else max(codes)

    @property
    def message(self) -> str:
        """How many columns have not converged, and why the first of them stopped."""
        count = len(self.columns)
        failed = [number for number, column in enumerate(self.columns) if not column.converged]
        if not failed:
            return f"all {count} right-hand sides converged"
        first = self.columns[failed[0]]
        return f"{len(failed)} of {count} right-hand sides did not converge; column {failed[0]}: {first.message}"

    def check(self) -> Self:
        """Return the result itself if all columns have converged, else raise a NotConvergedError."""
        if not self.converged:
            raise NotConvergedError(self.message, self)
        return self

    def explain(self) -> str:
        """Return a description of the decisions, the outcome and the cost, one fact per line."""
        converged = sum(column.converged for column in self.columns)
        residual = max(column.true_residual for column in self.columns)
        return _explanation(self, f"{converged} of {len(self.columns)} right-hand sides converged", residual)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.x, self.info))

    def __getitem__(self, number: int) -> Any:
        """As of :class:`SolveResult`."""
        return (self.x, self.info)[number]

    def __repr__(self) -> str:
        converged = sum(column.converged for column in self.columns)
        return (
            f"<BlockSolveResult {converged} of {len(self.columns)} columns converged after {self.iterations} iterations, "
            f"{len(self.x):,} unknowns>"
        )

    def _repr_html_(self) -> str:
        return as_table(self.explain())


def joined_results(
    before: SolveResult | BlockSolveResult, after: SolveResult | BlockSolveResult
) -> SolveResult | BlockSolveResult:
    """Return the result of a solve that went on from another one, with the cost of both.

    Columns have the solution with the smaller residual, unless the later one has converged; ``x`` of a block is the later one's.
    """
    columns = tuple(_joined(one, other) for one, other in zip(before.columns, after.columns, strict=True))
    if isinstance(after, SolveResult):
        return columns[0]
    iterations = before.iterations + after.iterations
    return replace(after, columns=columns, iterations=iterations, **_cost_of_both(before, after))


def _joined(one: SolveResult, other: SolveResult) -> SolveResult:
    """Return the result of one right-hand side whose solve went on."""
    both = one.continued(other)
    if other.converged or (not one.converged and other.true_residual <= one.true_residual):
        message = other.message.replace(f"(iteration {other.iterations},", f"(iteration {both.iterations},", 1)
        return replace(other, message=message, iterations=both.iterations,
                       residual_norms=both.residual_norms, **_cost_of_both(one, other))  # fmt: skip
    # The further solve has made it worse, or was stopped before it came to it.
    reason = one.reason if one.converged else other.reason
    spent = {**_cost_of_both(one, other), "state": other.state}
    return SolveResult.of(one.x, reason, both.residual_norms, one.true_residual, other.rounding_floor, **spent)


def _cost_of_both(one: SolveResult | BlockSolveResult, other: SolveResult | BlockSolveResult) -> dict[str, Any]:
    """Return the entries of a result that describe the cost, summed over two solves."""
    timings = {
        name: one.timings.get(name, 0.0) + other.timings.get(name, 0.0) for name in {**one.timings, **other.timings}
    }
    return {
        "sweeps": one.sweeps + other.sweeps,
        "bytes_streamed": one.bytes_streamed + other.bytes_streamed,
        "timings": timings,
    }


def _explanation(result: SolveResult | BlockSolveResult, outcome: str, residual: float) -> str:
    moved = f", {format_nbytes(result.bytes_streamed)} streamed" if result.bytes_streamed else ""
    facts = {
        "outcome": outcome,
        "residual": f"at most {residual:.3g} relative to b, a bound with A, b and x"
        if any(column.bounded for column in result.columns)
        else f"{residual:.3g} relative to b, computed from A, b and x",
        "cost": f"{result.iterations} iterations, {result.sweeps} sweeps over the matrix{moved}, "
        f"{result.timings.get('total', 0.0):.3g} s",
    }
    fewer = result.timings.get("fewer_threads", 0.0)
    if fewer:
        facts["threads"] = f"fewer than usual for {fewer:.3g} s, because other processes used the cores"
    lines = [f"{title:<11} {text}" for title, text in facts.items()]
    return "\n".join([result.decisions, *lines] if result.decisions else lines)


def iterations_a_digit(result: SolveResult | BlockSolveResult) -> float | None:
    """Return how many iterations the slowest column needed for a decimal digit; None if it fell by less than one."""
    rates = []
    for column in result.columns:
        first, last = column.residual_norms[0], column.residual_norms[-1]
        if 0 < last < 0.1 * first:
            rates.append(column.iterations / math.log10(first / last))
    return max(rates, default=None)


def with_note(result: SolveResult | BlockSolveResult, note: str) -> SolveResult | BlockSolveResult:
    """Return a result with a note to the messages of what has not converged."""
    if isinstance(result, SolveResult):
        return result if result.converged else replace(result, message=result.message + note)
    columns = tuple(
        column if column.converged else replace(column, message=column.message + note) for column in result.columns
    )
    return replace(result, columns=columns)
