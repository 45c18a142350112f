"""Limits that all formats share: 32-bit indices, small dense blocks."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from penstock.spmv.device import Array
from penstock.spmv.errors import InputError

INT32_MAX = 2**31 - 1
#: Rows of the largest dense blocks that formats store and preconditioners invert.
LARGEST_DENSE_BLOCK = 8


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
