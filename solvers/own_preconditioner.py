"""Preconditioners that a caller has made: operators, matrices, functions and SciPy's ``LinearOperator``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from penstock.solvers.preconditioner_spec import PreconditionerSpec, preconditioner_spec
from penstock.spmv import Array, InputError, Operator, as_operator
from penstock.spmv.conversion import FunctionOperator
from penstock.spmv.reordered import Reordered


def as_preconditioner(M: Any, A: Operator) -> Operator:
    """Return ``M`` as an operator of the shape and type of A; a plain function maps r to z, a name is that of a preconditioner.

    A SciPy ``LinearOperator``, for example a ``pyamg`` hierarchy's ``aspreconditioner()``, works on the host: for a matrix on
    a GPU every residual is copied to the host and back.

    Parameters
    ----------
    M : operator, matrix, function or LinearOperator
        Approximates the inverse of A.
    A : Operator
        Square.

    Returns
    -------
    Operator
        Of the shape, the type and the device of A.

    Raises
    ------
    InputError
        If the shapes, types or devices differ.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import as_preconditioner
    >>> A = Cantilever(nodes=2, dof=1).matrix()
    >>> as_preconditioner(lambda r: 0.5 * r, A).apply(np.ones(8))[:2].tolist()
    [0.5, 0.5]
    """
    if isinstance(M, str):
        spec = preconditioner_spec(M)
        M = spec.build(A) if A.shape[0] else None
        if M is None:  # of the name "none", or of a matrix without rows
            return FunctionOperator(lambda r: r, A.shape, A.dtype, A.device, blocks=True)
    if getattr(M, "ndim", 2) == 1:
        raise InputError(
            "M is a vector, not an operator; to divide by the diagonal of A, give jacobi(A) or the name 'jacobi'"
        )
    if callable(M) and not hasattr(M, "shape"):
        M = FunctionOperator(M, A.shape, A.dtype, A.device)
    elif hasattr(M, "matvec") and not isinstance(M, Operator):  # a LinearOperator accepts vectors of any type
        function = M.matvec
        if A.device.kind == "cuda" and not type(M).__module__.startswith("cupyx."):

            def function(r: Array, matvec: Any = M.matvec) -> Array:
                return A.device.asarray(matvec(A.device.to_host(r)))

        M = FunctionOperator(function, tuple(M.shape), A.dtype, A.device)
    operator = as_operator(M)
    if tuple(operator.shape) != tuple(A.shape):
        raise InputError(f"the preconditioner has shape {operator.shape}, the matrix {A.shape}")
    if operator.device != A.device:
        raise InputError(f"the preconditioner is on {operator.device}, the matrix on {A.device}")
    if operator.dtype == A.dtype:
        return operator
    return FunctionOperator(lambda r: operator.apply(r.astype(operator.dtype)), A.shape, A.dtype, A.device, blocks=True)


@dataclass(frozen=True)
class OwnPreconditioner(PreconditionerSpec, name="of the caller", registered=False):
    """Specification of a preconditioner that the caller has made.

    Parameters
    ----------
    M : operator, matrix, function or LinearOperator
        As for :func:`as_preconditioner`; symmetric positive definite, and the same operator in all iterations of a solve.
    reorder : callable, optional
        Maps vectors to the order in which the matrix is stored, if that is not the caller's.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import OwnPreconditioner
    >>> A = Cantilever(nodes=4, dof=3).matrix()
    >>> OwnPreconditioner(M=lambda r: 0.5 * r).build(A).shape
    (192, 192)
    """

    M: Any = field(default=None, compare=False, repr=False)
    reorder: Callable[[Any], Any] | None = field(default=None, compare=False, repr=False)

    def build(self, A: Operator) -> Operator | None:
        """Return the operator, in the order of A."""
        M = as_preconditioner(self.M, A)
        return M if self.reorder is None else Reordered(M, np.argsort(self.reorder(np.arange(A.shape[0]))))

    def in_order(self, reorder: Callable[[Any], Any]) -> Self:
        """Return this specification for a matrix whose unknowns are in another order."""
        return replace(self, reorder=reorder)
