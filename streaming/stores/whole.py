"""Reads a whole stored matrix back into memory."""

from __future__ import annotations

import numpy as np
import scipy.sparse

from penstock.spmv import format_named
from penstock.streaming.stores.base import Store
from penstock.streaming.stores.buffers import aligned_buffer


def read_whole(store: Store) -> scipy.sparse.csr_array:
    """Return a stored matrix as a SciPy CSR array; needs about three times its bytes.

    If the store holds half of a symmetric matrix, both halves are returned.
    """
    index = store.index
    rows, columns, values = [], [], []
    for number, subdivision in enumerate(index.subdivisions):
        buffer = aligned_buffer(subdivision.nbytes)
        store.read_into(number, buffer)
        slab_rows, slab_columns, slab_values = index.view(number, buffer).triplets()
        rows.append(slab_rows.astype(np.int64) + subdivision.row_start)
        columns.append(slab_columns.astype(np.int64))
        values.append(slab_values.copy())
    row, column, value = (np.concatenate(parts) for parts in (rows, columns, values))
    whole = any(of.row_stop - of.row_start == index.shape[0] for of in index.subdivisions)
    if format_named(index.format_name).traits.half and not whole:  # a slab of all rows has both halves
        size = int(index.parameters.get("block_size", 1))
        right = column // size > row // size
        row, column = np.concatenate((row, column[right])), np.concatenate((column, row[right]))
        value = np.concatenate((value, value[right]))
    A = scipy.sparse.coo_array((value, (row, column)), shape=index.shape).tocsr()
    A.sort_indices()
    return A
