"""Reads long runs of bytes and numbers from files with all cores: one thread reads less than a tenth of what memory takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penstock.host.threads import PIECE_NBYTES, mapped

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Seen = TypeVar("Seen")


def read_bytes(path: Path, start: int, target: Bytes, look: Callable[[Bytes], Seen]) -> list[Seen]:
    """Read bytes of a file from ``start`` on into an array, and return what ``look`` returns of each piece of it, in order.

    Raises
    ------
    EOFError
        If the file ends before the array is full.
    """

    def read(place: int, descriptor: int) -> Seen:
        piece, done = target[place : place + PIECE_NBYTES], 0
        while done < piece.size:
            count = _read_at(descriptor, piece[done:], start + place + done)
            if not count:
                raise EOFError(f"{path} ends after {start + place + done} bytes")
            done += count
        return look(piece)

    with open(path, "rb") as file:
        return mapped(lambda place: read(place, file.fileno()), range(0, target.size, PIECE_NBYTES))


def read_numbers(path: Path, start: int, count: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Read numbers of a type, of any byte order, and return them in the byte order of this machine."""
    stored = np.dtype(dtype)
    out = np.empty(count, stored.newbyteorder("="))

    def look(piece: Bytes) -> None:
        if not stored.isnative:
            piece.view(out.dtype).byteswap(inplace=True)

    read_bytes(path, start, out.view(np.uint8), look)
    return out


def _read_at(descriptor: int, target: Bytes, place: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [target.data], place)
    read = os.pread(descriptor, target.size, place)
    target[: len(read)] = np.frombuffer(read, np.uint8)
    return len(read)
