"""Products of sparse matrices of small dense blocks, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import get_num_threads, prange

from penstock.spmv import Array
from penstock.spmv.compilation.jit import parallel_kernel, serial_and_parallel

__all__ = ["SERIAL_ROWS", "BlockRows", "block_product", "smoothed_rows", "transposed"]

#: Up to this many rows, one thread is fast enough for all but the multiplication, and much less is compiled.
SERIAL_ROWS = 1 << 18


@dataclass
class BlockRows:
    """Consecutive rows of a sparse matrix of blocks.

    Parameters
    ----------
    start : int
        The first row.
    offsets : int64 array, (rows + 1,)
    columns : int32 array, (blocks,)
    blocks : float64 array, (blocks, height, width)
    """

    start: int
    offsets: Array
    columns: Array
    blocks: Array

    @property
    def stop(self) -> int:
        """The row after the last one."""
        return self.start + len(self.offsets) - 1

    @staticmethod
    def joined(parts: list[BlockRows]) -> BlockRows:
        """Return rows that follow each other as one."""
        counts = np.concatenate([np.diff(part.offsets) for part in parts])
        offsets = np.concatenate([[0], np.cumsum(counts)])
        columns = np.concatenate([part.columns for part in parts])
        return BlockRows(parts[0].start, offsets, columns, np.concatenate([part.blocks for part in parts]))


def block_product(
    A: BlockRows, B: BlockRows, columns: int, prepare: Callable[[BlockRows], None] | None = None
) -> BlockRows:
    """Return rows of ``A B``, by Gustavson's algorithm (1978) on blocks.

    Parameters
    ----------
    A, B : BlockRows
        B has at least the rows that the columns of A name.
    columns : int
        Block columns of B.
    prepare : callable, optional
        Receives the result before the products are added to its blocks, which are zero.
    """
    rows, parts = len(A.offsets) - 1, 4 * get_num_threads()
    counts = np.zeros(rows + 1, dtype=np.int64)
    pattern = (A.offsets, A.columns, B.start, B.offsets, B.columns, columns)
    many = rows > SERIAL_ROWS
    _count[many](parts, *pattern, counts)
    offsets = np.cumsum(counts)
    found = np.empty(offsets[-1], dtype=np.int32)
    _find[many](parts, *pattern, offsets, found)
    product = BlockRows(A.start, offsets, found, np.zeros((offsets[-1], A.blocks.shape[1], B.blocks.shape[2])))
    if prepare is not None:
        prepare(product)
    _add(parts, *pattern, A.blocks, B.blocks, offsets, found, product.blocks)
    return product


def smoothed_rows(image: BlockRows, own: BlockRows, diagonal: Array, factor: float) -> BlockRows:
    """Turn rows of ``A P`` into those of ``P - factor D A P``, in place; they have at least the columns of P.

    Parameters
    ----------
    image, own : BlockRows
        The same rows of ``A P`` and of P.
    diagonal : array, (rows, height, height)
        D, of the same rows.
    factor : float
    """
    _smooth[len(image.offsets) > SERIAL_ROWS](
        image.offsets, image.columns, image.blocks, own.offsets, own.columns, own.blocks, diagonal, factor
    )
    return image


def transposed(A: BlockRows, columns: int) -> BlockRows:
    """Return the transpose; its columns are numbered from the first row of A."""
    rows = np.repeat(np.arange(len(A.offsets) - 1, dtype=np.int32), np.diff(A.offsets))
    order = np.argsort(A.columns, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(A.columns, minlength=columns))])
    return BlockRows(0, offsets, rows[order], np.ascontiguousarray(A.blocks[order].swapaxes(1, 2)))


@serial_and_parallel
def _count(
    parts: int, offsets: Array, columns: Array, start: int, of_b: Array, b_columns: Array, width: int, counts: Array
) -> None:
    rows = offsets.shape[0] - 1
    for part in prange(parts):
        seen = np.full(width, -1, dtype=np.int32)
        for row in range(rows * part // parts, rows * (part + 1) // parts):
            count = 0
            for entry in range(offsets[row], offsets[row + 1]):
                other = columns[entry] - start
                for place in range(of_b[other], of_b[other + 1]):
                    if seen[b_columns[place]] != row:
                        seen[b_columns[place]] = row
                        count += 1
            counts[row + 1] = count


@serial_and_parallel
def _find(
    parts: int,
    offsets: Array,
    columns: Array,
    start: int,
    of_b: Array,
    b_columns: Array,
    width: int,
    of_c: Array,
    c_columns: Array,
) -> None:
    rows = offsets.shape[0] - 1
    for part in prange(parts):
        seen = np.full(width, -1, dtype=np.int32)
        for row in range(rows * part // parts, rows * (part + 1) // parts):
            following = of_c[row]
            for entry in range(offsets[row], offsets[row + 1]):
                other = columns[entry] - start
                for place in range(of_b[other], of_b[other + 1]):
                    if seen[b_columns[place]] != row:
                        seen[b_columns[place]] = row
                        c_columns[following] = b_columns[place]
                        following += 1


@parallel_kernel
def _add(
    parts: int,
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
) -> None:
    rows, height, inner, across = offsets.shape[0] - 1, blocks.shape[1], blocks.shape[2], b_blocks.shape[2]
    for part in prange(parts):
        place_of = np.empty(width, dtype=np.int64)
        for row in range(rows * part // parts, rows * (part + 1) // parts):
            for place in range(of_c[row], of_c[row + 1]):
                place_of[c_columns[place]] = place
            for entry in range(offsets[row], offsets[row + 1]):
                other = columns[entry] - start
                for place in range(of_b[other], of_b[other + 1]):
                    target = place_of[b_columns[place]]
                    for r in range(height):
                        for i in range(inner):
                            factor = blocks[entry, r, i]
                            for c in range(across):
                                c_blocks[target, r, c] += factor * b_blocks[place, i, c]


@serial_and_parallel
def _smooth(
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
    for row in prange(offsets.shape[0] - 1):
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
