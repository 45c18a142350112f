"""An image in float32 of a stored matrix, joined from its subdivisions while they pass."""

from __future__ import annotations

import numpy as np

from penstock.spmv import Array, SparseMatrix, format_named
from penstock.streaming.stores.matrix_index import MatrixIndex
from penstock.streaming.streamed_matrix import StreamedMatrix

_OFFSETS = ("row_offsets", "chunk_offsets")


def can_be_joined(index: MatrixIndex) -> bool:
    """Return whether the arrays of the subdivisions, one after another, are those of the whole matrix."""
    for subdivision in index.subdivisions:
        for field in subdivision.fields:
            known = field.name in (*_OFFSETS, "column_indices", "values")
            if not known and field.nbytes:  # such as a permutation of rows
                return False
    return True


def image_nbytes(index: MatrixIndex) -> int:
    """Return the bytes of the image of a stored matrix of float64."""
    fields = [field for subdivision in index.subdivisions for field in subdivision.fields]
    return sum(field.nbytes // 2 if field.part == "values" else field.nbytes for field in fields)


def image_of_streamed(A: StreamedMatrix) -> SparseMatrix:
    """Return a matrix in memory, on the device of a streamed one, with its values rounded to float32; one sweep."""
    index, xp = A.store.index, A.device.xp
    lengths: dict[str, int] = {}
    for subdivision in index.subdivisions:
        for field in subdivision.fields:
            length = field.shape[0] - (field.name in _OFFSETS)
            lengths[field.name] = lengths.get(field.name, 0) + length
    arrays: dict[str, Array] = {}
    for field in index.subdivisions[0].fields:
        dtype = np.float32 if field.part == "values" else np.int64 if field.name in _OFFSETS else field.dtype
        arrays[field.name] = xp.empty((lengths[field.name] + (field.name in _OFFSETS), *field.shape[1:]), dtype=dtype)
    starts = _starts(index)

    def visit(first_row: int, slab: SparseMatrix) -> None:
        for name, part in slab.arrays().items():
            start = starts[first_row][name]
            if name in _OFFSETS:
                arrays[name][start + 1 : start + part.size] = part[1:] + starts[first_row]["column_indices"]
            else:
                arrays[name][start : start + len(part)] = part

    for name in _OFFSETS:
        if name in arrays:
            arrays[name][0] = 0
    A.visit_slabs(visit)
    return format_named(index.format_name).from_arrays(index.shape, index.dtype, arrays, index.parameters)


def _starts(index: MatrixIndex) -> dict[int, dict[str, int]]:
    """Return where the arrays of each subdivision begin in those of the whole matrix, by its first row."""
    starts: dict[int, dict[str, int]] = {}
    now = dict.fromkeys((field.name for field in index.subdivisions[0].fields), 0)
    for subdivision in index.subdivisions:
        starts[subdivision.row_start] = dict(now)
        for field in subdivision.fields:
            now[field.name] += field.shape[0] - (field.name in _OFFSETS)
    return starts
