"""Compressed sparse rows (CSR)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import scipy.sparse
from numba import prange

from penstock.spmv.cuda_module import cuda_function, type_names
from penstock.spmv.device import CPU, Array
from penstock.spmv.errors import InputError
from penstock.spmv.formats.base import INT32_MAX, SparseFormat, narrow_offsets
from penstock.spmv.formats.validation import check_compressed_rows, check_values
from penstock.spmv.jit import parallel_kernel
from penstock.spmv.kernel_table import register_kernel

__all__ = ["CsrMatrix"]


@dataclass(frozen=True, eq=False)
class CsrMatrix(SparseFormat, name="csr"):
    """A sparse matrix by rows: the entries of row i stand at ``row_offsets[i]`` to ``row_offsets[i + 1]``.

    Parameters
    ----------
    shape : (int, int)
        Rows and columns.
    dtype : dtype
        Type of the vectors.
    row_offsets : array, (rows + 1,) int64, or int32 in a slab
    column_indices : array, (nnz,) int32
        Ascending within a row, without duplicates.
    values : array, (nnz,) float64 or float32
        Stored zeros are entries like any other.
    lanes : int
        CUDA lanes that share a row, a power of two up to 32. They fix the order of summation, so a slab keeps those of
        the whole matrix.

    Notes
    -----
    A product reads ``(values + 4) * nnz + offsets * rows`` bytes of matrix, the entries of x at least once, and writes
    out once (and reads it if ``beta != 0``).
    """

    shape: tuple[int, int]
    dtype: np.dtype[np.generic]
    row_offsets: Array
    column_indices: Array
    values: Array
    lanes: int = 32

    @classmethod
    def from_csr(cls, A: Any, *, values_dtype: Any = None, check: bool = True) -> Self:
        """Wrap or convert a SciPy CSR matrix; index and value arrays are shared where their types allow.

        Parameters
        ----------
        A : scipy.sparse.csr_array or csr_matrix
        values_dtype : dtype, optional
            Type to store the values in; the vectors keep the type of ``A``.
        check : bool
            Verify order, range and finiteness of the entries (one pass over them).

        Raises
        ------
        InputError
            If rows are unsorted or hold duplicates, an index is out of range, or a value is not finite.
        """
        values = check_values(A.data, "the matrix", finite=check)
        if check:
            check_compressed_rows(A.indptr, A.indices, A.shape, "CSR matrix")
        elif A.shape[1] > INT32_MAX:
            raise InputError(f"{A.shape[1]} columns do not fit 32-bit column indices")
        entries = int(A.indptr[-1])  # SciPy's arrays may be longer than that
        matrix = cls(
            shape=(int(A.shape[0]), int(A.shape[1])),
            dtype=values.dtype,
            row_offsets=A.indptr.astype(np.int64, copy=False),
            column_indices=A.indices[:entries].astype(np.int32, copy=False),
            values=values[:entries].astype(values_dtype or values.dtype, copy=False),
            **cls.tuned(entries, A.shape[0]),
        )
        matrix.check_shapes()
        return matrix

    @classmethod
    def tuned(cls, nnz: int, rows: int) -> dict[str, int]:
        """Choose the largest power of two of lanes, up to 32, that is not above the mean row length."""
        mean = nnz // max(rows, 1)
        return {"lanes": min(32, 1 << (max(mean, 1).bit_length() - 1))}

    def to_csr(self) -> scipy.sparse.csr_array:
        """Return a SciPy CSR array with the same stored entries, on the host."""
        arrays = {name: CPU.asarray(array) for name, array in self.arrays().items()}
        A = scipy.sparse.csr_array((len(arrays["row_offsets"]) - 1, self.shape[1]), dtype=self.values_dtype)
        A.indptr, A.indices, A.data = arrays["row_offsets"], arrays["column_indices"], arrays["values"]
        return A

    def rows(self, start: int, stop: int) -> Self:
        """Return rows ``start`` to ``stop`` with int32 offsets; indices and values are views."""
        offsets = narrow_offsets(self.row_offsets, start, stop)
        first = int(self.row_offsets[start])
        entries = slice(first, first + int(offsets[-1]))
        arrays = {
            "row_offsets": offsets,
            "column_indices": self.column_indices[entries],
            "values": self.values[entries],
        }
        return self.from_arrays((stop - start, self.shape[1]), self.dtype, arrays, self.parameters())

    def arrays(self) -> dict[str, Array]:
        """Return row_offsets, column_indices and values."""
        return {"row_offsets": self.row_offsets, "column_indices": self.column_indices, "values": self.values}

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that fit ``shape`` and the number of column indices."""
        entries = self.column_indices.size
        return {"row_offsets": (self.shape[0] + 1,), "column_indices": (entries,), "values": (entries,)}

    def parameters(self) -> dict[str, int]:
        """Return the number of lanes."""
        return {"lanes": self.lanes}

    @property
    def nnz(self) -> int:
        """Number of stored scalars."""
        return int(self.values.size)


