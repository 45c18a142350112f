"""Packs row slabs into contiguous pieces of bytes and builds their index."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import scipy.sparse

from penstock.spmv import (
    CPU,
    BsrMatrix,
    BudgetError,
    CsrMatrix,
    InputError,
    SparseMatrix,
    format_named,
    format_nbytes,
    parse_nbytes,
)
from penstock.spmv.formats.partition import count_granules, row_slabs
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.formats.validation import in_csr
from penstock.spmv.host_memory import available_nbytes
from penstock.spmv.model.suggestion import Suggestion
from penstock.streaming.stores.buffers import PAGE_NBYTES
from penstock.streaming.stores.matrix_index import MatrixIndex, Subdivision, lay_out

#: A piece of a matrix is padded to pages, its structure and its values each.
PADDING_NBYTES = 2 * PAGE_NBYTES


@dataclass(frozen=True)
class _Kind:
    """The properties that all slabs of a matrix share."""

    format: type[SparseMatrix]
    columns: int
    dtype: str
    values_dtype: str
    row_granularity: int
    parameters: dict[str, int]

    @classmethod
    def of(cls, slab: SparseMatrix) -> _Kind:
        types = str(slab.dtype), str(slab.values_dtype)
        return cls(type(slab), slab.shape[1], *types, slab.row_granularity, slab.parameters())


class IndexBuilder:
    """Builds the index of a matrix slab by slab and checks that they add up to the expected shape, if any."""

    def __init__(self, shape: tuple[int, int] | None = None) -> None:
        self.shape = None if shape is None else (int(shape[0]), int(shape[1]))
        self._subdivisions: list[Subdivision] = []
        self._kind: _Kind | None = None  # of the first slab, which itself can be freed

    @property
    def _rows(self) -> int:
        return self._subdivisions[-1].row_stop if self._subdivisions else 0

    def add(self, slab: SparseMatrix) -> Subdivision:
        """Lay out the next slab, of the same columns, format and types as the first, and return its description."""
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
        """Set the checksums of the last subdivision from its piece."""
        last = self._subdivisions[-1]
        structure, values = (zlib.crc32(piece[last.bytes_of(part)].data) for part in ("structure", "values"))
        self._subdivisions[-1] = replace(last, checksums=(structure, values))

    def finish(self) -> MatrixIndex:
        """Return the index, or raise an InputError without slabs or if the rows do not add up to the expected shape."""
        if self._kind is None:
            raise InputError("there is no row slab; a matrix needs at least one row")
        shape = self.shape or (self._rows, self._kind.columns)
        if self._rows != shape[0]:
            raise InputError(f"the slabs hold {self._rows} rows together, but the shape says {shape[0]}")
        nnz = sum(subdivision.nnz for subdivision in self._subdivisions)
        parameters = {**self._kind.parameters, **self._kind.format.whole_matrix_parameters(nnz, shape[0])}
        return MatrixIndex(shape, self._kind.dtype, self._kind.format.name, parameters, tuple(self._subdivisions))


def index_of(slabs: Iterable[SparseMatrix], shape: tuple[int, int] | None = None) -> MatrixIndex:
    """Return the index that a store of these slabs, real or symbolic, would have.

    Parameters
    ----------
    slabs : iterable of SparseMatrix
        Row slabs in order, all of one format and type; their values are not read.
    shape : (int, int), optional
        Of the matrix; by default that of all slabs together.

    Returns
    -------
    MatrixIndex

    Raises
    ------
    InputError
        If there is no slab, or slabs do not fit each other or the shape.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import index_of
    >>> index = index_of(Cantilever(nodes=200, dof=3).symbolic_slabs(50))  # never assembled
    >>> index.shape, len(index.subdivisions), f"{index.part_nbytes('whole') / 1e9:.1f} GB"
    ((24000000, 24000000), 50, '16.3 GB')
    """
    builder = IndexBuilder(shape)
    for slab in slabs:
        builder.add(slab)
    return builder.finish()


def rough_index(
    suggestion: Suggestion, shape: tuple[int, int], dtype: Any, entries: np.ndarray[Any, Any], count: int
) -> MatrixIndex:
    """Return the index that a matrix would have in a format, before it is converted: bytes in proportion to the entries.

    ``entries`` are those up to the end of each row.
    """
    parameters = {name: int(value) for name, value in suggestion.parameters.items()}
    size = parameters.get("block_size", 1)
    # Of the type of the entries, all of which would be converted for a search otherwise.
    targets = np.ceil(np.arange(1, count) * (int(entries[-1]) / count)).astype(entries.dtype)
    bounds = sorted({0, *(np.searchsorted(entries, targets) // size * size).tolist(), shape[0]})
    total = max(int(entries[-1]), 1)
    subdivisions = []
    for start, stop in itertools.pairwise(bounds):
        nnz = int(entries[stop - 1]) - (int(entries[start - 1]) if start else 0)
        subdivisions.append(Subdivision(start, stop, nnz, (), suggestion.nbytes * nnz // total + PADDING_NBYTES))
    return MatrixIndex(shape, str(dtype), suggestion.format_name, parameters, tuple(subdivisions))


def as_matrix(A: Any) -> SparseMatrix:
    """Return a matrix in a penstock format; SciPy CSR and BSR are validated and share their arrays where types allow."""
    if scipy.sparse.issparse(A):
        if A.format not in ("csr", "bsr"):
            raise InputError(f"a matrix or row slab must be CSR or BSR, not {A.format.upper()}; call .tocsr()")
        A = BsrMatrix.from_bsr(A) if A.format == "bsr" else CsrMatrix.from_csr(A)
    if not isinstance(A, SparseMatrix):
        raise InputError(
            f"a matrix or row slab must be a SciPy CSR or BSR matrix or a penstock format, not {type(A).__name__}"
        )
    return A


def as_slab(slab: Any) -> SparseMatrix:
    """Return a row slab as :func:`as_matrix` does, with int32 offsets."""
    matrix = as_matrix(slab)
    return matrix.rows(0, matrix.shape[0])  # a view, with the offsets of a subdivision


def pack(slab: SparseMatrix, subdivision: Subdivision, buffer: np.ndarray[Any, Any]) -> None:
    """Write the arrays of a slab into a byte buffer of ``subdivision.nbytes``; gaps are filled with zeros."""
    buffer[:] = 0
    for field in subdivision.fields:
        target = buffer[field.offset : field.offset + field.nbytes].view(field.dtype).reshape(field.shape)
        target[...] = slab.arrays()[field.name]


class SlabConverter:
    """Converts row slabs to the format of a store.

    With format ``"auto"``, SciPy slabs become BSR if the first one is made of dense blocks; others, and slabs in a penstock
    format, stay as they are. A block size of ``"auto"`` is detected in the first slab.
    """

    def __init__(self, format_name: str = "auto", block_size: int | Literal["auto"] = "auto") -> None:
        self._format: type[SparseMatrix] | None = None if format_name == "auto" else format_named(format_name)
        self._block_size = block_size
        self._row = 0
        self._parameters: dict[str, int] | None = None

    def convert(self, source: Any) -> SparseMatrix:
        """Return the next slab, with int32 offsets, or raise an InputError if it is not a valid SciPy or penstock matrix."""
        slab = as_slab(source)
        first_row, self._row = self._row, self._row + slab.shape[0]
        unchanged = self._format is None and isinstance(source, SparseMatrix)
        if unchanged or not isinstance(slab, CsrMatrix):
            return slab
        if self._parameters is None:
            self._decide(slab)
        if self._format is None or isinstance(slab, self._format):
            return slab
        converted = self._format.slab_from_csr(slab, first_row, check=False, **self._parameters or {})
        chosen = converted.parameters()
        if self._parameters is not None and "sorting_scope" in chosen:  # later slabs share what the first one needed
            self._parameters.setdefault("sorting_scope", chosen["sorting_scope"])
        return converted.rows(0, converted.shape[0])

    def _decide(self, slab: CsrMatrix) -> None:
        """Choose format and block size by the first slab: the fewest bytes."""
        statistics, sizes = MatrixStatistics.of(slab), [self._block_size]
        if self._block_size == "auto":
            sizes = [1, *statistics.fills]
        blocked = self._format or BsrMatrix

        def nbytes(size: Any) -> int:
            if self._format is None and size == 1:
                return CsrMatrix.predicted_nbytes(statistics)
            return blocked.predicted_nbytes(statistics, block_size=size)

        best: Any = min(sizes, key=nbytes)
        if self._format is None and best > 1:
            self._format = BsrMatrix
        self._parameters = {"block_size": best} if self._format is not None and self._format.traits.blocked else {}


# Relative to the largest entry of a product: assembled matrices are symmetric to about a thousand ulps.
_ASYMMETRY = 1e-9


def symmetric_slabs(slabs: Iterable[Any], rows: int, format_name: str) -> Iterator[Any]:
    """Yield SciPy slabs of all rows; an InputError after the last one if half is to be stored of a matrix that is not symmetric.

    ``A v`` and the transpose times v are compared for a vector of random numbers; the three vectors must fit the memory.
    """
    if format_name == "auto" or not format_named(format_name).traits.half:
        yield from slabs
        return
    if (needed := 4 * 8 * rows) > (room := available_nbytes()):
        raise BudgetError(
            f"to compare rows and columns of half a matrix, vectors of {rows} rows take {format_nbytes(needed)}, but "
            f"{format_nbytes(room)} of memory are available; store it as csr or bsr"
        )
    v, start = np.random.default_rng(0).standard_normal(rows), 0
    image, mirrored = np.zeros(rows), np.zeros(rows)
    for slab in slabs:
        stop = start + slab.shape[0]
        if slab.shape[1] != rows:
            raise InputError(
                f"{format_name} stores half of a square matrix; this one has {rows} rows, {slab.shape[1]} columns"
            )
        image[start:stop] = slab @ v
        mirrored += slab.T @ v[start:stop]
        yield slab
        start = stop
    difference = np.abs(image - mirrored)
    if difference.max(initial=0.0) > _ASYMMETRY * np.abs(image).max(initial=0.0):
        raise InputError(
            f"the matrix is not symmetric: column and row {int(difference.argmax())} differ, so its half does not stand for it; "
            "store it as csr or bsr"
        )


# Whole blocks of 1 to 8 rows, by which the format of a matrix is chosen.
_FIRST_ROWS = 840


def row_slabs_of(
    source: Any,
    format_name: str = "auto",
    *,
    block_size: int | Literal["auto"] = "auto",
    slab: int | str | None = None,
) -> Iterable[Any]:
    """Return row slabs; a whole matrix is cut into pieces of about ``slab`` bytes, by default of 1 MiB or more, 64 at most.

    SciPy matrices are iterable, row by row, which is never wanted here. Slabs end where the format that they will have can be
    cut.
    """
    if isinstance(source, SparseMatrix) and (format_name == "auto" or not isinstance(source, CsrMatrix)):
        whole = source.to_device(CPU)
        return row_slabs(whole, min(_pieces(whole.nbytes, slab), max(1, count_granules(whole))))
    if isinstance(source, SparseMatrix):
        source = source.to_csr()
    if not scipy.sparse.issparse(source):
        if slab is not None:
            raise InputError(
                "slab cuts a whole SciPy or penstock matrix; row slabs become the subdivisions as they come: leave slab out, "
                "or hand over the matrix"
            )
        return source  # type: ignore[no-any-return]
    A = source if source.format == "bsr" else in_csr(source, "the matrix")
    first = A if A.format == "bsr" else A[:_FIRST_ROWS]
    multiple = SlabConverter(format_name, block_size).convert(first).row_granularity if A.shape[0] else 1
    bounds = _bounds(A, _pieces(A.data.nbytes + A.indices.nbytes, slab), multiple)
    slabs = (_rows_of(A, start, stop) for start, stop in itertools.pairwise(bounds))
    return symmetric_slabs(slabs, A.shape[0], format_name)


def recut(
    slabs: Iterable[Any], nbytes: int, format_name: str = "auto", block_size: int | Literal["auto"] = "auto"
) -> tuple[Iterator[scipy.sparse.csr_array], int | Literal["auto"]]:
    """Return the same rows in SciPy slabs of about ``nbytes`` bytes, and the block size for which they are cut.

    They end where the format can be cut, as that of an image has to be; with ``"auto"`` at multiples of 840 rows, which are whole
    blocks of 1 to 8. A block size of ``"auto"`` is detected in the first rows of a format of blocks.
    """
    rest, multiple = iter(slabs), _FIRST_ROWS
    first: list[Any] = []
    while sum(of.shape[0] for of in first) < _FIRST_ROWS and (slab := next(rest, None)) is not None:
        first.append(slab)
    if format_name != "auto" and any(of.shape[0] for of in first):
        looked_at = scipy.sparse.vstack(first, format="csr")[:_FIRST_ROWS]
        of_format = SlabConverter(format_name, block_size).convert(looked_at)
        multiple = of_format.row_granularity
        if of_format.traits.blocked:
            block_size = int(of_format.parameters().get("block_size", multiple))
    return _recut(itertools.chain(first, rest), nbytes, multiple), block_size


def _recut(slabs: Iterable[Any], nbytes: int, multiple: int) -> Iterator[scipy.sparse.csr_array]:
    held: list[scipy.sparse.csr_array] = []
    for slab in slabs:
        held.append(scipy.sparse.csr_array(slab))
        if sum(12 * of.nnz for of in held) >= nbytes:
            whole = scipy.sparse.vstack(held, format="csr")
            each = max(1, whole.shape[0] * nbytes // max(1, 12 * whole.nnz) // multiple) * multiple
            last = whole.shape[0] // each * each
            yield from (whole[start : start + each] for start in range(0, last, each))
            held = [whole[last:]] if last < whole.shape[0] else []
            del whole
    if held:
        yield scipy.sparse.vstack(held, format="csr")


def _pieces(nbytes: int, slab: int | str | None) -> int:
    return max(1, min(64, nbytes >> 20)) if slab is None else -(-nbytes // parse_nbytes(slab))


def _bounds(A: Any, pieces: int, multiple: int) -> list[int]:
    """Return rows, multiples of ``multiple``, between which a SciPy matrix has pieces with about the same number of entries."""
    rows = 1 if A.format == "csr" else A.blocksize[0]  # of an entry of the offsets
    stops = np.arange(0, A.shape[0], multiple)
    targets = int(A.indptr[-1]) * np.arange(1, pieces) // pieces
    places = np.searchsorted(A.indptr[stops // rows], targets)
    inner = {int(stops[place]) for place in places if place < stops.size}
    return sorted({0, *inner, A.shape[0]})


def _rows_of(A: Any, start: int, stop: int) -> Any:
    if A.format == "csr":
        return A[start:stop]
    size = A.blocksize[0]
    offsets = A.indptr[start // size : stop // size + 1]
    blocks = slice(offsets[0], offsets[-1])
    arrays = (A.data[blocks], A.indices[blocks], offsets - offsets[0])
    return type(A)(arrays, shape=(stop - start, A.shape[1]))
