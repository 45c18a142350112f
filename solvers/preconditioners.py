"""Preconditioners are operators: they are applied like a matrix and handed to a solver as ``M``."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse

from penstock.spmv import (
    Array,
    BsrMatrix,
    FunctionOperator,
    HasDiagonalBlocks,
    InputError,
    Operator,
    ValidatedOperator,
    as_operator,
    device_of,
)

__all__ = ["Diagonal", "as_preconditioner", "block_jacobi", "jacobi"]


class Diagonal(ValidatedOperator):
    """Multiplication of each row by a number.

    Parameters
    ----------
    factors : array, (n,)
        On the device of the vectors, of their type.
    """

    def __init__(self, factors: Array) -> None:
        self.factors = factors
        self.device = device_of(factors)
        self.dtype = factors.dtype
        self.shape = (factors.size, factors.size)

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        factors = self.factors if x.ndim == 1 else self.factors[:, None]
        if beta == 0.0:
            self.device.xp.multiply(factors, x, out=out)
            if alpha != 1.0:
                out *= alpha
        else:
            out *= beta
            out += alpha * (factors * x)


def jacobi(A: Any) -> Diagonal:
    """Return the inverse of the diagonal of A.

    Raises
    ------
    InputError
        If A does not know its diagonal, or an entry of it is not positive; the first such row is named.
    """
    operator, diagonal = _diagonal_blocks(A, 1)
    positive = diagonal.reshape(-1) > 0
    if not positive.all():
        raise InputError(_not_positive(int(np.argmin(positive))))
    return Diagonal(operator.device.asarray(1 / diagonal.reshape(-1)))


def block_jacobi(A: Any, size: int) -> ValidatedOperator:
    """Return the inverses of the dense diagonal blocks of A, such as those of the unknowns of a node.

    Parameters
    ----------
    A : operator or matrix
        Anything that knows its diagonal blocks: a penstock format, a streamed matrix, or what becomes one of these.
    size : int
        Rows of a block, 1 to 8; must divide the number of rows.

    Returns
    -------
    operator
        A block diagonal matrix in BSR, or :func:`jacobi` for size 1. Built on the host.

    Raises
    ------
    InputError
        If A does not know its diagonal, or a block is not positive definite; the first such row is named.
    """
    if size == 1:
        return jacobi(A)
    operator, blocks = _diagonal_blocks(A, size)
    finite = np.isfinite(blocks).all(axis=(1, 2))
    positive = finite & (np.linalg.eigvalsh(np.where(finite[:, None, None], blocks, 0.0))[:, 0] > 0)
    if not positive.all():
        raise InputError(_not_positive(int(np.argmin(positive)) * size))
    inverse = np.linalg.inv(blocks)
    inverse = (inverse + inverse.swapaxes(1, 2)) / 2  # symmetric to the last bit, as CG assumes of a preconditioner
    count = len(blocks)
    M = scipy.sparse.bsr_array((inverse, np.arange(count), np.arange(count + 1)), shape=operator.shape)
    return BsrMatrix.from_bsr(M).to_device(operator.device)


def _diagonal_blocks(A: Any, size: int) -> tuple[Operator, np.ndarray[Any, Any]]:
    operator = as_operator(A)
    if not isinstance(operator, HasDiagonalBlocks):
        raise InputError(
            f"{type(A).__name__} does not know its diagonal; build the preconditioner from the matrix, or pass your own "
            "operator as M"
        )
    return operator, operator.device.to_host(operator.diagonal_blocks(size))


def _not_positive(row: int) -> str:
    return f"the diagonal block at row {row} is not positive definite, so the matrix is not; check that row"


def as_preconditioner(M: Any, A: Operator) -> Operator:
    """Return what was given as ``M`` as an operator of the shape of A; a plain function maps r to z.

    Raises
    ------
    InputError
        If the shapes or devices differ.
    """
    if callable(M) and not hasattr(M, "shape"):
        M = FunctionOperator(M, A.shape, A.dtype, A.device)
    elif hasattr(M, "matvec") and not isinstance(M, Operator):  # a LinearOperator takes vectors of any type
        M = FunctionOperator(M.matvec, tuple(M.shape), A.dtype, A.device)
    operator = as_operator(M)
    if tuple(operator.shape) != tuple(A.shape):
        raise InputError(f"the preconditioner has shape {operator.shape}, the matrix {A.shape}")
    if operator.dtype != A.dtype:
        raise InputError(
            f"the preconditioner works in {operator.dtype}, the matrix in {A.dtype}; build it in that type"
        )
    if operator.device != A.device:
        raise InputError(f"the preconditioner lives on {operator.device}, the matrix on {A.device}")
    return operator
