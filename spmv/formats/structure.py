"""Checks offsets and indices that come from a file, before kernels use them without bounds checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.spmv.compilation.jit import serial_kernel
from penstock.spmv.device import Array
from penstock.spmv.errors import InputError
from penstock.spmv.formats.limits import ascend


def check_structure(
    arrays: Mapping[str, Array], rows: int, columns: int, chunk: int, *, padded: tuple[str, ...] = ()
) -> None:
    """Check the offsets, indices and permutation of a slab, on the host; an InputError names the wrong array.

    Arrays go by the names that all formats use, perhaps with a prefix; others are not checked. Rows and columns count blocks
    if the indices do. Differences of offsets must be multiples of ``chunk``; in ``padded`` arrays negative indices are
    padding.
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
            if not ascend(array):
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
    least, most = (int(indices.min()), int(indices.max())) if indices.size else (0, -1)
    if most >= count or (least < 0 and not padded):
        wrong = most if most >= count else least
        raise InputError(f"{name} hold {wrong}, outside 0 to {count - 1}")


def check_upper_half(offsets: Array, columns: Array, first_row: int, chunk: int) -> None:
    """Raise an InputError if a block of half a matrix lies left of the diagonal: its mirror image would be written elsewhere."""
    row = _row_with_entry_on_the_left(offsets, columns, first_row, chunk)
    if row >= 0:
        raise InputError(f"block row {row} holds a block left of the diagonal, in half of a symmetric matrix")


def _is_uneven(offsets: Array, chunk: int) -> bool:
    lengths = np.diff(offsets)
    return bool((lengths < 0).any() or (chunk > 1 and (lengths % chunk).any()))


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
