"""Checks offsets and indices that come from a file, before kernels that trust them read and write by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.spmv.compilation.jit import serial_kernel
from penstock.spmv.device import Array
from penstock.spmv.errors import InputError

__all__ = ["check_indices", "check_offsets", "check_structure", "check_upper_half"]


def check_structure(
    arrays: Mapping[str, Array], rows: int, columns: int, chunk: int, *, padded: tuple[str, ...] = ()
) -> None:
    """Check the structure of a slab, on the host, in one pass over its offsets and indices.

    Parameters
    ----------
    arrays : mapping of str to array
        By the names that all formats use: ``row_offsets`` or ``chunk_offsets``, ``row_indices``, ``column_indices`` and
        ``permutation``, perhaps with a prefix. Others are not looked at.
    rows, columns : int
        Of the slab; in blocks, if its indices count blocks.
    chunk : int
        Entries that two offsets differ by are a multiple of this.
    padded : tuple of str
        Arrays of column indices in which negative numbers are padding.

    Raises
    ------
    InputError
        If offsets do not ascend from 0 to the number of entries, an index is out of range, row indices do not ascend, or a
        permutation names a row twice; the message names the array.
    """
    for name, array in arrays.items():
        if name.endswith(("_offsets", "_indices", "permutation")) and array.dtype.kind != "i":
            raise InputError(f"{name} are of type {array.dtype}, not whole numbers")
        if name.endswith("_offsets"):
            check_offsets(name, array, len(arrays["column_indices"]), chunk)
        elif name.endswith("column_indices"):
            check_indices(name, array, columns, padded=name in padded)
        elif name.endswith("row_indices"):
            check_indices(name, array, rows, padded=False)
            if (array[1:] < array[:-1]).any():
                raise InputError(f"{name} do not ascend")
        elif name == "permutation" and array.size:
            check_indices(name, array, rows, padded=False)
            if not _names_each_once(array):
                raise InputError(f"{name} holds a row twice")


def check_offsets(name: str, offsets: Array, entries: int, chunk: int) -> None:
    """Raise an InputError unless offsets ascend from 0 to the number of entries, in multiples of a chunk."""
    if not offsets.size or offsets[0] != 0 or offsets[-1] != entries or _is_uneven(offsets, chunk):
        raise InputError(f"{name} do not ascend from 0 to the {entries} stored entries in steps of {chunk}")


def check_indices(name: str, indices: Array, count: int, *, padded: bool) -> None:
    """Raise an InputError if an index is not below ``count``, or negative where that does not stand for padding."""
    least, most = _range_of(indices.reshape(-1))
    if most >= count or (least < 0 and not padded):
        wrong = most if most >= count else least
        raise InputError(f"{name} hold {wrong}, outside 0 to {count - 1}")


def check_upper_half(offsets: Array, columns: Array, first_row: int, chunk: int) -> None:
    """Raise an InputError if a block of half a matrix lies left of the diagonal: its mirror image would be written elsewhere."""
    row = _row_with_entry_on_the_left(offsets, columns, first_row, chunk)
    if row >= 0:
        raise InputError(f"block row {row} holds a block left of the diagonal, in half of a symmetric matrix")


@serial_kernel
def _is_uneven(offsets: Array, chunk: int) -> bool:
    for place in range(offsets.size - 1):
        length = offsets[place + 1] - offsets[place]
        if length < 0 or length % chunk != 0:
            return True
    return False


@serial_kernel
def _range_of(indices: Array) -> tuple[int, int]:
    """Return the least and the largest index; 0 and -1 for none."""
    if indices.size == 0:
        return 0, -1
    least = most = int(indices[0])
    for index in indices:
        least, most = min(least, int(index)), max(most, int(index))
    return least, most


@serial_kernel
def _names_each_once(permutation: Array) -> bool:
    seen = np.zeros(permutation.size, np.bool_)
    for row in permutation:
        if seen[row]:
            return False
        seen[row] = True
    return True


@serial_kernel
def _row_with_entry_on_the_left(offsets: Any, columns: Any, first_row: int, chunk: int) -> int:
    for number in range(offsets.size - 1):
        for entry in range(offsets[number], offsets[number + 1]):
            row = first_row + number * chunk + (entry - offsets[number]) % chunk
            if 0 <= columns[entry] < row:
                return int(row)
    return -1
