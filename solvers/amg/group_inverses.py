"""D of groups of nodes: the inverses of the blocks of A on each group, a polynomial in ``D A``, and a smoothed prolongator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from penstock.solvers.amg.dense_inverse import symmetric_inverses
from penstock.solvers.amg.groups import Groups
from penstock.solvers.amg.lines import ADDED, LineInverses
from penstock.solvers.chebyshev import NEARLY_SETTLED, Interval
from penstock.spmv import (
    Array,
    BsrMatrix,
    CsrMatrix,
    InputError,
    SparseMatrix,
    ValidatedOperator,
    VectorSpace,
    device_of,
)
from penstock.spmv.products.block_rows import BlockRows, row_numbers, rows_of
from penstock.spmv.products.multiply import as_matrix, product_of_rows
from penstock.spmv.vectors.noise import noise

# Lanczos steps after which the largest eigenvalue is looked at, at most in all, and the margin that makes a bound of it.
_STEPS, _MOST_STEPS, _MARGIN = 6, 96, 1.05


class GroupInverses(ValidatedOperator):
    """D, a symmetric positive definite matrix of dense blocks on groups of nodes; ``high`` bounds the eigenvalues of ``D A``.

    It is stored as a sparse matrix of the blocks of A, BSR or CSR, in which a node has those of all nodes of its group; the
    inverses of lines are factorised instead.
    """

    def __init__(self, A: BsrMatrix | CsrMatrix, groups: Groups) -> None:
        rows = rows_of(A)
        self.A, self.groups = A, groups
        self.shape, self.dtype, self.device = A.shape, np.dtype(np.float64), A.device
        matrix = as_matrix(_inverses(rows, groups), len(rows.offsets) - 1, np.float64)
        assert isinstance(matrix, (BsrMatrix, CsrMatrix))
        self.matrix = matrix
        self.lines: LineInverses | None = None
        if groups.on_line is not None and groups.place is not None:
            line = A.device.xp.where(groups.on_line[groups.of_node], groups.of_node, -1)
            self.lines = LineInverses(rows, line, groups.place, ADDED)
        self.high = largest_eigenvalue(A, self)

    @property
    def capturable(self) -> bool:
        """Whether products can be captured."""
        return self.matrix.capturable

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        self.matrix._apply(x, out, alpha, beta)
        if self.lines is not None:
            self.lines.three_terms(-alpha, None, x, 0.0, x, 1.0, out)

    def smoothed(self, image: BlockRows, own: BlockRows, factor: float, width: int) -> BlockRows:
        """Return the rows of ``P - factor D A P``, of ``width`` columns of blocks, from those of ``A P`` and of P."""
        rows = smoothed_by(rows_of(self.matrix), image, own, factor, width)
        if self.lines is None:
            return rows
        return smoothed_by(self.lines.identity(), self.lines.product_of(image), rows, factor, width)


class GroupChebyshev(ValidatedOperator):
    """``z = q(D A) D r`` as of :class:`~penstock.solvers.Chebyshev`, with D of groups; of ``degree - 1`` products with A.

    A step reads A and D, and 11 vectors; two are stored besides r and z.
    """

    def __init__(self, A: SparseMatrix, D: GroupInverses, degree: int, low: float, high: float) -> None:
        self.A, self.D, self.degree = A, D, degree
        self.shape, self.dtype, self.device = A.shape, np.dtype(A.dtype), A.device
        (self._first, _), *self._steps = Interval(low, high).coefficients(degree)
        self._space, self._work = VectorSpace.of(A), list[Array]()

    @property
    def capturable(self) -> bool:
        """Whether products with A and D can be captured."""
        return self.A.capturable and self.D.capturable

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        if not self._work or self._work[0].shape != x.shape:
            self._work = [self.device.xp.empty_like(x) for _ in range(4)]
        residual, step, z, before = self._work
        self.D._apply(x, z, self._first, 0.0)
        for number, (a, c) in enumerate(self._steps):
            residual[...] = x
            self.A._apply(z, residual, -1.0, 1.0)
            self.D._apply(residual, step, 1.0, 0.0)
            self._space.three_terms(-a, None, None, step, 1.0 + c, z, -c if number else 0.0, before)
            z, before = before, z
        self._space.write(alpha, z, beta, out)


def largest_eigenvalue(A: SparseMatrix, D: ValidatedOperator) -> float:
    """Return a bound of the largest eigenvalue of ``D A``: that of Lanczos steps plus a margin, good but not rigorous.

    Golub and Van Loan 2013, section 10.1, in the inner product of D; each step is a product with A and one with D. Steps end
    when some of them no longer raise it, 18 at least unless the space they span is invariant before.
    """
    space, n = VectorSpace.of(A), A.shape[0]
    r = noise(A.device, 0, n)
    z, w, before = (A.device.xp.empty_like(r) for _ in range(3))
    D._apply(r, z, 1.0, 0.0)
    before[...], beta, diagonal, beside = 0.0, 0.0, list[float](), list[float]()
    norm, estimate = _root(space.dot(r, z)), 0.0
    for step in range(1, min(_MOST_STEPS, n) + 1):
        r /= norm
        z /= norm
        A._apply(z, w, 1.0, 0.0)
        space.combine(-beta, before, 1.0, w)
        diagonal.append(space.dot(w, z))
        space.combine(-diagonal[-1], r, 1.0, w)
        before, r, w = r, w, before
        D._apply(r, z, 1.0, 0.0)
        square = space.dot(r, z)
        if not square > np.finfo(float).eps * diagonal[0] ** 2:  # an invariant space
            break
        norm = beta = _root(square)
        beside.append(beta)
        if step % _STEPS == 0:
            last, estimate = estimate, _largest_ritz_value(diagonal, beside)
            if step >= 3 * _STEPS and estimate <= (1.0 + NEARLY_SETTLED) * last:
                break
    return _MARGIN * _largest_ritz_value(diagonal, beside)


def _largest_ritz_value(diagonal: list[float], beside: list[float]) -> float:
    """Return the largest eigenvalue of a tridiagonal matrix."""
    off = np.array(beside[: len(diagonal) - 1])
    return float(np.linalg.eigvalsh(np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1))[-1])


def _root(square: float) -> float:
    if not 0 < square < np.inf:
        raise InputError("the matrix is not positive definite, or badly scaled: a sum of squares of it is not positive")
    return float(np.sqrt(square))


def _inverses(rows: BlockRows, groups: Groups) -> BlockRows:
    """Return the inverses of the blocks of a matrix on groups, as rows of a matrix of the same nodes."""
    size = int(rows.blocks.shape[1])
    inverses = ((chosen, symmetric_inverses(dense)) for chosen, dense in dense_groups(rows, groups))
    return rows_on_groups(*groups.lists, size, inverses, groups.dense_sizes)


def rows_on_groups(
    starts: Array, order: Array, size: int, dense: Iterable[tuple[Array, Array]], sizes: Array | None = None
) -> BlockRows:
    """Return a matrix of dense blocks on groups as rows of blocks of ``size``.

    ``order`` holds the nodes by group, all from 0 on, those of group g from ``starts[g]``; ``dense`` yields numbers of groups and
    their blocks, ``(groups, most, most)`` numbers, as :func:`dense_groups` does. ``sizes`` are 0 for groups without rows.
    """
    xp, nodes, groups = device_of(order).xp, len(order), len(starts) - 1
    sizes, group = xp.diff(starts) if sizes is None else sizes, row_numbers(starts, nodes)
    of_node, local = xp.empty(nodes, dtype=np.int64), xp.empty(nodes, dtype=np.int64)
    of_node[order], local[order] = group, xp.arange(nodes) - starts[group]
    offsets = xp.zeros(nodes + 1, dtype=np.int64)
    xp.cumsum(sizes[of_node], out=offsets[1:])
    row = row_numbers(offsets, int(offsets[-1]))
    other = xp.arange(row.size) - offsets[row]
    blocks = xp.empty((row.size, size, size))
    for chosen, numbers in dense:
        most = numbers.shape[1] // size
        of_groups = numbers.reshape(len(chosen), most, size, most, size).swapaxes(2, 3)
        place = xp.full(groups, -1, dtype=np.int64)
        place[chosen] = xp.arange(len(chosen))
        entries = xp.flatnonzero(place[of_node[row]] >= 0)
        of_row = row[entries]
        blocks[entries] = of_groups[place[of_node[of_row]], local[of_row], other[entries]]
    columns = order[starts[of_node[row]] + other].astype(np.int32)
    return BlockRows(0, offsets, columns, blocks, nodes)


def size_classes(sizes: Array) -> Iterator[tuple[int, Array]]:
    """Yield powers of two, and the numbers of the groups up to this size and above half of it, which are computed together."""
    xp = device_of(sizes).xp
    for k in range((int(sizes.max()) - 1).bit_length() + 1 if len(sizes) else 0):
        most = 1 << k
        yield most, xp.flatnonzero((sizes <= most) & (sizes > most // 2))


def dense_groups(rows: BlockRows, groups: Groups) -> Iterator[tuple[Array, Array]]:
    """Yield numbers of groups of similar size, without lines, and the dense blocks of a matrix on them, (groups, most, most).

    ``rows`` are those of the nodes of the groups; entries in other columns are left out. Diagonals are raised a little, and are
    1 where a group has no more nodes.
    """
    xp, nodes, size = rows.device.xp, len(rows.offsets) - 1, int(rows.blocks.shape[1])
    starts, order = groups.lists
    sizes, of_node = groups.dense_sizes, groups.of_node
    local = xp.empty(nodes, dtype=np.int64)
    local[order] = xp.arange(nodes) - starts[of_node[order]]
    of_entry, columns = row_numbers(rows.offsets, rows.columns.size), rows.columns - rows.start
    near = xp.flatnonzero((columns >= 0) & (columns < nodes))
    inside = near[of_node[of_entry[near]] == of_node[columns[near]]]
    for most, chosen in size_classes(sizes):
        number = xp.full(groups.count, -1, dtype=np.int64)
        number[chosen] = xp.arange(len(chosen))
        entries = inside[number[of_node[of_entry[inside]]] >= 0]
        of_row, of_column = of_entry[entries], columns[entries]
        dense = xp.zeros((len(chosen), most, most, size, size))
        dense[number[of_node[of_row]], local[of_row], local[of_column]] = rows.blocks[entries]
        _complete_diagonal(dense, sizes[chosen])
        yield chosen, dense.swapaxes(2, 3).reshape(len(chosen), most * size, most * size)


def _complete_diagonal(dense: Array, sizes: Array) -> None:
    """Raise the diagonals of blocks ``(groups, most, most, size, size)`` a little, and put 1 where a group has no more nodes."""
    xp = device_of(dense).xp
    for place in range(dense.shape[1]):
        for unknown in range(dense.shape[3]):
            entries = dense[:, place, place, unknown, unknown]
            entries[...] = xp.where(place < sizes, entries * (1.0 + ADDED), 1.0)


def smoothed_by(D: BlockRows, image: BlockRows, own: BlockRows, factor: float, width: int) -> BlockRows:
    """Return rows of ``P - factor D A P``, of ``width`` columns of blocks, from those of ``A P`` and of P.

    D holds the same rows, with columns numbered from the first of them.
    """
    xp, nodes, size = D.device.xp, len(D.offsets) - 1, int(D.blocks.shape[1])
    numbers = xp.arange(nodes)
    place = xp.arange(D.columns.size) + row_numbers(D.offsets, D.columns.size)
    columns = xp.empty(D.columns.size + nodes, dtype=np.int32)
    blocks = xp.empty((len(columns), size, size))
    columns[place], blocks[place] = D.columns, -factor * D.blocks
    ends = D.offsets[1:] + numbers
    columns[ends], blocks[ends] = numbers + nodes, xp.eye(size)
    factors = BlockRows(0, D.offsets + xp.arange(nodes + 1), columns, blocks, 2 * nodes)  # (-factor D, I)
    above = BlockRows(0, image.offsets, image.columns, image.blocks)
    below = BlockRows(nodes, own.offsets, own.columns, own.blocks)
    rows = product_of_rows(factors, BlockRows.joined([above, below], 0), width)
    rows.start = image.start
    return rows
