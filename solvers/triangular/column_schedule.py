"""Solves with a triangle by columns, for comparison."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.solvers.triangular.levels import POLLS, TRIANGLE_KERNELS, dataflow_blocks
from penstock.solvers.triangular.ordered_rows import OrderedRows, columns_of
from penstock.spmv import Array, InputError, device_of
from penstock.spmv.compilation.cuda_module import type_names


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
        if columns_of(b) > 1 or scaled:
            raise InputError("the schedule by columns solves for one vector at a time; use 'dataflow' or 'levels'")
        rows = self._rows
        self._sums.fill(0)
        self._left[...] = self._waits
        self._ticket.fill(0)
        self._failed.fill(0)
        function = TRIANGLE_KERNELS.function(f"substitute_columns<{type_names(rows.blocks, b)}>")
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
            function((dataflow_blocks(rows.blocks, 32 * rows.count),), (256,), arguments)
