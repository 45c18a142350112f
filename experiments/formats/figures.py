"""Writes the pictures of benchmark records: speed of each format, compared with the vendor and with models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from penstock.experiments.formats.figures_of_formats import (
    figure_fraction_of_roofline,
    figure_gflops_by_nonzeros,
    figure_performance_profile,
    figure_setup_cost,
    figure_speedup_by_imbalance,
)
from penstock.experiments.formats.figures_of_kernels import figure_block_sizes, figure_scalar_against_vector
from penstock.experiments.formats.figures_of_sell import (
    figure_row_length_band,
    figure_sorting_scope,
    figure_unified_sell,
)
from penstock.experiments.formats.record_tables import Limits, Records

__all__ = [
    "figure_block_sizes",
    "figure_fraction_of_roofline",
    "figure_gflops_by_nonzeros",
    "figure_performance_profile",
    "figure_row_length_band",
    "figure_scalar_against_vector",
    "figure_setup_cost",
    "figure_sorting_scope",
    "figure_speedup_by_imbalance",
    "figure_unified_sell",
    "write_product_figures",
]

_FIGURES: dict[str, Callable[[Records, Limits], Figure | None]] = {
    "gflops_by_nonzeros": figure_gflops_by_nonzeros,
    "speedup_by_imbalance": figure_speedup_by_imbalance,
    "scalar_against_vector": figure_scalar_against_vector,
    "block_sizes": figure_block_sizes,
    "setup_cost": figure_setup_cost,
    "sorting_scope": figure_sorting_scope,
    "unified_sell": figure_unified_sell,
    "row_length_band": figure_row_length_band,
    "performance_profile": figure_performance_profile,
    "fraction_of_roofline": figure_fraction_of_roofline,
}


def write_product_figures(records: Records, limits: Limits, folder: Path) -> list[Path]:
    """Write all pictures of products ``Y = A X`` for which the records have data as PNG files, and return their paths.

    ``limits`` has ``read_GBps``, the measured bandwidth, for pictures of the model. Of several times of a peer with one matrix
    the shortest is drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    records = [record for record in records if "columns" in record]
    written = []
    for name, draw in _FIGURES.items():
        figure = draw(records, limits)
        if figure is not None:
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=150, bbox_inches="tight")
    return written
