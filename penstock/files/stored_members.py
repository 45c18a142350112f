"""Reads large members of zip archives that are stored as they are, with all cores: Python's zipfile reads in one thread."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from penstock.files.parallel_read import read_bytes
from penstock.host.checksums import checksum_of, checksum_of_piece, joined

#: Shorter members are read as fast by zipfile.
LEAST_NBYTES = 32 << 20
# Bytes of the fixed part before a member, and where the lengths of its name and rest stand.
_LOCAL_HEADER, _LENGTHS = 30, 26


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
    pieces = read_bytes(path, start, out.reshape(-1).view(np.uint8), checksum_of_piece)
    _check(member, joined(pieces, zlib.crc32(skipped)))


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
    _check(member, joined([(checksum_of(numbers.view(np.uint8)), numbers.nbytes)], zlib.crc32(skipped)))
    return numbers


def _start_of(path: Path, member: zipfile.ZipInfo) -> int:
    with open(path, "rb") as file:
        file.seek(member.header_offset + _LENGTHS)
        name_length, extra_length = struct.unpack("<HH", file.read(4))
    return member.header_offset + _LOCAL_HEADER + int(name_length) + int(extra_length)


def _check(member: zipfile.ZipInfo, checksum: int) -> None:
    if checksum != member.CRC:
        raise zipfile.BadZipFile(f"the checksum of {member.filename} is wrong")


def can_read_stored(member: zipfile.ZipInfo) -> bool:
    """Return whether a member is stored as it is, and long enough to be worth threads, where the system reads at offsets."""
    stored = member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1  # not encrypted
    return stored and member.file_size >= LEAST_NBYTES and hasattr(os, "pread")
