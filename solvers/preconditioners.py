"""Preconditioners are operators: they are applied like a matrix and handed to a solver as ``M``."""

from __future__ import annotations

from typing import Any

from penstock.spmv import (
    Array,
    Device,
    FunctionOperator,
    HasDiagonalBlocks,
    InputError,
    Operator,
    ValidatedOperator,
    as_operator,
)

__all__ = ["BlockDiagonal", "as_preconditioner", "block_jacobi", "jacobi"]


class BlockDiagonal(ValidatedOperator):
    """Multiplication by dense blocks on the diagonal.

    Parameters
    ----------
    blocks : array, (n / size, size, size)
        On the device of the vectors.
    device : Device
    """

    def __init__(self, blocks: Array, device: Device) -> None:
        count, size, _ = blocks.shape
        self.blocks = blocks
        self.device = device
        self.dtype = blocks.dtype
        self.shape = (count * size, count * size)

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        count, size, _ = self.blocks.shape
        if size == 1:
            scale = self.blocks.reshape(-1, *[1] * (x.ndim - 1))
            product = scale * x
        else:
            product = (self.blocks @ x.reshape(count, size, -1)).reshape(x.shape)
        if alpha != 1.0:
            product *= alpha
        if beta == 0.0:
            out[...] = product
        else:
            out *= beta
            out += product


def jacobi(A: Any) -> BlockDiagonal:
    """Return the inverse of the diagonal of A.

    Raises
    ------
    InputError
        If A does not know its diagonal, or an entry of it is not positive.
    """
    return block_jacobi(A, 1)


def block_jacobi(A: Any, size: int) -> BlockDiagonal:
    """Return the inverses of the dense diagonal blocks of A, such as those of the unknowns of a node.

    Parameters
    ----------
    A : operator or matrix
        Anything that knows its diagonal blocks: a penstock format, a streamed matrix, or what becomes one of these.
    size : int
        Rows of a block; must divide the number of rows.

    Raises
    ------
    InputError
        If A does not know its diagonal, or a block is not positive definite; the first such row is named.
    """
    operator = as_operator(A)
    if not isinstance(operator, HasDiagonalBlocks):
        raise InputError(
            f"{type(A).__name__} does not know its diagonal; build the preconditioner from the matrix, or pass your own "
            "operator as M"
        )
    xp = operator.device.xp
    blocks = operator.diagonal_blocks(size)
    positive = blocks.reshape(-1) > 0 if size == 1 else xp.linalg.eigvalsh(blocks)[:, 0] > 0
    if not bool(positive.all()):
        row = int(xp.argmin(positive)) * size
        raise InputError(
            f"the diagonal block at row {row} is not positive definite, so the matrix is not; check that row"
        )
    inverse = 1 / blocks if size == 1 else xp.linalg.inv(blocks)
    # Symmetric to the last bit, as CG assumes of a preconditioner.
    return BlockDiagonal((inverse + inverse.swapaxes(1, 2)) / 2, operator.device)


def as_preconditioner(M: Any, A: Operator) -> Operator:
    """Return what was given as ``M`` as an operator of the shape of A; a plain function maps r to z.

    Raises
    ------
    InputError
        If the shapes or devices differ.
    """
    if callable(M) and not hasattr(M, "shape"):
        M = FunctionOperator(M, A.shape, A.dtype, A.device)
    operator = as_operator(M)
    if tuple(operator.shape) != tuple(A.shape):
        raise InputError(f"the preconditioner has shape {operator.shape}, the matrix {A.shape}")
    if operator.device != A.device:
        raise InputError(f"the preconditioner lives on {operator.device}, the matrix on {A.device}")
    return operator
