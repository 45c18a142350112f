"""One coarsening for both users: multigrid, which stores its prolongators, and the coarse level of a sweep, which does not.

Of a matrix A it needs D, the inverse of its diagonal blocks, a bound of the eigenvalues of ``D A``, and which unknowns couple
with others; from aggregates and a near-null space it makes T, and of the prolongator ``P = p(D A) T`` the matrix ``P^T A P``.
Sources: Vanek, Mandel and Brezina (1996), smoothed aggregation; Vanek, Brezina and Tezaur (1999), polynomial smoothing of the
prolongator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from penstock.solvers.amg.aggregates import (
    COARSE_SIDE,
    Aggregates,
    are_found_on_gpu,
    device_aggregates,
    graph_aggregates,
    numbered_aggregates,
)
from penstock.solvers.amg.bisection import coordinate_aggregates
from penstock.solvers.amg.boxes import box_aggregates
from penstock.solvers.amg.cycle_matrix import float32_copy
from penstock.solvers.amg.galerkin import coarse_matrix, smoothing_steps
from penstock.solvers.amg.grid_points import GridPoints
from penstock.solvers.amg.group_inverses import GroupInverses
from penstock.solvers.amg.groups import Groups, linked_groups
from penstock.solvers.amg.level import CoarseLevel, Grouped, RowFactors
from penstock.solvers.amg.line_space import line_space
from penstock.solvers.amg.local_space import local_space, scales_of
from penstock.solvers.amg.matrix_rows import diagonal_and_row_sums, graph_of
from penstock.solvers.amg.modes import checked_near_null_space, modes_of, motions_about_origin
from penstock.solvers.amg.strength import strong_graph
from penstock.solvers.amg.strong_aggregates import strong_aggregates
from penstock.solvers.amg.tentative import PackedTentative, RigidTentative, StoredTentative, Tentative, shared
from penstock.solvers.chebyshev import NEARLY_SETTLED, SETTLED, largest_eigenvalue, scaled_row_sums
from penstock.solvers.preconditioners import DiagonalBlocks, block_norms, inverted_blocks
from penstock.spmv import Array, BsrMatrix, CsrMatrix, InputError, Operator, SparseMatrix, SweptOperator, VectorSpace
from penstock.spmv.beside import Beside
from penstock.spmv.communicator import communicator_of
from penstock.spmv.device import count_true
from penstock.spmv.products.block_rows import BlockRows, as_csr, in_float64, replace_vanishing, row_numbers, rows_of
from penstock.spmv.products.multiply import product_of_rows
from penstock.spmv.vectors.noise import noise
from penstock.spmv.vectors.recurrence import RecurrenceStep

#: Offsets and columns of the couplings of nodes, without the diagonal.
_Graph = tuple[Array, Array]
# A level that is hardly smaller than the one before ends the coarsening.
_LEAST_COARSENING = 0.8
# Nodes with more couplings than this many times the mean, and some more, are left to the smoother: a smoothed prolongator would
# couple all aggregates around such a hub with each other.
_HUB, _MORE = 16, 64
# Where lines were cut, each group becomes an aggregate if groups have at least this many nodes on average.
_MANY = 8
# Memory to make aggregates and to measure an eigenvalue at the same time; less than the second is there without asking.
_NBYTES_OF_A_NODE, _LITTLE_NBYTES = 256, 64 << 20
# Random vectors that estimate a diagonal, and the rows between those whose numbers they take, more than any matrix has.
_SAMPLES, _FAR = 3, 1 << 40
# A diagonal entry of a coarse matrix below this share of what it would be without couplings is rounding.
_VANISHING = 1e-13
# Vectors that a set-up and the solve after it may take, besides D.
_VECTORS_OF_SETUP = 12
#: An unknown whose couplings add up to less than this share of its diagonal is decoupled: D alone leaves as little of its error.
DECOUPLED = 1e-9
# So is one with couplings up to the first share that is as stiff as a penalty makes it: its inverse diagonal is less than the
# second share of the mean one of those that are coupled. In the coarse level it would be a small difference of large numbers.
_HELD, _STIFF = 1e-5, 1e-4


def coarsen(
    A: Operator,
    size: int,
    near_null_space: Any = None,
    coordinates: Any = None,
    aggregates: Any = None,
    *,
    nodes: int = COARSE_SIDE**3,
    smoothing: int = 1,
    stored: bool = False,
    grouped: Grouped = False,
    finest: bool = True,
    **measuring: Any,
) -> CoarseLevel | None:
    """Return the level below a matrix of nodes of ``size`` unknowns; None if its graph cannot be coarsened. Collective.

    The near-null space, coordinates and aggregates, and the ``nodes`` of an aggregate, are as for :func:`smoothed_aggregation`;
    ``smoothing`` is the degree of p, and ``measuring`` are options of :func:`largest_eigenvalue`.

    ``stored``: A is in memory as BSR or CSR, and P is stored. Aggregates of a graph then have three nodes a side and are formed
    on its device; ``grouped``: of groups of linked nodes where there are any, and so is D. Where P is not stored, D and
    aggregates are ``grouped`` as in :mod:`~penstock.solvers.amg.line_space` or :mod:`~penstock.solvers.amg.local_space`.
    Otherwise the caller's level is made whatever its size, and coarse ones keep decoupled unknowns. For stored matrices only
    strong couplings count (:func:`~penstock.solvers.amg.strength.strong_graph`). Only the caller's matrix is the ``finest``: the
    largest eigenvalues of others may stand alone, so more rounds look for them.
    """
    communicator, count = communicator_of(A), A.shape[0] // size
    modes, points = checked_near_null_space(A, size, near_null_space, _points(A, size, coordinates, aggregates))
    _check_cuts(A, size)
    # On ranks: strong couplings are followed where all have nodes, and none has given aggregates.
    may_follow = not stored and not communicator.largest(float(count == 0 or aggregates is not None))
    follows = finest and may_follow
    diagonal, sums, norms = _diagonal(A, size, with_norms=follows)
    # The sum is 1 plus the couplings. Levels that are not stored keep all unknowns of a coarse matrix.
    free = _coupled(A, diagonal, sums, finest) if finest or stored else None
    groups = _group_inverses(A, ties=finest) if grouped and stored else None
    if grouped and may_follow:
        with communicator.together():
            known = modes_of(count, size, modes, points, A.device)
        if (of_parts := _of_parts(A, diagonal, known, free, nodes, smoothing, grouped, measuring)) is not None:
            return of_parts
        del known
    by_strength = stored and points is None and aggregates is None
    jumps = None
    if follows:
        assert norms is not None
        jumps = strong_aggregates(A, norms, size, _columns_of(size, modes, points), nodes, smoothing)
    del norms
    find = partial(_aggregates, A, size, aggregates, points, nodes, smoothing)
    soon = points is None and aggregates is None and are_found_on_gpu(count, smoothing)
    of_all = None if by_strength or soon or jumps is not None else _begun(A, count, find)
    # Smoothers of stored levels diverge beyond their interval; the polynomial of a level that is not stored only gets slow.
    settled = SETTLED if not finest else NEARLY_SETTLED if stored else None
    measuring |= {"row_sums": sums, "settled": settled}
    in_float32 = None if finest or stored else _in_float32(A, diagonal)
    measure = partial(largest_eigenvalue, A if in_float32 is None else in_float32, diagonal, **measuring)
    high = _meanwhile(measure, of_all) if groups is None else groups.high
    strong: _Graph | None = None
    with communicator.together():
        if by_strength:
            assert free is not None
            of_nodes, strong = _aggregates_of_strong(A, size, free, groups)
        else:
            of_nodes = jumps or (find() if of_all is None else _kept_here(of_all.result()))
        if of_nodes.count > _LEAST_COARSENING * count and (stored or not finest):
            return None
        T = _tentative(A, size, modes, points, free, of_nodes)
    del modes, points, free, sums, measuring, measure, find  # as large as T
    finished = partial(_coarsened, strong=strong, in_float32=in_float32, jumps=jumps is not None)
    return finished(A, diagonal, high, shared(T, communicator), smoothing, groups, stored=stored)


def _of_parts(
    A: Operator, diagonal: DiagonalBlocks, known: Array, free: Array | None, nodes: int, smoothing: int,
    grouped: Grouped, measuring: dict[str, Any],
) -> CoarseLevel | None:  # fmt: skip
    """Return the level of lines of nodes, or of groups unless only ``"lines"`` are wanted; None if there are neither."""
    size, communicator = int(diagonal.blocks.shape[1]), communicator_of(A)
    with communicator.together():
        scales = scales_of(diagonal)
    if (lines := line_space(A, scales, nodes, smoothing, **measuring)) is not None:
        with communicator.together():
            T: Tentative = StoredTentative(known, free, lines.aggregates, size, A.device)
        return _coarsened(A, diagonal, lines.high, shared(T, communicator), smoothing, lines.D)
    if grouped == "lines" or (space := local_space(A, scales, known, smoothing, **measuring)) is None:
        return None
    with communicator.together():
        padded = StoredTentative(space.modes, free, space.aggregates, size, A.device)
        T = padded if space.columns is None else PackedTentative(padded, space.columns, space.piece)
    return _coarsened(A, diagonal, space.high, shared(T, communicator), smoothing, space.D, known=space.known)


def _columns_of(size: int, modes: Array | None, points: Array | GridPoints | None) -> int:
    """Return how many columns T has for an aggregate."""
    if modes is not None:
        return int(modes.shape[1])
    return size if points is None else int(motions_about_origin(np.zeros((1, points.shape[1])), size).shape[1])


def _begun(A: Operator, count: int, find: Callable[[], Aggregates]) -> Beside[Aggregates] | None:
    """Begin to make aggregates while an eigenvalue is measured, for a matrix in the memory of a GPU with room for both."""
    if not isinstance(A, SparseMatrix) or A.device.kind == "cpu":
        return None
    nbytes = _NBYTES_OF_A_NODE * count
    return Beside(A.device, find) if nbytes <= _LITTLE_NBYTES or nbytes <= A.device.free_nbytes() else None


def _meanwhile(measure: Callable[[], float], of_all: Beside[Aggregates] | None) -> float:
    """Measure while aggregates are made, and leave no thread at work behind if that fails."""
    try:
        return measure()
    except BaseException:
        if of_all is not None:
            of_all.wait()
        raise


def _kept_here(aggregates: Aggregates) -> Aggregates:
    """Return aggregates in memory of the current stream, for as long as a preconditioner is used."""
    return Aggregates(aggregates.of_node.copy(), aggregates.grid, aggregates.count)


def coarsen_again(A: Operator, before: CoarseLevel, smoothing: int = 1, **measuring: Any) -> CoarseLevel:
    """Return the level for new values of a matrix, with aggregates, T and groups of that before; P is not stored. Collective."""
    if isinstance(before.groups, RowFactors):
        D, diagonal = before.groups.of_values(A), _diagonal(A, before.T.block_size)[0]
        high = largest_eigenvalue(A, D, scales=diagonal.diagonal_roots(), **measuring)
        return _coarsened(A, diagonal, high, before.T, smoothing, D, known=before.known)
    diagonal, sums = _diagonal(A, before.T.block_size)[:2]
    in_float32 = None if before.finer_in_float32 is None else _in_float32(A, diagonal)
    high = largest_eigenvalue(A if in_float32 is None else in_float32, diagonal, row_sums=sums, **measuring)
    return _coarsened(A, diagonal, high, before.T, smoothing, in_float32=in_float32, jumps=before.jumps)


def _in_float32(A: Operator, diagonal: DiagonalBlocks) -> BsrMatrix | None:
    assert isinstance(A, BsrMatrix), "coarse matrices are stored in blocks"
    return float32_copy(A, diagonal)


def measured(A: Operator, size: int, **options: Any) -> tuple[DiagonalBlocks, float]:
    """Return D, the inverses of the diagonal blocks, and a bound of the eigenvalues of ``D A`` (:func:`largest_eigenvalue`)."""
    diagonal, sums = _diagonal(A, size)[:2]
    return diagonal, largest_eigenvalue(A, diagonal, row_sums=sums, **options)


def _diagonal(A: Operator, size: int, *, with_norms: bool = False) -> tuple[DiagonalBlocks, Array, Array | None]:
    """Return D, the row sums of ``|D| |A|``, and the Frobenius norms of the diagonal blocks of A if they are wanted."""
    with communicator_of(A).together():
        blocks, of_rows = diagonal_and_row_sums(A, size)
        norms = block_norms(blocks) if with_norms else None
        diagonal = inverted_blocks(A, blocks)
        del blocks
        sums = scaled_row_sums(diagonal, of_rows)
    # Otherwise parts of coarse matrices would be cut out of the memory of the blocks, of which the rest would be lost.
    A.device.make_room(_VECTORS_OF_SETUP * sums.nbytes)
    return diagonal, sums, norms


def _coupled(A: Operator, diagonal: DiagonalBlocks, sums: Array, finest: bool) -> Array:
    """Return which unknowns take part in the coarse level. Collective."""
    free, communicator = sums >= 1.0 + _HELD, communicator_of(A)
    if not communicator.largest(float(free.size - count_true(free))):
        return free
    coupled = sums >= 1.0 + DECOUPLED
    if not finest:
        return coupled
    size = diagonal.blocks.shape[1]
    alone = A.device.xp.ascontiguousarray(diagonal.blocks.reshape(-1, size * size)[:, :: size + 1]).reshape(-1)
    those = coupled.astype(np.float64)
    total, count = VectorSpace.of(A).dots((alone, those), (those, those))
    return free | (coupled & (alone * count >= _STIFF * total))


def _group_inverses(A: Operator, *, ties: bool) -> GroupInverses | None:
    """Return D of groups of linked nodes, or None if no nodes are linked."""
    assert isinstance(A, (BsrMatrix, CsrMatrix))
    groups = linked_groups(rows_of(A), ties=ties)
    return None if groups is None else GroupInverses(A, groups)


def _check_cuts(A: Operator, size: int) -> None:
    if isinstance(A, SweptOperator) and not A.keeps_together(size):
        raise InputError(
            f"subdivisions of the matrix cut nodes of {size} unknowns; cut it at multiples of them, or choose another "
            "preconditioner"
        )


def _aggregates_of_strong(
    A: Operator, size: int, free: Array, groups: GroupInverses | None
) -> tuple[Aggregates, _Graph | None]:
    """Aggregate the nodes of a stored matrix, or its groups, by strong couplings; return also those of nodes.

    Unknowns of nodes or groups without any are not free: smoothing suffices.
    """
    assert isinstance(A, (BsrMatrix, CsrMatrix))
    rows, free = in_float64(rows_of(A)), free.reshape(-1, size)
    free &= ~_hubs(rows)[:, None]
    if groups is not None:
        return _aggregates_of_groups(rows, free, groups.groups), None
    offsets, columns = strong = strong_graph(rows)
    free &= (offsets[1:] > offsets[:-1])[:, None]
    return device_aggregates(offsets, columns, free.any(axis=1), A.device.kind), strong


def _aggregates_of_groups(rows: BlockRows, free: Array, groups: Groups) -> Aggregates:
    """Aggregate whole groups by the strong couplings between them."""
    between, of_node = _between_groups(rows, groups), groups.of_node
    offsets, columns = strong_graph(between)
    coupled = (offsets[1:] > offsets[:-1]) & ~_hubs(between)
    free &= coupled[of_node][:, None]
    if groups.cut and _MANY * groups.count <= len(of_node):
        # The smoother does not carry along a line that is cut: the next level must have its parts as nodes.
        return Aggregates(of_node, count=groups.count)
    active = rows.device.xp.zeros(groups.count, dtype=bool)
    active[of_node[free.any(axis=1)]] = True
    of_groups = device_aggregates(offsets, columns, active, rows.device.kind)
    return Aggregates(rows.device.asarray(of_groups.of_node)[of_node], count=of_groups.count)


def _between_groups(rows: BlockRows, groups: Groups) -> BlockRows:
    """Return the matrix of vectors that are constant on groups."""
    xp, nodes, size = rows.device.xp, len(rows.offsets) - 1, int(rows.blocks.shape[1])
    ones = xp.tile(xp.eye(size), (nodes, 1, 1))
    constants = BlockRows(0, xp.arange(nodes + 1), groups.of_node, ones, groups.count)
    image = product_of_rows(rows, constants, groups.count)
    return product_of_rows(constants.transposed(groups.count), image, groups.count)


def _hubs(rows: BlockRows) -> Array:
    """Return which nodes have very many couplings: bool, (nodes,)."""
    return rows.offsets[1:] - rows.offsets[:-1] > most_couplings(rows.columns.size, len(rows.offsets) - 1)


def most_couplings(entries: int, nodes: int) -> int:
    """Return the number of couplings above which a node counts as a hub; ``entries`` and ``nodes`` are those of the matrix."""
    return _HUB * (entries // max(1, nodes)) + _MORE


def _filtered(rows: BlockRows, strong: _Graph) -> BlockRows:
    """Return scalar rows whose weak entries are added to the diagonal, if most are weak (Vanek, Mandel and Brezina 1996).

    The filtered matrix maps constants as A does, but not rotations, so this is for scalar matrices with one mode only.
    Along lines of strong couplings aggregates grow in one direction. A prolongator that is smoothed by weak couplings too would
    reach into all directions, and after a few levels everything would couple with everything.
    """
    xp, nodes, (offsets, columns) = rows.device.xp, len(rows.offsets) - 1, strong
    if 2 * columns.size >= rows.columns.size - nodes:
        return rows
    row = row_numbers(rows.offsets, rows.columns.size)
    keys = row_numbers(offsets, columns.size) * np.int64(nodes) + columns
    own = row * np.int64(nodes) + rows.columns
    place = xp.minimum(xp.searchsorted(keys, own), max(0, columns.size - 1))
    diagonal = rows.columns == row
    kept = diagonal | (keys[place] == own) if columns.size else diagonal
    weak, blocks = xp.flatnonzero(~kept), rows.blocks.copy()
    sums = xp.bincount(row[weak], weights=blocks[weak, 0, 0], minlength=nodes)
    on_diagonal = xp.flatnonzero(diagonal)
    blocks[on_diagonal, 0, 0] += sums[row[on_diagonal]]
    return _entries_of(rows, row, kept, blocks)


def _without(rows: BlockRows, dropped: Array) -> BlockRows:
    """Return rows of which some are empty."""
    row = row_numbers(rows.offsets, rows.columns.size)
    return _entries_of(rows, row, ~dropped[row], rows.blocks)


def _entries_of(rows: BlockRows, row: Array, kept: Array, blocks: Array) -> BlockRows:
    """Return rows with some of their entries, those ``kept``, and their ``blocks``; ``row`` is that of every entry, from 0."""
    xp, nodes, entries = rows.device.xp, len(rows.offsets) - 1, rows.device.xp.flatnonzero(kept)
    offsets = xp.searchsorted(row[entries], xp.arange(nodes + 1)).astype(np.int64)
    return BlockRows(rows.start, offsets, rows.columns[entries], blocks[entries], rows.width)


def _aggregates(A: Operator, size: int, aggregates: Any, points: Array | None, nodes: int, radius: int) -> Aggregates:
    """Return the caller's aggregates, or make them of boxes, of points, or of the graph of the matrix (``"pattern"``)."""
    count = A.shape[0] // size
    if not count:
        return Aggregates(np.empty(0, dtype=np.int32))
    if isinstance(aggregates, tuple):
        if int(np.prod(aggregates)) != count or min(aggregates, default=1) < 1:
            raise InputError(f"a mesh of {aggregates} nodes does not have the {count} nodes of the matrix")
        return box_aggregates(aggregates, max(2, round(nodes ** (1 / len(aggregates)))))
    if aggregates is not None and not isinstance(aggregates, str):
        return numbered_aggregates(aggregates, count)
    if points is not None and aggregates is None:
        found = coordinate_aggregates(points, nodes)
        # How the lattices of ranks lie to each other is not known.
        return found if communicator_of(A).size == 1 else replace(found, grid=None)
    return graph_aggregates(*graph_of(A, size), radius, nodes)


