"""Computes several steps of a recurrence in one sweep, each stage following the previous one through the subdivisions."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.spmv import SparseMatrix
from penstock.spmv.vectors.recurrence import Recurrence
from penstock.streaming.execution.executor import Visit
from penstock.streaming.stores.matrix_index import MatrixIndex


def wavefront_visit(
    index: MatrixIndex, recurrence: Recurrence, first: int, *, half: bool, reach: int, direction: int
) -> Visit:
    """Return the visit that performs step ``first + stage`` of a recurrence with a subdivision.

    The schedule runs a stage on a subdivision only after the previous stage has run on all subdivisions within its ``reach``.
    ``half`` says that slabs hold half of a symmetric matrix; ``direction`` is 1 if rows are visited in ascending order, else
    -1.
    """
    rows = [slice(subdivision.row_start, subdivision.row_stop) for subdivision in index.subdivisions]
    if half:
        return _HalfVisit(recurrence, first, rows, reach, direction)

    def visit(number: int, slab: SparseMatrix, stage: int) -> None:
        recurrence.advance(first + stage, rows[number], lambda x, out: slab.apply_slab(0, x, out, 1.0, 0.0))

    return visit


@dataclass(frozen=True)
class _HalfVisit:
    """The visit for slabs that hold half of a symmetric matrix: they add to their own rows and to rows below.

    One image serves all stages: rows that a stage has completed are zero again before the next stage adds to them. In a sweep
    with ascending rows, the rows of a subdivision are complete once that subdivision has been added; with descending rows,
    once the first subdivision that couples with them has been added.
    """

    recurrence: Recurrence
    first: int
    rows: list[slice]
    reach: int
    direction: int

    def __post_init__(self) -> None:
        self.recurrence.clear()

    def __call__(self, number: int, slab: SparseMatrix, stage: int) -> None:
        recurrence, step, rows, last = self.recurrence, self.first + stage, self.rows, len(self.rows) - 1
        recurrence.scatter(step, lambda x, image: slab.apply_slab(rows[number].start, x, image, 1.0, 0.0))
        if self.direction == 1:
            recurrence.complete(step, rows[number])
        elif number + self.reach <= last or number == 0:
            top = 0 if number == 0 else rows[number + self.reach].start
            recurrence.complete(step, slice(top, rows[min(number + self.reach, last)].stop))
