"""One pass over A of conjugate gradients with a coarse level: see :mod:`penstock.solvers.amg.method`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, cast

import numpy as np

from penstock.solvers.amg.galerkin import PRODUCT
from penstock.solvers.amg.level import HasCoarseLevel
from penstock.solvers.problem import LinearProblem
from penstock.solvers.result import BREAKDOWNS, StopReason
from penstock.solvers.saved_state import SavedState
from penstock.solvers.states import StateLayout, check_all, check_counts, direction_kept
from penstock.spmv import Array, Device, InputError, SweptOperator
from penstock.spmv.vectors.recurrence import Recurrence, RecurrenceStep

# Iterations without halving the smallest residual before, after which a solve stagnates.
_PATIENCE = 500
# Iterations between two tests for the rounding floor, each of which is a sweep.
_TEST_EVERY = 8
# Iterations after which the coarse level is judged, and the factor per iteration that is slow: a good one is ten digits in 25.
_JUDGED, _SLOW = 8, 0.4
# A residual above this multiple of its smallest value is dominated by rounding.
_GROWN = 10.0
# Below this many rounding units of its terms a curvature is noise.
_NOISE = 16.0
#: Reasons of this recurrence after which plain conjugate gradients go on.
LOST_ACCURACY = (StopReason.ROUNDING_FLOOR, *BREAKDOWNS)
#: What a solve whose polynomial was widened says.
WIDENED = "the coarse level represents slow modes of this matrix badly, so the polynomial was widened"


@dataclass(kw_only=True)
class CoarseState(SavedState):
    """What one right-hand side and a block of them keep between two iterations.

    Parameters
    ----------
    x, y, p : array, (n,) or (n, columns)
        The iterate, and the fine parts of the iterate and of the search direction.
    c, p_c, h, rho : array, (unknowns of the coarse level,) or (..., columns)
        Their coarse parts, ``P^T A p`` and ``P^T (b - A x)``. A state without them, see :meth:`without_coarse_parts`, goes on
        from its iterate with new directions.
    iteration : int
    widened : bool
        Whether the polynomial has been widened, because the coarse level represents slow modes badly.
    system : SystemMark, optional
        What the state knows of its system.
    """

    vectors: ClassVar[tuple[str, ...]] = ("x", "y", "p")
    device_arrays: ClassVar[tuple[str, ...]] = ("c", "p_c", "h", "rho")

    x: Array
    y: Array
    p: Array
    c: Array
    p_c: Array
    h: Array
    rho: Array
    iteration: int = 0
    widened: bool = False

    def check(self, layout: StateLayout) -> None:
        """Raise an InputError if arrays or numbers do not fit the layout, or cannot be; the message names the first."""
        check_all(layout, self, ("x", "y", "p"))
        coarse = StateLayout((len(self.rho), *layout.shape[1:]), np.dtype(np.float64), layout.device)
        check_all(coarse, self, ("c", "p_c", "h", "rho"))
        check_counts(iteration=self.iteration)

    @property
    def has_coarse_parts(self) -> bool:
        """Whether the state knows its coarse parts."""
        return len(self.rho) > 0

    def on(self, device: Device) -> Self:
        """Return the state with its coarse parts on a device."""
        c, p_c, h, rho = (device.asarray(part) for part in (self.c, self.p_c, self.h, self.rho))
        return replace(self, c=c, p_c=p_c, h=h, rho=rho)

    def without_coarse_parts(self) -> Self:
        """Return what another coarse level can go on with."""
        return replace(self, c=self.c[:0], p_c=self.p_c[:0], h=self.h[:0], rho=self.rho[:0])


class CoarseSweep:
    """All products of an iteration, for b of shape (n,) or a block (n, k); other vectors have the shape of b.

    x and y are the iterate and its fine part, which the solver advances; r, m and u are the residual ``b - A x``, ``m = q(D A)
    D r`` and ``u = A m``. e1 and g have a row for each unknown of the coarse level: the coarse correction that x contains, and
    ``P^T A m``.
    """

    def __init__(self, problem: LinearProblem, b: Array) -> None:
        self.problem, self._b = problem, b
        self.M = M = cast(HasCoarseLevel, problem.M)
        # A GPU replays captured sweeps, which always use the same memory: the vectors of one solve go to the next.
        self._vectors = M.lend_vectors(b)
        self._v, self._other, self.m, self.u, self._image, self.r, self.x, self.y = self._vectors
        self._image[...] = 0
        self.g, self.e1 = (problem.A.device.xp.zeros((M.level.T.unknowns, *b.shape[1:])) for _ in range(2))
        self._set_steps(M.first, M.polynomial)

    def _set_steps(self, first: float, polynomial: Sequence[RecurrenceStep]) -> None:
        smooth = self.M.smooth
        steps = [
            *smooth[:-1],
            replace(smooth[-1], adds=True),
            RecurrenceStep(first, 0.0, 0.0, forms_residual=True, keeps=0),
            *polynomial,
            replace(smooth[0], keeps=1),
            *smooth[1:],
            PRODUCT,
        ]
        self._recurrence = Recurrence(
            steps, self._v, self._other, self.r, self.M.diagonal.blocks, self._image, self.problem.space,
            added=self.y, kept=((self.x, None), (self.m, self.u)),
        )  # fmt: skip

    def widen(self) -> None:
        """Use the polynomial for a matrix whose slow modes the coarse level represents badly, from the next sweep on."""
        self._set_steps(*self.M.wide_polynomial())

    def state_arrays(self) -> dict[str, Array]:
        """Return the arrays of a state before the first iteration, x and y those of this object."""
        coarse = {name: self.problem.A.device.xp.zeros_like(self.g) for name in ("c", "p_c", "h", "rho")}
        return {"x": self.x, "y": self.y, "p": self.problem.A.device.xp.zeros_like(self.y), **coarse}

    def take_up(self, state: CoarseState) -> None:
        """Go on where another solve ended: x and y of the state become those of this object, which repeats its last sweep."""
        if state.rho.shape != self.g.shape:
            raise InputError(
                f"the state has {len(state.rho)} unknowns of the coarse level, and this one {len(self.g)}; resume with the "
                "coarse level that it came from, or with state.without_coarse_parts()"
            )
        if state.widened:
            self.widen()
        self._turn_back()
        self.x[...], self.y[...] = state.x, state.y
        state.x, state.y = self.x, self.y

    def start(self, x0: Array | None, c: Array, rho: Array) -> None:
        """Set y to the guess, c to the coarse part that is best for it, and ``rho = P^T (b - A x)``; a sweep of few products."""
        problem, level, began = self.problem, self.M.level, time.perf_counter()
        self.y[...] = 0 if x0 is None else x0
        self.r[...] = self._b
        if x0 is not None:
            problem.product(self.y, self.r, alpha=-1.0, beta=1.0)
        self.M.restrict(self.r, rho, (self._v, self._other, self._image))
        problem.products += len(self.M.smooth)
        problem.matrix_seconds += time.perf_counter() - began
        c[...] = level.solve(rho)
        level.A.apply(c, rho, alpha=-1.0, beta=1.0)

    def run(self, c: Array, rho: Array) -> None:
        """Compute the residual of the iterate, and what the next update needs; one pass over A."""
        problem, T, began = self.problem, self.M.level.T, time.perf_counter()
        self.e1[...] = self.M.level.solve(rho)
        T.prolong(c + self.e1, self._v)
        self.r[...] = self._b
        s = self._recurrence.run(problem.A)
        problem.products += len(self._recurrence.steps)
        problem.matrix_seconds += time.perf_counter() - began
        T.restrict(s, self.g)

    def at_floor(self, residual: float, column: int = 0) -> bool:
        """Return whether the residual of x has reached the rounding floor; a sweep that leaves the direction as it was."""
        with direction_kept(self.problem.A):
            return self.problem.stagnation(self.x, residual, column) is StopReason.ROUNDING_FLOOR

    def _turn_back(self) -> None:
        """Let the next sweep repeat the last one in its direction, because half of a matrix adds in the order of the rows."""
        A = self.problem.A
        if isinstance(A, SweptOperator):
            A.turn_back(len(self._recurrence.steps))

    def end(self) -> None:
        """Return the vectors, x and y among them, for the next solve."""
        self.M.return_vectors(self._vectors)


def is_slow(norms: list[float]) -> bool:
    """Return whether the residual falls so slowly that the polynomial should do more."""
    count = len(norms) - 1
    return count >= _JUDGED and norms[-1] > _SLOW**count * norms[0]


def is_stuck(norms: list[float]) -> bool:
    """Return whether the residual has not halved lately, so that a test for the rounding floor is worth its sweep.

    At the floor directions are noise, which makes the residual grow again.
    """
    count = len(norms) - 1
    return count > 0 and count % _TEST_EVERY == 0 and norms[-1] > 0.5 * min(norms[:-_TEST_EVERY])


def _has_grown(norms: list[float]) -> bool:
    """Return whether the residual has grown far above the smallest one, as it does where directions have become noise."""
    return len(norms) > _JUDGED and norms[-1] > _GROWN * min(norms)


def ended(sweep: CoarseSweep, norms: list[float], residual: float, *, test: bool, column: int = 0) -> StopReason | None:
    """Return why a right-hand side needs no further iteration of this kind, or None.

    ``norms`` are relative, ``residual``, the last one, is not. Where the residual has reached the rounding floor of this
    recurrence, or stays or grows, plain conjugate gradients with the same preconditioner may still get on: their residuals are
    more accurate.
    """
    problem = sweep.problem
    if residual <= problem.tolerances[column]:
        return StopReason.CONVERGED
    if not math.isfinite(residual):
        return StopReason.NOT_FINITE
    if test and (_has_grown(norms) or sweep.at_floor(residual, column)):
        return StopReason.ROUNDING_FLOOR
    stalled = len(norms) > _PATIENCE and norms[-1] > 0.5 * min(norms[:-_PATIENCE])
    return StopReason.STAGNATED if stalled else None


def breakdown(
    sweep: CoarseSweep, rz: float, curvature: float, terms: Sequence[float], residual: float, column: int = 0
) -> StopReason | None:
    """Return why a right-hand side cannot go on, from ``r.z`` and the curvature of its new direction, or None.

    The curvature is the sum of the terms. Where they cancel it is rounding, which says nothing of the matrix.
    """
    if not (math.isfinite(rz) and math.isfinite(curvature)):
        return StopReason.NOT_FINITE
    if rz > 0 and curvature > _NOISE * sweep.problem.unit * sum(map(abs, terms)):
        return None
    if sweep.at_floor(residual, column):
        return StopReason.ROUNDING_FLOOR
    return StopReason.NOT_POSITIVE_DEFINITE if rz > 0 else StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE
