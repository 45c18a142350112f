"""Visits the rows of a matrix as blocks, complete and in ascending order, whatever its format, on the device of the matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.solvers.coarse.boundary import IsSharedOut
from penstock.solvers.products.block_rows import BlockRows, block_rows, row_numbers
from penstock.spmv import (
    Array,
    BsrMatrix,
    InputError,
    Operator,
    SparseMatrix,
    device_of,
    format_named,
)
from penstock.spmv.formats.convert import scalar_triplets, stored_blocks
from penstock.spmv.formats.sliced_bsr import HEIGHT

__all__ = ["Completion", "block_size_of", "diagonal_and_row_sums", "visit_rows"]


# Of the rows that are visited at a time: on a CPU, what is formed from them stays in the cache; on a GPU, they occupy it, better
# if there is room for more.
_SLAB_NBYTES = {"cpu": 4 << 20, "cuda": 96 << 20}
_LARGEST_SLAB_NBYTES, _SHARE_OF_FREE = 256 << 20, 256

#: Block rows, block columns and blocks.
_Blocks = tuple[Array, Array, Array]


@runtime_checkable
class _Turns(Protocol):
    """A matrix whose sweeps have a direction."""

    def turn_to(self, direction: int) -> None: ...


@runtime_checkable
class _Streamed(_Turns, Protocol):
    """A matrix that is swept slab by slab."""

    plan: Any

    def sweep(self, visit: Callable[[int, SparseMatrix], None]) -> None: ...


def block_size_of(A: Operator) -> int:
    """Return the rows of the blocks that a matrix stores, 1 without blocks."""
    if isinstance(A, IsSharedOut):
        return A.couplings[0].block_size if A.couplings else block_size_of(A.square)
    if isinstance(A, SparseMatrix):
        return _stored_size(A)
    if isinstance(A, _Streamed):
        return int(A.plan.index.block_size)
    return 1


def diagonal_and_row_sums(A: Operator, size: int) -> tuple[Array, Array]:
    """Return the dense blocks on the diagonal, and the sums of the absolute values of every row; one sweep if A is streamed.

    Raises
    ------
    InputError
        As for :func:`visit_rows`.
    """
    xp = A.device.xp
    ones = xp.ones(A.shape[0], dtype=A.dtype)
    if isinstance(A, IsSharedOut):
        with _turned_back(A):
            blocks, sums = diagonal_and_row_sums(A.square, size)
        for coupling in A.couplings:
            sums[coupling.rows] += coupling.matrix.apply_absolute(xp.ones(coupling.matrix.shape[1], dtype=A.dtype))
        return blocks, sums
    if not isinstance(A, _Streamed):
        matrix = _as_matrix(A)
        return matrix.diagonal_blocks(size), matrix.apply_absolute(ones)
    starts = A.plan.index.row_starts
    blocks, sums = xp.zeros((A.shape[0] // size, size, size), dtype=A.dtype), xp.zeros(A.shape[0], dtype=A.dtype)

    def visit(number: int, slab: SparseMatrix) -> None:
        slab.add_diagonal_blocks(starts[number], blocks)
        slab.add_absolute(starts[number], ones, sums)

    A.sweep(visit)
    return blocks, sums


def visit_rows(A: Operator, block_size: int, visit: Callable[[BlockRows], None]) -> None:
    """Call ``visit(rows)`` for consecutive rows of A, with blocks of ``block_size``; one sweep if A is streamed.

    Of a matrix that ranks share these are the rows of this rank's square.

    Raises
    ------
    InputError
        If A is not a matrix whose entries can be read.
    """
    if isinstance(A, IsSharedOut):
        with _turned_back(A):
            visit_rows(A.square, block_size, visit)
        return
    if isinstance(A, _Streamed):
        index = A.plan.index
        completion = Completion(index.format_name, block_size, visit, _SLAB_NBYTES[A.device.kind])
        A.turn_to(1)
        A.sweep(lambda number, slab: completion.add(index.subdivisions[number].row_start, slab))
        return
    A = _as_matrix(A)
    completion, granularity = Completion(A.name, block_size, visit), math.lcm(A.row_granularity, block_size)
    enough = _SLAB_NBYTES[A.device.kind]
    if A.device.kind == "cuda":
        enough = max(enough, min(_LARGEST_SLAB_NBYTES, A.device.free_nbytes() // _SHARE_OF_FREE))
    step = max(1, A.shape[0] * enough // max(A.nbytes, 1) // granularity) * granularity
    for start in range(0, A.shape[0], step):
        completion.add(start, A.rows(start, min(start + step, A.shape[0])))


@contextmanager
def _turned_back(A: Any) -> Iterator[None]:
    """Restore the direction in which this rank sweeps, so that neighbours sweep towards each other again."""
    try:
        yield
    finally:
        if isinstance(A, _Turns):
            A.turn_to(1)


def _as_matrix(A: Operator) -> SparseMatrix:
    if not isinstance(A, SparseMatrix):
        raise InputError(f"a coarse level is made of the entries of a matrix, which {type(A).__name__} does not show")
    return A


class Completion:
    """Completes rows of which half is stored by the mirror images of earlier rows.

    It gathers slabs until their blocks take ``enough`` bytes, which makes them worth a visit.

    Parameters
    ----------
    format_name : str
        Format of the slabs.
    block_size : int
        Rows of the blocks that are visited.
    visit : callable
        Receives complete rows, in ascending order.
    enough : int
        Bytes.
    """

    def __init__(self, format_name: str, block_size: int, visit: Callable[[BlockRows], None], enough: int = 0) -> None:
        self._half, self._size, self._visit = format_named(format_name).traits.half, block_size, visit
        self._enough = enough
        # Blocks of rows that have arrived, and mirror images of blocks in rows that have not.
        self._arrived: list[_Blocks] = []
        self._pending: list[_Blocks] = []
        self._start = 0

    def add(self, first_row: int, slab: SparseMatrix) -> None:
        """Take the next rows."""
        rows, columns, blocks = _blocks_of(slab)
        stored = int(blocks.shape[1])
        start, last = first_row // stored, first_row + slab.shape[0] == slab.shape[1]
        if blocks is slab.values and not last:
            blocks = blocks.copy()  # the memory of a slab is used again
        self._arrived.append((rows + start, columns, blocks))
        if last or sum(part[2].nbytes for part in self._arrived) >= self._enough:
            self._complete(start + slab.shape[0] // stored, slab.shape[1], stored)

    def _complete(self, stop: int, width: int, stored: int) -> None:
        """Visit the rows that have arrived, up to a row of stored blocks."""
        start, self._start = self._start, stop
        xp = device_of(self._arrived[0][2]).xp
        rows, columns, blocks = _joined(self._arrived)
        parts = [(rows, columns, blocks)]
        if self._half:
            below = xp.flatnonzero(columns > rows)
            images = (columns[below], rows[below], blocks[below].swapaxes(1, 2))
            pending, self._pending = [*self._pending, images], []
            for entry in pending:
                here = entry[0] < stop
                parts.append(_some(entry, xp.flatnonzero(here)))
                later = xp.flatnonzero(~here)
                if later.size:
                    self._pending.append(_some(entry, later))
        self._arrived, found = [], _joined(parts)
        if stored != self._size:
            found = _regrouped(found, self._size, width)
            start, stop = start * stored // self._size, stop * stored // self._size
        self._visit(block_rows(start, stop, *found, width))


def _joined(parts: list[_Blocks]) -> _Blocks:
    if len(parts) == 1:
        return parts[0]
    xp = device_of(parts[0][2]).xp
    rows, columns, blocks = (xp.concatenate([part[i] for part in parts]) for i in range(3))
    return rows, columns, blocks


def _some(blocks: _Blocks, chosen: Array) -> _Blocks:
    rows, columns, values = blocks
    return rows[chosen], columns[chosen], values[chosen]


def _blocks_of(slab: SparseMatrix) -> _Blocks:
    """Return block rows, block columns and blocks of a slab, where the slab is and as it stores them."""
    if isinstance(slab, BsrMatrix):
        rows = row_numbers(slab.row_offsets, slab.column_indices.size)
        return rows, slab.column_indices.astype(np.int64), slab.values.astype(np.float64, copy=False)
    arrays, size = slab.arrays(), _stored_size(slab)
    if "chunk_offsets" in arrays and "block_size" in slab.parameters():
        return stored_blocks(
            arrays["chunk_offsets"],
            arrays["column_indices"],
            arrays["values"].astype(np.float64, copy=False),
            arrays["permutation"],
            slab.shape[0] // size,
            HEIGHT,
            size,
        )
    rows, columns, values = slab.triplets()
    return rows.astype(np.int64), columns.astype(np.int64), values.astype(np.float64).reshape(-1, 1, 1)


def _stored_size(slab: SparseMatrix) -> int:
    return int(slab.values.shape[-1] if isinstance(slab, BsrMatrix) else slab.parameters().get("block_size", 1))


def _regrouped(blocks: _Blocks, size: int, width: int) -> _Blocks:
    """Return the nonzeros of blocks as blocks of another size; the matrix has ``width`` columns."""
    rows, columns, values = scalar_triplets(*blocks)
    xp = device_of(values).xp
    present = xp.flatnonzero(values)
    rows, columns, values = rows[present], columns[present], values[present]
    across = -(-width // size)
    keys, places = xp.unique(rows // size * np.int64(across) + columns // size, return_inverse=True)
    found = xp.zeros((keys.size, size, size))
    found[places.reshape(-1), rows % size, columns % size] = values
    return keys // across, keys % across, found
