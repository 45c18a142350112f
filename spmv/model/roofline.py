"""Roofline model of sparse products: the bytes they must move, and the time at a measured bandwidth.

Formulas of Kreutzer, Hager, Wellein, Fehske and Bishop (2014), sections 3.4 and 4, for any size of value, and for k vectors.
A product does two floating-point operations per stored entry, not counting padding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.spmv.device import Array
from penstock.spmv.errors import InputError
from penstock.spmv.formats.base import SparseMatrix
from penstock.spmv.formats.convert import chunk_offsets, length_permutation
from penstock.spmv.formats.statistics import MatrixStatistics

_INDEX = 4  # bytes of a column index


def chunk_occupancy(lengths: Array, chunk_height: int, sorting_scope: int = 1) -> float:
    """Return beta, the fraction of SELL-C-sigma's storage that holds entries: nnz / sum of C times the chunks' widths.

    Examples
    --------
    >>> chunk_occupancy(np.array([8, 1, 1, 1] * 4), chunk_height=4)
    0.34375
    >>> chunk_occupancy(np.array([8, 1, 1, 1] * 4), chunk_height=4, sorting_scope=16)
    1.0
    """
    ordered = lengths if sorting_scope == 1 else lengths[length_permutation(lengths, sorting_scope)]
    stored = int(chunk_offsets(ordered.astype(np.int64), chunk_height)[-1])
    return int(ordered.sum()) / stored if stored else 1.0


def worst_occupancy(rows: int, chunk_height: int) -> float:
    """Return the smallest possible beta: one full row and single entries in every chunk, ``(N + C - 1) / (C N)``."""
    return (rows + chunk_height - 1) / (chunk_height * rows)


def code_balance(
    mean_row: float,
    *,
    alpha: float | None = None,
    occupancy: float = 1.0,
    value_nbytes: int = 8,
    vector_nbytes: int = 8,
    columns: int = 1,
    reads_out: bool = False,
) -> float:
    """Return the bytes moved per floating-point operation.

    Parameters
    ----------
    mean_row : float
        Mean entries per row.
    alpha : float, optional
        Elements of x moved per entry: ``1 / mean_row``, the default, when each is loaded once; 1 without any
        cache; more when a cache line is loaded for one element; 0 when x stays in cache between products.
    occupancy : float
        beta; 1 for CSR.
    value_nbytes, vector_nbytes : int
        Bytes of a stored value and of an element of a vector.
    columns : int
        Vectors that share one pass over the matrix.
    reads_out : bool
        Whether out is read as well as written (``beta != 0``, or a write-allocate cache).
    """
    alpha = 1 / mean_row if alpha is None else alpha
    matrix = (value_nbytes + _INDEX) / occupancy / columns
    vectors = vector_nbytes * alpha + (2 if reads_out else 1) * vector_nbytes / mean_row
    return (matrix + vectors) / 2


def inferred_alpha(
    volume: float, nnz: int, mean_row: float, *, occupancy: float = 1.0, reads_out: bool = False
) -> float:
    """Return alpha from the bytes that a product in float64 moved, for example bandwidth times its time.

    Without traffic counters this only holds for memory-bound products.
    """
    return (volume / nnz - (8 + _INDEX) / occupancy - (16 if reads_out else 8) / mean_row) / 8


def predicted_flops(bandwidth: float, balance: float) -> float:
    """Return floating-point operations per second at a bandwidth in bytes per second."""
    return bandwidth / balance


def predicted_seconds(
    A: SparseMatrix | type[SparseMatrix],
    bandwidth: float,
    columns: int = 1,
    *,
    statistics: MatrixStatistics | None = None,
    **parameters: Any,
) -> float:
    """Return the seconds of a product at a bandwidth (bytes/s) if each stored byte and each vector element moves once.

    Before any conversion ``A`` is the class of the matrix, with its statistics and further arguments of its ``from_csr``.
    """
    if isinstance(A, SparseMatrix):
        return A.product_nbytes(columns) / bandwidth
    if statistics is None:
        raise InputError("a prediction before conversion needs the matrix's statistics; see MatrixStatistics.of")
    vectors = columns * sum(statistics.shape) * statistics.dtype.itemsize
    return (A.predicted_nbytes(statistics, **parameters) + vectors) / bandwidth
