"""Conjugate gradients with a coarse level for several right-hand sides, which share the passes over A."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
from penstock.solvers.method import HasColumns, Method
from penstock.solvers.problem import LinearProblem
from penstock.solvers.result import BREAKDOWNS, BlockSolveResult, StopReason
from penstock.solvers.states import StateLayout, check_history, check_numbers
from penstock.spmv import Array, InputError
from penstock.spmv.vectors.block_space import BlockSpace

Numbers = np.ndarray[Any, np.dtype[np.float64]]


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
        for norms in self.residual_norms:
            check_history(norms)
        if {np.shape(self.curvatures), (len(self.reasons),), (len(self.residual_norms),)} != {layout.shape[1:]}:
            raise InputError("the parts of the state do not fit each other; it is damaged")
        check_numbers({f"curvatures[{column}]": of for column, of in enumerate(self.curvatures.tolist())})


class CoarseBlockConjugateGradients(HasColumns, Method, name="coarse_block_cg"):
    """The method of :mod:`penstock.solvers.amg.method` for a block of right-hand sides, ``(n, columns)``.

    Each column has its own directions: after a dozen iterations columns have little to learn from each other, and all passes
    over A are shared. Columns that have ended stand still.
    """

    State: ClassVar[type] = CoarseBlockCgState

    def __init__(self, problem: LinearProblem) -> None:
        self.problem, device, (n, columns) = problem, problem.A.device, problem.b.shape
        self._fine = BlockSpace(device, n, columns, problem.b.dtype, problem.space.communicator)
        problem.set_norms(np.sqrt(np.maximum(self._fine.dots(problem.b, problem.b), 0.0)))
        # Columns whose right-hand side is zero or out of the range of numbers need no solve.
        self._aside = problem.aside
        b = self._without_aside(problem.b)
        self._sweep = CoarseSweep(problem, b)
        self._level = self._sweep.M.level
        self._coarse = BlockSpace(device, self._level.T.unknowns, columns, np.float64)
        self.residuals = np.full(columns, math.nan)

    def start(self, x0: Array | None) -> CoarseBlockCgState:
        """Solve for the coarse parts and compute the first residuals."""
        sweep, count = self._sweep, self.problem.columns
        reasons = [self._aside.get(column) for column in range(count)]
        state = CoarseBlockCgState(**sweep.state_arrays(), curvatures=np.zeros(count), reasons=reasons)
        state.residual_norms = [[] for _ in range(count)]
        sweep.start(None if x0 is None else self._without_aside(x0), state.c, state.rho)
        self._next(state)
        return state

    def _without_aside(self, block: Array) -> Array:
        """Return a block with zeros in the columns that need no solve."""
        if not self._aside:
            return block
        block = block.copy()
        block[:, list(self._aside)] = 0
        return block

    def resume(self, state: CoarseBlockCgState) -> CoarseBlockCgState:
        """Compute again what the last sweep of the state's solve left; the tolerance may be another one."""
        if not state.has_coarse_parts:
            anew = self.start(state.x.copy())
            before = (norms[: state.iteration] for norms in state.residual_norms)
            anew.residual_norms = [old + new for old, new in zip(before, anew.residual_norms, strict=True)]
            anew.iteration = state.iteration
            return anew
        self._sweep.take_up(state)
        state.reasons = [reason if reason is StopReason.NOT_FINITE else None for reason in state.reasons]
        recorded = state.residual_norms
        state.residual_norms = [norms[: state.iteration] for norms in state.residual_norms]
        for column, reason in self._aside.items():
            state.reasons[column] = reason
        self._next(state)
        for column, norms in enumerate(recorded):
            if len(norms) > state.iteration and column not in self._aside:
                gap = abs(float(self.residuals[column]) - self.problem.absolute(norms[state.iteration], column))
                self.problem.check_recorded(gap, norms, state.x, column)
        return state

    def _next(self, state: CoarseBlockCgState) -> None:
        """Compute the residuals of the iterates, and end the columns whose residual is small enough or cannot fall."""
        self._sweep.run(state.c, state.rho)
        squares = self._fine.dots(self._sweep.r, self._sweep.r)
        for column, norms in enumerate(state.residual_norms):
            residual = math.sqrt(squares[column]) if squares[column] >= 0 else math.nan
            self.residuals[column] = float(self.problem.b_norms[column]) if column in self._aside else residual
            norms.append(self.problem.relative(self.residuals[column], column))
        stuck = [column for column in self.running_columns(state) if is_stuck(state.residual_norms[column])]
        # One test at a time: that of the column which is nearest to the rounding floor.
        tested = min(stuck, key=lambda column: state.residual_norms[column][-1], default=None)
        for column in self.running_columns(state):
            norms, residual = state.residual_norms[column], float(self.residuals[column])
            self._end_column(state, column, ended(self._sweep, norms, residual, test=column == tested, column=column))

    def _end_column(self, state: CoarseBlockCgState, column: int, reason: StopReason | None) -> None:
        state.reasons[column] = reason
        if reason is not None:
            state.curvatures[column] = 0.0
        if reason is StopReason.NOT_FINITE:  # NaN times zero would be NaN in every other column
            sweep = self._sweep
            of_state = (state.y, state.p, state.c, state.p_c, state.h, state.rho)
            for block in (*of_state, sweep.m, sweep.u, sweep.g, sweep.e1):
                block[:, column] = 0

    def advance(self, state: CoarseBlockCgState, iterations: int) -> StopReason | None:
        """Iterate."""
        for _ in range(iterations):
            self._update(state)
            if not self.running(state):
                break
            state.iteration += 1
            if not state.widened and any(
                is_slow(state.residual_norms[column]) for column in self.running_columns(state)
            ):
                self._sweep.widen()
                # Directions of another preconditioner would disturb those of this one: begin anew.
                state.widened, state.curvatures = True, np.zeros_like(state.curvatures)
            self._next(state)
            if not self.running(state):
                break
        return None

    def _update(self, state: CoarseBlockCgState) -> None:
        """Advance the iterates along the new directions; the vectors of the last sweep are used up."""
        level, sweep, asarray = self._level, self._sweep, self.problem.A.device.asarray
        e1, g, A_c, m, u = sweep.e1, sweep.g, level.A, sweep.m, sweep.u
        e2 = level.solve(state.rho - A_c.apply(e1) - g)
        z_c = e1 + e2
        A_z = A_c.apply(z_c)
        fine, coarse = self._fine, self._coarse
        rz = fine.dots(sweep.r, m) + coarse.dots(e1, g) + coarse.dots(state.rho, z_c)
        terms = [fine.dots(m, u), 2.0 * coarse.dots(g, z_c), coarse.dots(z_c, A_z)]
        zq = fine.dots(state.p, u) + coarse.dots(state.p_c, g) + coarse.dots(state.h, z_c)
        moved = state.curvatures > 0
        with np.errstate(all="ignore"):
            beta = np.where(moved, -zq / state.curvatures, 0.0)
            terms.append(np.where(moved, beta * zq, 0.0))
            zw = np.add.reduce(terms)
            alpha = rz / zw
        faults = self._faults(state, rz, zw, np.array(terms))
        if any(fault in BREAKDOWNS and moved[column] for column, fault in faults.items()):
            self._begin_anew(state)
            if self.running(state):
                self._update(state)
            return
        for column, fault in faults.items():
            self._end_column(state, column, fault)
            z_c[:, column] = A_z[:, column] = 0
        stands = np.array([reason is not None for reason in state.reasons])
        alpha, beta = np.where(stands, 0.0, alpha), np.where(stands, 0.0, beta)
        state.curvatures = np.where(stands, 0.0, zw)
        one = np.eye(len(stands))
        fine.add(state.p, m, one, state.p, np.diag(beta))
        fine.add(state.y, state.p, np.diag(alpha), state.y, one)
        # In place: a checkpoint and a captured graph refer to these arrays.
        of_alpha, of_beta = asarray(alpha), asarray(beta)
        state.p_c *= of_beta
        state.p_c += z_c
        state.c += of_alpha * state.p_c
        state.h *= of_beta
        state.h += g + A_z
        state.rho -= of_alpha * state.h

    def _faults(self, state: CoarseBlockCgState, rz: Numbers, zw: Numbers, terms: Numbers) -> dict[int, StopReason]:
        """Return why running columns cannot go on."""
        faults = {}
        for column in self.running_columns(state):
            of_column = (float(rz[column]), float(zw[column]), terms[:, column].tolist(), float(self.residuals[column]))
            if (fault := breakdown(self._sweep, *of_column, column)) is not None:
                faults[column] = fault
        return faults

    def _begin_anew(self, state: CoarseBlockCgState) -> None:
        """Go on from the iterates without the directions so far; those of columns that have ended stand still."""
        iterates = state.x.copy()
        for column, reason in enumerate(state.reasons):
            if reason is StopReason.NOT_FINITE:
                iterates[:, column] = 0
        self._sweep.start(iterates, state.c, state.rho)
        for column, reason in enumerate(state.reasons):
            if reason is not None:
                state.c[:, column] = state.rho[:, column] = 0
        state.curvatures = np.zeros_like(state.curvatures)
        for norms in state.residual_norms:
            norms.pop()
        self._next(state)

    def end(self, state: CoarseBlockCgState, reason: StopReason) -> None:
        """Stop the running columns; the residuals of the last sweep are those of the iterates."""
        for column, known in enumerate(state.reasons):
            if known is None:
                norm, history = float(self.residuals[column]), state.residual_norms[column]
                state.reasons[column] = self.problem.verdict(reason, norm, history, column)

    def has_lost_accuracy(self, state: CoarseBlockCgState) -> bool:
        """Return whether a column ended for a reason that plain conjugate gradients may not meet, and none was stopped."""
        stopped = {StopReason.STOPPED, StopReason.MAXITER} & set(state.reasons)
        return not stopped and any(reason in LOST_ACCURACY for reason in state.reasons)

    def finish(self, state: CoarseBlockCgState) -> None:
        """Give the vectors back to the preconditioner."""
        state.x, state.y = state.x.copy(), state.y.copy()
        self._sweep.end()

    def result(self, state: CoarseBlockCgState) -> BlockSolveResult:
        """Return the result."""
        self.finish(state)
        reasons = [reason for reason in state.reasons if reason is not None]
        return self.block_result(state, reasons, self.residuals.tolist(), f"; {WIDENED}" if state.widened else "")
