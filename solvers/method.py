"""What Krylov methods have in common: how a solve begins, iterates and ends."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import numpy as np

from penstock.host.adaptive_threads import ThreadChoice, adaptive_threads, most_threads
from penstock.host.threads import blas_limited
from penstock.solvers.best_iterate import BestIterate
from penstock.solvers.problem import LinearProblem
from penstock.solvers.residual_checks import ResidualChecks
from penstock.solvers.result import BlockSolveResult, IterationRecord, StopReason
from penstock.solvers.states import StateLayout, check_state, direction_kept
from penstock.solvers.symmetry_check import SymmetryCheck
from penstock.spmv import Array
from penstock.spmv.registry import Registry


class Check(Protocol):
    """Looks at a solve while it iterates."""

    def __init__(self, problem: LinearProblem) -> None: ...

    def look(self, iteration: int, residual_norm: float) -> StopReason | None:
        """Take note of a relative residual; return a reason to stop, if there is one."""

    def of_breakdown(self, reason: StopReason) -> StopReason:
        """Return why a solve ended for this reason, if that is known better."""


class Method(ABC):
    """A Krylov method for a :class:`LinearProblem`: how it starts, iterates and ends.

    A subclass is declared as ``class ConjugateGradients(Method, name="cg")``, which registers it in :data:`SOLVERS`. Its state
    is a dataclass with at least ``x``, ``iteration`` and ``residual_norms``; checkpoints hold it if it is a :class:`SavedState`.
    Where it has a method ``check``, that is called before a solve resumes from it.

    Examples
    --------
    >>> from penstock.solvers import SOLVERS, Method
    >>> method = SOLVERS["cg"]
    >>> issubclass(method, Method), method.name, method.State.__name__
    (True, 'cg', 'CgState')
    """

    name: ClassVar[str]
    State: ClassVar[type]
    problem: LinearProblem
    #: The reason for stopping and the final norm of the true residual, for methods with one right-hand side.
    reason: StopReason | None = None
    residual: float = math.nan
    #: The iterate with the smallest residual so far.
    best: BestIterate
    #: Whether it goes on from another method.
    _taken_over: bool = False
    #: What is looked at while it iterates, made with the problem: a check may end a solve, or say why one broke down.
    checks: ClassVar[tuple[type[Check], ...]] = (SymmetryCheck,)
    #: Seconds of the last call of ``advance`` in which the host only started work for a GPU.
    starting_seconds: float = 0.0

    def __init_subclass__(cls, *, name: str, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.name = name
        SOLVERS.add(name, cls)

    @abstractmethod
    def start(self, x0: Array | None) -> Any:
        """Return the state before the first iteration."""

    @abstractmethod
    def advance(self, state: Any, iterations: int) -> StopReason | None:
        """Iterate; return the reason if the solve cannot continue."""

    def resume(self, state: Any) -> Any:
        """Resume from the state of an earlier call."""
        return state

    def running(self, state: Any) -> bool:
        """Return whether any right-hand side is still being solved."""
        return self.reason is None

    def end(self, state: Any, reason: StopReason) -> None:
        """Stop the right-hand sides that still run and compute their true residuals."""
        scratch = self.problem.A.device.xp.empty_like(self.problem.b)
        self.residual = self.problem.space.norm(self.problem.true_residual(state.x, scratch))
        self.reason = self.problem.verdict(reason, self.residual, state.residual_norms)

    def residual_norm(self, state: Any) -> float:
        """Return the relative residual to report: the largest of the columns that still run."""
        return float(state.residual_norms[-1])

    def last_residuals(self, state: Any) -> list[float]:
        """Return the last relative residual of every column."""
        norms = state.residual_norms
        return [of[-1] for of in norms] if isinstance(norms[0], list) else [norms[-1]]

    def returned(self, x: Array, reason: StopReason, residual: float) -> tuple[Array, StopReason, float]:
        """Return x, the reason for stopping and ``||b - A x||``: those of the best iterate where the last one is worse."""
        problem, best = self.problem, self.best
        if problem.out_of_range or not best.is_better(reason, problem.relative(residual)):
            return x, reason, residual
        with direction_kept(problem.A):
            norm = problem.space.norm(problem.true_residual(best.x, problem.A.device.xp.empty_like(x)))
        if not norm >= residual:
            x, reason, residual = best.x, _after(problem, reason, norm), norm
        if residual > problem.absolute(1.0) or not math.isfinite(residual):  # x = 0 is better
            return problem.A.device.xp.zeros_like(x), reason, problem.absolute(1.0)
        return x, reason, residual

    def block_result(
        self, state: Any, reasons: list[StopReason], residuals: Sequence[float], note: str = ""
    ) -> BlockSolveResult:
        """Return the result of a block of right-hand sides, each with its reason for stopping and ``||b - A x||``."""
        problem, best, x = self.problem, self.best, state.x
        reasons, residuals = list(reasons), list(residuals)
        better = [
            column
            for column in set(range(problem.columns)).difference(problem.out_of_range)
            if best.is_better(reasons[column], problem.relative(residuals[column], column), column)
        ]
        if better:
            x = x.copy()  # the state goes on from the last iterates
            with direction_kept(problem.A):
                true_residuals = problem.true_residual(best.x, problem.A.device.xp.empty_like(x))
            for column in better:
                norm = problem.space.norm(problem.A.device.xp.ascontiguousarray(true_residuals[:, column]))
                if not norm >= residuals[column]:
                    x[:, column] = best.x[:, column]
                    reasons[column], residuals[column] = _after(problem, reasons[column], norm, column), norm
                if residuals[column] > problem.absolute(1.0, column) or not math.isfinite(residuals[column]):
                    x[:, column], residuals[column] = 0, problem.absolute(1.0, column)  # which is better
        spent, columns = problem.spent(matrix=problem.matrix_seconds), []
        for column, (reason, residual) in enumerate(zip(reasons, residuals, strict=True)):
            history = state.residual_norms[column]
            one = problem.column_result(x[:, column], reason, history, residual, column, **spent)
            columns.append(replace(one, message=one.message + note))
        return BlockSolveResult(x, tuple(columns), state.iteration, **spent, state=state)

    def iterations_left(self, state: Any) -> float:
        """Return the expected number of further iterations; infinite if unknown."""
        return math.inf

    def begin(self, x0: Array | None, state: Any) -> Any:
        """Start, or resume from a state after checking that it belongs to this method and system."""
        A, mark = self.problem.A, self.problem.mark
        if state is None:
            state = self.start(x0)
        else:
            with self.problem.space.communicator.together():
                check_state(state, self.State, StateLayout(self.problem.b.shape, A.dtype, A.device))
                if getattr(state, "system", None) is not None:
                    state.system.check_same(mark, self.problem.unit)
            state = self.resume(state)
        state.system = mark
        return state

    def take_over(self, method: Method, state: Any) -> Any:
        """Go on from another method: from its solutions, and the best iterates of columns without one; iterations count on."""
        self._taken_over = True
        reasons, x = getattr(state, "reasons", [method.reason]), method.best.x
        for column, reason in enumerate(reasons):
            if reason is StopReason.CONVERGED:
                x.reshape(len(x), -1)[:, column] = state.x.reshape(len(x), -1)[:, column]
        own = self.start(x)
        own.iteration, before, after = state.iteration, state.residual_norms, own.residual_norms
        if isinstance(before[0], list):
            own.residual_norms = [old[:-1] + new for old, new in zip(before, after, strict=True)]
        else:
            own.residual_norms = before[:-1] + after
        own.system = state.system
        return own

    def has_lost_accuracy(self, state: Any) -> bool:
        """Return whether the solve ended for a reason that plain conjugate gradients with the same M may not meet."""
        return False

    def finish(self, state: Any) -> None:
        """Give back what the method has borrowed, here nothing; the state keeps its vectors."""
        return

    def run(
        self,
        state: Any,
        *,
        maxiter: int | None = None,
        callback: Callable[[Array], object] | None = None,
        monitor: Callable[[IterationRecord], object] | None = None,
        checks: ResidualChecks | None = None,
    ) -> None:
        """Iterate until the method ends, iterations run out, or the monitor requests a stop."""
        limit, checks = 10 * self.problem.n if maxiter is None else int(maxiter), checks or ResidualChecks()
        self.problem.space.communicator.check_same(maxiter=limit, iteration=state.iteration)
        every, _ = self._agreed(checks.every, False)
        with blas_limited(most_threads()), adaptive_threads() as choice:
            self._iterate(state, limit, every, callback, monitor, checks, choice)
        self.problem.fewer_threads_seconds = choice.fewer_seconds

    def _iterate(
        self,
        state: Any,
        limit: int,
        every: int,
        callback: Callable[[Array], object] | None,
        monitor: Callable[[IterationRecord], object] | None,
        checks: ResidualChecks,
        choice: ThreadChoice,
    ) -> None:
        looks: list[Check] = [check(self.problem) for check in self.checks]
        self.best = BestIterate(state.x, self.last_residuals(state))
        while self.running(state):
            if state.iteration >= limit:
                self.end(state, StopReason.MAXITER)
                return
            before, began = state.iteration, time.perf_counter()
            count = min(every, limit - before)
            reason = self._advance_observed(state, count, choice)
            self.best.note(state.x, self.last_residuals(state))
            checks.adapt(time.perf_counter() - began, self.starting_seconds, count, self.iterations_left(state))
            stops = False
            if state.iteration > before:  # a breakdown does not count as an iteration
                if callback is not None:
                    callback(state.x)
                stops = monitor is not None and bool(monitor(self._record(state)))
            every, stops = self._agreed(checks.every, stops)
            if reason is None and self.running(state):
                ends = [look.look(state.iteration, self.residual_norm(state)) for look in looks]
                reason = next(filter(None, ends), None)
            if stops:
                reason = reason or StopReason.STOPPED
            if reason is not None and self.running(state):
                self.end(state, _explained(reason, looks))
        if self.reason is not None:
            self.reason = _explained(self.reason, looks)

    def _advance_observed(self, state: Any, count: int, choice: ThreadChoice) -> StopReason | None:
        """Iterate, and choose the number of threads for the next iterations."""
        problem, before = self.problem, state.iteration
        began, waited = time.perf_counter(), problem.waited_seconds
        with choice.applied(), np.errstate(over="ignore", invalid="ignore"):  # overflow is reported as NOT_FINITE
            reason = self.advance(state, count)
        # On a GPU threads only start work, and ranks are slowed by each other.
        if problem.A.device.kind == "cpu" and problem.space.communicator.size == 1:
            seconds = time.perf_counter() - began - max(0.0, problem.waited_seconds - waited)
            choice.observe(state.iteration - before, seconds)
        return reason

    def _agreed(self, every: int, stops: bool) -> tuple[int, bool]:
        """Return the first rank's number of iterations until the next look, and whether any rank wants to stop.

        Clocks and monitors of ranks differ, but all must start the same iterations.
        """
        communicator = self.problem.space.communicator
        totals = communicator.total(np.array([float(every) if communicator.rank == 0 else 0.0, float(stops)]))
        return int(totals[0]), bool(totals[1])

    def _record(self, state: Any) -> IterationRecord:
        seconds = time.perf_counter() - self.problem.began
        return IterationRecord(state.iteration, self.residual_norm(state), seconds, self.problem.bytes_streamed, state)


class HasColumns:
    """What methods for several right-hand sides share, whose states have ``reasons`` and ``residual_norms`` of each column.

    It stands before :class:`Method` among the bases.
    """

    @staticmethod
    def running_columns(state: Any) -> list[int]:
        """Return the columns that are still being solved."""
        return [column for column, reason in enumerate(state.reasons) if reason is None]

    def running(self, state: Any) -> bool:
        """Return whether any column is still being solved."""
        return None in state.reasons

    def residual_norm(self, state: Any) -> float:
        """Return the largest relative residual of the running columns, or of all if none runs."""
        running: list[float] = [state.residual_norms[column][-1] for column in self.running_columns(state)]
        return max(running, default=max(norms[-1] for norms in state.residual_norms))


#: All methods by name; packages add theirs in the entry point group ``penstock.solvers``.
SOLVERS: Registry[str, type[Method]] = Registry("solver", "penstock.solvers")


def _explained(reason: StopReason, checks: list[Check]) -> StopReason:
    """Return why a solve ended, as the checks of its method know better."""
    for check in checks:
        reason = check.of_breakdown(reason)
    return reason


def method_of(problem: LinearProblem, attribute: str) -> Callable[[LinearProblem], Any] | None:
    """Return the method that a preconditioner made of products with this same A brings along under a name, or None."""
    own: Callable[[LinearProblem], Any] | None = getattr(problem.M, attribute, None)
    return own if getattr(problem.M, "A", None) is problem.A else None


def _after(problem: LinearProblem, reason: StopReason, residual: float, column: int = 0) -> StopReason:
    """Return the reason of a solve that returns its best iterate, which may meet the tolerance after all."""
    met = residual <= problem.tolerances[column] and reason is not StopReason.NOT_FINITE
    return StopReason.CONVERGED if met else reason


def handed_over(method: Method, state: Any, plain: Callable[[], Method], **limits: Any) -> tuple[Method, Any]:
    """Go on with plain conjugate gradients where a method has lost accuracy; return the method that ended and its state.

    Without memory for their vectors besides those of the method, the method's own result stands.
    """
    try:
        method.finish(state)
        other = plain()
        other_state = other.take_over(method, state)
        other.run(other_state, **limits)
    except MemoryError:
        if method.problem.space.communicator.size > 1:  # the other ranks have gone on
            raise
        return method, state
    return other, other_state
