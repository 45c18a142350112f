"""Preconditioned conjugate gradients (Hestenes and Stiefel 1952; Saad 2003, algorithm 9.1).

The iteration, its equations and its traffic stand in :mod:`penstock.solvers.cg_iteration`.

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

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np

from penstock.solvers.cg_method import ConjugateGradients
from penstock.solvers.cg_state import CgState
from penstock.solvers.checks import check_maxiter
from penstock.solvers.method import handed_over, method_of
from penstock.solvers.problem import LinearProblem
from penstock.solvers.residual_checks import KEPT_NORMS, ResidualChecks
from penstock.solvers.result import IterationRecord, SolveResult
from penstock.spmv import Array, InputError


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
    return ConjugateGradients(problem, at_once=at_once)


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
            method, state = handed_over(method, state, partial(ConjugateGradients, problem), **limits)
        return cast(SolveResult, method.result(state, np.shape(b)))
