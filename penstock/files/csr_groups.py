"""Matrices whose arrays of CSR lie in a group of an HDF5 file or a Zarr folder, read as slabs of rows one after the other.

The group has the arrays ``data``, ``indices`` and ``indptr``, and the ``shape`` as an attribute or an array, which a square
matrix may do without. AnnData writes its sparse matrices so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from penstock.files.arrays import check_fits_memory
from penstock.files.slabs import Arrays, Slabs, slab_bounds
from penstock.spmv import InputError
from penstock.spmv.formats.limits import ascend

#: The arrays of CSR, and the kinds of NumPy types that each may have.
_ARRAYS = {"data": "fiubc", "indices": "iu", "indptr": "iu"}


def group_slabs(
    path: Path,
    opened: Callable[[Path], AbstractContextManager[Any]],
    read: Callable[[Path, Any], np.ndarray[Any, Any]] | None = None,
) -> Slabs:
    """Return the matrix in a group, which ``opened`` finds in a file or folder.

    ``read(path, array)`` reads one of its arrays as a whole; by default the library of the file does.
    """
    with opened(path) as group:
        _check_arrays(path, group)
        shape, entries = _shape(path, group), int(group["data"].shape[0])

    def arrays() -> Arrays:
        with opened(path) as group:
            offsets = _offsets(path, group)
            whole = read or (lambda path, array: _native(array[:]))
            return whole(path, group["data"]), whole(path, group["indices"]), offsets

    return Slabs(shape, entries, _rows(path, opened, shape), arrays)


def _offsets(path: Path, group: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the row offsets, which lead through all entries."""
    check_fits_memory(4 * 8 * group["indptr"].shape[0], f"the row offsets of {path}")
    offsets: np.ndarray[Any, np.dtype[np.int64]] = group["indptr"][:].astype(np.int64)
    if not ascend(offsets) or offsets[0] != 0 or offsets[-1] != group["data"].shape[0]:
        raise InputError(f"{path} is damaged: its row offsets do not fit its entries")
    return offsets


def _check_arrays(path: Path, group: Any) -> None:
    """Refuse arrays that are not CSR, or whose pieces do not fit the memory, before any of them is read."""
    for name, kinds in _ARRAYS.items():
        array = group[name]
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise InputError(f"{path} is damaged: its {name} have type {array.dtype} and shape {array.shape}")
        _check_chunk(path, name, array)
    if "shape" not in group.attrs and "shape" in group:
        if tuple(group["shape"].shape) != (2,):
            raise InputError(f"{path} is damaged: its shape has {group['shape'].shape} numbers, not two")
        _check_chunk(path, "shape", group["shape"])
    if not group["indptr"].shape[0] or group["indices"].shape != group["data"].shape:
        raise InputError(f"{path} is damaged: its row offsets do not fit its entries")
    if "csc" in str(group.attrs.get("encoding-type", "")):  # of AnnData
        raise InputError(f"{path} holds a matrix in CSC; write it in CSR: A.tocsr()")


def _shape(path: Path, group: Any) -> tuple[int, int]:
    rows = int(group["indptr"].shape[0]) - 1
    sizes = group.attrs["shape"] if "shape" in group.attrs else group["shape"][:] if "shape" in group else (rows, rows)
    shape = tuple(int(size) for size in sizes)
    if len(shape) != 2 or shape[0] != rows:
        raise InputError(f"{path} holds a matrix of shape {shape}, but offsets of {rows} rows; it is damaged")
    return shape[0], shape[1]


def _chunk(array: Any) -> int:
    """Return the length of a chunk, the fewest numbers that can be read at once."""
    return int((array.chunks or (1,))[0])


def _check_chunk(path: Path, name: str, array: Any) -> None:
    check_fits_memory(_chunk(array) * array.dtype.itemsize, f"one chunk of the {name} of {path}")


def _rows(
    path: Path, opened: Callable[[Path], AbstractContextManager[Any]], shape: tuple[int, int]
) -> Iterator[scipy.sparse.csr_array]:
    with opened(path) as group:
        all_offsets = _offsets(path, group)
        for start, stop in slab_bounds(path, all_offsets, max(_chunk(group["data"]), _chunk(group["indices"]))):
            offsets = all_offsets[start : stop + 1]
            inside = slice(int(offsets[0]), int(offsets[-1]))
            indices, values = _native(group["indices"][inside]), _native(group["data"][inside])
            if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < shape[1]:
                raise InputError(f"{path} is damaged: it has columns outside the matrix")
            yield scipy.sparse.csr_array((values, indices, offsets - offsets[0]), shape=(offsets.size - 1, shape[1]))


def _native(array: Any) -> np.ndarray[Any, Any]:
    """Return an array in the byte order of this machine, which SciPy's kernels need."""
    read = np.asarray(array)
    return read.astype(read.dtype.newbyteorder("="), copy=False)
