"""Preconditioned conjugate gradients (Hestenes and Stiefel 1952; Saad 2003, algorithm 9.1).

Vectors held: b of the caller, x, r, p, q and, with a preconditioner, z; with one that brings ``A z``, also w. What an
iteration reads and writes is told in
:mod:`penstock.solvers.cg_recurrence`: 11 n values besides those of A and M, 10 n without a preconditioner.

Differs from SciPy's ``cg``: convergence is only ever declared on the true residual ``b - A x``, which costs one more
product when the recursive residual meets the tolerance; where the two have drifted apart the true one replaces it and
the search starts again from there. On the way, the true residual takes the place of the recursive one, and the search goes
on, whenever rounding may have cost half of its digits (van der Vorst and Ye 2000).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.solvers.cg_passes import Halt, Number
from penstock.solvers.cg_recurrence import KEPT_NORMS, CgRecurrence
from penstock.solvers.preconditioners import as_preconditioner, with_product
from penstock.solvers.result import IterationRecord, SolveResult, StopReason
from penstock.solvers.stopping import (
    FLOOR_FACTOR,
    LARGEST_NORM,
    SMALLEST_NORM,
    USELESS_RESTART,
    check_finite,
    check_state,
    check_tolerances,
    has_diverged,
)
from penstock.solvers.traffic import Traffic
from penstock.spmv import (
    Array,
    CountsWaiting,
    HasAbsoluteProduct,
    InputError,
    Operator,
    VectorSpace,
    as_operator,
    as_vectors,
)

__all__ = ["CgState", "cg", "cg_workspace_nbytes"]

# Looking at the residual makes a GPU wait for the host about so long, and until the next iteration is started; it may take
# this share of the time. But who watches wants to see something so often.
_LOOK_SECONDS, _LOOK_SHARE, _PATIENCE_SECONDS = 25e-6, 0.02, 0.5


def cg_workspace_nbytes(n: int, dtype: Any = np.float64) -> int:
    """Return the bytes of all vectors of a solve but those of the preconditioner: b, x, r, z, p and q."""
    return 6 * n * int(np.dtype(dtype).itemsize)


@dataclass
class CgState:
    """All that an iteration hands to the next: a checkpoint is this, written down.

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
        Largest ``||A p|| / ||p||`` seen.
    drift, first_drift : float
        Bound of what rounding may have put between the recursive and the true residual; the same when the residual was
        last formed from ``b - A x``.
    replacements : int
        Times that the residual was formed from ``b - A x`` after the first one.
    q : array, (n,), optional
        ``A p``, where the preconditioner's products bring it; see :mod:`penstock.solvers.cg_recurrence`.
    """

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
    q: Array | None = None


def cg(
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
    check_every: int | None = None,
    state: CgState | None = None,
) -> SolveResult:
    """Solve ``A x = b`` for a symmetric positive definite A, resident or streamed.

    Parameters
    ----------
    A : operator or matrix
        Whatever :func:`penstock.spmv.as_operator` takes. Applied once an iteration, unless ``M`` is made of products with it
        and brings that one along, and once to test convergence or to replace a residual.
    b : array, (n,) or (n, 1)
        Finite; on the device of A.
    x0 : array, (n,), optional
        First guess, zero by default. It is copied.
    rtol, atol : float
        Converged means ``||b - A x|| <= max(rtol ||b||, atol)``, computed from A, b and x.
    maxiter : int, optional
        Iterations at most; 10 n by default.
    M : operator, matrix or function, optional
        Approximates the inverse of A; symmetric positive definite.
    callback : callable, optional
        ``callback(xk)`` after each iteration; xk is the solver's own vector.
    monitor : callable, optional
        ``monitor(record)`` whenever the host looks at the residual; stops the solve if it returns True.
    check_every : int, optional
        Iterations between two looks, up to 256. By default every one on the CPU, and on a GPU as few as cost less than
        2 % of the time; a ``callback`` implies 1. Results do not depend on it: the device halts by itself where it should.
        Iterations started after that are products for nothing.
    state : CgState, optional
        Go on from a state of an earlier call with the same A, b and M, instead of ``x0``. It is changed in place.
        The iterates are bit-equal to those of an uninterrupted call.

    Returns
    -------
    SolveResult
        ``x, info = cg(A, b)`` works too.

    Raises
    ------
    InputError
        If A is not square or empty, b or x0 have another length or hold NaN, a tolerance is negative, or both x0 and a
        state are given.

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
    operator, shape = as_operator(A), np.shape(b)
    b, x0 = _checked_vectors(operator, b, x0)
    maxiter = check_tolerances(rtol, atol, maxiter, b.size)
    if check_every is not None and not 1 <= check_every <= KEPT_NORMS:
        raise InputError(f"check_every must be 1 to {KEPT_NORMS}, but is {check_every}")
    if x0 is not None and state is not None:
        raise InputError("a state holds the iterate to go on from; give x0 or state, not both")
    if state is not None:
        check_state(state, CgState, b.shape, operator)
    with operator.device.current():
        run = _Run(operator, None if M is None else as_preconditioner(M, operator), b, rtol, atol)
        state, reason, residual = run.start(x0) if state is None else run.go_on(state)
        every = 1 if callback is not None else check_every
        looks = _Looks(every or 1, automatic=every is None and operator.device.kind == "cuda")
        while reason is None:
            if state.iteration >= maxiter:
                residual = run.true_residual(state, replace=False)
                reason = run.out_of_iterations(state, residual)
                break
            before, began = state.iteration, time.perf_counter()
            count = min(looks.every, maxiter - before)
            reason, residual = run.advance(state, count)
            looks.tell(time.perf_counter() - began, run.starting_seconds, count, run.iterations_left(state))
            if state.iteration == before:  # a breakdown is no iteration
                continue
            if callback is not None:
                callback(state.x)
            if monitor is not None and monitor(run.record(state)) and reason is None:
                reason, residual = StopReason.STOPPED, run.true_residual(state, replace=False)
        return run.result(state, reason, residual, shape)


