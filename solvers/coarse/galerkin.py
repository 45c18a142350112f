"""The coarse matrix ``P^T A P`` of a smoothed prolongator that is not stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.solvers.coarse.matrix_rows import visit_rows
from penstock.solvers.coarse.tentative import Tentative
from penstock.solvers.products.block_products import block_product, smoothed_rows
from penstock.solvers.products.block_rows import BlockRows, row_numbers
from penstock.spmv import Array, BsrMatrix, Operator
from penstock.spmv.vectors.recurrence import RecurrenceStep

__all__ = ["PRODUCT", "GalerkinWave", "coarse_matrix", "smoothing_steps", "with_unit_rows"]

#: The step that is a product with A.
PRODUCT = RecurrenceStep(-1.0, 0.0, 0.0, scaled=False, driven=False)


def smoothing_steps(degree: int, high: float) -> list[RecurrenceStep]:
    """Return the steps ``v <- v - w D A v`` whose product is ``p(D A)``, which smooths the prolongator.

    ``p(t) = prod (1 - t / (high x_j))`` with ``x_j = cos^2((2 j - 1) pi / (4 degree + 2))`` minimises the largest ``t p(t)^2``
    up to ``high`` (Vanek, Brezina and Tezaur 1999); of degree 1 it is the usual ``1 - 4/3 t / high``.
    """
    roots = [np.cos((2 * j - 1) * np.pi / (4 * degree + 2)) ** 2 for j in range(1, degree + 1)]
    return [RecurrenceStep(float(1 / (high * root)), 1.0, 0.0, driven=False) for root in roots]


def coarse_matrix(A: Operator, diagonal: Array, T: Tentative, steps: Sequence[RecurrenceStep]) -> BsrMatrix:
    """Return ``P^T A P`` from the rows of A, in one pass, on the device of A.

    Parameters
    ----------
    A : Operator
        A matrix, resident or streamed.
    diagonal : array, (nodes, block_size, block_size)
        D.
    T : Tentative
    steps : sequence of RecurrenceStep
        From :func:`smoothing_steps`.
    """
    wave = GalerkinWave(T, diagonal.astype(np.float64, copy=False), [step.a for step in steps])
    visit_rows(A, T.block_size, wave.add)
    return wave.finish()


def with_unit_rows(A: BsrMatrix, missing: Array) -> BsrMatrix:
    """Put 1 on the diagonal of rows that vanish, in place, so that the matrix is positive definite."""
    xp, size = A.device.xp, A.values.shape[1]
    diagonal = xp.flatnonzero(row_numbers(A.row_offsets, A.column_indices.size) == A.column_indices)
    rows = xp.flatnonzero(missing)
    A.values[diagonal[rows // size], rows % size, rows % size] = 1.0
    return A


class GalerkinWave:
    """``P^T A P``, formed while the rows of A pass: each stage follows the one before as far as its columns allow.

    Rows of P live from the stage that forms them to the last row that couples with them.

    Parameters
    ----------
    T : Tentative
    diagonal : array, (nodes, block_size, block_size)
        D, on the device of T.
    factors : sequence of float
        Of the smoothing steps ``P <- P - w D A P``.
    """

    def __init__(self, T: Tentative, diagonal: Array, factors: Sequence[float]) -> None:
        self._T, self._count, self._modes, self._device = T, T.aggregates.count, T.modes, T.device
        self._diagonal, self._factors = diagonal, factors
        xp = T.device.xp
        # The rows of P after each number of steps; those of T, before all steps, are made when they are needed.
        self._levels: list[list[BlockRows]] = [[] for _ in range(len(factors) + 1)]
        self._waiting: list[list[BlockRows]] = [[] for _ in range(len(factors) + 1)]  # rows of A, before each stage
        self._known = [len(T.of_node)] + [0] * len(factors)  # rows up to this one have been formed
        self._last_column: dict[int, int] = {}  # of rows, by the first of them
        # Blocks of the coarse matrix by row and column, complete ones and those to which the last rows added.
        self._parts: list[tuple[Array, Array]] = []
        self._open: tuple[Array, Array] = xp.empty(0, dtype=np.int64), xp.empty((0, T.modes, T.modes))

    def add(self, rows: BlockRows) -> None:
        """Take the next rows of A."""
        self._waiting[0].append(rows)
        self._last_column[rows.start] = rows.reach[1]
        for stage in range(len(self._waiting)):
            while self._waiting[stage] and self._ready(stage, self._waiting[stage][0]):
                self._advance(stage, self._waiting[stage].pop(0))

    def _ready(self, stage: int, rows: BlockRows) -> bool:
        return max(rows.reach[1], rows.stop - 1) < self._known[stage]

    def _advance(self, stage: int, rows: BlockRows) -> None:
        level, start = self._levels[stage], min(rows.reach[0], rows.start)
        if stage == 0:
            P = self._T.rows(start, max(rows.reach[1] + 1, rows.stop))
        else:
            P = BlockRows.joined([part for part in level if part.stop > start], start)
        image = block_product(rows, P, self._count)
        own = P.part(rows.start, rows.stop)
        if stage < len(self._factors):
            diagonal = self._diagonal[rows.start : rows.stop]
            self._levels[stage + 1].append(smoothed_rows(image, own, diagonal, self._factors[stage]))
            self._known[stage + 1] = rows.stop
            self._waiting[stage + 1].append(rows)
        else:
            self._collect(own, image)
        # The pattern is symmetric: later rows couple with a row only if its own columns reach them. Entries without a mirror
        # image, which are zero to rounding, may still name rows that are gone; those count as empty.
        kept = [part for part in level if self._last_column[part.start] >= rows.stop]
        if (
            len(kept) > 1 and self._known[stage] == self._known[0]
        ):  # all rows are there: joined once, not for every slab
            kept = [BlockRows.joined(kept, kept[0].start)]
            self._last_column[kept[0].start] = self._known[0]
        self._levels[stage] = kept

    def _collect(self, own: BlockRows, image: BlockRows) -> None:
        """Add ``P^T A P`` of these rows.

        Blocks to which the rows before added go on from there: sums then do not depend on where the matrix is cut.
        """
        image.start, count, xp = 0, self._count, self._device.xp
        open_keys, open_blocks = self._open
        keys = open_keys[:0]

        def prepare(part: BlockRows) -> None:
            nonlocal keys
            keys = row_numbers(part.offsets, part.columns.size) * np.int64(count) + part.columns
            if not (keys.size and open_keys.size):
                self._parts.append((open_keys, open_blocks))
                return
            order = xp.argsort(keys)
            places = order[xp.minimum(xp.searchsorted(keys[order], open_keys), keys.size - 1)]
            found = keys[places] == open_keys
            part.blocks[places[found]] = open_blocks[found]
            self._parts.append((open_keys[~found], open_blocks[~found]))

        part = block_product(own.transposed(count), image, count, prepare)
        self._open = keys, part.blocks

    def finish(self) -> BsrMatrix:
        """Return the coarse matrix."""
        xp, count, size = self._device.xp, self._count, self._modes
        keys, blocks = (xp.concatenate([part[i] for part in [*self._parts, self._open]]) for i in range(2))
        order = xp.argsort(keys, kind="stable")
        keys = keys[order]
        first = xp.flatnonzero(xp.concatenate([xp.ones(1, dtype=bool), keys[1:] != keys[:-1]]))
        summed, following = blocks[order[first]], xp.concatenate([first[1:], xp.full(1, keys.size)])
        further = first + 1
        # A block that was left and met again, as aggregates in a shuffled matrix are, has several parts.
        while (several := xp.flatnonzero(further < following)).size:
            summed[several] += blocks[order[further[several]]]
            further += 1
        rows, columns = keys[first] // count, keys[first] % count
        offsets = xp.searchsorted(rows, xp.arange(count + 1)).astype(np.int64)
        return BsrMatrix((count * size, count * size), np.dtype(np.float64), offsets, columns.astype(np.int32), summed)
