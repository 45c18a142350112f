"""Reads large members of zip archives that are stored as they are, with all cores: Python's zipfile reads in one thread.

The checksum of a member is that of its pieces, joined as Adler's zlib does it: a piece that follows shifts the checksum of what
comes before it, a linear map over the field of two elements.
"""

from __future__ import annotations

import functools
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from penstock.files.parallel_read import read_bytes
from penstock.host.threads import mapped

#: Shorter members are read as fast by zipfile.
LEAST_NBYTES = 32 << 20
_PIECE_NBYTES = 16 << 20
_POLYNOMIAL = 0xEDB88320
_LOCAL_HEADER, _LENGTHS = (
    30,
    26,
)  # bytes of the fixed part before a member, and where the lengths of its name and rest stand


def read_stored(path: Path, member: zipfile.ZipInfo, skipped: bytes, out: np.ndarray[Any, Any]) -> None:
    """Read a stored member behind the bytes ``skipped``, which have been read, into a contiguous array.

    Raises
    ------
    EOFError
        If the file is shorter than it says.
    zipfile.BadZipFile
        If the checksum is another.
    """
    start = _start_of(path, member) + len(skipped)
    pieces = read_bytes(path, start, out.reshape(-1).view(np.uint8), _checksum)
    _check(member, skipped, pieces)


def map_stored(
    path: Path, member: zipfile.ZipInfo, skipped: bytes, count: int, dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Map ``count`` numbers of a stored member behind the bytes ``skipped`` into memory, and read them to check them.

    They take no memory of their own. What is written to them does not reach the file; what changes the file changes them.

    Raises
    ------
    ValueError
        If the file is shorter than it says.
    zipfile.BadZipFile
        If the checksum is another.
    """
    numbers = np.asarray(np.memmap(path, dtype, "c", _start_of(path, member) + len(skipped), (count,)))
    whole = numbers.view(np.uint8)
    starts = range(0, whole.size, _PIECE_NBYTES)
    _check(member, skipped, mapped(lambda start: _checksum(whole[start : start + _PIECE_NBYTES]), starts))
    return numbers


def _start_of(path: Path, member: zipfile.ZipInfo) -> int:
    with open(path, "rb") as file:
        file.seek(member.header_offset + _LENGTHS)
        name_length, extra_length = struct.unpack("<HH", file.read(4))
    return member.header_offset + _LOCAL_HEADER + int(name_length) + int(extra_length)


def _checksum(piece: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[int, int]:
    return zlib.crc32(piece.data), piece.size


def _check(member: zipfile.ZipInfo, skipped: bytes, pieces: list[tuple[int, int]]) -> None:
    """Compare the joined checksum of pieces, each with its length, with that of a member."""
    checksum = zlib.crc32(skipped)
    for of_piece, length in pieces:
        checksum = _shifted(checksum, length) ^ of_piece
    if checksum != member.CRC:
        raise zipfile.BadZipFile(f"the checksum of {member.filename} is wrong")


def can_read_stored(member: zipfile.ZipInfo) -> bool:
    """Return whether a member is stored as it is, and long enough to be worth threads, where the system reads at offsets."""
    stored = member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1  # not encrypted
    return stored and member.file_size >= LEAST_NBYTES and hasattr(os, "pread")


def _shifted(checksum: int, length: int) -> int:
    """Return what a checksum contributes to that of data which goes on for ``length`` bytes."""
    power = 0
    while length:
        if length & 1:
            checksum = _product(_shift(power), checksum)
        length, power = length >> 1, power + 1
    return checksum


@functools.cache
def _shift(power: int) -> tuple[int, ...]:
    """Return the map, by columns, of a checksum that ``2 ** power`` bytes follow."""
    if power == -3:  # a bit
        return (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    half = _shift(power - 1)
    return tuple(_product(half, column) for column in half)


def _product(columns: tuple[int, ...], vector: int) -> int:
    total = 0
    for column in columns:
        if vector & 1:
            total ^= column
        vector >>= 1
    return total
