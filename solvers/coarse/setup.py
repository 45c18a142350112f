"""Makes the levels of a smoothed aggregation preconditioner.

The prolongator ``p(D A) T`` is not stored. Sources: Vanek, Mandel and Brezina (1996), smoothed aggregation; Vanek, Brezina
and Tezaur (1999), polynomial smoothing of the prolongator. The method, of one sweep an iteration, is described in
:mod:`penstock.solvers.coarse.method`.

Examples
--------
>>> from penstock.fem import Cantilever
>>> from penstock.solvers import cg
>>> beam = Cantilever(nodes=(33, 9, 9), dof=3)
>>> A, b = beam.matrix(), beam.load()
>>> M = smoothed_aggregation(A, coordinates=beam.mesh.coordinates())
>>> cg(A, b, M=M, rtol=1e-8).iterations < 20
True
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from penstock.solvers.chebyshev import Chebyshev, check_degree, largest_eigenvalue, rounds_from
from penstock.solvers.coarse.aggregates import (
    Aggregates,
    box_aggregates,
    coordinate_aggregates,
    given_aggregates,
    graph_aggregates,
)
from penstock.solvers.coarse.dense_inverse import NEGLIGIBLE, largest_diagonal
from penstock.solvers.coarse.galerkin import coarse_matrix, smoothing_steps, with_unit_rows
from penstock.solvers.coarse.level import CoarseLevel
from penstock.solvers.coarse.matrix_rows import block_size_of, visit_rows
from penstock.solvers.coarse.measures import DENSE_UNKNOWNS, LEAST_COARSENING, inverse_of, measured
from penstock.solvers.coarse.modes import centred, given_modes, given_points, motions_about_origin
from penstock.solvers.coarse.rigid_tentative import RigidTentative
from penstock.solvers.coarse.shared_tentative import shared
from penstock.solvers.coarse.smoothed_aggregation import SmoothedAggregation
from penstock.solvers.coarse.tentative import StoredTentative, Tentative
from penstock.solvers.preconditioners import DiagonalBlocks, block_jacobi
from penstock.spmv import Array, BsrMatrix, Device, InputError, Operator, as_operator
from penstock.spmv.communicator import communicator_of
from penstock.spmv.products.block_rows import BlockRows
from penstock.spmv.vectors.recurrence import AdvancesRecurrences

# On coarse levels products are cheap, and prolongators of degree 1 with aggregates of 3 nodes a side couple neighbours only.
_COARSE_SIDE, _COARSE_SMOOTHING, _COARSE_DEGREE = 3, 1, 5
#: Products with a coarse matrix when the level is applied once.
COARSE_PRODUCTS = 4 * _COARSE_SMOOTHING + _COARSE_DEGREE + 1


def smoothed_aggregation(
    A: Any,
    near_null_space: Any = None,
    *,
    coordinates: Any = None,
    aggregates: Any = None,
    block_size: int | Literal["auto"] = "auto",
    aggregate_nodes: int = 125,
    smoothing: int = 2,
    degree: int = 9,
    rounds: int = 2,
) -> SmoothedAggregation:
    """Return a preconditioner with a coarse level, with which CG needs about a dozen iterations at any size.

    Parameters
    ----------
    A : operator or matrix
        Symmetric positive definite: a matrix, resident or streamed, or what can be converted to one. Of ranks that share one,
        each gives what follows for its own nodes, which it aggregates; the call is collective.
    near_null_space : array, (n, modes), optional
        Vectors that A nearly maps to zero, for example the rigid motions of a body. Values at unknowns that couple with no
        other, such as clamped ones, do not matter.
    coordinates : array, (nodes, 2) or (nodes, 3), optional
        Of the nodes: rigid motions and aggregates are made from them. Without both, the near-null space is a constant for each
        unknown of a node, which suffices for scalar problems.
    aggregates : int array, (nodes,), or tuple of int, optional
        The aggregate of every node; or the nodes along each axis of a structured mesh whose nodes couple with their neighbours
        only, which is cut into boxes. By default they are made from the coordinates, or from the pattern of A.
    block_size : int or "auto"
        Unknowns a node; by default those of the blocks that A stores.
    aggregate_nodes : int
        Nodes in an aggregate, about.
    smoothing : int
        Products by which the prolongator is smoothed, 1 to 3. Aggregates should have ``2 smoothing + 1`` nodes a side.
    degree : int
        Degree of the polynomial, odd.
    rounds : int
        As for :func:`chebyshev`.

    Raises
    ------
    InputError
        If an argument does not fit the matrix.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import cg, smoothed_aggregation
    >>> beam = Cantilever(nodes=(17, 5, 5), dof=3)
    >>> A = beam.matrix()
    >>> result = cg(A, beam.load(), M=smoothed_aggregation(A, coordinates=beam.mesh.coordinates()), rtol=1e-8)
    >>> result.converged, result.iterations < 20
    (True, True)
    """
    operator = as_operator(A)
    communicator = communicator_of(operator)
    numbers = {"block_size": block_size, "aggregate_nodes": aggregate_nodes, "smoothing": smoothing}
    communicator.check_same(**numbers, degree=degree, rounds=rounds)
    with communicator.together():
        size = block_size_of(operator) if block_size == "auto" else int(block_size)
        _check_numbers(operator, size, aggregate_nodes, smoothing, degree, rounds)
    size = int(communicator.largest(float(size)))  # a rank without rows may not know the blocks
    with operator.device.current():
        modes, points = _known_of_nodes(operator, size, near_null_space, coordinates)
        _check_cuts(operator, size)
        diagonal, high, free = measured(operator, size, rounds, degree)
        with communicator.together():
            of_nodes = _aggregates(operator, size, aggregates, points, aggregate_nodes, smoothing)
            T = _tentative(modes, points, free, of_nodes, size, operator.device)
        del modes, points, free  # as large as T
        return _preconditioner(operator, diagonal, high, degree, smoothing, shared(T, communicator))


def with_new_values(M: SmoothedAggregation) -> SmoothedAggregation:
    """Return the preconditioner for new values of its matrix, with the same aggregates and tentative prolongators. Collective.

    The diagonal, the bound of the eigenvalues, which starts from the last vector, and the coarse matrices are computed anew.
    The vectors of the old preconditioner go to the new one.
    """
    A, size = M.A, int(M.diagonal.blocks.shape[1])
    with A.device.current():
        rounds, vector = rounds_from(A, M.fastest)
        diagonal, high, _ = measured(A, size, rounds, M.degree, vector=vector)
        new = _preconditioner(A, diagonal, high, M.degree, M.smoothing, M.level.T, M)
    new.fastest = vector
    return new


def _known_of_nodes(
    A: Operator, size: int, near_null_space: Any, coordinates: Any
) -> tuple[Array | None, Array | None]:
    """Return the near-null space and centred coordinates, each None or on the device, after checks. Collective."""
    nodes, communicator = A.shape[0] // size, communicator_of(A)
    with communicator.together():
        modes = given_modes(near_null_space, nodes, size, A.device)
        points = None if coordinates is None else given_points(coordinates, nodes, A.device)
        if modes is None and points is not None:
            motions_about_origin(points[:1], size)  # its checks, before the matrix is read
    widths = {
        "modes": None if modes is None else modes.shape[1],
        "dimensions": None if points is None else points.shape[1],
    }
    communicator.check_same(**widths)
    return modes, None if points is None else centred(points, communicator)


def _check_numbers(A: Operator, size: int, aggregate_nodes: int, smoothing: int, degree: int, rounds: int) -> None:
    check_degree(degree)
    if rounds < 0 or rounds % 1:
        raise InputError(f"rounds must be a whole number, 0 or more, not {rounds}")
    if A.shape[0] != A.shape[1] or not 1 <= size <= 8 or A.shape[0] % size:
        raise InputError(f"a matrix of shape {A.shape} does not consist of nodes of {size} unknowns")
    if not 1 <= smoothing <= 3 or smoothing % 1:
        raise InputError(f"smoothing must be 1, 2 or 3, not {smoothing}")
    if not aggregate_nodes >= 2:
        raise InputError(f"aggregate_nodes must be 2 or more, not {aggregate_nodes}")
    if np.dtype(A.dtype) != np.float64:
        raise InputError(f"a coarse level needs vectors of float64, not {A.dtype}")


def _check_cuts(A: Operator, size: int) -> None:
    if isinstance(A, AdvancesRecurrences) and not A.keeps_together(size):
        raise InputError(
            f"subdivisions of the matrix cut nodes of {size} unknowns; cut it at multiples of them, or choose another "
            "preconditioner"
        )


def _tentative(
    modes: Array | None, points: Array | None, free: Array, aggregates: Aggregates, size: int, device: Device
) -> Tentative:
    """Return T of the modes, or of rigid motions, or of a constant for each unknown of a node."""
    if modes is not None:
        return StoredTentative(modes, free, aggregates, size, device)
    if points is None:
        modes = device.xp.tile(device.xp.eye(size), (len(aggregates.of_node), 1))
    elif device.kind == "cuda" and points.shape[1] == 3 and size in (3, 6):
        return RigidTentative(points, free, aggregates, size, device)
    else:
        modes = motions_about_origin(points, size)
    return StoredTentative(modes, free, aggregates, size, device)


def _aggregates(
    A: Operator, size: int, aggregates: Any, points: Array | None, aggregate_nodes: int, smoothing: int
) -> Aggregates:
    nodes = A.shape[0] // size
    if not nodes:
        return Aggregates(np.empty(0, dtype=np.int32))
    if isinstance(aggregates, tuple):
        if int(np.prod(aggregates)) != nodes:
            raise InputError(f"a mesh of {aggregates} nodes does not have the {nodes} nodes of the matrix")
        return box_aggregates(aggregates, max(2, round(aggregate_nodes ** (1 / len(aggregates)))))
    if aggregates is not None:
        return given_aggregates(aggregates, nodes)
    if points is not None:
        return coordinate_aggregates(A.device.to_host(points), aggregate_nodes)
    return graph_aggregates(*_graph(A, size), smoothing, aggregate_nodes)


def _graph(A: Operator, size: int) -> tuple[Any, Any]:
    """Return the neighbours of every node as in CSR, in one pass over the matrix."""
    counts, columns = [np.zeros(1, dtype=np.int64)], []

    def take(rows: BlockRows) -> None:
        counts.append(np.diff(A.device.to_host(rows.offsets)))
        columns.append(A.device.to_host(rows.columns))

    visit_rows(A, size, take)
    return np.cumsum(np.concatenate(counts)), np.concatenate(columns)


def _preconditioner(
    A: Operator,
    diagonal: DiagonalBlocks,
    high: float,
    degree: int,
    smoothing: int,
    T: Tentative,
    before: Operator | None = None,
) -> SmoothedAggregation:
    """Return the preconditioner, with the coarser levels of the one before if there is one."""
    known = before if isinstance(before, SmoothedAggregation) else None
    steps = smoothing_steps(smoothing, high)
    coarse = with_unit_rows(coarse_matrix(A, diagonal.blocks, T, steps), T.missing)
    negligible = communicator_of(A).largest(NEGLIGIBLE * largest_diagonal(diagonal))
    inverse = _inverse(coarse, T, negligible, None if known is None else known.level.inverse)
    M = SmoothedAggregation(A, diagonal, high, degree, smoothing, CoarseLevel(T, coarse, inverse))
    if known is not None:
        M.take_vectors(known)
    return M


def _inverse(A: BsrMatrix, T: Tentative, negligible: float, before: Operator | None = None) -> Operator:
    """Return an approximate inverse of a coarse matrix: a dense one, or the preconditioner of the next level."""
    if T.unknowns <= DENSE_UNKNOWNS:
        return inverse_of(A, negligible)
    grid, size = T.aggregates.grid, T.modes
    diagonal = block_jacobi(A, size)
    high = largest_eigenvalue(A, diagonal, 2, settled=True)
    if isinstance(before, SmoothedAggregation):
        coarser = before.level.T
        return _preconditioner(A, diagonal, high, _COARSE_DEGREE, _COARSE_SMOOTHING, coarser, before)
    if grid is not None:
        aggregates = box_aggregates(grid, _COARSE_SIDE)
    else:
        offsets, columns = A.device.to_host(A.row_offsets), A.device.to_host(A.column_indices)
        aggregates = graph_aggregates(offsets, columns, 1, _COARSE_SIDE**3)
    if aggregates.count > LEAST_COARSENING * T.aggregates.count:  # not a graph that can be coarsened
        return Chebyshev(A, diagonal, _COARSE_DEGREE, high / _COARSE_DEGREE**2, high)
    every = A.device.xp.ones(T.unknowns, dtype=np.bool_)
    coarser = StoredTentative(T.candidates, every, aggregates, size, A.device)
    return _preconditioner(A, diagonal, high, _COARSE_DEGREE, _COARSE_SMOOTHING, coarser)
