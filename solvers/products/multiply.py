"""Products, triple products and transposes of sparse matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

from penstock.solvers.products.block_products import counted_cuda
from penstock.solvers.products.block_rows import BlockRows
from penstock.solvers.products.hashing import Bin, Purpose, bins_of_offsets, run
from penstock.spmv import (
    Array,
    BsrMatrix,
    BudgetError,
    CsrMatrix,
    InputError,
    SparseMatrix,
    as_operator,
    device_of,
)
from penstock.spmv.compilation.table import find_kernel, register_kernel

__all__ = [
    "GalerkinPattern",
    "ProductPattern",
    "galerkin",
    "galerkin_pattern",
    "multiply",
    "product_of_rows",
    "product_pattern",
    "transpose",
]

#: What products return: square blocks of up to 8 rows as BSR, others as rows of blocks.
Product = CsrMatrix | BsrMatrix | BlockRows


@dataclass(frozen=True)
class ProductPattern:
    """Where a product has entries, which depends on the patterns of its factors only.

    Parameters
    ----------
    offsets : int64 array, (rows + 1,)
    columns : int32 array, (entries,)
        Ascending in every row.
    bins : list of Bin
        The rows by their lengths, on a GPU; empty on a CPU.
    entries : (int, int)
        Of the two factors.
    """

    offsets: Array
    columns: Array
    bins: list[Bin]
    entries: tuple[int, int]


@dataclass(frozen=True)
class GalerkinPattern:
    """The patterns of ``A P`` and of ``P' (A P)``."""

    image: ProductPattern
    coarse: ProductPattern


def multiply(A: Any, B: Any, *, pattern: ProductPattern | None = None) -> Product:
    """Return the product of two sparse matrices, on their device.

    Parameters
    ----------
    A, B : matrix
        Penstock formats, SciPy or CuPy sparse matrices. Two matrices of blocks that fit each other, BSR or SciPy's BSR of any
        shape of blocks up to 8 x 8, are multiplied by blocks, others entry by entry.
    pattern : ProductPattern, optional
        That of an earlier product of matrices with the same patterns, from :func:`product_pattern`: the search for it is saved.

    Returns
    -------
    CsrMatrix, BsrMatrix or BlockRows
        Of the wider type of the two; columns ascend. Entries whose sum is zero are stored. BlockRows for blocks that are not
        square.

    Raises
    ------
    InputError
        If the shapes or devices do not fit, or the pattern is that of other factors.
    BudgetError
        If the device has no memory for the result.

    Notes
    -----
    Row by row (Gustavson 1978), with hash tables (Nagasaka, Matsuoka, Azad and Buluc 2018) and every sum in the order of the
    entries of A, so results are the same in every run. On a GPU it needs 4 bytes a row beside the result, and at most 128 MiB for
    rows of more than 8192 columns. Sums are formed in float64.
    """
    (left, height), (right, width) = _rows_of(A, B)
    if pattern is None and left.device.kind == "cpu":
        pattern = _pattern(left, right, width)
    elif pattern is not None and pattern.entries != (left.columns.size, right.columns.size):
        raise InputError("the pattern is that of a product of other matrices; make it anew with product_pattern(A, B)")
    with left.device.current():
        return _as_matrix(_product(left, right, width, pattern), height, width)


def product_pattern(A: Any, B: Any) -> ProductPattern:
    """Return the pattern of ``A B`` for products of matrices with the same patterns and other values.

    Parameters and errors as for :func:`multiply`.
    """
    (left, _), (right, width) = _rows_of(A, B)
    with left.device.current():
        return _pattern(left, right, width)


def transpose(A: Any) -> Product:
    """Return the transpose of a sparse matrix, on its device, in CSR, or for blocks in BSR or rows of blocks."""
    rows, width = _block_rows(A)
    with rows.device.current():
        return _as_matrix(rows.transposed(width), width, len(rows.offsets) - 1)


