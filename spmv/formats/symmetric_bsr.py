"""Symmetric BSR: only the diagonal and what is right of it, in small dense blocks; half the bytes of the whole."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numba import get_num_threads, prange

from penstock.spmv.cuda_module import NOMINAL_WARPS, cuda_function, launch, type_names
from penstock.spmv.device import Array
from penstock.spmv.errors import InputError
from penstock.spmv.formats.base import SparseFormat, copy_diagonal_blocks, scale
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.formats.from_csr import (
    check_symmetric,
    chunk_offsets,
    chunks_of_blocks,
    count_blocks,
    scalar_triplets,
    stored_blocks,
)
from penstock.spmv.formats.sell import rows_of_chunks
from penstock.spmv.formats.sliced_bsr import HEIGHT, gather_rows
from penstock.spmv.intrinsics import (
    WIDTH,
    add_triples,
    consecutive,
    load,
    load_triples,
    multiply,
    multiply_add,
    prefetch,
    store,
)
from penstock.spmv.jit import inlined, parallel_kernel
from penstock.spmv.kernel_table import find_kernel, register_kernel

if TYPE_CHECKING:
    from penstock.spmv.structure import MatrixStructure

__all__ = ["SymmetricBsrMatrix"]


@dataclass(frozen=True, eq=False)
class SymmetricBsrMatrix(SparseFormat, name="symmetric_bsr"):
    """An exactly symmetric matrix by its upper half, in chunks of 32 block rows as in :class:`SlicedBsrMatrix`.

    Parameters
    ----------
    shape : (int, int)
        Rows and columns in scalars, multiples of the block size; those of a slab are not equal.
    dtype : dtype
        Type of the vectors.
    chunk_offsets : array, (chunks + 1,) int64
        Where each chunk begins, in blocks.
    column_indices : array, (stored blocks,) int32
        Block columns, none left of the diagonal; -1 is padding.
    values : array, (stored blocks * block size ** 2,) float64 or float32
    permutation : array, (0,) int32
        Always the natural order.
    block_size : int
        1 to 8.

    Notes
    -----
    A product reads about half the bytes of :class:`SlicedBsrMatrix` and forms both contributions of a block in one pass.
    On a GPU they are added to ``out`` by atomic operations, so last digits may differ between runs. On the CPU every
    thread but the last collects what falls below its rows in memory of its own, as long as the bandwidth of the matrix.
    With float32 vectors both contributions are added to ``out`` in float32; those of a block row to itself are summed in
    float64 before.

    A row slab knows the blocks of its rows only, so it adds to rows below it as well, through :meth:`apply_slab`, and
    cannot be applied alone.
    """

    scatters: ClassVar[bool] = True

    shape: tuple[int, int]
    dtype: np.dtype[np.generic]
    chunk_offsets: Array
    column_indices: Array
    values: Array
    permutation: Array
    block_size: int = 3

    @classmethod
    def from_csr(cls, A: Any, *, block_size: int = 3, values_dtype: Any = None, check: bool = True) -> Self:
        """Convert a symmetric CSR matrix on its device; blocks that hold any stored entry are stored whole.

        Parameters
        ----------
        A : scipy.sparse.csr_array or CsrMatrix
        block_size : int
            1 to 8; must divide the rows.
        values_dtype : dtype, optional
        check : bool
            Verify order and range of the entries, and that every one equals its mirror image.

        Raises
        ------
        InputError
            If the matrix is not exactly symmetric.
        """
        A = CsrMatrix.from_csr(A, check=check)
        if check:
            check_symmetric(A)  # before rounding makes unequal values equal
        return cls.slab_from_csr(A, 0, block_size=block_size, values_dtype=values_dtype, check=False)

    @classmethod
    def slab_from_csr(  # type: ignore[override]
        cls,
        A: Any,
        first_row: int,
        *,
        block_size: int = 3,
        values_dtype: Any = None,
        check: bool = True,
    ) -> Self:
        """Convert a row slab of a larger symmetric matrix; its row 0 is ``first_row``, a multiple of the granularity.

        Whether the larger one is symmetric cannot be seen from a slab; the lower half is not looked at.
        """
        A = CsrMatrix.from_csr(CsrMatrix.from_csr(A, check=check), values_dtype=values_dtype)
        first = first_row // max(block_size, 1)
        counts = count_blocks(A, block_size, upper=first)
        if first_row % block_size:
            raise InputError(f"a slab must begin at a multiple of the block size {block_size}, not at row {first_row}")
        offsets, none = chunk_offsets(counts, HEIGHT), A.device.xp.empty(0, dtype=np.int32)
        indices, values = chunks_of_blocks(A, block_size, none, offsets, HEIGHT, A.values_dtype, upper=first)
        return cls(A.shape, A.dtype, offsets, indices, values, none, block_size)

    @classmethod
    def predicted_nbytes(cls, structure: MatrixStructure, *, block_size: int = 3, **parameters: Any) -> int:
        """Return the bytes this format would take."""
        offsets = chunk_offsets(structure.blocks(block_size, upper=True), HEIGHT)
        return int(offsets[-1]) * (block_size**2 * structure.values_itemsize + 4) + int(offsets.nbytes)

    def triplets(self) -> tuple[Array, Array, Array]:
        """Return row indices, column indices and values of every scalar; of a whole matrix, of both halves."""
        rows, columns, values = self._upper_triplets()
        if self.shape[0] == self.shape[1]:
            xp, right = self.device.xp, columns // self.block_size > rows // self.block_size
            rows, columns = xp.concatenate((rows, columns[right])), xp.concatenate((columns, rows[right]))
            values = xp.concatenate((values, values[right]))
        return rows, columns, values

    def _upper_triplets(self, first_block_row: int = 0, within: int | None = None) -> tuple[Array, Array, Array]:
        arrays = (self.chunk_offsets, self.column_indices, self.values, self.permutation)
        sizes = (self.shape[0] // self.block_size, HEIGHT, self.block_size)
        return scalar_triplets(*stored_blocks(*arrays, *sizes, first_block_row=first_block_row, within=within))

    def rows(self, start: int, stop: int) -> Self:
        """Return the blocks of rows ``start`` to ``stop``, multiples of the granularity unless the last, as views."""
        arrays = rows_of_chunks(self, start, stop, HEIGHT, self.block_size)
        return self.from_arrays((stop - start, self.shape[1]), self.dtype, arrays, self.parameters())

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that fit the number of rows and of column indices."""
        stored, block_rows = self.column_indices.size, self.shape[0] // self.block_size
        return {
            "chunk_offsets": (-(-block_rows // HEIGHT) + 1,),
            "column_indices": (stored,),
            "values": (stored * self.block_size**2,),
            "permutation": (0,),
        }

    @property
    def nnz(self) -> int:
        """Number of stored scalars, padding left out: about half of those of the matrix."""
        return int((self.column_indices >= 0).sum()) * self.block_size**2

    @property
    def row_granularity(self) -> int:
        """Scalar rows of a chunk."""
        return HEIGHT * self.block_size

    def add_diagonal_blocks(self, first_row: int, blocks: Array) -> None:
        """Fill ``blocks`` with what this slab holds of them, and with its mirror image."""
        within = -(-(blocks.shape[1] - 1) // self.block_size)  # blocks that a diagonal block may lie in
        for start, slab in self.slabs():
            rows, columns, values = slab._upper_triplets((first_row + start) // self.block_size, within)
            rows = rows + (first_row + start)
            copy_diagonal_blocks(rows, columns, values, blocks)
            copy_diagonal_blocks(columns, rows, values, blocks)

    def apply_slab(self, first_row: int, x: Array, out: Array, alpha: float, beta: float) -> None:
        """Add both contributions of this slab's blocks to ``out``, that of the whole matrix and already scaled."""
        find_kernel("symmetric_bsr", "add_slab", self.device.kind)(self, first_row, x, out, alpha)


# Every part of the work owns a run of chunks and writes to its own rows; what falls below them waits in an overflow of its
# own, as long as the bandwidth of the matrix, and is added in the end, part after part: so the bits depend on nothing but
# the number of parts. Nobody else writes below the last part, so its overflow stays empty.
_NOWHERE = np.iinfo(np.int32).max


@parallel_kernel
def _reach(parts: int, first_row: int, block_rows: int, offsets: Array, columns: Array) -> tuple[Array, Array]:
    """Return the first block row below each part, and how many block rows below it the part adds to."""
    chunks = offsets.shape[0] - 1
    ends, reach = np.full(parts, _NOWHERE, dtype=np.int64), np.zeros(parts, dtype=np.int64)
    for part in prange(parts - 1):
        last = chunks * (part + 1) // parts
        ends[part] = first_row + min(last * HEIGHT, block_rows)
        for block in range(offsets[chunks * part // parts], offsets[last]):
            reach[part] = max(reach[part], np.int64(columns[block]) + 1 - ends[part])
    return ends, reach


# How far ahead the scalars are asked for. Of 1 to 14 slots three did best. Without, a product with 110 MB on two cores took
# 6.6 ms instead of 3.0, and slab by slab 9.6 instead of 3.5: the lines of a slot are not read in order.
_SLOTS_AHEAD = 3
assert HEIGHT == 32 and HEIGHT % WIDTH == 0, "the products with three unknowns a node are written for it"  # noqa: PT018


# Three unknowns a node. A block is read into registers once and multiplied both ways. Neighbours of neighbouring nodes are
# numbered alike, mostly: then WIDTH rows go together. ``below`` takes what falls on rows from ``end`` on.
#
# Arrays have one dimension and so one pointer: with two the compiler keeps one for each scalar of a block, more than there are
# registers. Sums are complete before a branch: a multiplication that the compiler moves out of one is not fused with its addition
# any more, and what Numba has in its cache it has optimised once more than what it has just compiled.
@inlined
def _multiply_rows_3(
    p: int, row: int, k: int, a: Array, own: Array, total: Array, x: Array, out: Array, below: Array, end: int
) -> None:
    """Multiply the blocks of rows p to p + WIDTH of a chunk both ways; their columns follow k."""
    x0, x1, x2 = load_triples(x, 3 * k)
    a00, a01, a02 = load(a, p), load(a, p + 32), load(a, p + 64)
    a10, a11, a12 = load(a, p + 96), load(a, p + 128), load(a, p + 160)
    a20, a21, a22 = load(a, p + 192), load(a, p + 224), load(a, p + 256)
    total0, total1, total2 = load(total, p), load(total, p + 32), load(total, p + 64)
    store(total, p, multiply_add(a02, x2, multiply_add(a01, x1, multiply_add(a00, x0, total0))))
    store(total, p + 32, multiply_add(a12, x2, multiply_add(a11, x1, multiply_add(a10, x0, total1))))
    store(total, p + 64, multiply_add(a22, x2, multiply_add(a21, x1, multiply_add(a20, x0, total2))))
    if k > row:
        x0, x1, x2 = load(own, p), load(own, p + 32), load(own, p + 64)
        t0 = multiply_add(a20, x2, multiply_add(a10, x1, multiply(a00, x0)))
        t1 = multiply_add(a21, x2, multiply_add(a11, x1, multiply(a01, x0)))
        t2 = multiply_add(a22, x2, multiply_add(a12, x1, multiply(a02, x0)))
        if k < end:
            add_triples(out, 3 * k, t0, t1, t2)
        else:
            add_triples(below, 3 * (k - end), t0, t1, t2)


@inlined
def _multiply_row_3(
    p: int, row: int, k: int, a: Array, own: Array, total: Array, x: Array, out: Array, below: Array, end: int
) -> None:
    """Multiply the block of row p of a chunk both ways; its column is k."""
    x0, x1, x2 = np.float64(x[3 * k]), np.float64(x[3 * k + 1]), np.float64(x[3 * k + 2])
    a00, a01, a02 = np.float64(a[p]), np.float64(a[p + 32]), np.float64(a[p + 64])
    a10, a11, a12 = np.float64(a[p + 96]), np.float64(a[p + 128]), np.float64(a[p + 160])
    a20, a21, a22 = np.float64(a[p + 192]), np.float64(a[p + 224]), np.float64(a[p + 256])
    total[p] = total[p] + a00 * x0 + a01 * x1 + a02 * x2
    total[p + 32] = total[p + 32] + a10 * x0 + a11 * x1 + a12 * x2
    total[p + 64] = total[p + 64] + a20 * x0 + a21 * x1 + a22 * x2
    if k > row:
        x0, x1, x2 = own[p], own[p + 32], own[p + 64]
        t0 = a00 * x0 + a10 * x1 + a20 * x2
        t1 = a01 * x0 + a11 * x1 + a21 * x2
        t2 = a02 * x0 + a12 * x1 + a22 * x2
        if k < end:
            out[3 * k] += t0
            out[3 * k + 1] += t1
            out[3 * k + 2] += t2
        else:
            below[3 * (k - end)] += t0
            below[3 * (k - end) + 1] += t1
            below[3 * (k - end) + 2] += t2


@parallel_kernel
def _multiply_vector_3(
    first_row: int,
    block_rows: int,
    ends: Array,
    reach: Array,
    overflow: Array,
    offsets: Array,
    columns: Array,
    values: Array,
    x: Array,
    out: Array,
    alpha: float,
) -> None:
    chunks, parts = offsets.shape[0] - 1, ends.shape[0]
    for part in prange(parts):
        end, below = ends[part], overflow[part]
        for i in range(3 * reach[part]):
            below[i] = 0.0
        own, total = np.empty(96), np.empty(96)
        for chunk in range(chunks * part // parts, chunks * (part + 1) // parts):
            rows, row = min(HEIGHT, block_rows - chunk * HEIGHT), first_row + chunk * HEIGHT
            total[:] = 0.0
            for p in range(rows):
                for r in range(3):
                    own[32 * r + p] = alpha * x[(row + p) * 3 + r]
            for block in range(offsets[chunk], offsets[chunk + 1], HEIGHT):
                column = columns[block : block + HEIGHT]
                a = values[block * 9 : (block + HEIGHT) * 9]
                for first in range(0, rows, WIDTH):
                    last, k = min(first + WIDTH, rows), np.int64(column[first])
                    for p in range(first, first + WIDTH):
                        prefetch(a, (_SLOTS_AHEAD * HEIGHT + p) * 9)
                    same_part = k >= end or k + WIDTH <= end
                    if last == first + WIDTH and k >= 0 and same_part and consecutive(column, first):
                        _multiply_rows_3(first, row + first, k, a, own, total, x, out, below, end)
                        continue
                    for p in range(first, last):
                        if column[p] >= 0:
                            _multiply_row_3(p, row + p, np.int64(column[p]), a, own, total, x, out, below, end)
            for p in range(rows):
                for r in range(3):
                    out[(row + p) * 3 + r] += alpha * total[32 * r + p]


@parallel_kernel
def _multiply_vector_any(
    size: int,
    first_row: int,
    block_rows: int,
    ends: Array,
    reach: Array,
    overflow: Array,
    offsets: Array,
    columns: Array,
    values: Array,
    x: Array,
    out: Array,
    alpha: float,
) -> None:
    chunks, parts = offsets.shape[0] - 1, ends.shape[0]
    for part in prange(parts):
        end = ends[part] * size
        for row in range(size * reach[part]):
            overflow[part, row] = 0.0
        total, below = np.empty((size, HEIGHT)), np.empty((size, HEIGHT))
        own, gathered = np.zeros((size, HEIGHT)), np.empty((size, HEIGHT))
        for chunk in range(chunks * part // parts, chunks * (part + 1) // parts):
            rows, row = min(HEIGHT, block_rows - chunk * HEIGHT), first_row + chunk * HEIGHT
            total[:] = 0.0
            for p in range(rows):
                for r in range(size):
                    own[r, p] = x[(row + p) * size + r]
            for block in range(offsets[chunk], offsets[chunk + 1], HEIGHT):
                column = columns[block : block + HEIGHT]
                scalars = values[block * size * size : (block + HEIGHT) * size * size]
                gather_rows(size, column, x, gathered)
                below[:] = 0.0
                for r in range(size):
                    for c in range(size):
                        for p in range(HEIGHT):
                            value = np.float64(scalars[(r * size + c) * HEIGHT + p])
                            total[r, p] += value * gathered[c, p]
                            below[c, p] += value * own[r, p]
                for p in range(rows):
                    if column[p] > row + p:
                        for c in range(size):
                            j = np.int64(column[p]) * size + c
                            if j < end:
                                out[j] += alpha * below[c, p]
                            else:
                                overflow[part, j - end] += alpha * below[c, p]
            for p in range(rows):
                for r in range(size):
                    out[(row + p) * size + r] += alpha * total[r, p]


@parallel_kernel
def _multiply_block(
    size: int,
    first_row: int,
    block_rows: int,
    ends: Array,
    reach: Array,
    overflow: Array,
    offsets: Array,
    columns: Array,
    values: Array,
    x: Array,
    out: Array,
    alpha: float,
) -> None:
    chunks, parts = offsets.shape[0] - 1, ends.shape[0]
    for part in prange(parts):
        end = ends[part] * size
        for row in range(size * reach[part]):
            overflow[part, row] = 0.0
        for chunk in range(chunks * part // parts, chunks * (part + 1) // parts):
            for place in range(min(HEIGHT, block_rows - chunk * HEIGHT)):
                row = first_row + chunk * HEIGHT + place
                for block in range(offsets[chunk], offsets[chunk + 1], HEIGHT):
                    column = np.int64(columns[block + place])
                    if column < 0:
                        break
                    for r in range(size):
                        for c in range(size):
                            i, j = row * size + r, column * size + c
                            value = alpha * np.float64(values[block * size * size + (r * size + c) * HEIGHT + place])
                            for k in range(x.shape[1]):
                                out[i, k] += value * np.float64(x[j, k])
                            if column > row and j < end:
                                for k in range(x.shape[1]):
                                    out[j, k] += value * np.float64(x[i, k])
                            elif column > row:
                                for k in range(x.shape[1]):
                                    overflow[part, j - end, k] += value * np.float64(x[i, k])


# Finding them takes a third of the time of a product: they are kept as long as the matrix, whose structure stays.
_REACHES: weakref.WeakKeyDictionary[SymmetricBsrMatrix, dict[tuple[int, ...], tuple[Array, Array, int]]]
_REACHES = weakref.WeakKeyDictionary()


@register_kernel("symmetric_bsr", "add_slab", "cpu")
def _add_slab_cpu(A: SymmetricBsrMatrix, first_row: int, x: Array, out: Array, alpha: float) -> None:
    size = A.block_size
    rows = (first_row // size, A.shape[0] // size)
    parts = max(1, min(get_num_threads(), A.chunk_offsets.size - 1))
    known, key = _REACHES.setdefault(A, {}), (parts, *rows)
    if key not in known:
        ends, reach = _reach(parts, *rows, A.chunk_offsets, A.column_indices)
        known[key] = ends, reach, int(reach.max())
    ends, reach, furthest = known[key]
    overflow = np.empty((parts, furthest * size, *x.shape[1:]))  # every part clears its own
    arrays = (ends, reach, overflow, A.chunk_offsets, A.column_indices, A.values, x, out, alpha)
    if x.ndim == 1 and size == 3:
        _multiply_vector_3(*rows, *arrays)
    else:
        product = _multiply_vector_any if x.ndim == 1 else _multiply_block
        product(size, *rows, *arrays)
    for end, beyond, below in zip(ends * size, reach * size, overflow, strict=True):
        out[end : end + beyond] += below[:beyond]


_MOST_PARTS = 4


@register_kernel("symmetric_bsr", "add_slab", "cuda")
def _add_slab_cuda(A: SymmetricBsrMatrix, first_row: int, x: Array, out: Array, alpha: float) -> None:
    block_rows = A.shape[0] // A.block_size
    names = f"{type_names(A.values, x)}, {A.block_size}"
    sizes = (np.int64(block_rows), np.int64(first_row // A.block_size))
    arrays = (A.chunk_offsets, A.column_indices, A.values, x, out, np.float64(alpha))
    if x.ndim == 1:
        function = cuda_function("symmetric_bsr.cu", f"symmetric_bsr_spmv<{names}>")
        chunks = -(-block_rows // HEIGHT)
        # A slab alone leaves much of a GPU without work: several threads then share the slots of a row.
        parts = max(1, min(_MOST_PARTS, NOMINAL_WARPS // 2 // max(chunks, 1)))
        if chunks:
            function((-(-chunks * HEIGHT // 256), parts), (256,), (*sizes, *arrays))
    else:
        function = cuda_function("symmetric_bsr.cu", f"symmetric_bsr_spmm<{names}>")
        launch(function, block_rows * x.shape[1], 256, (*sizes, np.int64(x.shape[1]), *arrays))


def _register(operation: str, kind: str) -> None:
    @register_kernel("symmetric_bsr", operation, kind)
    def product(A: SymmetricBsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
        if A.shape[0] != A.shape[1]:
            raise InputError(
                "a row slab of half a symmetric matrix cannot be applied alone; use apply_slab or the whole matrix"
            )
        scale(out, beta)
        find_kernel("symmetric_bsr", "add_slab", kind)(A, 0, x, out, alpha)


for _operation in ("spmv", "spmm"):
    for _kind in ("cpu", "cuda"):
        _register(_operation, _kind)
