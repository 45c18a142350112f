"""SELL-C-sigma: chunks of C rows, sorted by length inside scopes of sigma rows, interleaved."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np

from penstock.spmv.compilation.chunk_size import chunk_size, scheduled
from penstock.spmv.compilation.cuda_module import launch, type_names
from penstock.spmv.compilation.table import register_kernel
from penstock.spmv.device import Array, device_of
from penstock.spmv.errors import InputError
from penstock.spmv.formats.base import SparseMatrix
from penstock.spmv.formats.chunk_products import (
    SELL_KERNELS,
    launch_spmm,
    launch_spmv,
    multiply_block,
    multiply_chunks,
    stored,
)
from penstock.spmv.formats.convert import (
    chunk_offsets,
    chunks_of_slots,
    count_stored,
    length_permutation,
    stored_blocks,
)
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.formats.traits import Traits

_GOOD_ENOUGH = 0.02
# With a row longer than this many times the number of rows, sorting the lengths takes less than their histogram.
_LONG = 8


def choose_sorting_scope(lengths: Array, height: int) -> int:
    """Return the smallest tried sorting scope, 1 or C times a power of two, with storage within 2 % of that of a full sort.

    A small scope keeps neighbouring rows together, and with them what they read of x (Kreutzer et al. 2014, section 3.4).
    """
    rows = max(int(lengths.size), 1)

    def storage(scope: int) -> int:
        ordered = lengths if scope == 1 else lengths[length_permutation(lengths, scope)]
        return int(chunk_offsets(ordered, height)[-1])

    full: int = height * 2 ** max((rows - 1) // height, 0).bit_length()
    best = _fully_sorted_storage(lengths, height)
    scopes: list[int] = [1] + [height * 2**power for power in range(1, 40) if height * 2**power < full]
    for scope in scopes[::2] if len(scopes) > 12 else scopes:
        if storage(scope) <= (1 + _GOOD_ENOUGH) * best:
            return scope
    return full


def _fully_sorted_storage(lengths: Array, height: int) -> int:
    """Return the slots of chunks of rows sorted by length; on a CPU their histogram is faster, unless a row is very long."""
    device = device_of(lengths)
    if not lengths.size:
        return 0
    if device.kind == "cuda" or int(lengths.max()) > _LONG * lengths.size:
        return int(device.to_host(device.xp.sort(lengths)[::-height]).sum()) * height
    counts = np.bincount(lengths)
    # Row k of the sorted ones has the largest length of which there are more than k at least as long.
    at_least = np.cumsum(counts[::-1])
    first_rows = np.arange(0, lengths.size, height)
    widths = counts.size - 1 - np.searchsorted(at_least, first_rows, side="right")
    return int(widths.sum()) * height


def arrange_chunks(lengths: Array, height: int, sorting_scope: int | Literal["auto"]) -> tuple[int, Array, Array]:
    """Sort (block) rows inside scopes and cut them into chunks of C = ``height`` rows.

    Returns the scope, the row at each position (int32; empty for a scope of 1) and where chunks begin (int64). The scope sigma
    must be 1 or C times a power of two; see :func:`choose_sorting_scope`.
    """
    scope = choose_sorting_scope(lengths, height) if sorting_scope == "auto" else sorting_scope
    check_power_of_two(scope, "sorting_scope")
    if scope != 1 and scope % height:
        raise InputError(f"sorting_scope must be 1 or a power of two, at least the chunk height {height}, not {scope}")
    if scope == 1:
        return scope, lengths[:0].astype(np.int32), chunk_offsets(lengths, height)
    permutation = length_permutation(lengths, scope)
    return scope, permutation, chunk_offsets(lengths[permutation], height)


@dataclass(frozen=True, eq=False, repr=False)
class SellMatrix(SparseMatrix, name="sell"):
    """A sparse matrix in chunks of C rows, each padded to its longest and stored slot by slot.

    Parameters
    ----------
    shape : (int, int)
    dtype : dtype
        Type of the vectors.
    chunk_offsets : array, (chunks + 1,) int64
        Where each chunk begins.
    column_indices : array, (stored,) int32
        Entry s of the row at position p of a chunk is s * C + p after the chunk's start; -1 is padding.
    values : array, (stored,) float64 or float32
    permutation : array, (rows,) or (0,) int32
        Row at each position; empty for the natural order.
    chunk_height : int
        C, a power of two.
    sorting_scope : int
        sigma, 1 or a multiple of C. Row slabs start and stop at multiples of it.
    lanes : int
        CUDA lanes per row, a power of two; more than one for few long rows.

    Notes
    -----
    A product reads ``(values + 4) * stored`` bytes. Source: Kreutzer, Hager, Wellein, Fehske and Bishop (2014).

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> from penstock.spmv import SellMatrix
    >>> A = SellMatrix.from_csr(scipy.sparse.eye_array(100, format="csr"), chunk_height=32)
    >>> A.chunk_offsets.tolist(), A.nnz, float((A @ np.ones(100)).sum())
    ([0, 32, 64, 96, 128], 100, 100.0)
    """

    traits: ClassVar[Traits] = Traits(
        r"SELL-C-$\sigma$", padded=("column_indices",), efficiency={"cpu": 0.7, "cuda": 0.96}, halving_columns=25
    )

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
            CUDA lanes per row; by default 1, more if there are too few rows to fill a GPU.
        values_dtype : dtype, optional
        check : bool

        Raises
        ------
        InputError
            If C, sigma or lanes is invalid.
        """
        A = CsrMatrix.from_csr(A, values_dtype=values_dtype, check=check)
        check_power_of_two(chunk_height, "chunk_height")
        lengths = A.device.xp.diff(A.row_offsets).astype(np.int64)
        scope, permutation, offsets = arrange_chunks(lengths, chunk_height, sorting_scope)
        if lanes == "auto":
            lanes = _lanes(A.shape[0], A.nnz, chunk_height)
        check_power_of_two(lanes, "lanes")
        if lanes > 1 and lanes * chunk_height > 1024:
            raise InputError(f"lanes times chunk_height is at most 1024, not {lanes} x {chunk_height}")
        indices, values = chunks_of_slots(A, permutation, offsets, chunk_height, A.values_dtype)
        return cls(
            A.shape,
            A.dtype,
            offsets,
            indices,
            values,
            permutation,
            chunk_height,
            sorting_scope=scope,
            lanes=lanes,
        )

    @classmethod
    def predicted_nbytes(
        cls,
        statistics: MatrixStatistics,
        *,
        chunk_height: int = 32,
        sorting_scope: int | Literal["auto"] = "auto",
        **parameters: Any,
    ) -> int:
        """Return the bytes of a matrix in this format."""
        _, permutation, offsets = arrange_chunks(statistics.lengths, chunk_height, sorting_scope)
        return int(offsets[-1]) * (statistics.values_itemsize + 4) + int(offsets.nbytes + permutation.nbytes)

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
        return count_stored(self.column_indices.reshape(-1))

    @functools.cached_property
    def chunk_size(self) -> int:
        """Rows that a CPU thread fetches at a time; 0 for equal shares."""
        return self.chunk_height * chunk_size(self.chunk_offsets, self.nbytes)

    @property
    def row_granularity(self) -> int:
        """The larger of chunk height and sorting scope."""
        return max(self.chunk_height, self.sorting_scope)

    @property
    def chunk_rows(self) -> int:
        """The chunk height."""
        return self.chunk_height


