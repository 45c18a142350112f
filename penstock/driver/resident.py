"""The plan of a matrix that is held in memory as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.spmv import SparseMatrix, format_nbytes
from penstock.streaming import MatrixIndex, StreamPlan, Subdivision, Workload, plan_stream


@dataclass(frozen=True)
class Resident:
    """A matrix that is held in memory as a whole: the plan beside that of a streamed one, a StreamPlan.

    ``nonzeros`` are those of the caller's matrix; ``budget_nbytes`` is the caller's limit, or None; ``parts`` are what the
    preconditioner holds besides vectors, with its bytes.
    """

    shape: tuple[int, int]
    nonzeros: int
    format_name: str
    storage_nbytes: int
    budget_nbytes: int | None
    workspace_nbytes: int
    parts: tuple[tuple[str, int], ...] = ()

    #: Nothing is streamed.
    slots = 0

    @classmethod
    def of(
        cls, matrix: SparseMatrix, nonzeros: int, budget: int | None, workspace: int, parts: tuple[Any, ...]
    ) -> Resident:
        """Return the plan of a converted matrix."""
        return cls(matrix.shape, nonzeros, matrix.name, matrix.nbytes, budget, workspace, parts)

    def as_stream_plan(self) -> StreamPlan:
        """Return the plan of a stream of one piece that is resident, for reports that compare runs."""
        piece = Subdivision(0, self.shape[0], self.nonzeros, (), self.storage_nbytes)
        index = MatrixIndex(self.shape, "float64", self.format_name, {}, (piece,))
        workload = Workload(workspace_nbytes=self.workspace_nbytes, parts=self.parts)
        return plan_stream(index, self.budget_nbytes or self.storage_nbytes, workload)

    def explain(self) -> str:
        """Return a description, one fact per line."""
        size = format_nbytes(self.storage_nbytes)
        allowed = "" if self.budget_nbytes is None else f", which may take {format_nbytes(self.budget_nbytes)}"
        parts = ", ".join(f"{format_nbytes(nbytes)} for {name}" for name, nbytes in self.parts)
        return "\n".join(
            [
                f"matrix      {self.shape[0]:,} x {self.shape[1]:,}, {self.nonzeros:,} entries, {self.format_name}, {size}",
                f"memory      {size} for the matrix{allowed}: it is held as a whole, nothing is streamed",
                f"vectors     {format_nbytes(self.workspace_nbytes)} beside it{f', with {parts}' if parts else ''}",
            ]
        )
