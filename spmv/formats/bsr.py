"""Block compressed sparse rows (BSR): CSR with small dense square blocks as entries."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import scipy.sparse
from numba import prange

from penstock.spmv.compilation.chunk_size import chunk_size, scheduled
from penstock.spmv.compilation.cuda_module import CudaSource, launch, type_names
from penstock.spmv.compilation.intrinsics import fused
from penstock.spmv.compilation.jit import embedded_kernel, parallel_kernel, shared_range
from penstock.spmv.compilation.table import register_kernel
from penstock.spmv.device import CPU, Array, loadable_in_pairs
from penstock.spmv.errors import InputError
from penstock.spmv.formats.base import SparseMatrix
from penstock.spmv.formats.convert import chunk_offsets, chunks_of_blocks, fill_blocks, scalar_triplets
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.formats.limits import LARGEST_DENSE_BLOCK, check_block_size, narrow_offsets
from penstock.spmv.formats.statistics import MatrixStatistics, count_blocks
from penstock.spmv.formats.traits import Traits
from penstock.spmv.formats.validation import check_values, in_sorted_rows, real_values

BSR_KERNELS = CudaSource("penstock.spmv.kernels", "bsr.cu")


@dataclass(frozen=True, eq=False, repr=False)
class BsrMatrix(SparseMatrix, name="bsr"):
    """A sparse matrix of dense square blocks, one column index per block.

    Parameters
    ----------
    shape : (int, int)
        Rows and columns in scalars, multiples of the block size.
    dtype : dtype
        Type of the vectors.
    row_offsets : array, (block rows + 1,) int64, or int32 in a slab
    column_indices : array, (blocks,) int32
        Block columns, ascending within a block row, without duplicates.
    values : array, (blocks, block size, block size) float64 or float32
        Blocks in row-major order; block sizes 1 to 8.

    Notes
    -----
    A product reads ``values * b * b + 4`` bytes per block: 8.44 bytes per scalar for 3 x 3 blocks of float64, against 12 in
    CSR.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.spmv import BsrMatrix
    >>> A = BsrMatrix.from_csr(Cantilever(nodes=2, dof=3).matrix().to_csr(), block_size=3)
    >>> A.shape, A.values.shape, A.values.dtype.name, A.nbytes
    ((24, 24), (64, 3, 3), 'float64', 4936)
    """

    traits: ClassVar[Traits] = Traits("BSR", blocked=True, streams=True, efficiency={"cpu": 0.95, "cuda": 0.93})

    shape: tuple[int, int]
    dtype: np.dtype[np.generic]
    row_offsets: Array
    column_indices: Array
    values: Array

    @classmethod
    def from_csr(cls, A: Any, *, block_size: int = 3, values_dtype: Any = None, check: bool = True) -> Self:
        """Convert a CSR matrix on its device; blocks that hold any stored entry are stored whole.

        Parameters
        ----------
        A : scipy.sparse.csr_array or CsrMatrix
        block_size : int
            1 to 8; must divide rows and columns.
        values_dtype : dtype, optional
        check : bool

        Raises
        ------
        InputError
            If the block size does not divide the shape, or the entries are not those of a valid CSR matrix.
        """
        A = CsrMatrix.from_csr(A, values_dtype=values_dtype, check=check)
        offsets = chunk_offsets(count_blocks(A.device, A.shape, A.row_offsets, A.column_indices, block_size), 1)
        none = A.device.xp.empty(0, dtype=np.int32)
        indices, values = chunks_of_blocks(A, block_size, none, offsets, 1, A.values_dtype)
        return cls(A.shape, A.dtype, offsets, indices, values.reshape(-1, block_size, block_size))

    @classmethod
    def predicted_nbytes(cls, statistics: MatrixStatistics, *, block_size: int = 3, **parameters: Any) -> int:
        """Return the bytes of a matrix in this format."""
        blocks = int(statistics.blocks(block_size).sum())
        return blocks * (block_size**2 * statistics.values_itemsize + 4) + 8 * (statistics.shape[0] // block_size + 1)

    @classmethod
    def from_bsr(cls, A: Any, *, values_dtype: Any = None, check: bool = True) -> Self:
        """Wrap a SciPy BSR matrix of square blocks; arrays are shared where their types allow and rows are sorted.

        Raises
        ------
        InputError
            If blocks are not square or larger than 8, an index is out of range, or a value is not finite.
        """
        height, width = A.blocksize
        if height != width or height > LARGEST_DENSE_BLOCK:
            raise InputError(
                f"BSR blocks must be square, up to {LARGEST_DENSE_BLOCK} x {LARGEST_DENSE_BLOCK}; these are {height} x {width}"
            )
        if check:
            A = in_sorted_rows(A, "BSR matrix (in blocks)")
        values = check_values(A, "the matrix") if check else real_values(A, "the matrix")
        blocks = int(A.indptr[-1])  # SciPy's arrays may be longer than that
        matrix = cls(
            shape=(int(A.shape[0]), int(A.shape[1])),
            dtype=values.dtype,
            row_offsets=A.indptr.astype(np.int64, copy=False),
            column_indices=A.indices[:blocks].astype(np.int32, copy=False),
            values=np.ascontiguousarray(values[:blocks], dtype=values_dtype or values.dtype),
        )
        matrix.check_shapes()
        return matrix

    def to_bsr(self) -> scipy.sparse.bsr_array:
        """Return a SciPy BSR array on the host that shares host arrays."""
        host = {name: CPU.asarray(array) for name, array in self.arrays().items()}
        A = scipy.sparse.bsr_array(self.shape, blocksize=self.values.shape[1:], dtype=self.values_dtype)
        A.indptr, A.indices, A.data = host["row_offsets"], host["column_indices"], host["values"]
        return A

    def to_csr(self) -> scipy.sparse.csr_array:
        """Return a SciPy CSR array on the host with every scalar of every block, zeros among them."""
        return self.to_bsr().tocsr()

    def triplets(self) -> tuple[Array, Array, Array]:
        """Return row indices, column indices and values of every scalar of every block."""
        block_rows = self.device.xp.searchsorted(
            self.row_offsets, self.device.xp.arange(self.column_indices.size), side="right"
        )
        return scalar_triplets(block_rows - 1, self.column_indices.astype(np.int64), self.values)

    def _write_values(self, A: Any, first_row: int) -> None:
        none, size = self.device.xp.empty(0, dtype=np.int32), int(self.values.shape[-1])
        fill_blocks(A, size, none, self.row_offsets, 1, self.column_indices, self.values.reshape(-1))

    def layout(self) -> dict[str, Any]:
        """Return the arguments of ``from_csr`` for the same arrays."""
        return {"block_size": int(self.values.shape[-1])}

    def rows(self, start: int, stop: int) -> Self:
        """Return rows ``start`` to ``stop``, multiples of the block size; indices and values are views."""
        size = self.row_granularity
        if start % size or stop % size:
            raise InputError(f"rows {start} to {stop} do not start and stop at multiples of the block size {size}")
        offsets = narrow_offsets(self.row_offsets, start // size, stop // size)
        first = int(self.row_offsets[start // size])
        blocks = slice(first, first + int(offsets[-1]))
        arrays = {
            "row_offsets": offsets,
            "column_indices": self.column_indices[blocks],
            "values": self.values[blocks],
        }
        return self.from_arrays((stop - start, self.shape[1]), self.dtype, arrays, self.parameters())

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that fit ``shape``, the number of column indices and the block size."""
        blocks, size = self.column_indices.size, self.row_granularity
        offsets = check_block_size(size, self.shape[0]) + 1
        return {"row_offsets": (offsets,), "column_indices": (blocks,), "values": (blocks, size, size)}

    @property
    def nnz(self) -> int:
        """Number of stored scalars."""
        return int(self.values.size)

    @functools.cached_property
    def chunk_size(self) -> int:
        """Block rows that a CPU thread fetches at a time; 0 for equal shares."""
        return chunk_size(self.row_offsets, self.nbytes)

    @property
    def row_granularity(self) -> int:
        """The block size."""
        return int(self.values.shape[1])


