"""Matrix Market files, read by SciPy after a check of every number, because its reader trusts what it reads."""

from __future__ import annotations

import bz2
import gzip
import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import scipy.io
import scipy.sparse

from penstock.files.arrays import check_fits_memory
from penstock.files.reader import READERS, Entries, Reader
from penstock.files.sizes import check_rows
from penstock.spmv import InputError, format_nbytes
from penstock.spmv.compilation.jit import serial_kernel

# What the numbers of a file can consist of, by the field of its header.
_WHOLE = b"0123456789+- \t\r\n"
_CHARACTERS = {"pattern": _WHOLE, "integer": _WHOLE, "real": _WHOLE + b".eEnNaAiIfFtTyY"}
_SIZES = {"array": 2, "coordinate": 3}
_WHOLE_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_OPENERS = {".gz": gzip.open, ".bz2": bz2.open}
_SYMMETRIES = ("general", "symmetric", "skew-symmetric")

# Numbers such as 1, -1.5, .5e-3, 2.E+10 and -inf: the state after each character, as long as none is wrong.
_SPACE, _SIGN, _DIGITS, _BARE_POINT, _FRACTION, _EXPONENT, _EXPONENT_SIGN, _EXPONENT_DIGITS, _WORD, _WRONG = range(10)
_AFTER = {
    _SPACE: {b"+-": _SIGN, b"0123456789": _DIGITS, b".": _BARE_POINT, b"nNaAiIfFtTyY": _WORD},
    _SIGN: {b"0123456789": _DIGITS, b".": _BARE_POINT, b"nNaAiIfFtTyY": _WORD},
    _DIGITS: {b"0123456789": _DIGITS, b".": _FRACTION, b"eE": _EXPONENT},
    _BARE_POINT: {b"0123456789": _FRACTION},
    _FRACTION: {b"0123456789": _FRACTION, b"eE": _EXPONENT},
    _EXPONENT: {b"+-": _EXPONENT_SIGN, b"0123456789": _EXPONENT_DIGITS},
    _EXPONENT_SIGN: {b"0123456789": _EXPONENT_DIGITS},
    _EXPONENT_DIGITS: {b"0123456789": _EXPONENT_DIGITS},
    _WORD: {b"nNaAiIfFtTyY": _WORD},
}
_COMPLETE = (_SPACE, _DIGITS, _FRACTION, _EXPONENT_DIGITS, _WORD)

# Bytes of text that are read at once, where entries come in parts.
_PART_NBYTES = 16 << 20
# Limits of a valid file: numbers have some digits, comments some pages.
_LONGEST_LINE, _LONGEST_HEADER, _MOST_PER_NUMBER, _LONGEST_SHOWN = 1 << 20, 16 << 20, 1000, 40


def _opened(path: Path) -> BinaryIO:
    """Open a file as a binary stream that is not compressed."""
    opener: Any = _OPENERS.get(path.suffix.lower(), open)
    stream: BinaryIO = opener(path, "rb")
    return stream


def _uncompressed_nbytes(path: Path) -> float:
    """Return the bytes of the text in a file; a compressed one may hold a thousand times as much as its length."""
    return math.inf if path.suffix.lower() in _OPENERS else path.stat().st_size


