"""Sets up multigrid by smoothed aggregation, with the prolongators stored, on the device of the matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.solvers.chebyshev import check_degree, largest_eigenvalue
from penstock.solvers.coarse.dense_inverse import NEGLIGIBLE, largest_diagonal
from penstock.solvers.coarse.galerkin import smoothing_steps, with_unit_rows
from penstock.solvers.coarse.measures import DENSE_UNKNOWNS, LEAST_COARSENING, inverse_of, measured
from penstock.solvers.coarse.modes import given_modes, given_points, rigid_body_modes
from penstock.solvers.coarse.tentative import StoredTentative
from penstock.solvers.multigrid.aggregation import aggregate_nodes
from penstock.solvers.multigrid.cycle import Multigrid
from penstock.solvers.multigrid.levels import DEGREE, Cycle, Level, Smoother, check_choices, make_smoother, size_of
from penstock.solvers.preconditioners import block_jacobi
from penstock.spmv import Array, BsrMatrix, CsrMatrix, Device, InputError, Operator, SparseMatrix, as_operator
from penstock.spmv.products.block_products import smoothed_rows
from penstock.spmv.products.block_rows import as_csr, csr_of, rows_of
from penstock.spmv.products.multiply import product_of_rows

# No more levels than this are made.
_MOST_LEVELS = 20


def multigrid(
    A: Any,
    near_null_space: Any = None,
    smoother: Smoother = "chebyshev",
    *,
    coordinates: Any = None,
    cycle: Cycle = "W",
    degree: int | Literal["auto"] = "auto",
    block_size: int | None = None,
) -> Multigrid:
    """Return classic multigrid by smoothed aggregation as a preconditioner, for a matrix that is held in memory.

    Parameters
    ----------
    A : matrix
        Symmetric positive definite: BSR, whose blocks are the unknowns of a node, or anything that converts to CSR.
    near_null_space : array, (n, modes), optional
        Vectors that A nearly maps to zero, 1 to 8. By default those that ``coordinates`` make, or a constant for each unknown of
        a node.
    smoother : {"chebyshev", "gauss_seidel"}
        A polynomial of D A, or symmetric Gauss-Seidel by colours.
    coordinates : array, (nodes, 2) or (nodes, 3), optional
        Of the nodes, for the rigid motions of a body.
    cycle : {"W", "V"}
        ``W`` visits coarse levels twice. They are small, and it needs two thirds of the iterations.
    degree : int or "auto"
        Of the polynomial, odd; ``auto`` is 3.
    block_size : int, optional
        Unknowns of a node, 1 to 8; by default those of the blocks of BSR, and 1 for other formats.

    Returns
    -------
    Multigrid

    Raises
    ------
    InputError
        If an argument does not fit the matrix, or that is not held in memory.

    Notes
    -----
    Vanek, Mandel and Brezina (1996), with the prolongator stored: about half of the bytes of A. Everything but the inverse of the
    last matrix is set up on the device. :func:`smoothed_aggregation` needs fewer iterations and no prolongator, and works on
    streamed matrices; this is for matrices of any kind in memory, and to compare with.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import cg, multigrid
    >>> beam = Cantilever(nodes=(13, 5, 5), dof=3)
    >>> A = beam.matrix()
    >>> result = cg(A, beam.load(), M=multigrid(A, coordinates=beam.mesh.coordinates()), rtol=1e-8)
    >>> result.converged, result.iterations < 20
    (True, True)
    """
    check_choices(smoother, cycle)
    check_degree(degree)
    products = DEGREE if degree == "auto" else degree
    matrix = _stored(as_operator(A), block_size)
    size = size_of(matrix)
    with matrix.device.current():
        modes = _modes(near_null_space, coordinates, matrix.shape[0], size, matrix.device)
        levels: list[Level] = []
        negligible = 0.0
        while matrix.shape[0] > DENSE_UNKNOWNS and len(levels) < _MOST_LEVELS:
            coarsened = _coarsened(matrix, modes, smoother, products, coarse=bool(levels))
            if coarsened is None:
                break
            levels.append(coarsened.level)
            negligible = max(negligible, NEGLIGIBLE * coarsened.largest_diagonal)
            matrix, modes = coarsened.coarse, coarsened.modes
        return Multigrid(levels, _last(matrix, smoother, products, negligible), cycle)


def _stored(A: Operator, block_size: int | None) -> BsrMatrix | CsrMatrix:
    """Return a matrix as BSR or CSR, on its device, or refuse it."""
    if not isinstance(A, SparseMatrix):
        raise InputError(f"multigrid needs a matrix that is held in memory, not a {type(A).__name__}")
    if A.shape[0] != A.shape[1]:
        raise InputError(f"multigrid needs a square matrix, not one of shape {A.shape}")
    if np.dtype(A.dtype) != np.float64:
        raise InputError(f"multigrid needs vectors of float64, not {A.dtype}")
    if isinstance(A, (BsrMatrix, CsrMatrix)) and block_size in (None, size_of(A)):
        return A
    matrix = A if isinstance(A, CsrMatrix) else csr_of(A)
    return matrix if block_size in (None, 1) else BsrMatrix.from_csr(matrix, block_size=block_size)


@dataclass(frozen=True)
class _Coarsened:
    """A level, the matrix of the next one, and its near-null space."""

    level: Level
    coarse: BsrMatrix | CsrMatrix
    modes: Array
    largest_diagonal: float


def _coarsened(
    A: BsrMatrix | CsrMatrix, modes: Array, smoother: Smoother, degree: int, *, coarse: bool
) -> _Coarsened | None:
    """Return a level of a matrix; None if its graph cannot be coarsened."""
    rows, size = rows_of(A), size_of(A)
    rows.blocks = rows.blocks.astype(np.float64, copy=False)
    nodes = A.shape[0] // size
    diagonal, high, free = measured(A, size, 1, settled=coarse)
    aggregates = aggregate_nodes(rows.offsets, rows.columns, free.reshape(nodes, size).any(axis=1), A.device.kind)
    if aggregates.count > LEAST_COARSENING * nodes:
        return None
    T = StoredTentative(modes, free, aggregates, size, A.device)
    own = T.rows(0, nodes)
    [step] = smoothing_steps(1, high)
    P = smoothed_rows(product_of_rows(rows, own, T.aggregates.count), own, diagonal.blocks, step.a)
    del own
    R = P.transposed(aggregates.count)
    galerkin = product_of_rows(R, product_of_rows(rows, P, aggregates.count), aggregates.count)
    shape = (T.unknowns, T.unknowns)
    arrays = {"row_offsets": galerkin.offsets, "column_indices": galerkin.columns, "values": galerkin.blocks}
    matrix = with_unit_rows(BsrMatrix.from_arrays(shape, np.float64, arrays, {}), T.missing)
    next_matrix = matrix if T.modes > 1 else as_csr(galerkin, aggregates.count)  # shares the values of matrix
    level = Level(
        A,
        make_smoother(A, diagonal, high, smoother, degree),
        as_csr(P, aggregates.count),
        as_csr(R, nodes),
    )
    return _Coarsened(level, next_matrix, T.candidates, largest_diagonal(diagonal))


def _last(A: SparseMatrix, smoother: Smoother, degree: int, negligible: float) -> Operator:
    """Return an inverse of the coarsest matrix, or a smoother where that is too large."""
    if A.shape[0] == 0:
        return A
    diagonal = block_jacobi(A, size_of(A))  # which refuses a diagonal that is not positive definite
    if A.shape[0] <= DENSE_UNKNOWNS:
        return inverse_of(A, negligible)
    return make_smoother(A, diagonal, largest_eigenvalue(A, diagonal, 1, settled=True), smoother, degree)


def _modes(near_null_space: Any, coordinates: Any, unknowns: int, size: int, device: Device) -> Array:
    """Return the near-null space, ``(unknowns, modes)``."""
    xp, nodes = device.xp, unknowns // size
    modes = given_modes(near_null_space, nodes, size, device)
    if modes is not None:
        return modes
    if coordinates is not None:
        return rigid_body_modes(given_points(coordinates, nodes, device), size)
    return xp.tile(xp.eye(size), (nodes, 1))


multigrid.from_pyamg = Multigrid.from_pyamg  # type: ignore[attr-defined]
