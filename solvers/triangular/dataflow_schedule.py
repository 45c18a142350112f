"""Solves with a triangle in one launch: every row as soon as the rows it needs are there."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.solvers.triangular.levels import POLLS, TRIANGLE_KERNELS, dataflow_blocks
from penstock.solvers.triangular.ordered_rows import OrderedRows, columns_of
from penstock.spmv import Array, device_of
from penstock.spmv.compilation.cuda_module import launch, type_names

# A level of at most this many short rows leaves lanes idle unless several share a row.
_NARROW_LEVEL = 8192
# Rows are uneven if the longest has this many times the entries of the mean one: a lane alone would keep all others waiting.
_UNEVEN = 8
# Blocks of 256 threads a multiprocessor: rows of far levels only poll, rows in natural order may be ready.
_BLOCKS_BY_LEVEL, _BLOCKS_NATURAL = 2, 4


def dataflow_shapes(size: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of lanes a row and entries in flight a lane for which dataflows are compiled, for blocks of a size."""
    return ((1, 3), (4, 1), (16, 1), (32, 4)) if size == 1 else ((1, 1), (4, 1), (16, 1))


class DataflowSchedule:
    """One launch for all rows: lanes claim rows in order, and take the values that they need as soon as these are available.

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
        even = rows.longest <= _UNEVEN * max(1.0, mean)
        narrow = rows.levels is not None and rows.count <= _NARROW_LEVEL * (len(rows.levels) - 1)
        if columns > 1:
            number = 0
        elif rows.size > 1:
            number = 1 if even and mean <= 16 else 2
        elif even and mean <= 6:
            number = 1 if narrow and mean <= 4 else 0
        else:
            number = 2 if even and mean <= 16 else 3
        return dataflow_shapes(rows.size)[number]

    def solve(self, b: Array, out: Array, alpha: float, beta: float, gamma: float, scaled: bool) -> None:
        """Solve; if lanes give up waiting, what they do not reach becomes NaN."""
        rows, columns = self._rows, columns_of(b)
        count, (lanes, in_flight) = rows.count * columns, self.shape(columns)
        if not count:
            return
        if self._y.size < count * rows.size:
            self._y = device_of(b).xp.empty(count * rows.size)
        words = (np.int64(count * rows.size), self._y, self._ticket, self._failed)
        launch(TRIANGLE_KERNELS.function("forget<double>"), count * rows.size, 256, words)
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
        TRIANGLE_KERNELS.function(name)((dataflow_blocks(rows.blocks, count * lanes, most),), (256,), arguments)