def galerkin(A: Any, P: Any, *, pattern: GalerkinPattern | None = None) -> Product:
    """Return the coarse matrix ``P' A P``.

    Parameters
    ----------
    A, P : matrix
        As for :func:`multiply`.
    pattern : GalerkinPattern, optional
        That of an earlier product of matrices with the same patterns, from :func:`galerkin_pattern`.
    """
    (left, _), (right, width) = _rows_of(A, P)
    with left.device.current():
        image = _product(left, right, width, pattern.image if pattern else _pattern_on_cpu(left, right, width))
        back = right.transposed(width)
        known = pattern.coarse if pattern else _pattern_on_cpu(back, image, width)
        return _as_matrix(_product(back, image, width, known), width, width)


def galerkin_pattern(A: Any, P: Any) -> GalerkinPattern:
    """Return the patterns of ``A P`` and ``P' A P``."""
    (left, _), (right, width) = _rows_of(A, P)
    with left.device.current():
        image = _pattern(left, right, width)
        rows = BlockRows(0, image.offsets, image.columns, left.device.xp.empty((0, 1, 1)))
        return GalerkinPattern(image, _pattern(right.transposed(width), rows, width))


def _rows_of(A: Any, B: Any) -> tuple[tuple[BlockRows, int], tuple[BlockRows, int]]:
    """Return two factors as rows of blocks that fit each other, with their rows and columns of blocks, as float64 or float32."""
    left, inner = _block_rows(A)
    right, width = _block_rows(B)
    if left.blocks.shape[2] != right.blocks.shape[1]:
        (left, inner), (right, width) = _block_rows(A, scalar=True), _block_rows(B, scalar=True)
    if inner != len(right.offsets) - 1:
        rows = len(right.offsets) - 1
        raise InputError(
            f"the first matrix has {inner} columns, the second {rows} rows (of blocks): they cannot be multiplied"
        )
    if left.device != right.device:
        raise InputError(f"the first matrix is on {left.device}, the second on {right.device}; move one of them")
    dtype = np.result_type(left.blocks.dtype, right.blocks.dtype)
    for rows_of in (left, right):
        rows_of.blocks = rows_of.blocks.astype(dtype, copy=False)
    return (left, len(left.offsets) - 1), (right, width)


def _block_rows(A: Any, *, scalar: bool = False) -> tuple[BlockRows, int]:
    """Return a matrix as rows of blocks, and its columns of blocks."""
    if isinstance(A, BlockRows):
        return BlockRows(A.start, A.offsets, A.columns, A.blocks), int(A.columns.max()) + 1 if A.columns.size else 0
    if not scalar and scipy.sparse.issparse(A) and A.format == "bsr" and max(A.blocksize) <= 8:
        A.sort_indices()
        values = np.ascontiguousarray(A.data)
        columns = A.indices.astype(np.int32, copy=False)
        return BlockRows(0, A.indptr.astype(np.int64), columns, values), A.shape[1] // A.blocksize[1]
    matrix = as_operator(A)
    if not isinstance(matrix, SparseMatrix):
        raise InputError(
            f"the entries of a {type(A).__name__} are not at hand; pass a sparse matrix that is held in memory"
        )
    if not scalar and isinstance(matrix, BsrMatrix):
        size = matrix.row_granularity
        return BlockRows(0, matrix.row_offsets, matrix.column_indices, matrix.values), matrix.shape[1] // size
    if not isinstance(matrix, CsrMatrix):
        matrix = CsrMatrix.from_csr(matrix.to_csr(), values_dtype=matrix.values_dtype).to_device(matrix.device)
    values = matrix.values.reshape(-1, 1, 1)
    return BlockRows(0, matrix.row_offsets.astype(np.int64, copy=False), matrix.column_indices, values), matrix.shape[1]