class _Looks:
    """How many iterations are started before the host looks at the residual."""

    def __init__(self, every: int, *, automatic: bool) -> None:
        self.every, self._automatic = every, automatic

    def tell(self, seconds: float, starting: float, iterations: int, left: float) -> None:
        """Take note of what so many iterations and a look took, of that starting them, and how many are likely left."""
        if self._automatic:
            each = seconds / iterations
            wanted = (_LOOK_SECONDS + starting / iterations) / (_LOOK_SHARE * each)
            # What is started after the last iteration is for nothing.
            self.every = math.ceil(min(wanted, KEPT_NORMS, max(1.0, _PATIENCE_SECONDS / each), max(1.0, left / 3)))


def _checked_vectors(operator: Operator, b: Array, x0: Array | None) -> tuple[Array, Array | None]:
    rows, columns = operator.shape
    if rows != columns or rows == 0:
        raise InputError(f"cg needs a square matrix with at least one row, not one of shape {operator.shape}")
    b = as_vectors(b, rows, operator, "b")
    if b.ndim == 2:
        if b.shape[1] != 1:
            raise InputError(f"cg solves for one right-hand side, b has {b.shape[1]} columns; solve them one by one")
        b = b.reshape(-1)
    if x0 is not None:
        x0 = as_vectors(x0, rows, operator, "x0")
        if x0.size != rows:
            raise InputError(f"x0 must have shape ({rows},) or ({rows}, 1), not {x0.shape}")
        x0 = x0.reshape(-1)
    for name, vector in (("b", b), ("x0", x0)):
        if vector is not None:
            check_finite(name, vector, operator.device.xp)
    return b, x0


