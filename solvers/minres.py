"""The minimum residual method for symmetric systems, definite or not, resident or streamed, for one right-hand side or several.

Lanczos' recurrence makes vectors v that are orthonormal in the inner product of M, ``beta' v' = A v - (alpha / beta) r2 -
(beta / beta_old) r1`` on the side of the residuals, and a QR factorisation of its tridiagonal matrix, one rotation an iteration,
the iterate whose residual is smallest in the norm of M (Paige and Saunders 1975, section 6)::

    v     = y / beta                    y = M r2, beta^2 = r2.y
    r2'   = A v - (beta / beta_old) r1 - (alpha / beta) r2            alpha = v.A v
    delta = c dbar + s alpha            epsilon, dbar' = s beta', -c beta'
    gbar  = s dbar - c alpha            gamma = |(gbar, beta')|, c', s' = gbar / gamma, beta' / gamma
    w'    = (v - epsilon w_old - delta w) / gamma
    x    += phi w'                      phi, phibar' = c' phibar, s' phibar
    r     = s'^2 r - phibar' c' r2' / beta'

The last line gives the residual itself, whose norm is that of the tolerance. An iteration is a product with A and one with M; it
reads and writes 25 n values besides those of A and M for each right-hand side. Columns share the products, and each has
scalars of its own; columns that have ended stand still. Vectors in memory, each as long as b: b, x, the best x, r, r1, r2, y, w,
w_old, v and one for intermediate results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np

from penstock.solvers.checks import check_maxiter
from penstock.solvers.choice import METHODS, MethodChoice
from penstock.solvers.columns import Numbers
from penstock.solvers.method import Method
from penstock.solvers.problem import LinearProblem
from penstock.solvers.result import GOING_ON, BlockSolveResult, IterationRecord, SolveResult, StopReason
from penstock.solvers.states import (
    SavedState,
    StateLayout,
    check_all,
    check_numbers,
    direction_kept,
)
from penstock.spmv import Array, InputError
from penstock.spmv.vectors.block_space import LARGEST_VECTOR_BLOCK

_VECTORS = 11
# Where ``||A r|| / (||A|| ||r||)`` falls below this, or this number of rounding units, x may be a least-squares solution and is
# kept. If the residual then halves, it was none; if x first grows by this factor, by a vector that A maps to zero, it was.
_ORTHOGONAL, _UNITS, _GROWN = 1e-8, 64.0, 1e3
# Squares of norms may be as negative as this.
_NOISE = 64.0


class Scalar(IntEnum):
    """The scalars of a column between two iterations, by the names of the equations; NORM bounds the norm of A from below."""

    BETA = 0
    BETA_OLD = 1
    DBAR = 2
    EPSILON = 3
    PHIBAR = 4
    C = 5
    S = 6
    NORM = 7
    TESTED = 8


def minres_workspace_nbytes(n: int, columns: int = 1, dtype: Any = np.float64) -> int:
    """Return the bytes of the vectors of a solve, b among them, without those of the preconditioner.

    Parameters
    ----------
    n : int
        Rows.
    columns : int
    dtype : dtype
        Of the vectors.

    Examples
    --------
    >>> from penstock.solvers import minres_workspace_nbytes
    >>> minres_workspace_nbytes(1_000_000)
    88000000
    """
    return _VECTORS * n * columns * int(np.dtype(dtype).itemsize)


@dataclass
class MinresState(SavedState):
    """Everything that the next iteration needs; a checkpoint is a saved state.

    Parameters
    ----------
    x, r, r1, r2, y, w, w_old : array, (n, columns)
    scalars : float64 array, (9, columns), on the host
        By ``Scalar``.
    reasons : list of StopReason or None
        Why each column has ended.
    iteration : int
    residual_norms : list of list of float
        Of each column, relative, as in the result.
    system : SystemMark, optional
        What the state knows of its system.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import minres
    >>> beam = Cantilever(nodes=(5, 3, 3), dof=3)
    >>> A, b = beam.matrix(), beam.load()
    >>> state = minres(A, b, maxiter=10).state
    >>> state.iteration, minres(A, b, state=state).converged
    (10, True)
    """

    vectors: ClassVar[tuple[str, ...]] = ("x", "r", "r1", "r2", "y", "w", "w_old")
    host_arrays: ClassVar[tuple[str, ...]] = ("scalars",)

    x: Array
    r: Array
    r1: Array
    r2: Array
    y: Array
    w: Array
    w_old: Array
    scalars: Numbers
    reasons: list[StopReason | None]
    iteration: int = 0
    residual_norms: list[list[float]] = field(default_factory=list)

    def check(self, layout: StateLayout) -> None:
        """Raise an InputError if arrays or numbers do not fit the layout, or cannot be; the message names the first."""
        super().check(layout)
        check_all(layout, self, self.vectors)
        if np.shape(self.scalars) != (len(Scalar), layout.shape[1]):
            raise InputError("the parts of the state do not fit each other; it is damaged")
        for scalar in Scalar:
            numbers = {f"{scalar.name.lower()}[{k}]": float(of) for k, of in enumerate(self.scalars[scalar])}
            check_numbers(numbers, least=-math.inf, finite=scalar is not Scalar.TESTED)


@dataclass
class _LeastSquares:
    """An iterate that may be a least-squares solution.

    ``ratio`` is ``||A r|| / (||A|| ||r||)``, ``residual`` the norm of r, and ``size`` that of x or of what r stands for in it.
    """

    x: Array
    ratio: float
    residual: float
    size: float


class MinimumResiduals(Method, name="minres"):
    """The minimum residual method for one problem with right-hand sides ``(n, columns)``."""

    State: ClassVar[type] = MinresState

    def __init__(self, problem: LinearProblem) -> None:
        super().__init__(problem, single=problem.columns == 1)
        self._v, self._other = (problem.A.device.xp.empty_like(problem.b) for _ in range(2))
        # By column. They are not part of the state: a resumed solve finds them again.
        self._least_squares: dict[int, _LeastSquares] = {}

    def _dots(self, x: Array, y: Array) -> Numbers:
        """Return the inner products of equal columns, over all ranks."""
        dots: Numbers = self.space.dots((x, y))[0]
        return dots

    def start(self, x0: Array | None) -> MinresState:
        """Compute the first residuals, and begin with them."""
        columns, (x, r) = self.columns, self.first_residual(x0)
        columns.begin(self.space.norms(r))
        vectors = {name: self.problem.A.device.xp.zeros_like(r) for name in ("r1", "r2", "y", "w", "w_old")}
        scalars = np.zeros((len(Scalar), self.problem.columns))
        scalars[Scalar.TESTED] = math.inf
        state = MinresState(
            x=x, r=r, **vectors, scalars=scalars, reasons=columns.reasons, residual_norms=columns.histories
        )
        self._begin(state, columns.running)
        return state

    def resume(self, state: MinresState) -> MinresState:
        """Resume from a state; columns that had ended without meeting the tolerance begin anew."""
        problem, columns = self.problem, self.columns
        with direction_kept(problem.A):
            residual = problem.true_residual(state.x, self._other)
        norms = self.space.norms(residual)
        columns.check_recorded(self.space.norms(residual - state.r), state.x)
        anew = []
        for column in columns.ended:
            if column in columns.aside:
                continue
            known, state.reasons[column] = state.reasons[column], None
            if norms[column] <= problem.tolerances[column]:
                self._end_column(state, column, StopReason.CONVERGED, float(norms[column]))
            elif known not in GOING_ON:
                state.r[:, column] = residual[:, column]
                anew.append(column)
        self._begin(state, anew)
        return state

    def _begin(self, state: MinresState, columns: list[int]) -> None:
        """Begin Lanczos' recurrence with the residuals of some columns."""
        if not columns:
            return
        state.r2[:, columns] = state.r[:, columns]
        self.problem.precondition(state.r2, state.y)
        squares, scalars = self._dots(state.r2, state.y), state.scalars
        for vectors in (state.r1, state.w, state.w_old):
            vectors[:, columns] = 0
        for column in columns:
            square = float(squares[column])
            scalars[: Scalar.NORM, column] = 0.0  # what is known of A and of the last test stays
            scalars[Scalar.C, column] = -1.0
            if not math.isfinite(square):
                self._end_column(state, column, StopReason.NOT_FINITE)
            elif square <= 0:
                self._end_column(state, column, StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE)
            else:
                scalars[Scalar.BETA, column] = scalars[Scalar.PHIBAR, column] = math.sqrt(square)

    def _end_column(self, state: MinresState, column: int, reason: StopReason, residual: float | None = None) -> None:
        """Let a column stand still: its vectors are zero, so that they leave the range of numbers no more."""
        self.columns.end(column, reason, residual)
        for vectors in (state.r1, state.r2, state.y, state.w, state.w_old):
            vectors[:, column] = 0

    def advance(self, state: MinresState, iterations: int) -> StopReason | None:
        """Iterate."""
        for _ in range(iterations):
            self._iterate_once(state)
            if not self.columns.running:
                break
        return None

    def _iterate_once(self, state: MinresState) -> None:
        problem, running, of = self.problem, self.columns.running, state.scalars
        row, still = problem.A.device.asarray, self.columns.ended
        beta, beta_old = (np.where(of[which] > 0, of[which], 1.0) for which in (Scalar.BETA, Scalar.BETA_OLD))
        v, image = self._v, self._other
        v[...] = state.y * row(1.0 / beta)
        problem.product(v, image)
        image -= row(np.where(of[Scalar.BETA_OLD] > 0, beta / beta_old, 0.0)) * state.r1
        alpha = self._dots(v, image)
        image -= row(alpha / beta) * state.r2
        state.r1, state.r2, self._other = state.r2, image, state.r1
        self.problem.precondition(state.r2, state.y)
        squares = self._dots(state.r2, state.y)
        with np.errstate(invalid="ignore", over="ignore"):
            following = np.sqrt(np.maximum(squares, 0.0))
            c, s, dbar = of[Scalar.C], of[Scalar.S], of[Scalar.DBAR]
            delta, gbar = c * dbar + s * alpha, s * dbar - c * alpha
            gamma = np.hypot(gbar, following)
            # The first beta is the norm of the residual, and no entry of the tridiagonal matrix.
            coupled = np.where(of[Scalar.BETA_OLD] > 0, of[Scalar.BETA], 0.0)
            of[Scalar.NORM] = np.maximum(of[Scalar.NORM], np.hypot(np.hypot(alpha, coupled), following))
            root = np.hypot(gbar, c * following)
        safe = np.where(gamma > 0, gamma, 1.0)
        w = self._other
        w[...] = v - row(of[Scalar.EPSILON]) * state.w_old - row(delta) * state.w
        w *= row(1.0 / safe)
        state.w_old, state.w, self._other = state.w, w, state.w_old
        cosine, sine = gbar / safe, following / safe
        self._keep_least_squares(state, running, root)
        phi = np.where(gamma > 0, cosine * of[Scalar.PHIBAR], 0.0)
        phi[still] = 0.0
        phibar = sine * of[Scalar.PHIBAR]
        state.x += row(phi) * state.w
        shares = np.where(following > 0, phibar * cosine / np.where(following > 0, following, 1.0), 0.0)
        squares_of_sine = sine**2
        shares[still], squares_of_sine[still] = 0.0, 1.0
        state.r *= row(squares_of_sine)
        state.r -= row(shares) * state.r2
        of[Scalar.EPSILON], of[Scalar.DBAR] = s * following, -c * following
        of[Scalar.BETA_OLD], of[Scalar.BETA] = of[Scalar.BETA].copy(), following
        of[Scalar.PHIBAR], of[Scalar.C], of[Scalar.S] = phibar, cosine, sine
        of[:, still] = 0.0
        state.iteration += 1
        self._look(state, running, squares)

    def _keep_least_squares(self, state: MinresState, running: list[int], root: Numbers) -> None:
        """Copy iterates, before their step, whose residual is nearly orthogonal to the range of A."""
        for column in running:
            norm = float(state.scalars[Scalar.NORM, column])
            ratio = float(root[column]) / norm if norm > 0 else 0.0
            known, orthogonal = self._least_squares.get(column), max(_ORTHOGONAL, _UNITS * self.problem.unit)
            if ratio > (orthogonal if known is None else 0.5 * known.ratio):
                continue
            x = state.x[:, column].copy()
            residual = self.problem.absolute(state.residual_norms[column][-1], column)
            size = self.problem.space.norm(x) + residual / (norm or 1.0)
            self._least_squares[column] = _LeastSquares(x, ratio, residual, size)

    def _judge_least_squares(self, state: MinresState, column: int, residual: float) -> None:
        """Forget a kept iterate if the residual has halved since, and return to it if x has grown instead."""
        kept = self._least_squares[column]
        if residual < 0.5 * kept.residual:
            del self._least_squares[column]
        elif self.problem.space.norm(state.x[:, column].copy()) > _GROWN * kept.size:
            self._return_to_least_squares(state, column)

    def _return_to_least_squares(self, state: MinresState, column: int) -> None:
        state.x[:, column] = self._least_squares[column].x
        self.best.residuals[column] = math.inf  # iterates since then are no better
        self._end_column(state, column, StopReason.INCONSISTENT, math.nan)

    def _look(self, state: MinresState, running: list[int], squares: Numbers) -> None:
        """Note the residuals, end what cannot go on, and compute those from A, b and x that seem to meet the tolerance."""
        problem = self.problem
        norms = self.space.norms(state.r)
        due: list[int] = []
        for column, history in enumerate(state.residual_norms):
            if column not in running:
                history.append(history[-1])
                continue
            norm, square = float(norms[column]), float(squares[column])
            self.columns.residuals[column] = math.nan
            history.append(problem.relative(norm, column))
            if not (math.isfinite(norm) and math.isfinite(square)):
                self._end_column(state, column, StopReason.NOT_FINITE)
            elif square < -_NOISE * problem.unit * float(state.scalars[Scalar.BETA_OLD, column]) ** 2:
                self._end_column(state, column, StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE)
            elif norm <= problem.thresholds[column] or square <= 0:
                due.append(column)
            elif column in self._least_squares:
                self._judge_least_squares(state, column, norm)
        if due:
            self._test(state, due)

    def _test(self, state: MinresState, due: list[int]) -> None:
        """Compute residuals of columns; begin anew with those that are larger than they seemed to be."""
        problem, of = self.problem, state.scalars
        residual = problem.true_residual(state.x, self._v)
        norms, anew = self.space.norms(residual), []
        for column in due:
            norm, before = float(norms[column]), float(of[Scalar.TESTED, column])
            state.r[:, column] = residual[:, column]
            of[Scalar.TESTED, column] = norm
            state.residual_norms[column][-1] = problem.relative(norm, column)
            if norm <= problem.tolerances[column]:
                self._end_column(state, column, StopReason.CONVERGED, norm)
            elif problem.is_useless(norm, before):
                with direction_kept(problem.A):
                    reason = problem.stagnation(state.x, norm, column)
                if column in self._least_squares and reason is not StopReason.ROUNDING_FLOOR:
                    self._return_to_least_squares(state, column)
                else:
                    self._end_column(state, column, reason, norm)
            else:
                anew.append(column)
        self._begin(state, anew)

    def scratch(self) -> Array:
        """Return v, which the next iteration computes."""
        return self._v

    def end(self, state: MinresState, reason: StopReason) -> None:
        """Stop the running columns and compute their residuals."""
        running = self.columns.running
        with direction_kept(self.problem.A):
            super().end(state, reason)
        for column in running:
            if state.reasons[column] in (StopReason.MAXITER, StopReason.INCONSISTENT) and column in self._least_squares:
                self._return_to_least_squares(state, column)


