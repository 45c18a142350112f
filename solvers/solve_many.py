"""Solves for any number of right-hand sides, in blocks that fit the memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.solvers.block_cg import block_cg, block_cg_workspace_nbytes
from penstock.solvers.checks import check_finite
from penstock.solvers.own_preconditioner import as_preconditioner
from penstock.solvers.result import BlockSolveResult, IterationRecord, SolveResult, StopReason
from penstock.spmv import (
    Array,
    BudgetError,
    InputError,
    Operator,
    SweptOperator,
    as_operator,
    device_of,
    format_nbytes,
    parse_nbytes,
)
from penstock.spmv.communicator import communicator_of
from penstock.spmv.vectors.block_space import LARGEST_VECTOR_BLOCK

# With more columns, work on vectors needs more time than products with a resident matrix, and its arithmetic grows with the
# square of the columns. Sweeps over a streamed matrix are slower than that.
LARGEST_RESIDENT_BLOCK = 32
# The fraction of the free memory that is not used.
_LEFT_FREE = 0.1


def solve_many(
    A: Any,
    B: Array,
    X0: Array | None = None,
    *,
    block_size: int | None = None,
    memory: int | str | None = None,
    M: Any = None,
    monitor: Callable[[IterationRecord], object] | None = None,
    solver: Callable[..., Any] = block_cg,
    **options: Any,
) -> BlockSolveResult:
    """Solve ``A X = B`` for any number of right-hand sides, block after block.

    Parameters
    ----------
    A : operator or matrix
        As for :func:`cg`.
    B : array, (n, columns)
        On the device of A; or on the host, from which blocks of columns are copied to the device one after the other, and
        the solutions back.
    X0 : array, (n, columns), optional
        Initial guesses, on the device of B.
    block_size : int, optional
        Columns solved together; by default from :func:`choose_block_size`.
    memory : int or str, optional
        Memory for the vectors of a block, for example ``"8 GiB"``. Initial guesses and the preconditioner's own blocks, two
        for :func:`chebyshev`, are not included. By default the memory that a streamed matrix's plan reserves for vectors,
        else most of the free memory.
    solver : callable
        What solves for a block, such as :func:`minres`.
    M, monitor, **options
        As for :func:`block_cg`. A monitor receives the iterations of each block. If it stops one, no other is started.

    Returns
    -------
    BlockSolveResult
        Columns not started have NaN residuals if there was a guess. Costs are totals. With a state if there was one block.

    Raises
    ------
    InputError
        As for :func:`block_cg`.
    BudgetError
        If the memory does not hold the vectors of one column.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import jacobi, solve_many
    >>> beam = Cantilever(nodes=(5, 3, 3), dof=3)
    >>> A = beam.matrix()
    >>> B = beam.load()[:, None] * np.arange(1.0, 7.0)
    >>> result = solve_many(A, B, block_size=3, M=jacobi(A), rtol=1e-8)
    >>> result.converged, result.x.shape, np.allclose(result.x[:, 5], 6 * result.x[:, 0])
    (True, (135, 6), True)
    """
    operator = as_operator(A)
    B, X0 = (np.asarray(V, dtype=operator.dtype) if isinstance(V, list | tuple) else V for V in (B, X0))
    _check_arguments(operator, B, X0, options.get("state"))
    block_size = _checked_block_size(operator, B.shape[1], block_size, memory)
    if M is not None:
        M = as_preconditioner(M, operator)
    total = _Total(operator, B, X0)
    for start in range(0, B.shape[1], block_size):
        if total.stopped:
            total.add_not_started(start)
            break
        block = slice(start, min(start + block_size, B.shape[1]))
        guess = None if X0 is None else total.to_device(X0, block)
        result = solver(operator, total.to_device(B, block), guess, M=M, monitor=monitor, **options)
        total.add(result, block)
        del result, guess  # their blocks make room for the next ones
    return total.result()


def _check_arguments(A: Operator, B: Array, X0: Array | None, state: object) -> None:
    if B.ndim != 2 or B.shape[0] != A.shape[0] or not B.shape[1]:
        raise InputError(f"B must have shape ({A.shape[0]}, columns) with at least one column, not {B.shape}")
    if X0 is not None and X0.shape != B.shape:
        raise InputError(f"X0 must have the shape of B, {B.shape}, not {X0.shape}")
    if state is not None:
        raise InputError("a state belongs to one block; resume from it with block_cg")


def _checked_block_size(A: Operator, columns: int, block_size: int | None, memory: int | str | None) -> int:
    if block_size is None:
        # All ranks solve as many together as the one with the least memory for each of its rows.
        return int(-communicator_of(A).largest(-choose_block_size(A, columns, memory)))
    if not 1 <= block_size <= LARGEST_VECTOR_BLOCK:
        raise InputError(f"block_size must be 1 to {LARGEST_VECTOR_BLOCK}, but is {block_size}")
    return block_size


class _Total:
    """The solutions of all blocks and their total cost; B and X0 are checked before the first block is solved."""

    def __init__(self, A: Operator, B: Array, X0: Array | None) -> None:
        self._A, self._B, self._guessed, self._home = A, B, X0 is not None, device_of(B)
        xp = self._home.xp
        for name, vectors in (("B", B), ("X0", X0)):
            if vectors is not None:
                check_finite(name, vectors, self._home)
        # Columns that are not started return their guess.
        self._x = xp.zeros(B.shape, dtype=A.dtype) if X0 is None else xp.array(X0, dtype=A.dtype)
        self._columns: list[SolveResult] = []
        self._iterations = self._sweeps = self._bytes_streamed = 0
        self._timings: dict[str, float] = {}
        self._state: Any = None

    @property
    def stopped(self) -> bool:
        """Whether a monitor has stopped a block."""
        return any(column.reason is StopReason.STOPPED for column in self._columns)

    def to_device(self, vectors: Array, block: slice) -> Array:
        """Return a block of columns on the device of A."""
        part = self._home.xp.ascontiguousarray(vectors[:, block])
        return part if self._home == self._A.device else self._A.device.asarray(part)

    def add(self, result: BlockSolveResult, block: slice) -> None:
        """Store the solutions of a block and add its cost."""
        self._x[:, block] = result.x if self._home == self._A.device else self._A.device.to_host(result.x)
        for number, column in enumerate(result.columns, start=block.start):
            self._columns.append(SolveResult(**{**vars(column), "x": self._x[:, number]}))
        whole = block == slice(0, self._B.shape[1])
        self._state = result.state if whole else None
        self._iterations += result.iterations
        self._sweeps += result.sweeps
        self._bytes_streamed += result.bytes_streamed
        self._timings = {name: self._timings.get(name, 0.0) + seconds for name, seconds in result.timings.items()}

    def add_not_started(self, start: int) -> None:
        """Add the columns from ``start`` on, whose solve was not started."""
        for number in range(start, self._B.shape[1]):
            residual = math.nan if self._guessed else float(bool(self._B[:, number].any()))
            x, cost = self._x[:, number], {"sweeps": 0, "bytes_streamed": 0, "timings": {}}
            self._columns.append(SolveResult.of(x, StopReason.STOPPED, [residual], residual, None, **cost))

    def result(self) -> BlockSolveResult:
        """Return the result for all columns."""
        totals = (self._iterations, self._sweeps, self._bytes_streamed, self._timings)
        return BlockSolveResult(self._x, tuple(self._columns), *totals, state=self._state)


def choose_block_size(A: Any, columns: int, memory: int | str | None = None) -> int:
    """Return the number of right-hand sides to solve together.

    It is the largest number that fits the memory, because one pass over the matrix serves all columns and each column helps
    the others: up to 64 for a streamed matrix, whose sweeps are slow, and up to 32 for a resident one. It is then reduced so
    that all blocks have about the same size.

    Parameters
    ----------
    A : operator or matrix
    columns : int
        Number of right-hand sides.
    memory : int or str, optional
        Memory for the vectors of a block; as for :func:`solve_many`.

    Returns
    -------
    int

    Raises
    ------
    InputError
        If there is no column.
    BudgetError
        If the vectors of one column do not fit the memory.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import choose_block_size
    >>> A = Cantilever(nodes=6, dof=3).matrix()
    >>> choose_block_size(A, columns=50), choose_block_size(A, columns=50, memory="256 KiB")
    (25, 7)
    """
    if columns < 1:
        raise InputError(f"there must be at least one right-hand side, not {columns}")
    A = as_operator(A)
    room, n = _room(A) if memory is None else parse_nbytes(memory), max(1, A.shape[0])
    column_nbytes = block_cg_workspace_nbytes(n, 1, A.dtype)
    if room < column_nbytes:
        raise BudgetError(
            f"the vectors of one right-hand side need {format_nbytes(column_nbytes)}, but {format_nbytes(room)} are available; "
            "free memory, or plan a smaller budget for the matrix"
        )
    useful = LARGEST_VECTOR_BLOCK if isinstance(A, SweptOperator) else LARGEST_RESIDENT_BLOCK
    largest = min(useful, room // column_nbytes, columns)
    blocks = -(-columns // largest)
    return -(-columns // blocks)


def _room(A: Operator) -> int:
    """Return the bytes available for vectors."""
    if isinstance(A, SweptOperator) and A.workspace_nbytes:
        return A.workspace_nbytes
    return int((1 - _LEFT_FREE) * A.device.free_nbytes())
