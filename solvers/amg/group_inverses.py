"""D of groups of nodes: the inverses of the blocks of A on each group, a polynomial in ``D A``, and a smoothed prolongator."""

from __future__ import annotations

import numpy as np

from penstock.solvers.amg.groups import Groups
from penstock.solvers.chebyshev import Interval
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

# A group may be all of a body without supports, whose block is singular: this share of its diagonal is added.
_ADDED = 1e-10
# Lanczos steps that measure the largest eigenvalue, and the margin that makes a bound of it.
_STEPS, _MARGIN = 12, 1.05


class GroupInverses(ValidatedOperator):
    """D, a symmetric positive definite matrix of dense blocks on groups of nodes; ``high`` bounds the eigenvalues of ``D A``.

    It is stored as a sparse matrix of the blocks of A, BSR or CSR, in which a node has those of all nodes of its group.
    """

    def __init__(self, A: BsrMatrix | CsrMatrix, groups: Groups) -> None:
        rows = rows_of(A)
        self.A, self.groups = A, groups
        self.shape, self.dtype, self.device = A.shape, np.dtype(np.float64), A.device
        matrix = as_matrix(_inverses(rows, groups), len(rows.offsets) - 1, np.float64)
        assert isinstance(matrix, (BsrMatrix, CsrMatrix))
        self.matrix = matrix
        self.high = largest_eigenvalue(A, self)

    @property
    def capturable(self) -> bool:
        """Whether products can be captured."""
        return self.matrix.capturable

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        self.matrix._apply(x, out, alpha, beta)

    def smoothed(self, image: BlockRows, own: BlockRows, factor: float, width: int) -> BlockRows:
        """Return the rows of ``P - factor D A P``, of ``width`` columns of blocks, from those of ``A P`` and of P."""
        rows = rows_of(self.matrix)
        xp, nodes = self.device.xp, len(rows.offsets) - 1
        numbers = xp.arange(nodes)
        place = xp.arange(rows.columns.size) + row_numbers(rows.offsets, rows.columns.size)
        columns = xp.empty(rows.columns.size + nodes, dtype=np.int32)
        blocks = xp.empty((len(columns), *rows.blocks.shape[1:]))
        columns[place], blocks[place] = rows.columns, -factor * rows.blocks
        ends = rows.offsets[1:] + numbers
        columns[ends], blocks[ends] = numbers + nodes, xp.eye(rows.blocks.shape[1])
        factors = BlockRows(0, rows.offsets + xp.arange(nodes + 1), columns, blocks, 2 * nodes)  # (-factor D, I)
        below = BlockRows(nodes, own.offsets, own.columns, own.blocks)
        return product_of_rows(factors, BlockRows.joined([image, below], 0), width)


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
    """Return a bound of the largest eigenvalue of ``D A``: that of some Lanczos steps plus a margin, good but not rigorous.

    Golub and Van Loan 2013, section 10.1, in the inner product of D; each step is a product with A and one with D.
    """
    space, n = VectorSpace.of(A), A.shape[0]
    r = noise(A.device, 0, n)
    z, w, before = (A.device.xp.empty_like(r) for _ in range(3))
    D._apply(r, z, 1.0, 0.0)
    before[...], beta, diagonal, beside = 0.0, 0.0, list[float](), list[float]()
    norm = _root(space.dot(r, z))
    for _ in range(min(_STEPS, n)):
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
    off = np.array(beside[: len(diagonal) - 1])
    return _MARGIN * float(np.linalg.eigvalsh(np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1))[-1])


def _root(square: float) -> float:
    if not 0 < square < np.inf:
        raise InputError("the matrix is not positive definite, or badly scaled: a sum of squares of it is not positive")
    return float(np.sqrt(square))


def _inverses(rows: BlockRows, groups: Groups) -> BlockRows:
    """Return the inverses of the blocks of a matrix on groups, as rows of a matrix of the same nodes."""
    xp, nodes, size = rows.device.xp, len(rows.offsets) - 1, int(rows.blocks.shape[1])
    starts, order = groups.lists
    sizes, of_node = xp.diff(starts), groups.of_node
    local = xp.empty(nodes, dtype=np.int64)  # the place of a node in its group
    local[order] = xp.arange(nodes) - starts[of_node[order]]
    offsets = xp.zeros(nodes + 1, dtype=np.int64)
    xp.cumsum(sizes[of_node], out=offsets[1:])
    row = row_numbers(offsets, int(offsets[-1]))
    other = xp.arange(row.size) - offsets[row]
    of_entry = row_numbers(rows.offsets, rows.columns.size)
    inside = xp.flatnonzero(of_node[of_entry] == of_node[rows.columns])
    blocks = xp.empty((row.size, size, size))
    for most in (1 << k for k in range((int(sizes.max()) - 1).bit_length() + 1)):  # groups of similar size together
        chosen = (sizes <= most) & (sizes > most // 2)
        number = xp.cumsum(chosen) - 1
        entries = inside[chosen[of_node[of_entry[inside]]]]
        of_row, of_column = of_entry[entries], rows.columns[entries]
        dense = xp.zeros((int(chosen.sum()), most, most, size, size))
        dense[number[of_node[of_row]], local[of_row], local[of_column]] = rows.blocks[entries]
        _complete_diagonal(dense, sizes[chosen])
        place = xp.flatnonzero(chosen[of_node[row]])
        of_row = row[place]
        blocks[place] = _inverted(dense)[number[of_node[of_row]], local[of_row], other[place]]
    columns = order[starts[of_node[row]] + other].astype(np.int32)
    return BlockRows(0, offsets, columns, blocks, nodes)


def _complete_diagonal(dense: Array, sizes: Array) -> None:
    """Raise the diagonals of blocks ``(groups, most, most, size, size)`` a little, and put 1 where a group has no more nodes."""
    xp = device_of(dense).xp
    for place in range(dense.shape[1]):
        for unknown in range(dense.shape[3]):
            entries = dense[:, place, place, unknown, unknown]
            entries[...] = xp.where(place < sizes, entries * (1.0 + _ADDED), 1.0)


def _inverted(dense: Array) -> Array:
    """Return the symmetric inverses of blocks ``(groups, most, most, size, size)``."""
    count, most, _, size, _ = dense.shape
    scalars = dense.swapaxes(2, 3).reshape(count, most * size, most * size)
    try:
        inverses = device_of(dense).xp.linalg.inv(scalars)
    except np.linalg.LinAlgError as error:
        raise InputError("the matrix is not positive definite: the block of some nodes of it is singular") from error
    symmetric = 0.5 * (inverses + inverses.swapaxes(1, 2))
    return symmetric.reshape(count, most, size, most, size).swapaxes(2, 3)
