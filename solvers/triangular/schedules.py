"""How the rows of a triangle are spread over time and over the lanes of a device."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import numpy as np

from penstock.solvers.triangular.levels import POLLS, dataflow_blocks
from penstock.solvers.triangular.ordered_rows import OrderedRows
from penstock.spmv import Array, InputError, VectorSpace, device_of
from penstock.spmv.compilation.cuda_graph import Replay
from penstock.spmv.compilation.cuda_module import cuda_function, launch, type_names
from penstock.spmv.registry import Registry

__all__ = ["LEVEL_LANES", "SCHEDULES", "Schedule", "dataflow_shapes"]

#: Lanes that may share a row in a schedule by levels.
LEVEL_LANES = (1, 4, 16)
# A level of at most so many short rows leaves lanes idle unless several share a row.
_NARROW_LEVEL = 8192
# Blocks of 256 threads a multiprocessor: rows of far levels only poll, rows in natural order may be ready.
_BLOCKS_BY_LEVEL, _BLOCKS_NATURAL = 2, 4

#: All schedules by name.
SCHEDULES: Registry[str, type[Schedule]] = Registry("schedule of triangular solves")


class Schedule(Protocol):
    """Solves with the rows of a triangle, in some schedule."""

    def __init__(self, rows: OrderedRows) -> None: ...

    @property
    def capturable(self) -> bool:
        """Whether solving only launches kernels, so that a CUDA graph can capture it."""

    def solve(self, b: Array, out: Array, alpha: float, beta: float, gamma: float, scaled: bool) -> None:
        """Set ``out = alpha y + beta out`` for the ``y = W (b - S y)`` of the rows, or the ``y = gamma b - W S y`` if ``scaled``.

        S is the strict triangle and W what ``rows.inverse`` holds. b and out are vectors or blocks of vectors.
        """


def dataflow_shapes(size: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of lanes a row and entries in flight a lane for which dataflows are compiled, for blocks of a size."""
    return ((1, 3), (4, 1), (16, 1), (32, 4)) if size == 1 else ((1, 1), (4, 1), (16, 1))


def _columns(b: Array) -> int:
    return 1 if b.ndim == 1 else int(b.shape[1])


class DataflowSchedule:
    """One launch for all rows: lanes claim rows in order, and take the values that they need as soon as these are there.

    Moves the bytes of the rows, reads b and writes out, and writes and reads one work vector of float64 twice.
    """

    capturable = True

    def __init__(self, rows: OrderedRows) -> None:
        self._rows = rows
        xp = device_of(rows.blocks).xp
        self._ticket, self._failed = xp.zeros(1, dtype=np.int32), xp.zeros(1, dtype=np.int32)
        self._y = xp.empty(0)

    def shape(self, columns: int) -> tuple[int, int]:
        """Return the lanes that share a row, and the entries that a lane holds at once; measured on an H200."""
        rows, mean = self._rows, self._rows.mean_entries
        narrow = rows.levels is not None and rows.count <= _NARROW_LEVEL * (len(rows.levels) - 1)
        if columns > 1:
            number = 0
        elif rows.size > 1:
            number = 1 if mean <= 16 else 2
        elif mean <= 6:
            number = 1 if narrow and mean <= 4 else 0
        else:
            number = 2 if mean <= 12 else 3
        return dataflow_shapes(rows.size)[number]

    def solve(self, b: Array, out: Array, alpha: float, beta: float, gamma: float, scaled: bool) -> None:
        """Solve; if lanes give up waiting, what they do not reach becomes NaN."""
        rows, columns = self._rows, _columns(b)
        count, (lanes, in_flight) = rows.count * columns, self.shape(columns)
        if not count:
            return
        if self._y.size < count * rows.size:
            self._y = device_of(b).xp.empty(count * rows.size)
        words = (np.int64(count * rows.size), self._y, self._ticket)
        launch(cuda_function("triangular.cu", "forget<double>"), count * rows.size, 256, words)
        name = f"substitute<{type_names(rows.blocks, b)}, {rows.size}, {lanes}, {in_flight}>"
        arguments: tuple[Any, ...] = (
            np.int64(count),
            np.int32(columns),
            rows.offsets,
            rows.places,
            rows.blocks,
            rows.inverse,
            rows.rows,
        )
        arguments += (b, out, np.float64(alpha), np.float64(beta), np.float64(gamma), np.int32(scaled))
        arguments += (self._y, self._ticket, self._failed, np.int32(POLLS))
        most = _BLOCKS_NATURAL if rows.levels is None else _BLOCKS_BY_LEVEL
        cuda_function("triangular.cu", name)((dataflow_blocks(rows.blocks, count * lanes, most),), (256,), arguments)


