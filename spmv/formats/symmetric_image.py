"""An image of a symmetric matrix in fewer digits: its upper half in float32, or in 16 bits with a scale for each block.

The blocks on the diagonal are corrected so that A and its image have the same sums of rows, up to their skew parts. With
``E = image - A`` and ``d_ij = x_j - x_i``, ``x^T E x = -1/2 sum d_ij^T E_ij d_ij``, plus skew parts: constants cost nothing, and
the image differs from A by its rounding unit times the root of the condition number instead of that number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from penstock.spmv.compilation.cuda_module import type_names
from penstock.spmv.compilation.jit import shared_range
from penstock.spmv.compilation.table import find_kernel, has_kernel, register_kernel
from penstock.spmv.device import Array, Device, count_true, device_of
from penstock.spmv.errors import InputError
from penstock.spmv.formats.base import SparseMatrix
from penstock.spmv.formats.sliced_bsr import HEIGHT
from penstock.spmv.formats.symmetric_bsr import SymmetricBsrMatrix, add_on_cpu, add_vector_cuda, register_products
from penstock.spmv.formats.symmetric_bsr_kernels import BIAS, _add_corrections
from penstock.spmv.formats.traits import Traits

# The bits of a stored number beside its sign.
_BITS = 15
# Diagonal entries within these bounds, and entries of a positive definite matrix with them, keep their digits in float32.
_SMALLEST, _LARGEST = 2.0**-60, 2.0**60
# Errors of a row are made up for if they are below this share of its block on the diagonal.
_SMALL = 2.0**-8
# Factors of bounds, which are sums of half a unit of the last place of each number: for the rounding of these sums, and with 16
# bits because the numbers may have been rounded to float32 before, which adds up to 2^-8 of that.
_SLACK = {np.dtype(np.float32): 1.0 + 2.0**-20, np.dtype(np.int16): 1.0 + 2.0**-7}


@dataclass(frozen=True, eq=False, repr=False)
class SymmetricImageMatrix(SymmetricBsrMatrix, name="symmetric_image", chosen=False):
    """An image in fewer digits of a :class:`SymmetricBsrMatrix`, with its structure; made by :meth:`of`.

    Parameters
    ----------
    values : array, (stored blocks * block size ** 2,) float32 or int16
    exponents : array, (stored blocks,) or (0,) uint8
        Of 16-bit values: those of a block are multiples of ``2 ** (exponent - 127)``.
    corrections : array, (block rows, block size, block size) float32
        Added to the blocks on the diagonal; none, (0, block size, block size), of :meth:`uncorrected`.

    Notes
    -----
    A product reads 4 or 2 bytes for each stored value, and for a block 4, or 5 with 16 bits: 40 and 23 bytes for 3 x 3 blocks,
    of 76 in float64. ``bound(z)`` bounds its difference from that with A.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.fem import Cantilever
    >>> A = Cantilever(nodes=8, dof=3).matrix("symmetric_bsr")
    >>> image = SymmetricImageMatrix.of(A, np.int16)
    >>> difference = np.abs(A.to_csr() - image.to_csr()).max() / np.abs(A.to_csr()).max()
    >>> round(image.nbytes / A.nbytes, 2), image.values.dtype.name, bool(difference < 1e-4)
    (0.34, 'int16', True)
    """

    traits: ClassVar[Traits] = replace(SymmetricBsrMatrix.traits, label="an image of symmetric BSR", streams=False)

    #: The name of the format whose images these are.
    of_format: ClassVar[str] = SymmetricBsrMatrix.name

    exponents: Array = None
    corrections: Array = None

    @classmethod
    def of(cls, A: SymmetricBsrMatrix, values_dtype: Any) -> Self:
        """Return the image of a whole matrix of float64, on its device, in float32 or int16.

        Raises
        ------
        InputError
            If a row has no block on the diagonal.
        """
        xp, size = A.device.xp, A.block_size
        values, exponents = lowered(A.values, size, np.dtype(values_dtype), A.device)
        none = xp.zeros((A.shape[0] // size, size, size), dtype=np.float32)
        plain = cls(A.shape, A.dtype, A.chunk_offsets, A.column_indices, values, A.permutation, size, exponents, none)
        return plain.corrected(_block_sums(A), A.diagonal_blocks(size))

    def corrected(self, row_sums: Array, diagonal: Array) -> Self:
        """Return the image with the blocks on the diagonal that A has, and with its sums of rows.

        Parameters
        ----------
        row_sums : array, (block size, n)
            A times the vectors of :func:`block_ones`, which the image gets up to the skew parts of blocks. A row whose
            errors are not small beside its own block keeps another sum: in a matrix that is scaled so badly, constants are no
            slow modes.
        diagonal : array, (block rows, block size, block size)
        """
        xp, size = self.device.xp, self.block_size
        if count_true(self.column_indices[self._first_slots()] != xp.arange(self.shape[0] // size)):
            raise InputError("a matrix with an empty block on the diagonal has no image")
        with np.errstate(all="ignore"):  # values beyond the range of float32 are found out by the diagonal
            missing = by_blocks(row_sums - _block_sums(self))
            return replace(self, corrections=corrections_of(missing, diagonal - self.diagonal_blocks(size), diagonal))

    def uncorrected(self) -> Self:
        """Return the rounded values alone, for products; they share the memory."""
        return replace(self, corrections=self.corrections[:0])

    @cached_property
    def lowered(self) -> tuple[Array, Array, np.int32]:
        """Exponents, corrections, and whether there are some."""
        return self.exponents, self.corrections, np.int32(self.corrections.size > 0)

    def numbers(self) -> Array:
        """Return the values in float64, those of the diagonal corrected."""
        scalars = self.block_size**2
        numbers = self.values.astype(np.float64)
        if self.exponents.size:
            by_slot = numbers.reshape(-1, scalars, HEIGHT)
            by_slot *= self._scales(slice(None)).reshape(-1, 1, HEIGHT)
        places = self._first_scalars()
        with np.errstate(invalid="ignore"):  # of an image beyond the range of float32
            for scalar in range(scalars):
                numbers[places + scalar * HEIGHT] += self.corrections.reshape(-1, scalars)[:, scalar]
        return numbers

    def _scales(self, slots: Any) -> Array:
        """Return the powers of two of which the 16-bit values of some blocks are multiples."""
        return self.device.xp.ldexp(1.0, self.exponents[slots].astype(np.int32) - BIAS)

    def rows(self, start: int, stop: int) -> Self:
        """Return rows ``start`` to ``stop``, multiples of the granularity unless the last, as views."""
        height = HEIGHT * self.block_size
        first, last = (int(self.chunk_offsets[-(-row // height)]) for row in (start, stop))
        part = super().rows(start, stop)
        exponents = self.exponents[first:last] if self.exponents.size else self.exponents
        corrections = self.corrections[start // self.block_size : stop // self.block_size]
        return replace(part, exponents=exponents, corrections=corrections)

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that fit the number of rows and of column indices."""
        stored, size = self.column_indices.size, self.block_size
        own = {
            "exponents": (stored if self.values.dtype == np.int16 else 0,),
            "corrections": (self.shape[0] // size, size, size),
        }
        return {**super().array_shapes(), **own}

    def absolute(self) -> Self:
        """Return a matrix of which no entry is smaller than the absolute value of that of the image."""
        return replace(self, values=abs(self.values), corrections=abs(self.corrections))

    def bound(self, z: Array) -> Array:
        """Return a vector that bounds ``|(A - image) z|`` entry by entry, at the cost of a product.

        For entries of A within the normal range of float32, which :func:`penstock.solvers.image_solve.has_image` makes sure of.
        """
        xp, kind = self.device.xp, self.device.kind
        out, z = xp.zeros(self.shape[0]), xp.abs(z)
        with self.device.current():
            if has_kernel(self.name, "add_rounding", kind):
                find_kernel(self.name, "add_rounding", kind)(self, z, out)
            else:
                for start, slab in self.slabs():
                    slab._rounding().apply_slab(start, z, out, 1.0, 0.0)
        out *= _SLACK[self.values.dtype]
        return out

    def _rounding(self) -> Self:
        """Return a matrix of bounds of the errors: of rounding, and on the diagonal those that make up for it."""
        if self.values.dtype == np.int16:  # half a unit of the last place each
            halves = self.device.xp.ones_like(self.values)
            return replace(
                self, values=halves, exponents=self.exponents - np.uint8(1), corrections=abs(self.corrections)
            )
        return replace(self, values=abs(self.values) * np.float32(2.0**-24), corrections=abs(self.corrections))

    def refill(self, A: Any, first_row: int = 0, *, check: bool = True) -> None:
        """Replace the values by those of the image of a CSR matrix with the same pattern."""
        half = SymmetricBsrMatrix.slab_from_csr(A, first_row, block_size=self.block_size, check=False)
        if check and count_true(half.column_indices != self.column_indices):
            raise InputError("the matrix has another pattern")
        new = type(self).of(half.to_device(self.device), self.values.dtype)
        for name in ("values", "exponents", "corrections"):
            getattr(self, name)[...] = getattr(new, name)


def image_of(A: SparseMatrix, values_dtype: Any = np.float32) -> SparseMatrix:
    """Return an image of a matrix in fewer digits, on its device and with its structure; reads the matrix once.

    Parameters
    ----------
    A : SparseMatrix
    values_dtype : dtype
        float32 or int16.

    Raises
    ------
    InputError
        If it is to be of int16, and the matrix is not a :class:`~penstock.spmv.SymmetricBsrMatrix`.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import image_of
    >>> matrix = Cantilever(nodes=8, dof=3).matrix("symmetric_bsr")
    >>> round(image_of(matrix, "int16").nbytes / matrix.nbytes, 2)
    0.34
    """
    if np.dtype(values_dtype) == np.int16 and not isinstance(A, SymmetricBsrMatrix):
        raise InputError(f"an image in int16 is of symmetric_bsr, not of {A.name}")
    if isinstance(A, SymmetricBsrMatrix):
        return SymmetricImageMatrix.of(A, values_dtype)
    values = A.values.astype(values_dtype)
    return A.from_arrays(A.shape, A.dtype, {**A.arrays(), "values": values}, A.parameters())


def has_image(diagonal: Array, device: Any) -> bool:
    """Return whether the entries of a symmetric positive definite matrix with this diagonal keep their digits in float32."""
    least, most = float(device.xp.min(diagonal)), float(device.xp.max(diagonal))
    return least >= _SMALLEST and most <= _LARGEST


def corrections_of(missing: Array, of_diagonal: Array, diagonal: Array) -> Array:
    """Return what makes up, on the diagonal, for errors of an image: (block rows, block size, block size), float32.

    ``missing`` are the errors of each row's sum of blocks, ``of_diagonal`` those of its block on the diagonal, ``diagonal``.
    """
    xp = device_of(diagonal).xp
    of_others = 0.5 * (missing + missing.swapaxes(1, 2)) - of_diagonal
    small = abs(of_others).max(axis=(1, 2)) <= _SMALL * abs(diagonal).max(axis=(1, 2))
    corrections = of_diagonal + xp.where(small[:, None, None], of_others, 0.0)
    return xp.ascontiguousarray(corrections.astype(np.float32))


def block_ones(rows: int, size: int, device: Device) -> Array:
    """Return vectors, (size, rows), products with which sum the blocks of each row.

    On a CPU, products with one after the other take less time than with all at once.
    """
    xp = device.xp
    return xp.ascontiguousarray(xp.tile(xp.eye(size), rows // size))


def _block_sums(A: SymmetricBsrMatrix) -> Array:
    """Return products with these vectors."""
    ones = block_ones(A.shape[0], A.block_size, A.device)
    sums = A.device.xp.zeros_like(ones)
    with A.device.current():
        add_block_sums(A, 0, ones, sums)
    return sums


def add_block_sums(slab: SparseMatrix, first_row: int, ones: Array, sums: Array) -> None:
    """Add the products of a slab with these vectors to those of the whole matrix."""
    for one, of_one in zip(ones, sums, strict=True):
        slab.apply_slab(first_row, one, of_one, 1.0, 0.0)


def by_blocks(sums: Array) -> Array:
    """Return what such products, (size, rows), hold of each block row: (block rows, size, size)."""
    size = len(sums)
    return sums.T.reshape(-1, size, size)


def lowered(values: Array, size: int, dtype: np.dtype[Any], device: Device) -> tuple[Array, Array]:
    """Return values of blocks in chunks in fewer digits, and the exponents of blocks; none for float32."""
    xp = device.xp
    if dtype == np.float32:
        low = xp.empty(values.shape, dtype=np.float32)
        if device.kind == "cpu":
            _narrow(values.size, values, low)
        else:
            low[...] = values
        return low, xp.empty(0, dtype=np.uint8)
    if dtype != np.int16:
        raise InputError(f"an image is of float32 or int16, not {dtype}")
    low, exponents = xp.empty(values.shape, dtype=np.int16), xp.empty(values.size // size**2, dtype=np.uint8)
    if device.kind == "cpu":
        _quantise(exponents.size // HEIGHT, size * size, values, low, exponents)
        return low, exponents
    step = max(1, (64 << 20) // (size * size * HEIGHT)) * size * size * HEIGHT  # of 512 MiB
    for start in range(0, values.size, step):
        part = values[start : start + step].reshape(-1, size * size, HEIGHT)
        largest = xp.abs(part).max(axis=1)
        powers = xp.frexp(largest)[1] - _BITS
        # What would be rounded up to the power itself takes the next one: no number is clipped, so half a unit bounds each error.
        powers += xp.rint(xp.ldexp(largest, -powers)) >= 2.0**_BITS
        powers = xp.maximum(powers, 2 - BIAS)  # half of it is a float, too
        scaled = xp.rint(xp.ldexp(part, -powers[:, None, :]))
        low[start : start + step] = scaled.astype(np.int16).reshape(-1)
        exponents[start // size**2 : (start + step) // size**2] = (powers + BIAS).astype(np.uint8).reshape(-1)
    return low, exponents


@shared_range(least=65536)
def _narrow(begin: int, end: int, values: Array, low: Array) -> None:
    for place in range(begin, end):
        low[place] = np.float32(values[place])


@shared_range(least=256)
def _quantise(begin: int, end: int, scalars: int, values: Array, low: Array, exponents: Array) -> None:
    for slot in range(begin, end):
        for lane in range(HEIGHT):
            first, largest = slot * scalars * HEIGHT + lane, 0.0
            for scalar in range(scalars):
                largest = max(largest, abs(values[first + scalar * HEIGHT]))
            # frexp, which Numba's vectoriser does not know: largest < 2 ** power
            power = np.int64(-BIAS)
            if largest > 0.0:
                power = np.int64(np.floor(np.log2(largest))) + 1
                if largest >= 2.0**power:
                    power += 1
                if largest < 2.0 ** (power - 1):
                    power -= 1
            power -= _BITS
            if np.rint(largest * 2.0 ** (-power)) >= 2.0**_BITS:  # so that no number is clipped
                power += 1
            power = max(power, np.int64(2 - BIAS))  # half of it is a float, too
            exponents[slot * HEIGHT + lane] = np.uint8(power + BIAS)
            for scalar in range(scalars):
                low[first + scalar * HEIGHT] = np.int16(np.rint(values[first + scalar * HEIGHT] * 2.0 ** (-power)))


@register_kernel("symmetric_image", "add_slab", "cpu")
def _add_slab_cpu(A: SymmetricImageMatrix, first_row: int, x: Array, out: Array, alpha: float) -> None:
    add_on_cpu(A, first_row, x, out, alpha, A.exponents)
    columns = (x.reshape(len(x), -1), out.reshape(len(out), -1))
    _add_corrections(first_row // A.block_size, A.corrections, *columns, alpha)


@register_kernel("symmetric_image", "add_slab", "cuda")
def _add_slab_cuda(A: SymmetricImageMatrix, first_row: int, x: Array, out: Array, alpha: float) -> None:
    find_kernel("symmetric_bsr", "add_slab", "cuda")(A, first_row, x, out, alpha)


@register_kernel("symmetric_image", "add_absolute", "cuda")
def _add_absolute_cuda(A: SymmetricImageMatrix, first_row: int, x: Array, out: Array) -> None:
    find_kernel("symmetric_bsr", "add_absolute", "cuda")(A, first_row, x, out)


@register_kernel("symmetric_image", "add_rounding", "cuda")
def _add_rounding_cuda(A: SymmetricImageMatrix, z: Array, out: Array) -> None:
    add_vector_cuda(A, 0, z, out, 1.0, f"Rounding<{type_names(A.values)}>")


for _operation in ("spmv", "spmm"):
    for _kind in ("cpu", "cuda"):
        register_products("symmetric_image", _operation, _kind)


def _register_diagonal(kind: str) -> None:
    @register_kernel("symmetric_image", "stored_diagonal", kind)
    def stored_diagonal(A: SymmetricImageMatrix, first_row: int, blocks: Array) -> None:
        size, first = A.block_size, A._first_scalars()
        stored = A.values[first[:, None] + A.device.xp.arange(size**2) * HEIGHT].astype(np.float64)
        if A.exponents.size:
            stored *= A._scales(A._first_slots())[:, None]
        with np.errstate(invalid="ignore"):  # of an image beyond the range of float32
            blocks[...] = stored.reshape(-1, size, size) + A.corrections


for _kind in ("cpu", "cuda"):
    _register_diagonal(_kind)