def _as_matrix(rows: BlockRows, height: int, width: int) -> Product:
    """Return rows as the format that holds such blocks."""
    tall, wide = rows.blocks.shape[1:]
    if tall != wide:
        return rows
    arrays = {"row_offsets": rows.offsets, "column_indices": rows.columns}
    if tall == 1:
        arrays["values"] = rows.blocks.reshape(-1)
        return CsrMatrix.from_csr(
            CsrMatrix.from_arrays((height, width), rows.blocks.dtype, arrays, {}), strategy="auto"
        )
    arrays["values"] = rows.blocks
    return BsrMatrix.from_arrays((height * tall, width * wide), rows.blocks.dtype, arrays, {})


def _pattern(A: BlockRows, B: BlockRows, width: int) -> ProductPattern:
    kind = A.device.kind
    offsets, columns = find_kernel("block_rows", "pattern", kind)(A, B, width)
    bins = bins_of_offsets(offsets) if kind == "cuda" else []
    return ProductPattern(offsets, columns, bins, (A.columns.size, B.columns.size))


def product_of_rows(A: BlockRows, B: BlockRows, width: int) -> BlockRows:
    """Return the product of rows of blocks of float64 that fit each other; B has ``width`` columns of blocks."""
    return _product(A, B, width, _pattern_on_cpu(A, B, width))


def _pattern_on_cpu(A: BlockRows, B: BlockRows, width: int) -> ProductPattern | None:
    """Return the pattern on a CPU; on a GPU it is found together with the values."""
    return _pattern(A, B, width) if A.device.kind == "cpu" else None


def _product(A: BlockRows, B: BlockRows, width: int, pattern: ProductPattern | None) -> BlockRows:
    """Return the rows of a product."""
    area = int(A.blocks.shape[1] * B.blocks.shape[2])
    if area == 1 and A.blocks.shape[2] == 1 and A.device.kind == "cuda":
        return find_kernel("sparse_numbers", "product", "cuda")(A, B, width, pattern)  # type: ignore[no-any-return]
    pattern = pattern or _pattern(A, B, width)
    shape = (pattern.columns.size, A.blocks.shape[1], B.blocks.shape[2])
    (blocks,) = _empty_result(A, shape[0], lambda: (A.device.xp.zeros(shape),))
    product = BlockRows(A.start, pattern.offsets, pattern.columns, blocks)
    wide_a, wide_b = (
        BlockRows(rows.start, rows.offsets, rows.columns, rows.blocks.astype(np.float64, copy=False)) for rows in (A, B)
    )
    find_kernel("block_rows", "add_product", A.device.kind)(wide_a, wide_b, width, product)
    product.blocks = blocks.astype(A.blocks.dtype, copy=False)
    return product


@register_kernel("sparse_numbers", "product", "cuda")
def _product_of_numbers(A: BlockRows, B: BlockRows, width: int, pattern: ProductPattern | None) -> BlockRows:
    """Find columns and values of the product together."""
    xp = device_of(A.offsets).xp
    if pattern is None:
        offsets = counted_cuda(A, B, width)
        entries = int(offsets[-1])
        (columns,) = _empty_result(A, entries, lambda: (xp.empty(entries, dtype=np.int32),))
        pattern = ProductPattern(offsets, columns, bins_of_offsets(offsets), (0, 0))
    entries = pattern.columns.size
    (values,) = _empty_result(A, entries, lambda: (xp.empty((entries, 1, 1), dtype=A.blocks.dtype),))
    run(Purpose.VALUES, pattern.bins, A, B, width, None, (pattern.offsets, pattern.columns, values))
    return BlockRows(A.start, pattern.offsets, pattern.columns, values)


def _empty_result(A: BlockRows, entries: int, make: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
    """Return the arrays that ``make`` allocates for a result, or refuse it for want of memory."""
    refused = BudgetError(
        f"the product has {entries} entries, and {A.device} has too little memory for them; multiply fewer rows at a time"
    )
    # A host promises memory that it does not have; asking a GPU for its free memory takes longer than a small product.
    if A.device.kind == "cpu" and 8 * entries > A.device.free_nbytes():
        raise refused
    try:
        return make()
    except MemoryError as error:
        raise refused from error
