"""Sparse matrices in MATLAB files, which may come from anywhere.

SciPy's ``loadmat`` makes whatever a file announces, such as a cell array of 10^9 cells in 200 bytes. So files of versions 5 to
7.2 are read here: of all variables only headers, and then the three arrays of one sparse matrix, after their sizes were checked
(MathWorks, *MAT-File Format*, chapter 1). A file of version 4 is never compressed, which bounds what SciPy makes of it.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import scipy.io
import scipy.sparse

from penstock.files.arrays import check_fits_memory
from penstock.files.reader import READERS, Reader
from penstock.files.sizes import check_rows, check_whole_fits
from penstock.spmv import InputError

_MATRIX, _COMPRESSED = 14, 15  # types of elements
_STRUCT, _SPARSE = 2, 5  # classes of arrays
_COMPLEX = 0x0800
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_HEADER_NBYTES, _LONGEST_NAMES, _PIECE_NBYTES = 128, 1 << 16, 1 << 16


def read_mat(path: Path) -> Any:
    """Read a sparse matrix from a MATLAB file: ``Problem.A`` of the SuiteSparse collection, or the only one there.

    Complex matrices and files of version 7.3 are refused.
    """
    version, _ = scipy.io.matlab.matfile_version(path)
    if version == 2:
        raise InputError(f"{path} is of MATLAB 7.3, which is HDF5; save it in version 7, or as Matrix Market")
    if version == 0:
        return _read_version_4(path)
    with open(path, "rb") as file:
        places = list(_places(path, file))
        chosen = [place for place, name in places if name == "Problem"] or [place for place, _ in places]
        if len(chosen) != 1:
            raise InputError(f"{path} holds {len(chosen)} sparse matrices; expected one, or Problem.A")
        file.seek(chosen[0])
        _, elements = _opened(path, file)
        array = elements.array()
        if array.kind == _STRUCT:
            array = elements.field(array, "A")
        A = elements.sparse(array)
        elements.finish()
        return A


def _read_version_4(path: Path) -> Any:
    check_fits_memory(3 * path.stat().st_size, f"the matrix in {path}")
    matrices = [of for of in scipy.io.loadmat(path, spmatrix=False).values() if scipy.sparse.issparse(of)]
    if len(matrices) != 1:
        raise InputError(f"{path} holds {len(matrices)} sparse matrices; expected one")
    return matrices[0]


def _places(path: Path, file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield where the sparse matrices among the variables begin, and the struct ``Problem``, with their names."""
    size, place = path.stat().st_size, _HEADER_NBYTES
    while place < size:
        file.seek(place)
        nbytes, elements = _opened(path, file)
        array = elements.array()
        if array.kind == _SPARSE or (array.kind == _STRUCT and array.name == "Problem"):
            yield place, array.name
        place += 8 + nbytes


def _opened(path: Path, file: BinaryIO) -> tuple[int, _Elements]:
    """Return the bytes of the variable that begins here, and its elements, decompressed as they are read."""
    here = file.tell()
    file.seek(_HEADER_NBYTES - 2)
    order = {b"IM": "<", b"MI": ">"}.get(file.read(2))
    if order is None:
        raise InputError(f"{path} is damaged: its header does not name the order of its bytes")
    file.seek(here)
    outer = _Elements(path, file, order)
    kind, nbytes, _ = outer.tag()
    if kind == _COMPRESSED:
        outer = _Elements(path, io.BufferedReader(_Inflated(file, nbytes)), order, compressed=True)
        kind, _, _ = outer.tag()
    if kind != _MATRIX:
        raise InputError(f"{path} is damaged: a variable is an element of type {kind}, not an array")
    return nbytes, outer


