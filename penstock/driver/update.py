"""New values for a matrix that is prepared: written where the old ones are, in memory or on disk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import numpy as np

from penstock.driver.inputs import GivenMatrix
from penstock.driver.made_matrix import MadeMatrixSource
from penstock.driver.matrix_checks import check_diagonal, check_matrix
from penstock.driver.null_space import KnownModes, NullSpace
from penstock.driver.open_system import OpenSystem
from penstock.driver.row_order import as_ordered
from penstock.spmv import CPU, CsrMatrix, InputError, SparseMatrix, format_named
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.streaming import FileStore, HostPlaneStore, HostStore, MadeStore, Store, StreamedMatrix
from penstock.streaming.image import completed_by, image_of_store, image_of_streamed
from penstock.streaming.stores.base import has_planes
from penstock.streaming.stores.buffers import aligned_buffer
from penstock.streaming.stores.host_planes import copy_in_memory, is_in_memory
from penstock.streaming.stores.planes import CompletedOnArrival

Writing = Callable[[], AbstractContextManager[None]]


def update_values(system: OpenSystem, given: GivenMatrix, writing: Writing) -> None:
    """Replace the values of an open system by those of a matrix with the same pattern.

    Everything is checked before anything is written. Values in memory are overwritten, or, if they are used where the caller
    has them, replaced by the new ones where the caller has these. A store on disk is written anew beside the old one, whose name
    it takes at the end.

    Raises
    ------
    InputError
        If the patterns differ, or the new matrix cannot be symmetric positive definite.
    """
    given = given.with_wide_vectors()
    if given.kind == "store":
        _update_from_store(system, given.matrix, writing)
        return
    if given.kind == "elements" or isinstance(system.source, MadeMatrixSource):
        _update_from_elements(system, given, writing)
        return
    A = system.A
    if given.kind == "operator" or not isinstance(A, SparseMatrix | StreamedMatrix) or system.placement is None:
        raise InputError(
            "only a sparse matrix has values that could replace those of a prepared one; pass one, or prepare the new operator"
        )
    statistics = _checked(given, system)
    matrix = statistics.matrix
    if system.pattern is not None:
        system.pattern.check(matrix)
    symmetry = check_matrix(statistics, "the new matrix", definite=system.request.chosen_method.definite)
    if system.null_space is not None:
        system.null_space.check(matrix)
    of = format_named(A.plan.index.format_name) if isinstance(A, StreamedMatrix) else A
    difference = symmetry.skew_norm if of.traits.half else 0.0
    streams = isinstance(system.matrix, StreamedMatrix)
    exact = given.for_claims(matrix, difference, A.device, streams=streams)
    unreachable = None
    if system.null_space is None and system.pattern is not None:
        unreachable = NullSpace.found(
            matrix, KnownModes(system.request.options, matrix.shape[0], system.request.block_size)
        )
    of_order = matrix
    if system.order is not None:
        of_order = as_ordered(system.order.matrix(matrix.to_csr()), matrix)
    writes: list[Callable[[], object]] = []
    rounds = streams and A.device.kind == "cuda"  # what arrives
    if isinstance(A, SparseMatrix) and not rounds:
        writes.append(partial(_write_resident, system, A, of_order))
    if isinstance(system.matrix, StreamedMatrix):
        writes.append(_streamed_write(system, system.matrix, of_order))
        if isinstance(A, SparseMatrix) and rounds and not isinstance(system.matrix.store, CompletedOnArrival):
            writes.append(partial(_refill_image, A, system.matrix))
    with writing():
        for write in writes:
            write()
        if system.streamed is not None:
            system.borrowed = system.uses(matrix.values)
        system.exact, system.difference, system.unreachable = exact, difference, unreachable


def _update_from_elements(system: OpenSystem, given: GivenMatrix, writing: Writing) -> None:
    """Make the values anew from another matrix of the same mesh, such as one of another material."""
    source, A, matrix = system.source, system.A, system.matrix
    if given.kind != "elements" or not isinstance(source, MadeMatrixSource):
        raise InputError(
            "a system that was prepared from a matrix of elements takes only another one of its mesh, such as "
            "matrix.with_material(factors), and other systems take none"
        )
    source.check_same_mesh(given.matrix)
    if not isinstance(matrix, StreamedMatrix):
        with writing():
            source.refill(cast(SparseMatrix, A), given.matrix)
        return
    store = source.refilled(cast(MadeStore, matrix.store), given.matrix)
    with writing():
        _reopen(system, matrix, store)


def _checked(given: GivenMatrix, system: OpenSystem) -> MatrixStatistics:
    on_host = system.A.device.kind == "cpu" or isinstance(system.matrix, StreamedMatrix)
    device = CPU if on_host else system.A.device
    if given.kind == "csr":
        return given.checked(given.moved(device, system.request.memory), system.A.device)
    return MatrixStatistics.of(CsrMatrix.from_csr(given.matrix.to_csr(), check=False).to_device(device))


def _write_resident(system: OpenSystem, A: SparseMatrix, matrix: CsrMatrix) -> None:
    if not system.borrowed:
        A.refill(matrix, check=False)
        return
    converted = type(A).from_csr(matrix, values_dtype=A.values_dtype, check=False, **A.layout()).to_device(A.device)
    for name, array in converted.arrays().items():
        if array.dtype.kind == "f":
            object.__setattr__(A, name, array)  # formats are frozen for everybody else
    system.borrowed = system.uses(matrix.values)


def _streamed_write(system: OpenSystem, A: StreamedMatrix, matrix: CsrMatrix) -> Callable[[], None]:
    """Do what may fail, and return what makes a streamed matrix use the new values."""
    store = CompletedOnArrival.underlying(A.store)
    if isinstance(store, FileStore | HostPlaneStore):
        refilled = store.refilled(matrix)  # another one; this matrix still reads the old one
        return lambda: _use_own_store(system, A, refilled)
    if not isinstance(store, HostStore):
        raise InputError(f"a {type(store).__name__} cannot be written; update from a store of the same layout")
    source = store.source
    if system.pattern is None:
        (store if source is None else source).check_pattern(matrix)
    of_caller = system.borrowed or system.of_store or system.stored is None
    if source is not None and of_caller:
        new = type(source).from_csr(matrix, values_dtype=source.values_dtype, check=False, **source.layout())
        another = HostStore.from_matrix(new, store.index.row_bounds)
        return lambda: _use_own_store(system, A, another, new)

    def refill() -> None:
        store.refill(matrix, A.device)
        A.reopen(store)

    return refill


def _use_own_store(system: OpenSystem, A: StreamedMatrix, store: Any, matrix: SparseMatrix | None = None) -> None:
    """Stream from a store that was made here, and close the one that was made before."""
    if isinstance(A.store, CompletedOnArrival) and A.device.kind == "cuda":
        _stream_beside_image(cast(SparseMatrix, system.A), A, store)
    else:
        A.reopen(completed_by(system.A, store))
    system.held.replace(store)
    if matrix is not None and system.stored is not None:
        system.keep(matrix)


def _update_from_store(system: OpenSystem, store: Store, writing: Writing) -> None:
    """Go on with another store of the caller, which is cut in the same way and stores the same entries."""
    A = system.matrix
    if not isinstance(A, StreamedMatrix) or system.pattern is not None or system.order is not None:
        raise InputError(
            "this system was not prepared from a store that is used as it is; update it from a matrix in memory"
        )
    if not A.plan.index.same_layout(store.index):
        raise InputError(
            "the new store differs from the prepared one in its shape, format or cut; write it with the same slabs, or prepare it"
        )
    for number in range(len(store.index.subdivisions)):
        if not np.array_equal(_structure(A.store, number), _structure(store, number)):
            subdivision = store.index.subdivisions[number]
            raise InputError(
                f"the new store has another pattern in rows {subdivision.row_start} to {subdivision.row_stop - 1}; prepare it"
            )
    before = CompletedOnArrival.underlying(A.store)
    planes = isinstance(system.A, SparseMatrix)  # an image of the matrix
    copied = isinstance(before, HostStore | HostPlaneStore) and not is_in_memory(store, planes=planes)
    if copied:
        store = copy_in_memory(store, planes=planes)
    with writing():
        _reopen(system, A, store)
        try:
            if system.request.chosen_method.definite:
                check_diagonal(A)
            if system.null_space is not None:
                system.null_space.check(A)
        except InputError:
            _reopen(system, A, before)
            raise
        system.held.replace(store if copied else None)
        system.exact, system.difference, system.unreachable = None, 0.0, None


def _reopen(system: OpenSystem, A: StreamedMatrix, store: Store) -> None:
    """Stream from another store; an image in memory gets its values."""
    if isinstance(system.A, SparseMatrix):
        _stream_beside_image(system.A, A, store)
    else:
        A.reopen(store)


def _stream_beside_image(image: SparseMatrix, A: StreamedMatrix, store: Store) -> None:
    if has_planes(store):  # of which an image in float32 is a part of the matrix
        _copy_values(image, image_of_store(store, image.values_dtype, A.device, image.arrays()))
        A.reopen(completed_by(image, store))
    else:
        A.reopen(store)
        _refill_image(image, A)


def _refill_image(image: SparseMatrix, A: StreamedMatrix) -> None:
    """Give an image in memory the values of the matrix that is streamed."""
    _copy_values(image, image_of_streamed(A, image.values_dtype, structure=image.arrays()))


def _copy_values(image: SparseMatrix, new: SparseMatrix) -> None:
    arrays = new.arrays()
    for name, array in image.arrays().items():
        if arrays[name] is not array:  # as offsets and column indices may be
            array[...] = arrays[name]


def _structure(store: Store, number: int) -> np.ndarray[Any, Any]:
    nbytes = store.index.subdivisions[number].part_nbytes("structure")
    buffer = aligned_buffer(nbytes)
    buffer[:] = 0  # reading leaves the padding
    store.read_into(number, buffer, "structure")
    return buffer[:nbytes]
