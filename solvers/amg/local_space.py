"""What a coarse level is made of where nodes alone are too small: D of groups, aggregates of groups, and further columns.

Where coefficients jump, elements are flat, nodes are tied or no coordinates are known, three things differ from a smooth system:
D inverts the blocks of A on groups of strongly coupled nodes, aggregates are unions of groups, and T has beside the near-null
space those slow modes that the near-null space misses, on each aggregate as many as it needs. They are found in relaxed random
vectors X, the columns of ``f(D A) R`` with ``f(t) = (t + 1/K^2)^-1/2 / (1 + (cut t)^2)``: random sums of slow modes of about
equal energy. An aggregate needs a column for each direction of X in which the weak approximation property breaks, ``|x - T w|_M^2
<= k / high x.Ax``, with M the inverse of D. M has no entries between groups, so the Gram matrices of an aggregate are sums of
those of its groups.

Sources: Brezina, Falgout, MacLachlan, Manteuffel, McCormick and Ruge (2005), relaxed vectors; Mandel (2003), local estimates of
the weak approximation property; D'Ambra and Vassilevski (2019), aggregates by matching of couplings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse

from penstock.solvers.amg.aggregates import Aggregates
from penstock.solvers.amg.galerkin import PRODUCT, coarse_matrix
from penstock.solvers.amg.group_factors import GroupFactors, GroupPart, factored
from penstock.solvers.amg.group_growth import Couplings, couplings, grown_groups
from penstock.solvers.amg.group_inverses import size_classes
from penstock.solvers.amg.group_matching import matched_groups
from penstock.solvers.amg.links import inverse_roots
from penstock.solvers.amg.matrix_rows import bounds_within, own_part_of, row_bounds_of, visit_rows
from penstock.solvers.amg.tentative import StoredTentative
from penstock.solvers.chebyshev import largest_eigenvalue
from penstock.solvers.preconditioners import DiagonalBlocks
from penstock.spmv import Array, Operator, VectorSpace
from penstock.spmv.communicator import communicator_of, sharing_memory
from penstock.spmv.products.block_rows import BlockRows, row_numbers, rows_of
from penstock.spmv.vectors.noise import noise
from penstock.spmv.vectors.recurrence import Recurrence, RecurrenceStep

# An aggregate has at most _COLUMNS columns, or those of the near-null space if these are more. Beside these, it has at most
# _FURTHER columns for each random vector.
_COLUMNS, _FURTHER = 18, 0.5
# Columns of a piece of an aggregate, the largest number that divides those of the near-null space.
_PIECES = (3, 2, 1)
# Unknowns of a group and random vectors, from which the first is taken for which there is memory, and nodes of a group at most.
_CHOICES, _GROUP_NODES = ((96, 24), (96, 12), (48, 12), (24, 12)), 32
# A sum of couplings below this share of that of their norms does not join a node to a group.
_ALIKE = 0.1
# Groups in an aggregate, and couplings below which groups are not joined.
_SIZES, _WEAK = (3, 4, 6, 8, 12, 16, 24, 32, 48), (0.05, 0.02, 0.0)
# Products that relax random vectors, and the share of the largest eigenvalue below which modes stay in them.
_RELAXED, _CUT = 41, 30.0
# Entries of the coarse matrix, as a share of those of A, and the number of sampled aggregates from which they are estimated.
_BUDGET, _SAMPLED = 0.05, 128
# Groups are not used where the coarse matrix would have more entries than this share of those of A, as around a hub.
_TOO_MANY = 1.0
# Directions of which the space misses more than a bound become columns. The bound begins at _FINEST and is multiplied by _STEP
# until the coarse matrix is small enough. Aggregates are accepted if it stays below _ACCEPTED and at most the share _FEW of them
# wants more columns than they may have.
_FINEST, _STEP, _ACCEPTED, _FEW = 0.5, 1.25, 1.0, 0.1
# Squares smaller than this share of others are rounding.
_ROUNDING, _TINY = 1e-10, 1e-300
# Roots of diagonal entries are between this and its reciprocal where D is stored in float32.
_SMALL = 1e-15
# Groups, and nodes, of which vectors are multiplied at a time.
_GROUPS_AT_A_TIME, _NODES_AT_A_TIME = 4096, 1 << 16
# Numbers for each unknown during the set-up, beside D: four for each random vector, as a recurrence has, and some more.
_SETUP_NUMBERS = 8


@dataclass
class LocalSpace:
    """D of groups and what T is made of.

    ``modes``, (n, most), begins with the ``known`` near-null space. Aggregate a uses the first ``columns[a]`` of them, a multiple
    of ``piece``; ``columns`` is None if no aggregate has columns beside the near-null space.
    """

    D: GroupFactors
    high: float
    aggregates: Aggregates
    modes: Array
    known: int
    columns: Array | None
    piece: int


def local_space(A: Operator, scales: Array, known: Array, smoothing: int, **measuring: Any) -> LocalSpace | None:
    """Return what a coarse level of groups is made of, in about seven sweeps.

    None if there is no memory for it, where the factors of D would leave the range of float32, or where the coarse matrix would
    not be smaller than A. Groups and aggregates do not cross ranks that share A. Collective.

    ``scales``, (nodes, size), are ``1 / sqrt(a_ii)``, and ``known``, (n, modes), is the near-null space; ``measuring`` are
    options of :func:`largest_eigenvalue`.
    """
    size, xp, communicator = int(scales.shape[1]), A.device.xp, communicator_of(A)
    most, vectors = _group_nodes_and_vectors(A, size)
    if not most:
        return None
    in_range = float(scales.min()) > _SMALL and float(scales.max()) < 1.0 / _SMALL
    if communicator.largest(float(not in_range)):  # factors in float32 would overflow
        return None
    with communicator.together():
        D, entries = _group_factors(A, scales, size, most)
    high = largest_eigenvalue(A, D, scales=scales.reshape(-1), **measuring)
    with communicator.together(), own_part_of(A) as own:
        graph = _graph_of_groups(own, D, size)
    sums = RelaxedVectors(A, D, high, known, scales, vectors)
    with communicator.together():
        chosen = best_aggregates(graph, sums, high, smoothing, int(_BUDGET * entries))
    of_coarse, of_fine = communicator.total(np.array([chosen.entries, entries], dtype=np.float64))
    if of_coarse > _TOO_MANY * of_fine:
        return None
    with communicator.together():
        of_node = xp.asarray(chosen.of_group)[D.of_node]
        modes = sums.with_columns(of_node, chosen.coefficients)
        aggregates = Aggregates(A.device.to_host(of_node), count=len(chosen.columns))
    differ = communicator.largest(float((chosen.columns != sums.known).any())) > 0
    return LocalSpace(D, high, aggregates, modes, sums.known, chosen.columns if differ else None, sums.piece)


def scales_of(diagonal: DiagonalBlocks) -> Array:
    """Return ``1 / sqrt(a_ii)``, (nodes, size), from the inverses of the diagonal blocks."""
    xp = diagonal.device.xp
    return inverse_roots(xp.einsum("nii->ni", xp.linalg.inv(diagonal.blocks.astype(np.float64, copy=False))))


def _group_nodes_and_vectors(A: Operator, size: int) -> tuple[int, int]:
    """Return how many nodes a group may have in the free memory, and random vectors; 0 nodes if even small groups do not fit."""
    free = A.device.free_nbytes() // (2 * sharing_memory(A))
    for unknowns, vectors in _CHOICES:
        exceeds = (2 * unknowns + 8 * (4 * vectors + _SETUP_NUMBERS)) * A.shape[0] > free
        if not communicator_of(A).largest(float(exceeds)):
            return min(_GROUP_NODES, unknowns // size), vectors
    return 0, 0


def _group_factors(A: Operator, scales: Array, size: int, most: int) -> tuple[GroupFactors, int]:
    """Return D of groups of about ``most`` nodes at most, and the entries of A; one sweep."""
    bounds = row_bounds_of(A)
    parts, blocks = list[GroupPart](), 0

    def visit(rows: BlockRows) -> None:
        nonlocal blocks
        inside = bounds_within(rows, bounds, size)
        of_node = grown_groups(rows.start, couplings(rows, scales), inside, most, alike=_ALIKE)
        parts.append(factored(rows, A.device.asarray(of_node)))
        blocks += rows.columns.size

    visit_rows(A, size, visit, bounds)
    return GroupFactors(parts, bounds, size, A.device), blocks * size**2


def _graph_of_groups(A: Operator, D: GroupFactors, size: int) -> Couplings:
    """Return the couplings of groups, those of the matrix of constants on groups; one sweep."""
    xp, n = A.device.xp, A.shape[0]
    constants = xp.tile(xp.eye(size), (n // size, 1))
    groups = Aggregates(A.device.to_host(D.of_node), count=D.count)
    T = StoredTentative(constants, xp.ones(n, dtype=bool), groups, size, A.device)
    rows = rows_of(coarse_matrix(A, D, T, []))
    own = xp.flatnonzero(row_numbers(rows.offsets, rows.columns.size) == rows.columns)
    unknowns = xp.einsum("gii->gi", rows.blocks[own])
    scales = xp.where(unknowns > 0, 1.0 / xp.sqrt(xp.where(unknowns > 0, unknowns, 1.0)), 0.0)
    return couplings(rows, scales)


class RelaxedVectors:
    """Random sums of slow modes, and what is known of them and of the near-null space on every group.

    Parameters
    ----------
    A : Operator
    D : GroupFactors
    high : float
        Bound of the eigenvalues of ``D A``.
    known : array, (n, modes)
        The near-null space.
    scales : array, (nodes, size)
        ``1 / sqrt(a_ii)``.
    vectors : int

    Notes
    -----
    Of the vectors C, the near-null space and the relaxed ones, ``grams`` holds ``C^T M C`` of every group, with M the
    inverse of D, and ``energies`` those of the relaxed vectors, ``x.A x`` and ``(A x).D A x / high``, summed over x. Both are on
    the host. 42 products.
    """

    def __init__(self, A: Operator, D: GroupFactors, high: float, known: Array, scales: Array, vectors: int) -> None:
        self._D, self._known, xp = D, known, A.device.xp
        self._X, product = _relaxed(A, D, high, scales, vectors)
        groups = D.of_node

        def of_groups(terms: Array) -> Array:
            of_nodes = terms.sum(axis=1).reshape(-1, D.block_size).sum(axis=1)
            return A.device.to_host(xp.bincount(groups, weights=of_nodes, minlength=D.count))

        with communicator_of(A).together():  # relaxed together, summed by each rank for itself
            self.energies = np.stack(
                [of_groups(self._X * product), of_groups(product * D.apply(product)) / high], axis=1
            )
            del product
            self.grams = self._grams()

    @property
    def known(self) -> int:
        """Columns of the near-null space."""
        return int(self._known.shape[1])

    @property
    def piece(self) -> int:
        """Columns of a piece of an aggregate."""
        return next(piece for piece in _PIECES if self.known % piece == 0)

    @property
    def most(self) -> int:
        """Columns of an aggregate at most: whole pieces."""
        further = min(int(_FURTHER * self._X.shape[1]), max(0, _COLUMNS - self.known))
        return self.known + further // self.piece * self.piece

    def _grams(self) -> Array:
        D, xp = self._D, self._D.device.xp
        vectors = xp.concatenate([self._known, self._X], axis=1)
        images, size, width = D.solve(vectors), D.block_size, vectors.shape[1]
        sizes = xp.diff(D.starts)
        grams = xp.empty((D.count, width, width))
        for most, chosen in size_classes(sizes):
            for part in range(0, len(chosen), _GROUPS_AT_A_TIME):
                some = chosen[part : part + _GROUPS_AT_A_TIME]
                place = xp.arange(most)[None, :]
                inside = place < sizes[some][:, None]
                nodes = D.order[xp.where(inside, D.starts[some][:, None] + place, 0)]
                rows = (nodes[:, :, None] * np.int64(size) + xp.arange(size)).reshape(len(some), -1)
                left = vectors[rows] * xp.repeat(inside, size, axis=1)[:, :, None]
                grams[some] = xp.matmul(left.swapaxes(1, 2), images[rows])
        return D.device.to_host(grams)

    def with_columns(self, of_node: Array, coefficients: Array) -> Array:
        """Return the near-null space and combinations of all vectors, whose factors are (aggregates, vectors, columns)."""
        xp, size, known = self._D.device.xp, self._D.block_size, self.known
        modes = xp.zeros((len(self._X), known + coefficients.shape[2]))
        modes[:, :known], of_aggregates = self._known, xp.asarray(coefficients)
        for start in range(0, len(of_node), _NODES_AT_A_TIME):
            aggregate = xp.repeat(of_node[start : start + _NODES_AT_A_TIME], size)
            rows = slice(start * size, start * size + len(aggregate))
            vectors = xp.concatenate([self._known[rows], self._X[rows]], axis=1)
            modes[rows, known:] = xp.matmul(vectors[:, None, :], of_aggregates[aggregate])[:, 0, :]
        return modes


def _relaxed(A: Operator, D: GroupFactors, high: float, scales: Array, vectors: int) -> tuple[Array, Array]:
    """Return ``f(D A) R`` for random vectors R, and its product with A: Clenshaw's recurrence for a Chebyshev series."""
    xp, n, space = A.device.xp, A.shape[0], VectorSpace.of(A)
    before, of_all = space.communicator.before(n), space.length(n)
    first, *middle, last = _series(lambda t: (t + _RELAXED**-2.0) ** -0.5 / (1.0 + (_CUT * t) ** 2), _RELAXED)
    R = xp.stack([noise(A.device, column * of_all + before, n) for column in range(vectors)], axis=1)
    R *= scales.reshape(-1, 1)
    v, other, image = last * R, xp.zeros_like(R), xp.zeros_like(R)
    step = RecurrenceStep(-4.0 / high, -2.0, -1.0, driven=False)
    steps = [replace(step, adds=factor) for factor in reversed(middle)]
    steps += [RecurrenceStep(-2.0 / high, -1.0, -1.0, driven=False, adds=first), PRODUCT]
    recurrence = Recurrence(steps, v, other, R, D, image, space, added=R, repeats=False)
    product = recurrence.run(A)
    return (other if product is v else v), product


