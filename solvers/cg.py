"""Preconditioned conjugate gradients (Hestenes and Stiefel 1952; Saad 2003, algorithm 9.1).

The iteration, its equations and its traffic stand in :mod:`penstock.solvers.cg_iteration`.

Differs from SciPy's ``cg``: convergence is only declared on the true residual ``b - A x``, which costs one more product when the
recursive residual meets the tolerance. If the true residual does not meet it, it replaces the recursive one and the search
restarts. During the solve, the true residual replaces the recursive one whenever rounding may have cost half of its digits (van
der Vorst and Ye 2000). The search then continues in the same direction, unless the true residual is more than twice as large.

Examples
--------
>>> from penstock.fem import Cantilever
>>> from penstock.solvers import jacobi
>>> beam = Cantilever(nodes=(9, 3, 3), dof=3)
>>> A = beam.matrix()
>>> result = cg(A, beam.load(), M=jacobi(A), rtol=1e-8)
>>> result.converged, result.true_residual <= 1e-8
(True, True)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

import numpy as np

from penstock.solvers.cg_iteration import CgRecurrence
from penstock.solvers.cg_kernels import Halt, Scalar
from penstock.solvers.checks import check_maxiter
from penstock.solvers.method import MOST_UNREAD, Method, own_method
from penstock.solvers.problem import LinearProblem
from penstock.solvers.result import IterationRecord, SolveResult, StopReason
from penstock.solvers.states import (
    SavedState,
    StateLayout,
    check_all,
    check_counts,
    check_numbers,
    direction_kept,
)
from penstock.spmv import Array, InputError

#: The energy is known to within this many times the estimate of its rounding.
_ENERGY_FACTOR = 8
#: Where another method was near its floor, the true residual grows by this factor only because directions have become noise.
_GROWN = 1e3
# The search direction belongs to the recursive residual. Where the true one is more than this many times as large, the direction
# is of no use, and the search restarts.
_STRAYED = 2.0


def cg_workspace_nbytes(n: int, dtype: Any = np.float64) -> int:
    """Return the bytes of the vectors of a solve, b, x, the best x, r, z, p and q, without those of the preconditioner.

    Parameters
    ----------
    n : int
        Rows.
    dtype : dtype
        Of the vectors.

    Returns
    -------
    int

    Examples
    --------
    >>> from penstock.solvers import cg_workspace_nbytes
    >>> cg_workspace_nbytes(1_000_000)
    56000000
    """
    return 7 * n * int(np.dtype(dtype).itemsize)


@dataclass
class CgState(SavedState):
    """Everything that the next iteration needs; a checkpoint is a saved state.

    Parameters
    ----------
    x, r, p : array, (n,)
        Iterate, recursive residual, search direction.
    rho : float
        ``r . M r``.
    iteration : int
    last_true_residual : float
        ``||b - A x||`` when it was last computed to test convergence; infinite before.
    residual_norms : list of float
        Relative, as in the result.
    matrix_norm : float
        Largest ``||A p|| / ||p||`` so far.
    drift, first_drift : float
        Bound of the distance, due to rounding, between the recursive and the true residual; its value when the residual was last
        computed as ``b - A x``.
    replacements : int
        Number of times that the residual was computed as ``b - A x`` after the first time.
    energy : float
        Lower bound of ``x . (b + r) / 2`` when r was last computed so, which only rounding makes smaller; minus infinity before.
    q : array, (n,), optional
        ``A p``, if the preconditioner computes it.
    system : SystemMark, optional
        What the state knows of its system.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import cg
    >>> beam = Cantilever(nodes=(5, 3, 3), dof=3)
    >>> A, b = beam.matrix(), beam.load()
    >>> state = cg(A, b, maxiter=10).state
    >>> state.iteration, len(state.residual_norms), cg(A, b, state=state).converged
    (10, 11, True)
    """

    vectors: ClassVar[tuple[str, ...]] = ("x", "r", "p", "q")

    x: Array
    r: Array
    p: Array
    rho: float
    iteration: int = 0
    last_true_residual: float = math.inf
    residual_norms: list[float] = field(default_factory=list)
    matrix_norm: float = 0.0
    drift: float = 0.0
    first_drift: float = 0.0
    replacements: int = 0
    energy: float = -math.inf
    q: Array | None = None

    def check(self, layout: StateLayout) -> None:
        """Raise an InputError if arrays or numbers do not fit the layout, or cannot be; the message names the first."""
        super().check(layout)
        check_all(layout, self, ("r", "p", *(() if self.q is None else ("q",))))
        check_numbers({"rho": self.rho}, positive=True)
        check_numbers({name: getattr(self, name) for name in ("matrix_norm", "drift", "first_drift")})
        check_numbers({"energy": self.energy}, least=-math.inf)
        check_numbers({"last_true_residual": self.last_true_residual}, finite=False)
        check_counts(replacements=self.replacements)


class ConjugateGradients(Method, name="cg"):
    """Conjugate gradients for one problem, b (n,): start, restart, residual replacement, and the response to a halt.

    ``at_once``: the iteration forms all sums at once, for which it needs the image of z.
    """

    State: ClassVar[type] = CgState

    def __init__(self, problem: LinearProblem, *, at_once: bool = False) -> None:
        super().__init__(problem)
        empty_like, b = problem.A.device.xp.empty_like, problem.b
        self.q = empty_like(b)
        self.z: Array | None = None if problem.M is None else empty_like(b)
        self.w: Array | None = empty_like(b) if at_once or problem.with_product is not None else None
        self._at_once = at_once
        self._tolerance, self._threshold = float(problem.tolerances[0]), float(problem.thresholds[0])
        self._recurrence: CgRecurrence | None = None

    def start(self, x0: Array | None) -> CgState:
        """Compute the first residual and search direction."""
        x, r = self.first_residual(x0)
        self.columns.begin(self.space.norms(r))
        state = CgState(x, r, self.problem.A.device.xp.zeros_like(r), 1.0, residual_norms=self.columns.histories[0])
        if self.columns.running:
            self.columns.end(0, self._restart(state))
        return state

    def resume(self, state: CgState) -> CgState:
        """Resume from a state; that of a converged solve may need no iteration."""
        problem, vectors = self.problem, self.problem.space
        if self.columns.aside:
            return self.start(None)
        with direction_kept(problem.A):
            residual = problem.true_residual(state.x, self.q)
        norm = vectors.norm(residual)
        vectors.combine(-1.0, state.r, 1.0, residual)
        self.columns.check_recorded(self.space.norms(residual), state.x)
        if vectors.norm(state.r) <= self._tolerance and norm <= self._tolerance:
            self.columns.end(0, StopReason.CONVERGED, norm)
        elif not vectors.any(state.p):  # the solve ended without a direction, or had converged
            self.columns.end(0, self._restart(state))
        elif self.w is None:
            state.q = None
        else:
            if state.q is None:  # the state is from a solve with another preconditioner
                problem.product(state.p, self.q)
            else:
                self.q[...] = state.q
            state.q = self.q
        return state

    def advance(self, state: CgState, iterations: int) -> StopReason | None:
        """Iterate, read the scalars, and respond to a halt."""
        if self._recurrence is None:
            problem = self.problem
            vectors = (state.x, state.r, state.p, self.q, self.z, self.w)
            self._recurrence = CgRecurrence(problem.A, problem.M, *vectors, at_once=self._at_once)
            initial = {"threshold_squared": self._threshold**2, "unit": problem.unit, "iteration": state.iteration}
            self._recurrence.put(**initial, **_scalars(state))
        recurrence, before = self._recurrence, state.iteration
        began, waited = time.perf_counter(), self.problem.waited_seconds
        self.problem.products += recurrence.advance(iterations)
        self.starting_seconds = time.perf_counter() - began - (self.problem.waited_seconds - waited)
        scalars = recurrence.look()
        state.iteration = int(scalars[Scalar.ITERATION])
        state.rho, state.matrix_norm = float(scalars[Scalar.RHO]), float(scalars[Scalar.MATRIX_NORM])
        state.drift = float(scalars[Scalar.DRIFT])
        state.residual_norms += map(self.problem.relative, recurrence.norms(before))
        self.columns.residuals[0] = math.nan
        match Halt(int(scalars[Scalar.HALT])):
            case Halt.SMALL:
                self._test(state, recurrence)
            case Halt.DRIFTED:
                self._replace(state, recurrence)
            case Halt.BAD_CURVATURE if self._at_once and self._true_curvature(state) > 0:
                self._test(state, recurrence)  # rounding has made the deduced one negative
            case Halt.BAD_CURVATURE:
                return self._breakdown(float(scalars[Scalar.CURVATURE]), state)
            case Halt.BAD_PRECONDITIONER:
                return StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE
            case Halt.NOT_FINITE:
                return StopReason.NOT_FINITE
        return None

    def _true_curvature(self, state: CgState) -> float:
        self.problem.product(state.p, self.q)
        return self.problem.space.dot(state.p, self.q)

    def _test(self, state: CgState, recurrence: CgRecurrence) -> None:
        """Compute the true residual when the recursive one is small; restart from it if it is not small."""
        residual = self._replaced_residual(state)
        if self.columns.test(0, residual):
            state.last_true_residual = residual
            state.p[...] = 0  # a solve that resumes from this state restarts
            return
        reason = self._restart_from(state, residual)
        recurrence.put(**_scalars(state))
        self.columns.end(0, reason, residual)

    def _restart_from(self, state: CgState, residual: float) -> StopReason | None:
        """Restart from a true residual, unless it has fallen too little since the last time."""
        previous, state.last_true_residual = state.last_true_residual, residual
        reason = self._restart(state)
        if reason is None and self.problem.is_useless(residual, previous):
            reason = self.problem.stagnation(state.x, residual)
        return reason

    def _replace(self, state: CgState, recurrence: CgRecurrence) -> None:
        """Replace the recursive residual by the true one, and continue in the same direction if that still belongs to it."""
        residual = self._replaced_residual(state)
        if self.columns.test(0, residual):
            return
        if residual > _STRAYED * self.problem.absolute(state.residual_norms[-1]):
            # Where b is out of range, x and its floor grow without bound, but the residual stays large.
            small = residual <= math.sqrt(self.problem.unit) * float(self.problem.b_norms[0])
            at_floor = small and self.problem.stagnation(state.x, residual) is StopReason.ROUNDING_FLOOR
            reason = self._restart_from(state, residual) if at_floor else self._restart(state)
            recurrence.put(**_scalars(state))
            self.columns.end(0, reason, residual)
            return
        grown = residual > _GROWN * self._least_residual(state)
        if self._taken_over and grown and self._reached_floor(state):
            state.p[...] = 0  # it is noise: a solve that resumes from this state restarts
            self.columns.end(0, StopReason.ROUNDING_FLOOR, residual)
            return
        if self._lost_energy(state) and self._reached_floor(state):
            reason = self._restart(state)  # the direction has become noise, which would lead further and further up
        else:
            reason, _ = self._precondition(state)
            if state.q is not None:
                self.problem.product(state.p, state.q)
            self._reset_drift(state, residual)
        recurrence.put(**_scalars(state))
        self.columns.end(0, reason)

    def _replaced_residual(self, state: CgState) -> float:
        """Replace r by the true residual at the cost of one product, and return its norm."""
        state.replacements += 1
        return self.problem.space.norm(self.problem.true_residual(state.x, state.r))

    def _lost_energy(self, state: CgState) -> bool:
        """Return whether the energy, which every exact iteration raises, fell by more than the rounding of its computation."""
        space, b, before = self.problem.space, self.problem.b, state.energy
        energy, norm = (space.dot(state.x, b) + space.dot(state.x, state.r)) / 2, space.norm(state.x)
        rounding = self.problem.unit * norm * (state.matrix_norm * norm + float(self.problem.b_norms[0]))
        state.energy = energy - _ENERGY_FACTOR * rounding
        return energy + _ENERGY_FACTOR * rounding < before

    def _reached_floor(self, state: CgState) -> bool:
        """Return whether the residual was once near the rounding floor."""
        return self.problem.stagnation(state.x, self._least_residual(state)) is StopReason.ROUNDING_FLOOR

    def _least_residual(self, state: CgState) -> float:
        """Return the least residual of the recurrence; those of another method, from which this one went on, may not be true."""
        return self.problem.absolute(min(state.residual_norms[self._taken_over :]))

    def _restart(self, state: CgState) -> StopReason | None:
        """Restart with the preconditioned residual as direction; the residual was computed as ``b - A x``."""
        reason, z = self._precondition(state)
        if reason is None:
            state.p[...] = z
            if self._at_once and self.problem.with_product is None:
                self.problem.product(z, self.w)
            if self.w is not None:
                self.q[...] = self.w
                state.q = self.q
            self._reset_drift(state, self.problem.space.norm(state.r))
        return reason

    def _precondition(self, state: CgState) -> tuple[StopReason | None, Array]:
        """Set ``z = M r``, ``rho = r.z`` and, if the preconditioner computes it, ``w = A z``."""
        z = state.r
        if self.z is not None:
            z = self.z
            self.problem.precondition(state.r, z, self.w)
        rho = self.problem.space.dot(state.r, z)
        if not math.isfinite(rho):
            return StopReason.NOT_FINITE, z
        if rho <= 0:
            return StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE, z
        state.rho = rho
        return None, z

    def _reset_drift(self, state: CgState, residual: float) -> None:
        problem = self.problem
        state.drift = problem.unit * (state.matrix_norm * problem.space.norm(state.x) + residual)
        state.first_drift = state.drift

    def _breakdown(self, curvature: float, state: CgState) -> StopReason:
        if not math.isfinite(curvature):
            return StopReason.NOT_FINITE
        if curvature == 0 and self.problem.space.norm(state.p) == 0:  # the squares of its entries underflow
            return StopReason.NOT_FINITE
        if curvature == 0 and not self.problem.space.any(self.q):
            return StopReason.INCONSISTENT
        # Near the rounding floor the direction is noise, and so may its curvature be.
        if state.last_true_residual < math.inf:
            return self.problem.stagnation(state.x, state.last_true_residual)
        return StopReason.NOT_POSITIVE_DEFINITE

    def scratch(self) -> Array:
        """Return q or w, which the next iteration computes."""
        return self.q if self.w is None else self.w

    def finish(self, state: CgState) -> None:
        """Add the time of the iterations to that of the solve."""
        if self._recurrence is not None:
            self.problem.matrix_seconds += self._recurrence.matrix_seconds
            self.problem.preconditioner_seconds += self._recurrence.preconditioner_seconds


def _scalars(state: CgState) -> dict[str, float]:
    names = ("matrix_norm", "drift", "first_drift")
    return {"next_rho": state.rho, **{name: getattr(state, name) for name in names}}


def cg(
    A: Any,
    b: Array,
    x0: Array | Literal["Mb"] | None = None,
    *,
    rtol: float = 1e-5,
    atol: float | None = 0.0,
    tol: float | None = None,
    maxiter: int | None = None,
    M: Any = None,
    callback: Callable[[Array], object] | None = None,
    monitor: Callable[[IterationRecord], object] | None = None,
    check_every: int | None = None,
    state: CgState | None = None,
    reductions: int = 2,
) -> SolveResult:
    """Solve ``A x = b`` for a symmetric positive definite A, resident or streamed.

    Parameters
    ----------
    A : operator or matrix
        Anything :func:`penstock.spmv.as_operator` accepts. Applied once per iteration, unless ``M`` is made of products with A
        and computes that product too, and once more to test convergence or to replace a residual.
    b : array, (n,) or (n, 1), finite, on the device of A
    x0 : array, (n,), or "Mb", optional
        Initial guess, zero by default. It is copied. ``"Mb"`` is M applied to b, as in SciPy.
    rtol, atol, tol : float
        Converged means ``||b - A x|| <= max(rtol ||b||, atol)``, computed from A, b and x; ``tol`` is CuPy's name of rtol.
    maxiter : int, 10 n by default
    M : operator, matrix or function, optional
        Approximates the inverse of A; symmetric positive definite.
    callback, monitor : callable, optional
        ``callback(xk)`` after each iteration; xk is the solver's own vector. ``monitor(record)`` whenever the host reads the
        residual; stops the solve if it returns True.
    check_every : int, optional
        Iterations between two reads of the residual, up to 256. By default 1 on the CPU or with a ``callback``; on a GPU reads
        cost less than 2 % of the time. Results do not depend on it; iterations started after the end are wasted.
    state : CgState, optional
        Resume from this state of a call with the same A, b and M, bit-equal to an uninterrupted call. It is
        changed in place; one on the host stays as it is where the matrix is on a GPU.
    reductions : int
        Sums over all ranks in an iteration, 2 or 1, which takes a vector more; a resumed solve is then not bit-equal.

    Returns
    -------
    SolveResult
        ``x, info = cg(A, b)`` works too.

    Raises
    ------
    InputError
        If A is not square, b or x0 does not fit or holds NaN, a tolerance is negative, or x0 and state are given.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import block_jacobi, cg
    >>> beam = Cantilever(nodes=(9, 3, 3), dof=3)
    >>> A, b = beam.matrix(), beam.load()
    >>> result = cg(A, b, rtol=1e-8, M=block_jacobi(A, 3))
    >>> result.converged, result.x.shape, f"{beam.tip_deflection(result.x):.4g}"
    (True, (243,), '-912.5')
    """
    problem = LinearProblem(A, b, M, rtol=rtol if tol is None else tol, atol=atol or 0.0)
    with problem.space.communicator.together():
        check_maxiter(maxiter)
        if check_every is not None and not 1 <= check_every <= MOST_UNREAD:
            raise InputError(f"check_every must be 1 to {MOST_UNREAD}, but is {check_every}")
        if problem.columns != 1:
            raise InputError(f"cg solves for one right-hand side, b has {problem.columns} columns; use block_cg")
    problem.b = problem.b.reshape(-1)
    guess = problem.guess(x0, state, "x0")
    problem.space.communicator.check_same(reductions=reductions)
    with problem.A.device.current():
        # The state of plain conjugate gradients is that of a method which has handed over to them.
        method = None if isinstance(state, CgState) else own_method(problem)
        with problem.space.communicator.together():
            if reductions not in (1, 2):
                raise InputError(f"reductions must be 1 or 2, not {reductions}")
            if method is not None and reductions == 1:
                raise InputError("reductions=1 is for preconditioners without an iteration of their own; leave it out")
        method = method or ConjugateGradients(problem, at_once=reductions == 1)
        limits: dict[str, Any] = {"maxiter": maxiter, "callback": callback, "monitor": monitor}
        limits["check_every"] = 1 if callback else check_every
        return cast(SolveResult, method.solve(guess, state, shape=np.shape(b), plain=ConjugateGradients, **limits))
