"""An image in fewer digits of a stored matrix, joined from its subdivisions while they pass."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.spmv import Array, Device, DeviceError, InputError, SparseMatrix, format_named
from penstock.spmv.formats.symmetric_image import SymmetricImageMatrix, add_block_sums, block_ones, lowered
from penstock.streaming.execution.budget import MemoryBudget
from penstock.streaming.planning.plan import StreamPlan
from penstock.streaming.planning.workload import Ring
from penstock.streaming.stores.base import PageLockable, Store, has_planes
from penstock.streaming.stores.buffers import aligned_buffer
from penstock.streaming.stores.host_planes import completed, high_words, joined
from penstock.streaming.stores.loading import load_part
from penstock.streaming.stores.matrix_index import MatrixIndex, Part
from penstock.streaming.stores.planes import count_of_values
from penstock.streaming.streamed_matrix import StreamedMatrix

_OFFSETS = ("row_offsets", "chunk_offsets")


def can_be_joined(index: MatrixIndex) -> bool:
    """Return whether the arrays of the subdivisions, one after another, are those of the whole matrix."""
    if index.cuts_chunks:
        return False
    for subdivision in index.subdivisions:
        for field in subdivision.fields:
            known = field.name in (*_OFFSETS, "column_indices", "values")
            if not known and field.nbytes:  # such as a permutation of rows
                return False
    return True


def image_nbytes(index: MatrixIndex, values_dtype: Any) -> int:
    """Return the bytes of the image of a stored matrix of float64, with the structure that the two share.

    Corrections of the diagonal are not among them.
    """
    fields = [field for subdivision in index.subdivisions for field in subdivision.fields]
    # Offsets of the whole matrix have 64 bits, and those of subdivisions are held beside them.
    structure = sum(
        field.nbytes + 8 * field.shape[0] * (field.name in _OFFSETS) for field in fields if field.part != "values"
    )
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


def image_and_matrix(
    store: Store,
    values_dtype: Any,
    plan: StreamPlan,
    device: Device,
    image: SparseMatrix | None = None,
) -> tuple[SparseMatrix, StreamedMatrix]:
    """Return an image of a stored matrix, which is made unless it is given, and the matrix itself, which is streamed.

    The two share offsets and column indices, which are read once; the plan is one with ``Ring(shared_structure=True)``. Of a
    store of two planes the image reads the high words. A matrix that has no image of this type is refused.
    """
    structure = structure_of_store(store, device) if image is None else image.arrays()
    if image is None and has_planes(store):
        image = image_of_store(store, values_dtype, device, structure)
    budget, structures = MemoryBudget(max(1, plan.storage_nbytes)), structures_of(structure, store.index)
    A = StreamedMatrix(completed_by(image, store), budget, device=device, plan=plan, structures=structures)
    try:
        return (image_of_streamed(A, values_dtype, structure=structure) if image is None else image), A
    except BaseException:
        A.close()
        raise


def image_of_store(
    store: Store, values_dtype: Any, device: Device, structure: dict[str, Array] | None = None
) -> SparseMatrix:
    """Return an image in memory, on a device, of a matrix that is streamed from a store through two slots.

    Of two planes only the high words are read. ``structure`` are the offsets and column indices, if they have been read before.
    """
    lost, source = None, store
    if has_planes(store):
        lost, source = store.corrections(), high_words(store)
    structures = None if structure is None else structures_of(structure, store.index)
    nbytes = 2 * max(source.index.sizes["whole" if structure is None else "values"])
    ring = Ring(slots=2, shared_structure=structure is not None)
    with StreamedMatrix(source, nbytes, device=device, ring=ring, structures=structures) as A:
        return image_of_streamed(A, values_dtype, lost, structure)


def structure_of_store(store: Store, device: Device) -> dict[str, Array]:
    """Return the offsets and column indices of a stored matrix as a whole, on a device."""
    source = high_words(store) if has_planes(store) else store  # which a GPU copies from where they are
    index, starts = source.index, _starts(source.index)
    arrays = _joined_arrays(index, np.dtype(np.float64), device, part="structure")
    if device.kind == "cuda" and isinstance(source, PageLockable):
        with suppress(DeviceError):  # from other memory a GPU copies more slowly
            source.page_lock()
    for number, subdivision in enumerate(index.subdivisions):
        nbytes = subdivision.part_nbytes("structure")
        buffer = aligned_buffer(nbytes) if device.kind == "cpu" else device.xp.empty(nbytes, dtype=np.uint8)
        load_part(source, number, buffer, "structure", device)
        for name, part in index.arrays(number, buffer, "structure").items():
            _place(arrays, starts[subdivision.row_start], name, part)
    return arrays


def structures_of(structure: dict[str, Array], index: MatrixIndex) -> list[dict[str, Array]]:
    """Return the offsets and column indices of the subdivisions of a stored matrix from those of the whole matrix.

    They are views, but for offsets.
    """
    starts, structures = _starts(index), list[dict[str, Array]]()
    for subdivision in index.subdivisions:
        pieces = {}
        for field in subdivision.fields:
            if field.part == "structure":
                first = starts[subdivision.row_start][field.name]
                piece = structure[field.name][first : first + field.shape[0]]
                pieces[field.name] = (piece - piece[:1]).astype(field.dtype) if field.name in _OFFSETS else piece
        structures.append(pieces)
    return structures


def completed_by(image: object, store: Store) -> Store:
    """Return the store from which a matrix is streamed beside its image: of two planes, an image in float32 has one already."""
    if not (isinstance(image, SparseMatrix) and has_planes(store)):
        return store
    return completed(store, image) if image.values_dtype == np.float32 else joined(store, image.device)


def image_of_streamed(
    A: StreamedMatrix, values_dtype: Any, lost: Array | None = None, structure: dict[str, Array] | None = None
) -> SparseMatrix:
    """Return an image of a streamed matrix in memory, on its device; one sweep.

    ``lost`` are the corrections of an image in float32, if A is that image without them, and ``structure`` are the offsets and
    column indices of the image, if they are there already. A matrix is refused that has no image of this type.
    """
    index, xp, dtype = A.store.index, A.device.xp, np.dtype(values_dtype)
    if not (can_be_joined(index) and can_be_rounded(index, dtype)):
        raise InputError(
            f"a matrix stored in {index.format_name} with {index.block_size} a block has no image in {dtype}"
        )
    corrected, size = index.format_name == SymmetricImageMatrix.of_format, index.block_size
    arrays = _joined_arrays(index, dtype, A.device, "whole" if structure is None else "values")
    for field in index.subdivisions[0].fields:
        if structure is not None and field.part == "structure":
            arrays[field.name] = structure[field.name]
    starts = _starts(index)
    if corrected:
        exponents = xp.zeros(arrays["column_indices"].size if dtype == np.int16 else 0, dtype=np.uint8)
    if measured := corrected and (lost is None or dtype == np.int16):
        ones = block_ones(index.shape[0], size, A.device)
        sums, diagonal = xp.zeros_like(ones), xp.zeros((index.shape[0] // size, size, size))

    def visit(first_row: int, slab: SparseMatrix) -> None:
        start = starts[first_row]
        for name, part in slab.arrays().items():
            if corrected and name == "values":
                low, of_blocks = lowered(part, size, dtype, A.device)
                _place(arrays, start, name, low)
                first = start["column_indices"]
                exponents[first : first + of_blocks.size] = of_blocks
                if measured:
                    add_block_sums(slab, first_row, ones, sums)
                    slab.add_diagonal_blocks(first_row, diagonal)
            elif name == "values" or structure is None:
                _place(arrays, start, name, part)

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
    return image.corrected(sums + lost.reshape(-1, size).T, diagonal + lost)


def _joined_arrays(index: MatrixIndex, values_dtype: np.dtype[Any], device: Device, part: Part) -> dict[str, Array]:
    """Return empty arrays for those of a part of all subdivisions, one after another."""
    xp, lengths = device.xp, dict[str, int]()
    for subdivision in index.subdivisions:
        for field in subdivision.fields:
            lengths[field.name] = lengths.get(field.name, 0) + field.shape[0] - (field.name in _OFFSETS)
    arrays: dict[str, Array] = {}
    for field in index.subdivisions[0].fields:
        if part not in ("whole", field.part):
            continue
        if field.name in _OFFSETS:
            arrays[field.name] = xp.zeros(lengths[field.name] + 1, dtype=np.int64)
        else:
            dtype = values_dtype if field.part == "values" else field.dtype
            arrays[field.name] = xp.empty((lengths[field.name], *field.shape[1:]), dtype=dtype)
    return arrays


def _place(arrays: dict[str, Array], starts: dict[str, int], name: str, part: Array) -> None:
    """Copy an array of a subdivision to its place in that of the whole matrix."""
    start = starts[name]
    if name in _OFFSETS:
        arrays[name][start + 1 : start + part.size] = part[1:] + starts["column_indices"]
    else:
        arrays[name][start : start + len(part)] = part


def _starts(index: MatrixIndex) -> dict[int, dict[str, int]]:
    """Return where the arrays of each subdivision begin in those of the whole matrix, by its first row."""
    starts: dict[int, dict[str, int]] = {}
    now = dict.fromkeys((field.name for field in index.subdivisions[0].fields), 0)
    for subdivision in index.subdivisions:
        starts[subdivision.row_start] = dict(now)
        for field in subdivision.fields:
            now[field.name] += field.shape[0] - (field.name in _OFFSETS)
    return starts
