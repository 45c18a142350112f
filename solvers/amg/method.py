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
``2 smoothing + degree + 1`` products; streamed they share a sweep if the ring has as many slots and one more. The last residual
takes ``smoothing + 1`` of them, unless they would need a sweep more without the others, or a GPU has gone on because further
iterations were expected. Fine vectors: b, y, p_f, x, m, u, r and three of the recurrence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np

from penstock.solvers.amg.level import RowFactors
from penstock.solvers.amg.sweep import CoarseSweep
from penstock.solvers.columns import ColumnSpace, Numbers
from penstock.solvers.method import Method
from penstock.solvers.problem import LinearProblem
from penstock.solvers.result import BREAKDOWNS, GOING_ON, StopReason
from penstock.solvers.states import SavedState, StateLayout, check_all, check_numbers, is_elsewhere
from penstock.spmv import Array, InputError

# Iterations without halving the smallest residual before, after which a solve stagnates.
_PATIENCE = 500
# Iterations between two tests for the rounding floor, each of which is a sweep.
_TEST_EVERY = 8
# Iterations after which the coarse level is judged, and the factor per iteration that is slow: a good one is ten digits in 25.
_JUDGED, _SLOW = 8, 0.4
# A residual above this multiple of its smallest value is dominated by rounding.
_GROWN = 10.0
# A residual stalls if an iteration leaves more than half of it, after four iterations that left 0.4 or less each on average.
# Growth is no stall: a residual grows when directions are left. Above 1e-4 it is far from the rounding floor.
_STEADY, _FAST, _STALLED, _NEAR_FLOOR = 4, 0.4, 0.5, 1e-4
# With more iterations than these to go, the next residual will hardly be small enough.
_FEW = 2.0
# Below this many rounding units of its terms a curvature is noise.
_NOISE = 16.0
#: Reasons of this recurrence after which plain conjugate gradients go on.
_LOST_ACCURACY = {StopReason.ROUNDING_FLOOR, *BREAKDOWNS}
#: What a solve says whose polynomial was widened.
_WIDENED = "the coarse level represents slow modes of this matrix badly, so the polynomial was widened"


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
        super().check(layout)
        check_all(layout, self, ("y", "p"))
        coarse = StateLayout((len(self.rho), *layout.shape[1:]), np.dtype(np.float64), layout.device)
        check_all(coarse, self, ("c", "p_c", "h", "rho"))

    @property
    def has_coarse_parts(self) -> bool:
        """Whether the state knows its coarse parts."""
        return len(self.rho) > 0

    def without_coarse_parts(self) -> Self:
        """Return what another coarse level can go on with."""
        return replace(self, c=self.c[:0], p_c=self.p_c[:0], h=self.h[:0], rho=self.rho[:0])


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

    @property
    def curvatures(self) -> Numbers:
        """The curvature, as of several right-hand sides."""
        return np.array([self.curvature])

    @curvatures.setter
    def curvatures(self, curvatures: Numbers) -> None:
        self.curvature = float(curvatures[0])


@dataclass(kw_only=True)
class CoarseBlockCgState(CoarseState):
    """Everything that the next iteration needs, for a block of right-hand sides; a checkpoint is a saved state.

    Parameters
    ----------
    curvatures : float64 array on the host, (columns,)
        ``p.Ap`` of the last directions; 0 for a column without one.
    reasons : list of StopReason or None
        For each column; None until it has ended.
    residual_norms : list of list of float
        Relative norms of each column, as in the result.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import block_cg, smoothed_aggregation
    >>> beam = Cantilever(nodes=(9, 3, 3), dof=3)
    >>> A, B = beam.matrix(), beam.load("shear", "axial")
    >>> M = smoothed_aggregation(A, coordinates=beam.mesh.coordinates(), aggregate_nodes=27)
    >>> state = block_cg(A, B, M=M, maxiter=2).state
    >>> type(state).__name__, state.iteration, block_cg(A, B, M=M, state=state).converged
    ('CoarseBlockCgState', 2, True)
    """

    host_arrays: ClassVar[tuple[str, ...]] = ("curvatures",)

    curvatures: Numbers
    reasons: list[StopReason | None]
    residual_norms: list[list[float]] = field(default_factory=list)

    def check(self, layout: StateLayout) -> None:
        """Raise an InputError if arrays or numbers do not fit the layout, or cannot be; the message names the first."""
        super().check(layout)
        if np.shape(self.curvatures) != layout.shape[1:]:
            raise InputError("the parts of the state do not fit each other; it is damaged")
        check_numbers({f"curvatures[{column}]": of for column, of in enumerate(self.curvatures.tolist())})


AnyState = CoarseCgState | CoarseBlockCgState