# Column indices are made unsigned: that spares the wrap-around test for negative ones.


@parallel_kernel
def _spmv(
    row_offsets: Array, column_indices: Array, values: Array, x: Array, out: Array, alpha: float, beta: float
) -> None:
    for row in prange(out.shape[0]):
        total = 0.0
        for entry in range(row_offsets[row], row_offsets[row + 1]):
            total += np.float64(values[entry]) * np.float64(x[np.uint64(np.uint32(column_indices[entry]))])
        if beta == 0.0:
            out[row] = alpha * total
        else:
            out[row] = alpha * total + beta * out[row]


@parallel_kernel
def _spmm(
    row_offsets: Array, column_indices: Array, values: Array, x: Array, out: Array, alpha: float, beta: float
) -> None:
    columns = out.shape[1]
    for row in prange(out.shape[0]):
        # Four columns at a time keep their sums in registers; the last group may hold fewer.
        for first in range(0, columns, 4):
            width = min(4, columns - first)
            second, third, fourth = first + min(1, width - 1), first + min(2, width - 1), first + width - 1
            t0 = t1 = t2 = t3 = 0.0
            for entry in range(row_offsets[row], row_offsets[row + 1]):
                value = np.float64(values[entry])
                column = np.uint64(np.uint32(column_indices[entry]))
                t0 += value * np.float64(x[column, first])
                t1 += value * np.float64(x[column, second])
                t2 += value * np.float64(x[column, third])
                t3 += value * np.float64(x[column, fourth])
            for c in range(width):
                total = t0 if c == 0 else (t3 if c == width - 1 else (t1 if c == 1 else t2))
                if beta == 0.0:
                    out[row, first + c] = alpha * total
                else:
                    out[row, first + c] = alpha * total + beta * out[row, first + c]


@parallel_kernel
def _diagonal_blocks(row_offsets: Array, column_indices: Array, values: Array, first_row: int, blocks: Array) -> None:
    size = blocks.shape[1]
    for row in prange(row_offsets.shape[0] - 1):
        block, r = divmod(first_row + row, size)
        for entry in range(row_offsets[row], row_offsets[row + 1]):
            c = column_indices[entry] - block * size
            if 0 <= c < size:
                blocks[block, r, c] = values[entry]


@register_kernel("csr", "spmv", "cpu")
def _spmv_cpu(A: CsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    _spmv(A.row_offsets, A.column_indices, A.values, x, out, alpha, beta)


@register_kernel("csr", "spmm", "cpu")
def _spmm_cpu(A: CsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    _spmm(A.row_offsets, A.column_indices, A.values, x, out, alpha, beta)


@register_kernel("csr", "diagonal_blocks", "cpu")
def _diagonal_blocks_cpu(A: CsrMatrix, first_row: int, blocks: Array) -> None:
    _diagonal_blocks(A.row_offsets, A.column_indices, A.values, first_row, blocks)


_THREADS = 256


@register_kernel("csr", "spmv", "cuda")
def _spmv_cuda(A: CsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    rows = A.shape[0]
    if rows == 0:
        return
    function = cuda_function("csr.cu", f"csr_spmv<{type_names(A.values, x, A.row_offsets)}, {A.lanes}>")
    grid = (-(-rows * A.lanes // _THREADS),)
    arrays = (A.row_offsets, A.column_indices, A.values, x, out)
    function(grid, (_THREADS,), (np.int64(rows), *arrays, np.float64(alpha), np.float64(beta)))


@register_kernel("csr", "spmm", "cuda")
def _spmm_cuda(A: CsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    if out.size == 0:
        return
    function = cuda_function("csr.cu", f"csr_spmm<{type_names(A.values, x, A.row_offsets)}>")
    arrays = (A.row_offsets, A.column_indices, A.values, x, out)
    scalars = (np.int64(A.shape[0]), np.int64(out.shape[1]))
    function((-(-out.size // _THREADS),), (_THREADS,), (*scalars, *arrays, np.float64(alpha), np.float64(beta)))


@register_kernel("csr", "diagonal_blocks", "cuda")
def _diagonal_blocks_cuda(A: CsrMatrix, first_row: int, blocks: Array) -> None:
    if A.shape[0] == 0:
        return
    function = cuda_function("csr.cu", f"csr_diagonal_blocks<{type_names(A.values, blocks, A.row_offsets)}>")
    scalars = (np.int64(A.shape[0]), np.int64(first_row), np.int64(blocks.shape[1]))
    arrays = (A.row_offsets, A.column_indices, A.values, blocks)
    function((-(-A.shape[0] // _THREADS),), (_THREADS,), (*scalars, *arrays))
