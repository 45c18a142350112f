"""Checks the arrays of compressed sparse matrices from users."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import scipy.sparse

from penstock.spmv.compilation.jit import strict_kernel
from penstock.spmv.device import Array
from penstock.spmv.errors import InputError, advice_on_type
from penstock.spmv.formats.limits import INT32_MAX, ascend, check_columns

_NOT_MONOTONE, _OUT_OF_RANGE, _DUPLICATE, _UNSORTED = 1, 2, 3, 4


@strict_kernel
def _first_defect(offsets: Array, indices: Array, columns: int) -> tuple[int, int, int]:
    for row in range(offsets.shape[0] - 1):
        start, stop = offsets[row], offsets[row + 1]
        if start < 0 or stop < start or stop > indices.shape[0]:
            return _NOT_MONOTONE, row, 0
        for entry in range(start, stop):
            column = indices[entry]
            if column < 0 or column >= columns:
                return _OUT_OF_RANGE, row, column
            if entry > start and indices[entry - 1] >= column:
                return (_DUPLICATE if indices[entry - 1] == column else _UNSORTED), row, column
    return 0, 0, 0


def in_sorted_rows(A: Any, what: str) -> Any:
    """Return a SciPy CSR or BSR matrix whose rows ascend: itself, or a copy that is sorted, with duplicates summed.

    Products of SciPy matrices have unsorted rows, and ``tobsr`` leaves unsorted blocks. Offsets and indices are checked.
    """
    height, width = getattr(A, "blocksize", (1, 1))
    shape = (A.shape[0] // height, A.shape[1] // width)
    defect, row, column = _defect(A.indptr, A.indices, shape, what)
    if not defect:  # the usual case: one pass over the entries
        return A
    # What sorts the rows must find them; offsets beyond the first unsorted row were not looked at.
    if defect in (_UNSORTED, _DUPLICATE) and (np.diff(A.indptr) >= 0).all() and A.indptr[-1] <= len(A.indices):
        A = A.copy()
        A.has_canonical_format = A.has_sorted_indices = False  # SciPy's cached flags may be wrong
        A.sort_indices()
        defect, row, column = _defect(A.indptr, A.indices, shape, what)
        if defect == _DUPLICATE:
            A.sum_duplicates()
            defect, row, column = _defect(A.indptr, A.indices, shape, what)
    if defect:
        raise InputError(f"{what}: {_describe(defect, row, column, shape[1], len(A.indices))}")
    return A


def _defect(offsets: Array, indices: Array, shape: tuple[int, int], what: str) -> tuple[int, int, int]:
    """Return the first defect, and where it is; 0 if there is none."""
    rows, columns = shape
    check_columns(columns, what)
    if len(offsets) != rows + 1 or (rows and int(offsets[0]) != 0):
        raise InputError(f"{what}: row offsets must be {rows + 1} numbers starting at 0, not {len(offsets)}")
    defect, row, column = _first_defect(offsets, indices, columns)
    return int(defect), int(row), int(column)


def _describe(defect: int, row: int, column: int, columns: int, entries: int) -> str:
    return {
        _NOT_MONOTONE: f"row offsets descend or run past the {entries} entries at row {row}; the arrays are damaged",
        _OUT_OF_RANGE: f"row {row} holds column index {column}, outside 0 to {columns - 1}; check the shape",
        _DUPLICATE: f"row {row} holds column {column} twice; call A.sum_duplicates()",
        _UNSORTED: f"row {row} is not sorted at column {column}; call A.sort_indices()",
    }[defect]


def in_csr(A: Any, what: str) -> Any:
    """Return a SciPy or CuPy matrix in CSR: itself, or a conversion, which out-of-range indices would crash.

    Rows may still be unsorted and hold duplicates, and CSR itself is not looked at: see :func:`in_sorted_rows`.
    """
    if len(A.shape) != 2:
        raise InputError(f"{what} has the shape {A.shape}; expected a matrix, which has 2 dimensions")
    if A.format == "csr":
        return A
    check_indices(A, what)
    try:
        return A.tocsr()
    except (ValueError, TypeError, IndexError) as error:  # of the lists and diagonals of other formats
        raise InputError(f"{what} cannot be converted to CSR: {error}; its arrays do not fit each other") from error


def check_indices(A: Any, what: str) -> None:
    """Raise an InputError if the indices of a matrix are out of range, or do not fit its other arrays."""
    if A.format in ("csr", "csc", "bsr"):
        _check_compressed(A, what)
    elif A.format == "dia":
        if A.data.ndim != 2 or len(A.offsets) != len(A.data):
            raise InputError(
                f"{what} has {len(A.offsets)} offsets of diagonals and values of shape {A.data.shape}; it is damaged"
            )
        _check_offsets_of_diagonals(A.offsets, what)
    elif A.format == "lil":
        _check_lists(A, what)
    elif A.format in ("coo", "dok"):
        A = A.tocoo()
        if not len(A.data) == len(A.row) == len(A.col):
            raise InputError(
                f"{what} has {len(A.data)} values, {len(A.row)} rows and {len(A.col)} columns; it is damaged"
            )
        for name, indices, size in (("row", A.row, A.shape[0]), ("column", A.col, A.shape[1])):
            _check_range(indices, size, f"{what}: a {name} index")


def _check_offsets_of_diagonals(offsets: Any, what: str) -> None:
    """Refuse offsets that are not whole, or so large that SciPy would write elsewhere."""
    if offsets.dtype.kind not in "iu":
        raise InputError(f"{what} has offsets of diagonals of type {offsets.dtype}; expected whole numbers")
    if offsets.size and max(-int(offsets.min()), int(offsets.max())) > INT32_MAX:
        furthest = max((int(offsets.min()), int(offsets.max())), key=abs)
        raise InputError(f"{what} has a diagonal {furthest} places from the main one; its offsets are damaged")


def _check_lists(A: Any, what: str) -> None:
    if not len(A.rows) == len(A.data) == A.shape[0] or not all(isinstance(one, list) for one in (*A.rows, *A.data)):
        raise InputError(
            f"{what} does not have a list of columns and one of values for each of {A.shape[0]} rows; it is damaged"
        )
    columns, values = ([len(one) for one in lists] for lists in (A.rows, A.data))
    if columns != values:
        row = next(row for row, (few, many) in enumerate(zip(columns, values, strict=True)) if few != many)
        raise InputError(f"{what} has {columns[row]} columns and {values[row]} values in row {row}; it is damaged")
    indices = np.asarray(list(itertools.chain.from_iterable(A.rows)) or np.empty(0, dtype=int))
    _check_range(indices, A.shape[1], f"{what}: a column index")


def _check_compressed(A: Any, what: str) -> None:
    height, width = A.data.shape[1:] if A.data.ndim == 3 else (1, 1)
    sizes = (A.shape[0] // height, A.shape[1] // width)
    lines, across = sizes[::-1] if A.format == "csc" else sizes
    if A.format == "bsr" and A.data.ndim != 3:
        raise InputError(f"{what} has values of shape {A.data.shape}; those of blocks have 3 dimensions")
    offsets, most = A.indptr, min(len(A.indices), len(A.data))
    if len(offsets) != lines + 1 or offsets.dtype.kind not in "iu" or offsets[0] != 0:
        raise InputError(f"{what}: its offsets must be {lines + 1} whole numbers starting at 0, not {len(offsets)}")
    if not ascend(offsets) or offsets[-1] > most:
        raise InputError(f"{what}: its offsets descend or run past its {most} entries; its arrays are damaged")
    name = "row" if A.format == "csc" else "column"
    _check_range(A.indices[: int(offsets[-1])], across, f"{what}: a {name} index{' of a block' * (height * width > 1)}")


def _check_range(indices: Any, size: int, what: str) -> None:
    if indices.dtype.kind not in "iu":
        raise InputError(f"{what} is of type {indices.dtype}; expected whole numbers")
    if not len(indices):
        return
    least, largest = int(indices.min()), int(indices.max())
    if least < 0 or largest >= size:
        raise InputError(
            f"{what} is {least if least < 0 else largest}, outside 0 to {size - 1}; check shape and arrays"
        )


def checked_values_dtype(values_dtype: Any) -> Any:
    """Return the type in which values are stored, or None where it is that of the matrix."""
    try:
        known = values_dtype is None or np.dtype(values_dtype) in (np.float32, np.float64)
    except TypeError:
        known = False
    if not known:
        raise InputError(f"values_dtype must be float32 or float64, not {values_dtype!r}")
    return values_dtype


def real_values(A: Any, what: str) -> Any:
    """Return the values of a SciPy or CuPy matrix as float64 or float32; refuse what is not real with an InputError."""
    values = A.data
    if values.dtype.kind not in "fiub" or values.dtype.itemsize > 8:
        raise InputError(f"{what} has values of type {values.dtype}; {advice_on_type(values.dtype.kind)}")
    return values if values.dtype in (np.float32, np.float64) else values.astype(np.float64)


def check_values(A: Any, what: str) -> np.ndarray[Any, Any]:
    """Return the values of a SciPy matrix as float64 or float32, or raise an InputError unless they are real and finite."""
    values: np.ndarray[Any, Any] = np.asarray(real_values(A, what))
    if not np.isfinite(values).all():
        entries = scipy.sparse.coo_array(A)
        place = int(np.argmin(np.isfinite(entries.data)))
        where = f"row {entries.row[place]}, column {entries.col[place]}"
        raise InputError(f"{what} holds {entries.data[place]} in {where}; all entries must be finite")
    return values