class CoarseConjugateGradients(Method, name="coarse_cg"):
    """Conjugate gradients with a coarse level for one problem, b ``(n,)`` or, in the subclass, ``(n, columns)``.

    Each column has its own directions: after a dozen iterations columns have little to learn from each other, and all passes
    over A are shared. Columns that have ended stand still.
    """

    State: ClassVar[type] = CoarseCgState

    def __init__(self, problem: LinearProblem) -> None:
        super().__init__(problem)
        self._sweep = CoarseSweep(problem, self._without_aside(problem.b))
        # All ranks that share a system have whole coarse vectors.
        self._coarse = ColumnSpace(self._sweep.g)

    def _without_aside(self, vectors: Array) -> Array:
        """Return vectors with zeros in the columns that need no solve."""
        if self.columns.aside:
            vectors = vectors.copy()
        for column in self.columns.aside:
            self.problem.column(vectors, column)[...] = 0
        return vectors

    def _new_state(self) -> AnyState:
        return CoarseCgState(**self._sweep.state_arrays(), residual_norms=self.columns.histories[0])

    def start(self, x0: Array | None) -> AnyState:
        """Solve for the coarse parts and compute the first residuals."""
        self.columns.reset()
        state = self._new_state()
        if self.columns.running:
            self._sweep.start(None if x0 is None else self._without_aside(x0), state.c, state.rho)
            self._next(state)
        else:
            state.x[...] = state.y[...] = 0
            self.columns.append(self.problem.b_norms)
        return state

    def taken(self, state: AnyState) -> AnyState:
        """Return a state with its arrays on the device of the matrix, except for x and y, which have a place there.

        Without coarse parts only x is used.
        """
        but = ("x", "y") if state.has_coarse_parts else ("x", "y", "p")
        return state.on_device(self.problem.A.device, but=but)

    def resume(self, state: AnyState) -> AnyState:
        """Compute again what the last sweep of the state's solve left; the tolerance may be another one."""
        problem, columns, done = self.problem, self.columns, state.iteration
        device = problem.A.device
        if len(columns.aside) == problem.columns:
            return self.start(None)
        if not state.has_coarse_parts:
            x = device.asarray(state.x) if is_elsewhere(state.x, device) else state.x.copy()
            anew: AnyState = self._start_at(x, done, columns.histories)
            return anew
        fits = state.rho.shape == self._sweep.g.shape
        iterates = state.x.copy() if fits and not is_elsewhere(state.x, device) else state.x
        recorded = [history[done:] for history in columns.histories]
        norms = [problem.absolute(of[0], column) if of else math.nan for column, of in enumerate(recorded)]
        if fits:
            self._take_up(state)
            if columns.are_recorded(_gaps(columns.residuals, norms), state.x):
                return state
        # Another coarse level, such as one of other aggregates or an earlier version's, goes on from the iterates of the system.
        iterates = device.asarray(iterates)
        residuals = self.space.norms(problem.true_residual(iterates, device.xp.empty_like(iterates)))
        columns.check_recorded(_gaps(residuals, norms), iterates)
        for history in columns.histories:
            del history[done + 1 :]
        return self.resume(replace(state.without_coarse_parts(), x=iterates))

    def _take_up(self, state: AnyState) -> None:
        """Repeat the last sweep of a state of this coarse level."""
        columns = self.columns
        state.x, state.y = self._sweep.take_up(state.x, state.y, widened=state.widened)
        stopped = [reason not in GOING_ON for reason in columns.reasons]
        state.curvatures = np.where(stopped, 0.0, state.curvatures)
        for column, reason in enumerate(columns.reasons):
            if reason is not StopReason.NOT_FINITE:
                columns.reasons[column] = columns.aside.get(column)
        for history in columns.histories:
            del history[state.iteration :]
        self._next(state)

    def _next(self, state: AnyState) -> None:
        """Compute the residuals of the iterates, and end the columns whose residual is small enough or cannot fall."""
        columns = self.columns
        self._sweep.run(state.c, state.rho)
        norms_of = self.space.norms_later(self._sweep.r)
        if columns.iterations_left > _FEW:
            self._sweep.complete_ahead()
        norms = norms_of()
        columns.append(norms)
        stuck = [column for column in columns.running if _is_stuck(columns.histories[column])]
        # One test at a time: that of the column which is nearest to the rounding floor.
        tested = min(stuck, key=lambda column: columns.histories[column][-1], default=None)
        for column, norm in enumerate(norms.tolist()):
            if column not in columns.aside:
                columns.residuals[column] = norm
        for column in columns.running:
            if (reason := self._ended(column, test=column == tested)) is not None:
                self._end_column(state, column, reason)

    def _ended(self, column: int, *, test: bool) -> StopReason | None:
        """Return why a right-hand side needs no further iteration of this kind, or None.

        Where the residual has reached the rounding floor of this recurrence, or stays or grows, plain conjugate gradients with
        the same preconditioner may still get on: their residuals are more accurate.
        """
        norms, residual = self.columns.histories[column], float(self.columns.residuals[column])
        if self.columns.test(column, residual):
            return self.columns.reasons[column]
        if test and (_has_grown(norms) or self._sweep.at_floor(residual, column)):
            return StopReason.ROUNDING_FLOOR
        stalled = len(norms) > _PATIENCE and norms[-1] > 0.5 * min(norms[:-_PATIENCE])
        return StopReason.STAGNATED if stalled else None

    def _end_column(self, state: AnyState, column: int, reason: StopReason) -> None:
        self.columns.end(column, reason)
        if reason is StopReason.NOT_FINITE:
            self._sweep.clear(column)
            for vectors in (state.y, state.p, state.c, state.p_c, state.h, state.rho):
                self.problem.column(vectors, column)[...] = 0

    def advance(self, state: AnyState, iterations: int) -> StopReason | None:
        """Iterate."""
        columns = self.columns
        for _ in range(iterations):
            self._update(state)
            if not columns.running:
                break
            state.iteration += 1
            if self._may_widen(state) and any(_is_slow(columns.histories[column]) for column in columns.running):
                self._sweep.widen()
                # Directions of another preconditioner would disturb those of this one: begin anew.
                state.widened, state.curvatures = True, np.zeros(self.problem.columns)
            self._next(state)
            if self._is_held_up():
                self._begin_anew(state)
            if not columns.running:
                break
        return None

    def _is_held_up(self) -> bool:
        """Return whether rounding in ``P c`` holds a residual up near the floor; it is less where c is but a correction of y."""
        columns = self.columns
        stalled = [column for column in columns.running if _has_stalled(columns.histories[column])]
        return any(self._sweep.at_floor(float(columns.residuals[column]), column) for column in stalled)

    def _may_widen(self, state: AnyState) -> bool:
        """Return whether the polynomial may be widened: once, and not for groups, whose slow modes T has columns for."""
        return not state.widened and self._sweep.M.level.groups is None

    def _update(self, state: AnyState) -> None:
        """Advance the iterates along the new directions; the vectors of the last sweep are used up."""
        sweep, columns = self._sweep, self.columns
        sweep.complete()
        e1, g, level, A_c, m, u = sweep.e1, sweep.g, sweep.M.level, sweep.M.level.A, sweep.m, sweep.u
        e2 = level.solve(state.rho - A_c.apply(e1) - g)
        z_c = e1 + e2
        A_z = A_c.apply(z_c)
        fine = (sweep.r, m), (m, u), (state.p, u)
        coarse = (e1, g), (state.rho, z_c), (g, z_c), (z_c, A_z), (state.p_c, g), (state.h, z_c)
        (rm, mu, pu), (eg, rho_z, gz, zAz, pg, hz) = self.space.dots_with(fine, self._coarse, coarse)
        rz, zq, curvatures = rm + eg + rho_z, pu + pg + hz, state.curvatures
        moved = curvatures > 0
        with np.errstate(all="ignore"):
            beta = np.where(moved, -zq / curvatures, 0.0)
            terms = (mu, 2.0 * gz, zAz, np.where(moved, beta * zq, 0.0))
            zw = terms[0] + terms[1] + terms[2] + terms[3]
            alpha = rz / zw
        faults = self._faults(rz, zw, terms)
        if any(fault in BREAKDOWNS and moved[column] for column, fault in faults.items()):
            self._begin_anew(state)
            if columns.running:
                self._update(state)
            return
        for column, fault in faults.items():
            self._end_column(state, column, fault)
            for vectors in (z_c, A_z):
                self.problem.column(vectors, column)[...] = 0
        if not columns.running:
            return
        stands = np.array([reason is not None for reason in columns.reasons])
        alpha, beta, one = np.where(stands, 0.0, alpha), np.where(stands, 0.0, beta), np.ones(len(stands))
        state.curvatures = np.where(stands, 0.0, zw)
        self.space.combine(one, m, beta, state.p)
        self.space.combine(alpha, state.p, one, state.y)
        # In place: a checkpoint and a captured graph refer to these arrays.
        of_alpha, of_beta = self.space.factor(alpha), self.space.factor(beta)
        state.p_c *= of_beta
        state.p_c += z_c
        state.c += of_alpha * state.p_c
        state.h *= of_beta
        state.h += g + A_z
        state.rho -= of_alpha * state.h

    def _faults(self, rz: Numbers, zw: Numbers, terms: tuple[Numbers, ...]) -> dict[int, StopReason]:
        """Return why running columns cannot go on, from ``r.z`` and the curvatures of their new directions.

        A curvature is the sum of the terms. Where they cancel it is rounding, which says nothing of the matrix.
        """
        faults, noise = {}, _NOISE * self.problem.unit * np.asarray(sum(map(abs, terms)))
        for column in self.columns.running:
            if not (math.isfinite(rz[column]) and math.isfinite(zw[column])):
                faults[column] = StopReason.NOT_FINITE
            elif not (rz[column] > 0 and zw[column] > noise[column]):
                definite = StopReason.NOT_POSITIVE_DEFINITE
                fault = definite if rz[column] > 0 else StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE
                at_floor = self._sweep.at_floor(float(self.columns.residuals[column]), column)
                faults[column] = StopReason.ROUNDING_FLOOR if at_floor else fault
        return faults

    def _begin_anew(self, state: AnyState) -> None:
        """Go on from the iterates, with y in their place, and without the directions so far.

        In directions at the floor rounding may look like a matrix that is not definite. The iterates of columns that have ended
        stand still.
        """
        column_of, columns = self.problem.column, self.columns
        for column, reason in enumerate(columns.reasons):
            if reason is StopReason.NOT_FINITE:
                column_of(state.x, column)[...] = 0
        self._sweep.start(state.x, state.c, state.rho)
        for column in columns.ended:
            column_of(state.c, column)[...] = column_of(state.rho, column)[...] = 0
        state.curvatures = np.zeros(self.problem.columns)
        for norms in columns.histories:
            norms.pop()
        self._next(state)

    def true_norms(self, state: AnyState) -> Numbers:
        """Return the residuals of the last sweep, which are those of the iterates."""
        return self.columns.residuals

    def has_lost_accuracy(self, state: AnyState) -> bool:
        """Return whether a column ended for a reason that plain conjugate gradients may not meet, and none was stopped."""
        reasons = set(self.columns.reasons)
        return not {StopReason.STOPPED, StopReason.MAXITER} & reasons and bool(reasons & _LOST_ACCURACY)

    def finish(self, state: AnyState) -> None:
        """Give the vectors back to the preconditioner."""
        state.x, state.y = self._sweep.end()

    def result(self, state: AnyState, shape: tuple[int, ...] | None = None, note: str = "") -> Any:
        """Return the result, which says whether nodes were grouped and whether the polynomial was widened."""
        if state.widened:
            return super().result(state, shape, f"; {_WIDENED}")
        groups = self._sweep.M.level.groups
        grouped = f"; {groups.remark}" if isinstance(groups, RowFactors) else ""
        return super().result(state, shape, f"{note}{grouped}")


