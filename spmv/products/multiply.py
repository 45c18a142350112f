"""Products, triple products and transposes of sparse matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

from penstock.spmv import (
    Array,
    BsrMatrix,
    CsrMatrix,
    InputError,
    SparseMatrix,
    as_operator,
    device_of,
)
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.device import count_true
from penstock.spmv.formats.validation import check_values, in_sorted_rows
from penstock.spmv.products.block_products import allocated, counted_cuda, product_of_pattern
from penstock.spmv.products.block_rows import BlockRows, as_csr, csr_of, rows_of
from penstock.spmv.products.hashing import Bin, Purpose, bins_of_offsets, run

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
    width : int
        Columns of the product, in blocks.
    factors : tuple of array
        Offsets and columns of the two factors.

    Examples
    --------
    >>> import scipy.sparse
    >>> A = scipy.sparse.csr_array([[1.0, 1.0], [0.0, 1.0]])
    >>> product_pattern(A, A).columns.tolist()
    [0, 1, 1]
    """

    offsets: Array
    columns: Array
    bins: list[Bin]
    width: int
    factors: tuple[Array, ...]

    def check(self, A: BlockRows, B: BlockRows, width: int) -> None:
        """Refuse factors of other patterns; reads their columns, unless they are the same arrays."""
        pattern = (A.offsets, A.columns, B.offsets, B.columns)
        if width != self.width or not all(_same(*pair) for pair in zip(pattern, self.factors, strict=True)):
            raise InputError(
                "the pattern is that of a product of other matrices; make it anew with product_pattern(A, B)"
            )


def _same(left: Array, right: Array) -> bool:
    """Return whether two arrays on one device are equal."""
    if left is right:
        return True
    return left.shape == right.shape and device_of(left) == device_of(right) and not count_true(left != right)


