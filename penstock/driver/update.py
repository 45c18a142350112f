"""New values for a matrix that is prepared: written where the old ones are, in memory or on disk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np

from penstock.driver.exact_matrix import ExactMatrix
from penstock.driver.inputs import GivenMatrix
from penstock.driver.matrix_checks import check_matrix
from penstock.driver.null_space import KnownModes, NullSpace
from penstock.driver.open_system import OpenSystem
from penstock.spmv import CPU, CsrMatrix, InputError, SparseMatrix, format_named
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.streaming import FileStore, HostStore, Store, StreamedMatrix
from penstock.streaming.stores.buffers import aligned_buffer

Writing = Callable[[], AbstractContextManager[None]]


def update_values(system: OpenSystem, given: GivenMatrix, resources: ExitStack, writing: Writing) -> None:
    """Replace the values of an open system by those of a matrix with the same pattern.

    Everything is checked before anything is written. Values in memory are overwritten, or, if they are used where the caller
    has them, replaced by the new ones where the caller has these. A store on disk is written anew beside the old one, whose
    name it takes at the end. ``writing`` returns the context in which values that are in use are overwritten; ``resources``
    closes what is opened here.
    """
    given = given.with_wide_vectors()
    if given.kind == "store":
        _update_from_store(system, given.matrix, resources)
        return
    if given.kind == "operator" or not isinstance(system.A, SparseMatrix | StreamedMatrix) or system.placement is None:
        raise InputError("an operator has no values that could be replaced; prepare the new one")
    matrix = _as_csr(given, system)
    if system.pattern is not None:
        system.pattern.check(matrix)
    statistics = MatrixStatistics.of(matrix)
    symmetry = check_matrix(statistics, "the new matrix", definite=system.request.chosen_method.definite)
    of_order = matrix
    if system.order is not None:
        of_order = CsrMatrix.from_csr(system.order.matrix(matrix.to_csr()), check=False)
    if isinstance(system.A, StreamedMatrix):
        half = format_named(system.A.plan.index.format_name).traits.half
        _update_streamed(system, system.A, of_order, resources, writing)
    else:
        half = system.A.traits.half
        with writing():
            _update_resident(system, system.A, of_order)
    system.exact = ExactMatrix.of(matrix, symmetry.skew_norm if half else 0.0)
    if system.null_space is not None:
        system.null_space.check(system.A, None if system.order is None else system.order.forward)
    elif system.pattern is not None:
        known = KnownModes(system.request.options, matrix.shape[0], system.request.block_size)
        system.unreachable = NullSpace.found(matrix, known)


def _as_csr(given: GivenMatrix, system: OpenSystem) -> CsrMatrix:
    matrix = given.matrix
    if not isinstance(matrix, CsrMatrix):
        matrix = CsrMatrix.from_csr(matrix.to_csr(), check=False)
    on_host = system.A.device.kind == "cpu" or isinstance(system.A, StreamedMatrix)
    return matrix.to_device(CPU) if on_host else matrix


def _update_resident(system: OpenSystem, A: SparseMatrix, matrix: CsrMatrix) -> None:
    if not system.borrowed:
        A.refill(matrix, check=False)
        return
    converted = type(A).from_csr(matrix, values_dtype=A.values_dtype, check=False, **A.layout()).to_device(A.device)
    for name, array in converted.arrays().items():
        if array.dtype.kind == "f":
            object.__setattr__(A, name, array)  # formats are frozen for everybody else
    system.borrowed = system.uses(matrix.values)


def _update_streamed(
    system: OpenSystem, A: StreamedMatrix, matrix: CsrMatrix, resources: ExitStack, writing: Writing
) -> None:
    store = A.store
    if isinstance(store, FileStore):
        refilled = resources.enter_context(store.refilled(matrix))
        A.reopen(refilled)
        store.close()
    elif not isinstance(store, HostStore):
        raise InputError(f"a {type(store).__name__} cannot be written; update from a store of the same layout")
    elif (source := store.source) is not None and (system.borrowed or system.stored is None):
        if system.pattern is None:
            source.check_pattern(matrix)
        new = type(source).from_csr(matrix, values_dtype=source.values_dtype, check=False, **source.layout())
        another = HostStore.from_matrix(new, [*store.index.row_starts, new.shape[0]])
        A.reopen(resources.enter_context(another))
        if system.stored is not None:
            store.close()
            system.keep(new)
    else:
        if system.pattern is None:
            store.check_pattern(matrix)
        with writing():
            store.refill(matrix)
            A.reopen(store)


def _update_from_store(system: OpenSystem, store: Store, resources: ExitStack) -> None:
    """Go on with another store of the caller, which is cut in the same way and stores the same entries."""
    A = system.A
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
    if isinstance(A.store, HostStore) and not hasattr(store, "segments"):  # it was copied to memory
        store = resources.enter_context(HostStore.from_store(store))
    A.reopen(store)
    if system.null_space is not None:
        system.null_space.check(A)


def _structure(store: Store, number: int) -> np.ndarray[Any, Any]:
    nbytes = store.index.subdivisions[number].part_nbytes("structure")
    buffer = aligned_buffer(nbytes)
    buffer[:] = 0  # reading leaves the padding
    store.read_into(number, buffer, "structure")
    return buffer[:nbytes]
