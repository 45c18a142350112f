"""Coordinate storage (COO): a row index, a column index and a value per entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numba import get_num_threads, prange

from penstock.spmv.compilation.cuda_module import NOMINAL_WARPS, CudaSource, launch, type_names
from penstock.spmv.compilation.jit import parallel_kernel, serial_kernel
from penstock.spmv.compilation.table import register_kernel
from penstock.spmv.device import Array
from penstock.spmv.errors import InputError
from penstock.spmv.formats.base import SparseMatrix
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.formats.limits import INT32_MAX
from penstock.spmv.formats.scaling import scale
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.formats.traits import Traits

COO_KERNELS = CudaSource("penstock.spmv.kernels", "coo.cu")

#: Groups of 32 lanes per group that the hardware runs at once, by number of entries (Tsai, Cojean and Anzt 2020, section 3.1,
#: after Flegar et al.).
_OVERSUBSCRIPTION = ((200_000, 8), (2_000_000, 32), (None, 128))


def oversubscription(entries: int) -> int:
    """Return how many groups of lanes to launch per group that the hardware runs at once.

    Examples
    --------
    >>> [oversubscription(entries) for entries in (1000, 1_000_000, 10_000_000)]
    [8, 32, 128]
    """
    return next(factor for limit, factor in _OVERSUBSCRIPTION if limit is None or entries < limit)


@dataclass(frozen=True, eq=False, repr=False)
class CooMatrix(SparseMatrix, name="coo"):
    """A sparse matrix as a list of entries in row order.

    Parameters
    ----------
    shape : (int, int)
    dtype : dtype
        Type of the vectors.
    row_indices, column_indices : array, (nnz,) int32
        Rows ascend; columns ascend within a row.
    values : array, (nnz,) float64 or float32

    Notes
    -----
    A product reads ``values + 8`` bytes per entry. On a GPU the work is balanced over entries (Flegar and Anzt 2017) and
    rows are completed by atomic additions, so last digits may differ between runs.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> from penstock.spmv import CooMatrix
    >>> A = CooMatrix.from_csr(scipy.sparse.csr_array([[2.0, 0.0], [1.0, 4.0]]))
    >>> A.row_indices.tolist(), A.column_indices.tolist(), (A @ np.ones(2)).tolist()
    ([0, 1, 1], [0, 0, 1], [2.0, 5.0])
    """

    traits: ClassVar[Traits] = Traits("COO", adds=True, uneven_rows_wait=False, efficiency={"cpu": 0.6, "cuda": 0.6})

    shape: tuple[int, int]
    dtype: np.dtype[np.generic]
    row_indices: Array
    column_indices: Array
    values: Array

    @classmethod
    def from_csr(cls, A: Any, *, values_dtype: Any = None, check: bool = True) -> Self:
        """Convert a CSR matrix; column indices and values are shared.

        Raises
        ------
        InputError
            If rows do not fit 32-bit indices.
        """
        A = CsrMatrix.from_csr(A, values_dtype=values_dtype, check=check)
        if A.shape[0] > INT32_MAX:
            raise InputError(f"{A.shape[0]} rows do not fit 32-bit row indices")
        rows, _, _ = A.triplets()
        return cls(A.shape, A.dtype, rows, A.column_indices, A.values)

    @classmethod
    def predicted_nbytes(cls, statistics: MatrixStatistics, **parameters: Any) -> int:
        """Return the bytes of a matrix in this format."""
        return statistics.nnz * (statistics.values_itemsize + 8)

    def triplets(self) -> tuple[Array, Array, Array]:
        """Return the arrays themselves."""
        return self.row_indices, self.column_indices, self.values

    def rows(self, start: int, stop: int) -> Self:
        """Return rows ``start`` to ``stop``; column indices and values are views."""
        xp = self.device.xp
        first, last = xp.searchsorted(self.row_indices, xp.asarray([start, stop], dtype=np.int32)).tolist()
        arrays = {name: array[first:last] for name, array in self.arrays().items()}
        arrays["row_indices"] = arrays["row_indices"] - np.int32(start)
        return self.from_arrays((stop - start, self.shape[1]), self.dtype, arrays, {})

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that fit the number of column indices."""
        return dict.fromkeys(self.arrays(), (self.column_indices.size,))

    @property
    def nnz(self) -> int:
        """Number of stored scalars."""
        return int(self.values.size)


@serial_kernel
def _share(part: int, parts: int, rows: Array) -> tuple[int, int]:
    """Return the entries of one part: a nearly equal share, cut where a row begins, so no two parts write to one row."""
    first, stop = rows.size * part // parts, rows.size * (part + 1) // parts
    while 0 < first < rows.size and rows[first] == rows[first - 1]:
        first += 1
    while 0 < stop < rows.size and rows[stop] == rows[stop - 1]:
        stop += 1
    return first, stop


@parallel_kernel
def _spmv(parts: int, rows: Array, columns: Array, values: Array, x: Array, out: Array, alpha: float) -> None:
    for part in prange(parts):
        first, stop = _share(part, parts, rows)
        entry = first
        while entry < stop:
            row, total = rows[entry], 0.0
            while entry < stop and rows[entry] == row:
                total += np.float64(values[entry]) * np.float64(x[np.uint64(np.uint32(columns[entry]))])
                entry += 1
            out[row] += alpha * total


@parallel_kernel
def _spmm(parts: int, rows: Array, columns: Array, values: Array, x: Array, out: Array, alpha: float) -> None:
    for part in prange(parts):
        first, stop = _share(part, parts, rows)
        totals = np.zeros(out.shape[1])
        for entry in range(first, stop):
            for k in range(out.shape[1]):
                totals[k] += np.float64(values[entry]) * np.float64(x[columns[entry], k])
            if entry + 1 == stop or rows[entry + 1] != rows[entry]:
                for k in range(out.shape[1]):
                    out[rows[entry], k] += alpha * totals[k]
                    totals[k] = 0.0


@register_kernel("coo", "spmv", "cpu")
def _spmv_cpu(A: CooMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    scale(out, beta)
    _spmv(4 * get_num_threads(), A.row_indices, A.column_indices, A.values, x, out, alpha)


@register_kernel("coo", "spmm", "cpu")
def _spmm_cpu(A: CooMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    scale(out, beta)
    _spmm(4 * get_num_threads(), A.row_indices, A.column_indices, A.values, x, out, alpha)


@register_kernel("coo", "spmv", "cuda")
def _spmv_cuda(A: CooMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    scale(out, beta)
    groups = oversubscription(A.nnz) * NOMINAL_WARPS
    share = -(-A.nnz // groups // 32) * 32 or 32
    function = COO_KERNELS.function(f"coo_spmv<{type_names(A.values, x)}>")
    arrays = (A.row_indices, A.column_indices, A.values, x, out)
    threads = 32 * -(-A.nnz // share)
    launch(function, threads, 256, (np.int64(A.nnz), np.int64(share), *arrays, np.float64(alpha)))


@register_kernel("coo", "spmm", "cuda")
def _spmm_cuda(A: CooMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    scale(out, beta)
    columns, share = out.shape[1], 128
    lanes = min(32, 1 << (columns - 1).bit_length()) if columns else 1
    groups = -(-A.nnz // share) * -(-columns // lanes)
    function = COO_KERNELS.function(f"coo_spmm<{type_names(A.values, x)}>")
    sizes = (np.int64(A.nnz), np.int64(share), np.int64(columns), np.int32(lanes))
    arrays = (A.row_indices, A.column_indices, A.values, x, out)
    launch(function, groups * lanes, 256, (*sizes, *arrays, np.float64(alpha)))
