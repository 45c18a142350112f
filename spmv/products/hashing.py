"""Rows of a product of sparse matrices on a GPU: in hash tables in shared memory, and in dense rows where they are long."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from penstock.spmv import Array, device_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch, multiprocessors, shared_limit, type_names
from penstock.spmv.products.block_rows import BlockRows


class Purpose(IntEnum):
    """What the rows of a product are made for."""

    COUNT = 0
    COLUMNS = 1
    VALUES = 2


PRODUCT_KERNELS = CudaSource("penstock.spmv.kernels", "products.cu", enums=(Purpose,))
#: Lanes that may share a row whose table is short, and the threads that share one whose table is long.
LANES, BLOCK_LANES = (4, 8, 16, 32), 256
_BINS, _DENSE, _DENSE_THREADS = 16, 15, 512
#: Warps that share a row of A of at least this many entries, where its row of the product is dense.
PARTS, _LONG_ROW = 8, 256
# Fewer rows than this share of those in the next bin join it.
_FEW = 0.25
# The longest tables of groups of lanes: where rows are sorted, by comparing all columns, and where not.
_LONGEST_SORTED, _LONGEST_COUNTED = 512, 2048
# Shared memory for the bits that mark the places of columns, and for those of dense rows.
_RANK_NBYTES, _BITS_NBYTES = 64 << 10, 96 << 10
_GROUPED_THREADS, _SHARED_NBYTES = 128, 48 << 10
#: The least column of a product, relative to its row, where none is left out.
EVERY_COLUMN = -(1 << 62)
# Memory for all dense rows in use at a time.
_DENSE_NBYTES = 128 << 20


@dataclass(frozen=True)
class Bin:
    """Rows whose tables have ``2**exponent`` slots, 15 for dense rows; ``rows`` is None for all rows."""

    exponent: int
    count: int
    rows: Array | None


def bins_of_bounds(A: BlockRows, B: BlockRows, width: int) -> list[Bin]:
    """Return the rows of ``A B`` by the number of columns that they have at most."""
    xp, rows = A.device.xp, len(A.offsets) - 1
    lengths, bins = xp.empty(rows, dtype=np.int32), xp.zeros(_BINS, dtype=np.int32)
    arguments = (np.int64(rows), A.offsets, A.columns, np.int64(B.start), B.offsets, np.int64(width), lengths, bins)
    launch(PRODUCT_KERNELS.function("bound_rows"), rows, 256, arguments)
    return _listed(rows, bins, lengths, None)


def bins_of_offsets(offsets: Array) -> list[Bin]:
    """Return the rows of a product by the number of their columns, which is known."""
    rows, bins = len(offsets) - 1, device_of(offsets).xp.zeros(_BINS, dtype=np.int32)
    launch(PRODUCT_KERNELS.function("bin_rows"), rows, 256, (np.int64(rows), offsets, bins))
    return _listed(rows, bins, None, offsets)


def _listed(rows: int, bins: Array, lengths: Array | None, offsets: Array | None) -> list[Bin]:
    device = device_of(bins)
    counts, into = _merged(device.to_host(bins))
    present = np.flatnonzero(counts).tolist()
    if len(present) <= 1:
        return [Bin(exponent, rows, None) for exponent in present]
    starts = np.cumsum(counts) - counts
    listed = device.xp.empty(rows, dtype=np.int32)
    map_ = device.asarray(np.concatenate([into, starts]).astype(np.int32))
    launch(PRODUCT_KERNELS.function("list_rows"), rows, 256, (np.int64(rows), lengths, offsets, map_, listed))
    return [Bin(k, int(counts[k]), listed[starts[k] : starts[k] + counts[k]]) for k in present]


def _merged(counts: Any) -> tuple[Any, Any]:
    """Return the rows in every bin after few rows have joined the next one, and the bin that takes the rows of each.

    A launch and a list of rows cost more than tables of twice the length for few of them.
    """
    counts, into = counts.astype(np.int64), np.arange(_BINS)
    for exponent in range(_LONGEST_SORTED.bit_length() - 1):
        if 0 < counts[exponent] < _FEW * counts[exponent + 1]:
            counts[exponent + 1] += counts[exponent]
            counts[exponent] = 0
            into[into == exponent] = exponent + 1
    return counts, into


def run(
    purpose: Purpose,
    bins: list[Bin],
    A: BlockRows,
    B: BlockRows,
    width: int,
    counts: Array | None,
    C: tuple[Array, ...],
    least: int = EVERY_COLUMN,
) -> None:
    """Make the rows of all bins; arrays that the purpose does not need are None.

    Columns smaller than the row's number in A, from 0, plus ``least`` are left out; the first row of A gives the upper half.

    ``counts``, int64, receives the number of columns of every row for :attr:`Purpose.COUNT`; ``C`` holds offsets, columns and
    values of the product. For :attr:`Purpose.VALUES`, A and B have blocks of one row and column, of one type.
    """
    with_values = purpose == Purpose.VALUES
    type_name = type_names(A.blocks) if with_values else "double"
    of_a = (A.offsets, A.columns, A.blocks if with_values else None, np.int64(B.start))
    of_b = (B.offsets, B.columns, B.blocks if with_values else None)
    dense_from, limit = _DENSE, shared_limit(A.offsets)
    if purpose == Purpose.COUNT and 4 * -(-width // 32) <= min(_BITS_NBYTES, limit):
        dense_from = _LONGEST_COUNTED.bit_length()  # bits are set faster than tables are searched
    dense_from = min(dense_from, (limit // _slot_nbytes(purpose)).bit_length())  # longer tables do not fit
    for part in bins:
        arguments: tuple[Any, ...] = (np.int64(part.count), part.rows, *of_a, *of_b, counts, *C, np.int64(least))
        if part.exponent < dense_from:
            _run_hashed(type_name, purpose, part, arguments, width, _lanes(1 << part.exponent, B, purpose))
            continue
        shared_out = with_values and 8 * PARTS * width <= _DENSE_NBYTES
        for rows, parts in _by_length(part, A.offsets) if shared_out else [(part, 1)]:
            arguments = (np.int64(rows.count), rows.rows, *arguments[2:])
            _run_dense(f"dense_rows<{type_name}, {int(purpose)}, {parts}>", parts, arguments, width, with_values)


def _slot_nbytes(purpose: Purpose) -> int:
    """Return the bytes of a slot of a table: a column, and a sum."""
    return 12 if purpose == Purpose.VALUES else 4


def _run_hashed(
    type_name: str, purpose: Purpose, part: Bin, arguments: tuple[Any, ...], width: int, lanes: int
) -> None:
    slots, words, threads = 1 << part.exponent, 0, max(lanes, _GROUPED_THREADS)
    nbytes = slots * _slot_nbytes(purpose)
    if lanes == BLOCK_LANES:
        if purpose != Purpose.COUNT and 8 * -(-width // 32) <= min(_RANK_NBYTES, shared_limit(arguments[2]) - nbytes):
            words = -(-width // 32)
    else:
        while lanes < threads and threads // lanes * nbytes > _SHARED_NBYTES:
            threads //= 2
    groups = threads // lanes
    function = PRODUCT_KERNELS.function(f"hash_rows<{type_name}, {lanes}, {int(purpose)}>")
    arguments = (*arguments, np.int32(slots), np.int32(words))
    _launch(function, -(-part.count // groups), threads, arguments, groups * nbytes + 8 * words)


def _launch(function: Any, blocks: int, threads: int, arguments: tuple[Any, ...], shared_nbytes: int) -> None:
    if shared_nbytes > function.max_dynamic_shared_size_bytes:
        function.max_dynamic_shared_size_bytes = shared_nbytes
    function((blocks,), (threads,), arguments, shared_mem=shared_nbytes)


def _lanes(slots: int, B: BlockRows, purpose: Purpose) -> int:
    """Return the lanes of a row: about one per entry of a row of B, and more for long tables."""
    if slots > (_LONGEST_COUNTED if purpose == Purpose.COUNT else _LONGEST_SORTED):
        return BLOCK_LANES
    mean = B.columns.size / max(1, len(B.offsets) - 1)
    return next(lanes for lanes in LANES if lanes == max(LANES) or (lanes >= mean and lanes >= slots // 16))


def _by_length(part: Bin, offsets: Array) -> list[tuple[Bin, int]]:
    """Return the rows of a bin whose rows of A are short, and those of which several warps take a part each."""
    xp = device_of(offsets).xp
    rows = xp.arange(part.count, dtype=np.int32) if part.rows is None else part.rows
    long = offsets[1:][rows] - offsets[:-1][rows] >= _LONG_ROW
    groups = [(rows[~long], 1), (rows[long], PARTS)]
    return [(Bin(part.exponent, len(chosen), chosen), parts) for chosen, parts in groups if len(chosen)]


def _run_dense(name: str, parts: int, arguments: tuple[Any, ...], width: int, with_values: bool) -> None:
    device, words, count = device_of(arguments[2]), -(-width // 32), int(arguments[0])
    in_shared = 4 * parts * words <= min(_BITS_NBYTES, shared_limit(arguments[2]))
    nbytes = parts * ((0 if in_shared else 4 * words) + (8 * width if with_values else 0))
    blocks = max(1, min(count, 4 * multiprocessors(arguments[2]), _DENSE_NBYTES // max(1, nbytes)))
    bits = None if in_shared else device.xp.zeros(blocks * parts * words, dtype=np.uint32)
    dense = device.xp.empty(blocks * parts * width) if with_values else None
    arguments, threads = (*arguments, np.int64(width), bits, dense), _DENSE_THREADS if parts == 1 else 32 * parts
    _launch(PRODUCT_KERNELS.function(name), blocks, threads, arguments, 4 * parts * words if in_shared else 0)