def _points(A: Operator, size: int, coordinates: Any, aggregates: Any) -> Any:
    """Return coordinates; those of a structured mesh as an array, unless T alone needs them and computes its rows from them."""
    if not isinstance(coordinates, GridPoints):
        return coordinates
    alone = isinstance(aggregates, tuple) and communicator_of(A).size == 1
    return coordinates if alone and _computes_motions(A, coordinates, size) else np.asarray(coordinates)


def _computes_motions(A: Operator, points: Array | GridPoints, size: int) -> bool:
    """Return whether T is computed from the coordinates of nodes: on a GPU; a host has the memory for its entries."""
    return A.device.kind == "cuda" and points.shape[1] == 3 and size in (3, 6)


def _tentative(
    A: Operator,
    size: int,
    modes: Array | None,
    points: Array | GridPoints | None,
    free: Array | None,
    aggregates: Aggregates,
) -> Tentative:
    if modes is None and points is not None and free is not None and _computes_motions(A, points, size):
        return RigidTentative(points, free, aggregates, size, A.device)
    modes = modes_of(len(aggregates.of_node), size, modes, points, A.device)
    return StoredTentative(modes, free, aggregates, size, A.device)


def _coarsened(
    A: Operator,
    diagonal: DiagonalBlocks,
    high: float,
    T: Tentative,
    smoothing: int,
    groups: GroupInverses | RowFactors | None = None,
    *,
    stored: bool = False,
    known: int | None = None,
    strong: _Graph | None = None,
    in_float32: BsrMatrix | None = None,
    jumps: bool = False,
) -> CoarseLevel:
    steps = smoothing_steps(smoothing, high)
    transfers: tuple[CsrMatrix, ...] = ()
    energies, scale = _uncoupled_energies(A, diagonal, T)
    if stored:
        assert isinstance(A, (BsrMatrix, CsrMatrix))
        assert groups is None or isinstance(groups, GroupInverses)
        matrix, transfers = _stored_product(A, diagonal, T, steps, groups, strong)
    else:
        # Otherwise parts of coarse matrices would be cut out of the memory of vectors with which the eigenvalue was measured.
        A.device.make_room(_VECTORS_OF_SETUP * A.shape[0] * A.dtype.itemsize)
        matrix = coarse_matrix(A, diagonal if groups is None else groups, T, steps)
    # Where a column of T is zero, or A maps it to zero, as in a small part that nothing holds, the diagonal is only rounding.
    vanishing = replace_vanishing(matrix, energies, _VANISHING)
    return CoarseLevel(A, diagonal, high, T, matrix, vanishing, scale, transfers, groups, known, in_float32, jumps)


