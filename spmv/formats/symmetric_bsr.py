"""Symmetric BSR: only the upper triangle, in small dense blocks, with half the bytes of the whole."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from penstock.host.adaptive_threads import most_threads
from penstock.spmv.compilation.cuda_module import NOMINAL_WARPS, CudaSource, launch, type_names
from penstock.spmv.compilation.table import find_kernel, has_kernel, register_kernel
from penstock.spmv.device import Array, Device
from penstock.spmv.errors import InputError
from penstock.spmv.formats.base import SparseMatrix, copy_diagonal_blocks
from penstock.spmv.formats.convert import (
    chunk_offsets,
    chunks_of_blocks,
    count_stored,
    fill_blocks,
    fill_blocks_through,
    scalar_triplets,
    stored_blocks,
)
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.formats.scaling import scale
from penstock.spmv.formats.sell import rows_of_chunks
from penstock.spmv.formats.sliced_bsr import HEIGHT
from penstock.spmv.formats.statistics import MatrixStatistics, count_blocks
from penstock.spmv.formats.structure import check_upper_half
from penstock.spmv.formats.symmetric_bsr_kernels import (
    _multiply_block,
    _multiply_vector_3,
    _multiply_vector_any,
    find_reach,
)
from penstock.spmv.formats.symmetry import measure_symmetry
from penstock.spmv.formats.traits import Traits

SYMMETRIC_BSR_KERNELS = CudaSource("penstock.spmv.kernels", "symmetric_bsr.cu")


@dataclass(frozen=True, eq=False, repr=False)
class SymmetricBsrMatrix(SparseMatrix, name="symmetric_bsr"):
    """A symmetric matrix stored as its upper half, in chunks of 32 block rows as in :class:`SlicedBsrMatrix`.

    Parameters
    ----------
    shape : (int, int)
        Rows and columns in scalars, multiples of the block size; a slab has fewer rows than columns.
    dtype : dtype
        Type of the vectors.
    chunk_offsets : array, (chunks + 1,) int64
        Where each chunk begins, in blocks.
    column_indices : array, (stored blocks,) int32
        Block columns, on or right of the diagonal; -1 is padding.
    values : array, (stored blocks * block size ** 2,) float64 or float32
    permutation : array, (0,) int32
        Empty: always the natural order.
    block_size : int
        1 to 8.

    Notes
    -----
    A product reads about half the bytes of :class:`SlicedBsrMatrix` and computes both contributions of a block, its own
    and that of its mirror image, in one pass. On a GPU they are added to ``out`` by atomic operations, so last digits may
    differ between runs. On the CPU every thread but the last collects its contributions to rows below its own in a private
    buffer, as long as the bandwidth of the matrix. With float32 vectors both contributions are added to ``out`` in
    float32; those of a block row to itself are first summed in float64.

    A row slab also adds to rows below it, so it is applied by :meth:`apply_slab` and cannot be applied alone.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.spmv import SymmetricBsrMatrix
    >>> whole = Cantilever(nodes=8, dof=3).matrix()
    >>> half = SymmetricBsrMatrix.from_csr(whole.to_csr(), block_size=3)
    >>> round(half.nbytes / whole.nbytes, 2)
    0.62
    """

    traits: ClassVar[Traits] = Traits(
        "symmetric BSR",
        padded=("column_indices",),
        blocked=True,
        half=True,
        adds=True,
        streams=True,
        efficiency={"cpu": 0.25, "cuda": 0.85},
        halving_columns=2.5,
    )

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
            Verify order and range of the entries, and that mirror images differ by no more than rounding (1e-12 relative to the
            diagonal), as in every matrix that was assembled by adding element matrices. The upper triangle then stands for
            both.

        Raises
        ------
        InputError
            If the matrix is not symmetric to rounding.
        """
        A = CsrMatrix.from_csr(A, check=check)
        if check:
            _check_symmetric(A)  # before rounding makes unequal values equal
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

        A slab cannot show whether the larger matrix is symmetric; its lower half is ignored.
        """
        A = CsrMatrix.from_csr(CsrMatrix.from_csr(A, check=check), values_dtype=values_dtype)
        first = first_row // max(block_size, 1)
        counts = count_blocks(A.device, A.shape, A.row_offsets, A.column_indices, block_size, upper=first)
        if first_row % block_size:
            raise InputError(f"a slab must begin at a multiple of the block size {block_size}, not at row {first_row}")
        return cls._of_counts(A, counts, block_size, first)

    @classmethod
    def of_statistics(cls, statistics: MatrixStatistics, *, block_size: int = 3, **parameters: Any) -> Self:
        """Convert a matrix whose blocks have been counted to predict its size."""
        A = CsrMatrix.from_csr(statistics.matrix, check=False, **parameters)
        converted = statistics.take_converted(block_size, A.values_dtype)
        if converted is not None:
            return cls(A.shape, A.dtype, *converted, np.empty(0, dtype=np.int32), block_size)
        return cls._of_counts(A, statistics.blocks(block_size, upper=True), block_size, 0, statistics.through)

    @classmethod
    def _of_counts(
        cls, A: CsrMatrix, counts: Array, block_size: int, first: int, through: Device | None = None
    ) -> Self:
        """Convert a row slab that begins at a block row, from the number of blocks to be stored of each block row."""
        offsets, none = chunk_offsets(counts, HEIGHT), A.device.xp.empty(0, dtype=np.int32)
        layout = (block_size, none, offsets, HEIGHT, A.values_dtype)
        indices, values = chunks_of_blocks(A, *layout, upper=first, through=through)
        return cls(A.shape, A.dtype, offsets, indices, values, none, block_size)

    @classmethod
    def predicted_nbytes(cls, statistics: MatrixStatistics, *, block_size: int = 3, **parameters: Any) -> int:
        """Return the bytes of a matrix in this format."""
        offsets = chunk_offsets(statistics.blocks(block_size, upper=True), HEIGHT)
        return int(offsets[-1]) * (block_size**2 * statistics.values_itemsize + 4) + int(offsets.nbytes)

    @cached_property
    def lowered(self) -> tuple[Array, Array, np.int32]:
        """What kernels need of an image in fewer digits, here nothing: exponents, corrections, and whether there are some."""
        xp = self.device.xp
        return xp.empty(0, dtype=np.uint8), xp.empty(0, dtype=np.float32), np.int32(0)

    def triplets(self) -> tuple[Array, Array, Array]:
        """Return row indices, column indices and values of every scalar; for a whole matrix, of both halves."""
        rows, columns, values = self._upper_triplets()
        if self.shape[0] == self.shape[1]:
            xp, right = self.device.xp, columns // self.block_size > rows // self.block_size
            rows, columns = xp.concatenate((rows, columns[right])), xp.concatenate((columns, rows[right]))
            values = xp.concatenate((values, values[right]))
        return rows, columns, values

    def _upper_triplets(self, first_block_row: int = 0, within: int | None = None) -> tuple[Array, Array, Array]:
        arrays = (self.chunk_offsets, self.column_indices, self.numbers(), self.permutation)
        sizes = (self.shape[0] // self.block_size, HEIGHT, self.block_size)
        return scalar_triplets(*stored_blocks(*arrays, *sizes, first_block_row=first_block_row, within=within))

    def _write_values(self, A: Any, first_row: int) -> None:
        arrays = (self.column_indices, self.values)
        upper = first_row // self.block_size
        fill_blocks(A, self.block_size, self.permutation, self.chunk_offsets, HEIGHT, *arrays, upper=upper)

    def refill_through(self, device: Device, A: CsrMatrix) -> None:
        """Do what ``refill`` does for matrices on the host on a GPU; patterns are not compared."""
        fill_blocks_through(device, A, self.block_size, self.chunk_offsets, HEIGHT, None, self.values, upper=0)

    def rows(self, start: int, stop: int) -> Self:
        """Return rows ``start`` to ``stop``, multiples of the granularity unless the last, as views."""
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
    def T(self) -> Self:
        """The transpose, which is the matrix itself."""
        return self

    @property
    def nnz(self) -> int:
        """Number of stored scalars, padding left out: about half of the matrix's."""
        return count_stored(self.column_indices) * self.block_size**2

    @property
    def row_granularity(self) -> int:
        """Scalar rows of a chunk."""
        return HEIGHT * self.block_size

    def check_structure(self, first_row: int = 0) -> None:
        """Refuse offsets and indices that lead out of a slab, or left of the diagonal, where other slabs add."""
        super().check_structure(first_row)
        check_upper_half(self.chunk_offsets, self.column_indices, first_row // self.block_size, HEIGHT)

    def add_diagonal_blocks(self, first_row: int, blocks: Array) -> None:
        """Fill this slab's part of ``blocks``: copies of stored ones or parts of them, or larger ones, also of mirror images."""
        wanted = blocks.shape[1]
        if self.block_size % wanted == 0 and has_kernel(self.name, "stored_diagonal", self.device.kind):
            self._copy_diagonal(first_row, blocks[first_row // wanted : (first_row + self.shape[0]) // wanted])
            return
        within = -(-(blocks.shape[1] - 1) // self.block_size)  # distance of wanted blocks from the diagonal
        for start, slab in self.slabs():
            rows, columns, values = slab._upper_triplets((first_row + start) // self.block_size, within)
            rows = rows + (first_row + start)
            copy_diagonal_blocks(rows, columns, values, blocks)
            copy_diagonal_blocks(columns, rows, values, blocks)

    def _copy_diagonal(self, first_row: int, blocks: Array) -> None:
        """Fill the blocks of this slab alone, whose size divides that of the stored ones; its row 0 is ``first_row``."""
        wanted, size = blocks.shape[1], self.block_size
        copy = find_kernel(self.name, "stored_diagonal", self.device.kind)
        if wanted == size:
            copy(self, first_row, blocks)
            return
        across = size // wanted
        for start, slab in self.slabs():
            stored = self.device.xp.zeros((slab.shape[0] // size, size, size), dtype=blocks.dtype)
            copy(slab, first_row + start, stored)
            smaller = stored.reshape(-1, across, wanted, across, wanted)
            own = blocks[start // wanted : (start + slab.shape[0]) // wanted]
            for place in range(across):
                own[place::across] = smaller[:, place, :, place]

    def _first_slots(self) -> Array:
        """Return where the first block of every block row lies, which is the one on the diagonal if the row has one."""
        rows = self.device.xp.arange(self.shape[0] // self.block_size)
        slots: Array = self.chunk_offsets[rows // HEIGHT] + rows % HEIGHT
        return slots

    def _first_scalars(self) -> Array:
        """Return where the first scalars of these blocks lie; the others follow at distances of a chunk's height."""
        slots = self._first_slots()
        return (slots - slots % HEIGHT) * self.block_size**2 + slots % HEIGHT

    def add_absolute(self, first_row: int, x: Array, out: Array) -> None:
        """Add this slab's share of ``|A| @ x`` to ``out``, the result of the whole matrix, zeroed before."""
        if not has_kernel(self.name, "add_absolute", self.device.kind):
            super().add_absolute(first_row, x, out)
            return
        find_kernel(self.name, "add_absolute", self.device.kind)(self, first_row, x, out)

    def apply_slab(self, first_row: int, x: Array, out: Array, alpha: float, beta: float) -> None:
        """Add both contributions of this slab's blocks to ``out``, the result of the whole matrix, scaled before."""
        find_kernel(self.name, "add_slab", self.device.kind)(self, first_row, x, out, alpha)


def _check_symmetric(A: CsrMatrix) -> None:
    if A.shape[0] != A.shape[1]:
        raise InputError(f"a symmetric matrix must be square, not {A.shape[0]} x {A.shape[1]}")
    symmetry = measure_symmetry(A.device, A.shape, A.row_offsets, A.column_indices, A.values)
    if not symmetry.to_rounding:
        raise InputError(
            f"{symmetry.beyond_rounding} of {A.nnz} entries differ from their mirror image by more than rounding, most of all "
            f"entry ({symmetry.row}, {symmetry.column}): half of the matrix cannot represent it; use (A + A.T) / 2 if that is "
            "meant, or another format"
        )


# Computing the reaches costs a third of a product; they are cached as long as the matrix lives, since its structure is fixed.
_REACHES: weakref.WeakKeyDictionary[SymmetricBsrMatrix, dict[tuple[int, ...], tuple[Array, Array, int]]]
_REACHES = weakref.WeakKeyDictionary()


@register_kernel("symmetric_bsr", "add_slab", "cpu")
def _add_slab_cpu(A: SymmetricBsrMatrix, first_row: int, x: Array, out: Array, alpha: float) -> None:
    add_on_cpu(A, first_row, x, out, alpha, _NO_EXPONENTS)


_NO_EXPONENTS = np.empty(0, dtype=np.uint8)


def _few_columns(size: int, exponents: Array) -> int:
    """Return up to how many vectors side by side products with one after the other take less time."""
    if size == 3 and not exponents.size:
        return 7
    return 2 if size == 1 else 3


def add_on_cpu(A: SymmetricBsrMatrix, first_row: int, x: Array, out: Array, alpha: float, exponents: Array) -> None:
    """Add the products of a slab; ``exponents`` are those of values of 16 bits."""
    size = A.block_size
    if x.ndim == 2 and x.shape[1] <= _few_columns(size, exponents):
        _add_one_by_one(A, first_row, x, out, alpha, exponents)
        return
    rows = (first_row // size, A.shape[0] // size)
    parts = max(1, min(most_threads(), A.chunk_offsets.size - 1))
    known, key = _REACHES.setdefault(A, {}), (parts, *rows)
    if key not in known:
        ends, reach = find_reach(parts, *rows, A.chunk_offsets, A.column_indices)
        known[key] = ends, reach, int(reach.max())
    ends, reach, furthest = known[key]
    overflow = np.empty((parts, furthest * size, *x.shape[1:]))  # each part clears its own
    matrix, vectors = (ends, reach, overflow, A.chunk_offsets, A.column_indices, A.values), (x, out, alpha)
    if x.ndim == 1 and size == 3 and not exponents.size:
        _multiply_vector_3(*rows, *matrix, *vectors)
    else:
        product = _multiply_vector_any if x.ndim == 1 else _multiply_block
        product(size, *rows, *matrix, exponents, *vectors)
    for end, beyond, below in zip(ends * size, reach * size, overflow, strict=True):
        out[end : end + beyond] += below[:beyond]


def _add_one_by_one(
    A: SymmetricBsrMatrix, first_row: int, x: Array, out: Array, alpha: float, exponents: Array
) -> None:
    """Add the products of a slab and a few vectors, each with the bits of a product with it alone."""
    whole = A.shape[0] == A.shape[1]
    stop = len(x) if whole else A.block_size * (int(A.column_indices.max(initial=-1)) + 1)
    rows = slice(first_row, stop)  # of those that the slab reaches; memory of the others is not touched
    of_x, of_out = np.empty(len(x), dtype=x.dtype), np.empty(len(out), dtype=out.dtype)
    for column in range(x.shape[1]):
        of_x[rows], of_out[rows] = x[rows, column], out[rows, column]
        add_on_cpu(A, first_row, of_x, of_out, alpha, exponents)
        out[rows, column] = of_out[rows]


_MOST_PARTS, _SPMV_THREADS = 4, 128


@register_kernel("symmetric_bsr", "add_slab", "cuda")
def _add_slab_cuda(A: SymmetricBsrMatrix, first_row: int, x: Array, out: Array, alpha: float) -> None:
    block_rows = A.shape[0] // A.block_size
    if x.ndim == 1:
        add_vector_cuda(A, first_row, x, out, alpha, type_names(A.values))
        return
    sizes = (np.int64(block_rows), np.int64(first_row // A.block_size), np.int64(x.shape[1]))
    arrays = (A.chunk_offsets, A.column_indices, A.values, *A.lowered, x, out, np.float64(alpha))
    function = SYMMETRIC_BSR_KERNELS.function(f"symmetric_bsr_spmm<{type_names(A.values, x)}, {A.block_size}>")
    launch(function, block_rows * x.shape[1], 256, (*sizes, *arrays))


def add_vector_cuda(A: SymmetricBsrMatrix, first_row: int, x: Array, out: Array, alpha: float, stored: str) -> None:
    """Add the product with a vector; ``stored`` is the C++ type of values, or what stands for it."""
    block_rows = A.shape[0] // A.block_size
    chunks = -(-block_rows // HEIGHT)
    # A slab alone leaves much of a GPU idle: several threads then share the slots of a row.
    parts = max(1, min(_MOST_PARTS, NOMINAL_WARPS // 2 // max(chunks, 1)))
    sizes = (np.int64(block_rows), np.int64(first_row // A.block_size))
    arrays = (A.chunk_offsets, A.column_indices, A.values, *A.lowered, x, out, np.float64(alpha))
    function = SYMMETRIC_BSR_KERNELS.function(f"symmetric_bsr_spmv<{stored}, {type_names(x)}, {A.block_size}>")
    if chunks:
        function((-(-chunks * HEIGHT // _SPMV_THREADS), parts), (_SPMV_THREADS,), (*sizes, *arrays))


@register_kernel("symmetric_bsr", "add_absolute", "cuda")
def _add_absolute_cuda(A: SymmetricBsrMatrix, first_row: int, x: Array, out: Array) -> None:
    add_vector_cuda(A, first_row, x, out, 1.0, f"Absolute<{type_names(A.values)}>")


def register_products(name: str, operation: str, kind: str) -> None:
    """Register a product of a format that stores half of a matrix, whose slabs add to ``out``."""

    @register_kernel(name, operation, kind)
    def product(A: SymmetricBsrMatrix, x: Array, out: Array, alpha: float, beta: float) -> None:
        if A.shape[0] != A.shape[1]:
            raise InputError(
                "a row slab of half a symmetric matrix cannot be applied alone; use apply_slab or the whole matrix"
            )
        scale(out, beta)
        find_kernel(name, "add_slab", kind)(A, 0, x, out, alpha)


for _operation in ("spmv", "spmm"):
    for _kind in ("cpu", "cuda"):
        register_products("symmetric_bsr", _operation, _kind)


@register_kernel("symmetric_bsr", "stored_diagonal", "cpu")
def _stored_diagonal_cpu(A: SymmetricBsrMatrix, first_row: int, blocks: Array) -> None:
    size, stored = A.block_size, A.column_indices.size
    rows, slots = np.arange(A.shape[0] // size), A._first_slots()
    found = slots < stored  # of empty chunks at the end
    found[found] = A.column_indices[slots[found]] == first_row // size + rows[found]
    first, rows = A._first_scalars()[found], rows[found]
    for scalar in range(size**2):  # one at a time, which takes less memory
        blocks[rows, scalar // size, scalar % size] = A.values[first + scalar * HEIGHT]


@register_kernel("symmetric_bsr", "stored_diagonal", "cuda")
def _stored_diagonal_cuda(A: SymmetricBsrMatrix, first_row: int, blocks: Array) -> None:
    names, size = f"{type_names(A.values)}, {type_names(blocks)}", A.block_size
    function = SYMMETRIC_BSR_KERNELS.function(f"symmetric_bsr_diagonal<{names}, {size}>")
    numbers = (np.int64(A.shape[0] // size), np.int64(first_row // size))
    launch(function, A.shape[0] // size, 256, (*numbers, A.chunk_offsets, A.column_indices, A.values, blocks))
