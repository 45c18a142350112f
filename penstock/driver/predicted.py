"""Predicts the seconds of ways to solve a system in memory: iterations with Jacobi, multigrid, and a sparse factorisation."""

from __future__ import annotations

import numpy as np
import scipy.sparse

from penstock.solvers import Multigrid
from penstock.solvers.factorisation import FactorisationSpec
from penstock.solvers.sparse_cholesky import analysed, factor_size
from penstock.spmv import SparseMatrix
from penstock.spmv.model.suggestion import NOMINAL_BANDWIDTH

# Multigrid's set-up and solve take about as long as this many iterations with Jacobi, of a scalar matrix and of blocks, whose
# coarse levels have relatively fewer entries; and some time that no matrix is too small for.
_WORTH_SCALAR, _WORTH_BLOCKS, _OVERHEAD_SECONDS = 400, 250, {"cpu": 0.02, "cuda": 0.06}
# To start an iteration with Jacobi.
_START_SECONDS = {"cpu": 20e-6, "cuda": 40e-6}
# Of rows with more entries, or neighbours where they are blocks, factors are not counted: that alone would cost too much. With
# more rows than these multigrid gains from further cores, which factorisations hardly use.
_MOST_ENTRIES_A_ROW, _MOST_ROWS = 30, 100_000
# Entries of a factor that are worth counting: each takes a library this long at least.
_LEAST_ENTRY_SECONDS = 25e-9
# To try all orders takes this long for an entry, and is worth it for factorisations that take several times as long.
_ORDERS_ENTRY_SECONDS, _TIMES_ORDERS = 0.7e-6, 2
# Multigrid on one core, set-up and solve of systems that need some 15 iterations: in any case, for a row, and for an entry.
_MULTIGRID_SECONDS, _MULTIGRID_ROW_SECONDS, _MULTIGRID_ENTRY_SECONDS = 0.02, 1.5e-6, 0.05e-6
# Frames and shells, whose nodes have as many unknowns as these, need this many times as long.
_UNKNOWNS_OF_FRAMES, _FRAMES = 6, 2.5
# An iteration with it, for a byte of a level at each visit.
_ITERATION_BYTE_SECONDS = 0.4e-9
# Where Jacobi is slow and no near-null space is known, it needs more iterations.
_NOTHING_KNOWN = 1.2


def jacobi_seconds(storage_nbytes: int, device_kind: str) -> float:
    """Return the seconds of an iteration with Jacobi."""
    return storage_nbytes / NOMINAL_BANDWIDTH[device_kind] + _START_SECONDS[device_kind]


def multigrid_iterations(storage_nbytes: int, block_size: int, device_kind: str) -> int:
    """Return the number of Jacobi iterations that cost about as much as set-up and solve with multigrid."""
    overhead = _OVERHEAD_SECONDS[device_kind] / jacobi_seconds(storage_nbytes, device_kind)
    return (_WORTH_SCALAR if block_size == 1 else _WORTH_BLOCKS) + round(overhead)


def multigrid_seconds(A: SparseMatrix, block_size: int, *, near_null_space_known: bool) -> float:
    """Return the seconds of set-up and solve with multigrid where it converges as it should."""
    seconds = _MULTIGRID_SECONDS + _MULTIGRID_ROW_SECONDS * A.shape[0] + _MULTIGRID_ENTRY_SECONDS * A.nnz
    harder = _FRAMES if block_size >= _UNKNOWNS_OF_FRAMES else 1.0
    return seconds * harder * (1.0 if near_null_space_known else _NOTHING_KNOWN)


def multigrid_iteration_seconds(M: Multigrid) -> float:
    """Return the seconds of an iteration with multigrid on a CPU, from the bytes of its levels."""
    visits = 2 if M.cycle == "W" else 1
    nbytes: int = sum(level.A.nbytes * visits**number for number, level in enumerate(M.levels))
    return _ITERATION_BYTE_SECONDS * nbytes


def seconds_to_try_orders(A: SparseMatrix, block_size: int) -> float:
    """Return the seconds in which a factorisation finds out how many entries its factor has in the best order."""
    return _ORDERS_ENTRY_SECONDS * A.nnz / block_size**2


def factorisation_within(
    A: SparseMatrix, block_size: int, most_seconds: float, *, quick: bool = False
) -> tuple[FactorisationSpec, float] | None:
    """Return the specification of a factorisation and its predicted seconds, or None if it would take longer.

    The entries of the factor are counted exactly in an order of the rows, or of the nodes of a matrix of blocks. A ``quick`` look
    does not try all orders, of which the best may have half of the entries.
    """
    rows, nnz = A.shape[0], A.nnz
    if A.device.kind != "cpu" or not rows <= _MOST_ROWS or nnz > _MOST_ENTRIES_A_ROW * rows * block_size:
        return None
    matrix = A.to_csr()
    pattern = matrix if block_size == 1 else _nodes(matrix, block_size)
    analysis = analysed(pattern, quick=quick)
    size = factor_size(pattern, analysis.order, int(most_seconds / _LEAST_ENTRY_SECONDS) // block_size**2)
    if size is None:
        return None
    size = size.of_blocks(block_size)
    seconds = analysis.seconds(size)
    if seconds > most_seconds:
        return None
    try_all = quick and seconds > _TIMES_ORDERS * seconds_to_try_orders(A, block_size)
    kept = analysis if block_size == 1 and not try_all else None
    return FactorisationSpec(block_size=block_size, analysis=kept, entries=size.entries), seconds


def _nodes(A: scipy.sparse.csr_array, block_size: int) -> scipy.sparse.csr_array:
    """Return the pattern of the blocks of a matrix: of their first rows, as blocks are dense."""
    first = A[::block_size]
    columns = first.indices // block_size
    pattern = scipy.sparse.csr_array(
        (np.ones(len(columns), dtype=np.int8), columns, first.indptr), shape=(first.shape[0], A.shape[1] // block_size)
    )
    pattern.sum_duplicates()
    return scipy.sparse.csr_array(pattern.astype(np.float64))


def cheap_factorisation(
    A: SparseMatrix, block_size: int, *, near_null_space_known: bool
) -> tuple[FactorisationSpec, float] | None:
    """Return the specification of a factorisation and its predicted seconds, or None if multigrid is predicted to be faster."""
    seconds = multigrid_seconds(A, block_size, near_null_space_known=near_null_space_known)
    return factorisation_within(A, block_size, seconds, quick=True)
