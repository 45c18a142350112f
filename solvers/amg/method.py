"""Conjugate gradients with a coarse level, whose iteration is one pass over A.

The preconditioner is coarse - polynomial - coarse, ``M = 2 Q - Q A Q + (I - Q A) q(D A) D (I - A Q)`` with ``Q = P B P^T``,
``P = p(D A) T`` and B an approximate inverse of ``A_c = P^T A P`` (balancing: Mandel 1993; both coarse solves make an inexact B
harmless: Tang, Nabben, Vuik and Erlangga 2009). Iterate and search direction keep their coarse parts in coarse coordinates,
``x = y + P c`` and ``p = p_f + P p_c``, so that all products with A of an iteration follow each other::

    e1 = B rho                                          rho = P^T (b - A x)
    v  = T (c + e1)
    v  = p(D A) v + y                                   the iterate x + P e1             smoothing products
    r  = b - A v                                        its true residual                1 product
    m  = q(D A) D r                                     the polynomial                   degree - 1 products
    u  = A m                                                                             1 product
    s  = A p(D A) m                                     g = T^T s = P^T A m              smoothing products
    e2 = B (rho - A_c e1 - g),   z_c = e1 + e2          z = M r = m + P z_c

and all inner products are sums of fine ones and of coarse ones, because ``P^T A`` of a coarse part is a product with ``A_c``::

    r.z  = r.m + e1.g + rho.z_c
    z.Az = m.u + 2 g.z_c + z_c.A_c z_c
    z.Ap = p_f.u + p_c.g + h.z_c                        h = P^T A p

The direction is made conjugate by ``beta = -z.Ap / p.Ap``, as B may vary a little (flexible CG, Notay 2000). An iteration needs
``2 smoothing + degree + 1`` products; streamed they share a sweep if the ring has as many slots and one more. Fine vectors: b, y,
p_f, x, m, u, r and three of the recurrence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from penstock.solvers.amg.sweep import (
    LOST_ACCURACY,
    WIDENED,
    CoarseState,
    CoarseSweep,
    breakdown,
    ended,
    is_slow,
    is_stuck,
)
from penstock.solvers.method import Method
from penstock.solvers.problem import LinearProblem
from penstock.solvers.result import BREAKDOWNS, SolveResult, StopReason
from penstock.solvers.states import StateLayout, check_history, check_numbers
from penstock.spmv import Array, VectorSpace


@dataclass(kw_only=True)
class CoarseCgState(CoarseState):
    """Everything that the next iteration needs, for one right-hand side; a checkpoint is a saved state.

    Parameters
    ----------
    curvature : float
        ``p.Ap`` of the last direction; 0 without one.
    residual_norms : list of float
        Relative, as in the result.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import cg, smoothed_aggregation
    >>> beam = Cantilever(nodes=(9, 3, 3), dof=3)
    >>> A, b = beam.matrix(), beam.load()
    >>> M = smoothed_aggregation(A, coordinates=beam.mesh.coordinates(), aggregate_nodes=27)
    >>> state = cg(A, b, M=M, maxiter=2).state
    >>> type(state).__name__, state.iteration, cg(A, b, M=M, state=state).converged
    ('CoarseCgState', 2, True)
    """

    curvature: float = 0.0
    residual_norms: list[float] = field(default_factory=list)

    def check(self, layout: StateLayout) -> None:
        """Raise an InputError if arrays or numbers do not fit the layout, or cannot be; the message names the first."""
        super().check(layout)
        check_numbers({"curvature": self.curvature})
        check_history(self.residual_norms)


class CoarseConjugateGradients(Method, name="coarse_cg"):
    """Conjugate gradients with a coarse level for one problem with b of shape ``(n,)``."""

    State: ClassVar[type] = CoarseCgState

    def __init__(self, problem: LinearProblem) -> None:
        self.problem, self._space = problem, problem.space
        # All ranks that share a system have whole coarse vectors.
        self._coarse_space = VectorSpace(problem.A.device)
        problem.set_norms(np.array([problem.space.norm(problem.b)]))
        self._sweep = CoarseSweep(problem, problem.b)
        self._level = self._sweep.M.level

    def start(self, x0: Array | None) -> CoarseCgState:
        """Solve for the coarse part and compute the first residual."""
        problem, sweep = self.problem, self._sweep
        state = CoarseCgState(**sweep.state_arrays())
        if problem.empty or problem.out_of_range:
            norm = float(problem.b_norms[0])
            state.x[...] = state.y[...] = 0
            self.reason, self.residual = StopReason.CONVERGED if problem.empty else StopReason.NOT_FINITE, norm
            state.residual_norms = [norm if problem.empty else 1.0]
            return state
        sweep.start(x0, state.c, state.rho)
        self._next(state)
        return state

    def resume(self, state: CoarseCgState) -> CoarseCgState:
        """Compute again what the last sweep of the state's solve left."""
        if self.problem.empty or self.problem.out_of_range:
            return self.start(None)
        if not state.has_coarse_parts:
            anew = self.start(state.x.copy())
            anew.iteration = state.iteration
            anew.residual_norms = state.residual_norms[: state.iteration] + anew.residual_norms
            return anew
        self._sweep.take_up(state)
        recorded, state.residual_norms = state.residual_norms, state.residual_norms[: state.iteration]
        self._next(state)
        if len(recorded) > state.iteration:
            gap = abs(self.residual - self.problem.absolute(recorded[state.iteration]))
            self.problem.check_recorded(gap, recorded, state.x)
        return state

    def _next(self, state: CoarseCgState) -> None:
        """Compute the residual of the iterate, and stop if it is small enough or cannot fall."""
        self._sweep.run(state.c, state.rho)
        self.residual = self._space.norm(self._sweep.r)
        norms = state.residual_norms
        norms.append(self.problem.relative(self.residual))
        self.reason = ended(self._sweep, norms, self.residual, test=is_stuck(norms))

    def advance(self, state: CoarseCgState, iterations: int) -> StopReason | None:
        """Iterate."""
        for _ in range(iterations):
            reason = self._update(state)
            if reason in BREAKDOWNS and state.curvature > 0:
                self._begin_anew(state)
                if self.reason is not None:
                    break
                reason = self._update(state)
            if reason is not None:
                return reason
            state.iteration += 1
            if not state.widened and is_slow(state.residual_norms):
                self._sweep.widen()
                # Directions of another preconditioner would disturb those of this one: begin anew.
                state.widened, state.curvature = True, 0.0
            self._next(state)
            if self.reason is not None:
                break
        return None

    def _begin_anew(self, state: CoarseCgState) -> None:
        """Go on from the iterate without the directions so far: rounding in them may look like a matrix that is not definite."""
        self._sweep.start(state.x, state.c, state.rho)
        state.curvature = 0.0
        state.residual_norms.pop()
        self._next(state)

    def _update(self, state: CoarseCgState) -> StopReason | None:
        """Advance the iterate along the new direction; the vectors of the last sweep are used up."""
        level, sweep = self._level, self._sweep
        e1, g, A_c, m, u = sweep.e1, sweep.g, level.A, sweep.m, sweep.u
        e2 = level.solve(state.rho - A_c.apply(e1) - g)
        z_c = e1 + e2
        A_z = A_c.apply(z_c)
        rm, mu, pu = self._space.dots((sweep.r, m), (m, u), (state.p, u))
        eg, rho_z, gz, zAz, pg, hz = self._coarse_space.dots(
            (e1, g), (state.rho, z_c), (g, z_c), (z_c, A_z), (state.p_c, g), (state.h, z_c)
        )
        rz, zq = rm + eg + rho_z, pu + pg + hz
        beta = -zq / state.curvature if state.curvature > 0 else 0.0
        terms = (mu, 2.0 * gz, zAz, beta * zq)
        zw = sum(terms)
        if (fault := breakdown(sweep, rz, zw, terms, self.residual)) is not None:
            return fault
        alpha = rz / zw
        state.curvature = zw
        self._space.combine(1.0, m, beta, state.p)
        self._space.combine(alpha, state.p, 1.0, state.y)
        # In place: a checkpoint and a captured graph refer to these arrays.
        state.p_c *= beta
        state.p_c += z_c
        state.c += alpha * state.p_c
        state.h *= beta
        state.h += g + A_z
        state.rho -= alpha * state.h
        return None

    def iterations_left(self, state: CoarseCgState) -> float:
        """Return the expected number of further iterations at the mean rate so far."""
        norms, target = state.residual_norms, self.problem.relative(float(self.problem.tolerances[0]))
        if len(norms) < 2 or not 0 < norms[-1] < norms[0] or target <= 0:
            return math.inf
        return max(0.0, math.log(norms[-1] / target) / (math.log(norms[0] / norms[-1]) / (len(norms) - 1)))

    def end(self, state: CoarseCgState, reason: StopReason) -> None:
        """Stop; the residual of the last sweep is that of the iterate."""
        self.reason = self.problem.verdict(reason, self.residual, state.residual_norms)

    def has_lost_accuracy(self, state: CoarseCgState) -> bool:
        """Return whether the solve ended for a reason that plain conjugate gradients may not meet."""
        return self.reason in LOST_ACCURACY

    def finish(self, state: CoarseCgState) -> None:
        """Give the vectors back to the preconditioner."""
        state.x, state.y = state.x.copy(), state.y.copy()
        self._sweep.end()

    def result(self, state: CoarseCgState, shape: tuple[int, ...]) -> SolveResult:
        """Return the result, with x in the shape of the caller's b."""
        assert self.reason is not None, "the solve has ended"
        self.finish(state)
        x, self.reason, self.residual = self.returned(state.x, self.reason, self.residual)
        spent = self.problem.spent(matrix=self.problem.matrix_seconds, preconditioner=0.0)
        result = self.problem.column_result(
            x.reshape(shape), self.reason, state.residual_norms, self.residual, state=state, **spent
        )
        return replace(result, message=f"{result.message}; {WIDENED}") if state.widened else result
