"""Products of sparse matrices of small dense blocks, by Gustavson's algorithm (1978)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from penstock.spmv import CPU, Array, BudgetError, Device, format_nbytes
from penstock.spmv.compilation.cuda_module import CudaSource, launch
from penstock.spmv.compilation.jit import inlined, serial_kernel, shared_range
from penstock.spmv.compilation.sorting import sort_part
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.products.block_rows import BlockRows, row_numbers, rows_with_entries
from penstock.spmv.products.hashing import EVERY_COLUMN, Purpose, bins_of_bounds, bins_of_offsets, run

BLOCK_PRODUCT_KERNELS = CudaSource("penstock.spmv.kernels", "block_products.cu")

# Up to this many rows, the product's pattern is found in one pass of one thread.
_SERIAL_ROWS = 1 << 18
# Rows that are worth a thread, which looks at as many numbers as a product has columns before it begins.
_ROWS_OF_A_THREAD = 1024
# Columns of a product, at most, for which there is memory before they are counted.
_FOUND_AT_ONCE = 1 << 25
# On a GPU: rows of the product of up to _SHORT_ROW blocks on average are formed by a few lanes each, those of up to
# _MIDDLING_ROW by half a warp. Those of more than _LONG_ROW are formed by a thread block each, as are fewer than _FEW_ROWS rows,
# which do not fill the device; others by a warp.
_SHORT_ROW, _MIDDLING_ROW, _LONG_ROW, _FEW_ROWS = 5, 8, 64, 1024
# Blocks of a short, a middling, a usual and a long row that are formed at a time; with 32 of a usual row, products of the matrix
# of a cube with a prolongator take a tenth longer. Warps for a long row. The largest blocks of A that are copied to shared
# memory, in numbers.
_TILES, _WARPS_OF_LONG_ROWS, _COPIED_AREA = (8, 16, 48, 128), 8, 18


def block_product(
    A: BlockRows,
    B: BlockRows,
    columns: int,
    prepare: Callable[[BlockRows], None] | None = None,
    *,
    upper: bool = False,
) -> BlockRows:
    """Return rows of ``A B`` in float64, on the device of A; ``prepare`` receives the result while its blocks are still zero.

    ``upper``: only the blocks on the diagonal and right of it, of a product that is symmetric.
    """
    return product_of_pattern(A, B, columns, pattern_of_product(A, B, columns, upper=upper), prepare)


def pattern_of_product(A: BlockRows, B: BlockRows, columns: int, *, upper: bool = False) -> tuple[Array, Array]:
    """Return the offsets and columns of rows of ``A B``, as of :func:`block_product`; blocks are not read."""
    pattern: tuple[Array, Array] = find_kernel("block_rows", "pattern", A.device.kind)(A, B, columns, upper)
    return pattern


def product_of_pattern(
    A: BlockRows,
    B: BlockRows,
    columns: int,
    pattern: tuple[Array, Array],
    prepare: Callable[[BlockRows], None] | None = None,
) -> BlockRows:
    """Return rows of ``A B`` as :func:`block_product` does, from their offsets and columns, which are known.

    Blocks at other places are left out.
    """
    shape, xp = (pattern[1].size, A.blocks.shape[1], B.blocks.shape[2]), A.device.xp
    new = xp.empty if prepare is None else xp.zeros
    product = BlockRows(A.start, *pattern, allocated(A.device, lambda: new(shape), 8 * math.prod(shape)), columns)
    if prepare is not None:
        prepare(product)
    find_kernel("block_rows", "multiply", A.device.kind)(A, B, columns, product, prepare is not None)
    return product


def smoothed_rows(image: BlockRows, own: BlockRows, diagonal: Array, factor: float) -> BlockRows:
    """Turn rows of ``A P`` into those of ``P - factor D A P``, in place; they have at least the columns of P."""
    find_kernel("block_rows", "smooth", image.device.kind)(image, own, diagonal, factor)
    return image


def allocated(device: Device, make: Callable[[], Array], nbytes: int) -> Array:
    """Return the array that ``make`` allocates for a result, or raise a BudgetError if the device has too little memory."""
    refused = BudgetError(
        f"the product takes {format_nbytes(nbytes)} in one array, more than {device} has; multiply fewer rows at a time"
    )
    # A host promises memory that it does not have; asking a GPU for its free memory takes longer than a small product.
    if device.kind == "cpu" and nbytes > device.free_nbytes():
        raise refused
    try:
        return make()
    except MemoryError as error:
        raise refused from error


@register_kernel("block_rows", "pattern", "cpu")
def _pattern_cpu(A: BlockRows, B: BlockRows, columns: int, upper: bool = False) -> tuple[Array, Array]:
    offsets, indices = _whole_pattern_cpu(A, B, columns)
    if not upper:
        return offsets, indices
    rows = row_numbers(offsets, indices.size)
    kept = np.flatnonzero(indices >= rows + A.start)
    return np.searchsorted(rows[kept], np.arange(len(offsets))).astype(np.int64), indices[kept]


def _whole_pattern_cpu(A: BlockRows, B: BlockRows, columns: int) -> tuple[Array, Array]:
    rows = len(A.offsets) - 1
    offsets = np.zeros(rows + 1, dtype=np.int64)
    pattern = (A.offsets, A.columns, B.start, B.offsets, B.columns, columns)
    if rows <= _SERIAL_ROWS:
        most = int((B.offsets[1:] - B.offsets[:-1])[A.columns - B.start].sum())  # if no two entries have the same place
        if most <= _FOUND_AT_ONCE:
            indices = np.empty(most, dtype=np.int32)
            entries = _find_at_once(*pattern, offsets, indices)
            return offsets, indices[:entries].copy()
    _count(rows, *pattern, offsets)
    offsets = np.cumsum(offsets)
    entries = int(offsets[-1])
    indices = allocated(CPU, lambda: np.empty(entries, dtype=np.int32), 4 * entries)
    _find(rows, *pattern, offsets, indices)
    return offsets, indices


@register_kernel("block_rows", "multiply", "cpu")
def _multiply_cpu(A: BlockRows, B: BlockRows, columns: int, C: BlockRows, add: bool) -> None:
    pattern = (A.offsets, A.columns, B.start, B.offsets, B.columns, columns)
    rows = len(A.offsets) - 1
    if A.blocks[:1].size == B.blocks[:1].size == 1:
        values = [of.blocks.reshape(-1) for of in (A, B, C)]
        _multiply_numbers(rows, *pattern, values[0], values[1], C.offsets, C.columns, values[2], add)
        return
    _multiply_blocks(rows, *pattern, A.blocks, B.blocks, C.offsets, C.columns, C.blocks, add)


@register_kernel("block_rows", "smooth", "cpu")
def _smooth_cpu(image: BlockRows, own: BlockRows, diagonal: Array, factor: float) -> None:
    arrays = (image.offsets, image.columns, image.blocks, own.offsets, own.columns, own.blocks)
    _smooth(len(image.offsets) - 1, *arrays, diagonal, factor)


@register_kernel("block_rows", "pattern", "cuda")
def _pattern_cuda(A: BlockRows, B: BlockRows, columns: int, upper: bool = False) -> tuple[Array, Array]:
    least = A.start if upper else EVERY_COLUMN
    offsets = counted_cuda(A, B, columns, least)
    entries = int(offsets[-1])
    indices = allocated(A.device, lambda: A.device.xp.empty(entries, dtype=np.int32), 4 * entries)
    run(Purpose.COLUMNS, bins_of_offsets(offsets), A, B, columns, None, (offsets, indices, None), least)
    return offsets, indices


def counted_cuda(A: BlockRows, B: BlockRows, columns: int, least: int = EVERY_COLUMN) -> Array:
    """Return the offsets of the rows of a product; ``least`` as for :func:`~penstock.spmv.products.hashing.run`."""
    offsets = A.device.xp.zeros(len(A.offsets), dtype=np.int64)
    run(Purpose.COUNT, bins_of_bounds(A, B, columns), A, B, columns, offsets[1:], (None, None, None), least)
    A.device.xp.cumsum(offsets, out=offsets)
    return offsets


@register_kernel("block_rows", "multiply", "cuda")
def _multiply_cuda(A: BlockRows, B: BlockRows, columns: int, C: BlockRows, add: bool) -> None:
    rows, (height, inner), across = len(A.offsets) - 1, A.blocks.shape[1:], B.blocks.shape[2]
    team = _team_for(A, C, teams_for(height, inner, across))
    function = BLOCK_PRODUCT_KERNELS.function(f"multiply_blocks<{height}, {inner}, {across}, {team.template}>")
    of_a, of_b = (A.offsets, A.columns, A.blocks), (B.offsets, B.columns, B.blocks)
    of_c = (C.offsets, C.columns, C.blocks, np.bool_(add))
    arguments = (np.int64(rows), *of_a, np.int64(B.start), *of_b, *of_c)
    launch(function, -(-rows // team.rows) * 32 * team.warps, 32 * team.warps, arguments)


@register_kernel("block_rows", "smooth", "cuda")
def _smooth_cuda(image: BlockRows, own: BlockRows, diagonal: Array, factor: float) -> None:
    rows, (height, across) = len(image.offsets) - 1, image.blocks.shape[1:]
    function = BLOCK_PRODUCT_KERNELS.function(f"smooth_block_rows<{height}, {across}>")
    of_own = (own.offsets, own.columns, own.blocks)
    arguments = (np.int64(rows), image.offsets, image.columns, image.blocks, *of_own, diagonal, np.float64(factor))
    launch(function, 32 * rows, 256, arguments)


class Team(NamedTuple):
    """Lanes that form a row of a product."""

    groups: int  # of lanes that share a row; each forms a block of it at a time
    warps: int  # of a thread block
    words: int  # 32 times this many entries of A are processed at a time
    tile: int  # blocks of a row of the product that are formed at a time
    copied: bool  # blocks of A to shared memory
    rows: int  # formed by a thread block

    @property
    def template(self) -> str:
        """Arguments of the kernel."""
        return f"{self.groups}, {self.warps}, {self.words}, {self.tile}, {str(self.copied).lower()}"


def teams_for(height: int, inner: int, across: int) -> tuple[Team, Team, Team, Team]:
    """Return teams for short, middling, usual and long rows of products of blocks, (height, inner) by (inner, across)."""
    of_warp, fits = 32 // (across if across % 2 else across // 2), height * inner <= _COPIED_AREA
    some, half, warps = max(1, of_warp // 5), max(1, of_warp // 2), _WARPS_OF_LONG_ROWS
    return (
        Team(some, 1, 1, _TILES[0], False, of_warp // some),
        Team(half, 2, 1, _TILES[1], fits, 2 * (of_warp // half)),
        Team(of_warp, 2, 1, _TILES[2], fits, 2),
        Team(of_warp * warps, warps, 4, _TILES[3], fits, 1),
    )


def _team_for(A: BlockRows, C: BlockRows, teams: tuple[Team, Team, Team, Team]) -> Team:
    short, middling, usual, long = teams
    rows = max(1, rows_with_entries(A.offsets))
    if rows < _FEW_ROWS or C.columns.size > _LONG_ROW * rows:
        return long
    if C.columns.size > _MIDDLING_ROW * rows:
        return usual
    return short if C.columns.size <= _SHORT_ROW * rows else middling


@shared_range(least=_ROWS_OF_A_THREAD)
def _count(
    begin: int,
    end: int,
    offsets: Array,
    columns: Array,
    start: int,
    of_b: Array,
    b_columns: Array,
    width: int,
    counts: Array,
) -> None:
    seen = np.full(width, -1, dtype=np.int32)
    for row in range(begin, end):
        count = 0
        for entry in range(offsets[row], offsets[row + 1]):
            other = columns[entry] - start
            for place in range(of_b[other], of_b[other + 1]):
                if seen[b_columns[place]] != row:
                    seen[b_columns[place]] = row
                    count += 1
        counts[row + 1] = count


@inlined
def _list_columns(
    row: int,
    offsets: Array,
    columns: Array,
    start: int,
    of_b: Array,
    b_columns: Array,
    seen: Array,
    c_columns: Array,
    following: int,
) -> int:
    """List the columns of a row of the product from place ``following`` on, unsorted; return the place behind them."""
    for entry in range(offsets[row], offsets[row + 1]):
        other = columns[entry] - start
        for place in range(of_b[other], of_b[other + 1]):
            if seen[b_columns[place]] != row:
                seen[b_columns[place]] = row
                c_columns[following] = b_columns[place]
                following += 1
    return following


@shared_range(least=_ROWS_OF_A_THREAD)
def _find(
    begin: int,
    end: int,
    offsets: Array,
    columns: Array,
    start: int,
    of_b: Array,
    b_columns: Array,
    width: int,
    of_c: Array,
    c_columns: Array,
) -> None:
    seen = np.full(width, -1, dtype=np.int32)
    for row in range(begin, end):
        _list_columns(row, offsets, columns, start, of_b, b_columns, seen, c_columns, of_c[row])
        sort_part(c_columns, of_c[row], of_c[row + 1])


@serial_kernel
def _find_at_once(
    offsets: Array,
    columns: Array,
    start: int,
    of_b: Array,
    b_columns: Array,
    width: int,
    of_c: Array,
    c_columns: Array,
) -> int:
    """Fill the offsets and columns of the product, for which there is enough memory; return their number."""
    seen, following = np.full(width, -1, dtype=np.int32), 0
    for row in range(offsets.shape[0] - 1):
        following = _list_columns(row, offsets, columns, start, of_b, b_columns, seen, c_columns, following)
        sort_part(c_columns, of_c[row], following)
        of_c[row + 1] = following
    return following


@shared_range(least=_ROWS_OF_A_THREAD)
def _multiply_blocks(
    begin: int,
    end: int,
    offsets: Array,
    columns: Array,
    start: int,
    of_b: Array,
    b_columns: Array,
    width: int,
    blocks: Array,
    b_blocks: Array,
    of_c: Array,
    c_columns: Array,
    c_blocks: Array,
    add: bool,
) -> None:
    """Set the rows of a product, or add to them."""
    height, inner, across = blocks.shape[1], blocks.shape[2], b_blocks.shape[2]
    place_of = np.full(width, -1, dtype=np.int64)
    for row in range(begin, end):
        for place in range(of_c[row], of_c[row + 1]):
            place_of[c_columns[place]] = place
            if not add:
                for r in range(height):
                    for c in range(across):
                        c_blocks[place, r, c] = 0.0
        for entry in range(offsets[row], offsets[row + 1]):
            other = columns[entry] - start
            for place in range(of_b[other], of_b[other + 1]):
                target = place_of[b_columns[place]]
                if target < of_c[row]:  # of an earlier row, or of none
                    continue
                for r in range(height):
                    for i in range(inner):
                        factor = blocks[entry, r, i]
                        for c in range(across):
                            c_blocks[target, r, c] += factor * b_blocks[place, i, c]


@shared_range(least=_ROWS_OF_A_THREAD)
def _multiply_numbers(
    begin: int,
    end: int,
    offsets: Array,
    columns: Array,
    start: int,
    of_b: Array,
    b_columns: Array,
    width: int,
    values: Array,
    b_values: Array,
    of_c: Array,
    c_columns: Array,
    c_values: Array,
    add: bool,
) -> None:
    """Do what ``_multiply_blocks`` does for blocks of one number: loops over their rows and columns would be most of the work."""
    place_of = np.full(width, -1, dtype=np.int64)
    for row in range(begin, end):
        for place in range(of_c[row], of_c[row + 1]):
            place_of[c_columns[place]] = place
            if not add:
                c_values[place] = 0.0
        for entry in range(offsets[row], offsets[row + 1]):
            factor, other = values[entry], columns[entry] - start
            for place in range(of_b[other], of_b[other + 1]):
                target = place_of[b_columns[place]]
                if target >= of_c[row]:  # others are of an earlier row, or of none
                    c_values[target] += factor * b_values[place]


@shared_range(least=1024)
def _smooth(
    begin: int,
    end: int,
    offsets: Array,
    columns: Array,
    blocks: Array,
    of_own: Array,
    own_columns: Array,
    own_blocks: Array,
    diagonal: Array,
    factor: float,
) -> None:
    height, across = blocks.shape[1], blocks.shape[2]
    for row in range(begin, end):
        scaled = np.empty((height, across))
        for place in range(offsets[row], offsets[row + 1]):
            for r in range(height):
                for c in range(across):
                    scaled[r, c] = 0.0
                for i in range(height):
                    weight = factor * diagonal[row, r, i]
                    for c in range(across):
                        scaled[r, c] -= weight * blocks[place, i, c]
            for r in range(height):
                for c in range(across):
                    blocks[place, r, c] = scaled[r, c]
            for own in range(of_own[row], of_own[row + 1]):
                if own_columns[own] == columns[place]:
                    for r in range(height):
                        for c in range(across):
                            blocks[place, r, c] += own_blocks[own, r, c]
