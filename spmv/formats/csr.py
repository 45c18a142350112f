"""Compressed sparse rows (CSR)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import scipy.sparse

from penstock.spmv.compilation.chunk_size import chunk_size, scheduled
from penstock.spmv.compilation.cuda_module import CudaSource, launch, type_names
from penstock.spmv.compilation.table import register_kernel
from penstock.spmv.device import CPU, Array
from penstock.spmv.errors import InputError
from penstock.spmv.formats.base import UNEVEN_VARIATION, SparseMatrix
from penstock.spmv.formats.csr_kernels import _diagonal_blocks, _spmm, _spmv
from penstock.spmv.formats.csr_strategy import CsrStrategy, Lanes, choose_lanes, choose_strategy
from penstock.spmv.formats.limits import (
    INT32_MAX,
    as_type,
    check_columns,
    longest_row,
    narrow_offsets,
    narrowed,
    within,
)
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.formats.survey import Survey, survey
from penstock.spmv.formats.traits import Traits
from penstock.spmv.formats.validation import check_values, checked_values_dtype, in_sorted_rows, real_values

CSR_KERNELS = CudaSource("penstock.spmv.kernels", "csr.cu")


@dataclass(frozen=True, eq=False, repr=False)
class CsrMatrix(SparseMatrix, name="csr"):
    """A sparse matrix by rows: the entries of row i are at ``row_offsets[i]`` to ``row_offsets[i + 1]``.

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
    strategy : int
        A ``CsrStrategy`` of ``penstock.spmv.formats.csr_strategy``.
    threads : int
        CUDA threads per block of the vector kernel: 128, 256 or 512.

    Notes
    -----
    A product reads ``(values + 4) * nnz + offsets * rows`` bytes of matrix, the entries of x at least once, and writes
    out once (and reads it if ``beta != 0``).

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> from penstock.spmv import CsrMatrix
    >>> A = CsrMatrix.from_csr(scipy.sparse.csr_array([[2.0, 0.0], [1.0, 4.0]]))
    >>> A.row_offsets.tolist(), A.column_indices.tolist(), (A @ np.ones(2)).tolist()
    ([0, 1, 3], [0, 0, 1], [2.0, 5.0])
    """

    traits: ClassVar[Traits] = Traits("CSR", efficiency={"cpu": 0.95, "cuda": 0.87})

    shape: tuple[int, int]
    dtype: np.dtype[np.generic]
    row_offsets: Array
    column_indices: Array
    values: Array
    lanes: int = 32
    strategy: int = CsrStrategy.VECTOR
    threads: int = 256

    @classmethod
    def from_csr(
        cls,
        A: Any,
        *,
        strategy: Literal["auto", "scalar", "vector", "shared", "balanced"] | None = None,
        lanes: int | Lanes = "auto",
        thresholds: str = "h200",
        threads: int = 256,
        values_dtype: Any = None,
        check: bool = True,
    ) -> Self:
        """Wrap or convert a SciPy CSR matrix; index and value arrays are shared where their types allow.

        Parameters
        ----------
        A : scipy.sparse.csr_array or csr_matrix, or CsrMatrix
            Rows of a SciPy matrix may be unsorted and hold duplicates, which are summed: a copy is sorted then. A CsrMatrix
            stays on its device; its values are copied only if their type differs.
        strategy : {"auto", "scalar", "vector", "shared", "balanced"}, optional
            How CUDA kernels divide the work: one thread per row, several lanes per row combined by shuffles or through
            shared memory, or equal shares of entries. ``"auto"``, the default for a SciPy matrix, chooses vector or balanced by
            the lengths of rows; a CsrMatrix keeps its own by default.
        lanes : int or {"auto", "mean", "longest"}
            Lanes of a warp that share a row; chosen by row lengths.
        thresholds : str
            A key of ``penstock.spmv.formats.csr_strategy.THRESHOLDS``.
        threads : int
            CUDA threads per block of the vector kernel: 128, 256 or 512.
        values_dtype : dtype, optional
            Type to store the values in; the vectors keep the type of ``A``.
        check : bool
            Verify order, range and finiteness of the entries (one pass over them).

        Raises
        ------
        InputError
            If offsets descend, an index is out of range, or a value is not finite.
        """
        values_dtype = checked_values_dtype(values_dtype)
        if isinstance(A, CsrMatrix):
            converted = replace(A, values=A.values.astype(values_dtype or A.values_dtype, copy=False))
            if strategy is None:
                return cls(**{entry.name: getattr(converted, entry.name) for entry in fields(cls)})
            matrix = converted
        else:
            matrix = cls._from_scipy(A, values_dtype, check)
        lane_count, number = cls._choose(matrix, strategy or "auto", lanes, thresholds)
        if threads not in (128, 256, 512):
            raise InputError(f"threads must be 128, 256 or 512, not {threads}")
        return replace(matrix, lanes=lane_count, strategy=number, threads=threads)  # type: ignore[return-value]

    @classmethod
    def _from_scipy(cls, A: Any, values_dtype: Any, check: bool) -> Self:
        matrix = cls.unchecked(A) if check else cls._wrapped(A)
        if check and matrix.survey().defects:
            A = in_sorted_rows(A, "CSR matrix")
            check_values(A, "the matrix")
            matrix = cls._wrapped(A)
        return replace(matrix, values=matrix.values.astype(values_dtype or matrix.values_dtype, copy=False))

    @classmethod
    def unchecked(cls, A: Any) -> Self:
        """Wrap a SciPy or CuPy CSR matrix before a look at its entries: use it once its :meth:`survey` has no defects.

        Arrays whose lengths do not fit each other are refused, with an InputError, and so are values that are not real.
        """
        if not (lengths_fit(A) and (A.indices.dtype.itemsize <= 4 or within(A.indices, min(A.shape[1], INT32_MAX)))):
            A = in_sorted_rows(A.get() if hasattr(A, "get") else A, "CSR matrix")  # which says what is wrong
        return cls._wrapped(A)

    @classmethod
    def _wrapped(cls, A: Any) -> Self:
        values = real_values(A, "the matrix")
        check_columns(A.shape[1], "the matrix")
        entries = int(A.indptr[-1])  # SciPy's arrays may be longer than that
        columns = A.indices[:entries]
        matrix = cls(
            shape=(int(A.shape[0]), int(A.shape[1])),
            dtype=values.dtype,
            row_offsets=as_type(A.indptr, np.int64),
            column_indices=narrowed(columns),
            values=values[:entries],
        )
        matrix.check_shapes()
        return matrix

    def survey(self) -> Survey:
        """Return what one pass over the entries sees."""
        return survey(self.device, self.shape[1], self.row_offsets, self.column_indices, self.values)

    @staticmethod
    def _choose(A: CsrMatrix, strategy: str, lanes: int | Lanes, thresholds: str) -> tuple[int, int]:
        """Return the lanes and the strategy that a user's options mean for a matrix."""
        rows = A.shape[0]
        longest = longest_row(A.row_offsets)
        if isinstance(lanes, str):
            lanes = choose_lanes(A.nnz / max(rows, 1), longest, lanes)
        if lanes not in (1, 2, 4, 8, 16, 32):
            raise InputError(f"lanes must be a power of two up to 32, not {lanes}")
        named = {"vector": CsrStrategy.VECTOR, "shared": CsrStrategy.SHARED, "balanced": CsrStrategy.BALANCED}
        if strategy == "auto":
            named["auto"] = choose_strategy(A.nnz, rows, longest, thresholds)
        elif strategy == "scalar":
            lanes, named["scalar"] = 1, CsrStrategy.VECTOR
        if strategy not in named:
            raise InputError(f"strategy must be auto, scalar, vector, shared or balanced, not {strategy!r}")
        return lanes, int(named[strategy])

    @classmethod
    def whole_matrix_parameters(cls, nnz: int, rows: int) -> dict[str, int]:
        """Choose the lanes by the mean row; never balanced, since the shares of a slab would differ from the whole matrix's."""
        return {"lanes": choose_lanes(nnz / max(rows, 1), 0), "strategy": int(CsrStrategy.VECTOR), "threads": 256}

    @classmethod
    def efficiency(cls, statistics: MatrixStatistics, device_kind: str, columns: int = 1) -> float:
        """Return the share of the memory bandwidth; uneven rows do not slow the balanced kernel."""
        share = super().efficiency(statistics, device_kind, columns)
        if device_kind == "cuda" and statistics.variation > UNEVEN_VARIATION:
            if statistics.matrix is None:
                strategy = choose_strategy(statistics.nnz, statistics.shape[0], statistics.longest)
            else:
                strategy = statistics.matrix.strategy
            return share * (1 + statistics.variation) if strategy == CsrStrategy.BALANCED else share
        return share

    def triplets(self) -> tuple[Array, Array, Array]:
        """Return row indices, column indices and values; the latter two are the arrays themselves."""
        xp = self.device.xp
        if self.device.kind == "cpu":
            rows = np.repeat(np.arange(self.shape[0], dtype=np.int32), np.diff(self.row_offsets))
        else:  # marks where each row begins, then counts the marks
            begins = xp.zeros(self.nnz + 1, dtype=np.int32)
            xp.add.at(begins, self.row_offsets[1:-1].astype(np.int64), 1)
            rows = xp.cumsum(begins[:-1], dtype=np.int32)
        return rows, self.column_indices, self.values

    def to_csr(self) -> scipy.sparse.csr_array:
        """Return a SciPy CSR array with the same stored entries, on the host; indices and values are shared."""
        arrays = {name: CPU.asarray(array) for name, array in self.arrays().items()}
        offsets, indices = arrays["row_offsets"], arrays["column_indices"]
        A = scipy.sparse.csr_array((len(offsets) - 1, self.shape[1]), dtype=self.values_dtype)
        # SciPy's conversions fail if offsets and indices are of unlike types.
        A.indptr = as_type(offsets, indices.dtype) if len(indices) <= INT32_MAX else offsets
        A.indices, A.data = indices, arrays["values"]
        A.has_sorted_indices = A.has_canonical_format = True  # which SciPy would find out by looking
        return A

    def layout(self) -> dict[str, Any]:
        """Return nothing: values have the same places with any strategy."""
        return {}

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

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that fit ``shape`` and the number of column indices."""
        entries = self.column_indices.size
        return {"row_offsets": (self.shape[0] + 1,), "column_indices": (entries,), "values": (entries,)}

    @property
    def nnz(self) -> int:
        """Number of stored scalars."""
        return int(self.values.size)

    @functools.cached_property
    def tiles(self) -> tuple[Array, Array]:
        """Tiles into which the balanced kernel cuts the merge of row ends with entries; computed at the first product.

        Returns
        -------
        int64 array, (tiles + 1,)
            Rows that have ended before each tile of 2048 steps.
        int64 array
            Tiles in which a row begins that continues in the next.
        """
        xp, rows = self.device.xp, self.shape[0]
        steps = rows + self.nnz
        bounds = xp.minimum(xp.arange(-(-steps // _TILE) + 1, dtype=np.int64) * _TILE, steps)
        # Row r ends at step row_offsets[r + 1] + r.
        tile_rows = xp.searchsorted(self.row_offsets[1:] + xp.arange(rows), bounds).astype(np.int64)
        row = xp.minimum(tile_rows[1:], max(rows - 1, 0))
        begins = self.row_offsets[row]
        cut = (tile_rows[1:] < rows) & (begins >= (bounds - tile_rows)[:-1]) & (begins < (bounds - tile_rows)[1:])
        return tile_rows, xp.flatnonzero(cut).astype(np.int64)

    @functools.cached_property
    def chunk_size(self) -> int:
        """Rows that a CPU thread fetches at a time; 0 for equal shares."""
        return chunk_size(self.row_offsets, self.nbytes)


def lengths_fit(A: Any) -> bool:
    """Return whether the arrays of a CSR matrix fit each other in length, and offsets and indices are whole numbers."""
    offsets, indices = A.indptr, A.indices
    if {offsets.dtype.kind, indices.dtype.kind} != {"i"} or offsets.size != A.shape[0] + 1:
        return False
    return not int(offsets[0]) and 0 <= int(offsets[-1]) <= min(indices.size, A.data.size)


# Up to this many entries, one thread is faster than waking others.
_SERIAL_ENTRIES = 20_000


@register_kernel("csr", "spmv", "cpu")
def _spmv_cpu(A: CsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    with scheduled(A.chunk_size):
        _spmv[A.nnz > _SERIAL_ENTRIES](A.row_offsets, A.column_indices, A.values, x, out, alpha, beta)


@register_kernel("csr", "spmm", "cpu")
def _spmm_cpu(A: CsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    with scheduled(A.chunk_size):
        _spmm(A.row_offsets, A.column_indices, A.values, x, out, alpha, beta)


@register_kernel("csr", "diagonal_blocks", "cpu")
def _diagonal_blocks_cpu(A: CsrMatrix, first_row: int, blocks: Array) -> None:
    _diagonal_blocks(len(A.row_offsets) - 1, A.row_offsets, A.column_indices, A.values, first_row, blocks)


_THREADS = 256


@register_kernel("csr", "spmv", "cuda")
def _spmv_cuda(A: CsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    if A.strategy == CsrStrategy.BALANCED:
        _spmv_balanced(A, x, out, alpha, beta)
        return
    shared = A.strategy == CsrStrategy.SHARED
    kernel, threads = ("csr_spmv_shared", _THREADS) if shared else ("csr_spmv", A.threads)
    function = CSR_KERNELS.function(f"{kernel}<{type_names(A.values, x, A.row_offsets)}, {A.lanes}>")
    arrays = (A.row_offsets, A.column_indices, A.values, x, out)
    arguments = (np.int64(A.shape[0]), *arrays, np.float64(alpha), np.float64(beta))
    launch(function, A.shape[0] * A.lanes, threads, arguments)


#: Steps of the merge of row ends with entries per block of threads, as in csr.cu.
_TILE = 2048


def _spmv_balanced(A: CsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    rows, entries, (tile_rows, first_tiles) = np.int64(A.shape[0]), np.int64(A.nnz), A.tiles
    tiles = tile_rows.size - 1
    tail, head = A.device.xp.empty(tiles), A.device.xp.empty(tiles)
    types, factors = type_names(A.values, x, A.row_offsets), (np.float64(alpha), np.float64(beta))
    arrays = (A.row_offsets, A.column_indices, A.values, x, out, tile_rows, tail, head)
    function = CSR_KERNELS.function(f"csr_spmv_balanced<{types}>")
    launch(function, tiles * _THREADS, _THREADS, (rows, entries, *arrays, *factors))
    if first_tiles.size:
        cut = (np.int64(first_tiles.size), A.row_offsets, tile_rows, first_tiles, tail, head, out, *factors)
        function = CSR_KERNELS.function(f"csr_join_tiles<{type_names(x, A.row_offsets)}>")
        launch(function, 32 * first_tiles.size, _THREADS, cut)


@register_kernel("csr", "spmm", "cuda")
def _spmm_cuda(A: CsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    if out.size == 0:
        return
    function = CSR_KERNELS.function(f"csr_spmm<{type_names(A.values, x, A.row_offsets)}>")
    arrays = (A.row_offsets, A.column_indices, A.values, x, out)
    scalars = (np.int64(A.shape[0]), np.int64(out.shape[1]))
    function((-(-out.size // _THREADS),), (_THREADS,), (*scalars, *arrays, np.float64(alpha), np.float64(beta)))


@register_kernel("csr", "diagonal_blocks", "cuda")
def _diagonal_blocks_cuda(A: CsrMatrix, first_row: int, blocks: Array) -> None:
    if A.shape[0] == 0:
        return
    function = CSR_KERNELS.function(f"csr_diagonal_blocks<{type_names(A.values, blocks, A.row_offsets)}>")
    scalars = (np.int64(A.shape[0]), np.int64(first_row), np.int64(blocks.shape[1]))
    arrays = (A.row_offsets, A.column_indices, A.values, blocks)
    function((-(-A.shape[0] // _THREADS),), (_THREADS,), (*scalars, *arrays))
