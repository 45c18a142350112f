"""A square sparse matrix by rows of dense blocks, as the solves with its triangles read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.spmv import Array, BsrMatrix, CsrMatrix, Device, InputError, SparseMatrix, as_operator, device_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch, type_names
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.formats.limits import INT32_MAX

ORDER_KERNELS = CudaSource("penstock.solvers.kernels", "solve_order.cu")

#: Rows of the blocks for which there are kernels.
SIZES = (1, 2, 3, 6)


def solved_size(block_size: int) -> int:
    """Return the rows of the blocks by which a matrix with dense blocks of this size is solved."""
    return block_size if block_size in SIZES else 1


def estimated_nbytes(n: int, block_size: int, dtype: Any) -> int:
    """Return the bytes of a matrix of n rows in blocks, taken for one of 27 blocks a row."""
    return 27 * n * (block_size * int(np.dtype(dtype).itemsize) + 8 // block_size)


@dataclass(frozen=True)
class BlockEntries:
    """A square matrix by rows of blocks."""

    offsets: Array  # int64, (rows + 1,)
    columns: Array  # int32, (entries,): block columns, ascending in every row
    values: Array  # (entries, size, size)
    dtype: np.dtype[np.generic]  # of the vectors

    @property
    def rows(self) -> int:
        """The number of rows of blocks."""
        return len(self.offsets) - 1

    @property
    def size(self) -> int:
        """The rows of a block."""
        return int(self.values.shape[1])

    @property
    def device(self) -> Device:
        """Where the arrays are."""
        return device_of(self.values)

    def matches(self, other: BlockEntries) -> bool:
        """Return whether another matrix has the same pattern, types and device."""
        types = (self.values.dtype, self.dtype, self.device, self.values.shape, self.rows)
        if types != (other.values.dtype, other.dtype, other.device, other.values.shape, other.rows):
            return False
        return bool((self.offsets == other.offsets).all()) and bool((self.columns == other.columns).all())


def block_entries(A: Any, block_size: int | None = None) -> BlockEntries:
    """Return a matrix by rows of blocks, on its device: those of BSR with 1, 2, 3 or 6 rows, without a copy, or single entries.

    Takes a penstock format or a SciPy or CuPy sparse matrix. Refuses what is no square matrix in memory, has more than 2**31 -
    1 blocks, or values that are not finite.
    """
    matrix = as_operator(A)
    if not isinstance(matrix, SparseMatrix):
        raise InputError(
            f"the entries of a {type(A).__name__} are not at hand; pass a sparse matrix that is held in memory as a whole, or "
            "for a streamed one take the preconditioner chebyshev or smoothed_aggregation"
        )
    if matrix.shape[0] != matrix.shape[1]:
        raise InputError(f"a triangular solve needs a square matrix, not one of shape {matrix.shape}")
    if block_size is not None and block_size not in SIZES:
        raise InputError(f"block_size must be one of {', '.join(map(str, SIZES))}, not {block_size}")
    own = matrix.row_granularity if isinstance(matrix, BsrMatrix) else 1
    size = block_size or (own if own in SIZES else 1)
    if not isinstance(matrix, BsrMatrix if size > 1 else CsrMatrix) or (size > 1 and own != size):
        if not isinstance(matrix, CsrMatrix):
            scalars = matrix.to_csr()
            scalars.eliminate_zeros()  # those that fill up blocks
            matrix = CsrMatrix.from_csr(scalars, values_dtype=scalars.dtype).to_device(matrix.device)
        if size > 1:
            matrix = BsrMatrix.from_csr(matrix, block_size=size)
    values = matrix.values.reshape(-1, size, size)
    if len(values) > INT32_MAX:
        raise InputError(f"the matrix holds {len(values)} entries, more than {INT32_MAX}; store it in blocks (BSR)")
    place = find_kernel("triangle", "not_finite", matrix.device.kind)(values)
    if place < len(values):
        row = size * int(matrix.device.xp.searchsorted(matrix.row_offsets, place, side="right") - 1)
        raise InputError(f"row {row} of the matrix holds a value that is not finite; all entries must be finite")
    offsets = matrix.row_offsets.astype(np.int64, copy=False)
    return BlockEntries(offsets, matrix.column_indices, values, np.dtype(matrix.dtype))


@register_kernel("triangle", "not_finite", "cpu")
def _not_finite_cpu(values: Array) -> int:
    """Return the first entry that holds a value that is not finite, or the number of entries."""
    finite = np.isfinite(values)
    return len(values) if finite.all() else int(np.argmin(finite)) // int(values[0].size)


@register_kernel("triangle", "not_finite", "cuda")
def _not_finite_cuda(values: Array) -> int:
    first = device_of(values).xp.full(1, values.size, dtype=np.uint64)
    function = ORDER_KERNELS.function(f"find_not_finite<{type_names(values)}>")
    launch(function, values.size, 256, (np.int64(values.size), values, first))
    return int(first[0]) // max(1, int(values[:1].size))
