"""Pictures that compare CUDA kernels of one format."""

from __future__ import annotations

import re

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from penstock.experiments.formats.drawing import (
    GREY,
    BarSeries,
    new_axes,
    plot_bars,
    plot_points,
    style_of,
    use_plain_log,
)
from penstock.experiments.formats.record_tables import DEFAULT_THREADS, Limits, Record, Records, matrices_of


def figure_scalar_against_vector(records: Records, limits: Limits) -> Figure | None:
    """Draw the speed-up of CSR with several lanes per row over CSR with one thread per row, against nonzeros.

    After Tsai, Cojean and Anzt (2020), figure 5.
    """
    seconds: dict[str, dict[str, float]] = {"scalar": {}, "vector": {}}
    for record in records:
        variant = record.get("variant")
        if record["format"] == "csr" and record["columns"] == 1 and variant in seconds:
            seconds[variant].setdefault(record["matrix"]["name"], record["seconds"])
    sizes = {matrix: values["nonzeros"] for matrix, values in matrices_of(records).items()}
    points = [
        (sizes[matrix], scalar / seconds["vector"][matrix])
        for matrix, scalar in seconds["scalar"].items()
        if matrix in seconds["vector"]
    ]
    if not points:
        return None
    faster = sum(speedup > 1 for _, speedup in points)
    title = f"Vector CSR is faster than scalar CSR on {faster} of {len(points)} matrices"
    figure, axes = new_axes("nonzeros", "speed-up of vector over scalar CSR", title)
    axes.set(xscale="log", yscale="log")
    axes.axhline(1, color=GREY, linestyle="--", linewidth=1)
    plot_points(axes, "csr", points)
    use_plain_log(axes.yaxis)
    return figure


def _kernel_name(record: Record) -> str:
    """Return format, variant and number of vectors of a record, without its number of threads."""
    count = re.compile(rf"\D*{record['threads']}\D*|threads?|blocks?")
    words = re.findall(r"[^\W_]+", record.get("variant") or "")
    others = [word for word in words if not count.fullmatch(word)]
    vectors = [f"k = {record['columns']}"] if record["columns"] > 1 else []
    return ", ".join([style_of(record["format"])[0], *others, *vectors])


def figure_block_sizes(records: Records, limits: Limits) -> Figure | None:
    """Draw the time with each number of threads per block relative to 256 threads, one panel per kernel.

    The question of the AMD lab notes on sparse products: does the block size matter?
    """
    study: dict[str, dict[str, dict[int, float]]] = {}
    colors: dict[str, str] = {}
    for record in records:
        if record.get("threads"):
            kernel = _kernel_name(record)
            colors[kernel] = style_of(record["format"])[1]
            times = study.setdefault(kernel, {}).setdefault(record["matrix"]["name"], {})
            times.setdefault(record["threads"], record["seconds"])
    for rows in study.values():
        for name in [name for name, times in rows.items() if DEFAULT_THREADS not in times or len(times) == 1]:
            del rows[name]
    study = {kernel: rows for kernel, rows in study.items() if rows}
    if not study:
        return None
    matrices = [matrix for matrix in matrices_of(records) if any(matrix in rows for rows in study.values())]
    counts = sorted({threads for rows in study.values() for times in rows.values() for threads in times})
    opacities = dict(zip(counts, np.linspace(0.35, 1, len(counts)).tolist(), strict=True))
    figure = Figure(figsize=(min(14, max(7.2, 0.6 * len(matrices))), 1 + 1.5 * len(study)), layout="constrained")
    panels = figure.subplots(len(study), squeeze=False, sharex=True, sharey=True)[:, 0]
    for axes, (kernel, rows) in zip(panels, study.items(), strict=True):
        series: list[BarSeries] = []
        for threads in counts:
            ratios = {
                matrix: times[threads] / times[DEFAULT_THREADS] for matrix, times in rows.items() if threads in times
            }
            style = {"color": colors[kernel], "alpha": opacities[threads]}
            series.append((f"{threads} threads", style, ratios))
        plot_bars(axes, matrices, series)
        axes.axhline(1, color=GREY, linestyle="--", linewidth=1)
        axes.set_title(kernel, fontsize=9, loc="left")
    figure.suptitle("Time of a product by threads per block")
    figure.supylabel(f"seconds / seconds with {DEFAULT_THREADS} threads", fontsize=9)
    shades = [Patch(color=GREY, alpha=opacities[threads], label=f"{threads} threads") for threads in counts]
    figure.legend(handles=shades, loc="outside right upper", frameon=False, fontsize=8)
    return figure