def _series(f: Callable[[Any], Any], degree: int) -> list[float]:
    """Return the coefficients of f on [0, 1] in Chebyshev polynomials of ``2 t - 1``, up to a degree."""
    angles = np.pi * (np.arange(4 * degree) + 0.5) / (4 * degree)
    values = f((np.cos(angles) + 1.0) / 2.0)
    return [float((values * np.cos(k * angles)).mean() * (2 if k else 1)) for k in range(degree + 1)]


@dataclass
class Chosen:
    """Aggregates of groups and the columns of T on them beside the near-null space.

    ``columns``, (aggregates,), are those of each, the near-null space among them; ``coefficients``, (aggregates, vectors, further
    columns), combine all vectors of :class:`RelaxedVectors`; ``entries`` is about the number of those of the coarse matrix.
    """

    of_group: Array
    columns: Array
    coefficients: Array
    entries: int


def best_aggregates(graph: Couplings, sums: RelaxedVectors, high: float, smoothing: int, budget: int) -> Chosen:
    """Return the aggregates and columns that miss least of the relaxed vectors; up to ``budget`` entries in the coarse matrix.

    The smallest aggregates are taken that represent them well and whose coarse matrix fits; if there are none, those that miss
    least on average.
    """
    offsets, columns, _, norms = graph
    count = len(offsets) - 1
    pattern = scipy.sparse.csr_array(((norms > 0).astype(np.float32), columns, offsets), (count, count), copy=True)
    pattern.eliminate_zeros()
    best, least = None, math.inf
    for weak in _WEAK:
        for size in _SIZES:
            of_group = matched_groups(graph, size, weak)
            entries = _coarse_entries(pattern, of_group, 2 * smoothing + 1)
            fits = entries(np.full(int(of_group.max()) + 1, sums.known)) <= budget
            if not fits and (size, weak) != (_SIZES[-1], _WEAK[-1]):
                continue
            worth, directions = _missing(of_group, sums, high)
            used, bound, capped = _columns_within(worth, sums, entries, budget)
            beyond = np.arange(worth.shape[1]) >= (used - sums.known)[:, None]
            missed = float((worth * beyond).sum(axis=1).mean())
            accepted = fits and bound <= _ACCEPTED and capped <= _FEW
            if accepted or best is None or missed < least:
                further = int(used.max()) - sums.known
                coefficients = (directions * ~beyond[:, None, :])[:, :, :further]
                best, least = Chosen(of_group, used, coefficients, entries(used)), missed
            if accepted:
                return best
            if bound == _FINEST:  # the budget limits no columns, so larger aggregates would only miss more
                break
    assert best is not None, "the largest aggregates are always considered"
    return best