@dataclass(frozen=True)
class GalerkinPattern:
    """The patterns of ``A P`` (``image``) and of ``P' (A P)`` (``coarse``), each a :class:`ProductPattern`.

    Examples
    --------
    >>> import scipy.sparse
    >>> A, P = scipy.sparse.eye_array(3, format="csr"), scipy.sparse.csr_array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> galerkin_pattern(A, P).coarse.columns.tolist()
    [0, 1]
    """

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
        Of the wider type of the two; columns ascend. Sums that are zero are stored. BlockRows for blocks that are not square.

    Raises
    ------
    InputError
        If the shapes or devices do not fit, or the pattern is that of other factors.
    BudgetError
        If the device has no memory for the result.

    Notes
    -----
    Row by row (Gustavson 1978), with hash tables (Nagasaka, Matsuoka, Azad and Buluc 2018) and every sum in the order of the
    entries of A, so results are the same in every run. Sums are formed in float64. Beside the result a GPU needs 12 bytes a row
    and, for rows of more than 6144 columns, dense rows of up to 128 MiB together, or one if that is longer.

    Examples
    --------
    >>> import scipy.sparse
    >>> from penstock.solvers import multiply
    >>> A = scipy.sparse.csr_array([[1.0, 2.0], [0.0, 3.0]])
    >>> multiply(A, A).to_csr().toarray().tolist()
    [[1.0, 8.0], [0.0, 9.0]]
    """
    _check_pattern(pattern, ProductPattern)
    left, right, width, dtype = _rows_of(A, B)
    with left.device.current():
        return as_matrix(_product(left, right, width, pattern), width, dtype)


def product_pattern(A: Any, B: Any) -> ProductPattern:
    """Return the pattern of ``A B`` for products of matrices with the same patterns and other values.

    Parameters
    ----------
    A, B : matrix
        As for :func:`multiply`, which may raise the same errors.

    Examples
    --------
    >>> import scipy.sparse
    >>> from penstock.solvers import multiply, product_pattern
    >>> A = scipy.sparse.csr_array([[1.0, 2.0], [0.0, 3.0]])
    >>> multiply(10.0 * A, A, pattern=product_pattern(A, A)).to_csr().toarray().tolist()
    [[10.0, 80.0], [0.0, 90.0]]
    """
    left, right, width, _ = _rows_of(A, B)
    with left.device.current():
        return _pattern(left, right, width)


def transpose(A: Any) -> Product:
    """Return the transpose of a sparse matrix, on its device, in CSR, or for blocks in BSR or rows of blocks.

    Parameters
    ----------
    A : matrix
        As for :func:`multiply`, which may raise the same errors.

    Examples
    --------
    >>> import scipy.sparse
    >>> from penstock.solvers import transpose
    >>> transpose(scipy.sparse.csr_array([[1.0, 2.0], [0.0, 3.0]])).to_csr().toarray().tolist()
    [[1.0, 0.0], [2.0, 3.0]]
    """
    rows, width, dtype = _block_rows(A)
    with rows.device.current():
        return as_matrix(rows.transposed(width), len(rows.offsets) - 1, dtype)


def galerkin(A: Any, P: Any, *, pattern: GalerkinPattern | None = None) -> Product:
    """Return the coarse matrix ``P' A P``.

    Parameters
    ----------
    A, P : matrix
        As for :func:`multiply`, which returns the same types and may raise the same errors.
    pattern : GalerkinPattern, optional
        That of an earlier product of matrices with the same patterns, from :func:`galerkin_pattern`.

    Examples
    --------
    >>> import scipy.sparse
    >>> from penstock.solvers import galerkin
    >>> A, P = scipy.sparse.csr_array([[2.0, -1.0], [-1.0, 2.0]]), scipy.sparse.csr_array([[1.0], [3.0]])
    >>> galerkin(A, P).to_csr().toarray().tolist()
    [[14.0]]
    """
    _check_pattern(pattern, GalerkinPattern)
    left, right, width, dtype = _square_rows_of(A, P)
    with left.device.current():
        image = _product(left, right, width, pattern.image if pattern else None)
        coarse = _product(right.transposed(width), image, width, pattern.coarse if pattern else None)
        return as_matrix(coarse, width, dtype)


def galerkin_pattern(A: Any, P: Any) -> GalerkinPattern:
    """Return the patterns of ``A P`` and ``P' A P``.

    Parameters
    ----------
    A, P : matrix
        As for :func:`galerkin`.

    Examples
    --------
    >>> import scipy.sparse
    >>> from penstock.solvers import galerkin, galerkin_pattern
    >>> A, P = scipy.sparse.eye_array(3, format="csr"), scipy.sparse.csr_array([[1.0], [1.0], [1.0]])
    >>> galerkin(10.0 * A, P, pattern=galerkin_pattern(A, P)).values.tolist()
    [30.0]
    """
    left, right, width, _ = _square_rows_of(A, P)
    with left.device.current():
        image = _pattern(left, right, width)
        rows = BlockRows(0, image.offsets, image.columns, left.device.xp.empty((0, 1, 1)), width)
        return GalerkinPattern(image, _pattern(right.transposed(width), rows, width))


def _check_pattern(pattern: object, kind: type) -> None:
    if pattern is not None and not isinstance(pattern, kind):
        raise InputError(f"pattern must be a {kind.__name__} of the same factors, not a {type(pattern).__name__}")


def _square_rows_of(A: Any, P: Any) -> tuple[BlockRows, BlockRows, int, Any]:
    left, right, width, dtype = _rows_of(A, P)
    if len(left.offsets) != len(right.offsets):
        raise InputError(
            f"P' A P needs a square matrix A; this one has {len(left.offsets) - 1} rows and {left.width} columns"
        )
    return left, right, width, dtype


def _rows_of(A: Any, B: Any) -> tuple[BlockRows, BlockRows, int, Any]:
    """Return two factors as rows of blocks that fit each other, the columns of the second, and the type of the vectors."""
    left, inner, of_left = _block_rows(A)
    right, width, of_right = _block_rows(B)
    if left.blocks.shape[2] != right.blocks.shape[1]:
        (left, inner, of_left), (right, width, of_right) = _block_rows(A, scalar=True), _block_rows(B, scalar=True)
    rows = len(right.offsets) - 1
    if inner != rows:
        height = left.blocks.shape[2]
        raise InputError(
            f"the first matrix has {inner * height} columns, the second {rows * height} rows: they cannot be multiplied"
        )
    if left.device != right.device:
        raise InputError(f"the first matrix is on {left.device}, the second on {right.device}; move one of them")
    stored = np.result_type(left.blocks.dtype, right.blocks.dtype)
    left.blocks, right.blocks = (factor.blocks.astype(stored, copy=False) for factor in (left, right))
    return left, right, width, np.result_type(of_left, of_right)


def _block_rows(A: Any, *, scalar: bool = False) -> tuple[BlockRows, int, Any]:
    """Return a matrix as rows of blocks, its columns of blocks, and the type of its vectors."""
    if isinstance(A, BlockRows):
        width = A.width if A.width is not None else (int(A.columns.max()) + 1 if A.columns.size else 0)
        if scalar:
            return _block_rows(as_csr(A, width))
        return BlockRows(A.start, A.offsets, A.columns, A.blocks, width), width, A.blocks.dtype
    if not scalar and scipy.sparse.issparse(A) and A.format == "bsr" and max(A.blocksize) <= 8:
        return _rows_of_scipy(A)
    matrix = as_operator(A)
    if not isinstance(matrix, SparseMatrix):
        raise InputError(
            f"the entries of a {type(A).__name__} are not at hand; pass a sparse matrix that is held in memory, "
            "or a store to penstock.multiply_store"
        )
    size = matrix.row_granularity if isinstance(matrix, BsrMatrix) and not scalar else 1
    if size == 1 and not isinstance(matrix, CsrMatrix):
        matrix = csr_of(matrix)
    assert isinstance(matrix, (BsrMatrix, CsrMatrix))
    return rows_of(matrix), matrix.shape[1] // size, matrix.dtype


def _rows_of_scipy(A: Any) -> tuple[BlockRows, int, Any]:
    """Return a SciPy BSR matrix as rows of blocks of any shape, after the checks that other matrices get."""
    A = in_sorted_rows(A, "BSR matrix (in blocks)")
    height, width = A.blocksize
    shape = (A.shape[0] // height, A.shape[1] // width)
    values = np.ascontiguousarray(check_values(A, "the matrix")[: int(A.indptr[-1])])
    columns = A.indices[: len(values)].astype(np.int32, copy=False)
    return BlockRows(0, A.indptr.astype(np.int64), columns, values, shape[1]), shape[1], values.dtype


def as_matrix(rows: BlockRows, width: int, dtype: Any) -> Product:
    """Return rows as the format that holds such blocks, for vectors of a type."""
    tall, wide = rows.blocks.shape[1:]
    if tall != wide:
        return BlockRows(0, rows.offsets, rows.columns, rows.blocks, width)
    if tall == 1:
        return as_csr(rows, width, dtype)
    shape = ((len(rows.offsets) - 1) * tall, width * wide)
    arrays = {"row_offsets": rows.offsets, "column_indices": rows.columns, "values": rows.blocks}
    return BsrMatrix.from_arrays(shape, dtype, arrays, {})


def _pattern(A: BlockRows, B: BlockRows, width: int) -> ProductPattern:
    kind = A.device.kind
    offsets, columns = find_kernel("block_rows", "pattern", kind)(A, B, width)
    bins = bins_of_offsets(offsets) if kind == "cuda" else []
    return ProductPattern(offsets, columns, bins, width, (A.offsets, A.columns, B.offsets, B.columns))


def product_of_rows(A: BlockRows, B: BlockRows, width: int) -> BlockRows:
    """Return the product of rows of blocks of float64 that fit each other; B has ``width`` columns of blocks."""
    return _product(A, B, width, None)


def _product(A: BlockRows, B: BlockRows, width: int, pattern: ProductPattern | None) -> BlockRows:
    """Return the rows of a product."""
    if pattern is not None:
        pattern.check(A, B, width)
    if A.blocks.shape[1:] == B.blocks.shape[1:] == (1, 1) and A.device.kind == "cuda":
        return find_kernel("sparse_numbers", "product", "cuda")(A, B, width, pattern)  # type: ignore[no-any-return]
    pattern = pattern or _pattern(A, B, width)
    wide_a, wide_b = (
        BlockRows(rows.start, rows.offsets, rows.columns, rows.blocks.astype(np.float64, copy=False)) for rows in (A, B)
    )
    product = product_of_pattern(wide_a, wide_b, width, (pattern.offsets, pattern.columns))
    product.blocks = product.blocks.astype(A.blocks.dtype, copy=False)
    return product


@register_kernel("sparse_numbers", "product", "cuda")
def _product_of_numbers(A: BlockRows, B: BlockRows, width: int, pattern: ProductPattern | None) -> BlockRows:
    """Find columns and values of the product together."""
    xp, device = device_of(A.offsets).xp, A.device
    if pattern is None:
        offsets = counted_cuda(A, B, width)
        entries = int(offsets[-1])
        columns = allocated(device, lambda: xp.empty(entries, dtype=np.int32), 4 * entries)
        bins = bins_of_offsets(offsets)
    else:
        offsets, columns, bins, entries = pattern.offsets, pattern.columns, pattern.bins, pattern.columns.size
    dtype = A.blocks.dtype
    values = allocated(device, lambda: xp.empty((entries, 1, 1), dtype=dtype), entries * int(np.dtype(dtype).itemsize))
    run(Purpose.VALUES, bins, A, B, width, None, (offsets, columns, values))
    return BlockRows(A.start, offsets, columns, values, width)
