"""Solves with the rows of a triangle on a CPU: one after another, or the rows of wide levels in parallel."""

from __future__ import annotations

import numpy as np
from numba import prange

from penstock.solvers.triangular.ordered_rows import OrderedRows
from penstock.spmv import Array
from penstock.spmv.compilation.jit import inlined, parallel_kernel, serial_kernel

# Waking all threads costs as much as this many multiplications.
_WORTH_WAKING = 20_000


class HostSchedule:
    """Rows in their order; where levels are known and wide, all threads share the rows of a level."""

    capturable = False

    def __init__(self, rows: OrderedRows) -> None:
        self._rows = rows
        self._work = np.empty((2, 0, 1))
        self._natural = np.arange(rows.count, dtype=np.int32) if rows.rows is None else rows.rows
        self._levels = np.array([0, rows.count]) if rows.levels is None else rows.levels
        work = np.diff(self._levels) * (rows.mean_entries + 1) * rows.size**2
        self._wide = (work > _WORTH_WAKING) & (rows.levels is not None)

    def solve(self, b: Array, out: Array, alpha: float, beta: float, gamma: float, scaled: bool) -> None:
        """Solve for a vector or a block of vectors."""
        rows, b, out = self._rows, _as_block(b), _as_block(out)
        if self._work.shape[1:] != b.shape:
            self._work = np.empty((2, *b.shape))
        first, level = 0, 0
        while level < len(self._wide):
            # Narrow levels that follow each other need no pause: their rows are in order.
            parallel = bool(self._wide[level])
            level += 1
            while not parallel and level < len(self._wide) and not self._wide[level]:
                level += 1
            stop = int(self._levels[level])
            arguments = (rows.offsets, rows.places, rows.blocks, rows.inverse, self._natural, b, out, *self._work)
            (_solve_level if parallel else _solve_rows)(first, stop, *arguments, alpha, beta, gamma, scaled)
            first = stop


def _as_block(vectors: Array) -> Array:
    return vectors if vectors.ndim == 2 else vectors[:, None]


@inlined
def _solve_place(
    place: int,
    offsets: Array,
    places: Array,
    blocks: Array,
    inverse: Array,
    rows: Array,
    b: Array,
    out: Array,
    y: Array,
    sums: Array,
    alpha: float,
    beta: float,
    gamma: float,
    scaled: bool,
) -> None:
    size, columns = blocks.shape[1], b.shape[1]
    to, base = np.int64(place) * size, np.int64(rows[place]) * size
    for i in range(size):
        for k in range(columns):
            sums[to + i, k] = 0.0 if scaled else np.float64(b[base + i, k])
    for entry in range(offsets[place], offsets[place + 1]):
        source = np.int64(places[entry]) * size
        for i in range(size):
            for j in range(size):
                factor = np.float64(blocks[entry, i, j])
                for k in range(columns):
                    sums[to + i, k] -= factor * y[source + j, k]
    for i in range(size):
        for k in range(columns):
            total = gamma * np.float64(b[base + i, k]) if scaled else 0.0
            for j in range(size):
                total += inverse[place, i, j] * sums[to + j, k]
            y[to + i, k] = total
            out[base + i, k] = alpha * total if beta == 0.0 else alpha * total + beta * out[base + i, k]


@serial_kernel
def _solve_rows(
    first: int,
    stop: int,
    offsets: Array,
    places: Array,
    blocks: Array,
    inverse: Array,
    rows: Array,
    b: Array,
    out: Array,
    y: Array,
    sums: Array,
    alpha: float,
    beta: float,
    gamma: float,
    scaled: bool,
) -> None:
    for place in range(first, stop):
        _solve_place(place, offsets, places, blocks, inverse, rows, b, out, y, sums, alpha, beta, gamma, scaled)


@parallel_kernel
def _solve_level(
    first: int,
    stop: int,
    offsets: Array,
    places: Array,
    blocks: Array,
    inverse: Array,
    rows: Array,
    b: Array,
    out: Array,
    y: Array,
    sums: Array,
    alpha: float,
    beta: float,
    gamma: float,
    scaled: bool,
) -> None:
    for place in prange(first, stop):
        _solve_place(place, offsets, places, blocks, inverse, rows, b, out, y, sums, alpha, beta, gamma, scaled)
