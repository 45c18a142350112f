"""Block conjugate gradients for several right-hand sides: Dubrulle's BCGrQ (2001), with a preconditioner.

The residuals are kept as ``R = Q phi`` with columns of Q that are orthonormal in the inner product of the preconditioner,
``Q^T M Q = I``, so that the method survives right-hand sides and residuals that become linearly dependent (O'Leary 1980 has
the method, Dubrulle the form that is stable; Birk and Frommer 2014 discuss deflation). With W the block before it is made
orthonormal, ``Q = W T`` and ``W = Q C``, an iteration is

    S = A P;  Xi = (P^T S)^-1;  X += P Xi phi;  W = Q - S Xi;  Q C = W;  phi = C phi;  P = M Q + P C^T.

Q is never stored: T is applied whenever W is read. T and C come from the Cholesky factor of ``W^T M W``; where that is too ill
conditioned, or the block loses rank, from its eigenvectors, and a second pass follows (CholeskyQR2; Fukaya et al. 2014).

Blocks of k vectors read and written per iteration besides those of A and M, each of k n values: P and S for ``P^T S``; W and
S, and W again, for the residual with its Gram matrices; W, P and X, and P and X again, for directions and iterates: ten, when
the preconditioner is a diagonal or none (32 columns at most; beyond them each Gram matrix reads two more). Any other
preconditioner writes ``Z = M W`` and reads it twice. Held are B, X, W, S, P and for such a preconditioner Z.

A preconditioner of products with A is asked for ``A Z`` as well. Then S is not a product but ``A M Q + S C^T``, in a pass of
its own; ``A Z`` and a spare block are held besides. Streamed, all products of an iteration may share a sweep.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.solvers.gram_factors import GramFactors, GramFault, factor_gram
from penstock.solvers.preconditioners import DiagonalBlocks, as_preconditioner, with_product
from penstock.solvers.result import BlockSolveResult, IterationRecord, SolveResult, StopReason
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
    HasAbsoluteProduct,
    InputError,
    Operator,
    VectorSpace,
    as_operator,
    as_vectors,
)
from penstock.spmv.block_vectors import LARGEST_BLOCK, BlockSpace

__all__ = ["BlockCgState", "block_cg", "block_cg_workspace_nbytes"]

Matrix = np.ndarray[Any, Any]


def block_cg_workspace_nbytes(n: int, columns: int, dtype: Any = np.float64, *, preconditioned: bool = True) -> int:
    """Return the bytes of all blocks of a solve: B, X, W, S, P and, for a preconditioner that is no diagonal, Z."""
    return (6 if preconditioned else 5) * n * columns * int(np.dtype(dtype).itemsize)


@dataclass
class BlockCgState:
    """All that an iteration hands to the next: a checkpoint is this, written down.

    Parameters
    ----------
    x : array, (n, columns)
        Iterates.
    w, p : array, (n, k)
        The block of residuals before it is made orthonormal, and the search directions; k falls as columns converge.
    t : float64 array of the host, (k, k)
        ``Q = W T``.
    phi : float64 array of the host, (k, active columns)
        ``R = Q phi``.
    active : list of int
        Columns that the block still works on.
    iteration : int
    reasons : list of StopReason or None
        Of each column; None while it is being solved, or waits for its true residual.
    last_true_residuals : list of float
        ``||b - A x||`` of each column when it was last computed to test convergence, or when the column ended; infinite
        before.
    residual_norms : list of list of float
        Relative, of each column, as in the result.
    s : array, (n, k), optional
        ``A P``, where the preconditioner's products bring it.
    """

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


def block_cg(
    A: Any,
    B: Array,
    X0: Array | None = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    callback: Callable[[Array], object] | None = None,
    monitor: Callable[[IterationRecord], object] | None = None,
    state: BlockCgState | None = None,
) -> BlockSolveResult:
    """Solve ``A X = B`` for several right-hand sides at once, resident or streamed: one pass over A an iteration.

    Columns share their search directions, so that together they need fewer iterations than each alone. Columns that
    converge leave the block. Zero, repeated and linearly dependent columns are fine.

    Parameters
    ----------
    A : operator or matrix
        As for :func:`cg`.
    B : array, (n, columns)
        At most 64 columns; finite; on the device of A. :func:`solve_many` takes more.
    X0 : array, (n, columns), optional
        First guesses, zero by default; copied.
    rtol, atol : float
        A column b has converged when ``||b - A x|| <= max(rtol ||b||, atol)``, computed from A, b and x.
    maxiter : int, optional
        Iterations at most; 10 n by default.
    M : operator, matrix or function, optional
        Approximates the inverse of A; symmetric positive definite. It is applied to blocks.
    callback : callable, optional
        ``callback(X)`` after each iteration; X is the solver's own block.
    monitor : callable, optional
        ``monitor(record)`` after each iteration, with the largest relative residual of all columns; stops the solve if it
        returns True.
    state : BlockCgState, optional
        Go on from a state of an earlier call with the same A, B and M. It is changed in place.

    Returns
    -------
    BlockSolveResult
        With one :class:`SolveResult` a column.

    Raises
    ------
    InputError
        As for :func:`cg`, and if B has no column or more than 64.

    Notes
    -----
    Coefficients, a few small matrices, are computed on the host, which looks at the residuals in every iteration.
    """
    operator = as_operator(A)
    B, X0 = _checked_blocks(operator, B, X0)
    maxiter = check_tolerances(rtol, atol, maxiter, operator.shape[0])
    if X0 is not None and state is not None:
        raise InputError("a state holds the iterates to go on from; give X0 or state, not both")
    if state is not None:
        check_state(state, BlockCgState, B.shape, operator)
    with operator.device.current():
        run = _Run(operator, None if M is None else as_preconditioner(M, operator), B, rtol, atol)
        state = run.start(X0) if state is None else run.go_on(state)
        while None in state.reasons:
            if state.iteration >= maxiter:
                run.end(state, StopReason.MAXITER)
                break
            before = state.iteration
            with np.errstate(over="ignore", invalid="ignore"):  # what overflows is told as NOT_FINITE
                end = run.iterate(state)
            if state.iteration > before:
                if callback is not None:
                    callback(state.x)
                if monitor is not None and monitor(run.record(state)):
                    end = end or StopReason.STOPPED
            if end is not None and None in state.reasons:
                run.end(state, end)
        return run.result(state)


def _checked_blocks(operator: Operator, B: Array, X0: Array | None) -> tuple[Array, Array | None]:
    rows, columns = operator.shape
    if rows != columns or rows == 0:
        raise InputError(f"block_cg needs a square matrix with at least one row, not one of shape {operator.shape}")
    B = as_vectors(B, rows, operator, "B")
    if B.ndim == 1:
        B = B.reshape(-1, 1)
    if not 1 <= B.shape[1] <= LARGEST_BLOCK:
        raise InputError(
            f"a block has 1 to {LARGEST_BLOCK} columns, B has {B.shape[1]}; solve_many takes any number of them"
        )
    if X0 is not None:
        X0 = as_vectors(X0, rows, operator, "X0").reshape(rows, -1)
        if X0.shape != B.shape:
            raise InputError(f"X0 must have the shape of B, {B.shape}, not {X0.shape}")
    for name, block in (("B", B), ("X0", X0)):
        if block is not None:
            check_finite(name, block, operator.device.xp)
    return B, X0


class _Run:
    """One call of :func:`block_cg`: the operators, the memory of the blocks, and the counters."""

    def __init__(self, A: Operator, M: Operator | None, B: Array, rtol: float, atol: float) -> None:
        self.A, self.M, self.B = A, M, B
        self.n, self.columns = B.shape
        self.blocks = BlockSpace(A.device, self.n, self.columns, A.dtype)
        # A diagonal is applied in passing; any other preconditioner writes a block of its own.
        fused = isinstance(M, DiagonalBlocks) and M.blocks.shape[1] == 1
        self.diagonal = M.blocks.reshape(-1) if isinstance(M, DiagonalBlocks) and fused else None
        self.applied = M is not None and not fused
        self.single = A.dtype == np.float32
        self.with_product = None if M is None else with_product(M, A)
        # Where S is not formed anew in every iteration, something else must serve as a scratch block.
        self._spare = "s" if self.with_product is None else "spare"
        names = ["w", "s", "p", *(["z"] if self.applied else []), *(["image", "spare"] if self.with_product else [])]
        self._memory = {name: A.device.xp.empty(B.size, dtype=B.dtype) for name in names}
        self.b_norms = self._norms(B)
        with np.errstate(invalid="ignore"):
            self.tolerances = np.maximum(rtol * self.b_norms, atol)
        self.unit = float(np.finfo(str(A.dtype)).eps) / 2
        self.thresholds = np.maximum(self.tolerances, self.unit * self.b_norms)
        in_range = (self.b_norms >= SMALLEST_NORM) & (self.b_norms <= LARGEST_NORM)
        small = (self.b_norms <= SMALLEST_NORM) & (atol >= SMALLEST_NORM)
        self.empty = [
            column for column in np.flatnonzero(~in_range).tolist() if small[column] or not bool(B[:, column].any())
        ]
        self.out_of_range = [column for column in np.flatnonzero(~in_range).tolist() if column not in self.empty]
        self.products = 0
        self.floors: dict[int, float] = {}
        self.final_residuals: dict[int, float] = {}
        self.matrix_seconds = 0.0
        self.began = time.perf_counter()
        self.traffic = Traffic(A)

    def _norms(self, block: Array) -> Matrix:
        norms: Matrix = np.sqrt(np.maximum(np.diag(self.blocks.gram(block, block)), 0.0))
        return norms

    def _view(self, name: str, columns: int) -> Array:
        return self._memory[name][: self.n * columns].reshape(self.n, columns)

    def _exchange(self, one: str, other: str) -> None:
        self._memory[one], self._memory[other] = self._memory[other], self._memory[one]

    def start(self, X0: Array | None) -> BlockCgState:
        """Form the first residuals and search directions."""
        xp, count = self.A.device.xp, self.columns
        x = xp.zeros_like(self.B) if X0 is None else X0.copy()
        none = self._view("p", 0)
        state = BlockCgState(x, none, none, np.eye(0), np.eye(0), [], 0, [None] * count, [math.inf] * count)
        for columns, reason in ((self.empty, StopReason.CONVERGED), (self.out_of_range, StopReason.NOT_FINITE)):
            for column in columns:
                self._finish(state, column, reason, float(self.b_norms[column]))
                x[:, column] = 0
        residuals = self.B
        if X0 is not None:
            residuals = self._true_residuals(state)
        norms = self._norms(residuals) if X0 is not None else self.b_norms
        state.residual_norms = [[float(self._relative(column, norms[column]))] for column in range(count)]
        for column in self._pending(state):
            if not math.isfinite(norms[column]):
                self._finish(state, column, StopReason.NOT_FINITE, float(norms[column]))
            elif norms[column] <= self.tolerances[column]:
                self._finish(state, column, StopReason.CONVERGED, float(norms[column]))
        self._restart(state, residuals)
        return state

    def _finish(self, state: BlockCgState, column: int, reason: StopReason, norm: float) -> None:
        """Note why a column has ended, with its true residual, which a call that goes on need not form again."""
        state.reasons[column] = reason
        state.last_true_residuals[column] = self.final_residuals[column] = norm

    def go_on(self, state: BlockCgState) -> BlockCgState:
        """Take up a state: its blocks move into the memory of this run."""
        for name in ("w", "p", *(["s"] if self.with_product is not None and state.s is not None else [])):
            given = getattr(state, name)
            view = self._view(name, given.shape[1])
            view[...] = given
            setattr(state, name, view)
        if self.with_product is None:
            state.s = None
        elif state.s is None:  # of a solve with another preconditioner
            state.s = self._view("s", state.p.shape[1])
            self._product(state.p, state.s)
        for column, reason in enumerate(state.reasons):
            if reason in (StopReason.STOPPED, StopReason.MAXITER):
                state.reasons[column] = None
        ended = [column for column, reason in enumerate(state.reasons) if reason is not None]
        before = len(self._pending(state))
        for column in ended:  # perhaps for another tolerance than this one
            self.final_residuals[column] = norm = state.last_true_residuals[column]
            met, reason = norm <= self.tolerances[column], state.reasons[column]
            if met and reason in (StopReason.ROUNDING_FLOOR, StopReason.STAGNATED):
                state.reasons[column] = StopReason.CONVERGED
            elif reason is StopReason.CONVERGED and not met:
                state.reasons[column] = None
        if len(self._pending(state)) > before:
            self._restart(state, self._true_residuals(state))
        return state

    @staticmethod
    def _pending(state: BlockCgState) -> list[int]:
        return [column for column, reason in enumerate(state.reasons) if reason is None]

    def _restart(self, state: BlockCgState, residuals: Array) -> None:
        """Begin anew with the residuals of all pending columns, which were formed from ``B - A X``."""
        state.active = self._pending(state)
        if not state.active:
            return
        for column, reason in enumerate(state.reasons):
            if reason is StopReason.NOT_FINITE and residuals is not self.B:
                residuals[:, column] = 0  # NaN times zero would be NaN in every other column
        selection = np.zeros((residuals.shape[1], len(state.active)))
        selection[state.active, range(len(state.active))] = 1.0
        # The residuals may lie where S or the spare block does, never where W does.
        state.w = self._view("w", len(state.active))
        self.blocks.combine(state.w, residuals, selection)
        state.p = self._view("p", 0)
        factors = self._factors(self._precondition(state.w), pending=True)
        fault = factors if isinstance(factors, GramFault) else self._turn(state, factors, factors.c, None)
        if fault is not None:
            self._stop(state, state.active, self._preconditioner_fault(fault))

    def _precondition(self, w: Array, grams: tuple[Matrix, Matrix] | None = None) -> Matrix:
        """Apply the preconditioner, unless that is done in passing; return ``W^T M W``."""
        if self.M is None or not self.applied:
            return self.blocks.gram(w, w, self.diagonal) if grams is None else grams[1]
        z = self._view("z", w.shape[1])
        if self.with_product is None:
            self.M.apply(w, z)
        else:
            self.with_product.apply_with_product(w, z, self._view("image", w.shape[1]))
            self.products += 1
        return self.blocks.gram(w, z)

    def _factors(self, gram: Matrix, *, pending: bool) -> GramFactors | GramFault:
        """Factor what :meth:`_precondition` returned; residuals that are pending must not be lost altogether."""
        factors = factor_gram(gram, rounded=self.single and self.applied)
        if pending and isinstance(factors, GramFactors) and not factors.rank:
            return GramFault.NOT_POSITIVE
        return factors

    def iterate(self, state: BlockCgState) -> StopReason | None:
        """Do one iteration; return why the block cannot go on, if so."""
        k = state.p.shape[1]
        s = self._view("s", k)
        if self.with_product is None:
            self._product(state.p, s)
        curvature = factor_gram(self.blocks.gram(state.p, s), rounded=self.single)
        if isinstance(curvature, GramFault) or not curvature.rank:
            return self._breakdown(curvature, s)
        inverse = curvature.inverse
        gamma = np.zeros((k, self.columns))
        gamma[:, state.active] = inverse @ state.phi
        grams = self.blocks.descend(state.w, state.t, s, inverse, self.diagonal)
        squares = np.einsum("ij,ik,kj->j", state.phi, grams[0], state.phi)
        norms = np.sqrt(np.maximum(squares, 0.0))
        state.iteration += 1
        now = dict(zip(state.active, norms, strict=True))
        for column, history in enumerate(state.residual_norms):
            history.append(float(self._relative(column, now[column])) if column in now else history[-1])
        left = norms > self.thresholds[state.active]
        state.active = [column for column, stays in zip(state.active, left, strict=True) if stays]
        factors = self._factors(self._precondition(state.w, grams), pending=bool(state.active))
        phi = state.phi[:, left]
        fault = factors if isinstance(factors, GramFault) else self._turn(state, factors, factors.c @ phi, gamma)
        if fault is not None:  # the iterates move all the same
            none = np.zeros((k, 0))
            self.blocks.extend(self._view("s", 0), state.p, none, None, state.p, none, state.x, gamma)
            return self._preconditioner_fault(fault)
        if not state.active:
            self._test(state)
        return None

    def _turn(self, state: BlockCgState, factors: GramFactors, phi: Matrix, gamma: Matrix | None) -> GramFault | None:
        """Make the residuals orthonormal and the directions conjugate, and move the iterates, or return why not."""
        t, c, well = factors.t, factors.c, factors.well
        if phi.shape[1] < phi.shape[0]:  # fewer residuals are left than the block has vectors
            rotation, phi = np.linalg.qr(phi)
            t, c = t @ rotation, rotation.T @ c
        k, old = c.shape[0], state.p.shape[1]
        if k == 0:
            phi = phi[:0]
        elif not well or k != state.w.shape[1]:
            q = self._view(self._spare, k)
            self.blocks.combine(q, state.w, t)
            self._exchange("w", self._spare)
            state.w = q
            again = self._factors(self._precondition(q), pending=True)
            if isinstance(again, GramFault):
                return again
            t, c, phi = again.t, again.c @ c, again.c @ phi
            k = c.shape[0]
        z = self._view("z", state.w.shape[1]) if self.applied else state.w
        in_place = k == old
        out = state.p if in_place else self._view(self._spare, k)
        if gamma is None:
            self.blocks.combine(out, z, t, self.diagonal)
        else:
            self.blocks.extend(out, z, t, self.diagonal, state.p, c.T, state.x, gamma)
        if not in_place:
            self._exchange("p", self._spare)
        if self.with_product is not None:
            state.s = self._turned_image(t, None if gamma is None else c.T, state.w.shape[1], old)
        state.p, state.t, state.phi = out, t, phi
        return None

    def _turned_image(self, t: Matrix, c: Matrix | None, residuals: int, old: int) -> Array:
        """Return ``A P`` of the new directions from that of the preconditioned residuals and of the old directions."""
        k, image = t.shape[1], self._view("image", residuals)
        if c is None:
            s = self._view("s", k)
            self.blocks.combine(s, image, t)
            return s
        s = self._view("s" if k == old else self._spare, k)
        self.blocks.add(s, image, t, self._view("s", old), c)
        if k != old:
            self._exchange("s", self._spare)
        return s

    def _test(self, state: BlockCgState) -> None:
        """Recompute residuals that claim to be small; where they are not, the search starts again from them."""
        residuals = self._true_residuals(state)
        norms = self._norms(residuals)
        for column in self._pending(state):
            previous, norm = state.last_true_residuals[column], float(norms[column])
            state.last_true_residuals[column] = norm
            if norm <= self.tolerances[column]:
                self._finish(state, column, StopReason.CONVERGED, norm)
            elif not math.isfinite(norm):
                self._finish(state, column, StopReason.NOT_FINITE, norm)
            elif not norm < USELESS_RESTART * previous:
                self._finish(state, column, self._stagnation(state, column, norm), norm)
        self._restart(state, residuals)

    def end(self, state: BlockCgState, reason: StopReason) -> None:
        """Stop all columns that still run, once their true residuals have been computed."""
        self._stop(state, self._pending(state), reason)

    def _stop(self, state: BlockCgState, columns: list[int], reason: StopReason) -> None:
        norms = self._norms(self._true_residuals(state))
        lost = reason in (StopReason.NOT_POSITIVE_DEFINITE, StopReason.INCONSISTENT)
        for column in columns:
            seen, norm, why = math.isfinite(state.last_true_residuals[column]), float(norms[column]), reason
            if norm <= self.tolerances[column]:
                why = StopReason.CONVERGED
            elif lost and seen:  # near the rounding floor directions are noise, and their curvature may be too
                why = self._stagnation(state, column, norm)
            elif reason is StopReason.MAXITER and has_diverged(
                state.residual_norms[column], self._relative(column, norm), self.unit
            ):
                why = StopReason.INCONSISTENT
            if why in (StopReason.STOPPED, StopReason.MAXITER):  # it may go on as if it had not been looked at
                state.reasons[column], self.final_residuals[column] = why, norm
            else:
                self._finish(state, column, why, norm)

    def _true_residuals(self, state: BlockCgState) -> Array:
        """Return ``B - A X`` in the memory of S, or of the spare block, at the cost of one product."""
        residuals = self._view(self._spare, self.columns)
        residuals[...] = self.B
        self._product(state.x, residuals, alpha=-1.0, beta=1.0)
        return residuals

    @staticmethod
    def _breakdown(curvature: GramFactors | GramFault, s: Array) -> StopReason:
        if curvature is GramFault.NOT_FINITE:
            return StopReason.NOT_FINITE
        if isinstance(curvature, GramFactors) and not bool(s.any()):
            return StopReason.INCONSISTENT
        return StopReason.NOT_POSITIVE_DEFINITE

    @staticmethod
    def _preconditioner_fault(fault: GramFault) -> StopReason:
        if fault is GramFault.NOT_FINITE:
            return StopReason.NOT_FINITE
        return StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE

    def _stagnation(self, state: BlockCgState, column: int, residual: float) -> StopReason:
        """Tell the rounding floor of the system from other causes."""
        if isinstance(self.A, HasAbsoluteProduct):
            xp = self.A.device.xp
            bound = self.A.apply_absolute(xp.abs(xp.ascontiguousarray(state.x[:, column])))
            self.products += 1
            self.floors[column] = self.unit * VectorSpace(self.A.device).norm(bound)
            if residual <= FLOOR_FACTOR * self.floors[column]:
                return StopReason.ROUNDING_FLOOR
        return StopReason.STAGNATED

    def _product(self, x: Array, out: Array, alpha: float = 1.0, beta: float = 0.0) -> None:
        began = time.perf_counter()
        self.A.apply(x, out, alpha=alpha, beta=beta)
        self.products += 1
        self.matrix_seconds += time.perf_counter() - began

    def _relative(self, column: int, norm: float) -> float:
        if column in self.out_of_range:  # its iterate is zero
            return 1.0
        return norm / self.b_norms[column] if self.b_norms[column] > 0 else norm

    def record(self, state: BlockCgState) -> IterationRecord:
        """Return what a monitor receives."""
        seconds = time.perf_counter() - self.began
        running = [state.residual_norms[column][-1] for column in self._pending(state)]
        largest = max(running, default=max(norms[-1] for norms in state.residual_norms))
        return IterationRecord(state.iteration, largest, seconds, self.traffic.bytes_streamed, state)

    def result(self, state: BlockCgState) -> BlockSolveResult:
        """Put the result together."""
        timings = {"total": time.perf_counter() - self.began}
        if self.A.device.kind == "cpu":
            timings["matrix"] = self.matrix_seconds
        sweeps = self.traffic.sweeps(self.products)
        common: dict[str, Any] = {"sweeps": sweeps, "bytes_streamed": self.traffic.bytes_streamed, "timings": timings}
        columns = []
        for column, reason in enumerate(state.reasons):
            assert reason is not None
            residual = self.final_residuals[column]
            floor = self.floors.get(column)
            columns.append(
                SolveResult.of(
                    state.x[:, column],
                    reason,
                    state.residual_norms[column],
                    float(self._relative(column, residual)),
                    None if floor is None else float(self._relative(column, floor)),
                    **common,
                )
            )
        return BlockSolveResult(state.x, tuple(columns), state.iteration, **common, state=state)
