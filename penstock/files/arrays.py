"""Arrays from files of NumPy, which may come from anywhere: no code is run, and memory is allocated only for what fits."""

from __future__ import annotations

import contextlib
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from penstock.files.stored_members import can_read_stored, map_stored, read_stored
from penstock.spmv import InputError, PenstockError, format_nbytes
from penstock.spmv.host_memory import available_nbytes

Array = np.ndarray[Any, Any]

#: Types of arrays that may stay in a file; others are converted, which makes a copy.
IN_FILE_TYPES = (np.dtype(np.float64), np.dtype(np.int32))


def open_array(path: Path) -> Array:
    """Map the array of an ``.npy`` file into memory; nothing is read yet. Files with Python objects are refused."""
    check_is_file(path)
    with failures_named(path, "array of numpy.save"):
        with open(path, "rb") as file:
            shape, fortran, dtype = _header(file)
            start, size = file.tell(), path.stat().st_size
        if size != start + math.prod(shape) * dtype.itemsize:
            raise InputError(
                f"{path} has {size} bytes instead of {start + math.prod(shape) * dtype.itemsize} for an array of shape {shape}; "
                "it is damaged"
            )
        if not math.prod(shape):
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype, mode="r", offset=start, shape=shape, order="F" if fortran else "C")


class ArrayArchive:
    """The arrays of an ``.npz`` file: names, shapes and types in ``contents``; each array is read on request."""

    def __init__(self, path: Path) -> None:
        check_is_file(path)
        self._path = path
        if not zipfile.is_zipfile(path):
            raise InputError(f"cannot read {path}: it is no whole zip archive; expected a file of numpy.savez")
        with failures_named(path, "file of numpy.savez"):
            self._archive = zipfile.ZipFile(path)
            self.contents: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
            for member in self._archive.infolist():
                if member.filename.endswith(".npy"):
                    self.contents[member.filename[: -len(".npy")]] = self._described(member)

    def _described(self, member: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype[Any]]:
        with self._archive.open(member) as file:
            shape, _, dtype = _header(file)  # type: ignore[arg-type]
            if file.tell() + math.prod(shape) * dtype.itemsize != member.file_size:
                raise InputError(f"{self._path} is damaged: {member.filename} is not as long as its shape {shape} says")
        return shape, dtype

    def nbytes(self, name: str) -> int:
        """Return the bytes that an array takes in memory."""
        shape, dtype = self.contents[name]
        return math.prod(shape) * dtype.itemsize

    def stays_in_file(self, name: str) -> bool:
        """Whether an array is left in the file if it may stay there: one that is used as it is there."""
        if name not in self.contents or self.contents[name][1] not in IN_FILE_TYPES:
            return False
        return can_read_stored(self._archive.getinfo(name + ".npy"))

    def _mapped(self, name: str, member: zipfile.ZipInfo) -> Array:
        with self._archive.open(member) as file:
            try:
                shape, fortran, dtype, header = _header_and_bytes(file)
                flat = map_stored(self._path, member, header, math.prod(shape), dtype)
            except (ValueError, zipfile.BadZipFile) as error:
                with failures_named(self._path, "file of numpy.savez"):
                    raise error
        return flat.reshape(shape, order="F" if fortran else "C")

    def read(self, name: str, *, in_file: bool = False) -> Array:
        """Return one array, or raise an InputError if it does not exist, does not fit the memory, or is damaged.

        ``in_file``: a large one that is stored as it is may stay there, mapped into memory, perhaps at an odd address.
        """
        if name not in self.contents:
            raise InputError(f"{self._path} holds no array {name!r}; it is damaged, or of another kind")
        member = self._archive.getinfo(name + ".npy")
        if in_file and self.stays_in_file(name):
            with contextlib.suppress(OSError):  # the system may not map so much
                return self._mapped(name, member)
        check_fits_memory(self.nbytes(name), f"the array {name!r} of {self._path}")
        with failures_named(self._path, "file of numpy.savez"), self._archive.open(member) as file:
            if not can_read_stored(member):
                array: Array = np.lib.format.read_array(file, allow_pickle=False)
                return array
            shape, fortran, dtype, header = _header_and_bytes(file)
            array = np.empty(shape, dtype, order="F" if fortran else "C")
            read_stored(self._path, member, header, array.T if fortran else array)
        return array

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()


def check_fits_memory(nbytes: float, what: str) -> None:
    """Raise an InputError with both sizes if something is larger than the memory that this process may use."""
    room = available_nbytes()
    if nbytes > room:
        raise InputError(
            f"{what} takes {format_nbytes(int(nbytes))}, but {format_nbytes(room)} of memory are available"
        )


def check_is_file(path: Path) -> None:
    """Raise an InputError unless the path is that of a file."""
    try:
        is_file, exists = path.is_file(), path.exists()
    except (OSError, ValueError) as error:  # too long, or with a NUL
        raise InputError(f"{str(path)!r} is no path: {error}") from error
    if not is_file:
        raise InputError(f"{path} {'is not a file' if exists else 'does not exist'}; check the path")


@contextlib.contextmanager
def failures_named(path: Path, kind: str) -> Iterator[None]:
    """Turn whatever a damaged file makes other libraries raise into an error that names file and cause."""
    try:
        yield
    except PenstockError:  # also of a store that is written while the file is read
        raise
    except MemoryError as error:
        raise InputError(f"{path} announces more than fits the memory of this machine: {error}") from error
    except Exception as error:  # SciPy, NumPy, zlib and zipfile do not document all that they raise
        cause = str(error) or type(error).__name__
        raise InputError(f"cannot read {path}: {cause}; expected an undamaged {kind}") from error


def _header_and_bytes(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any], bytes]:
    """Read the header of an array, and return also its bytes, of which a checksum is formed."""
    shape, fortran, dtype = _header(file)
    length = file.tell()
    file.seek(0)
    return shape, fortran, dtype, file.read(length)


def _header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array; NumPy limits its length before it evaluates it."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise InputError(f"an array of version {version} of NumPy's format is not read; save it with numpy.save")
    if dtype.hasobject:
        raise InputError("it holds Python objects, which could run code; save plain numbers")
    if any(length < 0 for length in shape):
        raise InputError(f"an array cannot have the shape {shape}")
    return shape, fortran, dtype
