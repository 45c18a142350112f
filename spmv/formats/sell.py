"""SELL-C-sigma: chunks of C rows, sorted by length inside scopes of sigma rows, interleaved."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numba import prange

from penstock.spmv.cuda_module import cuda_function, launch, type_names
from penstock.spmv.device import Array
from penstock.spmv.errors import InputError
from penstock.spmv.formats.base import SparseFormat
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.formats.from_csr import chunk_offsets, chunks_of_slots, length_permutation, stored_blocks
from penstock.spmv.jit import parallel_kernel
from penstock.spmv.kernel_table import register_kernel

if TYPE_CHECKING:
    from penstock.spmv.structure import MatrixStructure

__all__ = ["SellMatrix", "choose_sorting_scope", "launch_spmm", "launch_spmv", "rows_of_chunks"]

_GOOD_ENOUGH = 0.02


def choose_sorting_scope(lengths: Array, height: int) -> int:
    """Return the smallest sorting scope whose storage is within 2 % of that of a full sort.

    A small scope keeps neighbouring rows together, and with them what they read of x (Kreutzer et al. 2014, section 3.4).

    Parameters
    ----------
    lengths : int64 array, (rows,)
    height : int
        The chunk height C.

    Returns
    -------
    int
        1, or C times a power of two.
    """
    rows = max(int(lengths.size), 1)

    def storage(scope: int) -> int:
        ordered = lengths if scope == 1 else lengths[length_permutation(lengths, scope)]
        return int(chunk_offsets(ordered, height)[-1])

    full: int = height * 2 ** max((rows - 1) // height, 0).bit_length()
    best = storage(full)
    scopes: list[int] = [1] + [height * 2**power for power in range(1, 40) if height * 2**power < full]
    for scope in scopes[::2] if len(scopes) > 12 else scopes:
        if storage(scope) <= (1 + _GOOD_ENOUGH) * best:
            return scope
    return full


@dataclass(frozen=True, eq=False)
class SellMatrix(SparseFormat, name="sell"):
    """A sparse matrix in chunks of C rows, each padded to its longest and stored slot by slot.

    Parameters
    ----------
    shape : (int, int)
    dtype : dtype
        Type of the vectors.
    chunk_offsets : array, (chunks + 1,) int64
        Where each chunk begins.
    column_indices : array, (stored,) int32
        Entry s of the row at position p of a chunk stands s * C + p behind the chunk's begin; -1 is padding.
    values : array, (stored,) float64 or float32
    permutation : array, (rows,) or (0,) int32
        Row at each position; empty for the natural order.
    chunk_height : int
        C, a power of two.
    sorting_scope : int
        sigma, 1 or a multiple of C. Row slabs start and stop at multiples of it.
    lanes : int
        CUDA lanes a row, a power of two; more than one for few long rows.

    Notes
    -----
    A product reads ``(values + 4) * stored`` bytes. Source: Kreutzer, Hager, Wellein, Fehske and Bishop (2014).
    """

    shape: tuple[int, int]
    dtype: np.dtype[np.generic]
    chunk_offsets: Array
    column_indices: Array
    values: Array
    permutation: Array
    chunk_height: int = 32
    sorting_scope: int = 1
    lanes: int = 1

    @classmethod
    def from_csr(
        cls,
        A: Any,
        *,
        chunk_height: int = 32,
        sorting_scope: int | Literal["auto"] = "auto",
        lanes: int | Literal["auto"] = "auto",
        values_dtype: Any = None,
        check: bool = True,
    ) -> Self:
        """Convert a CSR matrix on its device.

        Parameters
        ----------
        A : scipy.sparse.csr_array or CsrMatrix
        chunk_height : int
            C, a power of two; 32 suits warps.
        sorting_scope : int or "auto"
            sigma, 1 or a power of two that C divides; by default the smallest that saves nearly all the padding a full
            sort would.
        lanes : int or "auto"
            CUDA lanes a row; by default 1, more where there are too few rows to fill a GPU.
        values_dtype : dtype, optional
        check : bool

        Raises
        ------
        InputError
            If C or sigma is not as said.
        """
        A = CsrMatrix.from_csr(A, values_dtype=values_dtype, check=check)
        _check_power_of_two(chunk_height, "chunk_height")
        xp, lengths = A.device.xp, A.device.xp.diff(A.row_offsets).astype(np.int64)
        if sorting_scope == "auto":
            sorting_scope = choose_sorting_scope(lengths, chunk_height)
        _check_power_of_two(sorting_scope, "sorting_scope")
        if sorting_scope != 1 and sorting_scope % chunk_height:
            raise InputError(
                f"sorting_scope must be 1 or a multiple of chunk_height {chunk_height}, not {sorting_scope}"
            )
        if lanes == "auto":
            lanes = _lanes(A.shape[0], A.nnz, chunk_height)
        _check_power_of_two(lanes, "lanes")
        if lanes > 1 and lanes * chunk_height > 1024:
            raise InputError(f"lanes times chunk_height is at most 1024, not {lanes} x {chunk_height}")
        permutation = xp.empty(0, dtype=np.int32)
        if sorting_scope > 1:
            permutation = length_permutation(lengths, sorting_scope)
            lengths = lengths[permutation]
        offsets = chunk_offsets(lengths, chunk_height)
        indices, values = chunks_of_slots(A, permutation, offsets, chunk_height, A.values_dtype)
        return cls(
            A.shape,
            A.dtype,
            offsets,
            indices,
            values,
            permutation,
            chunk_height,
            sorting_scope=sorting_scope,
            lanes=lanes,
        )

    @classmethod
    def predicted_nbytes(
        cls,
        structure: MatrixStructure,
        *,
        chunk_height: int = 32,
        sorting_scope: int | Literal["auto"] = "auto",
        **parameters: Any,
    ) -> int:
        """Return the bytes this format would take."""
        height, scope, lengths = chunk_height, sorting_scope, structure.lengths
        if scope == "auto":
            scope = choose_sorting_scope(lengths, height)
        ordered = lengths if scope == 1 else lengths[length_permutation(lengths, scope)]
        offsets = chunk_offsets(ordered, height)
        stored = int(offsets[-1]) * (structure.values_itemsize + 4)
        return stored + int(offsets.nbytes) + (4 * lengths.size if scope > 1 else 0)

    def triplets(self) -> tuple[Array, Array, Array]:
        """Return row indices, column indices and values of the stored entries, chunk by chunk."""
        arrays = (self.chunk_offsets, self.column_indices, self.values, self.permutation)
        rows, columns, values = stored_blocks(*arrays, self.shape[0], self.chunk_height, 1)
        return rows, columns, values.reshape(-1)

    def rows(self, start: int, stop: int) -> Self:
        """Return rows ``start`` to ``stop``, multiples of the granularity unless the last; indices and values are views."""
        arrays = rows_of_chunks(self, start, stop, self.chunk_height)
        return self.from_arrays((stop - start, self.shape[1]), self.dtype, arrays, self.parameters())

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that fit the number of rows and of column indices."""
        stored = self.column_indices.size
        return {
            "chunk_offsets": (-(-self.shape[0] // self.chunk_height) + 1,),
            "column_indices": (stored,),
            "values": (stored,),
            "permutation": (self.shape[0] if self.sorting_scope > 1 else 0,),
        }

    @property
    def nnz(self) -> int:
        """Number of stored scalars, padding left out."""
        return int((self.column_indices >= 0).sum())

    @property
    def row_granularity(self) -> int:
        """The larger of chunk height and sorting scope."""
        return max(self.chunk_height, self.sorting_scope)


def _check_power_of_two(number: Any, name: str) -> None:
    if not isinstance(number, int | np.integer) or number < 1 or number & (number - 1):
        raise InputError(f"{name} must be a power of two, not {number!r}")


def _lanes(rows: int, nnz: int, height: int) -> int:
    """Use more lanes a row until about 2**18 threads are busy, as long as each still has eight entries to add."""
    lanes = 1
    while lanes * rows < 2**18 and nnz > 8 * 2 * lanes * rows and 2 * lanes * height <= 1024:
        lanes *= 2
    return lanes


def rows_of_chunks(A: Any, start: int, stop: int, height: int, size: int = 1) -> dict[str, Array]:
    """Return the arrays of a slab of a format in chunks of ``height`` rows of blocks of ``size`` x ``size``.

    Raises
    ------
    InputError
        If the slab cuts a chunk or a sorting scope.
    """
    granularity = A.row_granularity
    if start % granularity or (stop % granularity and stop != A.shape[0]):
        raise InputError(f"rows {start} to {stop} do not start and stop at multiples of {granularity}, the granularity")
    first_row, stop_row = start // size, stop // size
    offsets = A.chunk_offsets[first_row // height : -(-stop_row // height) + 1]
    first, last = (int(offsets[0]), int(offsets[-1])) if offsets.size else (0, 0)
    scalars = size * size
    return {
        "chunk_offsets": offsets - first,
        "column_indices": A.column_indices[first:last],
        "values": A.values[first * scalars : last * scalars],
        "permutation": A.permutation[first_row:stop_row] - np.int32(first_row),
    }


@parallel_kernel
def _spmv_strips(
    height: int,
    offsets: Array,
    columns: Array,
    values: Array,
    permutation: Array,
    x: Array,
    out: Array,
    alpha: float,
    beta: float,
) -> None:
    # Eight rows at a time, with their sums in scalars: an array of sums would be loaded and stored at every entry.
    rows = out.shape[0]
    for strip in prange((rows + 7) // 8):
        chunk, place = 8 * strip // height, 8 * strip % height
        first, stop = offsets[chunk] + place, offsets[chunk + 1]
        t0 = t1 = t2 = t3 = t4 = t5 = t6 = t7 = 0.0
        for entry in range(first, stop, height):
            c = columns[entry : entry + 8]
            v = values[entry : entry + 8]
            # A row ends where its padding begins, so when all eight are there no test is needed.
            if (c[0] | c[1] | c[2] | c[3] | c[4] | c[5] | c[6] | c[7]) >= 0:
                t0 += np.float64(v[0]) * np.float64(x[np.uint64(np.uint32(c[0]))])
                t1 += np.float64(v[1]) * np.float64(x[np.uint64(np.uint32(c[1]))])
                t2 += np.float64(v[2]) * np.float64(x[np.uint64(np.uint32(c[2]))])
                t3 += np.float64(v[3]) * np.float64(x[np.uint64(np.uint32(c[3]))])
                t4 += np.float64(v[4]) * np.float64(x[np.uint64(np.uint32(c[4]))])
                t5 += np.float64(v[5]) * np.float64(x[np.uint64(np.uint32(c[5]))])
                t6 += np.float64(v[6]) * np.float64(x[np.uint64(np.uint32(c[6]))])
                t7 += np.float64(v[7]) * np.float64(x[np.uint64(np.uint32(c[7]))])
            else:
                if c[0] >= 0:
                    t0 += np.float64(v[0]) * np.float64(x[c[0]])
                if c[1] >= 0:
                    t1 += np.float64(v[1]) * np.float64(x[c[1]])
                if c[2] >= 0:
                    t2 += np.float64(v[2]) * np.float64(x[c[2]])
                if c[3] >= 0:
                    t3 += np.float64(v[3]) * np.float64(x[c[3]])
                if c[4] >= 0:
                    t4 += np.float64(v[4]) * np.float64(x[c[4]])
                if c[5] >= 0:
                    t5 += np.float64(v[5]) * np.float64(x[c[5]])
                if c[6] >= 0:
                    t6 += np.float64(v[6]) * np.float64(x[c[6]])
                if c[7] >= 0:
                    t7 += np.float64(v[7]) * np.float64(x[c[7]])
        totals = (t0, t1, t2, t3, t4, t5, t6, t7)
        for i in range(min(8, rows - 8 * strip)):
            row = np.int64(permutation[8 * strip + i]) if permutation.size else np.int64(8 * strip + i)
            out[row] = alpha * totals[i] if beta == 0.0 else alpha * totals[i] + beta * out[row]


@parallel_kernel
def _spmv_rows(
    height: int,
    offsets: Array,
    columns: Array,
    values: Array,
    permutation: Array,
    x: Array,
    out: Array,
    alpha: float,
    beta: float,
) -> None:
    for position in prange(out.shape[0]):
        chunk, place = position // height, position % height
        total = 0.0
        for entry in range(offsets[chunk] + place, offsets[chunk + 1], height):
            column = columns[entry]
            if column >= 0:
                total += np.float64(values[entry]) * np.float64(x[np.uint64(np.uint32(column))])
        row = np.int64(permutation[position]) if permutation.size else np.int64(position)
        out[row] = alpha * total if beta == 0.0 else alpha * total + beta * out[row]


@parallel_kernel
def _spmm(
    height: int,
    offsets: Array,
    columns: Array,
    values: Array,
    permutation: Array,
    x: Array,
    out: Array,
    alpha: float,
    beta: float,
) -> None:
    for position in prange(out.shape[0]):
        chunk, place = position // height, position % height
        totals = np.zeros(out.shape[1])
        for entry in range(offsets[chunk] + place, offsets[chunk + 1], height):
            column = columns[entry]
            if column >= 0:
                value = np.float64(values[entry])
                for k in range(out.shape[1]):
                    totals[k] += value * np.float64(x[column, k])
        row = np.int64(permutation[position]) if permutation.size else np.int64(position)
        for k in range(out.shape[1]):
            out[row, k] = alpha * totals[k] if beta == 0.0 else alpha * totals[k] + beta * out[row, k]


def _chunks(A: SellMatrix) -> tuple[Any, ...]:
    return A.chunk_height, A.chunk_offsets, A.column_indices, A.values, A.permutation


def _spmv_cpu(A: SellMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    product = _spmv_rows if A.chunk_height % 8 else _spmv_strips
    product(*_chunks(A), x, out, alpha, beta)


def _spmm_cpu(A: SellMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    _spmm(*_chunks(A), x, out, alpha, beta)


def _spmv_cuda(A: SellMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    if A.lanes == 1:
        launch_spmv(A, A.shape[0], A.chunk_height, 1, x, out, alpha, beta)
        return
    function = cuda_function("sell.cu", f"sell_spmv_lanes<{type_names(A.values, x)}>")
    block = A.chunk_height * A.lanes
    sizes = (np.int64(A.shape[0]), np.int32(A.chunk_height), np.int32(A.lanes))
    chunks = A.chunk_offsets.size - 1
    launch(function, chunks * block, block, (*sizes, *_stored(A), x, out, np.float64(alpha), np.float64(beta)))


def _spmm_cuda(A: SellMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    launch_spmm(A, A.shape[0], A.chunk_height, 1, x, out, alpha, beta)


def register_sell(name: str) -> None:
    """Enter the kernels under the name of a format with these arrays."""
    register_kernel(name, "spmv", "cpu")(_spmv_cpu)
    register_kernel(name, "spmm", "cpu")(_spmm_cpu)
    register_kernel(name, "spmv", "cuda")(_spmv_cuda)
    register_kernel(name, "spmm", "cuda")(_spmm_cuda)


register_sell("sell")


def _stored(A: Any) -> tuple[Any, ...]:
    return A.chunk_offsets, A.column_indices, A.values, np.int32(A.permutation.size > 0), A.permutation


#: Slots loaded before the first is used, by block size; measured on an H200, where 6 to 14 scalars do equally well.
_BATCHES = {1: 9, 2: 3}


def launch_spmv(A: Any, rows: int, height: int, size: int, x: Array, out: Array, alpha: float, beta: float) -> None:
    """Run ``sell_spmv`` for ``rows`` (block) rows in chunks of ``height`` rows of ``size`` x ``size`` blocks."""
    function = cuda_function("sell.cu", f"sell_spmv<{type_names(A.values, x)}, {size}, {_BATCHES.get(size, 1)}>")
    sizes = (np.int64(rows), np.int32(height))
    launch(function, rows, 128, (*sizes, *_stored(A), x, out, np.float64(alpha), np.float64(beta)))


def launch_spmm(A: Any, rows: int, height: int, size: int, x: Array, out: Array, alpha: float, beta: float) -> None:
    """Multiply a block of vectors, composed of kernels for 32, 16, 8, 4 and 2 columns and one for what is left."""
    types, columns = type_names(A.values, x), out.shape[1]
    factors = (np.float64(alpha), np.float64(beta))
    first = 0
    if _in_packs(x) and _in_packs(out):
        for width in (32, 16, 8, 4, 2):
            tile = spmm_tile(size, width, A.values.dtype.itemsize, x.dtype.itemsize)
            if columns - first < width or height % tile.group_rows(width):
                continue
            function = cuda_function("sell.cu", tile.expression(types, size, width))
            groups = -(-rows // tile.group_rows(width))
            while columns - first >= width:
                sizes = (np.int64(rows), np.int32(height), np.int64(first), np.int64(columns))
                launch(function, 32 * groups, tile.threads, (*sizes, *_stored(A), x, out, *factors))
                first += width
    left = columns - first
    if left == 0:
        return
    function = cuda_function("sell.cu", f"sell_spmm_any<{types}, {size}>")
    rest = (np.int64(rows), np.int32(height), np.int64(left), np.int64(first), np.int64(columns))
    launch(function, rows * left, 256, (*rest, *_stored(A), x, out, *factors))


def _in_packs(vectors: Array) -> bool:
    """Whether every row begins at a multiple of 16 bytes."""
    address = vectors.data.ptr if hasattr(vectors, "get") else vectors.ctypes.data
    return bool(address % 16 == 0 and vectors.strides[0] % 16 == 0)


@dataclass(frozen=True)
class SpmmTile:
    """How ``sell_spmm`` divides its work; see there."""

    vectors: int
    rows_per_lane: int
    slots: int
    stages: int
    threads: int

    def group_rows(self, columns: int) -> int:
        """Rows that 32 lanes serve."""
        return 32 // (columns // self.vectors) * self.rows_per_lane

    def expression(self, types: str, size: int, columns: int) -> str:
        """Return the instantiation."""
        numbers = (size, columns, self.vectors, self.rows_per_lane, self.slots, self.stages, self.threads)
        return f"sell_spmm<{types}, {', '.join(map(str, numbers))}>"


_SHARED_NBYTES = 48 << 10


@functools.cache
def spmm_tile(size: int, columns: int, value_itemsize: int, vector_itemsize: int) -> SpmmTile:
    """Choose the tile for a block size and a number of columns; measured on an H200 for sizes 1 and 3, 16 and 32 columns.

    Scalars: whole lines of x go to several rows at once. Blocks: four columns a lane share each value that is read from
    shared memory. The block of threads is the largest whose stages fit 48 KiB.
    """
    pack = 16 // vector_itemsize
    vectors = min(columns, pack if size == 1 or size > 4 else max(pack, 4))
    groups = 32 // (columns // vectors)
    rows_per_lane = max(1, min(4, 32 // groups)) if size == 1 else 1
    slots, stages = (3 if size == 1 else 2 if size <= 3 else 1), 3
    stage_nbytes = slots * groups * rows_per_lane * (size * size * value_itemsize + 4)
    largest = 128 if size == 1 else 256
    fitting = [threads for threads in (largest, 128, 64, 32) if threads // 32 * stages * stage_nbytes <= _SHARED_NBYTES]
    if not fitting:
        stages, fitting = 2, [32]
    return SpmmTile(vectors, rows_per_lane, slots, stages, fitting[0])
