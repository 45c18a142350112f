"""Pictures that compare formats with each other, with the vendor's library and with the memory bandwidth."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from penstock.experiments.formats.drawing import (
    GREY,
    BarSeries,
    add_legend,
    new_axes,
    plot_bars,
    plot_points,
    plot_profile,
    style_of,
    use_plain_log,
)
from penstock.experiments.formats.record_tables import (
    Limits,
    Records,
    all_seconds,
    competitors_in,
    format_seconds,
    gflops,
    is_default,
    matrices_of,
    peer_seconds,
    vendor_in,
)

_LARGEST_FACTOR = 5.0
#: Curves of a profile that are drawn thick.
_BEST = 3


def figure_gflops_by_nonzeros(records: Records, limits: Limits) -> Figure | None:
    """Draw GFLOP/s of products with one vector against nonzeros, for each format and each peer."""
    table, matrices = all_seconds(records), matrices_of(records)
    if not table:
        return None
    figure, axes = new_axes("nonzeros", "GFLOP/s", "Products with one vector by size of the matrix")
    axes.set_xscale("log")
    for competitor in competitors_in(table):
        sizes = {matrix: matrices[matrix]["nonzeros"] for matrix, row in table.items() if competitor in row}
        plot_points(
            axes, competitor, [(size, gflops(size, table[matrix][competitor])) for matrix, size in sizes.items()]
        )
    axes.set_ylim(bottom=0)
    add_legend(figure, axes)
    return figure


def figure_speedup_by_imbalance(records: Records, limits: Limits) -> Figure | None:
    """Draw the speed-up over the vendor against the length of the longest row, relative to the number of rows.

    After Tsai, Cojean and Anzt, "Sparse linear algebra on AMD and NVIDIA GPUs" (2020), figures 7, 10 and 13.
    """
    table, matrices = format_seconds(records), matrices_of(records)
    peers = peer_seconds(records)
    vendor = vendor_in({matrix: peers[matrix] for matrix in table})
    shares = {
        matrix: matrices[matrix]["longest_row"] / matrices[matrix]["rows"]
        for matrix in table
        if vendor in peers[matrix] and matrices[matrix].get("longest_row")
    }
    if vendor is None or not shares:
        return None
    name = style_of(vendor)[0]
    figure, axes = new_axes("longest row / rows", f"speed-up over {name}", f"Speed-up over {name} by imbalance of rows")
    axes.set(xscale="log", yscale="log")
    axes.axhline(1, color=GREY, linestyle="--", linewidth=1, label=f"as fast as {name}")
    for format_name in competitors_in(table):
        points = [
            (share, peers[matrix][vendor] / table[matrix][format_name])
            for matrix, share in shares.items()
            if format_name in table[matrix]
        ]
        plot_points(axes, format_name, points)
    use_plain_log(axes.yaxis)
    add_legend(figure, axes)
    return figure


def figure_setup_cost(records: Records, limits: Limits) -> Figure | None:
    """Draw the time of conversion to each format, and of the vendor's analysis, each in multiples of its own product."""
    peers = peer_seconds(records)
    costs: dict[str, dict[str, float]] = {}  # by format or peer, then matrix
    analysed = {peer for record in records for peer in record.get("peer_setup_seconds") or {}}
    for record in records:
        name = record["matrix"]["name"]
        if record["columns"] == 1 and is_default(record):
            products = record.get("setup_products") or (record.get("setup_seconds") or 0) / record["seconds"]
            if products:
                costs.setdefault(record["format"], {}).setdefault(name, products)
        if record["columns"] == 1:
            for peer, seconds in (record.get("peer_setup_seconds") or {}).items():
                if seconds and peer in peers[name]:
                    costs.setdefault(peer, {}).setdefault(name, seconds / peers[name][peer])
    if not costs:
        return None
    matrices = [name for name in matrices_of(records) if any(name in row for row in costs.values())]
    series: list[BarSeries] = []
    for competitor in competitors_in({"all": dict.fromkeys(costs, 0.0)}):
        label, color, _ = style_of(competitor)
        style = {
            "color": color,
            "edgecolor": "white",
            "linewidth": 0,
            "hatch": "////" if competitor in analysed else "",
        }
        series.append((f"{label}, analysis" if competitor in analysed else label, style, costs[competitor]))
    figure, axes = new_axes("", "set-up / one product with one vector", "Time of the set-up in products")
    figure.set_figwidth(min(14, max(7.2, 0.14 * len(matrices) * len(series))))
    axes.grid(visible=False)
    axes.set_yscale("log")
    plot_bars(axes, matrices, series)
    axes.set_ylim(bottom=0.5 * min(value for row in costs.values() for value in row.values()))
    use_plain_log(axes.yaxis)
    add_legend(figure, axes)
    return figure


def figure_performance_profile(records: Records, limits: Limits) -> Figure | None:
    """Draw the percentage of matrices on which each format and peer is within a factor of the fastest.

    The performance profile of Dolan and More (2002). A product that was not measured counts as infinitely slow. At least three
    matrices, and two formats or peers, are needed.
    """
    table = all_seconds(records)
    competitors, peers = competitors_in(table), competitors_in(peer_seconds(records))
    if len(table) < 3 or len(competitors) < 2:
        return None
    title = f"Speed relative to the fastest on {len(table)} matrices"
    figure, axes = new_axes("within this factor of the fastest", "matrices, %", title)

    def style(name: str, place: int) -> dict[str, Any]:
        label, color, _ = style_of(name)
        dashes, width = "--" if name in peers else "-", 2.4 if place < _BEST else 1.2
        return {"color": color, "linestyle": dashes, "linewidth": width, "label": label}

    plot_profile(axes, table.values(), competitors, _LARGEST_FACTOR, style)
    add_legend(figure, axes)
    return figure


def figure_fraction_of_roofline(records: Records, limits: Limits) -> Figure | None:
    """Draw the fraction of the memory roofline that each format reaches on each matrix, one panel per number of vectors."""
    bandwidth = limits.get("read_GBps")
    panels: dict[int, dict[str, dict[str, float]]] = {}  # by vectors, format and matrix
    for record in records:
        floor = record.get("floor_seconds") or (bandwidth and record["bytes"] / (1e9 * bandwidth))
        if floor and is_default(record):
            row = panels.setdefault(record["columns"], {}).setdefault(record["format"], {})
            row.setdefault(record["matrix"]["name"], floor / record["seconds"])
    if not panels:
        return None
    shown = {name for formats in panels.values() for row in formats.values() for name in row}
    matrices = [name for name in matrices_of(records) if name in shown]
    competitors = competitors_in({str(columns): dict.fromkeys(formats, 0.0) for columns, formats in panels.items()})
    height = min(16, max(3, 1.2 + 0.1 * len(matrices) * (len(competitors) + 1)))
    figure = Figure(figsize=(min(16, 3.2 + 3 * len(panels)), height), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (columns, formats) in zip(every, sorted(panels.items()), strict=True):
        series: list[BarSeries] = [
            (style_of(competitor)[0], {"color": style_of(competitor)[1]}, formats.get(competitor, {}))
            for competitor in competitors
        ]
        plot_bars(axes, matrices, series, horizontal=True)
        axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
        axes.set_title("one vector" if columns == 1 else f"{columns} vectors", fontsize=9)
    figure.suptitle("Time that the memory bandwidth allows, relative to the measured time")
    figure.supxlabel("floor / measured seconds", fontsize=9)
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return figure
