"""Visits the rows of a matrix on the host, as blocks, complete and in ascending order, whatever its format."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.solvers.coarse.block_products import BlockRows
from penstock.spmv import CPU, Array, BsrMatrix, InputError, Operator, SparseMatrix, format_named
from penstock.spmv.formats.convert import stored_blocks
from penstock.spmv.formats.sliced_bsr import HEIGHT

__all__ = ["block_size_of", "visit_rows"]


# Small enough that what is formed from a slab stays in the cache.
_SLAB_NBYTES = 4 << 20


@runtime_checkable
class _Streamed(Protocol):
    """A matrix that is swept slab by slab."""

    plan: Any

    def sweep(self, visit: Callable[[int, SparseMatrix], None]) -> None: ...

    def turn_to(self, direction: int) -> None: ...


def block_size_of(A: Operator) -> int:
    """Return the rows of the blocks that a matrix stores, 1 without blocks."""
    if isinstance(A, SparseMatrix):
        return A.values.shape[-1] if isinstance(A, BsrMatrix) else int(A.parameters().get("block_size", 1))
    if isinstance(A, _Streamed):
        return int(A.plan.index.block_size)
    return 1


def visit_rows(A: Operator, block_size: int, visit: Callable[[BlockRows], None]) -> None:
    """Call ``visit(rows)`` for consecutive rows of A, with blocks of ``block_size``; one sweep if A is streamed.

    Raises
    ------
    InputError
        If A is not a matrix whose entries can be read.
    """
    if isinstance(A, _Streamed):
        _visit_streamed(A, block_size, visit)
        return
    if not isinstance(A, SparseMatrix):
        raise InputError(f"a coarse level is made of the entries of a matrix, which {type(A).__name__} does not show")
    mirror = _Mirror(A.name, block_size, visit)
    granularity = math.lcm(A.row_granularity, block_size)
    step = max(1, A.shape[0] * _SLAB_NBYTES // max(A.values.nbytes, 1) // granularity) * granularity
    for start in range(0, A.shape[0], step):
        mirror.add(start, A.rows(start, min(start + step, A.shape[0])))


def _visit_streamed(A: _Streamed, block_size: int, visit: Callable[[BlockRows], None]) -> None:
    index = A.plan.index
    mirror = _Mirror(index.format_name, block_size, visit)
    A.turn_to(1)
    A.sweep(lambda number, slab: mirror.add(index.subdivisions[number].row_start, slab))


class _Mirror:
    """Completes rows of which half is stored with the mirror images of earlier rows."""

    def __init__(self, format_name: str, block_size: int, visit: Callable[[BlockRows], None]) -> None:
        self._half, self._size, self._visit = format_named(format_name).traits.half, block_size, visit
        # Mirror images of blocks in rows that have not arrived.
        self._pending: list[tuple[Array, Array, Array]] = []

    def add(self, first_row: int, slab: SparseMatrix) -> None:
        """Add the next rows."""
        rows, columns, blocks = _blocks_of(slab, self._size)
        start = first_row // self._size
        stop = start + slab.shape[0] // self._size
        rows = rows + start
        if self._half:
            rows, columns, blocks = self._completed(rows, columns, blocks, stop)
        order = np.argsort((rows - start) * np.int64(slab.shape[1]) + columns)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows - start, minlength=stop - start))])
        self._visit(BlockRows(start, offsets, columns[order].astype(np.int32), np.ascontiguousarray(blocks[order])))

    def _completed(self, rows: Array, columns: Array, blocks: Array, stop: int) -> tuple[Array, Array, Array]:
        below = columns > rows
        self._pending.append((columns[below], rows[below], blocks[below].swapaxes(1, 2)))
        parts, later = [(rows, columns, blocks)], []
        for entry in self._pending:
            here = entry[0] < stop
            parts.append(tuple(array[here] for array in entry))
            if not here.all():
                later.append(tuple(array[~here] for array in entry))
        self._pending = later
        return tuple(np.concatenate([part[i] for part in parts]) for i in range(3))  # type: ignore[return-value]


def _blocks_of(slab: SparseMatrix, size: int) -> tuple[Array, Array, Array]:
    """Return block rows, block columns and blocks of a slab on the host."""
    host = slab.to_device(CPU)
    if isinstance(host, BsrMatrix) and host.values.shape[-1] == size:
        rows = np.repeat(np.arange(len(host.row_offsets) - 1), np.diff(host.row_offsets))
        return rows, host.column_indices.astype(np.int64), host.values.astype(np.float64, copy=False)
    arrays = host.arrays()
    if "chunk_offsets" in arrays and host.parameters().get("block_size") == size:
        return stored_blocks(
            arrays["chunk_offsets"],
            arrays["column_indices"],
            arrays["values"].astype(np.float64, copy=False),
            arrays["permutation"],
            host.shape[0] // size,
            HEIGHT,
            size,
        )
    if size == 1:
        rows, columns, values = host.triplets()
        return rows.astype(np.int64), columns.astype(np.int64), values.astype(np.float64).reshape(-1, 1, 1)
    blocks = host.to_csr().tobsr((size, size))
    rows = np.repeat(np.arange(len(blocks.indptr) - 1), np.diff(blocks.indptr))
    return rows, blocks.indices.astype(np.int64), blocks.data.astype(np.float64)
