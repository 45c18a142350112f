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


def inferred_alpha(
    volume: float, nnz: int, mean_row: float, *, occupancy: float = 1.0, reads_out: bool = False
) -> float:
    """Return alpha from the bytes that a product in float64 moved, for example bandwidth times its time.

    Without traffic counters this only holds for memory-bound products.
    """
    return (volume / nnz - (8 + _INDEX) / occupancy - (16 if reads_out else 8) / mean_row) / 8


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