class _Run:
    """One call of :func:`cg`: the operators, the work vectors z and q, and the counters."""

    def __init__(self, A: Operator, M: Operator | None, b: Array, rtol: float, atol: float) -> None:
        self.A, self.M, self.b = A, M, b
        self.space = VectorSpace(A.device)
        self.b_norm = self.space.norm(b)
        self.tolerance, self.atol = max(rtol * self.b_norm, atol), atol
        self.unit = float(np.finfo(str(A.dtype)).eps) / 2
        # Below one rounding of b the recursive residual says nothing of the true one, whatever the tolerance.
        self._threshold = max(self.tolerance, self.unit * self.b_norm)
        self.q = A.device.xp.empty_like(b)
        self.z: Array | None = A.device.xp.empty_like(b) if M is not None else None
        # A preconditioner of products with this very matrix makes one product more: none is left to the solver.
        self.with_product = with_product(M, A)
        self.w: Array | None = A.device.xp.empty_like(b) if self.with_product is not None else None
        self.products = 0  # with A, by the solver itself
        self.floor: float | None = None
        self.began = time.perf_counter()
        # Of the iterations since the last look, without waiting for a GPU; on a CPU, all of their time.
        self.starting_seconds = 0.0
        self.traffic = Traffic(A)
        self._recurrence: CgRecurrence | None = None

    def start(self, x0: Array | None) -> tuple[CgState, StopReason | None, float]:
        """Form the first residual and search direction."""
        xp = self.A.device.xp
        if not SMALLEST_NORM <= self.b_norm <= LARGEST_NORM:
            zero = xp.zeros_like(self.b)
            state = CgState(zero, self.b.copy(), zero.copy(), 1.0, residual_norms=[self.b_norm])
            # x = 0 solves A x = 0 exactly; of other right-hand sides the squares would leave the range of numbers.
            if self.b_norm <= SMALLEST_NORM <= self.atol or not bool(self.b.any()):
                return state, StopReason.CONVERGED, self.b_norm
            self.b_norm, state.residual_norms = 1.0, [1.0]  # the residual of zero is b
            return state, StopReason.NOT_FINITE, 1.0
        x = xp.zeros_like(self.b) if x0 is None else x0.copy()
        r = self.b.copy()
        if x0 is not None:
            self._product(x, r, alpha=-1.0, beta=1.0)  # r = b - A x
        norm = self.space.norm(r)
        state = CgState(x, r, xp.zeros_like(r), 1.0, residual_norms=[self._relative(norm)])
        if not math.isfinite(norm):
            return state, StopReason.NOT_FINITE, norm
        reason = self._restart(state)
        if norm <= self.tolerance:  # r was formed from A, b and x: it is the true residual
            reason = StopReason.CONVERGED
        return state, reason, norm

    def go_on(self, state: CgState) -> tuple[CgState, StopReason | None, float]:
        """Take up a state; that of a solve which had converged may need no iteration."""
        if not SMALLEST_NORM <= self.b_norm <= LARGEST_NORM:
            return self.start(None)
        residual = math.nan
        if self.space.norm(state.r) <= self.tolerance:
            residual = self.true_residual(state, replace=False)
            if residual <= self.tolerance:
                return state, StopReason.CONVERGED, residual
        if not bool(state.p.any()):  # the solve ended before it had a direction, or is to go on beyond its end
            return state, self._restart(state), residual
        if self.with_product is None:
            state.q = None
        else:
            if state.q is None:  # of a solve with another preconditioner
                self._product(state.p, self.q)
            else:
                self.q[...] = state.q
            state.q = self.q
        return state, None, residual

    def _waited_seconds(self) -> float:
        return self.A.waited_seconds if isinstance(self.A, CountsWaiting) else 0.0

    def advance(self, state: CgState, iterations: int) -> tuple[StopReason | None, float]:
        """Do some iterations; return a reason to stop, and the true residual norm if it is known."""
        if self._recurrence is None:
            self._recurrence = self._first_recurrence(state)
        recurrence, before = self._recurrence, state.iteration
        began, waited = time.perf_counter(), self._waited_seconds()
        recurrence.advance(iterations)
        self.starting_seconds = time.perf_counter() - began - (self._waited_seconds() - waited)
        self.products += iterations
        numbers = recurrence.look()
        state.iteration = int(numbers[Number.ITERATION])
        state.rho, state.matrix_norm = float(numbers[Number.RHO]), float(numbers[Number.MATRIX_NORM])
        state.drift = float(numbers[Number.DRIFT])
        state.residual_norms += map(self._relative, recurrence.norms(before))
        halt = Halt(int(numbers[Number.HALT]))
        if halt is Halt.NO:
            return None, math.nan
        if halt is Halt.SMALL:
            return self._test(state, recurrence)
        if halt is Halt.DRIFTED:
            return self._replace(state, recurrence)
        if halt is Halt.BAD_CURVATURE:
            reason = self._breakdown(float(numbers[Number.CURVATURE]), state)
            return reason, self.true_residual(state, replace=False)
        if halt is Halt.BAD_PRECONDITIONER:
            return StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE, math.nan
        return StopReason.NOT_FINITE, self.true_residual(state, replace=False)

    def iterations_left(self, state: CgState) -> float:
        """Return how many iterations the tolerance is away at the mean rate so far; infinite if that is none."""
        norms, target = state.residual_norms, self._relative(self._threshold)
        if len(norms) < 2 or not 0 < norms[-1] < norms[0] or target <= 0:
            return math.inf
        rate = math.log(norms[0] / norms[-1]) / (len(norms) - 1)
        return max(0.0, math.log(norms[-1] / target) / rate)

    def _first_recurrence(self, state: CgState) -> CgRecurrence:
        recurrence = CgRecurrence(self.A, self.M, state.x, state.r, state.p, self.q, self.z, self.w)
        recurrence.put(
            threshold_squared=self._threshold**2, unit=self.unit, iteration=state.iteration, **self._numbers(state)
        )
        return recurrence

    @staticmethod
    def _numbers(state: CgState) -> dict[str, float]:
        names = ("matrix_norm", "drift", "first_drift")
        return {"next_rho": state.rho, **{name: getattr(state, name) for name in names}}

    def _test(self, state: CgState, recurrence: CgRecurrence) -> tuple[StopReason | None, float]:
        """Recompute a residual that claims to be small; where it is not, the search starts again from it."""
        previous, residual = state.last_true_residual, self.true_residual(state)
        state.last_true_residual = residual
        state.replacements += 1
        if residual <= self.tolerance:
            state.p[...] = 0  # whoever goes on from here starts anew
            return StopReason.CONVERGED, residual
        reason = self._restart(state)
        if reason is None and not residual < USELESS_RESTART * previous:
            reason = self._stagnation(state, residual)
        recurrence.put(**self._numbers(state))
        return reason, residual

    def _replace(self, state: CgState, recurrence: CgRecurrence) -> tuple[StopReason | None, float]:
        """Put the true residual in the place of the recursive one and go on in the same direction."""
        residual = self.true_residual(state)
        state.replacements += 1
        if not math.isfinite(residual):
            return StopReason.NOT_FINITE, residual
        if residual <= self.tolerance:
            return StopReason.CONVERGED, residual
        reason, _ = self._precondition(state)
        if state.q is not None:
            self._product(state.p, state.q)
        self._forget_drift(state, residual)
        recurrence.put(**self._numbers(state))
        return reason, math.nan

    def _restart(self, state: CgState) -> StopReason | None:
        """Drop the direction for that of steepest descent from the residual, which was formed from ``b - A x``."""
        reason, z = self._precondition(state)
        if reason is None:
            state.p[...] = z
            if self.w is not None:
                self.q[...] = self.w
                state.q = self.q
            self._forget_drift(state, self.space.norm(state.r))
        return reason

    def _precondition(self, state: CgState) -> tuple[StopReason | None, Array]:
        """Set ``z = M r``, ``rho = r.z`` and, where the preconditioner brings it, ``w = A z``."""
        z = state.r
        if self.with_product is not None:
            z = self.z
            self.with_product.apply_with_product(state.r, z, self.w)
            self.products += 1
        elif self.M is not None:
            z = self.z
            self.M.apply(state.r, z)
        rho = self.space.dot(state.r, z)
        if not math.isfinite(rho):
            return StopReason.NOT_FINITE, z
        if rho <= 0:
            return StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE, z
        state.rho = rho
        return None, z

    def _forget_drift(self, state: CgState, residual: float) -> None:
        state.drift = self.unit * (state.matrix_norm * self.space.norm(state.x) + residual)
        state.first_drift = state.drift

    def true_residual(self, state: CgState, *, replace: bool = True) -> float:
        """Return ``||b - A x||`` at the cost of one product; ``replace`` puts the vector in the place of r."""
        target = state.r if replace else (self.q if self.w is None else self.w)
        target[...] = self.b
        self._product(state.x, target, alpha=-1.0, beta=1.0)
        return self.space.norm(target)

    def out_of_iterations(self, state: CgState, residual: float) -> StopReason:
        """Return what a true residual says when there are no iterations left."""
        if residual <= self.tolerance:
            return StopReason.CONVERGED
        diverged = has_diverged(state.residual_norms, self._relative(residual), self.unit)
        return StopReason.INCONSISTENT if diverged else StopReason.MAXITER

    def _breakdown(self, curvature: float, state: CgState) -> StopReason:
        if not math.isfinite(curvature):
            return StopReason.NOT_FINITE
        if curvature == 0 and self.space.norm(state.p) == 0:  # its squares are too small
            return StopReason.NOT_FINITE
        if curvature == 0 and not bool(self.q.any()):
            return StopReason.INCONSISTENT
        # Near the rounding floor a direction is noise, and its curvature may be too.
        if state.last_true_residual < math.inf:
            return self._stagnation(state, state.last_true_residual)
        return StopReason.NOT_POSITIVE_DEFINITE

    def _stagnation(self, state: CgState, residual: float) -> StopReason:
        """Tell the rounding floor of the system from other causes."""
        if isinstance(self.A, HasAbsoluteProduct):
            bound = self.A.apply_absolute(self.A.device.xp.abs(state.x))
            self.products += 1
            self.floor = self.unit * self.space.norm(bound)
            if residual <= FLOOR_FACTOR * self.floor:
                return StopReason.ROUNDING_FLOOR
        return StopReason.STAGNATED

    def _product(self, x: Array, out: Array, alpha: float = 1.0, beta: float = 0.0) -> None:
        self.A.apply(x, out, alpha=alpha, beta=beta)
        self.products += 1

    def _relative(self, norm: float) -> float:
        return norm / self.b_norm if self.b_norm > 0 else norm

    def record(self, state: CgState) -> IterationRecord:
        """Return what a monitor receives."""
        seconds = time.perf_counter() - self.began
        return IterationRecord(state.iteration, state.residual_norms[-1], seconds, self.traffic.bytes_streamed, state)

    def result(self, state: CgState, reason: StopReason, residual: float, shape: tuple[int, ...]) -> SolveResult:
        """Put the result together."""
        if math.isnan(residual) and reason is not StopReason.NOT_FINITE:
            residual = self.true_residual(state, replace=False)
        return SolveResult.of(
            state.x.reshape(shape),
            reason,
            state.residual_norms,
            self._relative(residual),
            None if self.floor is None else self._relative(self.floor),
            sweeps=self.traffic.sweeps(self.products),
            bytes_streamed=self.traffic.bytes_streamed,
            timings=self._timings(),
            state=state,
        )

    def _timings(self) -> dict[str, float]:
        timings = {"total": time.perf_counter() - self.began}
        if self.A.device.kind == "cpu":  # on a GPU the host only starts them
            of = self._recurrence
            timings["matrix"] = 0.0 if of is None else of.matrix_seconds
            timings["preconditioner"] = 0.0 if of is None else of.preconditioner_seconds
        return timings