def _uncoupled_energies(A: Operator, diagonal: DiagonalBlocks, T: Tentative) -> tuple[Array, float]:
    """Return about the diagonal of ``T^T S^-1 T`` for the diagonal S of D, (unknowns,), and its largest entry. Collective.

    Where columns of T are zero, the largest entry stands; where all are, that of ``S^-1``.

    The squares of the entries of ``T^T S^(-1/2) v``, for random v, have these mean values (Bekas, Kokiopoulou and Saad 2007). D
    is positive definite, so all of them are finite.
    """
    xp, first = A.device.xp, communicator_of(A).before(A.shape[0])
    scales, sums, energies = 1 / diagonal.diagonal_roots(), xp.empty(T.unknowns), xp.zeros(T.unknowns)
    for sample in range(_SAMPLES):
        v = noise(A.device, first + sample * _FAR, A.shape[0])
        v *= scales
        T.restrict(v, sums)
        energies += sums * sums / _SAMPLES
    largest = float(energies.max()) if T.unknowns else 0.0
    largest = largest or VectorSpace.of(A).maximum(scales) ** 2
    return xp.where(energies > 0.0, energies, largest), largest


def _stored_product(
    A: BsrMatrix | CsrMatrix,
    diagonal: DiagonalBlocks,
    T: Tentative,
    steps: list[RecurrenceStep],
    groups: GroupInverses | None,
    strong: _Graph | None,
) -> tuple[BsrMatrix, tuple[CsrMatrix, CsrMatrix]]:
    """Return ``P^T A P``, and P and its transpose, formed on the device of A."""
    rows, count = in_float64(rows_of(A)), T.aggregates.count
    nodes = len(rows.offsets) - 1
    P, hubs = T.rows(0, nodes), _hubs(rows)
    smoothed = rows
    if count_true(hubs):
        smoothed = _without(rows, hubs)  # rows of P of hubs are empty
    elif strong is not None and T.modes == T.block_size == 1:
        smoothed = _filtered(rows, strong)
    for step in steps:
        image = product_of_rows(smoothed, P, count)
        P = (diagonal if groups is None else groups).smoothed(image, P, step.a, count)
    R = P.transposed(count)
    product = product_of_rows(R, product_of_rows(rows, P, count), count)
    arrays = {"row_offsets": product.offsets, "column_indices": product.columns, "values": product.blocks}
    matrix = BsrMatrix.from_arrays((T.unknowns, T.unknowns), np.float64, arrays, {})
    return matrix, (as_csr(P, count), as_csr(R, nodes))
