"""Groups of arrays in HDF5 files, which may come from anywhere: no other file is read, and no lost data is taken for zeros."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from penstock.files.arrays import IN_FILE_TYPES
from penstock.files.csr_groups import group_slabs
from penstock.files.parallel_read import read_numbers
from penstock.files.reader import READERS, Reader
from penstock.files.slabs import Slabs
from penstock.spmv import InputError

_NAMES = ("data", "indices", "indptr")
_DEEPEST = 16  # groups inside groups
# Shorter arrays are read as fast by HDF5.
_LONG_NBYTES = 32 << 20


@contextmanager
def hdf5_group(path: Path) -> Iterator[h5py.Group]:
    """Open the first group with the arrays of a matrix in CSR, none of which may lie outside the file."""
    with h5py.File(path) as file:
        group = _first_matrix(file, 0, set())
        if group is None:
            raise InputError(f"{path} holds no group with data, indices and indptr, the arrays of a matrix in CSR")
        for name in (*_NAMES, *({"shape"} & set(group))):
            _check(path, name, group)
        yield group


def _first_matrix(group: h5py.Group, depth: int, seen: set[int]) -> h5py.Group | None:
    """Return the first group with the arrays of a matrix; groups that are reached by links are left out."""
    if set(_NAMES) <= set(group):
        return group
    seen.add(h5py.h5o.get_info(group.id).addr)
    for name in group if depth < _DEEPEST else ():
        if _is_inside(group, name) and group.get(name, getclass=True) is h5py.Group:
            inner = group[name]
            if h5py.h5o.get_info(inner.id).addr not in seen:
                matrix = _first_matrix(inner, depth + 1, seen)
                if matrix is not None:
                    return matrix
    return None


def _is_inside(group: h5py.Group, name: str) -> bool:
    """Whether a name is that of an object of the file itself: links may lead to any other file of the system."""
    return isinstance(group.get(name, getlink=True), h5py.HardLink)


def _check(path: Path, name: str, group: h5py.Group) -> None:
    if not _is_inside(group, name):
        raise InputError(f"{path} has a link instead of {name}, which may lead to another file; copy the array into it")
    array: Any = group[name]
    if not isinstance(array, h5py.Dataset):
        raise InputError(f"{path} is damaged: its {name} is a {type(array).__name__.lower()}, not an array")
    created = array.id.get_create_plist()
    if array.is_virtual or created.get_external_count():
        raise InputError(f"{path} takes {name} from other places, perhaps of other files; copy the array into it")
    filters = [created.get_filter(number)[0] for number in range(created.get_nfilters())]
    if len(set(filters)) < len(filters):  # compressed twice, data may expand a millionfold
        raise InputError(f"{path} has {name} compressed several times; write it with gzip or lzf once")
    if array.chunks:
        pieces = zip(array.shape, array.chunks, strict=True)
        expected = math.prod(math.ceil(length / chunk) for length, chunk in pieces)
        there, unit = array.id.get_num_chunks(), "chunks"
    else:
        expected, there, unit = array.nbytes, array.id.get_storage_size(), "bytes"
    if there < expected:
        raise InputError(
            f"{path} has {there} of {expected} {unit} of {name}, and HDF5 takes missing ones for zeros; copy it whole, or "
            "write all of the array"
        )


def _slabs(path: Path, *, in_file: bool = False) -> Slabs:
    return group_slabs(path, hdf5_group, partial(_read, in_file=in_file))


def _in_file(path: Path) -> Any:
    with hdf5_group(path) as group:
        stays = all(_is_native_run(group[name]) for name in ("data", "indices"))
    return _slabs(path, in_file=stays).whole(path, in_file=stays)


def _read(path: Path, array: h5py.Dataset, *, in_file: bool) -> Any:
    """Read an array: with all cores, if its numbers follow each other in the file, where they may also be left."""
    if not _is_run(array):
        read = array[:]
        return read.astype(read.dtype.newbyteorder("="), copy=False)
    start = array.id.get_offset()
    if in_file and _is_native_run(array):
        with contextlib.suppress(OSError):  # the system may not map so much
            return np.asarray(np.memmap(path, array.dtype, "c", start, array.shape))
    return read_numbers(path, start, array.shape[0], array.dtype)


def _is_run(array: h5py.Dataset) -> bool:
    """Whether the numbers of an array follow each other in the file, in a type of NumPy, and are many."""
    usual = array.id.get_type().equal(h5py.h5t.py_create(array.dtype))  # others, such as of 24 bits, HDF5 converts
    placed = array.id.get_offset() is not None  # it is None for chunks
    return placed and array.nbytes >= _LONG_NBYTES and array.dtype.kind in "iuf" and usual


def _is_native_run(array: h5py.Dataset) -> bool:
    """Whether the numbers of an array are in the file as they are used."""
    return _is_run(array) and array.nbytes > 0 and array.dtype in IN_FILE_TYPES


READERS.add(
    "hdf5",
    Reader("HDF5", "matrix in HDF5", (".h5", ".hdf5"), slabs=_slabs, in_file=_in_file),
)
