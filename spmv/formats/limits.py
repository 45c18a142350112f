"""Limits that all formats share, 32-bit indices and small dense blocks; checks and conversions of indices and offsets.

All cores take part in these, where NumPy uses one.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeVar

import numpy as np

from penstock.host.threads import in_pieces
from penstock.spmv.device import Array, device_of
from penstock.spmv.errors import InputError

INT32_MAX = 2**31 - 1
#: Rows of the largest dense blocks that formats store and preconditioners invert.
LARGEST_DENSE_BLOCK = 8

Found = TypeVar("Found")

# Entries that a thread looks at or converts at a time; fewer are not worth threads.
_PIECE = 1 << 21


def check_columns(columns: int, what: str) -> None:
    """Refuse a matrix with more columns than 32-bit indices can name; ``what`` it is called."""
    if columns > INT32_MAX:
        raise InputError(
            f"{what}: {columns:,} columns do not fit 32-bit column indices; a matrix has {INT32_MAX:,} at most"
        )


def check_unknowns_of_a_node(block_size: Any) -> None:
    """Refuse what is not the size of a small dense block."""
    whole = isinstance(block_size, Integral) and not isinstance(block_size, bool)
    if not (whole and 1 <= block_size <= LARGEST_DENSE_BLOCK):
        raise InputError(f"block_size must be a whole number, 1 to {LARGEST_DENSE_BLOCK}, not {block_size!r}")


def check_block_size(size: int, rows: int) -> int:
    """Return the number of diagonal blocks, or refuse a size that does not divide the rows."""
    if size < 1 or rows % size:
        raise InputError(f"a block size must divide the {rows} rows of the matrix; {size} does not")
    return rows // size


def narrow_offsets(offsets: Array, start: int, stop: int) -> Array:
    """Return ``offsets[start : stop + 1]`` counted from 0 as int32, or raise an InputError beyond 2**31 - 1 entries."""
    part = offsets[start : stop + 1] - offsets[start]
    if part.size and int(part[-1]) > INT32_MAX:
        raise InputError(
            f"rows {start} to {stop} hold {int(part[-1])} entries, more than a slab's {INT32_MAX}: cut finer"
        )
    return part.astype(np.int32)


def within(indices: Array, stop: int) -> bool:
    """Return whether all indices are 0 or more and below ``stop``."""

    def is_within(place: slice) -> bool:
        return int(indices[place].min()) >= 0 and int(indices[place].max()) < stop

    return all(_in_pieces(is_within, indices))


def narrowed(indices: Array) -> Array:
    """Return indices as int32, themselves if they are; those that do not fit become -1 or the largest number of int32."""
    if indices.dtype == np.int32:
        return indices
    if indices.dtype.itemsize < 4:
        return indices.astype(np.int32)
    xp, least = device_of(indices).xp, -1 if indices.dtype.kind == "i" else 0
    out = xp.empty(indices.size, dtype=np.int32)

    def convert(place: slice) -> None:
        out[place] = xp.clip(indices[place], least, INT32_MAX)

    _in_pieces(convert, indices)
    return out


def as_type(numbers: Array, dtype: Any) -> Array:
    """Return numbers in a type that holds them, themselves if they are of that type."""
    if numbers.dtype == dtype:
        return numbers
    out = device_of(numbers).xp.empty(numbers.shape, dtype=dtype)

    def convert(place: slice) -> None:
        out[place] = numbers[place]

    _in_pieces(convert, numbers)
    return out


def longest_row(offsets: Array) -> int:
    """Return the entries of the longest row between these offsets, 0 without rows."""

    def of_piece(place: slice) -> int:
        part = offsets[place.start : place.stop + 1]
        return int((part[1:] - part[:-1]).max())

    return max(_in_pieces(of_piece, offsets[1:]), default=0)


def ascend(numbers: Array) -> bool:
    """Return whether no number is smaller than the one before it."""

    def of_piece(place: slice) -> bool:
        part = numbers[place.start : place.stop + 1]
        return bool((part[1:] >= part[:-1]).all())

    return all(_in_pieces(of_piece, numbers[1:]))


def _in_pieces(function: Callable[[slice], Found], numbers: Array) -> list[Found]:
    """Return what a function returns for the places of all pieces of an array; on a GPU that is a single piece."""
    one = device_of(numbers).kind == "cuda"
    return in_pieces(function, numbers.size, max(numbers.size, 1) if one else _PIECE)
