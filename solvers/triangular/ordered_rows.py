"""The rows of a triangle in the order in which they are solved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.solvers.triangular.block_entries import ORDER_KERNELS, BlockEntries
from penstock.solvers.triangular.levels import Waits
from penstock.spmv import Array, InputError, device_of
from penstock.spmv.compilation.cuda_module import launch, type_names
from penstock.spmv.compilation.jit import shared_range
from penstock.spmv.compilation.table import find_kernel, register_kernel


@dataclass(frozen=True)
class OrderedRows:
    """The strict triangle of a matrix with its rows in the order of the solve; row and column numbers are places in it."""

    offsets: Array  # int32, (rows + 1,)
    places: Array  # int32, (entries,): the place that an entry multiplies; it comes before the row's own
    sources: Array  # int32, (entries,): where an entry stands in the matrix
    blocks: Array  # (entries, size, size)
    inverse: Array  # float64, (rows, size, size): inverses of the diagonal blocks, times omega
    rows: Array | None  # int32, (rows,): the row at every place; None: places are rows
    levels: Any  # int64, (levels + 1,), on the host, or None: where the levels begin; places of a level do not need each other
    longest: int  # entries of the longest row

    @property
    def count(self) -> int:
        """The number of rows of blocks."""
        return len(self.offsets) - 1

    @property
    def size(self) -> int:
        """The rows of a block."""
        return int(self.blocks.shape[1])

    @property
    def mean_entries(self) -> float:
        """Entries of the mean row."""
        return float(self.places.size) / max(1, self.count)

    @property
    def nbytes(self) -> int:
        """Bytes that a solve reads besides the vectors."""
        arrays = (self.offsets, self.places, self.blocks, self.inverse, self.rows)
        return sum(int(array.nbytes) for array in arrays if array is not None)

    def with_values(self, entries: BlockEntries, diagonal: Diagonal, kind: str) -> OrderedRows:
        """Return these rows with the values of a matrix of the same pattern; refuse a diagonal block that has no inverse."""
        return replace(self, blocks=entries.values[self.sources], inverse=_inverse(entries, diagonal, self.rows, kind))


@dataclass(frozen=True)
class Diagonal:
    """The blocks on the diagonal of a matrix, and the conditions on them."""

    entries: Array | None  # int64, (rows,): where they stand among the entries; None: they are the identity
    omega: float = 1.0  # factor of their inverses
    positive: bool = False  # whether they must be positive definite


def ordered_rows(
    entries: BlockEntries,
    ranks: Array | None,
    upper: bool,
    waits: Waits,
    order: tuple[Array | None, Any],
    diagonal: Diagonal,
    kind: str,
) -> OrderedRows:
    """Return the strict triangle of a matrix in an order of its rows; refuse a diagonal block that has no inverse.

    Ranks and ``upper`` select the triangle, as for :func:`count_waits`, whose result for it is ``waits``. ``order`` has the
    rows in the order of the solve, int32, and where its levels begin, int64; None: ascending rows, no levels.
    """
    xp, (rows, levels) = device_of(entries.values).xp, order
    counts, place_of = waits.counts, None
    if rows is not None:
        place_of = xp.empty(entries.rows, dtype=np.int32)
        place_of[rows] = xp.arange(entries.rows, dtype=np.int32)
        counts = counts[rows]
    offsets = xp.zeros(entries.rows + 1, dtype=np.int32)
    xp.cumsum(counts, out=offsets[1:])
    places = xp.empty(int(offsets[-1]), dtype=np.int32)
    sources = xp.empty_like(places)
    find_kernel("triangle", "entries", kind)(entries, ranks, upper, rows, place_of, offsets, places, sources)
    inverse = _inverse(entries, diagonal, rows, kind)
    return OrderedRows(offsets, places, sources, entries.values[sources], inverse, rows, levels, waits.longest)


def _inverse(entries: BlockEntries, diagonal: Diagonal, rows: Array | None, kind: str) -> Array:
    xp = device_of(entries.values).xp
    inverse = xp.empty((entries.rows, entries.size, entries.size))
    bad = find_kernel("triangle", "inverse", kind)(entries, diagonal, rows, inverse)
    if bad < entries.rows:
        what = "diagonal entry" if entries.size == 1 else "block on the diagonal"
        fault = "is not positive definite" if diagonal.positive else "is singular: it has no inverse"
        raise InputError(f"the {what} at row {bad * entries.size} {fault}; check that row")
    return inverse


def columns_of(vectors: Array) -> int:
    """Return the number of vectors of a vector ``(n,)`` or a block ``(n, k)``."""
    return 1 if vectors.ndim == 1 else int(vectors.shape[1])


@register_kernel("triangle", "entries", "cpu")
def _entries_cpu(
    entries: BlockEntries,
    ranks: Array | None,
    upper: bool,
    rows: Array | None,
    place_of: Array | None,
    offsets: Array,
    places: Array,
    sources: Array,
) -> None:
    natural = np.arange(entries.rows, dtype=np.int32)
    orders = (natural if array is None else array for array in (ranks, rows, place_of))
    _list_entries(entries.rows, entries.offsets, entries.columns, upper, *orders, offsets, places, sources)


@register_kernel("triangle", "entries", "cuda")
def _entries_cuda(
    entries: BlockEntries,
    ranks: Array | None,
    upper: bool,
    rows: Array | None,
    place_of: Array | None,
    offsets: Array,
    places: Array,
    sources: Array,
) -> None:
    arguments: tuple[Any, ...] = (np.int32(entries.rows), entries.offsets, entries.columns, ranks, np.int32(upper))
    arguments += (rows, place_of, offsets, places, sources)
    launch(ORDER_KERNELS.function("list_entries"), entries.rows, 256, arguments)


@register_kernel("triangle", "inverse", "cpu")
def _inverse_cpu(entries: BlockEntries, diagonal: Diagonal, rows: Array | None, inverse: Array) -> int:
    rows = np.arange(entries.rows, dtype=np.int32) if rows is None else rows
    if diagonal.entries is None:
        inverse[...] = diagonal.omega * np.eye(entries.size)
        return entries.rows
    good = np.empty(entries.rows, dtype=np.bool_)
    _invert(len(rows), entries.values, diagonal.entries, rows, diagonal.omega, diagonal.positive, inverse, good)
    return entries.rows if good.all() else int(rows[~good].min())


@register_kernel("triangle", "inverse", "cuda")
def _inverse_cuda(entries: BlockEntries, diagonal: Diagonal, rows: Array | None, inverse: Array) -> int:
    first_bad = device_of(entries.values).xp.full(1, entries.rows, dtype=np.int32)
    function = ORDER_KERNELS.function(f"invert_diagonal<{type_names(entries.values)}, {entries.size}>")
    arguments = (np.int32(entries.rows), entries.values, diagonal.entries, rows, np.float64(diagonal.omega))
    launch(function, entries.rows, 256, (*arguments, np.int32(diagonal.positive), inverse, first_bad))
    return int(first_bad[0])


@shared_range(least=4096)
def _list_entries(
    begin: int,
    end: int,
    offsets: Array,
    columns: Array,
    upper: bool,
    ranks: Array,
    rows: Array,
    place_of: Array,
    new_offsets: Array,
    places: Array,
    sources: Array,
) -> None:
    for place in range(begin, end):
        row, following = rows[place], new_offsets[place]
        for entry in range(offsets[row], offsets[row + 1]):
            column = columns[entry]
            if column != row and ((ranks[column] > ranks[row]) if upper else (ranks[column] < ranks[row])):
                places[following], sources[following] = place_of[column], entry
                following += 1


@shared_range(least=1024)
def _invert(
    begin: int,
    end: int,
    values: Array,
    diagonal: Array,
    rows: Array,
    omega: float,
    positive: bool,
    inverse: Array,
    good: Array,
) -> None:
    """Invert blocks by Gauss and Jordan's elimination without exchanges of rows."""
    size = values.shape[1]
    for place in range(begin, end):
        block, ok = inverse[place], True
        source = values[diagonal[rows[place]]]
        for i in range(size):
            for j in range(size):
                block[i, j] = source[i, j]
        for k in range(size):
            pivot = 1.0 / block[k, k]
            ok = (
                ok
                and (block[k, k] > 0.0 or (block[k, k] < 0.0 and not positive))
                and pivot != 0.0
                and np.isfinite(pivot)
            )
            block[k, k] = 1.0
            for j in range(size):
                block[k, j] *= pivot
            for i in range(size):
                if i != k:
                    factor = block[i, k]
                    block[i, k] = 0.0
                    for j in range(size):
                        block[i, j] -= factor * block[k, j]
        for i in range(size):
            for j in range(size):
                block[i, j] *= omega
        good[place] = ok
