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

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from penstock.solvers.block_cg_method import BlockCgState, BlockConjugateGradients
from penstock.solvers.checks import check_maxiter
from penstock.solvers.gram_factors import GramFactors, GramFault, factor_gram
from penstock.solvers.method import handed_over, method_of
from penstock.solvers.preconditioners import DiagonalBlocks, with_product
from penstock.solvers.problem import LinearProblem
from penstock.solvers.result import BlockSolveResult, IterationRecord, StopReason
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


class BlockRecurrence:
    """The iteration and the memory of its blocks, for right-hand sides ``(n, columns)``."""

    def __init__(self, problem: LinearProblem) -> None:
        self.problem, A, M, B = problem, problem.A, problem.M, problem.b
        self.n, self.columns = B.shape
        self.blocks = BlockSpace(A.device, self.n, self.columns, A.dtype, problem.space.communicator)
        # The passes apply a diagonal themselves; any other preconditioner writes a separate block.
        fused = isinstance(M, DiagonalBlocks) and M.blocks.shape[1] == 1
        self._diagonal = M.blocks.reshape(-1) if isinstance(M, DiagonalBlocks) and fused else None
        self._applied = M is not None and not fused
        self._single = A.dtype == np.float32
        self.with_product = None if M is None else with_product(M, A)
        # S is a scratch block only if every iteration computes it by a product.
        self._spare = "s" if self.with_product is None else "spare"
        names = ["w", "s", "p", *(["z"] if self._applied else []), *(["image", "spare"] if self.with_product else [])]
        self._memory = {name: A.device.xp.empty(B.size, dtype=B.dtype) for name in names}

    def norms(self, block: Array) -> Matrix:
        """Return the norms of the columns of a block."""
        norms: Matrix = np.sqrt(np.maximum(np.diag(self.blocks.gram(block, block)), 0.0))
        return norms

    def view(self, name: str, columns: int) -> Array:
        """Return the memory of a block as a block with this number of columns."""
        return self._memory[name][: self.n * columns].reshape(self.n, columns)

    def _exchange(self, one: str, other: str) -> None:
        self._memory[one], self._memory[other] = self._memory[other], self._memory[one]

    def true_residuals(self, x: Array) -> Array:
        """Return ``B - A X`` in the memory of S or of the spare block, at the cost of one product."""
        return self.problem.true_residual(x, self.view(self._spare, self.columns))

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
        M = self.problem.M
        if M is None or not self._applied:
            return self.blocks.gram(w, w, self._diagonal) if grams is None else grams[1]
        z = self.view("z", w.shape[1])
        if self.with_product is None:
            M.apply(w, z)
        else:
            self.with_product.apply_with_product(w, z, self.view("image", w.shape[1]))
            self.problem.products += 1
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
        if self.with_product is None:
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
            q = self.view(self._spare, k)
            self.blocks.combine(q, state.w, t)
            self._exchange("w", self._spare)
            state.w = q
            again = self._factors(self._precondition(q), pending=True)
            if isinstance(again, GramFault):
                return again
            t, c, phi, well = again.t, again.c @ c, again.c @ phi, True
            k = c.shape[0]
        z = self.view("z", state.w.shape[1]) if self._applied else state.w
        in_place = k == old
        out = state.p if in_place else self.view(self._spare, k)
        if gamma is None:
            self.blocks.combine(out, z, t, self._diagonal)
        else:
            self.blocks.extend(out, z, t, self._diagonal, state.p, c.T, state.x, gamma)
        if not in_place:
            self._exchange("p", self._spare)
        if self.with_product is not None:
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
        s = self.view("s" if k == old else self._spare, k)
        self.blocks.add(s, image, t, self.view("s", old), c)
        if k != old:
            self._exchange("s", self._spare)
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


def _as_block(problem: LinearProblem) -> LinearProblem:
    """Return the problem with its right-hand sides as a block."""
    if problem.b.ndim == 1:
        problem.b = problem.b.reshape(-1, 1)
    if not 1 <= problem.columns <= LARGEST_VECTOR_BLOCK:
        raise InputError(
            f"a block has 1 to {LARGEST_VECTOR_BLOCK} columns, B has {problem.columns}; solve_many solves for any number"
        )
    return problem


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
        Resume from this state of an earlier call with the same A, B and M. Changed in place.

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
    problem = _as_block(LinearProblem(A, B, M, rtol=rtol, atol=atol, name="B"))
    X0 = problem.guess(X0, state, "X0")
    with problem.A.device.current():
        # The state of plain conjugate gradients is that of a method which has handed over to them.
        own = None if isinstance(state, BlockCgState) else method_of(problem, "block_cg_method")
        method: Any = BlockConjugateGradients(problem, BlockRecurrence) if own is None else own(problem)
        state, limits = method.begin(X0, state), {"maxiter": maxiter, "callback": callback, "monitor": monitor}
        method.run(state, **limits)
        if method.has_lost_accuracy(state):
            method, state = handed_over(
                method, state, partial(BlockConjugateGradients, problem, BlockRecurrence), **limits
            )
        result: BlockSolveResult = method.result(state)
        return result
