"""The coarse matrix ``P^T A P`` of a smoothed prolongator that is not stored."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from penstock.solvers.amg.matrix_rows import Boundary, visit_rows
from penstock.solvers.amg.tentative import Tentative
from penstock.spmv import Array, BsrMatrix, InputError, Operator, SparseMatrix, device_of
from penstock.spmv.beside import SideStream
from penstock.spmv.communicator import ALONE, Communicator
from penstock.spmv.products.block_products import pattern_of_product, product_of_pattern
from penstock.spmv.products.block_rows import BlockRows, both_halves, row_numbers
from penstock.spmv.vectors.recurrence import RecurrenceStep

#: The step that is a product with A.
PRODUCT = RecurrenceStep(-1.0, 0.0, 0.0, scaled=False, driven=False)


def smoothing_steps(degree: int, high: float) -> list[RecurrenceStep]:
    """Return the steps ``v <- v - w D A v`` whose product is ``p(D A)``, which smooths the prolongator.

    ``p(t) = prod (1 - t / (high x_j))`` with ``x_j = cos^2((2 j - 1) pi / (4 degree + 2))`` minimises the largest ``t p(t)^2``
    up to ``high`` (Vanek, Brezina and Tezaur 1999); of degree 1 it is the usual ``1 - 4/3 t / high``.
    """
    roots = [np.cos((2 * j - 1) * np.pi / (4 * degree + 2)) ** 2 for j in range(1, degree + 1)]
    return [RecurrenceStep(float(1 / (high * root)), 1.0, 0.0, driven=False) for root in roots]


#: Arrays of a pattern.
Pattern = TypeVar("Pattern", bound=tuple[Array, ...])


class Smooths(Protocol):
    """D, which turns rows of ``A P`` into rows of a smoother prolongator."""

    def smoothed(self, image: BlockRows, own: BlockRows, factor: float, width: int) -> BlockRows:
        """Return the rows of ``P - factor D A P``, of ``width`` columns of blocks, from those of ``A P`` and of P."""


class HasNodeRows(Protocol):
    """A matrix in memory that shows the rows of nodes."""

    def node_rows(self, size: int, start: int, stop: int) -> BlockRows:
        """Return the rows of some nodes of ``size`` unknowns."""


def coarse_matrix(
    A: Operator, D: Smooths, T: Tentative, steps: Sequence[RecurrenceStep], of: HasNodeRows | None = None
) -> BsrMatrix:
    """Return ``P^T A P`` from the rows of A, in one pass, on the device of A. Collective; all ranks get the whole of it.

    With ``of``, a matrix M that couples no unknowns that A does not couple, it is ``P^T M P``; not on ranks.
    """
    wave = GalerkinWave(T, D, [step.a for step in steps], of, aside=isinstance(A, SparseMatrix))
    boundary, bounds = Boundary.of(A, T.block_size), getattr(D, "row_bounds", None)
    if boundary is None:
        visit_rows(A, T.block_size, wave.add, bounds)
        return wave.finish()
    together = boundary.communicator.together
    border = boundary.exchange(T.rows)
    with together():  # what fails on one rank, for want of memory or of a disk, ends all
        wave.add_border(0, border)
        visit_rows(A, T.block_size, lambda rows: wave.add(boundary.widened(rows), rows.reach), bounds)
    for stage in range(1, len(steps) + 1):
        border = boundary.exchange(partial(wave.formed, stage))
        with together():
            wave.add_border(stage, border)
    return wave.finish(boundary.communicator)


class _Slab(NamedTuple):
    """Rows ``start`` to ``end`` of A, which couple with nodes ``first`` to ``stop`` of this rank."""

    start: int
    end: int
    first: int
    stop: int


class GalerkinWave:
    """``P^T A P``, formed while the rows of A pass: each stage follows the one before as far as its columns allow.

    Rows of P live from the stage that forms them to the last row that couples with them. Where ranks share the rows of A, those
    that couple with nodes of other ranks wait until the rows of P of these are there; the others go on. The factors are those
    of the smoothing steps ``P <- P - w D A P``. The last product is with ``of`` in place of A, if that is given.

    ``aside``: where all rows of A come at once, on a GPU, the pattern of a product is found on a second stream while the values
    of the product before it are still being computed.
    """

    def __init__(
        self, T: Tentative, D: Smooths, factors: Sequence[float], of: HasNodeRows | None = None, *, aside: bool = False
    ) -> None:
        self._of = of
        self._T, self._count, self._modes, self._device = T, T.aggregates.count, T.modes, T.device
        self._D, self._factors, self._nodes = D, factors, len(T.of_node)
        stages = range(len(factors) + 1)
        self._slabs: list[_Slab] = []  # that have arrived, in ascending order
        self._waiting: list[list[tuple[_Slab, BlockRows]]] = [[] for _ in stages]  # before each stage
        self._passed: list[set[int]] = [set() for _ in stages]  # the first rows of slabs that have passed each stage
        # The rows of P after each number of steps, by the first of them; those of T, before all steps, are made when needed.
        self._levels: list[dict[int, BlockRows]] = [{} for _ in stages]
        # Those of nodes of other ranks, which are numbered behind the nodes of this rank.
        self._borders: list[BlockRows | None] = [None for _ in stages]
        self._joined: tuple[tuple[int, ...], BlockRows] | None = None
        # The upper half of the coarse matrix: complete blocks by row and column, and those to which the last rows added.
        self._parts: list[tuple[Array, Array]] = []
        self._open: BlockRows | None = None
        # Patterns that were found on the side stream: its memory must not be used again before all has been formed.
        self._aside = aside and T.device.kind == "cuda"
        self._side: SideStream | None = None
        self._kept: list[Any] = []
        self._known: set[int] = set()  # ids of arrays that the side stream need not wait for

    def add(self, rows: BlockRows, reach: tuple[int, int] | None = None) -> None:
        """Take the next rows of A; ``reach``: their smallest and largest column on this rank, where columns may lie elsewhere."""
        first, last = rows.reach if reach is None else reach
        slab = _Slab(rows.start, rows.stop, min(first, rows.start), max(last + 1, rows.stop))
        self._slabs.append(slab)
        if self._aside and (slab.start, slab.end) == (0, self._nodes):
            self._side = SideStream(self._device)
        self._waiting[0].append((slab, rows))
        self._go_on()

    def add_border(self, stage: int, P: BlockRows) -> None:
        """Take the rows of P of other ranks' nodes after some steps."""
        self._borders[stage] = P
        self._go_on()

    def formed(self, stage: int, start: int, stop: int) -> BlockRows:
        """Return some rows of P after some steps; rows that are not held any more are empty."""
        level, nothing = self._levels[stage], self._T.rows(0, 0)
        parts = [level[first] for first in sorted(level) if first < stop and level[first].stop > start]
        end = BlockRows(max([stop, *(part.stop for part in parts)]), nothing.offsets, nothing.columns, nothing.blocks)
        return BlockRows.joined([*parts, end], start)

    def _go_on(self) -> None:
        for stage, waiting in enumerate(self._waiting):
            self._waiting[stage] = []
            for slab, rows in waiting:
                if self._is_ready(stage, slab, rows):
                    self._advance(stage, slab, rows)
                else:
                    self._waiting[stage].append((slab, rows))

    def _is_ready(self, stage: int, slab: _Slab, rows: BlockRows) -> bool:
        """Return whether all rows of P are there that a stage multiplies."""
        if rows.reach[1] >= self._nodes and self._borders[stage] is None:
            return False
        return stage == 0 or self._all_passed(stage - 1, slab)

    def _coupled(self, slab: _Slab) -> list[_Slab]:
        """Return the slabs that have arrived and couple with a slab."""
        first = bisect_right(self._slabs, slab.first, key=lambda other: other.end)
        return self._slabs[first : bisect_left(self._slabs, slab.stop, key=lambda other: other.start)]

    def _all_passed(self, stage: int, slab: _Slab) -> bool:
        """Return whether all slabs that couple with a slab have passed a stage."""
        arrived = self._slabs[-1].end >= slab.stop
        return arrived and all(other.start in self._passed[stage] for other in self._coupled(slab))

    def _advance(self, stage: int, slab: _Slab, rows: BlockRows) -> None:
        P = self._rows_of_prolongator(stage, slab, rows)
        if self._of is not None and stage == len(self._factors):
            rows = self._of.node_rows(self._T.block_size, slab.start, slab.end)
            if rows.columns.size and not (slab.first <= rows.reach[0] and rows.reach[1] < slab.stop):
                raise InputError(
                    "M couples unknowns far from each other that K does not couple; a pass over K needs both patterns alike"
                )
        image = self._product(rows, P)
        own = P.part(rows.start, rows.stop)
        self._passed[stage].add(slab.start)
        if stage < len(self._factors):
            smoothed = self._D.smoothed(image, own, self._factors[stage], self._count)
            self._levels[stage + 1][slab.start] = smoothed
            self._waiting[stage + 1].append((slab, rows))
        else:
            self._collect(own, image)
        # The pattern is symmetric: other rows need those of P only if they couple with a row there. Entries without a mirror
        # image, which are zero to rounding, may still name rows that are gone; those count as empty.
        for other in self._coupled(slab):
            if other.start in self._levels[stage] and self._all_passed(stage, other):
                del self._levels[stage][other.start]

    def _rows_of_prolongator(self, stage: int, slab: _Slab, rows: BlockRows) -> BlockRows:
        """Return the rows of P after some steps that rows of A multiply."""
        level, border = self._levels[stage], self._borders[stage]
        if stage == 0:
            parts = [self._T.rows(slab.first, slab.stop)]
        else:
            starts = [other.start for other in self._coupled(slab) if other.start in level]
            parts = [level[start] for start in starts]
        if border is not None and rows.reach[1] >= self._nodes:
            parts.append(border)
        if stage == 0 or self._slabs[-1].end < self._nodes:
            return BlockRows.joined(parts, slab.first)
        # All rows are there; where all couple with all, as in a shuffled matrix, they are joined once and not for every slab.
        key = (stage, *(part.start for part in parts))
        if self._joined is None or self._joined[0] != key:
            self._joined = None
            self._joined = key, BlockRows.joined(parts, slab.first)
        return self._joined[1]

    def _product(
        self, A: BlockRows, B: BlockRows, prepare: Callable[[BlockRows], None] | None = None, *, upper: bool = False
    ) -> BlockRows:
        """Return the product of rows."""
        pattern = self._found((A, B), lambda: pattern_of_product(A, B, self._count, upper=upper))
        return product_of_pattern(A, B, self._count, pattern, prepare)

    def _transposed(self, rows: BlockRows) -> BlockRows:
        if self._side is None:
            return rows.transposed(self._count)
        return rows.transposed(self._count, self._found((rows,), lambda: rows.transposed_pattern(self._count)))

    def _found(self, factors: Sequence[BlockRows], find: Callable[[], Pattern]) -> Pattern:
        """Return a pattern that is made of those of factors, found on the side stream if there is one."""
        if self._side is None:
            return find()
        read = [array for factor in factors for array in (factor.offsets, factor.columns)]
        if not self._known.issuperset(map(id, read)):
            self._side.follow()
        try:
            with self._side:
                pattern = find()
        finally:
            self._side.lead()
        self._kept += [*read, pattern]  # also so that the ids stay theirs
        self._known.update(map(id, [*read, *pattern]))
        return pattern

    def _collect(self, own: BlockRows, image: BlockRows) -> None:
        """Add the upper half of ``P^T A P`` of these rows.

        Blocks to which the rows before added go on from there: sums then do not depend on where the matrix is cut.
        """
        image.start, count, xp, before = 0, self._count, self._device.xp, self._open

        def go_on(part: BlockRows) -> None:
            assert before is not None
            open_keys, keys = _keys(before, count), _keys(part, count)
            if not (keys.size and open_keys.size):
                self._parts.append((open_keys, before.blocks))
                return
            order = xp.argsort(keys)
            places = order[xp.minimum(xp.searchsorted(keys[order], open_keys), keys.size - 1)]
            present = keys[places] == open_keys
            part.blocks[places[present]] = before.blocks[present]
            self._parts.append((open_keys[~present], before.blocks[~present]))

        self._open = self._product(self._transposed(own), image, None if before is None else go_on, upper=True)

    def finish(self, communicator: Communicator = ALONE) -> BsrMatrix:
        """Return the coarse matrix, the sum of those of all ranks, whose lower half mirrors the upper one. Collective."""
        assert not any(self._waiting), "all rows have passed all stages"
        count, size = self._count, self._modes
        rows = both_halves(self._upper_half(communicator))
        self._kept.clear()
        return BsrMatrix((count * size, count * size), np.dtype(np.float64), rows.offsets, rows.columns, rows.blocks)

    def _upper_half(self, communicator: Communicator) -> BlockRows:
        """Return the sum of the upper halves of all ranks."""
        upper, self._open = self._open, None
        if upper is not None and not self._parts and communicator.size == 1:
            return upper
        device, xp, count = self._device, self._device.xp, self._count
        parts, self._parts = self._parts, []
        if upper is not None:
            parts.append((_keys(upper, count), upper.blocks))
        keys, blocks = (
            _summed(parts) if parts else (xp.empty(0, dtype=np.int64), xp.empty((0, self._modes, self._modes)))
        )
        if communicator.size > 1:
            # In the order of the ranks, so that all of them form the same sums.
            of_ranks = communicator.of_all(tuple(map(device.to_host, (keys, blocks))))
            keys, blocks = _summed([tuple(map(device.asarray, part)) for part in of_ranks])
        offsets = xp.searchsorted(keys // max(1, count), xp.arange(count + 1)).astype(np.int64)
        return BlockRows(0, offsets, (keys % max(1, count)).astype(np.int32), blocks, count)


def _keys(part: BlockRows, count: int) -> Array:
    """Return a number for the row and the column of every block of a matrix of ``count`` block columns."""
    return row_numbers(part.offsets, part.columns.size) * np.int64(count) + part.columns


def _summed(parts: Sequence[tuple[Array, ...]]) -> tuple[Array, Array]:
    """Return blocks by ascending keys; those of equal keys are added up, in the order of the parts."""
    xp = device_of(parts[0][1]).xp
    keys, blocks = (xp.concatenate([part[i] for part in parts]) for i in range(2))
    if not keys.size:
        return keys, blocks
    order = xp.argsort(keys, kind="stable")
    keys = keys[order]
    first = xp.flatnonzero(xp.concatenate([xp.ones(1, dtype=bool), keys[1:] != keys[:-1]]))
    summed, following = blocks[order[first]], xp.concatenate([first[1:], xp.full(1, keys.size)])
    further = first + 1
    # A block that was left and met again, as aggregates in a shuffled matrix are, has several parts.
    while (several := xp.flatnonzero(further < following)).size:
        summed[several] += blocks[order[further[several]]]
        further += 1
    return keys[first], summed
