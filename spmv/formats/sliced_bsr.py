"""Sliced BSR: SELL-C-sigma with small dense blocks as entries, 32 block rows interleaved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numba import prange

from penstock.spmv.compilation.intrinsics import fused
from penstock.spmv.compilation.jit import parallel_kernel, serial_kernel
from penstock.spmv.compilation.table import register_kernel
from penstock.spmv.device import Array
from penstock.spmv.formats.base import SparseMatrix
from penstock.spmv.formats.chunk_products import launch_spmm, launch_spmv
from penstock.spmv.formats.convert import (
    chunks_of_blocks,
    count_stored,
    fill_blocks,
    scalar_triplets,
    stored_blocks,
)
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.formats.sell import arrange_chunks, rows_of_chunks
from penstock.spmv.formats.statistics import MatrixStatistics, count_blocks
from penstock.spmv.formats.traits import Traits

#: Block rows per chunk: the lanes of a warp, so that every load of a warp is contiguous.
HEIGHT = 32


@dataclass(frozen=True, eq=False, repr=False)
class SlicedBsrMatrix(SparseMatrix, name="sliced_bsr"):
    """A sparse matrix of small dense blocks in chunks of 32 block rows, stored slot by slot and scalar by scalar.

    Parameters
    ----------
    shape : (int, int)
        Rows and columns in scalars, multiples of the block size.
    dtype : dtype
        Type of the vectors.
    chunk_offsets : array, (chunks + 1,) int64
        Where each chunk begins, in blocks.
    column_indices : array, (stored blocks,) int32
        Block columns: slot s of position p is s * 32 + p after the start of the chunk; -1 is padding.
    values : array, (stored blocks * block size ** 2,) float64 or float32
        Scalar (r, c) of that block is ``((s * b + r) * b + c) * 32 + p`` after the chunk's start times b * b.
    permutation : array, (block rows,) or (0,) int32
        Block row at each position; empty for the natural order.
    block_size : int
        b, 1 to 8.
    sorting_scope : int
        sigma, in block rows: 1 or a multiple of 32.

    Notes
    -----
    Each of 32 neighbouring threads owns a block row, so every load of the matrix is contiguous: the fastest format here
    for finite-element matrices with several degrees of freedom per node. A product reads ``values * b * b + 4`` bytes per
    stored block.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.spmv import SlicedBsrMatrix
    >>> A = SlicedBsrMatrix.from_csr(Cantilever(nodes=4, dof=3).matrix().to_csr(), block_size=3)
    >>> A.shape, A.chunk_offsets.tolist(), A.values.shape
    ((192, 192), [0, 864, 1248], (11232,))
    """

    traits: ClassVar[Traits] = Traits(
        "sliced BSR",
        padded=("column_indices",),
        blocked=True,
        streams=True,
        efficiency={"cpu": 0.6, "cuda": 0.97},
        halving_columns=28,
    )

    shape: tuple[int, int]
    dtype: np.dtype[np.generic]
    chunk_offsets: Array
    column_indices: Array
    values: Array
    permutation: Array
    block_size: int = 3
    sorting_scope: int = 1

    @classmethod
    def from_csr(
        cls,
        A: Any,
        *,
        block_size: int = 3,
        sorting_scope: int | Literal["auto"] = "auto",
        values_dtype: Any = None,
        check: bool = True,
    ) -> Self:
        """Convert a CSR matrix on its device; blocks that hold any stored entry are stored whole.

        Parameters
        ----------
        A : scipy.sparse.csr_array or CsrMatrix
        block_size : int
            1 to 8; must divide rows and columns.
        sorting_scope : int or "auto"
            sigma, in block rows: 1 or a power of two that 32 divides.
        values_dtype : dtype, optional
        check : bool

        Raises
        ------
        InputError
            If the block size or the scope is invalid.
        """
        A = CsrMatrix.from_csr(A, values_dtype=values_dtype, check=check)
        counts = count_blocks(A.device, A.shape, A.row_offsets, A.column_indices, block_size)
        scope, permutation, offsets = arrange_chunks(counts, HEIGHT, sorting_scope)
        indices, values = chunks_of_blocks(A, block_size, permutation, offsets, HEIGHT, A.values_dtype)
        return cls(A.shape, A.dtype, offsets, indices, values, permutation, block_size, scope)

    @classmethod
    def predicted_nbytes(
        cls,
        statistics: MatrixStatistics,
        *,
        block_size: int = 3,
        sorting_scope: int | Literal["auto"] = "auto",
        **parameters: Any,
    ) -> int:
        """Return the bytes of a matrix in this format."""
        _, permutation, offsets = arrange_chunks(statistics.blocks(block_size), HEIGHT, sorting_scope)
        stored = int(offsets[-1]) * (block_size**2 * statistics.values_itemsize + 4)
        return stored + int(offsets.nbytes + permutation.nbytes)

    def triplets(self) -> tuple[Array, Array, Array]:
        """Return row indices, column indices and values of every scalar of every block."""
        arrays = (self.chunk_offsets, self.column_indices, self.values, self.permutation)
        return scalar_triplets(*stored_blocks(*arrays, self.shape[0] // self.block_size, HEIGHT, self.block_size))

    def _write_values(self, A: Any, first_row: int) -> None:
        arrays = (self.column_indices, self.values)
        fill_blocks(A, self.block_size, self.permutation, self.chunk_offsets, HEIGHT, *arrays)

    def rows(self, start: int, stop: int) -> Self:
        """Return rows ``start`` to ``stop``, multiples of the granularity unless the last; indices and values are views."""
        arrays = rows_of_chunks(self, start, stop, HEIGHT, self.block_size)
        return self.from_arrays((stop - start, self.shape[1]), self.dtype, arrays, self.parameters())

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that fit the number of rows and of column indices."""
        stored, block_rows = self.column_indices.size, self.shape[0] // self.block_size
        return {
            "chunk_offsets": (-(-block_rows // HEIGHT) + 1,),
            "column_indices": (stored,),
            "values": (stored * self.block_size**2,),
            "permutation": (block_rows if self.sorting_scope > 1 else 0,),
        }

    @property
    def nnz(self) -> int:
        """Number of stored scalars, padding left out."""
        return count_stored(self.column_indices) * self.block_size**2

    @property
    def row_granularity(self) -> int:
        """Scalar rows of a chunk or of a sorting scope, whichever is larger."""
        return max(HEIGHT, self.sorting_scope) * self.block_size

    @property
    def chunk_rows(self) -> int:
        """Scalar rows of a chunk."""
        return HEIGHT * self.block_size


@serial_kernel
def gather_rows(size: int, columns: Array, x: Array, gathered: Array) -> None:
    """Gather the entries of x for a slot's blocks, 0 for padding: loops over ``gathered`` then use vector registers."""
    for p in range(HEIGHT):
        column = np.int64(columns[p])
        for c in range(size):
            gathered[c, p] = x[column * size + c] if column >= 0 else 0.0


@parallel_kernel
def _spmv(
    size: int,
    offsets: Array,
    columns: Array,
    values: Array,
    permutation: Array,
    x: Array,
    out: Array,
    alpha: float,
    beta: float,
) -> None:
    for chunk in prange(offsets.shape[0] - 1):
        first, width = offsets[chunk], (offsets[chunk + 1] - offsets[chunk]) // HEIGHT
        rows = min(HEIGHT, out.shape[0] // size - chunk * HEIGHT)
        totals, gathered = np.zeros((size, HEIGHT)), np.empty((size, HEIGHT))
        for slot in range(width):
            scalars = values[(first + slot * HEIGHT) * size * size : (first + (slot + 1) * HEIGHT) * size * size]
            gather_rows(size, columns[first + slot * HEIGHT : first + (slot + 1) * HEIGHT], x, gathered)
            for r in range(size):
                for c in range(size):
                    for p in range(HEIGHT):
                        totals[r, p] += np.float64(scalars[(r * size + c) * HEIGHT + p]) * gathered[c, p]
        for p in range(rows):
            row = np.int64(permutation[chunk * HEIGHT + p]) if permutation.size else np.int64(chunk * HEIGHT + p)
            for r in range(size):
                i = row * size + r
                out[i] = alpha * totals[r, p] if beta == 0.0 else fused(beta, out[i], alpha * totals[r, p])


@parallel_kernel
def _spmm(
    size: int,
    offsets: Array,
    columns: Array,
    values: Array,
    permutation: Array,
    x: Array,
    out: Array,
    alpha: float,
    beta: float,
) -> None:
    for position in prange(out.shape[0] // size):
        chunk, place = position // HEIGHT, position % HEIGHT
        totals = np.zeros((size, out.shape[1]))
        for block in range(offsets[chunk], offsets[chunk + 1], HEIGHT):
            column = np.int64(columns[block + place])
            if column < 0:
                continue
            for r in range(size):
                for c in range(size):
                    value = np.float64(values[block * size * size + (r * size + c) * HEIGHT + place])
                    for k in range(out.shape[1]):
                        totals[r, k] += value * np.float64(x[column * size + c, k])
        row = np.int64(permutation[position]) if permutation.size else np.int64(position)
        for r in range(size):
            for k in range(out.shape[1]):
                i = row * size + r
                out[i, k] = alpha * totals[r, k] if beta == 0.0 else fused(beta, out[i, k], alpha * totals[r, k])


def _stored(A: SlicedBsrMatrix) -> tuple[Any, ...]:
    return A.block_size, A.chunk_offsets, A.column_indices, A.values, A.permutation


@register_kernel("sliced_bsr", "spmv", "cpu")
def _spmv_cpu(A: SlicedBsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    _spmv(*_stored(A), x, out, alpha, beta)


@register_kernel("sliced_bsr", "spmm", "cpu")
def _spmm_cpu(A: SlicedBsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    _spmm(*_stored(A), x, out, alpha, beta)


@register_kernel("sliced_bsr", "spmv", "cuda")
def _spmv_cuda(A: SlicedBsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    launch_spmv(A, A.shape[0] // A.block_size, HEIGHT, A.block_size, x, out, alpha, beta)


@register_kernel("sliced_bsr", "spmm", "cuda")
def _spmm_cuda(A: SlicedBsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    launch_spmm(A, A.shape[0] // A.block_size, HEIGHT, A.block_size, x, out, alpha, beta)
