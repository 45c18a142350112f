"""Visits the rows of a matrix as blocks, complete and in ascending order, whatever its format, on the device of the matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from penstock.solvers.coarse.boundary import IsSharedOut
from penstock.spmv import Array, InputError, Operator, SparseMatrix
from penstock.spmv.products.block_rows import BlockRows
from penstock.spmv.products.completion import Completion, stored_size

# Of the rows that are visited at a time: on a CPU, what is formed from them stays in the cache; on a GPU, they occupy it, better
# if there is room for more.
_SLAB_NBYTES = {"cpu": 4 << 20, "cuda": 96 << 20}
_LARGEST_SLAB_NBYTES, _SHARE_OF_FREE = 256 << 20, 256


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
        return stored_size(A)
    if isinstance(A, _Streamed):
        return int(A.plan.index.block_size)
    return 1


def diagonal_and_row_sums(A: Operator, size: int) -> tuple[Array, Array]:
    """Return the dense blocks on the diagonal, and the sums of the absolute values of every row; one sweep if A is streamed."""
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

    Of a matrix that ranks share these are the rows of this rank's square. A matrix whose entries cannot be read is refused.
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