@dataclass(frozen=True)
class _Header:
    """Everything down to the line of sizes, and what it says in lower case."""

    text: bytes
    layout: str
    field: str
    symmetry: str
    sizes: tuple[int, ...]

    @property
    def entries(self) -> int:
        """How many entries the file lists."""
        if self.layout != "array":
            return self.sizes[2]
        rows, columns = self.sizes
        per_symmetry = {"symmetric": rows * (rows + 1) // 2, "skew-symmetric": rows * (rows - 1) // 2}
        return per_symmetry.get(self.symmetry, rows * columns)

    @property
    def numbers(self) -> int:
        """How many numbers follow the header."""
        return self.entries * (1 if self.layout == "array" else 2 if self.field == "pattern" else 3)

    def check_size(self, path: Path, nbytes: float) -> None:
        """Raise an InputError if ``nbytes`` bytes cannot hold the numbers."""
        rows = self.sizes[0]
        if 2 * self.numbers - 1 > nbytes:
            raise InputError(
                f"{path} announces {self.entries} entries, more than a file of its size can hold; it is damaged"
            )
        check_rows(path, rows, self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix while SciPy reads it: row, column and value of each entry, mirror images too, then the rows."""
        copies = 1 if self.symmetry == "general" else 2
        return 2 * 24 * copies * self.entries + 8 * self.sizes[0]


def read_matrix_market(path: Path) -> Any:
    """Return the matrix of a file as SciPy reads it.

    Raises an InputError if a number is invalid, or the file has more or fewer than its header announces, or they do not fit
    the memory.
    """
    with _opened(path) as stream:
        header = _read_header(path, stream)
        header.check_size(path, _uncompressed_nbytes(path))
        check_fits_memory(header.nbytes, f"the matrix in {path}")
        body = _CheckedStream(path, header, stream)
        matrix = scipy.io.mmread(body, spmatrix=False)
    if body.numbers != header.numbers:
        raise InputError(
            f"{path} holds {body.numbers} numbers instead of {header.numbers} after its header; it is damaged"
        )
    entries = header.entries
    if header.layout == "array":
        return scipy.sparse.csr_array(matrix)
    if header.symmetry != "general":
        # SciPy puts the entries of the file first, then the mirror images.
        _check_triangle(path, header.symmetry, matrix.row[:entries], matrix.col[:entries], [False, False])
    return matrix


def read_entries(path: Path) -> Entries:
    """Return the shape of the matrix of a file, and its entries in parts: rows, columns and values, mirror images among them.

    So a file that is larger than memory can be read; a dense file is one part. Errors as for :func:`read_matrix_market`.
    """
    with _opened(path) as stream:
        header = _read_header(path, stream)
    if header.layout == "array":
        dense = scipy.sparse.coo_array(read_matrix_market(path))
        return dense.shape, iter([(dense.row, dense.col, dense.data)])
    header.check_size(path, _uncompressed_nbytes(path))
    return (header.sizes[0], header.sizes[1]), _entries(path)


def _entries(path: Path) -> Iterator[tuple[Any, Any, Any]]:
    with _opened(path) as stream:
        header = _read_header(path, stream)
        body, rest, triangles = _CheckedStream(path, header, stream), b"", [False, False]
        body.skip_header()
        width = 2 if header.field == "pattern" else 3
        while text := body.read(_PART_NBYTES):
            end = text.rfind(b"\n") + 1
            lines, rest = rest + text[:end], text[end:]
            if not lines.strip():
                continue
            numbers = np.fromstring(lines.decode("ascii"), sep=" ")  # every number was checked
            if numbers.size % width:
                raise InputError(f"{path} has an entry of more or fewer than {width} numbers; it is damaged")
            rows, columns = (_places(path, numbers[of::width], header.sizes[of]) for of in (0, 1))
            values = np.ones(rows.size) if width == 2 else numbers[2::width]
            yield rows, columns, values
            if header.symmetry != "general":
                _check_triangle(path, header.symmetry, rows, columns, triangles)
                mirrored = rows != columns
                sign = -1.0 if header.symmetry == "skew-symmetric" else 1.0
                yield columns[mirrored], rows[mirrored], sign * values[mirrored]
        if body.numbers != header.numbers:
            raise InputError(
                f"{path} holds {body.numbers} numbers instead of {header.numbers} after its header; it is damaged"
            )


def _places(path: Path, numbers: Any, size: int) -> Any:
    """Return the numbers of rows or columns, counted from 0."""
    places = numbers.astype(np.int64)
    if places.size and (not 1 <= int(places.min()) <= int(places.max()) <= size or (places != numbers).any()):
        raise InputError(f"{path} names a row or column that is no whole number from 1 to {size}; it is damaged")
    return places - 1


def _check_triangle(path: Path, symmetry: str, rows: Any, columns: Any, seen: list[bool]) -> None:
    """Refuse entries on both sides of the diagonal; ``seen`` are those below and above so far."""
    seen[0] |= bool((rows > columns).any())
    seen[1] |= bool((rows < columns).any())
    if all(seen):
        raise InputError(
            f"{path} is {symmetry} but lists entries on both sides of the diagonal, which would count twice; "
            "expected one triangle: remove the other or declare the file general"
        )
    if symmetry == "skew-symmetric" and (rows == columns).any():
        raise InputError(f"{path} is skew-symmetric but has a diagonal; remove it or declare the file general")


def _read_header(path: Path, stream: BinaryIO) -> _Header:
    """Read down to the line of sizes and refuse what SciPy would read but is no real matrix, or no matrix at all."""
    lines = [stream.readline(1024)]  # a binary file may have no line end for long
    words = lines[0].decode("latin-1").lower().split()
    if len(words) != 5 or words[:2] != ["%%matrixmarket", "matrix"]:
        raise InputError(
            f"{path} does not start as a Matrix Market file does, with a line such as "
            f"'%%MatrixMarket matrix coordinate real general', but with {lines[0][:60].decode('latin-1').rstrip()!r}"
        )
    length = 0
    while lines[-1] and (len(lines) == 1 or lines[-1].startswith(b"%") or not lines[-1].strip()):
        lines.append(stream.readline(_LONGEST_LINE))
        length += len(lines[-1])
        if length > _LONGEST_HEADER or (len(lines[-1]) == _LONGEST_LINE and not lines[-1].endswith(b"\n")):
            raise InputError(f"{path} has comments of more than {format_nbytes(_LONGEST_LINE)}; it is damaged")
    layout, field, symmetry = words[2:]
    if field == "complex" or symmetry == "hermitian":
        raise InputError(f"{path} holds a matrix that is {field} {symmetry}; only real matrices are supported")
    if field not in _CHARACTERS or symmetry not in _SYMMETRIES:
        raise InputError(
            f"{path} is declared {field} {symmetry}; expected one of {', '.join(_CHARACTERS)} "
            f"and one of {', '.join(_SYMMETRIES)}"
        )
    words = lines[-1].decode("latin-1").split()
    if layout not in _SIZES or len(words) != _SIZES[layout] or not all(_WHOLE_NUMBER.fullmatch(size) for size in words):
        raise InputError(
            f"{path} is declared {layout}, but its line of sizes is {' '.join(words)[:60]!r}; expected 'array' with rows and "
            "columns, or 'coordinate' with rows, columns and entries"
        )
    sizes = tuple(map(int, words))
    if symmetry != "general" and sizes[:1] != sizes[1:2]:
        raise InputError(f"{path} is declared {symmetry}, but {sizes[0]} x {sizes[1]}; such a matrix is square")
    return _Header(b"".join(lines), layout, field, symmetry, sizes)


class _CheckedStream:
    """A stream for SciPy that counts the numbers after the header and rejects anything that is not a number.

    SciPy by itself reads 2.5E- as 2.5, and past the end of a file that ends so; it reads the Fortran numbers 1.5D+03 and
    1.5-100 as 1.5, and 7.5 among integers as 7; it ignores the rest of a line, and takes no number with a leading plus.
    """

    def __init__(self, path: Path, header: _Header, stream: BinaryIO) -> None:
        self.numbers = 0
        self._path, self._field, self._stream = path, header.field, stream
        self._header = io.BytesIO(header.text)
        self._most = (1 << 20) + _MOST_PER_NUMBER * header.numbers
        self._table = _transitions(_CHARACTERS[header.field])
        self._taken, self._state, self._before, self._ended = 0, _SPACE, b"", False

    def skip_header(self) -> None:
        """Continue after the header."""
        self._header.seek(0, io.SEEK_END)

    def read(self, size: int = -1) -> bytes:
        """Return at most ``size`` bytes; none at the end."""
        header = self._header.read(size)
        if header:
            return header
        text = b""
        while not text and not self._ended:
            text = self._checked(self._stream.read(size)).replace(b"+", b"")
        return text

    def _checked(self, text: bytes) -> bytes:
        """Return a piece of the file after checking it, and a line end behind the last."""
        self._taken += len(text)
        if self._taken > self._most:
            raise InputError(f"{self._path} goes on after the numbers that its header announces; it is damaged")
        self._ended = not text
        text = text or b"\n"  # SciPy reads past the end of a file without it
        self._state, count, wrong = _run(np.frombuffer(text, np.uint8), self._table, self._state)
        self.numbers += count
        if wrong >= 0:
            self._refuse(self._before + text, len(self._before) + wrong)
        self._before = text[-_LONGEST_SHOWN:]
        return text

    def _refuse(self, text: bytes, place: int) -> None:
        """Raise an InputError that shows the character at a place, or the word."""
        if text[place] not in _CHARACTERS[self._field]:
            character = text[place : place + 1].decode("latin-1")
            expected = "numbers such as 1.5e3 (write Fortran's 1.5D3 so)" if self._field == "real" else "whole numbers"
            raise InputError(f"{self._path} holds the character {character!r} among its numbers; expected {expected}")
        first, last = place, place
        while first > 0 and text[first - 1] > 32:
            first -= 1
        while last < len(text) and text[last] > 32:
            last += 1
        word = text[first:last][:_LONGEST_SHOWN].decode("latin-1")
        fortran = re.fullmatch(r"([+-]?[\d.]+)([+-]\d+)", word)
        expected = f"write Fortran's so: {fortran[1]}e{fortran[2]}" if fortran else "expected numbers such as -1.5e-3"
        raise InputError(f"{self._path} holds {word!r}, which is no number; {expected}")


def _transitions(characters: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the state after each state and byte, for a field whose numbers consist of these characters."""
    table = np.full((_WRONG + 1, 256), _WRONG, np.uint8)
    for state, after in _AFTER.items():
        for some, following in after.items():
            table[state, [byte for byte in some if byte in characters]] = following
        if state in _COMPLETE:
            table[state, list(b" \t\r\n")] = _SPACE
    return table


@serial_kernel
def _run(text: Any, table: Any, state: int) -> tuple[int, int, int]:
    """Return the state after a text, how many words began in it, and the first wrong place, or -1."""
    count = 0
    for place in range(text.size):
        after = table[state, text[place]]
        if after == _WRONG:
            return state, count, place
        if state == _SPACE and after != _SPACE:
            count += 1
        state = after
    return state, count, -1


READERS.add(
    "matrix_market",
    Reader(
        "Matrix Market",
        "Matrix Market file",
        (".mtx", ".mtx.gz", ".mtx.bz2"),
        matrix=read_matrix_market,
        entries=read_entries,
        vectors=read_matrix_market,
    ),
)
