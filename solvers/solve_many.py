"""Any number of right-hand sides, in blocks that fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.solvers.block_conjugate_gradients import block_cg, block_cg_workspace_nbytes
from penstock.solvers.preconditioners import as_preconditioner
from penstock.solvers.result import BlockSolveResult, IterationRecord, SolveResult, StopReason
from penstock.solvers.stopping import check_finite
from penstock.spmv import (
    Array,
    BudgetError,
    CountsTraffic,
    InputError,
    Operator,
    PlansWorkspace,
    as_operator,
    device_of,
    format_nbytes,
    parse_nbytes,
)
from penstock.spmv.block_vectors import LARGEST_BLOCK

__all__ = ["LARGEST_RESIDENT_BLOCK", "choose_block_size", "solve_many"]

# With more columns, vectors take more time than a matrix in memory, and their arithmetic grows with the square of the
# columns. The passes over a streamed matrix take longer than that.
LARGEST_RESIDENT_BLOCK = 32
# Of the memory that is free, what is left to others.
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
    **options: Any,
) -> BlockSolveResult:
    """Solve ``A X = B`` for any number of right-hand sides, block after block.

    Parameters
    ----------
    A : operator or matrix
        As for :func:`cg`.
    B : array, (n, columns)
        On the device of A; or on the host, from where blocks of columns go to the device one after the other, and the
        solutions come back.
    X0 : array, (n, columns), optional
        First guesses, where B is.
    block_size : int, optional
        Columns solved together; by default what :func:`choose_block_size` says.
    memory : int or str, optional
        Memory for the vectors of a block, such as ``"8 GiB"``; first guesses and what a preconditioner holds for itself,
        such as two blocks of :func:`chebyshev`, come on top. By default what a streamed matrix's plan has set aside for
        vectors, else most of what is free.
    M, monitor, **options
        As for :func:`block_cg`. Iterations that a monitor sees are those of a block. If it stops one, no other is begun.

    Returns
    -------
    BlockSolveResult
        With all columns, also such as were not begun, whose residuals are NaN if there was a guess; iterations, sweeps,
        bytes and seconds are those of all blocks together.

    Raises
    ------
    InputError
        As for :func:`block_cg`.
    BudgetError
        If the memory does not hold the vectors of one column.
    """
    operator = as_operator(A)
    B, X0 = (np.asarray(given, dtype=operator.dtype) if isinstance(given, list | tuple) else given for given in (B, X0))
    if B.ndim != 2 or B.shape[0] != operator.shape[0] or not B.shape[1]:
        raise InputError(f"B must have shape ({operator.shape[0]}, columns) with at least one column, not {B.shape}")
    if X0 is not None and X0.shape != B.shape:
        raise InputError(f"X0 must have the shape of B, {B.shape}, not {X0.shape}")
    if options.get("state") is not None:
        raise InputError("a state belongs to one block; go on from it with block_cg")
    if block_size is None:
        block_size = choose_block_size(operator, B.shape[1], memory)
    elif not 1 <= block_size <= LARGEST_BLOCK:
        raise InputError(f"block_size must be 1 to {LARGEST_BLOCK}, but is {block_size}")
    if M is not None:
        M = as_preconditioner(M, operator)
    home = device_of(B)
    for name, given in (("B", B), ("X0", X0)):  # before the first block is solved
        if given is not None:
            check_finite(name, given, home.xp)
    # What is not begun keeps its guess.
    x = home.xp.zeros(B.shape, dtype=operator.dtype) if X0 is None else home.xp.array(X0, dtype=operator.dtype)
    columns: list[SolveResult] = []
    iterations = sweeps = streamed = 0
    timings: dict[str, float] = {}
    for start in range(0, B.shape[1], block_size):
        chosen = slice(start, start + block_size)
        if any(column.reason is StopReason.STOPPED for column in columns):
            for column in range(start, B.shape[1]):
                residual = math.nan if X0 is not None else float(bool(B[:, column].any()))
                columns.append(_not_begun(x[:, column], residual))
            break

        def moved(block: Array, chosen: slice = chosen) -> Array:
            part = home.xp.ascontiguousarray(block[:, chosen])
            return part if home == operator.device else operator.device.asarray(part)

        guess = None if X0 is None else moved(X0)
        result = block_cg(operator, moved(B), guess, M=M, monitor=monitor, **options)
        x[:, chosen] = result.x if home == operator.device else operator.device.to_host(result.x)
        columns += [
            SolveResult(**{**vars(column), "x": x[:, start + number]}) for number, column in enumerate(result.columns)
        ]
        iterations, sweeps = iterations + result.iterations, sweeps + result.sweeps
        streamed += result.bytes_streamed
        timings = {name: timings.get(name, 0.0) + seconds for name, seconds in result.timings.items()}
        del result, guess  # their blocks make room for the next ones
    return BlockSolveResult(x, tuple(columns), iterations, sweeps, streamed, timings)


def _not_begun(x: Array, residual: float) -> SolveResult:
    return SolveResult.of(x, StopReason.STOPPED, [residual], residual, None, sweeps=0, bytes_streamed=0, timings={})


def choose_block_size(A: Any, columns: int, memory: int | str | None = None) -> int:
    """Return how many of so many right-hand sides to solve together.

    The most that fit the memory, as one pass over the matrix serves them all and each column helps the others: up to 64 for
    a streamed matrix, whose passes are dear, and up to 32 for a resident one. Blocks are then made equally large.

    Parameters
    ----------
    A : operator or matrix
    columns : int
    memory : int or str, optional
        For the vectors of a block; as for :func:`solve_many`.

    Raises
    ------
    InputError
        If there is no column.
    BudgetError
        If it does not hold the vectors of one column.
    """
    if columns < 1:
        raise InputError(f"there must be at least one right-hand side, not {columns}")
    A = as_operator(A)
    room, n = _room(A) if memory is None else parse_nbytes(memory), A.shape[0]
    each = block_cg_workspace_nbytes(n, 1, A.dtype)
    if room < each:
        raise BudgetError(
            f"the vectors of one right-hand side need {format_nbytes(each)}, but {format_nbytes(room)} are there for them; "
            "free memory, or plan a smaller budget for the matrix"
        )
    useful = LARGEST_BLOCK if isinstance(A, CountsTraffic) else LARGEST_RESIDENT_BLOCK
    largest = min(useful, room // each, columns)
    blocks = -(-columns // largest)
    return -(-columns // blocks)


def _room(A: Operator) -> int:
    """Return the bytes that vectors may take."""
    if isinstance(A, PlansWorkspace) and A.workspace_nbytes:
        return A.workspace_nbytes
    return int((1 - _LEFT_FREE) * A.device.free_nbytes())