class CoarseBlockConjugateGradients(CoarseConjugateGradients, name="coarse_block_cg"):
    """The same for a block of right-hand sides, whose state holds the reasons of columns too."""

    State: ClassVar[type] = CoarseBlockCgState

    def _new_state(self) -> AnyState:
        columns = self.columns
        vectors, curvatures = self._sweep.state_arrays(), np.zeros(self.problem.columns)
        return CoarseBlockCgState(
            **vectors, curvatures=curvatures, reasons=columns.reasons, residual_norms=columns.histories
        )


def _is_slow(norms: list[float]) -> bool:
    """Return whether the residual falls so slowly that the polynomial should do more."""
    count = len(norms) - 1
    return count >= _JUDGED and norms[-1] > _SLOW**count * norms[0]


def _gaps(residuals: Any, recorded: list[float]) -> Any:
    """Return by how much residuals differ from those that a state records; 0 where it records none."""
    return np.where(np.isnan(recorded), 0.0, abs(residuals - np.array(recorded)))


def _has_stalled(norms: list[float]) -> bool:
    """Return whether the residual, which fell fast, has suddenly stopped falling."""
    if len(norms) < _STEADY + 2 or norms[-2] > _NEAR_FLOOR:
        return False
    fell = norms[-2] < _FAST**_STEADY * norms[-2 - _STEADY]
    return fell and _STALLED * norms[-2] < norms[-1] <= norms[-2]


def _is_stuck(norms: list[float]) -> bool:
    """Return whether the residual has not halved lately, so that a test for the rounding floor is worth its sweep.

    At the floor directions are noise, which makes the residual grow again.
    """
    count = len(norms) - 1
    return count > 0 and count % _TEST_EVERY == 0 and norms[-1] > 0.5 * min(norms[:-_TEST_EVERY])


def _has_grown(norms: list[float]) -> bool:
    """Return whether the residual has grown far above the smallest one, as it does where directions have become noise."""
    return len(norms) > _JUDGED and norms[-1] > _GROWN * min(norms)
