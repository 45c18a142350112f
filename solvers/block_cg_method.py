"""Controls block conjugate gradients around the iteration: active columns, restarts, and the end of each column."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from penstock.solvers.method import HasColumns, Method
from penstock.solvers.problem import LinearProblem
from penstock.solvers.result import GOING_ON, BlockSolveResult, StopReason
from penstock.solvers.saved_state import SavedState
from penstock.solvers.states import StateLayout, check_counts, check_history, check_numbers, direction_kept
from penstock.spmv import Array, InputError

Matrix = np.ndarray[Any, Any]


@dataclass
class BlockCgState(SavedState):
    """Everything that the next iteration needs; a checkpoint is a saved state.

    Parameters
    ----------
    x : array, (n, columns)
        Iterates.
    w, p : array, (n, k)
        The block of residuals before it is made orthonormal, and the search directions; k falls as columns converge.
    t : float64 array on the host, (k, k)
        ``Q = W T``.
    phi : float64 array on the host, (k, active columns)
        ``R = Q phi``.
    active : list of int
        Columns that the block still iterates on.
    iteration : int
    reasons : list of StopReason or None
        For each column; None until it has ended and its true residual has been tested.
    last_true_residuals : list of float
        ``||b - A x||`` of each column when it was last computed to test convergence, or when the column ended; infinite
        before.
    residual_norms : list of list of float
        Relative norms of each column, as in the result.
    s : array, (n, k), optional
        ``A P``, if the preconditioner computes it.
    system : SystemMark, optional
        What the state knows of its system.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import block_cg
    >>> beam = Cantilever(nodes=(5, 3, 3), dof=3)
    >>> A, B = beam.matrix(), beam.load("shear", "axial")
    >>> state = block_cg(A, B, maxiter=5).state
    >>> state.iteration, state.active, block_cg(A, B, state=state).converged
    (5, [0, 1], True)
    """

    vectors: ClassVar[tuple[str, ...]] = ("x", "w", "p", "s")
    host_arrays: ClassVar[tuple[str, ...]] = ("t", "phi")

    x: Array
    w: Array
    p: Array
    t: Matrix
    phi: Matrix
    active: list[int]
    iteration: int
    reasons: list[StopReason | None]
    last_true_residuals: list[float]
    residual_norms: list[list[float]] = field(default_factory=list)
    s: Array | None = None

    def check(self, layout: StateLayout) -> None:
        """Raise an InputError if arrays or numbers do not fit the layout, or cannot be; the message names the first."""
        layout.check("x", self.x)
        for name in ("w", "p", *(() if self.s is None else ("s",))):
            layout.check(name, getattr(self, name), columns=False)
        check_counts(iteration=self.iteration)
        tested = {f"last_true_residuals[{column}]": norm for column, norm in enumerate(self.last_true_residuals)}
        check_numbers(tested, finite=False)
        for norms in self.residual_norms:
            check_history(norms)
        columns = layout.shape[1]
        lengths = {len(self.reasons), len(self.last_true_residuals), len(self.residual_norms)}
        numbers = all(type(column) is int for column in self.active)  # booleans would select
        within = numbers and self.active == sorted(set(self.active)) and all(0 <= of < columns for of in self.active)
        block = bool(self.active) and self._block_fits(columns)
        if lengths != {columns} or not within or (self.goes_on and not block):
            raise InputError("the parts of the state do not fit each other; it is damaged")

    def _block_fits(self, columns: int) -> bool:
        """Return whether the coefficients are matrices of the sizes of the block."""
        w, p, s = (0 if of is None else of.shape[1] for of in (self.w, self.p, self.s))
        shapes = (np.shape(self.t), np.shape(self.phi)) == ((w, p), (p, len(self.active)))
        typed = shapes and all(getattr(of, "dtype", None) == np.float64 for of in (self.t, self.phi))
        finite = typed and bool(np.isfinite(self.t).all() and np.isfinite(self.phi).all())
        return finite and p <= columns and (self.s is None or s == p)

    @property
    def goes_on(self) -> bool:
        """Whether a solve would go on from the block, because a column has not ended or ran out of iterations."""
        return any(reason in GOING_ON for reason in self.reasons)


class Recurrence(Protocol):
    """The iteration and the memory of its blocks."""

    @property
    def with_product(self) -> object:
        """The preconditioner if it also computes products with A, else None."""

    def norms(self, block: Array) -> Matrix:
        """Return the norms of the columns of a block."""

    def view(self, name: str, columns: int) -> Array:
        """Return the memory of a block as a block with this number of columns."""

    def true_residuals(self, x: Array) -> Array:
        """Return ``B - A X`` in scratch memory."""

    def restart(self, state: BlockCgState, residuals: Array) -> StopReason | None:
        """Restart with the residuals of the active columns."""

    def iterate(self, state: BlockCgState) -> StopReason | None:
        """Do one iteration; return the reason if the block cannot continue."""


class BlockConjugateGradients(HasColumns, Method, name="block_cg"):
    """Block conjugate gradients for one problem with right-hand sides ``(n, columns)``."""

    State: ClassVar[type] = BlockCgState

    def __init__(self, problem: LinearProblem, recurrence: Callable[[LinearProblem], Recurrence]) -> None:
        self.problem = problem
        self._recurrence = recurrence(problem)
        problem.set_norms(self._recurrence.norms(problem.b))
        self.final_residuals: dict[int, float] = {}

    def start(self, x0: Array | None) -> BlockCgState:
        """Compute the first residuals and search directions."""
        problem, count = self.problem, self.problem.columns
        x = problem.A.device.xp.zeros_like(problem.b) if x0 is None else x0.copy()
        none = self._recurrence.view("p", 0)
        state = BlockCgState(x, none, none, np.eye(0), np.eye(0), [], 0, [None] * count, [math.inf] * count)
        for columns, reason in ((problem.empty, StopReason.CONVERGED), (problem.out_of_range, StopReason.NOT_FINITE)):
            for column in columns:
                self._finish(state, column, reason, float(problem.b_norms[column]))
                x[:, column] = 0
        residuals, norms = problem.b, problem.b_norms
        if x0 is not None:
            residuals = self._recurrence.true_residuals(state.x)
            norms = self._recurrence.norms(residuals)
        state.residual_norms = [[problem.relative(norms[column], column)] for column in range(count)]
        for column in self.running_columns(state):
            norm = float(norms[column])
            if not math.isfinite(norm):
                self._finish(state, column, StopReason.NOT_FINITE, norm)
            elif norm <= problem.tolerances[column]:
                self._finish(state, column, StopReason.CONVERGED, norm)
        self._restart(state, residuals)
        return state

    def _finish(self, state: BlockCgState, column: int, reason: StopReason, norm: float) -> None:
        """Set the reason and the true residual of a column that has ended; a resumed call need not compute it again."""
        state.reasons[column] = reason
        state.last_true_residuals[column] = self.final_residuals[column] = norm

    def resume(self, state: BlockCgState) -> BlockCgState:
        """Resume from a state: its blocks are copied to the memory of the recurrence."""
        recurrence, problem = self._recurrence, self.problem
        residuals = self._checked_residuals(state)
        computes_image = recurrence.with_product is not None
        for name in ("w", "p", *(["s"] if computes_image and state.s is not None else [])):
            block = getattr(state, name)
            view = recurrence.view(name, block.shape[1])
            view[...] = block
            setattr(state, name, view)
        if not computes_image:
            state.s = None
        elif state.s is None:  # the state is from a solve with another preconditioner
            state.s = recurrence.view("s", state.p.shape[1])
            problem.product(state.p, state.s)
        for column, reason in enumerate(state.reasons):
            if reason in GOING_ON:
                state.reasons[column] = None
        ended = [column for column, reason in enumerate(state.reasons) if reason is not None]
        before = len(self.running_columns(state))
        for column in ended:  # the tolerance may differ from that of the earlier call
            self.final_residuals[column] = norm = residuals[column]
            met, reason = norm <= problem.tolerances[column], state.reasons[column]
            if met and reason in (StopReason.ROUNDING_FLOOR, StopReason.STAGNATED):
                state.reasons[column] = StopReason.CONVERGED
            elif reason is StopReason.CONVERGED and not met:
                state.reasons[column] = None
        if len(self.running_columns(state)) > before:
            self._restart(state, recurrence.true_residuals(state.x))
        return state

    def _checked_residuals(self, state: BlockCgState) -> list[float]:
        """Return ``||b - A x||`` of all columns, which must be those that the state records but for rounding."""
        problem, checked = self.problem, []
        with direction_kept(problem.A):
            norms = self._recurrence.norms(self._recurrence.true_residuals(state.x))
        for column, history in enumerate(state.residual_norms):
            norm, recorded = float(norms[column]), state.last_true_residuals[column]
            if state.reasons[column] in GOING_ON:
                recorded = problem.absolute(history[-1], column)
            if column not in problem.out_of_range:
                problem.check_recorded(abs(norm - recorded), history, state.x, column)
            # Those that only the order of sums makes differ do not decide anything again.
            checked.append(recorded if abs(norm - recorded) <= 1e-6 * recorded else norm)
        return checked

    def _restart(self, state: BlockCgState, residuals: Array) -> None:
        """Restart with the residuals ``B - A X`` of all pending columns."""
        state.active = self.running_columns(state)
        if not state.active:
            return
        for column, reason in enumerate(state.reasons):
            if reason is StopReason.NOT_FINITE and residuals is not self.problem.b:
                residuals[:, column] = 0  # NaN times zero would be NaN in every other column
        fault = self._recurrence.restart(state, residuals)
        if fault is not None:
            self._stop(state, state.active, fault)

    def advance(self, state: BlockCgState, iterations: int) -> StopReason | None:
        """Iterate; when no column is active, test the true residuals."""
        for _ in range(iterations):
            reason = self._recurrence.iterate(state)
            if reason is not None:
                return reason
            if not state.active:
                self._test(state)
                break
        return None

    def _test(self, state: BlockCgState) -> None:
        """Compute the true residuals when the recursive ones are small; restart from those that are not small."""
        residuals = self._recurrence.true_residuals(state.x)
        norms = self._recurrence.norms(residuals)
        for column in self.running_columns(state):
            previous, norm = state.last_true_residuals[column], float(norms[column])
            state.last_true_residuals[column] = norm
            if norm <= self.problem.tolerances[column]:
                self._finish(state, column, StopReason.CONVERGED, norm)
            elif not math.isfinite(norm):
                self._finish(state, column, StopReason.NOT_FINITE, norm)
            elif self.problem.is_useless(norm, previous):
                self._finish(state, column, self.problem.stagnation(state.x, norm, column), norm)
        self._restart(state, residuals)

    def end(self, state: BlockCgState, reason: StopReason) -> None:
        """Compute the true residuals of the running columns and stop them."""
        self._stop(state, self.running_columns(state), reason)

    def _stop(self, state: BlockCgState, columns: list[int], reason: StopReason) -> None:
        norms = self._recurrence.norms(self._recurrence.true_residuals(state.x))
        breakdown = reason in (StopReason.NOT_POSITIVE_DEFINITE, StopReason.INCONSISTENT)
        for column in columns:
            tested, norm = math.isfinite(state.last_true_residuals[column]), float(norms[column])
            verdict = self.problem.verdict(reason, norm, state.residual_norms[column], column)
            if verdict is not StopReason.CONVERGED and breakdown and tested:
                # Near the rounding floor directions are noise, and so may their curvature be.
                verdict = self.problem.stagnation(state.x, norm, column)
            if verdict in (StopReason.STOPPED, StopReason.MAXITER):  # a resumed solve must not depend on this test
                state.reasons[column], self.final_residuals[column] = verdict, norm
            else:
                self._finish(state, column, verdict, norm)

    def result(self, state: BlockCgState) -> BlockSolveResult:
        """Return the result."""
        residuals = [self.final_residuals[column] for column in range(self.problem.columns)]
        return self.block_result(state, [reason for reason in state.reasons if reason is not None], residuals)