class LevelSchedule:
    """A launch for every wide level, and one for narrow levels that follow each other; many launches become a CUDA graph."""

    _narrow: ClassVar[int] = 1024
    _launches_without_graph: ClassVar[int] = 8

    def __init__(self, rows: OrderedRows) -> None:
        if rows.levels is None:
            raise InputError("a schedule by levels needs rows in the order of their levels")
        self._rows = rows
        self._y = device_of(rows.blocks).xp.empty(0)
        self._levels = device_of(rows.blocks).asarray(rows.levels, dtype=np.int32)
        self._graphs: dict[Any, tuple[Array, Array, Replay]] = {}

    @property
    def capturable(self) -> bool:
        """Whether the launches are few enough to need no graph of their own."""
        return len(self.steps(1)) <= self._launches_without_graph

    def steps(self, columns: int) -> list[tuple[int, int]]:
        """Return first and last levels of the launches."""
        lanes, widths = self._lanes(columns), np.diff(self._rows.levels) * columns
        narrow = widths <= self._narrow // lanes
        breaks = np.flatnonzero(~narrow | ~np.append(narrow[1:], False)) + 1
        return list(zip([0, *breaks[:-1].tolist()], breaks.tolist(), strict=True)) if widths.size else []

    def _lanes(self, columns: int) -> int:
        mean = self._rows.mean_entries
        return 1 if columns > 1 or mean <= 6 else 4 if mean <= 16 else 16

    def solve(self, b: Array, out: Array, alpha: float, beta: float, gamma: float, scaled: bool) -> None:
        """Solve by launches, or replay them on vectors of their own."""
        columns = _columns(b)
        if self._y.size < b.size:
            self._y, self._graphs = device_of(b).xp.empty(b.size), {}
        steps = self.steps(columns)
        if len(steps) <= self._launches_without_graph:
            self._launch(steps, b, out, (alpha, beta, gamma), scaled)
            return
        key = (b.shape, gamma, scaled)
        if key not in self._graphs:
            given, solved = device_of(b).xp.empty_like(b), device_of(b).xp.empty_like(b)
            replay = Replay(
                lambda: self._launch(steps, given, solved, (1.0, 0.0, gamma), scaled),
                capturable=device_of(b).kind == "cuda",
            )
            self._graphs = {key: (given, solved, replay)}  # those of one shape
        given, solved, replay = self._graphs[key]
        given[...] = b
        replay()
        if beta == 0:
            out[...] = solved if alpha == 1 else alpha * solved
        else:
            VectorSpace(device_of(b)).combine(alpha, solved.reshape(-1), beta, out.reshape(-1))

    def _launch(self, steps: Any, b: Array, out: Array, factors: tuple[float, float, float], scaled: bool) -> None:
        rows, columns = self._rows, _columns(b)
        lanes = self._lanes(columns)
        types = f"{type_names(rows.blocks, b)}, {rows.size}, {lanes}"
        given: tuple[Any, ...] = (rows.offsets, rows.places, rows.blocks, rows.inverse, rows.rows, b, out)
        given += (*map(np.float64, factors), np.int32(scaled), self._y)
        for first, stop in steps:
            start, end = int(rows.levels[first]) * columns, int(rows.levels[stop]) * columns
            if stop - first == 1:
                name, span = f"substitute_level<{types}>", (np.int64(start), np.int64(end), np.int32(columns))
                launch(cuda_function("triangular.cu", name), (end - start) * lanes, 256, (*span, *given))
            else:
                levels = (np.int32(first), np.int32(stop), self._levels, np.int32(columns))
                function = cuda_function("triangular.cu", f"substitute_narrow_levels<{types}>")
                function((1,), (512,), (*levels, *given))


class ColumnSchedule:
    """One launch in which finished rows push their shares to the rows that need them (Liu and others 2016).

    For comparison: it stores the triangle by columns, its sums depend on timing in their last digits, and it is slower.
    """

    capturable = True

    def __init__(self, rows: OrderedRows) -> None:
        if rows.size > 1:
            raise InputError("the schedule by columns takes single entries, not blocks; use 'dataflow' or 'levels'")
        self._rows = rows
        xp = device_of(rows.blocks).xp
        self._waits = rows.offsets[1:] - rows.offsets[:-1]
        owners = xp.searchsorted(rows.offsets, xp.arange(rows.places.size), side="right") - 1
        by_column = xp.argsort(rows.places, kind="stable")
        self._offsets = xp.searchsorted(rows.places[by_column], xp.arange(rows.count + 1)).astype(np.int32)
        self._places, self._values = owners[by_column].astype(np.int32), xp.ascontiguousarray(rows.blocks[by_column])
        self._sums, self._left = xp.empty(rows.count), xp.empty_like(self._waits)
        self._ticket, self._failed = xp.zeros(1, dtype=np.int32), xp.zeros(1, dtype=np.int32)

    def solve(self, b: Array, out: Array, alpha: float, beta: float, gamma: float, scaled: bool) -> None:
        """Solve for one vector."""
        if _columns(b) > 1 or scaled:
            raise InputError("the schedule by columns solves for one vector at a time; use 'dataflow' or 'levels'")
        rows = self._rows
        self._sums.fill(0)
        self._left[...] = self._waits
        self._ticket.fill(0)
        function = cuda_function("triangular.cu", f"substitute_columns<{type_names(rows.blocks, b)}>")
        arguments: tuple[Any, ...] = (
            np.int64(rows.count),
            self._offsets,
            self._places,
            self._values,
            rows.inverse,
            rows.rows,
            b,
            out,
        )
        arguments += (
            np.float64(alpha),
            np.float64(beta),
            self._sums,
            self._left,
            self._ticket,
            self._failed,
            np.int32(POLLS),
        )
        if rows.count:
            function((dataflow_blocks(rows.blocks, 32 * rows.count, _BLOCKS_NATURAL),), (256,), arguments)


SCHEDULES.add("dataflow", DataflowSchedule)
SCHEDULES.add("levels", LevelSchedule)
SCHEDULES.add("columns", ColumnSchedule)
