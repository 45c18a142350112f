"""ELLPACK: all rows padded to the same width and stored slot by slot."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numba import prange

from penstock.spmv.compilation.cuda_module import NOMINAL_WARPS, CudaSource, launch, type_names
from penstock.spmv.compilation.intrinsics import fused
from penstock.spmv.compilation.jit import parallel_kernel
from penstock.spmv.compilation.table import register_kernel
from penstock.spmv.device import Array, Device
from penstock.spmv.errors import InputError
from penstock.spmv.formats.base import SparseMatrix
from penstock.spmv.formats.chunk_products import spmv_rows, spmv_strips_of_16
from penstock.spmv.formats.convert import chunks_of_slots, count_stored
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.formats.limits import longest_row
from penstock.spmv.formats.scaling import scale
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.formats.traits import Traits
from penstock.spmv.sizes import format_nbytes

ELL_KERNELS = CudaSource("penstock.spmv.kernels", "ell.cu")

_BLOCK = 512
_SMALLEST_GROUP = 32
#: Conversion is refused if padding multiplies the storage by more than this, unless the result is small.
_LARGEST_GROWTH = 10
_SMALL_NBYTES = 16 << 20


@dataclass(frozen=True, eq=False, repr=False)
class EllMatrix(SparseMatrix, name="ell"):
    """A sparse matrix with rows padded to equal width, stored slot by slot.

    Parameters
    ----------
    shape : (int, int)
    dtype : dtype
        Type of the vectors.
    column_indices : array, (width, rows) int32
        -1 where a row has ended.
    values : array, (width, rows) float64 or float32
        0 where a row has ended.
    groups : int
        CUDA: groups of threads that share the entries of a row, a power of two up to 16.
    blocks_per_row : int
        CUDA: thread blocks that share the entries of a row; more than one needs an atomic addition each.
    lanes : int
        CUDA: 0, or the lanes per row of the older kernel, a power of two up to 32.

    Notes
    -----
    A product reads ``(values + 4) * width * rows`` bytes. Groups and blocks per row follow Tsai, Cojean and Anzt (2020),
    Algorithms 4 and 5.

    Examples
    --------
    >>> import scipy.sparse
    >>> from penstock.spmv import EllMatrix
    >>> A = EllMatrix.from_csr(scipy.sparse.csr_array([[2.0, 0.0], [1.0, 4.0]]))
    >>> A.column_indices.tolist(), A.values.tolist()
    ([[0, 0], [-1, 1]], [[2.0, 1.0], [0.0, 4.0]])
    """

    traits: ClassVar[Traits] = Traits(
        "ELL", padded=("column_indices",), adds=True, efficiency={"cpu": 0.55, "cuda": 0.75}
    )

    shape: tuple[int, int]
    dtype: np.dtype[np.generic]
    column_indices: Array
    values: Array
    groups: int = 1
    blocks_per_row: int = 1
    lanes: int = 0

    @classmethod
    def from_csr(
        cls,
        A: Any,
        *,
        values_dtype: Any = None,
        check: bool = True,
        lanes: int = 0,
        warps: int | None = None,
        growth: float = _LARGEST_GROWTH,
    ) -> Self:
        """Convert a CSR matrix.

        Parameters
        ----------
        A : scipy.sparse.csr_array or CsrMatrix
        values_dtype : dtype, optional
        check : bool
        lanes : int
            Use the older CUDA kernel with this many lanes per row, for comparison.
        warps : int, optional
            Warps that the GPU runs at once, for Algorithm 5; by default those of ``A``'s device, 8448 if that is the CPU.
        growth : float
            Refuse a matrix whose padded storage is more than this times that of CSR, and more than 16 MiB.

        Raises
        ------
        InputError
            If padding makes the storage too large; the message gives both sizes.
        """
        A = CsrMatrix.from_csr(A, values_dtype=values_dtype, check=check)
        if lanes not in (0, 1, 2, 4, 8, 16, 32):
            raise InputError(f"lanes must be 0 or a power of two up to 32, not {lanes}")
        rows, xp, width = A.shape[0], A.device.xp, longest_row(A.row_offsets)
        nbytes = rows * width * (A.values_dtype.itemsize + 4)
        if nbytes > max(growth * A.nbytes, _SMALL_NBYTES):
            raise InputError(
                f"ELL would pad every row to the longest, {width} entries: {format_nbytes(nbytes)} instead of "
                f"{format_nbytes(A.nbytes)} as CSR; use sell, hyb or csr, or raise growth"
            )
        # ELL is one chunk as high as the matrix.
        offsets = xp.asarray([0, rows * width], dtype=np.int64)
        none = xp.empty(0, dtype=np.int32)
        indices, values = chunks_of_slots(A, none, offsets, max(rows, 1), A.values_dtype)
        shape = (width, rows)
        return cls(
            shape=A.shape,
            dtype=A.dtype,
            column_indices=indices.reshape(shape),
            values=values.reshape(shape),
            **cls.configuration(width, rows, warps or _warps(A.device)),
            lanes=lanes,
        )

    @classmethod
    def configuration(cls, width: int, rows: int, warps: int) -> dict[str, int]:
        """Choose groups and blocks per row (Tsai, Cojean and Anzt 2020, Algorithm 5).

        Examples
        --------
        >>> EllMatrix.configuration(width=27, rows=1_000_000, warps=8448)
        {'groups': 1, 'blocks_per_row': 1}
        >>> EllMatrix.configuration(width=2000, rows=2000, warps=8448)
        {'groups': 16, 'blocks_per_row': 4}
        """
        groups = blocks_per_row = 1
        if rows and width / rows > 1e-2:
            groups = min(_BLOCK // _SMALLEST_GROUP, 2 ** math.ceil(math.log2(width)))
            if groups == _BLOCK // _SMALLEST_GROUP:
                blocks_per_row = max(min(width // groups, warps // rows), 1)
        return {"groups": groups, "blocks_per_row": blocks_per_row}

    @classmethod
    def predicted_nbytes(cls, statistics: MatrixStatistics, **parameters: Any) -> int:
        """Return the bytes of a matrix in this format."""
        return statistics.shape[0] * statistics.longest * (statistics.values_itemsize + 4)

    def triplets(self) -> tuple[Array, Array, Array]:
        """Return row indices, column indices and values of the stored entries, row by row."""
        xp = self.device.xp
        rows, slots = xp.nonzero(self.column_indices.T >= 0)
        return rows, self.column_indices[slots, rows].astype(np.int64), self.values[slots, rows]

    def layout(self) -> dict[str, Any]:
        """Return the arguments of ``from_csr`` for the same arrays."""
        return {"lanes": self.lanes, "growth": math.inf}

    def rows(self, start: int, stop: int) -> Self:
        """Return rows ``start`` to ``stop``, as wide as the whole; a copy, since rows are not contiguous."""
        xp = self.device.xp
        arrays = {name: xp.ascontiguousarray(array[:, start:stop]) for name, array in self.arrays().items()}
        return self.from_arrays((stop - start, self.shape[1]), self.dtype, arrays, self.parameters())

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that fit the number of rows and the width."""
        shape = (self.column_indices.shape[0], self.shape[0])
        return {"column_indices": shape, "values": shape}

    @property
    def width(self) -> int:
        """Entries of the longest row."""
        return int(self.column_indices.shape[0])

    @property
    def nnz(self) -> int:
        """Number of stored scalars, padding left out."""
        return count_stored(self.column_indices.reshape(-1))


