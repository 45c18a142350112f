"""The checksum of zip archives, CRC-32, of large data, by several threads.

The checksums of pieces are joined as Adler's zlib does it: a piece that follows shifts the checksum of what comes before it, a
linear map over the field of two elements.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from penstock.host.threads import PIECE_NBYTES, mapped

#: A checksum and the bytes of which it is.
Piece = tuple[int, int]

_POLYNOMIAL = 0xEDB88320


def checksum_of(data: np.ndarray[Any, np.dtype[np.uint8]], threads: int | None = None) -> int:
    """Return the checksum of bytes; a core takes about 2.6 GB/s.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.host.checksums import checksum_of
    >>> hex(checksum_of(np.frombuffer(b"123456789", dtype=np.uint8)))
    '0xcbf43926'
    """
    if data.size <= PIECE_NBYTES:
        return zlib.crc32(data.data)
    starts = range(0, data.size, PIECE_NBYTES)
    return joined(mapped(lambda start: checksum_of_piece(data[start : start + PIECE_NBYTES]), starts, threads))


def checksum_of_piece(piece: np.ndarray[Any, np.dtype[np.uint8]]) -> Piece:
    """Return the checksum of a piece, in this thread, with its length."""
    return zlib.crc32(piece.data), piece.size


def joined(pieces: Iterable[Piece], before: int = 0) -> int:
    """Return the checksum of pieces that follow each other, and what comes ``before`` them, which has a checksum, too."""
    for of_piece, length in pieces:
        before = _shifted(before, length) ^ of_piece
    return before


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