def _columns_within(
    worth: Array, sums: RelaxedVectors, entries: Callable[[Array], int], budget: int
) -> tuple[Array, float, float]:
    """Return the columns of every aggregate: whole pieces, for the directions that miss more than a bound.

    Returns
    -------
    used : array, (aggregates,)
    bound : float
        The smallest one tried with which the coarse matrix has up to ``budget`` entries. It is above the largest ``worth`` if
        the near-null space alone has more.
    capped : float
        The share of aggregates that want more columns than there may be.
    """
    bound, largest = _FINEST, float(worth.max(initial=0.0))
    while True:
        wanted = sums.known + (worth > bound).sum(axis=1)
        used = np.minimum(-(-wanted // sums.piece) * sums.piece, sums.most)
        if bound > largest or entries(used) <= budget:
            return used, bound, float((wanted > sums.most).mean())
        bound *= _STEP


def _missing(of_group: Array, sums: RelaxedVectors, high: float) -> tuple[Array, Array]:
    """Return of every aggregate how much of the relaxed vectors the near-null space misses, by directions, largest first.

    The first array, (aggregates, vectors), holds the squares of these parts in the norm of M, times ``high`` over their energy;
    the second one, (aggregates, all vectors, vectors), combinations of all vectors that span them.
    """
    order = np.argsort(of_group, kind="stable")
    first = np.flatnonzero(np.diff(of_group[order], prepend=-1))
    grams = np.add.reduceat(sums.grams[order], first)
    energies = np.add.reduceat(sums.energies[order], first).max(axis=1)
    known = sums.known
    scale = 1.0 / np.sqrt(np.maximum(np.einsum("gii->gi", grams[:, :known, :known]), _TINY))
    values, axes = np.linalg.eigh(grams[:, :known, :known] * scale[:, :, None] * scale[:, None, :])
    inverses = np.where(values > _ROUNDING * values[:, -1:], 1.0 / np.maximum(values, _TINY), 0.0)
    basis = scale[:, :, None] * axes
    share = basis @ (inverses[:, :, None] * (basis.swapaxes(1, 2) @ grams[:, :known, known:]))
    vectors = grams.shape[1] - known
    parts = np.concatenate([-share, np.broadcast_to(np.eye(vectors), (len(first), vectors, vectors))], axis=1)
    values, directions = np.linalg.eigh(parts.swapaxes(1, 2) @ grams @ parts)
    values, directions = values[:, ::-1], directions[:, :, ::-1]
    present = values > _ROUNDING * np.maximum(np.einsum("gii->g", grams)[:, None], _TINY)
    values = np.where(present, values, 0.0)
    worth = values * high / np.maximum(energies, _TINY)[:, None]
    scales = np.where(values > 0, 1.0 / np.sqrt(np.maximum(values, _TINY)), 0.0)  # what is rounding becomes no column
    return worth, parts @ (directions * scales[:, None, :])


def _coarse_entries(pattern: Any, of_group: Array, products: int) -> Callable[[Array], int]:
    """Return what estimates the entries of a coarse matrix from the columns of every aggregate.

    Aggregates are coupled if ``products`` steps between groups connect them. The rows of evenly spaced aggregates are counted and
    scaled up; the count is exact if all aggregates are in the sample.
    """
    total = int(of_group.max()) + 1
    sampled = np.unique(np.linspace(0, total - 1, min(total, _SAMPLED)).astype(np.int64))
    number = np.full(total, -1, dtype=np.int64)
    number[sampled] = np.arange(len(sampled))
    members = np.flatnonzero(number[of_group] >= 0)
    ones = np.ones(len(members), dtype=np.float32)
    reached = scipy.sparse.csr_array((ones, (number[of_group[members]], members)), shape=(len(sampled), len(of_group)))
    for _ in range(products):
        reached = reached @ pattern
        reached.data[...] = 1.0
    onto = scipy.sparse.csr_array((np.ones(len(of_group), dtype=np.float32), of_group, np.arange(len(of_group) + 1)))
    coupled = (reached @ onto).astype(np.float64)
    coupled.data[...] = 1.0
    return lambda columns: int(columns[sampled] @ (coupled @ columns)) * total // len(sampled)
