"""Multiplies a matrix in a store, slab by slab, by one that is held in memory, and stores the product."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from penstock.spmv import CPU, BsrMatrix, CsrMatrix, Device, InputError, SparseMatrix, as_operator, format_named
from penstock.spmv.products.block_rows import BlockRows, csr_of
from penstock.spmv.products.completion import Completion
from penstock.spmv.products.multiply import as_matrix, multiply
from penstock.streaming import FileStore, Store
from penstock.streaming.stores.buffers import aligned_buffer


def multiply_store(
    store: Store | str | Path,
    B: Any,
    path: str | Path,
    *,
    device: Device | str = "cpu",
    overwrite: bool = False,
    label: str = "",
    progress: Callable[[float], None] | None = None,
) -> FileStore:
    """Store the product ``A B`` of a matrix in a store and one that is held in memory.

    Parameters
    ----------
    store : Store or path
        A. Of a symmetric matrix whose store holds half, the rows are completed as they are read.
    B : matrix
        As for :func:`penstock.solvers.multiply`: penstock formats, SciPy or CuPy sparse matrices.
    path : path
        Directory of the store to create. An interrupted product leaves nothing there.
    device : Device or str
        Where slabs are multiplied; B must fit there beside one slab of A and of the product.
    overwrite : bool
        Replace a store of that name.
    label : str
        A description, saved with the store.
    progress : callable, optional
        Called with the share of the rows that are done, from 0 to 1.

    Returns
    -------
    FileStore
        Of BSR if A and B consist of square blocks of one size, of CSR otherwise; cut at the rows at which A is cut. Of float64 if
        the store of A holds half.

    Raises
    ------
    InputError
        If B has another number of rows than A has columns, or ``path`` exists.
    BudgetError
        If a slab of the product does not fit in memory: cut A into more subdivisions.
    StoreError
        If a disk fails.

    Notes
    -----
    A is read once, each subdivision while the one before is multiplied.

    Examples
    --------
    >>> import penstock, scipy.sparse, tempfile
    >>> from penstock.streaming import HostStore
    >>> A = scipy.sparse.diags_array([1.0, 2.0, 3.0]).tocsr()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = penstock.multiply_store(HostStore.from_matrix(A, 2), A, f"{folder}/squares")
    ...     store.index.shape, store.index.format_name, HostStore.from_store(store).slab(1).to_csr().data.tolist()
    ((3, 3), 'csr', [4.0, 9.0])
    """
    where = Device.parse(device)
    with contextlib.ExitStack() as opened:
        store = opened.enter_context(FileStore(store)) if isinstance(store, str | Path) else store
        shape, factor = store.index.shape, _on_device(B, where)
        if factor.shape[0] != shape[1]:
            raise InputError(
                f"the stored matrix has {shape[1]} columns, the second one {factor.shape[0]} rows: they cannot be multiplied"
            )
        products = opened.enter_context(contextlib.closing(_products(store, factor, where, progress)))
        product_shape = (shape[0], factor.shape[1])
        return FileStore.create(path, products, shape=product_shape, overwrite=overwrite, label=label)


def _on_device(B: Any, device: Device) -> SparseMatrix:
    matrix = as_operator(B)
    if not isinstance(matrix, SparseMatrix):
        raise InputError(
            f"a {type(matrix).__name__} has no entries at hand; pass a sparse matrix that is held in memory"
        )
    if not isinstance(matrix, (BsrMatrix, CsrMatrix)):  # which products take as they are
        matrix = csr_of(matrix)
    return matrix if matrix.device == device else matrix.to_device(device)


def _products(
    store: Store, B: SparseMatrix, device: Device, progress: Callable[[float], None] | None
) -> Generator[SparseMatrix, None, None]:
    """Make the product slab by slab."""
    done, total = 0, max(1, store.index.shape[0])
    for slab in complete_slabs(store, device):
        with device.current():
            product = multiply(slab, B)
        assert isinstance(product, SparseMatrix)  # slabs and B have square blocks, or none
        done += slab.shape[0]
        yield product.to_device(CPU)
        if progress is not None:
            progress(done / total)


def complete_slabs(store: Store, device: Device) -> Iterator[SparseMatrix]:
    """Return slabs of whole rows, on a device, one after another."""
    index = store.index
    if not format_named(index.format_name).traits.half:
        yield from (slab.to_device(device) for _, slab in _slabs(store))
        return
    size = index.block_size
    completed: list[BlockRows] = []
    completion = Completion(size, completed.append)
    for start, slab in _slabs(store):
        with device.current():
            completion.add(start, slab.to_device(device))
            matrices = [as_matrix(rows, index.shape[1] // size, np.dtype(np.float64)) for rows in completed]
        completed.clear()
        for matrix in matrices:
            assert isinstance(matrix, SparseMatrix)  # of square blocks
            yield matrix


def _slabs(store: Store) -> Iterator[tuple[int, SparseMatrix]]:
    """Return the first row and the slab of every subdivision, in memory that the next but one reuses."""
    subdivisions = store.index.subdivisions
    largest = max((one.nbytes for one in subdivisions), default=0)
    buffers = [aligned_buffer(largest) for _ in range(2)]
    with ThreadPoolExecutor(1) as reader:
        coming = [reader.submit(store.read_into, 0, buffers[0])] if subdivisions else []
        for number, subdivision in enumerate(subdivisions):
            coming.pop().result()
            if number + 1 < len(subdivisions):
                coming.append(reader.submit(store.read_into, number + 1, buffers[(number + 1) % 2]))
            yield subdivision.row_start, store.index.view(number, buffers[number % 2])