def check_power_of_two(number: Any, name: str) -> None:
    """Refuse anything but a power of two up to 2**40."""
    if not isinstance(number, int | np.integer) or number < 1 or number & (number - 1) or number > 2**40:
        raise InputError(f"{name} must be a power of two up to 2**40, not {number!r}")


def _lanes(rows: int, nnz: int, height: int) -> int:
    """Return the lanes per row: more until about 2**18 threads are busy, while each still has eight entries to add."""
    lanes = 1
    while lanes * rows < 2**18 and nnz > 8 * 2 * lanes * rows and 2 * lanes * height <= 1024:
        lanes *= 2
    return lanes


def rows_of_chunks(A: Any, start: int, stop: int, height: int, size: int = 1) -> dict[str, Array]:
    """Return the arrays of a slab in chunks of block rows, or raise an InputError if it would cut a chunk or a sorting scope."""
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


def _chunks(A: SellMatrix) -> tuple[int, Array, Array, Array, Array]:
    return A.chunk_height, A.chunk_offsets, A.column_indices, A.values, A.permutation


def _spmv_cpu(A: SellMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    multiply_chunks(*_chunks(A), x, out, alpha, beta, at_once=A.chunk_size)


def _spmm_cpu(A: SellMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    with scheduled(A.chunk_size):
        multiply_block(*_chunks(A), x, out, alpha, beta)


def _spmv_cuda(A: SellMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    if A.lanes == 1:
        launch_spmv(A, A.shape[0], A.chunk_height, 1, x, out, alpha, beta)
        return
    function = SELL_KERNELS.function(f"sell_spmv_lanes<{type_names(A.values, x)}>")
    block = A.chunk_height * A.lanes
    sizes = (np.int64(A.shape[0]), np.int32(A.chunk_height), np.int32(A.lanes))
    chunks = A.chunk_offsets.size - 1
    launch(function, chunks * block, block, (*sizes, *stored(A), x, out, np.float64(alpha), np.float64(beta)))


def _spmm_cuda(A: SellMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
    launch_spmm(A, A.shape[0], A.chunk_height, 1, x, out, alpha, beta)


def register_sell(name: str) -> None:
    """Register the kernels for a format with the arrays of SELL."""
    register_kernel(name, "spmv", "cpu")(_spmv_cpu)
    register_kernel(name, "spmm", "cpu")(_spmm_cpu)
    register_kernel(name, "spmv", "cuda")(_spmv_cuda)
    register_kernel(name, "spmm", "cuda")(_spmm_cuda)


register_sell("sell")
