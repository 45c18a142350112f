"""Block conjugate gradients for several right-hand sides: Dubrulle's BCGrQ (2001), with a preconditioner.

The residuals are ``R = Q phi`` with columns of Q that are orthonormal in the inner product of the preconditioner,
``Q^T M Q = I``, so that right-hand sides and residuals may become linearly dependent (O'Leary 1980 has the method, Dubrulle
the stable form; Birk and Frommer 2014 discuss deflation). With W the block before it is made orthonormal, ``Q = W T`` and
``W = Q C``, an iteration is

    S = A P;  Xi = (P^T S)^-1;  X += P Xi phi;  W = Q - S Xi;  Q C = W;  phi = C phi;  P = M Q + P C^T.

Q is never stored: T is applied whenever W is read. T and C come from the Cholesky factor of ``W^T M W``. If that matrix is too
ill conditioned, or the block loses rank, they come from its eigenvectors, and a second pass follows (CholeskyQR2; Fukaya et al.
2014).

Blocks of k n values read and written per iteration, besides those of A and M: P and S for ``P^T S``; W and S read and W written
for the residual and its Gram matrices; W, P and X read and P and X written for directions and iterates. These are ten with a
diagonal preconditioner or none (for at most 32 columns; beyond that each Gram matrix reads two more). Any other preconditioner
writes ``Z = M W`` and reads it twice. Blocks in memory: B, X, W, S, P and for such a preconditioner Z.

A preconditioner made of products with A also computes ``A Z``. Then S is not a product but ``A M Q + S C^T``, in a separate
pass; ``A Z`` and a spare block are also in memory. Streamed, all products of an iteration can share a sweep.

The host computes the small matrices of coefficients and reads the residuals in every iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np

from penstock.solvers.checks import check_maxiter
from penstock.solvers.gram_factors import GramFactors, GramFault, factor_gram
from penstock.solvers.method import Method, own_method
from penstock.solvers.preconditioners import DiagonalBlocks
from penstock.solvers.problem import LinearProblem
from penstock.solvers.result import GOING_ON, BlockSolveResult, IterationRecord, StopReason
from penstock.solvers.states import SavedState, StateLayout, check_numbers, direction_kept
from penstock.spmv import Array, InputError
from penstock.spmv.vectors.block_space import LARGEST_VECTOR_BLOCK, BlockSpace

Matrix = np.ndarray[Any, Any]


def block_cg_workspace_nbytes(n: int, columns: int, dtype: Any = np.float64, *, preconditioned: bool = True) -> int:
    """Return the bytes of all blocks of a solve: B, X, the best X, W, S, P and, for a preconditioner that is not diagonal, Z.

    Parameters
    ----------
    n : int
        Rows.
    columns : int
    dtype : dtype
        Of the vectors.
    preconditioned : bool
        Whether there is a preconditioner that is not diagonal.

    Returns
    -------
    int

    Examples
    --------
    >>> from penstock.solvers import block_cg_workspace_nbytes
    >>> from penstock.spmv import format_nbytes
    >>> format_nbytes(block_cg_workspace_nbytes(1_000_000, columns=8))
    '427.2 MiB'
    """
    return (7 if preconditioned else 6) * n * columns * int(np.dtype(dtype).itemsize)


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
        super().check(layout)
        for name in ("w", "p", *(() if self.s is None else ("s",))):
            layout.check(name, getattr(self, name), columns=False)
        tested = {f"last_true_residuals[{column}]": norm for column, norm in enumerate(self.last_true_residuals)}
        check_numbers(tested, finite=False)
        columns = layout.shape[1]
        numbers = all(type(column) is int for column in self.active)  # booleans would select
        within = numbers and self.active == sorted(set(self.active)) and all(0 <= of < columns for of in self.active)
        block = bool(self.active) and self._block_fits(columns)
        if len(self.last_true_residuals) != columns or not within or (self.goes_on and not block):
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


class BlockRecurrence:
    """The iteration and the memory of its blocks, for right-hand sides ``(n, columns)``."""

    def __init__(self, problem: LinearProblem, blocks: BlockSpace) -> None:
        self.problem, self.blocks, A, M, B = problem, blocks, problem.A, problem.M, problem.b
        self.n, self.columns = B.shape
        # The passes apply a diagonal themselves; any other preconditioner writes a separate block.
        fused = isinstance(M, DiagonalBlocks) and M.blocks.shape[1] == 1
        self._diagonal = M.blocks.reshape(-1) if isinstance(M, DiagonalBlocks) and fused else None
        self._applied = M is not None and not fused
        self._single = A.dtype == np.float32
        self._images = problem.with_product is not None
        #: The block of scratch memory: S only if every iteration computes it by a product.
        self.spare = "spare" if self._images else "s"
        names = ["w", "s", "p", *(["z"] if self._applied else []), *(["image", "spare"] if self._images else [])]
        self._memory = {name: A.device.xp.empty(B.size, dtype=B.dtype) for name in names}

    def view(self, name: str, columns: int) -> Array:
        """Return the memory of a block as a block with this number of columns."""
        return self._memory[name][: self.n * columns].reshape(self.n, columns)

    def _exchange(self, one: str, other: str) -> None:
        self._memory[one], self._memory[other] = self._memory[other], self._memory[one]

    def take_up(self, state: BlockCgState) -> None:
        """Copy the blocks of a state to the memory of this object, and compute ``A P`` if the state lacks it."""
        for name in ("w", "p", *(["s"] if self._images and state.s is not None else [])):
            block = getattr(state, name)
            view = self.view(name, block.shape[1])
            view[...] = block
            setattr(state, name, view)
        if not self._images:
            state.s = None
        elif state.s is None:  # the state is from a solve with another preconditioner
            state.s = self.view("s", state.p.shape[1])
            self.problem.product(state.p, state.s)

    def restart(self, state: BlockCgState, residuals: Array) -> StopReason | None:
        """Restart with the residuals ``B - A X`` of the active columns; return the reason if that fails."""
        selection = np.zeros((residuals.shape[1], len(state.active)))
        selection[state.active, range(len(state.active))] = 1.0
        # The residuals may share memory with S or the spare block, never with W.
        state.w = self.view("w", len(state.active))
        self.blocks.combine(state.w, residuals, selection)
        state.p = self.view("p", 0)
        factors = self._factors(self._precondition(state.w), pending=True)
        fault = factors if isinstance(factors, GramFault) else self._update(state, factors, factors.c, None)
        return None if fault is None else _preconditioner_fault(fault)

    def _precondition(self, w: Array, grams: tuple[Matrix, Matrix] | None = None) -> Matrix:
        """Apply the preconditioner, unless the passes apply it; return ``W^T M W``."""
        if not self._applied:
            return self.blocks.gram(w, w, self._diagonal) if grams is None else grams[1]
        z = self.view("z", w.shape[1])
        self.problem.precondition(w, z, self.view("image", w.shape[1]) if self._images else None)
        return self.blocks.gram(w, z)

    def _factors(self, gram: Matrix, *, pending: bool) -> GramFactors | GramFault:
        """Factor the result of :meth:`_precondition`; rank zero is a fault if residuals are pending."""
        factors = factor_gram(gram, rounded=self._single and self._applied)
        if pending and isinstance(factors, GramFactors) and not factors.rank:
            return GramFault.NOT_POSITIVE
        return factors

    def iterate(self, state: BlockCgState) -> StopReason | None:
        """Do one iteration; return the reason if the block cannot continue. Columns below threshold leave ``state.active``."""
        problem, k = self.problem, state.p.shape[1]
        s = self.view("s", k)
        if not self._images:
            problem.product(state.p, s)
        curvature = factor_gram(self.blocks.gram(state.p, s), rounded=self._single)
        if isinstance(curvature, GramFault) or not curvature.rank:
            return _breakdown(curvature, problem.space.any(s))
        inverse = curvature.inverse
        gamma = np.zeros((k, self.columns))
        gamma[:, state.active] = inverse @ state.phi
        grams = self.blocks.descend(state.w, state.t, s, inverse, self._diagonal)
        squares = np.einsum("ij,ik,kj->j", state.phi, grams[0], state.phi)
        norms = np.sqrt(np.maximum(squares, 0.0))
        state.iteration += 1
        new_norms = dict(zip(state.active, norms, strict=True))
        for column, history in enumerate(state.residual_norms):
            history.append(problem.relative(new_norms[column], column) if column in new_norms else history[-1])
        running = norms > problem.thresholds[state.active]
        state.active = [column for column, runs in zip(state.active, running, strict=True) if runs]
        factors = self._factors(self._precondition(state.w, grams), pending=bool(state.active))
        phi = state.phi[:, running]
        fault = factors if isinstance(factors, GramFault) else self._update(state, factors, factors.c @ phi, gamma)
        if fault is not None:  # the iterates are still updated
            none = np.zeros((k, 0))
            self.blocks.extend(self.view("s", 0), state.p, none, None, state.p, none, state.x, gamma)
            return _preconditioner_fault(fault)
        return None

    def _update(self, state: BlockCgState, factors: GramFactors, phi: Matrix, gamma: Matrix | None) -> GramFault | None:
        """Make residuals orthonormal and directions conjugate, and update the iterates; return the fault if that fails."""
        t, c, well = factors.t, factors.c, factors.well
        if phi.shape[1] < phi.shape[0]:  # fewer residuals than vectors in the block
            rotation, phi = np.linalg.qr(phi)
            t, c = t @ rotation, rotation.T @ c
        k, old = c.shape[0], state.p.shape[1]
        if k == 0:
            phi = phi[:0]
        while k and (not well or k != state.w.shape[1]):  # rounding may leave fewer directions than were expected
            q = self.view(self.spare, k)
            self.blocks.combine(q, state.w, t)
            self._exchange("w", self.spare)
            state.w = q
            again = self._factors(self._precondition(q), pending=True)
            if isinstance(again, GramFault):
                return again
            t, c, phi, well = again.t, again.c @ c, again.c @ phi, True
            k = c.shape[0]
        z = self.view("z", state.w.shape[1]) if self._applied else state.w
        in_place = k == old
        out = state.p if in_place else self.view(self.spare, k)
        if gamma is None:
            self.blocks.combine(out, z, t, self._diagonal)
        else:
            self.blocks.extend(out, z, t, self._diagonal, state.p, c.T, state.x, gamma)
        if not in_place:
            self._exchange("p", self.spare)
        if self._images:
            state.s = self._updated_image(t, None if gamma is None else c.T, state.w.shape[1], old)
        state.p, state.t, state.phi = out, t, phi
        return None

    def _updated_image(self, t: Matrix, c: Matrix | None, residuals: int, old: int) -> Array:
        """Return ``A P`` of the new directions, from the images of the preconditioned residuals and of the old directions."""
        k, image = t.shape[1], self.view("image", residuals)
        if c is None:
            s = self.view("s", k)
            self.blocks.combine(s, image, t)
            return s
        s = self.view("s" if k == old else self.spare, k)
        self.blocks.add(s, image, t, self.view("s", old), c)
        if k != old:
            self._exchange("s", self.spare)
        return s


def _breakdown(curvature: GramFactors | GramFault, has_image: bool) -> StopReason:
    if curvature is GramFault.NOT_FINITE:
        return StopReason.NOT_FINITE
    if isinstance(curvature, GramFactors) and not has_image:
        return StopReason.INCONSISTENT
    return StopReason.NOT_POSITIVE_DEFINITE


def _preconditioner_fault(fault: GramFault) -> StopReason:
    if fault is GramFault.NOT_FINITE:
        return StopReason.NOT_FINITE
    return StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE


class BlockConjugateGradients(Method, name="block_cg"):
    """Block conjugate gradients for one problem with right-hand sides ``(n, columns)``."""

    State: ClassVar[type] = BlockCgState

    def __init__(self, problem: LinearProblem) -> None:
        super().__init__(problem)
        self._recurrence = BlockRecurrence(problem, self.space.blocks)

    def start(self, x0: Array | None) -> BlockCgState:
        """Compute the first residuals and search directions."""
        problem, columns = self.problem, self.columns
        x = problem.A.device.xp.zeros_like(problem.b) if x0 is None else x0.copy()
        for column in columns.aside:
            x[:, column] = 0
        residuals = problem.b if x0 is None else problem.true_residual(x, self.scratch())
        columns.begin(problem.b_norms if x0 is None else self.space.norms(residuals))
        none, empty = self._recurrence.view("p", 0), np.eye(0)
        tested = [math.inf if columns.reasons[k] is None else norm for k, norm in enumerate(columns.residuals.tolist())]
        state = BlockCgState(x, none, none, empty, empty, [], 0, columns.reasons, tested, columns.histories)
        self._restart(state, residuals)
        return state

    def resume(self, state: BlockCgState) -> BlockCgState:
        """Resume from a state: its blocks are copied to the memory of the recurrence."""
        recurrence, problem, columns = self._recurrence, self.problem, self.columns
        norms = self._checked_norms(state)
        recurrence.take_up(state)
        for column, reason in enumerate(state.reasons):
            if reason in GOING_ON:
                state.reasons[column] = None
        before = len(columns.running)
        for column in columns.ended:  # the tolerance may differ from that of the earlier call
            columns.residuals[column] = norm = norms[column]
            met, reason = norm <= problem.tolerances[column], state.reasons[column]
            if met and reason in (StopReason.ROUNDING_FLOOR, StopReason.STAGNATED):
                state.reasons[column] = StopReason.CONVERGED
            elif reason is StopReason.CONVERGED and not met:
                state.reasons[column] = None
        if len(columns.running) > before:
            self._restart(state, problem.true_residual(state.x, self.scratch()))
        return state

    def _checked_norms(self, state: BlockCgState) -> list[float]:
        """Return ``||b - A x||`` of all columns, which must be those that the state records but for rounding."""
        with direction_kept(self.problem.A):
            norms = self.true_norms(state)
        recorded = np.array(state.last_true_residuals)
        for column, history in enumerate(state.residual_norms):
            if state.reasons[column] in GOING_ON:
                recorded[column] = self.problem.absolute(history[-1], column)
        gaps = abs(norms - recorded)
        self.columns.check_recorded(gaps, state.x)
        # Those that only the order of sums makes differ do not decide anything again.
        checked: list[float] = np.where(gaps <= 1e-6 * recorded, recorded, norms).tolist()
        return checked

    def _restart(self, state: BlockCgState, residuals: Array) -> None:
        """Restart with the residuals ``B - A X`` of all pending columns."""
        state.active = self.columns.running
        if not state.active:
            return
        for column, reason in enumerate(state.reasons):
            if reason is StopReason.NOT_FINITE and residuals is not self.problem.b:
                residuals[:, column] = 0  # NaN times zero would be NaN in every other column
        fault = self._recurrence.restart(state, residuals)
        if fault is not None:
            self.end(state, fault)

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
        residuals = self.problem.true_residual(state.x, self.scratch())
        norms = self.space.norms(residuals)
        for column in self.columns.running:
            previous, norm = state.last_true_residuals[column], float(norms[column])
            state.last_true_residuals[column] = norm
            if not self.columns.test(column, norm) and self.problem.is_useless(norm, previous):
                self.columns.end(column, self.problem.stagnation(state.x, norm, column))
        self._restart(state, residuals)

    def scratch(self) -> Array:
        """Return the memory of S or of the spare block."""
        return self._recurrence.view(self._recurrence.spare, self.problem.columns)

    def end(self, state: BlockCgState, reason: StopReason) -> None:
        """Compute the true residuals of the running columns and stop them."""
        running, breakdown = self.columns.running, reason in (StopReason.NOT_POSITIVE_DEFINITE, StopReason.INCONSISTENT)
        super().end(state, reason)
        for column in running:
            norm = float(self.columns.residuals[column])
            if breakdown and state.reasons[column] is reason and math.isfinite(state.last_true_residuals[column]):
                # Near the rounding floor directions are noise, and so may their curvature be.
                self.columns.end(column, self.problem.stagnation(state.x, norm, column))
            if state.reasons[column] not in GOING_ON:  # else a resumed solve must not depend on this test
                state.last_true_residuals[column] = norm


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
    """Solve ``A X = B`` for several right-hand sides at once, resident or streamed: one pass over A per iteration.

    Columns share search directions, so together they need fewer iterations. Columns that converge leave the block. Zero,
    repeated and linearly dependent columns are allowed.

    Parameters
    ----------
    A : operator or matrix
        As for :func:`cg`.
    B : array, (n, columns)
        At most 64 columns; finite; on the device of A. :func:`solve_many` accepts more.
    X0 : array, (n, columns), optional
        Initial guesses, zero by default; copied.
    rtol, atol : float
        A column b has converged when ``||b - A x|| <= max(rtol ||b||, atol)``, computed from A, b and x.
    maxiter : int, optional
        Maximum number of iterations; 10 n by default.
    M : operator, matrix or function, optional
        Approximates the inverse of A; symmetric positive definite; applied to blocks.
    callback : callable, optional
        ``callback(X)`` after each iteration; X is the solver's own block.
    monitor : callable, optional
        ``monitor(record)`` after each iteration, with the largest relative residual; stops the solve if it returns True.
    state : BlockCgState, optional
        Resume from this state of an earlier call with the same A, B and M. It is changed in place; one on the host
        stays as it is where the matrix is on a GPU.

    Returns
    -------
    BlockSolveResult
        With one :class:`SolveResult` per column.

    Raises
    ------
    InputError
        As for :func:`cg`, or if B has no column or more than 64.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import block_cg, jacobi
    >>> beam = Cantilever(nodes=(9, 3, 3), dof=3)
    >>> A, B = beam.matrix(), beam.load("shear", "shear_y", "axial")
    >>> result = block_cg(A, B, M=jacobi(A), rtol=1e-8)
    >>> result.converged, result.x.shape
    (True, (243, 3))
    """
    check_maxiter(maxiter)
    problem = LinearProblem(A, B, M, rtol=rtol, atol=atol, name="B")
    problem.b = problem.b.reshape(len(problem.b), problem.columns)
    if not 1 <= problem.columns <= LARGEST_VECTOR_BLOCK:
        raise InputError(
            f"a block has 1 to {LARGEST_VECTOR_BLOCK} columns, B has {problem.columns}; solve_many solves for any number"
        )
    X0 = problem.guess(X0, state, "X0")
    with problem.A.device.current():
        # The state of plain conjugate gradients is that of a method which has handed over to them.
        own = None if isinstance(state, BlockCgState) else own_method(problem)
        limits: dict[str, Any] = {"maxiter": maxiter, "callback": callback, "monitor": monitor}
        method = own or BlockConjugateGradients(problem)
        return cast(BlockSolveResult, method.solve(X0, state, plain=BlockConjugateGradients, **limits))
