"""Jacobi and block Jacobi preconditioners, and the conversion of any ``M`` to an operator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from penstock.solvers.preconditioner_spec import PreconditionerSpec
from penstock.spmv import (
    Array,
    HasAbsoluteProduct,
    HasDiagonalBlocks,
    InputError,
    Operator,
    ValidatedOperator,
    VectorSpace,
    as_operator,
    device_of,
)
from penstock.spmv.communicator import communicator_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch, type_names
from penstock.spmv.compilation.jit import shared_range
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.device import count_true
from penstock.spmv.formats.limits import LARGEST_DENSE_BLOCK
from penstock.spmv.products.block_products import smoothed_rows
from penstock.spmv.products.block_rows import BlockRows

DIAGONAL_BLOCK_KERNELS = CudaSource("penstock.solvers.kernels", "diagonal_blocks.cu")


@runtime_checkable
class AppliesWithProduct(Protocol):
    """A preconditioner made of products with a matrix ``A``, which can append one more product at little cost."""

    A: Operator

    def apply_with_product(self, r: Array, z: Array, w: Array) -> None:
        """Set ``z = M r`` and ``w = A z``."""


def with_product(M: object, A: Operator) -> AppliesWithProduct | None:
    """Return M if it is made of products with the same object A, else None."""
    return M if isinstance(M, AppliesWithProduct) and M.A is A else None


@runtime_checkable
class HasMethods(Protocol):
    """A preconditioner made of products with a matrix ``A``, which Krylov methods of its own share with their iteration."""

    A: Operator
    #: Their names in ``SOLVERS``: for one right-hand side, and for several.
    methods: ClassVar[tuple[str, str]]


def own_methods(M: object, A: Operator) -> tuple[str, str] | None:
    """Return the methods of M if it is made of products with the same object A and has some, else None."""
    return M.methods if isinstance(M, HasMethods) and M.A is A else None


class DiagonalBlocks(ValidatedOperator):
    """Multiplication by a block-diagonal matrix, which CG applies inside its own passes.

    Parameters
    ----------
    blocks : array, (n / b, b, b)
        On the device of the vectors and of their type; b is 1 to 8.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.solvers import DiagonalBlocks
    >>> D = DiagonalBlocks(np.array([[[1.0, 2.0], [2.0, 5.0]], [[3.0, 0.0], [0.0, 4.0]]]))
    >>> D.shape, (D @ np.ones(4)).tolist()
    ((4, 4), [3.0, 7.0, 3.0, 4.0])
    """

    def __init__(self, blocks: Array) -> None:
        count, size, _ = blocks.shape
        self.blocks = blocks
        self.device = device_of(blocks)
        self.dtype = blocks.dtype
        self.shape = (count * size, count * size)
        self._space = VectorSpace(self.device)

    @property
    def capturable(self) -> bool:
        """True: products only start kernels."""
        return True

    def diagonal_roots(self) -> Array:
        """Return the square roots of the diagonal of the blocks, (n,); not a number where it is negative."""
        xp = self.device.xp
        with np.errstate(invalid="ignore"):
            return xp.sqrt(xp.diagonal(self.blocks, axis1=1, axis2=2).reshape(-1))

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        # alpha D x as -alpha D (0 - x)
        self._space.three_terms(-alpha, self.blocks, None, x, 0.0, x, beta, out)

    def smoothed(self, image: BlockRows, own: BlockRows, factor: float, width: int) -> BlockRows:
        """Turn rows of ``A P`` into those of ``P - factor D A P``, in place; ``own`` are rows of P, of ``width`` columns."""
        blocks = self.blocks[image.start : image.stop].astype(np.float64, copy=False)
        return smoothed_rows(image, own, blocks, factor)


@dataclass(frozen=True)
class JacobiSpec(PreconditionerSpec, name="jacobi"):
    """Specification of :func:`jacobi`."""

    works_on_ranks: ClassVar[bool] = True
    writes_vector: ClassVar[bool] = False

    def build(self, A: Operator) -> Operator:
        """Return the inverse of the diagonal."""
        return jacobi(A)

    def vectors(self, columns: int, *, streamed_to_gpu: bool) -> int:
        """Return 1, for the diagonal."""
        return 1


@dataclass(frozen=True)
class BlockJacobiSpec(PreconditionerSpec, name="block_jacobi"):
    """Specification of :func:`block_jacobi`."""

    needs_blocks: ClassVar[bool] = True
    works_on_ranks: ClassVar[bool] = True

    def build(self, A: Operator) -> Operator:
        """Return the inverses of the diagonal blocks."""
        return block_jacobi(A, self.block_size)

    def vectors(self, columns: int, *, streamed_to_gpu: bool) -> int:
        """Return the number of rows of a block."""
        return self.block_size


@dataclass(frozen=True)
class AbsoluteJacobiSpec(JacobiSpec, name="absolute_jacobi"):
    """Specification of :func:`absolute_jacobi`."""

    writes_vector: ClassVar[bool] = True  # its methods have no passes that apply a diagonal

    def build(self, A: Operator) -> Operator:
        """Return the inverse of the sizes of the diagonal."""
        return absolute_jacobi(A)


def absolute_jacobi(A: Any) -> DiagonalBlocks:
    """Return the inverse of the sizes of the diagonal entries of A, for matrices that are not positive definite.

    Where an entry is zero, as of constraints by multipliers, the sum of the sizes of its row stands for it, at the cost of a
    product; an empty row stays as it is.

    Parameters
    ----------
    A : operator or matrix
        As for :func:`block_jacobi`.

    Returns
    -------
    DiagonalBlocks
        Positive definite, of blocks of one row, on the device of A.

    Raises
    ------
    InputError
        If A cannot return its diagonal.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> from penstock.solvers import absolute_jacobi
    >>> A = scipy.sparse.csr_array([[-4.0, 1.0, 0.0], [1.0, 2.0, 1.0], [0.0, 1.0, 0.0]])
    >>> (absolute_jacobi(A) @ np.ones(3)).tolist()
    [0.25, 0.5, 1.0]
    """
    operator = as_operator(A)
    with communicator_of(operator).together(), operator.device.current():
        if not isinstance(operator, HasDiagonalBlocks):
            raise InputError(f"{type(A).__name__} does not know its diagonal; pass your own operator as M")
        xp = operator.device.xp
        sizes = abs(operator.diagonal_blocks(1))
    missing = communicator_of(operator).largest(float(bool(count_true(sizes == 0))))
    if missing and isinstance(operator, HasAbsoluteProduct):
        ones = xp.ones(operator.shape[0], dtype=operator.dtype)
        sums = operator.apply_absolute(ones).reshape(-1, 1, 1)
        sizes = xp.where(sizes == 0, sums, sizes)
    return DiagonalBlocks(1.0 / xp.where(sizes == 0, 1.0, sizes).astype(operator.dtype))


def jacobi(A: Any) -> DiagonalBlocks:
    """Return the inverse of the diagonal of A.

    Parameters
    ----------
    A : operator or matrix
        As for :func:`block_jacobi`.

    Returns
    -------
    DiagonalBlocks
        Blocks of one row, on the device of A.

    Raises
    ------
    InputError
        If A cannot return its diagonal, or an entry of it is not positive; the message names the first such row.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> from penstock.solvers import jacobi
    >>> (jacobi(scipy.sparse.csr_array([[4.0, 1.0], [1.0, 2.0]])) @ np.ones(2)).tolist()
    [0.25, 0.5]
    """
    return block_jacobi(A, 1)


def block_jacobi(A: Any, size: int) -> DiagonalBlocks:
    """Return the inverses of the dense diagonal blocks of A, for example those of a node's unknowns.

    Parameters
    ----------
    A : operator or matrix
        Anything that can return its diagonal blocks: a penstock format, a streamed matrix, or a type convertible to one.
    size : int
        Rows of a block, 1 to 8; must divide the number of rows.

    Returns
    -------
    DiagonalBlocks
        On the device of A; inverted by Cholesky factorisation.

    Raises
    ------
    InputError
        If A cannot return its diagonal, or a block is not positive definite; the message names the first such row.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> from penstock.solvers import block_jacobi
    >>> A = scipy.sparse.csr_array([[4.0, 2.0, 0.0, 0.0], [2.0, 4.0, 0.0, 0.0], [0.0, 0.0, 8.0, 0.0], [0.0, 0.0, 0.0, 2.0]])
    >>> (block_jacobi(A, 2) @ np.array([6.0, 6.0, 4.0, 4.0])).round(12).tolist()
    [1.0, 1.0, 0.5, 2.0]
    """
    operator = as_operator(A)
    with communicator_of(operator).together(), operator.device.current():
        return _block_jacobi(operator, A, size)


def _block_jacobi(operator: Operator, A: Any, size: int) -> DiagonalBlocks:
    if not isinstance(operator, HasDiagonalBlocks):
        raise InputError(
            f"{type(A).__name__} does not know its diagonal; build the preconditioner from the matrix, or pass your own "
            "operator as M"
        )
    if not 1 <= size <= LARGEST_DENSE_BLOCK or size % 1:
        raise InputError(f"the blocks of a preconditioner have 1 to {LARGEST_DENSE_BLOCK} rows, not {size}")
    if operator.shape[0] != operator.shape[1]:
        raise InputError(f"a preconditioner is made of a square matrix, not of one of shape {operator.shape}")
    return inverted_blocks(operator, operator.diagonal_blocks(int(size)))


def inverted_blocks(operator: Operator, blocks: Array) -> DiagonalBlocks:
    """Return the inverses of the diagonal blocks of an operator, as :func:`block_jacobi` does."""
    size = int(blocks.shape[1])
    on_gpu = operator.device.kind == "cuda" and operator.dtype == blocks.dtype
    inverted = _inverted_on_gpu(blocks, operator.device.xp) if on_gpu else _inverted_on_host(operator, blocks)
    inverses, indefinite, infinite = inverted
    if indefinite < len(blocks):
        raise InputError(
            f"the diagonal block at row {indefinite * size} is not positive definite, so the matrix is not; check that row"
        )
    if infinite < len(blocks):
        raise InputError(
            f"the inverse of the diagonal block at row {infinite * size} leaves the range of {operator.dtype}; scale A"
        )
    return DiagonalBlocks(inverses)


def block_norms(blocks: Array) -> Array:
    """Return the Frobenius norms of small blocks, (count, rows, columns): float64, (count,)."""
    device = device_of(blocks)
    norms = device.xp.empty(len(blocks))
    find_kernel("blocks", "norms", device.kind)(blocks, norms)
    return norms


@register_kernel("blocks", "norms", "cpu")
def _norms_cpu(blocks: Array, norms: Array) -> None:
    np.sqrt(np.einsum("nij,nij->n", blocks, blocks, dtype=np.float64), out=norms)


# CuPy's einsum would load cuBLAS, which takes longer than the set-up of a small system.
@register_kernel("blocks", "norms", "cuda")
def _norms_cuda(blocks: Array, norms: Array) -> None:
    function = DIAGONAL_BLOCK_KERNELS.function(f"measure_blocks<{type_names(blocks)}>")
    entries = math.prod(blocks.shape[1:])
    launch(function, len(blocks), 256, (np.int64(len(blocks)), np.int32(entries), blocks, norms))


def _inverted_on_gpu(blocks: Array, xp: Any) -> tuple[Array, int, int]:
    """Return inverses, and the first block that is not positive definite and the first inverse that is not finite, if any."""
    count, size, _ = blocks.shape
    inverses, first_bad = xp.empty_like(blocks), xp.asarray(np.full(2, count, dtype=np.uint64))
    function = DIAGONAL_BLOCK_KERNELS.function(f"invert_blocks<{type_names(blocks)}, {size}>")
    launch(function, count, 256, (np.int64(count), blocks, inverses, first_bad))
    indefinite, infinite = first_bad.tolist()
    return inverses, indefinite, infinite


def _inverted_on_host(operator: Operator, blocks: Array) -> tuple[Array, int, int]:
    """Return the same; blocks are inverted in float64."""
    host = operator.device.to_host(blocks).astype(np.float64)
    if host.shape[1] == 1:
        positive = (host > 0).reshape(-1)
        with np.errstate(over="ignore"):
            inverses = 1 / np.where(host > 0, host, 1.0)
    else:
        inverses, positive = np.empty_like(host), np.empty(len(host), dtype=np.bool_)
        _invert_blocks(len(host), host, inverses, positive)
    with np.errstate(over="ignore"):
        inverses = inverses.astype(operator.dtype)
    finite = np.isfinite(inverses).all(axis=(1, 2))
    return operator.device.asarray(inverses), _first_false(positive), _first_false(finite)


def _first_false(good: Array) -> int:
    """Return the place of the first False, or the length."""
    return int(good.size) if good.all() else int(np.argmin(good))


@shared_range(least=1024)
def _invert_blocks(begin: int, end: int, blocks: Array, inverses: Array, positive: Array) -> None:
    """Invert symmetric blocks: A = L L^T (Golub and Van Loan 2013, algorithm 4.2.1), then ``L^-T L^-1``."""
    size = blocks.shape[1]
    for k in range(begin, end):
        factor = blocks[k]
        positive[k] = True
        for column in range(size):
            for row in range(column, size):
                entry = factor[row, column]
                for inner in range(column):
                    entry -= factor[row, inner] * factor[column, inner]
                if row > column:
                    factor[row, column] = entry / factor[column, column]
                elif entry > 0.0 and entry < math.inf:
                    factor[column, column] = math.sqrt(entry)
                else:
                    positive[k] = False
                    factor[column, column] = 1.0
        for column in range(size):  # L^-1 overwrites L
            factor[column, column] = 1.0 / factor[column, column]
            for row in range(column + 1, size):
                entry = 0.0
                for inner in range(column, row):
                    entry -= factor[row, inner] * factor[inner, column]
                factor[row, column] = entry / factor[row, row]
        for row in range(size):
            for column in range(row + 1):
                entry = 0.0
                for inner in range(row, size):
                    entry += factor[inner, row] * factor[inner, column]
                # Exactly symmetric, as CG requires of a preconditioner.
                inverses[k, row, column] = inverses[k, column, row] = entry
