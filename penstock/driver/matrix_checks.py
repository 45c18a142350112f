"""Whether a matrix can be symmetric positive definite, as far as its entries show."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse

from penstock.solvers import jacobi
from penstock.spmv import CsrMatrix, InputError, Operator
from penstock.spmv.formats.limits import LARGEST_DENSE_BLOCK
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.formats.symmetry import Symmetry

# Differences of mirror images, relative to the diagonal, that the last digits of float32 may explain; and relative to the
# largest entry, those of sums of float64 in another order.
_SMALL, _ROUNDING = 1e-5, 1e-12
#: Dense blocks, such as those of the unknowns of a node, are stored almost whole: more than this share.
DENSE = 0.75
# Blocks of unknowns that follow each other are not, where others are dense. Nodes by which these are recognised, and the share of
# entries within a direction above which directions do not couple.
_SPARSE, _NODES_ASKED, _UNCOUPLED = 0.6, 64, 0.75


def check_square(shape: tuple[int, int], name: str) -> None:
    """Refuse a matrix that is not square, or empty."""
    if shape[0] != shape[1] or not shape[0]:
        raise InputError(
            f"{name} is {shape[0]} x {shape[1]}; a system to solve has a square matrix with at least one row"
        )


def check_matrix(statistics: MatrixStatistics, name: str, *, definite: bool = True) -> Symmetry:
    """Refuse what its entries show not to be symmetric and, if ``definite``, positive definite.

    Refuses an empty matrix, one that is not square, a diagonal entry that is not positive, and mirror images that differ by
    more than rounding. The message names the first row, or the pair of entries that differs most.
    """
    check_square(statistics.shape, name)
    if definite and statistics.survey.positive < statistics.shape[0]:
        _refuse_diagonal(statistics, name)
    symmetry = statistics.symmetry
    if symmetry.to_rounding:
        return symmetry
    A, row, column = _csr_of(statistics).to_csr(), symmetry.row, symmetry.column
    advice = _advice_on_symmetry(A, symmetry.largest)
    one, other = A[row, column], A[column, row]
    raise InputError(
        f"{name} is not symmetric: the largest difference is between entry ({row}, {column}), {one:.6g}, and entry "
        f"({column}, {row}), {other:.6g}, counted from 0 (they differ by {abs(one - other):.2g}), and "
        f"{symmetry.beyond_rounding} entries differ by more than rounding; {advice}"
    )


def check_numbering(statistics: MatrixStatistics, coordinates: Any, name: str) -> None:
    """Refuse a matrix for whose nodes coordinates are given, perhaps, if it is numbered by components, all x first.

    The coordinates would be taken for those of other unknowns, and iterations be many.
    """
    rows, nodes = statistics.shape[0], 0 if coordinates is None else len(coordinates)
    size = rows // nodes if nodes and rows % nodes == 0 else 1
    if not 1 < size <= LARGEST_DENSE_BLOCK or statistics.fills.get(size, 0.0) > _SPARSE:
        return
    if not _is_by_components(statistics, nodes):
        return
    raise InputError(
        f"{name} is numbered by components, all unknowns of one direction first, but coordinates are for nodes whose {size} "
        f"unknowns follow each other; put it in order, {name}[order][:, order] with order = np.arange({rows})"
        f".reshape({size}, {nodes}).T.ravel(), and vectors such as b[order]; what is found is then x[order]"
    )


def _is_by_components(statistics: MatrixStatistics, nodes: int) -> bool:
    """Return whether some nodes, evenly spaced, have dense blocks if they are numbered by components, and directions couple.

    Where no directions couple, nodes whose unknowns follow each other may have such blocks in a body of a few layers.
    """
    rows, to_host = statistics.shape[0], statistics.device.to_host
    size, offsets = rows // nodes, to_host(statistics.row_offsets)
    stored = blocks = of_same_direction = 0
    for node in np.linspace(0, nodes - 1, min(_NODES_ASKED, nodes)).astype(np.int64):
        of_node = range(node, rows, nodes)
        parts = [to_host(statistics.column_indices[offsets[row] : offsets[row + 1]]) for row in of_node]
        of_same_direction += sum(
            int((part % size == row % size).sum()) for row, part in zip(of_node, parts, strict=True)
        )
        columns = np.concatenate(parts)
        stored += columns.size
        blocks += np.unique(columns % nodes).size
    return stored >= DENSE * blocks * size**2 and of_same_direction <= _UNCOUPLED * stored


def _csr_of(statistics: MatrixStatistics) -> CsrMatrix:
    arrays = (statistics.row_offsets, statistics.column_indices, statistics.values)
    return CsrMatrix(statistics.shape, statistics.dtype, *arrays)


def _refuse_diagonal(statistics: MatrixStatistics, name: str) -> None:
    matrix = _csr_of(statistics)
    diagonal = matrix.device.to_host(matrix.diagonal_blocks(1)).reshape(-1)
    row = int(np.argmin(diagonal > 0))
    raise InputError(
        f"row {row} of {name} has {diagonal[row]:g} on the diagonal, but all diagonal entries of a symmetric positive "
        f"definite matrix are positive; {_advice_on_diagonal(diagonal, statistics)}"
    )


def check_diagonal(A: Operator) -> None:
    """Refuse a stored matrix with a diagonal entry that is not positive, at the cost of a sweep: a store may hold anything."""
    jacobi(A)


def _advice_on_diagonal(diagonal: np.ndarray[Any, Any], statistics: MatrixStatistics) -> str:
    if (diagonal <= 0).all() and (diagonal < 0).any():
        return "all of them are negative or zero: pass -A and -b if A is negative definite"
    if statistics.symmetry.to_rounding and (diagonal >= 0).all() and statistics.lengths[diagonal == 0].all():
        return (
            "a symmetric matrix with zeros there, as of constraints by multipliers (a saddle point), is indefinite: "
            "method='minres' solves it; or eliminate the constraints"
        )
    if statistics.symmetry.to_rounding:
        return (
            "check its sign and that row, which is to be left out if it is empty; systems with a symmetric matrix that is meant "
            "to be indefinite are solved by method='minres'"
        )
    return "check its sign and that row"


def _advice_on_symmetry(A: scipy.sparse.csr_array, largest: float) -> str:
    """Return what makes a matrix symmetric that is not: what is wrong with it can often be seen."""
    rows = np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
    if (rows >= A.indices).all() or (rows <= A.indices).all():
        return "only one triangle is stored: declare a Matrix Market file symmetric, or store both"
    beside = (rows != A.indices) & (A.data != 0)
    alone = np.bincount(rows[beside], minlength=A.shape[0]) == 0  # rows that are only a diagonal
    coupled = np.flatnonzero(alone & (np.bincount(A.indices[beside], minlength=A.shape[0]) > 0))
    if coupled.size:
        free = ~alone
        part = A[free][:, free]
        if abs(part - part.T).max() <= _ROUNDING * abs(part).max():
            return (
                f"{coupled.size} rows, the first is {coupled[0]}, hold only their diagonal entry, while other rows refer to "
                "these unknowns, as where boundary values were put into rows only: eliminate the columns too, b -= A[:, fixed] @ "
                "values, or let penstock.fix(A, b, fixed, values) do it; (A + A.T) / 2 would be another problem"
            )
    if largest <= _SMALL:
        return "they differ little: if they are the same but for rounding, as in float32, pass (A + A.T) / 2"
    return (
        "conjugate gradients need A = A.T: check its assembly, or take a solver for general matrices, such as GMRES or BiCGStab "
        "of SciPy, CuPy or PETSc"
    )
