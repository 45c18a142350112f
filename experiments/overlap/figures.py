"""Draws the pictures of the communication-hiding study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from penstock.experiments.reporting.figures import draw_spans
from penstock.streaming import Timeline

#: Operations per byte by the paper's equations (2) to (4) for 1, 3 and 6 unknowns per node; bytes of values and of x.
PAPER_FLOPS_PER_BYTE = {1: 2 / 16, 3: 18 / 96, 6: 72 / 336}

_ON, _OFF, _LINK, _MEMORY, _LIMIT = "#1f6fb2", "#e07b28", "#7a5195", "#2a9d8f", "#8a8f98"


def draw_rates(path: Path, records: list[dict[str, Any]], read_GBps: float) -> None:
    """Draw GFLOP/s against the number of subdivisions, with overlap on and off, and the limits.

    All records are of the same matrix, repeats and columns; ``read_GBps`` is the measured memory bandwidth of the device.
    """
    first = records[0]
    figure = Figure(figsize=(7.2, 4.2))
    axes = figure.subplots()
    for kind, color, label in (("on", _ON, "overlap on"), ("off", _OFF, "overlap off")):
        shown = sorted((r for r in records if r["overlap"] == kind), key=lambda r: r["subdivisions"])
        counts = [record["subdivisions"] for record in shown]
        axes.plot(counts, [record["gflops"] for record in shown], "o-", color=color, linewidth=1.6, label=label)
        if kind == "on":
            parts = {key: [record[f"{key}_gflops"] for record in shown] for key in ("transfer", "compute")}
            bound = [min(rates) for rates in zip(*parts.values(), strict=True)]
            axes.plot(
                counts, bound, color=_LIMIT, linewidth=6, alpha=0.35, label="bound of overlap: the slower of both"
            )
            for key, shade, name in (("transfer", _LINK, "transfer alone"), ("compute", _MEMORY, "computation alone")):
                axes.plot(counts, parts[key], "--", color=shade, linewidth=1.2, label=name)
    top = max(record[key] for record in records for key in ("gflops", "transfer_gflops", "compute_gflops"))
    arithmetic = PAPER_FLOPS_PER_BYTE[first["dof"]] * read_GBps
    if first["columns"] == 1:
        label = f"memory rate x the paper's count, {arithmetic:.4g}"
        if arithmetic < 2 * top:
            axes.axhline(arithmetic, color=_LIMIT, linestyle=":", linewidth=1.4, label=label)
        else:
            axes.plot([], [], color=_LIMIT, linestyle=":", label=f"{label} (outside)")
    axes.set(
        xlabel="subdivisions",
        ylabel="GFLOP/s",
        xlim=(0, None),
        ylim=(0, None),
        title=f"{first['matrix']}, {first['repeats']} product{'s' * (first['repeats'] > 1)}"
        + (f" of {first['columns']} vectors" if first["columns"] > 1 else "")
        + f" per subdivision, {first['format']}, {first['protocol']} protocol",
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.text(
        0.01,
        -0.05,
        "The paper counts the entries of x anew for every block of the matrix, as if no cache kept them, and no column indices.\n"
        "That is an estimate and no bound: products whose x, or whose subdivision, stays in a cache exceed it.",
        fontsize=7,
        color=_LIMIT,
    )
    figure.savefig(path, dpi=150, bbox_inches="tight")


def draw_timelines(path: Path, off: Timeline, on: Timeline, title: str) -> None:
    """Draw transfers and computations of a sweep without overlap, and below of one with overlap, on the same time axis."""
    figure = Figure(figsize=(9, 3.8))
    panels = figure.subplots(2, 1, sharex=True)
    for axes, timeline, name in zip(panels, (off, on), ("overlap off", "overlap on"), strict=True):
        draw_spans(axes, timeline)
        axes.set_title(f"{name}: {title}", fontsize=9)
    panels[-1].set_xlabel("milliseconds")
    figure.tight_layout()
    figure.savefig(path, dpi=150, bbox_inches="tight")
