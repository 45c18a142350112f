"""The coarse matrix ``P^T A P`` of a smoothed prolongator that is not stored."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.solvers.coarse.basis import Tentative
from penstock.solvers.coarse.block_products import BlockRows, block_product, smoothed_rows, transposed
from penstock.solvers.coarse.host_rows import visit_rows
from penstock.solvers.preconditioners import DiagonalBlocks
from penstock.spmv import Array, BsrMatrix, Device, Operator, VectorSpace
from penstock.spmv.vectors.recurrence import Recurrence, RecurrenceStep

__all__ = [
    "PRODUCT",
    "GalerkinWave",
    "coarse_matrix_by_probing",
    "coarse_matrix_on_host",
    "restrict_smoothed",
    "smoothing_steps",
    "with_unit_rows",
]

#: The step that is a product with A.
PRODUCT = RecurrenceStep(-1.0, 0.0, 0.0, scaled=False, driven=False)
_COLUMNS = 32


def smoothing_steps(degree: int, high: float) -> list[RecurrenceStep]:
    """Return the steps ``v <- v - w D A v`` whose product is ``p(D A)``, which smooths the prolongator.

    ``p(t) = prod (1 - t / (high x_j))`` with ``x_j = cos^2((2 j - 1) pi / (4 degree + 2))`` minimises the largest ``t p(t)^2``
    up to ``high`` (Vanek, Brezina and Tezaur 1999); of degree 1 it is the usual ``1 - 4/3 t / high``.
    """
    roots = [np.cos((2 * j - 1) * np.pi / (4 * degree + 2)) ** 2 for j in range(1, degree + 1)]
    return [RecurrenceStep(float(1 / (high * root)), 1.0, 0.0, driven=False) for root in roots]


def restrict_smoothed(
    product: Callable[[Array, Array, float], object],
    diagonal: DiagonalBlocks,
    T: Tentative,
    steps: Sequence[RecurrenceStep],
    r: Array,
    scratch: Array,
    out: Array,
) -> None:
    """Set ``out = P^T r``; r is overwritten. ``P^T r = T^T p(A D) r``: the smoothing steps with D and A exchanged.

    ``product(x, y, alpha)`` adds ``alpha A x`` to y.
    """
    for step in steps:
        diagonal.apply(r, scratch)
        product(scratch, r, -step.a)
    T.restrict(r, out)


def coarse_matrix_by_probing(A: Operator, diagonal: Array, T: Tentative, steps: list[RecurrenceStep]) -> BsrMatrix:
    """Return ``P^T A P`` for aggregates that are boxes, on the device of A, from products with blocks of vectors.

    Boxes couple with their neighbours only, so all boxes whose numbers along the axes are equal modulo 3 are probed together:
    in three dimensions 27 groups of as many vectors as there are modes, which go through ``2 len(steps) + 1`` products
    (Curtis, Powell and Reid 1974, on blocks).
    """
    grid, modes, count = T.aggregates.grid, T.modes, T.aggregates.count
    assert grid is not None
    xp, places = A.device.xp, np.stack(np.unravel_index(np.arange(count), grid), axis=1)
    groups = list(itertools.product(*(range(min(3, extent)) for extent in grid)))
    thirds = 3 * np.ones(len(grid), dtype=int)
    group_of = np.ravel_multi_index(tuple((places % 3).T), thirds)
    rows, columns, blocks = [], [], []
    together, each, work = max(1, _COLUMNS // modes), xp.arange(modes), list[Array]()
    for first in range(0, len(groups), together):
        probed = groups[first : first + together]
        unit = xp.zeros((count, modes, len(probed), modes))
        for position, group in enumerate(probed):
            members = xp.asarray(np.flatnonzero(group_of == np.ravel_multi_index(group, thirds)))
            unit[members[:, None], each, position, each] = 1.0
        images = _galerkin_images(A, diagonal, T, steps, unit.reshape(T.unknowns, -1), work)
        images = images.reshape(count, modes, len(probed), modes)
        for position, group in enumerate(probed):
            offsets = (np.array(group) - places) % 3
            neighbours = places + np.where(offsets == 2, -1, offsets)
            inside = ((neighbours >= 0) & (neighbours < grid)).all(axis=1)
            rows.append(np.flatnonzero(inside))
            columns.append(np.ravel_multi_index(tuple(neighbours[inside].T), grid))
            blocks.append(images[xp.asarray(rows[-1]), :, position])
    return _assembled(np.concatenate(rows), np.concatenate(columns), xp.concatenate(blocks), count, A.device)


def _galerkin_images(
    A: Operator, diagonal: Array, T: Tentative, steps: list[RecurrenceStep], unit: Array, work: list[Array]
) -> Array:
    """Return ``P^T A P`` times a block of coarse vectors: ``T^T A p(D A)^2 T``, in ``2 len(steps) + 1`` products."""
    xp, shape = A.device.xp, (A.shape[0], unit.shape[1])
    if not work or work[0].shape != shape:
        work[:] = [xp.zeros(shape) for _ in range(3)]
    v, other, image = work
    T.prolong(unit, v)
    recurrence = Recurrence([*steps, *steps, PRODUCT], v, other, v, diagonal, image, VectorSpace(A.device))
    coarse = xp.empty_like(unit)
    T.restrict(recurrence.run(A), coarse)
    return coarse


def _assembled(rows: Any, columns: Any, blocks: Array, count: int, device: Device) -> BsrMatrix:
    order = np.lexsort((columns, rows))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))])
    size = blocks.shape[1]
    shape, indices = (count * size, count * size), columns[order].astype(np.int32)
    values = blocks[device.xp.asarray(order)]
    return BsrMatrix(shape, np.dtype(np.float64), device.xp.asarray(offsets), device.xp.asarray(indices), values)


def with_unit_rows(A: BsrMatrix, missing: np.ndarray[Any, Any]) -> BsrMatrix:
    """Put 1 on the diagonal of rows that vanish, in place, so that the matrix is positive definite."""
    offsets, columns = (A.device.to_host(array) for array in (A.row_offsets, A.column_indices))
    diagonal = np.flatnonzero(np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)) == columns)
    block, unknown = np.divmod(np.flatnonzero(missing), A.values.shape[1])
    places = [A.device.xp.asarray(place) for place in (diagonal[block], unknown)]
    A.values[places[0], places[1], places[1]] = 1.0
    return A


class GalerkinWave:
    """``P^T A P``, formed while the rows of A pass: each stage follows the one before as far as its columns allow.

    Rows of P live from the stage that forms them to the last row that couples with them.

    Parameters
    ----------
    T : Tentative
    basis : array, (nodes, block_size, modes)
        The blocks of T on the host.
    diagonal : array, (nodes, block_size, block_size)
        D on the host.
    factors : sequence of float
        Of the smoothing steps ``P <- P - w D A P``.
    """

    def __init__(self, T: Tentative, basis: Any, diagonal: Any, factors: list[float]) -> None:
        self._T, self._diagonal, self._factors = T, diagonal, factors
        nodes = len(basis)
        first = BlockRows(0, np.arange(nodes + 1), T.aggregates.of_node, basis)
        self._nodes = nodes
        # The rows of P after each number of steps; the first is known for all nodes.
        self._levels: list[list[BlockRows]] = [[first], *([] for _ in factors)]
        self._waiting: list[list[BlockRows]] = [[] for _ in range(len(factors) + 1)]  # rows of A, before each stage
        self._last_column: dict[int, int] = {}  # of rows, by the first of them
        # Blocks of the coarse matrix by row and column, complete ones and those to which the last rows added.
        self._parts: list[tuple[Any, Any]] = []
        self._open: tuple[Any, Any] = np.empty(0, dtype=np.int64), np.empty((0, T.modes, T.modes))

    def add(self, rows: BlockRows) -> None:
        """Take the next rows of A."""
        self._waiting[0].append(rows)
        self._last_column[rows.start] = int(rows.columns.max(initial=-1))
        for stage in range(len(self._waiting)):
            while self._waiting[stage] and self._ready(stage, self._waiting[stage][0]):
                self._advance(stage, self._waiting[stage].pop(0))

    def _ready(self, stage: int, rows: BlockRows) -> bool:
        known = self._levels[stage][-1].stop if self._levels[stage] else 0
        return not rows.columns.size or int(rows.columns.max()) < known

    def _advance(self, stage: int, rows: BlockRows) -> None:
        level = self._levels[stage]
        lowest = int(rows.columns.min()) if rows.columns.size else rows.start
        needed = [part for part in level if part.stop > min(lowest, rows.start)]
        P = needed[0] if len(needed) == 1 else BlockRows.joined(needed)
        image = block_product(rows, P, self._T.aggregates.count)
        own = _part_of(P, rows.start, rows.stop)
        if stage < len(self._factors):
            diagonal = self._diagonal[rows.start : rows.stop]
            self._levels[stage + 1].append(smoothed_rows(image, own, diagonal, self._factors[stage]))
            self._waiting[stage + 1].append(rows)
        else:
            self._collect(own, image)
        if stage:  # the pattern is symmetric: later rows couple with a row only if its own columns reach them
            self._levels[stage] = [part for part in level if self._last_column[part.start] >= rows.stop]

    def _collect(self, own: BlockRows, image: BlockRows) -> None:
        """Add ``P^T A P`` of these rows.

        Blocks to which the rows before added go on from there: sums then do not depend on where the matrix is cut.
        """
        image.start, count = 0, self._T.aggregates.count
        open_keys, open_blocks = self._open
        keys = np.empty(0, dtype=np.int64)

        def prepare(part: BlockRows) -> None:
            nonlocal keys
            keys = np.repeat(np.arange(count), np.diff(part.offsets)) * count + part.columns
            order = np.argsort(keys)
            places = np.searchsorted(keys, open_keys, sorter=order)
            found = (
                np.flatnonzero(keys[order[np.minimum(places, len(keys) - 1)]] == open_keys) if len(keys) else places[:0]
            )
            part.blocks[order[places[found]]] = open_blocks[found]
            kept = np.ones(len(open_keys), dtype=bool)
            kept[found] = False
            self._parts.append((open_keys[kept], open_blocks[kept]))

        part = block_product(transposed(own, count), image, count, prepare)
        self._open = keys, part.blocks

    def finish(self) -> BsrMatrix:
        """Return the coarse matrix."""
        self._parts.append(self._open)
        keys, blocks = (np.concatenate([part[i] for part in self._parts]) for i in range(2))
        count, size = self._T.aggregates.count, self._T.modes
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        summed = np.add.reduceat(blocks[order], first, axis=0)
        rows, columns = np.divmod(keys[first], count)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))])
        return BsrMatrix((count * size, count * size), np.dtype(np.float64), offsets, columns.astype(np.int32), summed)


def _part_of(P: BlockRows, start: int, stop: int) -> BlockRows:
    first, last = P.offsets[start - P.start], P.offsets[stop - P.start]
    offsets = P.offsets[start - P.start : stop - P.start + 1] - first
    return BlockRows(start, offsets, P.columns[first:last], P.blocks[first:last])


def coarse_matrix_on_host(
    A: Operator, diagonal: Array, T: Tentative, steps: list[RecurrenceStep], size: int
) -> BsrMatrix:
    """Return ``P^T A P`` from the rows of A, in one pass, on the host."""
    wave = GalerkinWave(
        T, T.basis.reshape(-1, size, T.modes), A.device.to_host(diagonal).astype(np.float64), [step.a for step in steps]
    )
    visit_rows(A, size, wave.add)
    return wave.finish()
