"""Solves with a triangle level by level."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.solvers.triangular.levels import TRIANGLE_KERNELS
from penstock.solvers.triangular.ordered_rows import OrderedRows, columns_of
from penstock.spmv import Array, InputError, VectorSpace, device_of
from penstock.spmv.compilation.cuda_graph import Replay
from penstock.spmv.compilation.cuda_module import launch, type_names

#: Lanes that may share a row.
LEVEL_LANES = (1, 4, 16)
# Consecutive levels of at most this many lanes each are the work of one thread block.
_NARROW = 1024
# More launches than this are worth a graph and two copies of vectors.
_LAUNCHES_WITHOUT_GRAPH = 8


class LevelLaunches:
    """The launches of the levels of rows: one for every wide level, and one for narrow levels that follow each other.

    ``descending`` solves the last level first: the rows need those of later levels.
    """

    def __init__(self, rows: OrderedRows, *, descending: bool = False) -> None:
        if rows.levels is None:
            raise InputError("a schedule by levels needs rows in the order of their levels")
        self.rows, self.descending = rows, descending
        self._levels = device_of(rows.blocks).asarray(rows.levels, dtype=np.int32)
        self._steps: dict[int, list[tuple[int, int]]] = {}

    def steps(self, columns: int) -> list[tuple[int, int]]:
        """Return the first levels, and those after the last ones, of the launches."""
        if columns not in self._steps:
            widths = np.diff(self.rows.levels) * columns
            narrow = widths <= _NARROW // self._lanes(columns)
            breaks = np.flatnonzero(~narrow | ~np.append(narrow[1:], False)) + 1
            steps = list(zip([0, *breaks[:-1].tolist()], breaks.tolist(), strict=True)) if widths.size else []
            self._steps[columns] = steps[::-1] if self.descending else steps
        return self._steps[columns]

    def _lanes(self, columns: int) -> int:
        mean = self.rows.mean_entries
        return 1 if columns > 1 or mean <= 6 else 4 if mean <= 16 else 16

    def launch(
        self, b: Array | None, out: Array | None, y: Array, factors: tuple[float, float, float], scaled: bool
    ) -> None:
        """Solve as :class:`Schedule` says, for ``factors`` alpha, beta and gamma, into y, float64, in the order of the places.

        If b is None, y holds the right-hand side and is overwritten; if out is None, only y is written.
        """
        rows, vector = self.rows, b if b is not None else out
        assert vector is not None, "a right-hand side or a result has the type of the vectors"
        columns = columns_of(vector)
        lanes = self._lanes(columns)
        types = f"{type_names(rows.blocks, vector)}, {rows.size}, {lanes}"
        arguments: tuple[Any, ...] = (rows.offsets, rows.places, rows.blocks, rows.inverse, rows.rows, b, out)
        arguments += (*map(np.float64, factors), np.int32(scaled), y)
        for first, stop in self.steps(columns):
            start, end = int(rows.levels[first]) * columns, int(rows.levels[stop]) * columns
            if stop - first == 1:
                span = (np.int64(start), np.int64(end), np.int32(columns))
                function = TRIANGLE_KERNELS.function(f"substitute_level<{types}>")
                launch(function, (end - start) * lanes, 256, (*span, *arguments))
            else:
                levels = (np.int32(first), np.int32(stop), self._levels, np.int32(self.descending), np.int32(columns))
                function = TRIANGLE_KERNELS.function(f"substitute_narrow_levels<{types}>")
                function((1,), (512,), (*levels, *arguments))


class LevelSchedule:
    """A launch for every level, narrow ones fused; many launches become a CUDA graph, on vectors of its own."""

    def __init__(self, rows: OrderedRows) -> None:
        self._launches = LevelLaunches(rows)
        self._y = device_of(rows.blocks).xp.empty(0)
        self._graphs: dict[Any, tuple[Array, Array, Replay]] = {}

    @property
    def capturable(self) -> bool:
        """Whether the launches for a vector are few enough to need no graph of their own."""
        return len(self._launches.steps(1)) <= _LAUNCHES_WITHOUT_GRAPH

    def solve(self, b: Array, out: Array, alpha: float, beta: float, gamma: float, scaled: bool) -> None:
        """Solve by launches, or replay them."""
        if self._y.size < b.size:
            self._y, self._graphs = device_of(b).xp.empty(b.size), {}
        if self.capturable:
            self._launches.launch(b, out, self._y, (alpha, beta, gamma), scaled)
            return
        key = (b.shape, gamma, scaled)
        if key not in self._graphs:
            right, solved = device_of(b).xp.empty_like(b), device_of(b).xp.empty_like(b)
            replay = Replay(
                lambda: self._launches.launch(right, solved, self._y, (1.0, 0.0, gamma), scaled),
                capturable=device_of(b).kind == "cuda",
            )
            self._graphs = {key: (right, solved, replay)}  # those of one shape
        right, solved, replay = self._graphs[key]
        right[...] = b
        replay()
        VectorSpace(device_of(b)).write(alpha, solved, beta, out)