def _warps(device: Device) -> int:
    if device.kind == "cpu":
        return NOMINAL_WARPS
    attributes = device.xp.cuda.Device(device.index).attributes
    per_multiprocessor = attributes["MaxThreadsPerMultiProcessor"] // attributes["WarpSize"]
    return int(attributes["MultiProcessorCount"] * per_multiprocessor)


@parallel_kernel
def _spmm(column_indices: Array, values: Array, x: Array, out: Array, alpha: float, beta: float) -> None:
    width, columns = column_indices.shape[0], out.shape[1]
    for row in prange(out.shape[0]):
        totals = np.zeros(columns)
        for slot in range(width):
            column = column_indices[slot, row]
            if column < 0:
                break
            value = np.float64(values[slot, row])
            for k in range(columns):
                totals[k] += value * np.float64(x[column, k])
        for k in range(columns):
            if beta == 0.0:
                out[row, k] = alpha * totals[k]
            else:
                out[row, k] = fused(beta, out[row, k], alpha * totals[k])


@register_kernel("ell", "spmv", "cpu")
def _spmv_cpu(A: EllMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    # One chunk as high as the matrix; the rows after the last full strip of sixteen are passed as a shifted chunk.
    rows, none = A.shape[0], np.empty(0, dtype=np.int32)
    columns, values = A.column_indices.reshape(-1), A.values.reshape(-1)
    full = rows // 16 * 16
    for product, first, stop in ((spmv_strips_of_16, 0, full), (spmv_rows, full, rows)):
        if stop > first:
            offsets = np.array([0, columns.size - first], dtype=np.int64)
            product(rows, offsets, columns[first:], values[first:], none, x, out[first:stop], alpha, beta)


@register_kernel("ell", "spmm", "cpu")
def _spmm_cpu(A: EllMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    _spmm(A.column_indices, A.values, x, out, alpha, beta)


@register_kernel("ell", "spmv", "cuda")
def _spmv_cuda(A: EllMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    types, rows = type_names(A.values, x), A.shape[0]
    factors = (np.float64(alpha), np.float64(beta))
    arrays = (A.column_indices, A.values, x, out)
    if A.lanes:
        function = ELL_KERNELS.function(f"ell_spmv_lanes<{types}, {A.lanes}>")
        launch(function, rows * A.lanes, 256, (np.int64(rows), np.int32(A.width), *arrays, *factors))
        return
    adds = A.blocks_per_row > 1
    if adds:
        scale(out, beta)
    function = ELL_KERNELS.function(f"ell_spmv<{types}, {str(adds).lower()}>")
    blocks = -(-rows // (_BLOCK // A.groups)) * A.blocks_per_row
    sizes = (np.int32(A.width), np.int32(A.groups), np.int32(A.blocks_per_row))
    launch(function, blocks * _BLOCK, _BLOCK, (np.int64(rows), *sizes, *arrays, *factors))


@register_kernel("ell", "spmm", "cuda")
def _spmm_cuda(A: EllMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    function = ELL_KERNELS.function(f"ell_spmm<{type_names(A.values, x)}>")
    sizes = (np.int64(A.shape[0]), np.int32(A.width), np.int64(out.shape[1]))
    arrays = (A.column_indices, A.values, x, out)
    launch(function, out.size, 256, (*sizes, *arrays, np.float64(alpha), np.float64(beta)))