@parallel_kernel
def _spmv_3(offsets: Array, columns: Array, values: Array, x: Array, out: Array, alpha: float, beta: float) -> None:
    for block_row in prange(offsets.shape[0] - 1):
        t0 = t1 = t2 = 0.0
        for block in range(offsets[block_row], offsets[block_row + 1]):
            j = np.uint64(3) * np.uint64(np.uint32(columns[block]))
            x0, x1, x2 = np.float64(x[j]), np.float64(x[j + np.uint64(1)]), np.float64(x[j + np.uint64(2)])
            a = values[block]
            t0 += np.float64(a[0, 0]) * x0 + np.float64(a[0, 1]) * x1 + np.float64(a[0, 2]) * x2
            t1 += np.float64(a[1, 0]) * x0 + np.float64(a[1, 1]) * x1 + np.float64(a[1, 2]) * x2
            t2 += np.float64(a[2, 0]) * x0 + np.float64(a[2, 1]) * x1 + np.float64(a[2, 2]) * x2
        i = 3 * block_row
        if beta == 0.0:
            out[i], out[i + 1], out[i + 2] = alpha * t0, alpha * t1, alpha * t2
        else:
            out[i] = fused(beta, out[i], alpha * t0)
            out[i + 1] = fused(beta, out[i + 1], alpha * t1)
            out[i + 2] = fused(beta, out[i + 2], alpha * t2)


