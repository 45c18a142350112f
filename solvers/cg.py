"""Preconditioned conjugate gradients (Hestenes and Stiefel 1952; Saad 2003, algorithm 9.1).

One iteration, in three fused passes over vectors; scalars stay on the device of the vectors::

    q = A p                       product
    alpha = rho / p.q             curvature: reads 2 n values
    r -= alpha q;  z = M r        descend:   reads 2 n, writes 2 n (n without a preconditioner); sums r.r and r.z
    x += alpha p                  extend:    reads 3 n, writes 2 n
    beta = r.z / rho;  p = z + beta p

This is 11 n values besides those of A and M, 10 n without a preconditioner. A preconditioner of diagonal blocks of b rows is
part of the second pass and reads its own b n values; any other one is applied between the passes, and r.z then reads 2 n more.
Vectors in memory: b of the caller, x, the best x so far, r, p, q and, with a preconditioner, z.

A preconditioner made of products with A also computes ``w = A z``. Then q is not a product but ``w + beta q``, which reads 2 n
values and writes n: streamed, all products of an iteration can share a sweep, and w is an additional vector. The bound of the
drift then does not include rounding in q; convergence is still declared on the true residual.

With ``reductions=1``, all sums over ranks of an iteration are one (Chronopoulos and Gear 1989). w is then formed for any
preconditioner, instead of A p, and ``p.A p`` is deduced from ``z.A z``: 5 n values and one vector more.

Differs from SciPy's ``cg``: convergence is only declared on the true residual ``b - A x``, which costs one more product when the
recursive residual meets the tolerance. If the true residual does not meet it, it replaces the recursive one and the search
restarts. During the solve, the true residual replaces the recursive one, and the search continues in the same direction,
whenever rounding may have cost half of its digits (van der Vorst and Ye 2000).

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
from functools import partial
from typing import Any, cast

import numpy as np

from penstock.solvers.cg_kernels import Halt, Scalar
from penstock.solvers.cg_method import ConjugateGradients
from penstock.solvers.cg_passes import CgVectors, passes_for
from penstock.solvers.cg_state import CgState
from penstock.solvers.checks import check_maxiter
from penstock.solvers.method import handed_over, method_of
from penstock.solvers.preconditioners import DiagonalBlocks, with_product
from penstock.solvers.problem import LinearProblem
from penstock.solvers.residual_checks import KEPT_NORMS, ResidualChecks
from penstock.solvers.result import IterationRecord, SolveResult
from penstock.spmv import Array, InputError, Operator, ValidatedOperator
from penstock.spmv.communicator import communicator_of
from penstock.spmv.compilation.cuda_graph import Replay
from penstock.spmv.operator import unchecked_product

__all__ = ["CgRecurrence", "cg", "cg_workspace_nbytes"]


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


class CgRecurrence:
    """The iteration, on vectors of the caller.

    Parameters
    ----------
    A : Operator
    M : Operator or None
    x, r, p : array, (n,)
        Iterate, residual and search direction, advanced in place.
    q, z : array, (n,)
        Workspace; z is None without a preconditioner.
    w : array, (n,), optional
        Workspace for the image of z, if M computes it or ``at_once``; then q must be the image of p when the first
        iteration begins.
    at_once : bool
        Form all sums of an iteration at once.

    Notes
    -----
    After a halt, iterations change nothing until :meth:`put` resumes them. The host may thus start many iterations before it
    reads the scalars.

    If A and M only start kernels of this library on a GPU, an iteration is captured as a CUDA graph.
    """

    def __init__(
        self,
        A: Operator,
        M: Operator | None,
        x: Array,
        r: Array,
        p: Array,
        q: Array,
        z: Array | None,
        w: Array | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        device, self._at_once = A.device, at_once
        # One array, so that one copy transfers everything to the host.
        self._ledger = device.xp.zeros(len(Scalar) + KEPT_NORMS)
        self._seen = device.pinned_like(self._ledger)
        self._seen[...] = 0.0
        blocks = M.blocks if isinstance(M, DiagonalBlocks) else None
        applied = M if blocks is None else None
        scalars, norms_squared = self._ledger[: len(Scalar)], self._ledger[len(Scalar) :]
        z = r if z is None else z
        self._vectors = CgVectors(x, r, p, q, z, z if w is None else w, blocks, scalars, norms_squared)
        self._passes = passes_for(self._vectors, device, communicator_of(A), at_once=at_once)
        self._device = device
        self._multiply = unchecked_product(A)
        self._precondition = None if applied is None else unchecked_product(applied)
        self._with_product = None if w is None else with_product(M, A)
        capturable = device.kind == "cuda" and all(_is_capturable(op) for op in (A, applied) if op is not None)
        self._replay = Replay(self._iterate_with_one_sum if at_once else self._iterate, capturable=capturable)
        self.matrix_seconds = self.preconditioner_seconds = 0.0

    def advance(self, iterations: int) -> None:
        """Start iterations, at most :data:`KEPT_NORMS`; on CUDA the host does not wait for them."""
        for _ in range(iterations):
            self._replay()

    def _iterate(self) -> None:
        of, passes = self._vectors, self._passes
        if self._with_product is None:
            self._product(of.p, of.q)
        passes.curvature()
        passes.descend()
        self._apply_preconditioner()
        passes.extend()
        if self._with_product is not None:
            passes.extend_image()

    def _iterate_with_one_sum(self) -> None:
        """Iterate by the recurrences of Chronopoulos and Gear (1989), with the image of z instead of that of p.

        The bound of the drift then uses the x.x of the iteration before: sums of this one come too early for its own.
        """
        of, passes = self._vectors, self._passes
        passes.close()
        passes.descend()
        self._apply_preconditioner()
        if self._with_product is None:
            self._product(of.z, of.w)
        passes.image_product()
        passes.add_up()
        passes.foresee()
        passes.extend()
        passes.extend_image()
        passes.curvature()

    def _product(self, x: Array, out: Array) -> None:
        """Set ``out = A x``."""
        began = time.perf_counter()
        self._multiply(x, out, 1.0, 0.0)
        self.matrix_seconds += time.perf_counter() - began

    def _apply_preconditioner(self) -> None:
        """Set z, and w if the preconditioner computes it, and sum r.z, unless a pass does."""
        if self._precondition is not None:
            of, began = self._vectors, time.perf_counter()
            if self._with_product is None:
                self._precondition(of.r, of.z, 1.0, 0.0)
            else:
                self._with_product.apply_with_product(of.r, of.z, of.w)
            self.preconditioner_seconds += time.perf_counter() - began
            self._passes.residual_product()

    def look(self) -> np.ndarray[Any, Any]:
        """Wait for all started iterations and return the scalars."""
        self._passes.close()
        self._device.copy_to_pinned(self._ledger, self._seen)
        return self._seen[: len(Scalar)]

    def norms(self, since: int) -> list[float]:
        """Return ``||r||`` after each iteration from number ``since`` on, as read by the last :meth:`look`."""
        kept, until = self._seen[len(Scalar) :], int(self._seen[Scalar.ITERATION])
        squares = [float(kept[number % KEPT_NORMS]) for number in range(since, until)]
        return [math.sqrt(square) if square >= 0 else math.nan for square in squares]

    def put(self, **scalars: float) -> None:
        """Change scalars, by their names in lower case, after a :meth:`look`; this ends a halt."""
        for name, value in {"halt": Halt.NO_HALT, **scalars}.items():
            self._seen[Scalar[name.upper()]] = value
        self._vectors.numbers[...] = self._device.asarray(self._seen[: len(Scalar)])
        if self._at_once:  # later directions' curvatures are deduced from that of this one
            self._passes.curvature()
            self._passes.add_up()


def _is_capturable(operator: Operator) -> bool:
    return isinstance(operator, ValidatedOperator) and operator.capturable


def _check_limits(maxiter: int | None, check_every: int | None) -> None:
    check_maxiter(maxiter)
    if check_every is not None and not 1 <= check_every <= KEPT_NORMS:
        raise InputError(f"check_every must be 1 to {KEPT_NORMS}, but is {check_every}")


def _prepare(problem: LinearProblem, maxiter: int | None, check_every: int | None) -> None:
    """Check the limits, and make a vector of the one right-hand side."""
    with problem.space.communicator.together():
        _check_limits(maxiter, check_every)
        if problem.columns != 1:
            raise InputError(f"cg solves for one right-hand side, b has {problem.columns} columns; use block_cg")
    problem.b = problem.b.reshape(-1)


def _method_for(problem: LinearProblem, reductions: int, state: object) -> Any:
    # The state of plain conjugate gradients is that of a method which has handed over to them.
    own = None if isinstance(state, CgState) else method_of(problem, "cg_method")
    at_once = reductions == 1
    problem.space.communicator.check_same(reductions=reductions)
    with problem.space.communicator.together():
        if reductions not in (1, 2):
            raise InputError(f"reductions must be 1 or 2, not {reductions}")
        if own is not None and at_once:
            raise InputError("reductions=1 is for preconditioners without an iteration of their own; leave it out")
    if own is not None:
        return own(problem)
    return ConjugateGradients(problem, partial(CgRecurrence, at_once=at_once), at_once=at_once)


def _residual_checks(problem: LinearProblem, every: int | None) -> ResidualChecks:
    return ResidualChecks(every or 1, adaptive=every is None and problem.A.device.kind == "cuda")


def cg(
    A: Any,
    b: Array,
    x0: Array | None = None,
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
    x0 : array, (n,), optional
        Initial guess, zero by default. It is copied.
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
        Resume from this state of a call with the same A, b and M, bit-equal to an uninterrupted call. Changed in place.
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
    _prepare(problem, maxiter, check_every)
    x0, checks = problem.guess(x0, state, "x0"), _residual_checks(problem, 1 if callback else check_every)
    with problem.A.device.current():
        method = _method_for(problem, reductions, state)
        state = method.begin(x0, state)
        method.run(state, maxiter=maxiter, callback=callback, monitor=monitor, checks=checks)
        if method.has_lost_accuracy(state):
            limits = {"maxiter": maxiter, "callback": callback, "monitor": monitor, "checks": checks}
            method, state = handed_over(method, state, partial(ConjugateGradients, problem, CgRecurrence), **limits)
        return cast(SolveResult, method.result(state, np.shape(b)))
