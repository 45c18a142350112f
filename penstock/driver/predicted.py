"""Predicts the seconds of ways to solve a system in memory: iterations with Jacobi, multigrid, and a sparse factorisation."""

from __future__ import annotations

from penstock.solvers.factorisation import FactorisationSpec, factor_entries, minimum_degree_order
from penstock.spmv import SparseMatrix
from penstock.spmv.model.suggestion import NOMINAL_BANDWIDTH

# Multigrid's set-up and solve take about as long as this many iterations with Jacobi, of a scalar matrix and of blocks, whose
# coarse levels have relatively fewer entries; and some time that no matrix is too small for.
_WORTH_SCALAR, _WORTH_BLOCKS, _OVERHEAD_SECONDS = 400, 250, {"cpu": 0.02, "cuda": 0.06}
# To start an iteration with Jacobi.
_START_SECONDS = {"cpu": 20e-6, "cuda": 40e-6}
# SuperLU, on one core: for an entry of the Cholesky factor, and for a row to find the order.
_ENTRY_SECONDS, _ROW_SECONDS = 80e-9, 1e-6
# Of rows with more entries factors are not counted: the order alone would cost too much. With more rows than these multigrid
# gains from further cores, which SuperLU does not use.
_MOST_ENTRIES_A_ROW, _MOST_ROWS = 30, 100_000
# Multigrid on one core, set-up and solve of systems that need some 15 iterations: in any case, for a row, and for an entry.
_MULTIGRID_SECONDS, _MULTIGRID_ROW_SECONDS, _MULTIGRID_ENTRY_SECONDS = 0.04, 2e-6, 0.13e-6
# Where Jacobi is slow and no near-null space is known, it needs more iterations.
_NOTHING_KNOWN = 1.35


def jacobi_seconds(storage_nbytes: int, device_kind: str) -> float:
    """Return the seconds of an iteration with Jacobi."""
    return storage_nbytes / NOMINAL_BANDWIDTH[device_kind] + _START_SECONDS[device_kind]


def multigrid_iterations(storage_nbytes: int, block_size: int, device_kind: str) -> int:
    """Return the number of Jacobi iterations that cost about as much as set-up and solve with multigrid."""
    overhead = _OVERHEAD_SECONDS[device_kind] / jacobi_seconds(storage_nbytes, device_kind)
    return (_WORTH_SCALAR if block_size == 1 else _WORTH_BLOCKS) + round(overhead)


def cheap_factorisation(A: SparseMatrix, *, near_null_space_known: bool) -> tuple[FactorisationSpec, float] | None:
    """Return the specification of a factorisation and its predicted seconds, or None if multigrid is predicted to be faster.

    The entries of the factor are counted exactly, in an order of the rows that the factorisation then takes.
    """
    rows, nnz = A.shape[0], A.nnz
    if A.device.kind != "cpu" or not rows <= _MOST_ROWS or nnz > _MOST_ENTRIES_A_ROW * rows:
        return None
    multigrid = _MULTIGRID_SECONDS + _MULTIGRID_ROW_SECONDS * rows + _MULTIGRID_ENTRY_SECONDS * nnz
    multigrid *= 1.0 if near_null_space_known else _NOTHING_KNOWN
    matrix = A.to_csr()
    order = minimum_degree_order(matrix)
    entries = factor_entries(matrix, order, int((multigrid - _ROW_SECONDS * rows) / _ENTRY_SECONDS))
    return None if entries is None else (FactorisationSpec(order=order), _ENTRY_SECONDS * entries)