@parallel_kernel
def _spmv_any(offsets: Array, columns: Array, values: Array, x: Array, out: Array, alpha: float, beta: float) -> None:
    size = values.shape[1]
    for block_row in prange(offsets.shape[0] - 1):
        # Two rows of a block at a time: their sums stay in registers and share each load of x.
        for r in range(0, size, 2):
            q = min(r + 1, size - 1)
            t0 = t1 = 0.0
            for block in range(offsets[block_row], offsets[block_row + 1]):
                first = np.int64(columns[block]) * size
                for c in range(size):
                    xc = np.float64(x[first + c])
                    t0 += np.float64(values[block, r, c]) * xc
                    t1 += np.float64(values[block, q, c]) * xc
            i, k = block_row * size + r, block_row * size + q
            if beta == 0.0:
                out[i] = alpha * t0
                if k > i:
                    out[k] = alpha * t1
            else:
                out[i] = fused(beta, out[i], alpha * t0)
                if k > i:
                    out[k] = fused(beta, out[k], alpha * t1)


# Of few vectors side by side two are multiplied at a time, in registers: blocks are read again from a cache.
@embedded_kernel
def _put(out: Array, i: int, k: int, total: float, alpha: float, beta: float) -> None:
    out[i, k] = alpha * total if beta == 0.0 else fused(beta, out[i, k], alpha * total)


@parallel_kernel
def _spmm_few_3(offsets: Array, columns: Array, values: Array, x: Array, out: Array, alpha: float, beta: float) -> None:
    for block_row in prange(offsets.shape[0] - 1):
        for k in range(0, out.shape[1], 2):
            m = min(k + 1, out.shape[1] - 1)
            t0 = t1 = t2 = s0 = s1 = s2 = 0.0
            for block in range(offsets[block_row], offsets[block_row + 1]):
                j, a = np.uint64(3) * np.uint64(np.uint32(columns[block])), values[block]
                a00, a01, a02 = np.float64(a[0, 0]), np.float64(a[0, 1]), np.float64(a[0, 2])
                a10, a11, a12 = np.float64(a[1, 0]), np.float64(a[1, 1]), np.float64(a[1, 2])
                a20, a21, a22 = np.float64(a[2, 0]), np.float64(a[2, 1]), np.float64(a[2, 2])
                x0, y0 = np.float64(x[j, k]), np.float64(x[j, m])
                x1, y1 = np.float64(x[j + np.uint64(1), k]), np.float64(x[j + np.uint64(1), m])
                x2, y2 = np.float64(x[j + np.uint64(2), k]), np.float64(x[j + np.uint64(2), m])
                t0 += a00 * x0 + a01 * x1 + a02 * x2
                t1 += a10 * x0 + a11 * x1 + a12 * x2
                t2 += a20 * x0 + a21 * x1 + a22 * x2
                s0 += a00 * y0 + a01 * y1 + a02 * y2
                s1 += a10 * y0 + a11 * y1 + a12 * y2
                s2 += a20 * y0 + a21 * y1 + a22 * y2
            i = 3 * block_row
            _put(out, i, k, t0, alpha, beta)
            _put(out, i + 1, k, t1, alpha, beta)
            _put(out, i + 2, k, t2, alpha, beta)
            if m > k:
                _put(out, i, m, s0, alpha, beta)
                _put(out, i + 1, m, s1, alpha, beta)
                _put(out, i + 2, m, s2, alpha, beta)


@parallel_kernel
def _spmm_few(offsets: Array, columns: Array, values: Array, x: Array, out: Array, alpha: float, beta: float) -> None:
    size = values.shape[1]
    for block_row in prange(offsets.shape[0] - 1):
        for k in range(0, out.shape[1], 2):
            m = min(k + 1, out.shape[1] - 1)
            for r in range(0, size, 2):
                q = min(r + 1, size - 1)
                t0 = t1 = s0 = s1 = 0.0
                for block in range(offsets[block_row], offsets[block_row + 1]):
                    first = np.int64(columns[block]) * size
                    for c in range(size):
                        xk, xm = np.float64(x[first + c, k]), np.float64(x[first + c, m])
                        a, b = np.float64(values[block, r, c]), np.float64(values[block, q, c])
                        t0 += a * xk
                        t1 += b * xk
                        s0 += a * xm
                        s1 += b * xm
                i, j = block_row * size + r, block_row * size + q
                _put(out, i, k, t0, alpha, beta)
                if j > i:
                    _put(out, j, k, t1, alpha, beta)
                if m > k:
                    _put(out, i, m, s0, alpha, beta)
                if m > k and j > i:
                    _put(out, j, m, s1, alpha, beta)