def minres(
    A: Any,
    b: Array,
    x0: Array | None = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    callback: Callable[[Array], object] | None = None,
    monitor: Callable[[IterationRecord], object] | None = None,
    state: MinresState | None = None,
) -> SolveResult | BlockSolveResult:
    """Solve ``A x = b`` for a symmetric A that need not be positive definite, resident or streamed.

    For positive definite matrices :func:`cg` needs less memory and about as many iterations.

    Parameters
    ----------
    A : operator or matrix
        Symmetric. Applied once an iteration, to all right-hand sides together.
    b : array, (n,) or (n, columns), finite, on the device of A
        At most 64 columns.
    x0 : array of the shape of b, optional
        Zero by default.
    rtol, atol : float
        A column has converged when ``||b - A x|| <= max(rtol ||b||, atol)``, computed from A, b and x.
    maxiter : int, 10 n by default
    M : operator, matrix or function, optional
        Approximates the inverse of A or of its absolute value; symmetric *positive definite*.
    callback, monitor : callable, optional
        As for :func:`block_cg`.
    state : MinresState, optional
        Resume from this state of a call with the same A, b and M, bit-equal to an uninterrupted call. It is
        changed in place; one on the host stays as it is where the matrix is on a GPU.

    Returns
    -------
    SolveResult, or BlockSolveResult for b of two dimensions
        INCONSISTENT if A is singular and no x solves the system; x is then a least-squares solution.

    Raises
    ------
    InputError
        As for :func:`cg`.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> from penstock.solvers import minres
    >>> A = scipy.sparse.diags_array([1.0, -2.0, 1.0], offsets=[-1, 0, 1], shape=(50, 50)) + scipy.sparse.eye_array(50)
    >>> b = A @ np.arange(50.0)
    >>> result = minres(A.tocsr(), b, rtol=1e-10)
    >>> result.converged, bool(np.linalg.norm(A @ result.x - b) <= 1e-10 * np.linalg.norm(b))
    (True, True)
    """
    check_maxiter(maxiter)
    problem, shape = LinearProblem(A, b, M, rtol=rtol, atol=atol), np.shape(b)
    if not 1 <= problem.columns <= LARGEST_VECTOR_BLOCK:
        raise InputError(f"minres takes 1 to {LARGEST_VECTOR_BLOCK} right-hand sides, not {problem.columns}")
    problem.b = problem.b.reshape(-1, problem.columns)
    guess = problem.guess(x0, state, "x0")
    with problem.A.device.current():
        limits: dict[str, Any] = {"maxiter": maxiter, "callback": callback, "monitor": monitor}
        result: SolveResult | BlockSolveResult = MinimumResiduals(problem).solve(
            guess, state, shape=shape if len(shape) == 1 else None, **limits
        )
        return result


METHODS.add("minres", MethodChoice("the minimum residual method", minres, minres_workspace_nbytes, definite=False))
