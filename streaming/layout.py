"""How a row slab becomes one contiguous piece of bytes, and the index that describes all pieces of a matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse

from penstock.spmv import Array, BsrMatrix, CsrMatrix, InputError, SparseFormat, StoreError, format_named
from penstock.streaming.budget import PAGE_NBYTES

__all__ = ["ArrayField", "IndexBuilder", "MatrixIndex", "Subdivision", "as_slab", "index_of", "pack"]

_ARRAY_ALIGNMENT = 256


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


@dataclass(frozen=True)
class ArrayField:
    """One array inside a slab: ``nbytes`` bytes from ``offset`` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


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
        Where its arrays lie.
    nbytes : int
        Length of the piece, padding to whole pages included.
    checksum : int or None
        CRC-32 of the piece; None while it exists in a plan only.
    """

    row_start: int
    row_stop: int
    nnz: int
    fields: tuple[ArrayField, ...]
    nbytes: int
    checksum: int | None = None

    def __str__(self) -> str:
        return f"rows {self.row_start} to {self.row_stop - 1}"


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

    def view(self, number: int, buffer: Array) -> SparseFormat:
        """Return subdivision ``number`` as a matrix whose arrays are views of a byte buffer that holds it."""
        subdivision = self.subdivisions[number]
        arrays = {
            field.name: buffer[field.offset : field.offset + field.nbytes].view(field.dtype).reshape(field.shape)
            for field in subdivision.fields
        }
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
            If a part is missing or of the wrong kind.
        """
        try:
            subdivisions = tuple(
                Subdivision(
                    **{
                        **entry,
                        "fields": tuple(ArrayField(**{**f, "shape": tuple(f["shape"])}) for f in entry["fields"]),
                    }
                )
                for entry in data["subdivisions"]
            )
            rows, columns = data["shape"]
            index = cls(
                shape=(int(rows), int(columns)),
                dtype=str(np.dtype(data["dtype"])),
                format_name=format_named(data["format_name"]).name,
                parameters=dict(data["parameters"]),
                subdivisions=subdivisions,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"the store's index is damaged ({error!r}); build the store again") from error
        stops = [0, *(subdivision.row_stop for subdivision in subdivisions)]
        if [s.row_start for s in subdivisions] != stops[:-1] or stops[-1] != index.shape[0]:
            raise StoreError(
                "the store's index is damaged (its subdivisions do not cover the rows); build the store again"
            )
        if any(f.offset < 0 or f.offset + f.nbytes > s.nbytes for s in subdivisions for f in s.fields):
            raise StoreError("the store's index is damaged (an array leaves its subdivision); build the store again")
        return index


class IndexBuilder:
    """Collects the index of a matrix while its slabs pass by.

    Parameters
    ----------
    shape : (int, int), optional
        Expected shape of the whole matrix; refused if the slabs do not add up to it.
    """

    def __init__(self, shape: tuple[int, int] | None = None) -> None:
        self.shape = shape
        self._subdivisions: list[Subdivision] = []
        self._first: SparseFormat | None = None

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
        first = self._first = self._first if self._first is not None else slab
        expected = self.shape[1] if self.shape else first.shape[1]
        if slab.shape[1] != expected:
            raise InputError(f"slab {len(self._subdivisions)} has {slab.shape[1]} columns instead of {expected}")
        same = (slab.name, slab.dtype, slab.values_dtype) == (first.name, first.dtype, first.values_dtype)
        if not same or slab.row_granularity != first.row_granularity:
            raise InputError(
                f"slab {len(self._subdivisions)} is {slab.name} of {slab.values_dtype}, the first one is {first.name} of "
                f"{first.values_dtype}; all slabs must have one format, block size and type"
            )
        offset, fields = 0, []
        for name, array in slab.arrays().items():
            fields.append(ArrayField(name, str(np.dtype(array.dtype)), tuple(array.shape), offset))
            offset = _round_up(offset + array.nbytes, _ARRAY_ALIGNMENT)
        nbytes = max(_round_up(offset, PAGE_NBYTES), PAGE_NBYTES)
        subdivision = Subdivision(self._rows, self._rows + slab.shape[0], slab.nnz, tuple(fields), nbytes)
        self._subdivisions.append(subdivision)
        return subdivision

    def set_checksum(self, checksum: int) -> None:
        """Attach a checksum to the subdivision added last."""
        self._subdivisions[-1] = replace(self._subdivisions[-1], checksum=checksum)

    def finish(self) -> MatrixIndex:
        """Return the index.

        Raises
        ------
        InputError
            If there was no slab, or their rows do not add up to the expected shape.
        """
        if self._first is None:
            raise InputError("no row slab was given; a matrix needs at least one row")
        shape = self.shape or (self._rows, self._first.shape[1])
        if self._rows != shape[0]:
            raise InputError(f"the slabs hold {self._rows} rows together, but the shape says {shape[0]}")
        nnz = sum(subdivision.nnz for subdivision in self._subdivisions)
        parameters = {**self._first.parameters(), **type(self._first).tuned(nnz, shape[0])}
        return MatrixIndex(shape, str(self._first.dtype), self._first.name, parameters, tuple(self._subdivisions))


def index_of(slabs: Iterable[SparseFormat], shape: tuple[int, int] | None = None) -> MatrixIndex:
    """Return the index that a store of these slabs, real ones or outlines, would have."""
    builder = IndexBuilder(shape)
    for slab in slabs:
        builder.add(slab)
    return builder.finish()


def as_slab(slab: Any) -> SparseFormat:
    """Return a row slab in a penstock format with int32 offsets; SciPy CSR and BSR are validated first.

    Raises
    ------
    InputError
        If it is neither, or not valid.
    """
    if scipy.sparse.issparse(slab):
        if slab.format not in ("csr", "bsr"):
            raise InputError(f"a row slab must be CSR or BSR, not {slab.format.upper()}; call .tocsr()")
        slab = BsrMatrix.from_bsr(slab) if slab.format == "bsr" else CsrMatrix.from_csr(slab)
    if not isinstance(slab, SparseFormat):
        raise InputError(
            f"a row slab must be a SciPy CSR or BSR matrix or a penstock format, not {type(slab).__name__}"
        )
    arrays = slab.arrays()
    return slab if arrays["row_offsets"].dtype == np.int32 else slab.rows(0, slab.shape[0])


def pack(slab: SparseFormat, subdivision: Subdivision, buffer: np.ndarray[Any, Any]) -> None:
    """Write the arrays of a slab into a byte buffer of ``subdivision.nbytes``; gaps become zeros."""
    buffer[:] = 0
    for field in subdivision.fields:
        target = buffer[field.offset : field.offset + field.nbytes].view(field.dtype).reshape(field.shape)
        target[...] = slab.arrays()[field.name]