@parallel_kernel
def _spmm(offsets: Array, columns: Array, values: Array, x: Array, out: Array, alpha: float, beta: float) -> None:
    size, width = values.shape[1], out.shape[1]
    for block_row in prange(offsets.shape[0] - 1):
        # All sums of the block row stay in the cache; the columns of a row of x, which are adjacent, fill vector registers.
        sums = np.zeros((size, width))
        for block in range(offsets[block_row], offsets[block_row + 1]):
            first = np.int64(columns[block]) * size
            for c in range(size):
                of_x = x[first + c]
                for r in range(size):
                    value, of_row = np.float64(values[block, r, c]), sums[r]
                    for k in range(width):
                        of_row[k] += value * np.float64(of_x[k])
        for r in range(size):
            i = block_row * size + r
            for k in range(width):
                out[i, k] = alpha * sums[r, k] if beta == 0.0 else fused(beta, out[i, k], alpha * sums[r, k])


@shared_range(least=2048)
def _diagonal_blocks(
    begin: int, end: int, offsets: Array, columns: Array, values: Array, first_row: int, blocks: Array
) -> None:
    size, wanted = values.shape[1], blocks.shape[1]
    for block_row in range(begin, end):
        for r in range(size):
            target, i = divmod(first_row + block_row * size + r, wanted)
            for block in range(offsets[block_row], offsets[block_row + 1]):
                for c in range(size):
                    j = np.int64(columns[block]) * size + c - target * wanted
                    if 0 <= j < wanted:
                        blocks[target, i, j] = values[block, r, c]


@register_kernel("bsr", "spmv", "cpu")
def _spmv_cpu(A: BsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    product = _spmv_3 if A.row_granularity == 3 else _spmv_any
    with scheduled(A.chunk_size):
        product(A.row_offsets, A.column_indices, A.values, x, out, alpha, beta)


@register_kernel("bsr", "spmm", "cpu")
def _spmm_cpu(A: BsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    if out.shape[1] < (8 if A.row_granularity == 3 else 4):
        product = _spmm_few_3 if A.row_granularity == 3 else _spmm_few
    else:
        product = _spmm
    product(A.row_offsets, A.column_indices, A.values, x, out, alpha, beta)


@register_kernel("bsr", "diagonal_blocks", "cpu")
def _diagonal_blocks_cpu(A: BsrMatrix, first_row: int, blocks: Array) -> None:
    _diagonal_blocks(len(A.row_offsets) - 1, A.row_offsets, A.column_indices, A.values, first_row, blocks)


_THREADS = 256


def _launch(
    A: BsrMatrix,
    kernel: str,
    threads: int,
    scalars: tuple[int, ...],
    arrays: tuple[Array, ...],
    *rest: float,
    block: int = _THREADS,
) -> None:
    names = type_names(A.values, arrays[0], A.row_offsets)
    function = BSR_KERNELS.function(f"{kernel}<{names}, {A.row_granularity}>")
    structure = (A.row_offsets, A.column_indices, A.values)
    integers, floats = [np.int64(number) for number in scalars], [np.float64(number) for number in rest]
    launch(function, threads, block, (*integers, *structure, *arrays, *floats))


@register_kernel("bsr", "spmv", "cuda")
def _spmv_cuda(A: BsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    block_rows = A.shape[0] // A.row_granularity
    values = loadable_in_pairs(A.values, A.row_granularity)
    A = A if values is A.values else replace(A, values=values)
    _launch(A, "bsr_spmv", 32 * block_rows, (block_rows,), (x, out), alpha, beta, block=64)


@register_kernel("bsr", "spmm", "cuda")
def _spmm_cuda(A: BsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    _launch(A, "bsr_spmm", out.size, (A.shape[0], out.shape[1]), (x, out), alpha, beta)


@register_kernel("bsr", "diagonal_blocks", "cuda")
def _diagonal_blocks_cuda(A: BsrMatrix, first_row: int, blocks: Array) -> None:
    _launch(A, "bsr_diagonal_blocks", A.shape[0], (A.shape[0], first_row, blocks.shape[1]), (blocks,))
