"""Describes a stored matrix: its subdivisions, and where their arrays lie."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from penstock.spmv import (
    Array,
    InputError,
    PenstockError,
    SparseMatrix,
    StoreError,
    format_named,
    format_nbytes,
)
from penstock.streaming.stores.buffers import PAGE_NBYTES

#: The part of a subdivision to read: the whole, the structure (offsets and indices), or the values.
Part = Literal["whole", "structure", "values"]

_ARRAY_ALIGNMENT = 256


def round_up(nbytes: int, multiple: int) -> int:
    """Return the least multiple that is not smaller."""
    return -(-nbytes // multiple) * multiple


@dataclass(frozen=True)
class ArrayField:
    """One array inside a slab: ``nbytes`` bytes, starting at ``offset``."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def part(self) -> Part:
        """The part of the subdivision that contains the array."""
        return "values" if np.dtype(self.dtype).kind == "f" else "structure"


@dataclass(frozen=True)
class Subdivision:
    """A contiguous row slab of the matrix that is transferred as one piece.

    Parameters
    ----------
    row_start, row_stop : int
        Its rows in the whole matrix.
    nnz : int
        Number of stored scalars.
    fields : tuple of ArrayField
        Where its arrays lie: first the structure (offsets and indices); then, from the next page on, the values.
    nbytes : int
        Length of the piece, including padding to whole pages.
    checksums : (int, int) or None
        CRC-32 of structure and values; None for a subdivision that exists only in a plan or in host memory.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import index_of
    >>> piece = index_of(Cantilever(nodes=4, dof=3).symbolic_slabs(4)).subdivisions[1]
    >>> piece.row_start, piece.row_stop, piece.nnz, piece.nbytes, [field.name for field in piece.fields]
    (48, 96, 2700, 28672, ['row_offsets', 'column_indices', 'values'])
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    row_start: int
    row_stop: int
    nnz: int
    fields: tuple[ArrayField, ...]
    nbytes: int
    checksums: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"rows {self.row_start} to {self.row_stop - 1}"

    @cached_property
    def values_start(self) -> int:
        """Offset of the values, at a page boundary."""
        return next((field.offset for field in self.fields if field.part == "values"), self.nbytes)

    def bytes_of(self, part: Part) -> slice:
        """Return where a part lies in the piece, including padding to whole pages."""
        return slice(
            self.values_start if part == "values" else 0, self.values_start if part == "structure" else self.nbytes
        )

    def part_nbytes(self, part: Part) -> int:
        """Return the length of a part in bytes."""
        where = self.bytes_of(part)
        return where.stop - where.start  # type: ignore[no-any-return]

    def checksums_of(self, part: Part) -> list[tuple[slice, int]]:
        """Return the ranges of the piece in a part that have a checksum, with their checksums."""
        assert self.checksums is not None, "a stored subdivision has checksums"
        parts: tuple[tuple[Part, int], ...] = (("structure", self.checksums[0]), ("values", self.checksums[1]))
        return [(self.bytes_of(name), checksum) for name, checksum in parts if part in ("whole", name)]


@dataclass(frozen=True, repr=False)
class MatrixIndex:
    """The description of a matrix cut into subdivisions, without its entries.

    Parameters
    ----------
    shape : (int, int)
    dtype : str
        Type of the vectors.
    format_name : str
        Format of every slab.
    parameters : dict
        Parameters of the format, the same for every slab, so that kernels sum in the same order as on the whole matrix.
    subdivisions : tuple of Subdivision
        In row order, without gaps.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import MatrixIndex, index_of
    >>> index = index_of(Cantilever(nodes=4, dof=3).symbolic_slabs(4))
    >>> index.shape, index.format_name, index.block_size, index.row_starts
    ((192, 192), 'bsr', 3, [0, 48, 96, 144])
    >>> MatrixIndex.from_json(index.to_json()) == index
    True
    """

    shape: tuple[int, int]
    dtype: str
    format_name: str
    parameters: dict[str, int]
    subdivisions: tuple[Subdivision, ...]

    def __repr__(self) -> str:
        return f"<MatrixIndex {self}>"

    def __str__(self) -> str:
        rows, columns = self.shape
        cut = f"{len(self.subdivisions)} subdivisions"
        return (
            f"{rows:,} x {columns:,}, {self.nnz:,} entries, {self.format_name} in {cut}, {format_nbytes(self.nbytes)}"
        )

    @property
    def block_size(self) -> int:
        """Rows of the dense blocks that are stored; 1 without blocks."""
        size = self.parameters.get("block_size", 1)
        if self.format_name == "bsr":
            values = next(field for field in self.subdivisions[0].fields if field.name == "values")
            size = values.shape[-1]
        return int(size)

    @cached_property
    def nbytes(self) -> int:
        """Total bytes of all pieces."""
        return sum(subdivision.nbytes for subdivision in self.subdivisions)

    @cached_property
    def nnz(self) -> int:
        """Number of stored scalars."""
        return sum(subdivision.nnz for subdivision in self.subdivisions)

    @property
    def values_dtype(self) -> np.dtype[np.generic]:
        """Type the values are stored in."""
        names = {field.dtype for piece in self.subdivisions for field in piece.fields if field.part == "values"}
        return np.dtype(max(names, default="float64"))

    @property
    def row_starts(self) -> list[int]:
        """First row of each subdivision."""
        return [subdivision.row_start for subdivision in self.subdivisions]

    @property
    def row_bounds(self) -> tuple[int, ...]:
        """Rows between which subdivisions lie: the first row of each, and the number of rows."""
        return (*self.row_starts, self.shape[0])

    def same_layout(self, other: MatrixIndex) -> bool:
        """Return whether another index has the same matrix type and the same cut; checksums may differ."""
        return replace(self, subdivisions=_symbolic(self)) == replace(other, subdivisions=_symbolic(other))

    def part_nbytes(self, part: Part) -> int:
        """Return the total bytes of a part of all pieces."""
        return sum(self.sizes[part])

    @cached_property
    def sizes(self) -> dict[Part, list[int]]:
        """The bytes of every part of every piece, by part."""
        parts: tuple[Part, ...] = ("whole", "structure", "values")
        return {part: [subdivision.part_nbytes(part) for subdivision in self.subdivisions] for part in parts}

    @property
    def row_granularity(self) -> int:
        """Rows at multiples of which the format cuts the matrix; a store may have been cut elsewhere."""
        first = self.subdivisions[0]
        arrays = {field.name: np.broadcast_to(np.zeros((), field.dtype), field.shape) for field in first.fields}
        return self._slab(first.row_stop - first.row_start, arrays).row_granularity

    @property
    def cuts_chunks(self) -> bool:
        """Whether subdivisions begin elsewhere, so that their arrays are not parts of those of the whole matrix."""
        multiple = self.row_granularity
        return any(start % multiple for start in self.row_starts)

    def view(self, number: int, buffer: Array, structure: dict[str, Array] | None = None) -> SparseMatrix:
        """Return subdivision ``number`` as a matrix whose arrays are views of a byte buffer.

        ``buffer`` contains the whole piece, or only its values if ``structure`` are the other arrays.
        """
        part: Part = "whole" if structure is None else "values"
        arrays = (structure or {}) | self.arrays(number, buffer, part)
        subdivision = self.subdivisions[number]
        return self._slab(subdivision.row_stop - subdivision.row_start, arrays)

    def arrays(self, number: int, buffer: Array, part: Part = "whole") -> dict[str, Array]:
        """Return the arrays of a part of subdivision ``number`` as views of a byte buffer that contains this part."""
        subdivision, arrays = self.subdivisions[number], {}
        for field in subdivision.fields:
            if part in ("whole", field.part):
                start = field.offset - subdivision.bytes_of(part).start
                arrays[field.name] = buffer[start : start + field.nbytes].view(field.dtype).reshape(field.shape)
        return arrays

    def _slab(self, rows: int, arrays: dict[str, Array]) -> SparseMatrix:
        shape = (rows, self.shape[1])
        return format_named(self.format_name).from_arrays(shape, self.dtype, arrays, self.parameters)

    def check_structure(self, number: int, buffer: Array) -> None:
        """Check the offsets and indices of subdivision ``number`` in a buffer on the host, before kernels follow them.

        Raises
        ------
        InputError
            If they lead out of its arrays or its shape.
        """
        subdivision = self.subdivisions[number]
        # The values may not be in the buffer.
        arrays = _zeros_for(subdivision) | self.arrays(number, buffer, "structure")
        self._slab(subdivision.row_stop - subdivision.row_start, arrays).check_structure(subdivision.row_start)

    def to_json(self) -> dict[str, Any]:
        """Return the index as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> MatrixIndex:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        StoreError
            If an entry is missing, has the wrong type, or contradicts the others.
        """
        from pydantic import TypeAdapter  # takes as long to load as a tenth of this package

        try:
            index = TypeAdapter(cls).validate_python(data)
            index._check()
        except (PenstockError, ValueError, TypeError, IndexError, ArithmeticError, KeyError, MemoryError) as error:
            raise StoreError(f"the store's index is damaged ({error}); build the store again") from error
        return index

    def _check(self) -> None:
        """Lay out every slab again from the shapes of its arrays and compare the results."""
        if self.dtype not in ("float64", "float32") or self.shape[1] < 0:
            raise InputError(f"a matrix cannot have {self.shape[1]} columns and type {self.dtype}")
        row = 0
        for number, subdivision in enumerate(self.subdivisions):
            slab = self._slab(subdivision.row_stop - row, _zeros_for(subdivision))
            slab.check_shapes()
            # Shapes do not show how many of the stored scalars are padding.
            scalars = sum(math.prod(f.shape) for f in subdivision.fields if f.dtype.startswith("float"))
            expected = lay_out(slab, row, min(max(subdivision.nnz, 0), scalars))
            if replace(subdivision, checksums=None) != expected:
                raise InputError(f"the layout of subdivision {number} contradicts its rows and arrays")
            row = subdivision.row_stop
        if row != self.shape[0]:
            raise InputError(f"the subdivisions hold {row} of {self.shape[0]} rows")


def _zeros_for(subdivision: Subdivision) -> dict[str, Array]:
    """Return arrays of the shapes and types of a subdivision, each of one broadcast zero."""
    return {field.name: np.broadcast_to(np.zeros((), field.dtype), field.shape) for field in subdivision.fields}


def _symbolic(index: MatrixIndex) -> tuple[Subdivision, ...]:
    """Return the subdivisions without checksums and entry counts, which symbolic slabs do not know."""
    return tuple(replace(subdivision, nnz=0, checksums=None) for subdivision in index.subdivisions)


_dtype_name = functools.cache(str)  # NumPy takes longer to name a type than the rest of a layout


def lay_out(slab: SparseMatrix, row_start: int, nnz: int | None = None) -> Subdivision:
    """Return where the arrays of a slab, real or symbolic, lie in one contiguous piece; ``nnz`` is counted unless passed."""
    offset, fields = 0, []
    for part in ("structure", "values"):
        for name, array in slab.arrays().items():
            field = ArrayField(name, _dtype_name(np.dtype(array.dtype)), tuple(array.shape), offset)
            if field.part == part:
                fields.append(field)
                offset = round_up(offset + field.nbytes, _ARRAY_ALIGNMENT)
        offset = round_up(offset, PAGE_NBYTES)
    nbytes = max(offset, PAGE_NBYTES)
    if nnz is None:
        symbolic = not any(slab.values.strides)  # its values are one broadcast zero: padding cannot be recognised
        nnz = int(slab.values.size) if symbolic else slab.nnz
    return Subdivision(row_start, row_start + slab.shape[0], nnz, tuple(fields), nbytes)