class _Inflated(io.RawIOBase):
    """A compressed part of a file, read without ever holding more than a piece of it."""

    def __init__(self, file: BinaryIO, nbytes: int) -> None:
        self._file, self._left, self._inflate = file, nbytes, zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as the next piece goes; 0 at the end."""
        while not self._inflate.eof:
            piece = self._inflate.unconsumed_tail
            if not piece:
                piece = self._file.read(min(self._left, _PIECE_NBYTES))
                self._left -= len(piece)
                if not piece:
                    raise EOFError("its compressed data ends early")
            if text := self._inflate.decompress(piece, len(buffer)):
                buffer[: len(text)] = text
                return len(text)
        return 0


@dataclass(frozen=True)
class _ArrayHeader:
    """Class, shape and name of an array."""

    kind: int
    is_complex: bool
    shape: tuple[int, ...]
    name: str


class _Elements:
    """The elements of a variable, one after the other: each has a type, a length and data."""

    def __init__(self, path: Path, stream: BinaryIO, order: str, compressed: bool = False) -> None:
        self._path, self._stream, self._order, self._compressed = path, stream, order, compressed

    def tag(self) -> tuple[int, int, bytes | None]:
        """Return type and bytes of the next element, and its data if they are short and lie in the tag."""
        kind, nbytes = struct.unpack(self._order + "II", self._read(8))
        if kind >> 16:
            short = struct.pack(self._order + "I", nbytes)
            if kind >> 16 > 4:
                raise InputError(f"{self._path} is damaged: a short element announces {kind >> 16} bytes")
            return kind & 0xFFFF, kind >> 16, short[: kind >> 16]
        return kind, nbytes, None

    def array(self) -> _ArrayHeader:
        """Read the header of an array, after its tag."""
        flags = self._numbers("the flags of an array", 8)
        shape = tuple(int(size) for size in self._numbers("the shape of an array", 8 * 32))
        name = self._numbers("a name", _LONGEST_NAMES)
        if flags.dtype.itemsize != 4 or flags.size != 2 or len(shape) < 2 or min(shape) < 0:
            raise InputError(f"{self._path} is damaged: an array has the shape {shape} and {flags.size} flags")
        return _ArrayHeader(
            int(flags[0]) & 0xFF, bool(int(flags[0]) & _COMPLEX), shape, name.tobytes().decode("latin-1")
        )

    def field(self, array: _ArrayHeader, name: str) -> _ArrayHeader:
        """Go to a field of a struct, which must be an array, and return its header."""
        [length] = self._numbers("the length of the names of fields", 4)
        names = self._numbers("the names of fields", _LONGEST_NAMES).tobytes()
        if int(length) < 1 or math.prod(array.shape) != 1:
            raise InputError(f"{self._path} is damaged, or {array.name} is an array of {array.shape} structs")
        fields = [names[at : at + int(length)].partition(b"\0")[0] for at in range(0, len(names), int(length))]
        for label in fields:
            kind, nbytes, _ = self.tag()
            if kind == _MATRIX and label == name.encode():
                return self.array()
            self._skip(nbytes)
        raise InputError(f"{self._path} holds {array.name} without a matrix {name}; expected one, as in SuiteSparse")

    def sparse(self, array: _ArrayHeader) -> Any:
        """Read the arrays of a sparse matrix."""
        if array.kind != _SPARSE or len(array.shape) != 2:
            raise InputError(f"{self._path} has a matrix that is not sparse; save sparse(A)")
        if array.is_complex:
            raise InputError(f"{self._path} holds a matrix that is complex; only real matrices are supported")
        shape = array.shape[0], array.shape[1]
        rows, offsets, values = (self._numbers(f"the {of} of the matrix") for of in ("rows", "columns", "values"))
        entries = int(offsets[-1]) if offsets.size else 0
        check_rows(self._path, shape[0], entries)
        check_whole_fits(self._path, shape, max(entries, 0))
        # Rows and values may be longer: MATLAB leaves room for more entries.
        return scipy.sparse.csc_array((values[:entries], rows[:entries], offsets), shape=shape)

    def finish(self) -> None:
        """Read a compressed variable to its end, where its checksum is."""
        while self._compressed and self._stream.read(_PIECE_NBYTES):
            pass

    def _numbers(self, what: str, most: float = math.inf) -> np.ndarray[Any, Any]:
        """Read an element of numbers in the byte order of this machine."""
        kind, nbytes, data = self.tag()
        if kind not in _NUMBERS or nbytes > most:
            raise InputError(f"{self._path} is damaged: {what} are {nbytes} bytes of type {kind}")
        if data is None:
            check_fits_memory(2 * nbytes, f"{what} in {self._path}")
            data = self._read(nbytes)
            self._stream.read(-nbytes % 8)
        dtype = np.dtype(self._order + _NUMBERS[kind])
        return np.frombuffer(data, dtype).astype(dtype.newbyteorder("="), copy=False)

    def _read(self, nbytes: int) -> bytes:
        data = self._stream.read(nbytes)
        if len(data) < nbytes:
            raise InputError(f"{self._path} is damaged: it ends before its last array does")
        return data

    def _skip(self, nbytes: int) -> None:
        for start in range(0, nbytes, _PIECE_NBYTES):
            self._read(min(_PIECE_NBYTES, nbytes - start))


READERS.add("mat", Reader("MATLAB", "MATLAB file", (".mat",), matrix=read_mat))
