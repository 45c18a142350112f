"""An image in fewer digits of a stored matrix, joined from its subdivisions while they pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from penstock.spmv import Array, Device, InputError, SparseMatrix, format_named
from penstock.spmv.formats.symmetric_image import SymmetricImageMatrix, block_ones, lowered
from penstock.streaming.planning.workload import Ring
from penstock.streaming.stores.base import Store, has_planes
from penstock.streaming.stores.host_planes import completed, high_words, joined
from penstock.streaming.stores.matrix_index import MatrixIndex
from penstock.streaming.stores.planes import count_of_values
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


def image_nbytes(index: MatrixIndex, values_dtype: Any) -> int:
    """Return the bytes of the image of a stored matrix of float64, without corrections of its diagonal."""
    fields = [field for subdivision in index.subdivisions for field in subdivision.fields]
    structure = sum(field.nbytes for field in fields if field.part != "values")
    values = sum(field.nbytes // 8 for field in fields if field.part == "values")
    itemsize = np.dtype(values_dtype).itemsize
    exponents = values // index.block_size**2 if itemsize == 2 else 0
    return int(structure + itemsize * values + exponents)


def corrections_nbytes(index: MatrixIndex) -> int:
    """Return the bytes of the corrections of the diagonal of an image."""
    corrected = index.format_name == SymmetricImageMatrix.of_format
    return 4 * index.shape[0] * index.block_size if corrected else 0


def joining_nbytes(index: MatrixIndex) -> int:
    """Return the bytes in which a GPU joins the planes of a subdivision of a matrix."""
    return 8 * max(map(count_of_values, index.subdivisions), default=0)


def can_be_rounded(index: MatrixIndex, values_dtype: Any) -> bool:
    """Return whether a stored matrix has images of a type: 16 bits need dense blocks, each of which has an exponent."""
    wide = np.dtype(values_dtype) == np.float32
    return wide or (index.format_name == SymmetricImageMatrix.of_format and index.block_size > 1)


def structures_of(image: SparseMatrix, index: MatrixIndex) -> list[dict[str, Array]]:
    """Return the offsets and column indices of the subdivisions of a stored matrix from its image; views, but for offsets."""
    starts, arrays, structures = _starts(index), image.arrays(), list[dict[str, Array]]()
    for subdivision in index.subdivisions:
        structure = {}
        for field in subdivision.fields:
            if field.part == "structure":
                first = starts[subdivision.row_start][field.name]
                part = arrays[field.name][first : first + field.shape[0]]
                structure[field.name] = (part - part[:1]).astype(field.dtype) if field.name in _OFFSETS else part
        structures.append(structure)
    return structures


def image_of_store(store: Store, values_dtype: Any, device: Device) -> SparseMatrix:
    """Return an image in memory, on a device, of a matrix that is streamed from a store through two slots.

    Of two planes only the high words are read.
    """
    lost, source = None, store
    if has_planes(store):
        lost, source = store.corrections(), high_words(store)
    with StreamedMatrix(source, 2 * max(source.index.sizes["whole"]), device=device, ring=Ring(slots=2)) as A:
        return image_of_streamed(A, values_dtype, lost)


def completed_by(image: object, store: Store) -> Store:
    """Return the store from which a matrix is streamed beside its image: of two planes, an image in float32 has one already."""
    if not (isinstance(image, SparseMatrix) and has_planes(store)):
        return store
    return completed(store, image) if image.values_dtype == np.float32 else joined(store, image.device)


def image_of_streamed(A: StreamedMatrix, values_dtype: Any, lost: Array | None = None) -> SparseMatrix:
    """Return an image of a streamed matrix in memory, on its device; one sweep.

    ``lost`` are the corrections of an image in float32, if A is that image without them. A matrix is refused that has no image of
    this type.
    """
    index, xp, dtype = A.store.index, A.device.xp, np.dtype(values_dtype)
    if not (can_be_joined(index) and can_be_rounded(index, dtype)):
        raise InputError(
            f"a matrix stored in {index.format_name} with {index.block_size} a block has no image in {dtype}"
        )
    corrected, size = index.format_name == SymmetricImageMatrix.of_format, index.block_size
    lengths: dict[str, int] = {}
    for subdivision in index.subdivisions:
        for field in subdivision.fields:
            length = field.shape[0] - (field.name in _OFFSETS)
            lengths[field.name] = lengths.get(field.name, 0) + length
    arrays: dict[str, Array] = {}
    for field in index.subdivisions[0].fields:
        of_field = dtype if field.part == "values" else np.int64 if field.name in _OFFSETS else field.dtype
        arrays[field.name] = xp.empty(
            (lengths[field.name] + (field.name in _OFFSETS), *field.shape[1:]), dtype=of_field
        )
    starts = _starts(index)
    if corrected:
        exponents = xp.zeros(lengths["column_indices"] if dtype == np.int16 else 0, dtype=np.uint8)
    if measured := corrected and (lost is None or dtype == np.int16):
        ones = block_ones(index.shape[0], size, A.device)
        sums, diagonal = xp.zeros_like(ones), xp.zeros((index.shape[0] // size, size, size))

    def visit(first_row: int, slab: SparseMatrix) -> None:
        for name, part in slab.arrays().items():
            start = starts[first_row][name]
            if corrected and name == "values":
                low, of_blocks = lowered(part, size, dtype, A.device)
                arrays[name][start : start + len(part)] = low
                first = starts[first_row]["column_indices"]
                exponents[first : first + of_blocks.size] = of_blocks
                if measured:
                    slab.apply_slab(first_row, ones, sums, 1.0, 0.0)
                    slab.add_diagonal_blocks(first_row, diagonal)
            elif name in _OFFSETS:
                arrays[name][start + 1 : start + part.size] = part[1:] + starts[first_row]["column_indices"]
            else:
                arrays[name][start : start + len(part)] = part

    for name in _OFFSETS:
        if name in arrays:
            arrays[name][0] = 0
    A.visit_slabs(visit)
    if not corrected:
        return format_named(index.format_name).from_arrays(index.shape, index.dtype, arrays, index.parameters)
    none = xp.zeros((index.shape[0] // size, size, size), dtype=np.float32)
    own = {"exponents": exponents, "corrections": none}
    image = SymmetricImageMatrix.from_arrays(index.shape, index.dtype, {**arrays, **own}, index.parameters)
    if lost is None:
        return image.corrected(sums, diagonal)
    lost = A.device.asarray(lost)
    if dtype == np.float32:
        return replace(image, corrections=lost)
    return image.corrected(sums + lost.reshape(sums.shape), diagonal + lost)


def _starts(index: MatrixIndex) -> dict[int, dict[str, int]]:
    """Return where the arrays of each subdivision begin in those of the whole matrix, by its first row."""
    starts: dict[int, dict[str, int]] = {}
    now = dict.fromkeys((field.name for field in index.subdivisions[0].fields), 0)
    for subdivision in index.subdivisions:
        starts[subdivision.row_start] = dict(now)
        for field in subdivision.fields:
            now[field.name] += field.shape[0] - (field.name in _OFFSETS)
    return starts
