"""A table of the memory and time of a system on several GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from penstock.experiments.scaling.forecast import Forecast
from penstock.spmv import format_nbytes


def scaling_table(forecasts: Sequence[Forecast]) -> Table:
    """Return a table with a row for each number of ranks; efficiency is against the first."""
    columns = ["GPUs", "planes", "matrix", "vectors", "where", "products", "sweep", "iteration", "solve", "efficiency"]
    caption = "of a GPU; the matrix and vectors of the one with the most planes of nodes"
    if not (known := any(one.iterations is not None for one in forecasts)):
        columns.remove("solve")
        caption += "; how many iterations this preconditioner needs is known only after a solve"
    table = Table(box=box.SIMPLE, padding=(0, 0, 0, 1), pad_edge=False, caption=caption)
    for name in columns:
        table.add_column(name, justify="right")
    for one in forecasts:
        solve = one.solve_seconds
        table.add_row(
            str(one.ranks),
            str(one.planes),
            format_nbytes(one.matrix_nbytes),
            format_nbytes(one.vector_nbytes),
            "streamed" if one.streamed else "in memory",
            str(one.products),
            f"{1e3 * one.sweep_seconds:.3g} ms",
            f"{1e3 * one.seconds:.3g} ms",
            *([("-" if solve is None else f"{solve:.3g} s")] if known else []),
            f"{one.efficiency_against(forecasts[0]):.2f}",
        )
    return table
