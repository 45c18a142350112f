"""How the rows of a triangle are spread over time and over the lanes of a device: a registry, and the choice."""

from __future__ import annotations

from typing import Protocol

from penstock.solvers.triangular.column_schedule import ColumnSchedule
from penstock.solvers.triangular.dataflow_schedule import DataflowSchedule
from penstock.solvers.triangular.host_schedule import HostSchedule
from penstock.solvers.triangular.level_schedule import LevelSchedule
from penstock.solvers.triangular.ordered_rows import OrderedRows
from penstock.spmv import Array, device_of
from penstock.spmv.registry import Registry


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


#: The schedules of GPUs by name.
SCHEDULES: Registry[str, type[Schedule]] = Registry("schedule of triangular solves")
SCHEDULES.add("dataflow", DataflowSchedule)
SCHEDULES.add("levels", LevelSchedule)
SCHEDULES.add("columns", ColumnSchedule)


def make_schedule(rows: OrderedRows, name: str, kind: str) -> Schedule:
    """Return the schedule of that name for rows on a kind of device; ``"auto"`` chooses. Refuse one that does not fit."""
    chosen = SCHEDULES[name] if name != "auto" else None
    if kind == "cpu":
        return HostSchedule(rows)
    if chosen is not None:
        return chosen(rows)
    if rows.levels is not None:
        by_level = LevelSchedule(rows)
        if by_level.capturable or not _promises_progress(rows):
            return by_level
    return DataflowSchedule(rows)


def _promises_progress(rows: OrderedRows) -> bool:
    """Return whether lanes that wait let others run: NVIDIA states it, AMD does not."""
    device = device_of(rows.blocks)
    return device.kind == "cpu" or not device.xp.cuda.runtime.is_hip
