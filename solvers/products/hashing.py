"""Rows of a product of sparse matrices on a GPU: in hash tables in shared memory, and in dense rows where they are long."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from penstock.solvers.products.block_rows import BlockRows
from penstock.spmv import Array, device_of
from penstock.spmv.compilation.cuda_module import cuda_function, launch, multiprocessors, type_names

__all__ = ["BLOCK_LANES", "LANES", "Bin", "Purpose", "bins_of_bounds", "bins_of_offsets", "run"]


class Purpose(IntEnum):
    """What the rows of a product are made for."""

    COUNT = 0
    COLUMNS = 1
    VALUES = 2


#: Lanes that may share a row whose table is short, and the threads that share one whose table is long.
LANES, BLOCK_LANES = (4, 8, 16, 32), 256
_BINS, _DENSE, _DENSE_THREADS = 16, 15, 512
_LONGEST_SHORT_TABLE = 512
_GROUPED_THREADS, _SHARED_NBYTES = 128, 48 << 10
# What dense rows may take at once.
_DENSE_NBYTES = 256 << 20


@dataclass(frozen=True)
class Bin:
    """Rows whose tables have the same length.

    Parameters
    ----------
    exponent : int
        Tables have ``2**exponent`` slots; 15 means dense rows.
    count : int
        How many rows.
    rows : int32 array, (count,), or None
        None: all rows.
    """

    exponent: int
    count: int
    rows: Array | None


def bins_of_bounds(A: BlockRows, B: BlockRows, width: int) -> list[Bin]:
    """Return the rows of ``A B`` by the number of columns that they have at most."""
    xp, rows = A.device.xp, len(A.offsets) - 1
    lengths, bins = xp.empty(rows, dtype=np.int32), xp.zeros(_BINS, dtype=np.int32)
    given = (np.int64(rows), A.offsets, A.columns, np.int64(B.start), B.offsets, np.int64(width), lengths, bins)
    launch(cuda_function("products.cu", "bound_rows"), rows, 256, given)
    return _listed(rows, bins, lengths, None)


def bins_of_offsets(offsets: Array) -> list[Bin]:
    """Return the rows of a product by the number of their columns, which is known."""
    rows, bins = len(offsets) - 1, device_of(offsets).xp.zeros(_BINS, dtype=np.int32)
    launch(cuda_function("products.cu", "bin_rows"), rows, 256, (np.int64(rows), offsets, bins))
    return _listed(rows, bins, None, offsets)


def _listed(rows: int, bins: Array, lengths: Array | None, offsets: Array | None) -> list[Bin]:
    device = device_of(bins)
    counts = device.to_host(bins)
    present = np.flatnonzero(counts).tolist()
    if len(present) <= 1:
        return [Bin(exponent, rows, None) for exponent in present]
    starts = (np.cumsum(counts) - counts).astype(np.int32)
    listed = device.xp.empty(rows, dtype=np.int32)
    arguments = (np.int64(rows), lengths, offsets, device.asarray(starts.copy()), listed)
    launch(cuda_function("products.cu", "list_rows"), rows, 256, arguments)
    return [Bin(k, int(counts[k]), listed[starts[k] : starts[k] + counts[k]]) for k in present]


def run(
    purpose: Purpose,
    bins: list[Bin],
    A: BlockRows,
    B: BlockRows,
    width: int,
    counts: Array | None,
    C: tuple[Array, ...],
) -> None:
    """Make the rows of all bins.

    Parameters
    ----------
    purpose : Purpose
    bins : list of Bin
    A, B : BlockRows
        For :attr:`Purpose.VALUES` with blocks of one row and column, of one type.
    width : int
        Columns of B.
    counts : int64 array, (rows,), or None
        Receives the number of columns of every row, for :attr:`Purpose.COUNT`.
    C : (offsets, columns, values)
        Of the product; what the purpose does not need is None.
    """
    with_values = purpose == Purpose.VALUES
    type_name = type_names(A.blocks) if with_values else "double"
    of_a = (A.offsets, A.columns, A.blocks if with_values else None, np.int64(B.start))
    of_b = (B.offsets, B.columns, B.blocks if with_values else None)
    for part in bins:
        given: tuple[Any, ...] = (np.int64(part.count), part.rows, *of_a, *of_b, counts, *C)
        if part.exponent == _DENSE:
            _run_dense(f"dense_rows<{type_name}, {int(purpose)}>", part, given, width, with_values)
            continue
        slots = 1 << part.exponent
        lanes = _lanes(slots, B)
        threads, nbytes = max(lanes, _GROUPED_THREADS), slots * (12 if with_values else 4)
        while lanes < threads and threads // lanes * nbytes > _SHARED_NBYTES:
            threads //= 2
        if lanes > max(LANES):
            threads = lanes
        groups = threads // lanes
        function: Any = cuda_function("products.cu", f"hash_rows<{type_name}, {lanes}, {int(purpose)}>")
        if groups * nbytes > function.max_dynamic_shared_size_bytes:
            function.max_dynamic_shared_size_bytes = groups * nbytes
        grid = (-(-part.count // groups),)
        function(grid, (threads,), (*given, np.int32(slots)), shared_mem=groups * nbytes)


def _lanes(slots: int, B: BlockRows) -> int:
    """Return the lanes of a row: about as many as a row of B has entries, and more for long tables."""
    if slots > _LONGEST_SHORT_TABLE:
        return BLOCK_LANES
    mean = B.columns.size / max(1, len(B.offsets) - 1)
    return next(lanes for lanes in LANES if lanes == max(LANES) or (lanes >= mean and lanes >= slots // 16))


def _run_dense(name: str, part: Bin, given: tuple[Any, ...], width: int, with_values: bool) -> None:
    device = device_of(given[2])
    words = -(-width // 32)
    nbytes = 4 * words + (8 * width if with_values else 0)
    blocks = max(1, min(part.count, _DENSE_NBYTES // nbytes, 2 * multiprocessors(given[2])))
    bits = device.xp.zeros(blocks * words, dtype=np.uint32)
    dense = device.xp.empty(blocks * width) if with_values else None
    cuda_function("products.cu", name)((blocks,), (_DENSE_THREADS,), (*given, np.int64(width), bits, dense))
