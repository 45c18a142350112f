"""Matrices in files of other programs, read as slabs of rows one after the other, so that none needs to fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from penstock.files.sizes import check_slab_fits, check_whole_fits
from penstock.spmv import InputError
from penstock.spmv.formats.limits import INT32_MAX, within

_MULTIPLE = 840  # rows: whole blocks of 1 to 8
_SLAB_ENTRIES = 1 << 20


Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]


class Slabs(NamedTuple):
    """A matrix in a file: its shape, its entries, and its rows in slabs, a list of one if it has been read as a whole."""

    shape: tuple[int, int]
    nnz: int
    rows: Iterable[scipy.sparse.csr_array]
    arrays: Callable[[], Arrays | None] | None = (
        None  # values, columns and offsets of all rows, read at once, if they can be
    )

    def whole(self, path: Path, *, in_file: bool = False) -> scipy.sparse.csr_array:
        """Return all rows; those that are to be read must fit the memory twice, with indices of 64 bits.

        ``in_file``: the arrays stay in the file.
        """
        if isinstance(self.rows, list):
            [rows] = self.rows
            return rows
        if not in_file:
            check_whole_fits(path, self.shape, self.nnz)
        if self.arrays is not None and (arrays := self.arrays()) is not None:
            values, columns, offsets = arrays
            if columns.size and not within(columns, self.shape[1]):
                raise InputError(f"{path} is damaged: it has columns outside the matrix")
            arrays = values, columns, narrow_offsets(offsets, columns)
            return scipy.sparse.csr_array(arrays, shape=self.shape)
        return scipy.sparse.vstack(list(self.rows), format="csr")


def narrow_offsets(offsets: np.ndarray[Any, Any], columns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return row offsets in 32 bits if the columns are: SciPy would widen those, which are more."""
    wide = offsets.dtype == np.int64 and columns.dtype == np.int32 and offsets.size > 0
    # Those of a damaged file stay as they are, to be refused.
    return offsets.astype(np.int32) if wide and 0 <= offsets.min() <= offsets.max() <= INT32_MAX else offsets


def slab_bounds(path: Path, offsets: np.ndarray[Any, Any], least: int = 0) -> Iterator[tuple[int, int]]:
    """Yield first row and end of slabs of about a million entries, or of the ``least`` that is read at once.

    They end at multiples of 840 rows, which are whole blocks of 1 to 8. Raises an InputError if a slab does not fit the memory.
    """
    start, rows, entries = 0, len(offsets) - 1, max(_SLAB_ENTRIES, least)
    while start < rows:
        step = int(np.searchsorted(offsets, offsets[start] + entries, side="right")) - 1 - start
        stop = min(rows, start + max(_MULTIPLE, step // _MULTIPLE * _MULTIPLE))
        count = int(offsets[stop] - offsets[start])
        check_slab_fits(f"rows {start} to {stop - 1} of {path} with {count} entries", stop - start, count)
        yield start, stop
        start = stop


def fitting(slab: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """Return a slab, or raise an InputError if it does not fit the memory while it is packed."""
    rows, entries = slab.shape[0], slab.nnz
    check_slab_fits(f"a slab of {rows} rows with {entries} entries", rows, entries)
    return slab
