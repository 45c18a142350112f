"""Controls conjugate gradients around the iteration: start, restart, residual replacement, end."""

from __future__ import annotations

import math
import time
from typing import ClassVar

import numpy as np

from penstock.solvers.cg_iteration import CgRecurrence
from penstock.solvers.cg_kernels import Halt, Scalar
from penstock.solvers.cg_state import CgState
from penstock.solvers.method import Method
from penstock.solvers.preconditioners import with_product
from penstock.solvers.problem import LinearProblem
from penstock.solvers.result import SolveResult, StopReason
from penstock.solvers.states import direction_kept
from penstock.spmv import Array

#: The energy is known to within this many times the estimate of its rounding.
_ENERGY_FACTOR = 8
#: Where another method was near its floor, the true residual grows by this factor only because directions have become noise.
_GROWN = 1e3


class ConjugateGradients(Method, name="cg"):
    """Conjugate gradients for one problem, b (n,): start, restart, residual replacement, and the response to a halt.

    ``at_once``: the iteration forms all sums at once, for which it needs the image of z.
    """

    State: ClassVar[type] = CgState

    def __init__(self, problem: LinearProblem, *, at_once: bool = False) -> None:
        self.problem, A, b = problem, problem.A, problem.b
        problem.set_norms(np.array([problem.space.norm(b)]))
        self._tolerance, self._threshold = float(problem.tolerances[0]), float(problem.thresholds[0])
        empty_like = A.device.xp.empty_like
        self.q = empty_like(b)
        self.z: Array | None = None if problem.M is None else empty_like(b)
        self._with_product = with_product(problem.M, A)
        self._at_once = at_once
        self.w: Array | None = empty_like(b) if at_once or self._with_product is not None else None
        self._recurrence: CgRecurrence | None = None

    def start(self, x0: Array | None) -> CgState:
        """Compute the first residual and search direction."""
        problem, xp = self.problem, self.problem.A.device.xp
        if problem.empty or problem.out_of_range:
            zero, norm = xp.zeros_like(problem.b), float(problem.b_norms[0])
            self.reason, self.residual = StopReason.CONVERGED if problem.empty else StopReason.NOT_FINITE, norm
            first = norm if problem.empty else 1.0
            return CgState(zero, problem.b.copy(), zero.copy(), 1.0, residual_norms=[first])
        x = xp.zeros_like(problem.b) if x0 is None else x0.copy()
        r = problem.b.copy()
        if x0 is not None:
            problem.product(x, r, alpha=-1.0, beta=1.0)  # r = b - A x
        norm = problem.space.norm(r)
        state = CgState(x, r, xp.zeros_like(r), 1.0, residual_norms=[problem.relative(norm)])
        self.residual = norm
        self.reason = self._restart(state) if math.isfinite(norm) else StopReason.NOT_FINITE
        if norm <= self._tolerance:  # r was computed from A, b and x: it is the true residual
            self.reason = StopReason.CONVERGED
        return state

    def resume(self, state: CgState) -> CgState:
        """Resume from a state; that of a converged solve may need no iteration."""
        problem = self.problem
        if problem.empty or problem.out_of_range:
            return self.start(None)
        with direction_kept(problem.A):
            residual = problem.true_residual(state.x, self.q)
        norm = problem.space.norm(residual)
        problem.space.combine(-1.0, state.r, 1.0, residual)
        problem.check_recorded(problem.space.norm(residual), state.residual_norms, state.x)
        if problem.space.norm(state.r) <= self._tolerance and norm <= self._tolerance:
            self.reason, self.residual = StopReason.CONVERGED, norm
            return state
        if not problem.space.any(state.p):  # the solve ended without a direction, or had converged
            self.reason = self._restart(state)
            return state
        if self.w is None:
            state.q = None
        else:
            if state.q is None:  # the state is from a solve with another preconditioner
                problem.product(state.p, self.q)
            else:
                self.q[...] = state.q
            state.q = self.q
        return state

    def advance(self, state: CgState, iterations: int) -> None:
        """Iterate, read the scalars, and respond to a halt."""
        if self._recurrence is None:
            problem = self.problem
            vectors = (state.x, state.r, state.p, self.q, self.z, self.w)
            self._recurrence = CgRecurrence(problem.A, problem.M, *vectors, at_once=self._at_once)
            initial = {"threshold_squared": self._threshold**2, "unit": problem.unit, "iteration": state.iteration}
            self._recurrence.put(**initial, **_scalars(state))
        recurrence, before = self._recurrence, state.iteration
        began, waited = time.perf_counter(), self.problem.waited_seconds
        recurrence.advance(iterations)
        self.starting_seconds = time.perf_counter() - began - (self.problem.waited_seconds - waited)
        self.problem.products += iterations
        scalars = recurrence.look()
        state.iteration = int(scalars[Scalar.ITERATION])
        state.rho, state.matrix_norm = float(scalars[Scalar.RHO]), float(scalars[Scalar.MATRIX_NORM])
        state.drift = float(scalars[Scalar.DRIFT])
        state.residual_norms += map(self.problem.relative, recurrence.norms(before))
        self._respond_to(Halt(int(scalars[Scalar.HALT])), float(scalars[Scalar.CURVATURE]), state, recurrence)

    def _respond_to(self, halt: Halt, curvature: float, state: CgState, recurrence: CgRecurrence) -> None:
        self.residual = math.nan
        if halt is Halt.SMALL:
            self.reason = self._test(state, recurrence)
        elif halt is Halt.DRIFTED:
            self.reason = self._replace(state, recurrence)
        elif halt is Halt.BAD_CURVATURE and self._at_once and self._true_curvature(state) > 0:
            self.reason = self._test(state, recurrence)  # rounding has made the deduced one negative
        elif halt is Halt.BAD_CURVATURE:
            self.reason = self._breakdown(curvature, state)
            self.residual = self._true_residual(state, replace=False)
        elif halt is Halt.BAD_PRECONDITIONER:
            self.reason = StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE
        elif halt is Halt.NOT_FINITE:
            self.reason = StopReason.NOT_FINITE
            self.residual = self._true_residual(state, replace=False)

    def _true_curvature(self, state: CgState) -> float:
        self.problem.product(state.p, self.q)
        return self.problem.space.dot(state.p, self.q)

    def iterations_left(self, state: CgState) -> float:
        """Return the expected number of further iterations at the mean convergence rate so far; infinite without a rate."""
        norms, target = state.residual_norms, self.problem.relative(self._threshold)
        if len(norms) < 2 or not 0 < norms[-1] < norms[0] or target <= 0:
            return math.inf
        rate = math.log(norms[0] / norms[-1]) / (len(norms) - 1)
        return max(0.0, math.log(norms[-1] / target) / rate)

    def _test(self, state: CgState, recurrence: CgRecurrence) -> StopReason | None:
        """Compute the true residual when the recursive one is small; restart from it if it is not small."""
        previous, residual = state.last_true_residual, self._true_residual(state)
        state.last_true_residual = self.residual = residual
        state.replacements += 1
        if residual <= self._tolerance:
            state.p[...] = 0  # a solve that resumes from this state restarts
            return StopReason.CONVERGED
        reason = self._restart(state)
        if reason is None and self.problem.is_useless(residual, previous):
            reason = self.problem.stagnation(state.x, residual)
        recurrence.put(**_scalars(state))
        return reason

    def _replace(self, state: CgState, recurrence: CgRecurrence) -> StopReason | None:
        """Replace the recursive residual by the true one and continue in the same direction."""
        residual = self._true_residual(state)
        state.replacements += 1
        if not math.isfinite(residual) or residual <= self._tolerance:
            self.residual = residual
            return StopReason.CONVERGED if residual <= self._tolerance else StopReason.NOT_FINITE
        least = self.problem.absolute(min(state.residual_norms))
        if (
            self._taken_over
            and residual > _GROWN * least
            and self.problem.stagnation(state.x, least) is StopReason.ROUNDING_FLOOR
        ):
            self.residual = residual
            return StopReason.ROUNDING_FLOOR
        if self._lost_energy(state) and self._reached_floor(state):
            reason = self._restart(state)  # the direction has become noise, which would lead further and further up
        else:
            reason, _ = self._precondition(state)
            if state.q is not None:
                self.problem.product(state.p, state.q)
            self._reset_drift(state, residual)
        recurrence.put(**_scalars(state))
        return reason

    def _lost_energy(self, state: CgState) -> bool:
        """Return whether the energy, which every exact iteration raises, fell by more than the rounding of its computation."""
        space, b, before = self.problem.space, self.problem.b, state.energy
        energy, norm = (space.dot(state.x, b) + space.dot(state.x, state.r)) / 2, space.norm(state.x)
        rounding = self.problem.unit * norm * (state.matrix_norm * norm + float(self.problem.b_norms[0]))
        state.energy = energy - _ENERGY_FACTOR * rounding
        return energy + _ENERGY_FACTOR * rounding < before

    def _reached_floor(self, state: CgState) -> bool:
        """Return whether the residual was once near the rounding floor."""
        least = self.problem.absolute(min(state.residual_norms))
        return self.problem.stagnation(state.x, least) is StopReason.ROUNDING_FLOOR

    def _restart(self, state: CgState) -> StopReason | None:
        """Restart with the preconditioned residual as direction; the residual was computed as ``b - A x``."""
        reason, z = self._precondition(state)
        if reason is None:
            state.p[...] = z
            if self._at_once and self._with_product is None:
                self.problem.product(z, self.w)
            if self.w is not None:
                self.q[...] = self.w
                state.q = self.q
            self._reset_drift(state, self.problem.space.norm(state.r))
        return reason

    def _precondition(self, state: CgState) -> tuple[StopReason | None, Array]:
        """Set ``z = M r``, ``rho = r.z`` and, if the preconditioner computes it, ``w = A z``."""
        z = state.r
        if self._with_product is not None:
            z = self.z
            self._with_product.apply_with_product(state.r, z, self.w)
            self.problem.products += 1
        elif self.problem.M is not None:
            z = self.z
            self.problem.M.apply(state.r, z)
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

    def _true_residual(self, state: CgState, *, replace: bool = True) -> float:
        """Return ``||b - A x||`` at the cost of one product; ``replace`` overwrites r with this residual."""
        target = state.r if replace else (self.q if self.w is None else self.w)
        return self.problem.space.norm(self.problem.true_residual(state.x, target))

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

    def end(self, state: CgState, reason: StopReason) -> None:
        """Stop and compute the true residual."""
        self.residual = self._true_residual(state, replace=False)
        self.reason = self.problem.verdict(reason, self.residual, state.residual_norms)

    def result(self, state: CgState, shape: tuple[int, ...]) -> SolveResult:
        """Return the result, with x in the shape of the caller's b."""
        assert self.reason is not None, "the solve has ended"
        if math.isnan(self.residual) and self.reason is not StopReason.NOT_FINITE:
            self.residual = self._true_residual(state, replace=False)
        x, self.reason, self.residual = self.returned(state.x, self.reason, self.residual)
        recurrence = self._recurrence
        spent = self.problem.spent(
            matrix=0.0 if recurrence is None else recurrence.matrix_seconds,
            preconditioner=0.0 if recurrence is None else recurrence.preconditioner_seconds,
        )
        norms = state.residual_norms
        return self.problem.column_result(x.reshape(shape), self.reason, norms, self.residual, state=state, **spent)


def _scalars(state: CgState) -> dict[str, float]:
    names = ("matrix_norm", "drift", "first_drift")
    return {"next_rho": state.rho, **{name: getattr(state, name) for name in names}}
