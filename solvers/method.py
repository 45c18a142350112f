"""What Krylov methods have in common: how a solve begins, iterates and ends."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import numpy as np

from penstock.host.adaptive_threads import ThreadChoice, adaptive_threads, most_threads
from penstock.host.threads import blas_limited
from penstock.solvers.columns import BestIterate, Columns, ColumnSpace, Numbers
from penstock.solvers.preconditioners import own_methods
from penstock.solvers.problem import LinearProblem
from penstock.solvers.result import BREAKDOWNS, BlockSolveResult, IterationRecord, StopReason
from penstock.solvers.states import SavedState, StateLayout, check_state, histories_of
from penstock.spmv import Array, Operator, VectorSpace
from penstock.spmv.registry import Registry
from penstock.spmv.vectors.noise import noise

# Reading the residual stalls a GPU for about _READ_SECONDS: read so rarely that stalls stay below _READ_SHARE of the time, but
# at least every _PATIENCE_SECONDS, so that users see progress, and after at most MOST_UNREAD iterations.
_READ_SECONDS, _READ_SHARE, _PATIENCE_SECONDS = 25e-6, 0.02, 0.5
#: Largest number of iterations between two reads of the residual.
MOST_UNREAD = 256


class Check(Protocol):
    """Looks at a solve while it iterates."""

    def __init__(self, problem: LinearProblem) -> None: ...

    def look(self, iteration: int, residual_norm: float) -> StopReason | None:
        """Take note of a relative residual; return a reason to stop, if there is one."""

    def of_breakdown(self, reason: StopReason) -> StopReason:
        """Return why a solve ended for this reason, if that is known better."""


class SymmetryCheck:
    """Tests A and M once, when a solve has made some iterations and hardly gets on, or breaks down.

    Conjugate gradients do not notice that an operator is not symmetric: they go on without ever converging.
    """

    # A solve makes progress if the residual halves in this many iterations, on average from the start.
    _ITERATIONS = 64

    def __init__(self, problem: LinearProblem) -> None:
        self._problem = problem
        self._first: float | None = None
        self._wrong: StopReason | None = None
        self._done = False

    def look(self, iteration: int, residual_norm: float) -> StopReason | None:
        """Take note of a relative residual; return a reason to stop if it hardly falls and an operator is not symmetric."""
        if self._first is None:
            self._first = max(residual_norm, 1.0)
        slow = iteration >= self._ITERATIONS and residual_norm > self._first * 0.5 ** (iteration / self._ITERATIONS)
        return self._tested() if slow else None

    def of_breakdown(self, reason: StopReason) -> StopReason:
        """Return why a solve broke down: what is not symmetric shows as what is not positive definite, too."""
        return (self._tested() if reason in (*BREAKDOWNS, StopReason.STAGNATED) else None) or reason

    def _tested(self) -> StopReason | None:
        """Test A and M if that has not been done; return what is wrong."""
        if self._done:
            return self._wrong
        self._done, problem = True, self._problem
        if not self._has_room():
            return None
        problem.products += 2
        if not is_symmetric(problem.A, problem.space):
            self._wrong = StopReason.NOT_SYMMETRIC
        elif problem.M is not None and not is_symmetric(problem.M, problem.space):
            self._wrong = StopReason.PRECONDITIONER_NOT_SYMMETRIC
        return self._wrong

    def _has_room(self) -> bool:
        """Return whether every rank has memory for three vectors more; the solve itself has what it needs."""
        room, A = 1.0, self._problem.A
        with A.device.current():
            try:
                A.device.xp.empty((3, A.shape[0]), dtype=A.dtype)
            except MemoryError:
                room = 0.0
        return self._problem.space.communicator.largest(-room) < 0


def is_symmetric(A: Operator, space: VectorSpace) -> bool:
    """Return whether ``u . A (A u)`` equals ``(A u) . (A u)`` for a vector u of random numbers, at the cost of two products.

    For ``A = H + S``, H symmetric and S skew, they differ by about ``|S u|^2``, so a skew part of a thousandth of A or more is
    detected; rounding, also in float32, and sums in another order stay far below. Collective on ranks; a streamed A sweeps in
    the same direction afterwards.
    """
    with A.device.current():
        u = noise(A.device, space.communicator.before(A.shape[0]), A.shape[0]).astype(A.dtype)
        image = A.apply(u)
        square = space.dot(image, image)
        return not abs(space.dot(u, A.apply(image)) - square) > 1e-6 * square


class Method(ABC):
    """A Krylov method for a :class:`LinearProblem`: a subclass says how it starts and iterates, this class all the rest.

    A subclass is declared as ``class ConjugateGradients(Method, name="cg")``, which registers it in :data:`SOLVERS`. Its state
    is a dataclass with at least ``x``, ``iteration`` and ``residual_norms``, a list for one right-hand side and a list of lists
    for several, and for several ``reasons``; checkpoints hold it if it is a :class:`SavedState`. Where it has a method
    ``check``, that is called before a solve resumes from it.

    Parameters
    ----------
    problem : LinearProblem
    single : bool
        Whether a block of one column is summed as a vector is.

    Attributes
    ----------
    columns : Columns
        What is known of each right-hand side.
    space : ColumnSpace
        Inner products of their vectors.

    Examples
    --------
    >>> from penstock.solvers import SOLVERS, Method
    >>> method = SOLVERS["cg"]
    >>> issubclass(method, Method), method.name, method.State.__name__
    (True, 'cg', 'CgState')
    """

    name: ClassVar[str]
    State: ClassVar[type]
    #: What is looked at while it iterates, made with the problem: a check may end a solve, or say why one broke down.
    checks: ClassVar[tuple[type[Check], ...]] = (SymmetryCheck,)
    #: The iterate with the smallest residual so far.
    best: BestIterate
    #: Seconds of the last call of ``advance`` in which the host only started work for a GPU.
    starting_seconds: float = 0.0
    #: Number of iterations of another method from which it goes on, if it does.
    _taken_over: int = 0

    def __init_subclass__(cls, *, name: str, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.name = name
        SOLVERS.add(name, cls)

    def __init__(self, problem: LinearProblem, *, single: bool = False) -> None:
        self.problem = problem
        self.space = ColumnSpace(problem.b, problem.space.communicator, single=single)
        problem.set_norms(self.space.norms(problem.b))
        self.columns = Columns(problem)

    @abstractmethod
    def start(self, x0: Array | None) -> Any:
        """Return the state before the first iteration."""

    @abstractmethod
    def advance(self, state: Any, iterations: int) -> StopReason | None:
        """Iterate; return why the columns that still run cannot go on, whose true residuals are computed then."""

    def taken(self, state: Any) -> Any:
        """Return a state whose arrays may be on the host, as those of a checkpoint are, on the device of the matrix."""
        return state.on_device(self.problem.A.device) if isinstance(state, SavedState) else state

    def resume(self, state: Any) -> Any:
        """Resume from the state of an earlier call."""
        return state

    def scratch(self) -> Array:
        """Return memory for a residual that no iteration needs."""
        return self.problem.A.device.xp.empty_like(self.problem.b)

    def true_norms(self, state: Any) -> Numbers:
        """Return ``||b - A x||`` of every column, at the cost of a product."""
        return self.space.norms(self.problem.true_residual(state.x, self.scratch()))

    def end(self, state: Any, reason: StopReason) -> None:
        """End the columns that still run, with their true residuals."""
        self.columns.stop(reason, self.true_norms(state))

    def finish(self, state: Any) -> None:
        """Give back what the method has borrowed, here nothing; the state keeps its vectors."""
        return

    def has_lost_accuracy(self, state: Any) -> bool:
        """Return whether the solve ended for a reason that plain conjugate gradients with the same M may not meet."""
        return False

    def solve(
        self,
        x0: Array | None,
        state: Any,
        *,
        shape: tuple[int, ...] | None = None,
        plain: Callable[[LinearProblem], Method] | None = None,
        **limits: Any,
    ) -> Any:
        """Return the result of a solve from a guess or a state, as ``run`` and ``result`` say.

        ``plain`` makes the method that goes on where this one has lost accuracy.
        """
        method, state = self, self.begin(x0, state)
        self.run(state, **limits)
        if plain is not None and self.has_lost_accuracy(state):
            method, state = self._handed_over(state, plain, limits)
        return method.result(state, shape)

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
            if getattr(state, "refined", False):
                x = self.problem.A.device.asarray(state.x)
                state = self._start_at(x, state.iteration, histories_of(state))
            else:
                state = self.taken(state)
                self.columns.share(state)
                state = self.resume(state)
        state.system = mark
        return state

    def first_residual(self, x0: Array | None) -> tuple[Array, Array]:
        """Return the first iterate, zero without a guess and in columns that need no solve, and its residual."""
        problem, aside = self.problem, self.columns.aside
        x = problem.A.device.xp.zeros_like(problem.b) if x0 is None else x0.copy()
        for column in aside:
            problem.column(x, column)[...] = 0
        r = problem.b.copy()
        if x0 is not None and len(aside) < problem.columns:
            problem.product(x, r, alpha=-1.0, beta=1.0)
        return x, r

    def run(
        self,
        state: Any,
        *,
        maxiter: int | None = None,
        callback: Callable[[Array], object] | None = None,
        monitor: Callable[[IterationRecord], object] | None = None,
        check_every: int | None = 1,
    ) -> None:
        """Iterate until the method ends, iterations run out, or the monitor requests a stop.

        ``check_every`` is the number of iterations between two looks; None chooses it by the time of an iteration on a GPU.
        """
        limit = 10 * self.problem.n if maxiter is None else int(maxiter)
        self.problem.space.communicator.check_same(maxiter=limit, iteration=state.iteration)
        with blas_limited(most_threads()), adaptive_threads() as choice:
            self._iterate(state, limit, check_every, callback, monitor, choice)
        self.problem.fewer_threads_seconds = choice.fewer_seconds

    def _iterate(
        self,
        state: Any,
        limit: int,
        check_every: int | None,
        callback: Callable[[Array], object] | None,
        monitor: Callable[[IterationRecord], object] | None,
        choice: ThreadChoice,
    ) -> None:
        columns, looks = self.columns, [check(self.problem) for check in self.checks]
        columns.share(state)
        self.best = BestIterate(state.x, columns.last)
        adaptive, wanted = check_every is None and self.problem.A.device.kind == "cuda", check_every or 1
        every, _ = self._agreed(wanted, False)
        while columns.running:
            if state.iteration >= limit:
                self.end(state, StopReason.MAXITER)
                break
            before, began = state.iteration, time.perf_counter()
            count = min(every, limit - before)
            reason = self._advance_observed(state, count, choice)
            self.best.note(state.x, columns.last)
            if adaptive:
                wanted = self._next_look(time.perf_counter() - began, count)
            stops = False
            if state.iteration > before:  # a breakdown does not count as an iteration
                if callback is not None:
                    callback(state.x)
                stops = monitor is not None and bool(monitor(self._record(state)))
            every, stops = self._agreed(wanted, stops)
            if reason is None and columns.running:
                ends = [look.look(state.iteration, columns.residual_norm) for look in looks]
                reason = next(filter(None, ends), None)
            if stops:
                reason = reason or StopReason.STOPPED
            if reason is not None and columns.running:
                self.end(state, _explained(reason, looks))
        columns.reasons[:] = [None if reason is None else _explained(reason, looks) for reason in columns.reasons]

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

    def _next_look(self, seconds: float, iterations: int) -> int:
        """Return the number of iterations until the next look; the last ones and the look took some seconds.

        Iterations started beyond the expected end are wasted.
        """
        each = seconds / iterations
        wanted = (_READ_SECONDS + self.starting_seconds / iterations) / (_READ_SHARE * each)
        left = max(1.0, self.columns.iterations_left / 3)
        return math.ceil(min(wanted, MOST_UNREAD, max(1.0, _PATIENCE_SECONDS / each), left))

    def _agreed(self, every: int, stops: bool) -> tuple[int, bool]:
        """Return the first rank's number of iterations until the next look, and whether any rank wants to stop.

        Clocks and monitors of ranks differ, but all must start the same iterations.
        """
        communicator = self.problem.space.communicator
        totals = communicator.total(np.array([float(every) if communicator.rank == 0 else 0.0, float(stops)]))
        return int(totals[0]), bool(totals[1])

    def _record(self, state: Any) -> IterationRecord:
        seconds, streamed = time.perf_counter() - self.problem.began, self.problem.bytes_streamed
        return IterationRecord(state.iteration, self.columns.residual_norm, seconds, streamed, state)

    def _handed_over(
        self, state: Any, plain: Callable[[LinearProblem], Method], limits: dict[str, Any]
    ) -> tuple[Method, Any]:
        """Go on with plain conjugate gradients; return the method that ended and its state.

        Without memory for their vectors besides those of this method, its own result stands.
        """
        try:
            self.finish(state)
            other = plain(self.problem)
            other_state = other._take_over(self, state)
            other.run(other_state, **limits)
        except MemoryError:
            if self.problem.space.communicator.size > 1:  # the other ranks have gone on
                raise
            return self, state
        return other, other_state

    def _take_over(self, method: Method, state: Any) -> Any:
        """Go on from another method: from its solutions, and the best iterates of columns without one; iterations count on."""
        x, histories = method.best.x, method.columns.histories
        self._taken_over = len(histories[0]) - 1
        for column, reason in enumerate(method.columns.reasons):
            if reason is StopReason.CONVERGED:
                self.problem.column(x, column)[...] = self.problem.column(state.x, column)
        own = self._start_at(x, state.iteration, histories)
        own.system = state.system
        return own

    def _start_at(self, x: Array, iteration: int, histories: list[list[float]]) -> Any:
        """Start from an iterate, and count on."""
        own = self.start(x)
        own.iteration = iteration
        for before, after in zip(histories, self.columns.histories, strict=True):
            after[:0] = before[:-1]
        return own

    def result(self, state: Any, shape: tuple[int, ...] | None = None, note: str = "") -> Any:
        """Return a :class:`BlockSolveResult`, or the :class:`SolveResult` of the one column with x in a shape."""
        problem, columns = self.problem, self.columns
        self.finish(state)
        unknown = np.isnan(columns.residuals)
        if unknown.any():
            columns.residuals[unknown] = self.true_norms(state)[unknown]
        x = columns.choose(state.x, self.best)
        results, spent = [], problem.spent()
        for column, (reason, history) in enumerate(zip(columns.reasons, columns.histories, strict=True)):
            assert reason is not None, "the column has ended"
            own, residual = problem.column(x, column), float(columns.residuals[column])
            one = problem.column_result(own, reason, history, residual, column, **spent)
            results.append(replace(one, message=one.message + note))
        if shape is None:
            return BlockSolveResult(x, tuple(results), state.iteration, **spent, state=state)
        return replace(results[0], x=x.reshape(shape), state=state)


#: All methods by name; packages add theirs in the entry point group ``penstock.solvers``.
SOLVERS: Registry[str, type[Method]] = Registry("solver", "penstock.solvers")


def _explained(reason: StopReason, checks: list[Check]) -> StopReason:
    """Return why a solve ended, as the checks of its method know better."""
    for check in checks:
        reason = check.of_breakdown(reason)
    return reason


def own_method(problem: LinearProblem) -> Method | None:
    """Return the method that shares products with a preconditioner made of them, or None."""
    names = own_methods(problem.M, problem.A)
    return None if names is None else SOLVERS[names[problem.b.ndim - 1]](problem)
