"""Draws the time and efficiency of a system on several GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from penstock.experiments.scaling.forecast import Forecast

_BLUE, _ORANGE, _GREY = "#1f6fb2", "#e07b28", "#8a8f98"


def draw_scaling(path: Path, forecasts: Sequence[Forecast]) -> None:
    """Draw seconds of an iteration and their parts, and the efficiency, against the number of GPUs."""
    figure = Figure(figsize=(9.6, 3.8))
    left, right = figure.subplots(1, 2)
    ranks = [one.ranks for one in forecasts]
    parts = {
        "products": [one.sweep_seconds + one.vector_seconds for one in forecasts],
        "coarse solves, on all": [one.shared_seconds for one in forecasts],
        "sums and messages": [one.rank_seconds for one in forecasts],
    }
    for (label, seconds), colour in zip(parts.items(), (_BLUE, _GREY, _ORANGE), strict=True):
        if any(seconds):
            left.plot(ranks, seconds, "o-", markersize=3, linewidth=1, color=colour, label=label)
    left.plot(ranks, [one.seconds for one in forecasts], "k-", linewidth=1.5, label="an iteration")
    left.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="seconds of an iteration")
    left.legend(frameon=False)
    first = forecasts[0]
    right.plot(ranks, [one.efficiency_against(first) for one in forecasts], "-", color=_BLUE)
    for streamed, colour, label in ((True, _ORANGE, "streamed"), (False, _BLUE, "in memory")):
        chosen = [one for one in forecasts if one.streamed == streamed]
        efficiency = [one.efficiency_against(first) for one in chosen]
        if chosen:
            right.plot([one.ranks for one in chosen], efficiency, "o", color=colour, label=label)
    right.set(xscale="log", xlabel="GPUs", ylabel=f"efficiency against {first.ranks} GPU{'s' * (first.ranks > 1)}")
    right.set_ylim(bottom=0)
    right.legend(frameon=False)
    for axes in (left, right):
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(ranks)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
