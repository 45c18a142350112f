"""How a row slab becomes one contiguous piece of bytes, and the index that describes all pieces of a matrix."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import scipy.sparse
from pydantic import ConfigDict, TypeAdapter

from penstock.spmv import (
    Array,
    BsrMatrix,
    CsrMatrix,
    InputError,
    PenstockError,
    SparseFormat,
    StoreError,
    format_named,
)
from penstock.streaming.budget import PAGE_NBYTES

__all__ = [
    "ArrayField",
    "IndexBuilder",
    "MatrixIndex",
    "Part",
    "Subdivision",
    "Visit",
    "as_matrix",
    "as_slab",
    "index_of",
    "pack",
]

#: ``visit(number, slab, stage)``, called for each computation of a sweep.
Visit = Callable[[int, SparseFormat, int], None]

#: What to read of a subdivision: everything, offsets and indices, or values.
Part = Literal["whole", "structure", "values"]

_ARRAY_ALIGNMENT = 256


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


@dataclass(frozen=True)
class ArrayField:
    """One array inside a slab: ``nbytes`` bytes from ``offset`` on."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def part(self) -> Part:
        """The part of the subdivision in which the array lies."""
        return "values" if np.dtype(self.dtype).kind == "f" else "structure"


@dataclass(frozen=True)
class Subdivision:
    """A contiguous row slab of the matrix that is transferred as one piece.

    Parameters
    ----------
    row_start, row_stop : int
        Its rows in the whole matrix.
    nnz : int
        Stored scalars.
    fields : tuple of ArrayField
        Where its arrays lie: first the structure, offsets and indices; then, from the next page on, the values.
    nbytes : int
        Length of the piece, padding to whole pages included.
    checksums : (int, int) or None
        CRC-32 of structure and values; None while it exists in a plan only.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

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
        """Where the values begin: a whole number of pages."""
        return next((field.offset for field in self.fields if field.part == "values"), self.nbytes)

    def bytes_of(self, part: Part) -> slice:
        """Return where a part lies in the piece, padding to whole pages included."""
        return slice(
            self.values_start if part == "values" else 0, self.values_start if part == "structure" else self.nbytes
        )

    def part_nbytes(self, part: Part) -> int:
        """Return the length of a part."""
        where = self.bytes_of(part)
        return where.stop - where.start  # type: ignore[no-any-return]

    def checksums_of(self, part: Part) -> list[tuple[slice, int]]:
        """Return the ranges of the piece that have a checksum of their own and lie in a part, with their checksums."""
        assert self.checksums is not None, "a stored subdivision has checksums"
        parts: tuple[tuple[Part, int], ...] = (("structure", self.checksums[0]), ("values", self.checksums[1]))
        return [(self.bytes_of(name), checksum) for name, checksum in parts if part in ("whole", name)]


@dataclass(frozen=True)
class MatrixIndex:
    """What there is to know about a matrix cut into subdivisions, without its entries.

    Parameters
    ----------
    shape : (int, int)
    dtype : str
        Type of the vectors.
    format_name : str
        Format of every slab.
    parameters : dict
        Parameters of the format, the same for every slab: kernels then sum in the same order as on the whole matrix.
    subdivisions : tuple of Subdivision
        In row order, without gaps.
    """

    shape: tuple[int, int]
    dtype: str
    format_name: str
    parameters: dict[str, int]
    subdivisions: tuple[Subdivision, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(subdivision.nbytes for subdivision in self.subdivisions)

    @property
    def nnz(self) -> int:
        """Stored scalars."""
        return sum(subdivision.nnz for subdivision in self.subdivisions)

    @property
    def row_starts(self) -> list[int]:
        """First row of each subdivision."""
        return [subdivision.row_start for subdivision in self.subdivisions]

    def same_layout(self, other: MatrixIndex) -> bool:
        """Tell whether another index cuts a matrix of the same kind in the same way; checksums may differ."""
        return replace(self, subdivisions=_outlined(self)) == replace(other, subdivisions=_outlined(other))

    def part_nbytes(self, part: Part) -> int:
        """Return the bytes of a part of all pieces together."""
        return sum(subdivision.part_nbytes(part) for subdivision in self.subdivisions)

    def view(self, number: int, buffer: Array, structure: Array | None = None) -> SparseFormat:
        """Return subdivision ``number`` as a matrix whose arrays are views of byte buffers that hold it.

        ``buffer`` holds the whole piece, or only its values if ``structure`` holds the rest.
        """
        subdivision = self.subdivisions[number]
        arrays = {}
        for field in subdivision.fields:
            source, start = buffer, field.offset
            if structure is not None and field.part == "structure":
                source = structure
            elif structure is not None:
                start -= subdivision.values_start
            arrays[field.name] = source[start : start + field.nbytes].view(field.dtype).reshape(field.shape)
        shape = (subdivision.row_stop - subdivision.row_start, self.shape[1])
        return format_named(self.format_name).from_arrays(shape, self.dtype, arrays, self.parameters)

    def to_json(self) -> dict[str, Any]:
        """Return the index as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> MatrixIndex:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        StoreError
            If a part is missing, of the wrong kind, or does not fit the others.
        """
        try:
            index = TypeAdapter(cls).validate_python(data)
            index._check()
        except (PenstockError, ValueError, TypeError, IndexError) as error:
            raise StoreError(f"the store's index is damaged ({error}); build the store again") from error
        return index

    def _check(self) -> None:
        """Lay out every slab again from the shapes of its arrays, and compare."""
        if self.dtype not in ("float64", "float32") or self.shape[1] < 0:
            raise InputError(f"a matrix of {self.shape[1]} columns and type {self.dtype} cannot be")
        row = 0
        for number, subdivision in enumerate(self.subdivisions):
            arrays = {f.name: np.broadcast_to(np.zeros((), f.dtype), f.shape) for f in subdivision.fields}
            shape = (subdivision.row_stop - row, self.shape[1])
            slab = format_named(self.format_name).from_arrays(shape, self.dtype, arrays, self.parameters)
            slab.check_shapes()
            # How many of the stored scalars are padding cannot be told from shapes.
            scalars = sum(math.prod(f.shape) for f in subdivision.fields if f.dtype.startswith("float"))
            laid_out = lay_out(slab, row, min(max(subdivision.nnz, 0), scalars))
            if replace(subdivision, checksums=None) != laid_out:
                raise InputError(f"subdivision {number} is not laid out as its rows and arrays say")
            row = subdivision.row_stop
        if row != self.shape[0]:
            raise InputError(f"the subdivisions hold {row} of {self.shape[0]} rows")


def _outlined(index: MatrixIndex) -> tuple[Subdivision, ...]:
    """Return the subdivisions as outlines know them: without checksums, and with padding counted as entries."""
    return tuple(replace(subdivision, nnz=0, checksums=None) for subdivision in index.subdivisions)


@dataclass(frozen=True)
class _Kind:
    """What all slabs of a matrix share."""

    format: type[SparseFormat]
    columns: int
    dtype: str
    values_dtype: str
    row_granularity: int
    parameters: dict[str, int]

    @classmethod
    def of(cls, slab: SparseFormat) -> _Kind:
        types = str(slab.dtype), str(slab.values_dtype)
        return cls(type(slab), slab.shape[1], *types, slab.row_granularity, slab.parameters())


class IndexBuilder:
    """Collects the index of a matrix while its slabs pass by.

    Parameters
    ----------
    shape : (int, int), optional
        Expected shape of the whole matrix; refused if the slabs do not add up to it.
    """

    def __init__(self, shape: tuple[int, int] | None = None) -> None:
        self.shape = None if shape is None else (int(shape[0]), int(shape[1]))
        self._subdivisions: list[Subdivision] = []
        self._kind: _Kind | None = None  # of the first slab, which is not kept itself

    @property
    def _rows(self) -> int:
        return self._subdivisions[-1].row_stop if self._subdivisions else 0

    def add(self, slab: SparseFormat) -> Subdivision:
        """Lay out the next slab and return its description.

        Raises
        ------
        InputError
            If it differs from the first in columns, format or types.
        """
        kind = _Kind.of(slab)
        first = self._kind = self._kind or kind
        expected = self.shape[1] if self.shape else first.columns
        if kind.columns != expected:
            raise InputError(f"slab {len(self._subdivisions)} has {kind.columns} columns instead of {expected}")
        if replace(kind, parameters=first.parameters) != first:
            raise InputError(
                f"slab {len(self._subdivisions)} is {slab.name} of {slab.values_dtype}, the first one is "
                f"{first.format.name} of {first.values_dtype}; all slabs must have one format, block size and type"
            )
        subdivision = lay_out(slab, self._rows)
        self._subdivisions.append(subdivision)
        return subdivision

    def set_checksums(self, piece: np.ndarray[Any, Any]) -> None:
        """Attach the checksums of its piece to the subdivision added last."""
        last = self._subdivisions[-1]
        structure, values = (zlib.crc32(piece[last.bytes_of(part)].data) for part in ("structure", "values"))
        self._subdivisions[-1] = replace(last, checksums=(structure, values))

    def finish(self) -> MatrixIndex:
        """Return the index.

        Raises
        ------
        InputError
            If there was no slab, or their rows do not add up to the expected shape.
        """
        if self._kind is None:
            raise InputError("no row slab was given; a matrix needs at least one row")
        shape = self.shape or (self._rows, self._kind.columns)
        if self._rows != shape[0]:
            raise InputError(f"the slabs hold {self._rows} rows together, but the shape says {shape[0]}")
        nnz = sum(subdivision.nnz for subdivision in self._subdivisions)
        parameters = {**self._kind.parameters, **self._kind.format.tuned(nnz, shape[0])}
        return MatrixIndex(shape, self._kind.dtype, self._kind.format.name, parameters, tuple(self._subdivisions))


def lay_out(slab: SparseFormat, row_start: int, nnz: int | None = None) -> Subdivision:
    """Return where the arrays of a slab, real or an outline, lie in one contiguous piece; its nnz, if known, is not counted."""
    offset, fields = 0, []
    for part in ("structure", "values"):
        for name, array in slab.arrays().items():
            field = ArrayField(name, str(np.dtype(array.dtype)), tuple(array.shape), offset)
            if field.part == part:
                fields.append(field)
                offset = _round_up(offset + field.nbytes, _ARRAY_ALIGNMENT)
        offset = _round_up(offset, PAGE_NBYTES)
    nbytes = max(offset, PAGE_NBYTES)
    if nnz is None:
        outline = not any(slab.values.strides)  # one zero, broadcast: there is no padding in it to be counted
        nnz = int(slab.values.size) if outline else slab.nnz
    return Subdivision(row_start, row_start + slab.shape[0], nnz, tuple(fields), nbytes)


def index_of(slabs: Iterable[SparseFormat], shape: tuple[int, int] | None = None) -> MatrixIndex:
    """Return the index that a store of these slabs, real ones or outlines, would have."""
    builder = IndexBuilder(shape)
    for slab in slabs:
        builder.add(slab)
    return builder.finish()


def as_matrix(A: Any) -> SparseFormat:
    """Return a matrix in a penstock format; SciPy CSR and BSR are validated first, and share their arrays where types allow.

    Raises
    ------
    InputError
        If it is neither, or not valid.
    """
    if scipy.sparse.issparse(A):
        if A.format not in ("csr", "bsr"):
            raise InputError(f"a matrix or row slab must be CSR or BSR, not {A.format.upper()}; call .tocsr()")
        A = BsrMatrix.from_bsr(A) if A.format == "bsr" else CsrMatrix.from_csr(A)
    if not isinstance(A, SparseFormat):
        raise InputError(
            f"a matrix or row slab must be a SciPy CSR or BSR matrix or a penstock format, not {type(A).__name__}"
        )
    return A


def as_slab(slab: Any) -> SparseFormat:
    """Return a row slab as :func:`as_matrix` does, with int32 offsets."""
    matrix = as_matrix(slab)
    return matrix.rows(0, matrix.shape[0])  # a view, with offsets as a subdivision holds them


def pack(slab: SparseFormat, subdivision: Subdivision, buffer: np.ndarray[Any, Any]) -> None:
    """Write the arrays of a slab into a byte buffer of ``subdivision.nbytes``; gaps become zeros."""
    buffer[:] = 0
    for field in subdivision.fields:
        target = buffer[field.offset : field.offset + field.nbytes].view(field.dtype).reshape(field.shape)
        target[...] = slab.arrays()[field.name]
