"""Whether a matrix can be symmetric positive definite, as far as a look at its entries tells."""

from __future__ import annotations

import numpy as np
import scipy.sparse

from penstock.spmv import CPU, InputError
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.formats.symmetry import Symmetry

__all__ = ["check_matrix", "check_square"]


def check_square(shape: tuple[int, int], name: str) -> None:
    """Refuse a matrix that is not square, or empty."""
    if shape[0] != shape[1] or not shape[0]:
        raise InputError(
            f"{name} is {shape[0]} x {shape[1]}; a system to solve has a square matrix with at least one row"
        )


def check_matrix(statistics: MatrixStatistics, name: str) -> Symmetry:
    """Refuse what cannot be symmetric positive definite as far as a look at the entries tells.

    Parameters
    ----------
    statistics : MatrixStatistics
    name : str
        What messages call the matrix.

    Returns
    -------
    Symmetry

    Raises
    ------
    InputError
        If it is empty, not square, a diagonal entry is not positive, or mirror images differ by more than rounding; the
        first row, or the pair of entries that differs most, is named.
    """
    check_square(statistics.shape, name)
    arrays = (statistics.values, statistics.column_indices, statistics.row_offsets)
    A = scipy.sparse.csr_array(tuple(map(CPU.asarray, arrays)), shape=statistics.shape)
    diagonal = A.diagonal()
    if not (diagonal > 0).all():
        row = int(np.argmin(diagonal > 0))
        raise InputError(
            f"row {row} of {name} has {diagonal[row]:g} on the diagonal, but all diagonal entries of a symmetric positive "
            "definite matrix are positive; check its sign and that row"
        )
    symmetry = statistics.symmetry
    if symmetry.to_rounding:
        return symmetry
    row, column = symmetry.row, symmetry.column
    rows = np.repeat(np.arange(A.shape[0]), statistics.lengths)
    triangular = (rows >= A.indices).all() or (rows <= A.indices).all()
    advice = (
        "only one triangle is stored: declare a Matrix Market file symmetric, or store both"
        if triangular
        else "conjugate gradients need A = A.T: take (A + A.T) / 2 if that is meant, or a solver for general matrices"
    )
    raise InputError(
        f"{name} is not symmetric: the largest difference is between entry ({row}, {column}), {A[row, column]:.6g}, and entry "
        f"({column}, {row}), {A[column, row]:.6g}, counted from 0, and {symmetry.beyond_rounding} entries differ by more than "
        f"rounding; {advice}"
    )
