"""Pictures of measured sparse matrix products: what each format reaches, against the vendor and against the models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

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

Record = Mapping[str, Any]
Records = Sequence[Record]
Limits = Mapping[str, float]
BarSeries = tuple[str, dict[str, Any], dict[str, float]]  # label, style, value of each group

_BLUE, _ORANGE, _GREY = "#1f6fb2", "#e07b28", "#8a8f98"
#: Label, colour and marker of a format or a peer, the same in all pictures. Where two colours are near each other for
#: some eyes, their lightness and markers are not.
_STYLES = {
    "csr": ("CSR", _BLUE, "o"),
    "sell": (r"SELL-C-$\sigma$", _ORANGE, "s"),
    "bsr": ("BSR", "#009e73", "^"),
    "ell": ("ELL", "#d98bb4", "v"),
    "hyb": ("HYB", "#8fd0f0", "D"),
    "coo": ("COO", "#e3d23c", "P"),
    "sliced_ell": ("sliced ELL", "#7a1f4f", "<"),
    "sliced_bsr": ("sliced BSR", "#33237f", ">"),
    "symmetric_bsr": ("symmetric BSR", "#7d7a1c", "p"),
    "cusparse_csr": ("cuSPARSE CSR", "#1c1c1c", "X"),
    "scipy_csr": ("SciPy CSR", _GREY, "d"),
}
_SPARE_COLORS, _SPARE_MARKERS = ("#a6761d", "#5f6f52", "#b2182b", "#4d4d4d"), ("h", "*", "H", "8")
_VENDORS = ("cusparse_csr", "scipy_csr")  # the first that was measured is the one compared with
_DEFAULT_THREADS = 256
_UNIFIED_CHUNK = 32
_LARGEST_FACTOR = 5.0
_NAMED_MATRICES = 24  # more are not named on an axis or in a legend


def _style(solver: str) -> tuple[str, str, str]:
    """Return label, colour and marker; an unknown name always gets the same ones."""
    number = crc32(solver.encode())
    spare = (solver.replace("_", " "), _SPARE_COLORS[number % 4], _SPARE_MARKERS[number // 4 % 4])
    return _STYLES.get(solver, spare)


def _is_default(record: Record) -> bool:
    return not record.get("variant") and record.get("threads") in (None, _DEFAULT_THREADS)


def _matrices(records: Records) -> dict[str, dict[str, Any]]:
    """Return the matrices by name, in the order of the records."""
    matrices: dict[str, dict[str, Any]] = {}
    for record in records:
        matrices.setdefault(record["matrix"]["name"], record["matrix"])
    return matrices


def _peer_seconds(records: Records) -> dict[str, dict[str, float]]:
    """Return the least seconds of a product with one vector by matrix and peer."""
    least: dict[str, dict[str, float]] = {}
    for record in records:
        if record["columns"] == 1:
            row = least.setdefault(record["matrix"]["name"], {})
            for peer, seconds in (record.get("peers") or {}).items():
                if seconds:
                    row[peer] = min(seconds, row.get(peer, seconds))
    return least


def _format_seconds(records: Records, columns: int = 1) -> dict[str, dict[str, float]]:
    """Return the seconds of the default variants by matrix and format."""
    seconds: dict[str, dict[str, float]] = {}
    for record in records:
        if record["columns"] == columns and _is_default(record):
            seconds.setdefault(record["matrix"]["name"], {}).setdefault(record["format"], record["seconds"])
    return seconds


def _all_seconds(records: Records) -> dict[str, dict[str, float]]:
    """Return the seconds with one vector by matrix and format or peer, of matrices that some format has."""
    peers = _peer_seconds(records)
    return {matrix: {**row, **peers[matrix]} for matrix, row in _format_seconds(records).items()}


def _solvers(table: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the formats and peers of a table, those of fixed style first and in that order."""
    found = {solver for row in table.values() for solver in row}
    return [solver for solver in _STYLES if solver in found] + sorted(found - set(_STYLES))


def _vendor(peers: Mapping[str, Mapping[str, float]]) -> str | None:
    return next((vendor for vendor in _VENDORS if any(vendor in row for row in peers.values())), None)


def _gflops(nonzeros: float, seconds: float) -> float:
    return 2e-9 * nonzeros / seconds


def _axes(xlabel: str, ylabel: str, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    return figure, axes


def _legend(figure: Figure, axes: Axes) -> None:
    """Put the legend beside the axes, where it covers no data."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)


def _plain_log(axis: Axis) -> None:
    """Give a logarithmic axis tick labels in plain numbers, also where it spans less than a decade."""
    low, high = sorted(axis.get_view_interval())
    if high < 4 * low:
        axis.set_major_locator(MaxNLocator(6))
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _plot_points(axes: Axes, solver: str, points: Sequence[tuple[float, float]]) -> None:
    if points:
        label, color, marker = _style(solver)
        across, up = zip(*sorted(points), strict=True)
        axes.plot(
            across, up, marker, color=color, markersize=6, markeredgecolor="white", markeredgewidth=0.5, label=label
        )


def _plot_bars(axes: Axes, groups: Sequence[str], series: Sequence[BarSeries], horizontal: bool = False) -> None:
    """Draw a bar for each series in each group that it has a value for, and name the groups if they are not many."""
    thickness = 0.8 / len(series)
    for number, (label, style, values) in enumerate(series):
        shift = (number - (len(series) - 1) / 2) * thickness
        places = [place + shift for place, group in enumerate(groups) if group in values]
        lengths = [values[group] for group in groups if group in values]
        draw = axes.barh if horizontal else axes.bar
        draw(places, lengths, thickness, label=label, **style)
    names = list(groups) if len(groups) <= _NAMED_MATRICES else []
    places = list(range(len(names)))
    if not names:
        axes.set(**{"ylabel" if horizontal else "xlabel": f"{len(groups)} matrices"})
    if horizontal:
        axes.set_yticks(places, names)
        axes.set_ylim(len(groups) - 0.4, -0.6)  # the first group is on top
    else:
        tilt: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(places, names, **(tilt if sum(map(len, names)) > 40 else {}))
        axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.grid(alpha=0.3, axis="x" if horizontal else "y")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.label_outer()


def figure_gflops_by_nonzeros(records: Records, limits: Limits) -> Figure | None:
    """Draw GFLOP/s of products with one vector against nonzeros, a series a format and a series a peer."""
    table, matrices = _all_seconds(records), _matrices(records)
    if not table:
        return None
    figure, axes = _axes("nonzeros", "GFLOP/s", "Products with one vector by size of the matrix")
    axes.set_xscale("log")
    for solver in _solvers(table):
        sizes = {matrix: matrices[matrix]["nonzeros"] for matrix, row in table.items() if solver in row}
        _plot_points(axes, solver, [(size, _gflops(size, table[matrix][solver])) for matrix, size in sizes.items()])
    axes.set_ylim(bottom=0)
    _legend(figure, axes)
    return figure


def figure_speedup_by_imbalance(records: Records, limits: Limits) -> Figure | None:
    """Draw the speed-up over the vendor against the longest row's share of the rows.

    Notes
    -----
    After Tsai, Cojean and Anzt, "Sparse linear algebra on AMD and NVIDIA GPUs" (2020), figures 7, 10 and 13.
    """
    table, matrices = _format_seconds(records), _matrices(records)
    peers = _peer_seconds(records)
    vendor = _vendor({matrix: peers[matrix] for matrix in table})
    shares = {
        matrix: matrices[matrix]["longest_row"] / matrices[matrix]["rows"]
        for matrix in table
        if vendor in peers[matrix] and matrices[matrix].get("longest_row")
    }
    if vendor is None or not shares:
        return None
    name = _style(vendor)[0]
    figure, axes = _axes("longest row / rows", f"speed-up over {name}", f"Speed-up over {name} by imbalance of rows")
    axes.set(xscale="log", yscale="log")
    axes.axhline(1, color=_GREY, linestyle="--", linewidth=1, label=f"as fast as {name}")
    for format_name in _solvers(table):
        points = [
            (share, peers[matrix][vendor] / table[matrix][format_name])
            for matrix, share in shares.items()
            if format_name in table[matrix]
        ]
        _plot_points(axes, format_name, points)
    _plain_log(axes.yaxis)
    _legend(figure, axes)
    return figure


def figure_scalar_against_vector(records: Records, limits: Limits) -> Figure | None:
    """Draw the speed-up of CSR with lanes sharing a row over CSR with one thread a row, against nonzeros.

    Notes
    -----
    After Tsai, Cojean and Anzt (2020), figure 5.
    """
    seconds: dict[str, dict[str, float]] = {"scalar": {}, "vector": {}}
    for record in records:
        variant = record.get("variant")
        if record["format"] == "csr" and record["columns"] == 1 and variant in seconds:
            seconds[variant].setdefault(record["matrix"]["name"], record["seconds"])
    sizes = {matrix: values["nonzeros"] for matrix, values in _matrices(records).items()}
    points = [
        (sizes[matrix], scalar / seconds["vector"][matrix])
        for matrix, scalar in seconds["scalar"].items()
        if matrix in seconds["vector"]
    ]
    if not points:
        return None
    faster = sum(speedup > 1 for _, speedup in points)
    title = f"Vector CSR is faster than scalar CSR on {faster} of {len(points)} matrices"
    figure, axes = _axes("nonzeros", "speed-up of vector over scalar CSR", title)
    axes.set(xscale="log", yscale="log")
    axes.axhline(1, color=_GREY, linestyle="--", linewidth=1)
    _plot_points(axes, "csr", points)
    _plain_log(axes.yaxis)
    return figure


def _kernel_name(record: Record) -> str:
    """Return format, variant and vectors of a record of the block size study, without its number of threads."""
    count = re.compile(rf"\D*{record['threads']}\D*|threads?|blocks?")
    words = re.findall(r"[^\W_]+", record.get("variant") or "")
    kept = [word for word in words if not count.fullmatch(word)]
    vectors = [f"k = {record['columns']}"] if record["columns"] > 1 else []
    return ", ".join([_style(record["format"])[0], *kept, *vectors])


def figure_block_sizes(records: Records, limits: Limits) -> Figure | None:
    """Draw the seconds with each number of threads a block relative to 256 threads, a panel a kernel.

    Notes
    -----
    The question of the AMD lab notes on sparse products: does the block size matter?
    """
    study: dict[str, dict[str, dict[int, float]]] = {}
    colors: dict[str, str] = {}
    for record in records:
        if record.get("threads"):
            kernel = _kernel_name(record)
            colors[kernel] = _style(record["format"])[1]
            times = study.setdefault(kernel, {}).setdefault(record["matrix"]["name"], {})
            times.setdefault(record["threads"], record["seconds"])
    for rows in study.values():
        for name in [name for name, times in rows.items() if _DEFAULT_THREADS not in times or len(times) == 1]:
            del rows[name]
    study = {kernel: rows for kernel, rows in study.items() if rows}
    if not study:
        return None
    matrices = [matrix for matrix in _matrices(records) if any(matrix in rows for rows in study.values())]
    counts = sorted({threads for rows in study.values() for times in rows.values() for threads in times})
    opacities = dict(zip(counts, np.linspace(0.35, 1, len(counts)).tolist(), strict=True))
    figure = Figure(figsize=(min(14, max(7.2, 0.6 * len(matrices))), 1 + 1.5 * len(study)), layout="constrained")
    panels = figure.subplots(len(study), squeeze=False, sharex=True, sharey=True)[:, 0]
    for axes, (kernel, rows) in zip(panels, study.items(), strict=True):
        series: list[BarSeries] = []
        for threads in counts:
            ratios = {
                matrix: times[threads] / times[_DEFAULT_THREADS] for matrix, times in rows.items() if threads in times
            }
            style = {"color": colors[kernel], "alpha": opacities[threads]}
            series.append((f"{threads} threads", style, ratios))
        _plot_bars(axes, matrices, series)
        axes.axhline(1, color=_GREY, linestyle="--", linewidth=1)
        axes.set_title(kernel, fontsize=9, loc="left")
    figure.suptitle("Block sizes: seconds of a product by threads a block")
    figure.supylabel(f"seconds / seconds with {_DEFAULT_THREADS} threads", fontsize=9)
    shades = [Patch(color=_GREY, alpha=opacities[threads], label=f"{threads} threads") for threads in counts]
    figure.legend(handles=shades, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def figure_setup_cost(records: Records, limits: Limits) -> Figure | None:
    """Draw what conversion to each format costs, and the vendor's analysis, each in products of its own."""
    peers = _peer_seconds(records)
    costs: dict[str, dict[str, float]] = {}  # by format or peer, then matrix
    analysed = {peer for record in records for peer in record.get("peer_setup_seconds") or {}}
    for record in records:
        name = record["matrix"]["name"]
        if record["columns"] == 1 and _is_default(record):
            products = record.get("setup_products") or (record.get("setup_seconds") or 0) / record["seconds"]
            if products:
                costs.setdefault(record["format"], {}).setdefault(name, products)
        if record["columns"] == 1:
            for peer, seconds in (record.get("peer_setup_seconds") or {}).items():
                if seconds and peer in peers[name]:
                    costs.setdefault(peer, {}).setdefault(name, seconds / peers[name][peer])
    if not costs:
        return None
    matrices = [name for name in _matrices(records) if any(name in row for row in costs.values())]
    series: list[BarSeries] = []
    for solver in _solvers({"all": dict.fromkeys(costs, 0.0)}):
        label, color, _ = _style(solver)
        style = {"color": color, "edgecolor": "white", "linewidth": 0, "hatch": "////" if solver in analysed else ""}
        series.append((f"{label}, analysis" if solver in analysed else label, style, costs[solver]))
    figure, axes = _axes("", "set-up / one product with one vector", "Set-up costs as much as this many products")
    figure.set_figwidth(min(14, max(7.2, 0.14 * len(matrices) * len(series))))
    axes.grid(visible=False)
    axes.set_yscale("log")
    _plot_bars(axes, matrices, series)
    axes.set_ylim(bottom=0.5 * min(value for row in costs.values() for value in row.values()))
    _plain_log(axes.yaxis)
    _legend(figure, axes)
    return figure


def _sell_records(records: Records) -> dict[str, dict[tuple[int, int], Record]]:
    """Return the fastest SELL record with one vector by matrix, then chunk height and sorting scope."""
    fastest: dict[str, dict[tuple[int, int], Record]] = {}
    for record in records:
        parameters = record.get("parameters") or {}
        chunk, scope = parameters.get("chunk_height"), parameters.get("sorting_scope")
        usual = record["columns"] == 1 and record.get("threads") in (None, _DEFAULT_THREADS)
        if record["format"] == "sell" and usual and chunk and scope:
            row = fastest.setdefault(record["matrix"]["name"], {})
            if (chunk, scope) not in row or record["seconds"] < row[chunk, scope]["seconds"]:
                row[chunk, scope] = record
    return fastest


def figure_sorting_scope(records: Records, limits: Limits) -> Figure | None:
    """Draw chunk occupancy, traffic of x and time of SELL-C-sigma against sigma, a line a matrix.

    Notes
    -----
    After Kreutzer, Hager, Wellein, Fehske and Bishop (2014), figure 5. A matrix is drawn for C = 32, or where that has
    no two sorting scopes, for the chunk height that has most.
    """
    lines: dict[str, list[tuple[int, Record]]] = {}
    for matrix, row in _sell_records(records).items():
        scopes: dict[int, list[tuple[int, Record]]] = {}
        for (chunk, scope), record in row.items():
            scopes.setdefault(chunk, []).append((scope, record))
        most = max(scopes, key=lambda chunk: len(scopes[chunk]))
        chunk = _UNIFIED_CHUNK if len(scopes.get(_UNIFIED_CHUNK, [])) > 1 else most
        if len(scopes[chunk]) > 1:
            lines[f"{matrix} (C = {chunk})"] = sorted(scopes[chunk], key=lambda point: point[0])
    if not lines:
        return None
    quantities: list[tuple[str, str, float]] = [
        ("occupancy", r"chunk occupancy $\beta$", 1),
        ("alpha", r"$\alpha$, loads of x a nonzero", 1),
        ("seconds", "microseconds", 1e6),
    ]
    figure = Figure(figsize=(7.2, 7), layout="constrained")
    panels = figure.subplots(3, sharex=True)
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.88, len(lines)))
    for axes, (quantity, label, unit) in zip(panels, quantities, strict=True):
        for number, (name, points) in enumerate(lines.items()):
            known = [(scope, unit * record[quantity]) for scope, record in points if record.get(quantity) is not None]
            across, up = [scope for scope, _ in known], [value for _, value in known]
            axes.plot(across, up, "osD^vP"[number % 6] + "-", color=colors[number], markersize=4, label=name)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[0].set(title=r"SELL-C-$\sigma$: what sorting more rows together buys")
    panels[2].set_xscale("log", base=2)
    panels[2].set(xlabel=r"sorting scope $\sigma$, rows", yscale="log")
    _plain_log(panels[2].yaxis)
    if len(lines) <= _NAMED_MATRICES:
        _legend(figure, panels[0])
    return figure


def figure_unified_sell(records: Records, limits: Limits) -> Figure | None:
    """Draw SELL-32-sigma with its best sigma and SELL with its best C and sigma, as speed-ups over the vendor.

    Notes
    -----
    After Kreutzer et al. (2014), figure 4: what is lost by one chunk height for all matrices. A matrix counts if it was
    measured with C = 32 and with another chunk height.
    """
    peers = _peer_seconds(records)
    vendor = _vendor(peers)
    unified: dict[str, float] = {}
    best: dict[str, float] = {}
    for matrix, row in _sell_records(records).items():
        if vendor in peers[matrix] and _UNIFIED_CHUNK in (chunks := {chunk for chunk, _ in row}) and len(chunks) > 1:
            at_32 = min(record["seconds"] for (chunk, _), record in row.items() if chunk == _UNIFIED_CHUNK)
            unified[matrix] = peers[matrix][vendor] / at_32
            best[matrix] = peers[matrix][vendor] / min(record["seconds"] for record in row.values())
    if vendor is None or not unified:
        return None
    worst = max(1 - unified[matrix] / best[matrix] for matrix in unified)
    name, color = _style(vendor)[0], _style("sell")[1]
    title = rf"SELL-32-$\sigma$ loses at most {worst:.0%} to the best C and $\sigma$ of a matrix"
    figure, axes = _axes("", f"speed-up over {name}", title)
    figure.set_figwidth(min(14, max(7.2, 0.5 * len(unified))))
    axes.grid(visible=False)
    series: list[BarSeries] = [
        (r"C = 32, best $\sigma$", {"color": color}, unified),
        (r"best C and $\sigma$", {"color": color, "alpha": 0.45}, best),
    ]
    _plot_bars(axes, list(unified), series)
    axes.axhline(1, color=_GREY, linestyle="--", linewidth=1, label=name)
    _legend(figure, axes)
    return figure


def figure_row_length_band(records: Records, limits: Limits) -> Figure | None:
    """Draw GFLOP/s of CSR and SELL against the mean row length, and the band that memory traffic allows.

    Notes
    -----
    After Kreutzer et al. (2014), figure 6. A product moves ``(12 / beta + 8 alpha + 8 / mean) / 2`` bytes a flop: a value
    and a column index a nonzero, ``alpha`` loads of x, and one entry of y a row. The band lies between x loaded once
    (``alpha = 1 / mean``) and x loaded for each nonzero (``alpha = 1``), with ``beta = 1``, no padding.
    """
    matrices = _matrices(records)
    points: dict[str, list[tuple[float, float]]] = {"csr": [], "sell": []}
    for name, row in _format_seconds(records).items():
        matrix = matrices[name]
        mean = matrix.get("mean_row") or matrix["nonzeros"] / matrix["rows"]
        for format_name in points:
            if format_name in row:
                points[format_name].append((mean, _gflops(matrix["nonzeros"], row[format_name])))
    bandwidth = limits.get("read_GBps")
    if not bandwidth or not any(points.values()):
        return None
    title = f"CSR and SELL in the band of the model at {bandwidth:.0f} GB/s"
    figure, axes = _axes("mean row length, nonzeros", "GFLOP/s", title)
    axes.set_xscale("log")
    longest = max(mean for row_points in points.values() for mean, _ in row_points)
    means = np.geomspace(1, max(2.0, 1.5 * longest), 100)  # a row of less than a nonzero loads x less often than once
    once, each = (2 * bandwidth / (12 + 8 * alpha + 8 / means) for alpha in (1 / means, 1.0))
    axes.fill_between(means, each, once, color=_GREY, alpha=0.2, linewidth=0)
    axes.plot(means, once, color=_GREY, linewidth=1.2, label=r"x loaded once, $\alpha$ = 1 / mean")
    axes.plot(means, each, color=_GREY, linewidth=1.2, linestyle="--", label=r"x loaded each time, $\alpha$ = 1")
    for format_name, row_points in points.items():
        _plot_points(axes, format_name, row_points)
    axes.set_ylim(bottom=0)
    _plain_log(axes.xaxis)
    _legend(figure, axes)
    return figure


def figure_performance_profile(records: Records, limits: Limits) -> Figure | None:
    """Draw on which share of the matrices each format and peer is within a factor of the fastest of them all.

    Notes
    -----
    The performance profile of Dolan and More (2002). What was not measured for a matrix counts as infinitely slow there.
    At least three matrices, and two formats or peers, are needed.
    """
    table = _all_seconds(records)
    solvers, peers = _solvers(table), _solvers(_peer_seconds(records))
    if len(table) < 3 or len(solvers) < 2:
        return None
    title = f"Who is near the fastest on {len(table)} matrices"
    figure, axes = _axes("within this factor of the fastest", "share of the matrices, %", title)
    for solver in solvers:
        ratios = np.array([row.get(solver, np.inf) / min(row.values()) for row in table.values()])
        factors = np.unique([1.0, *ratios[ratios <= _LARGEST_FACTOR], _LARGEST_FACTOR])
        shares = [100 * float(np.mean(ratios <= factor)) for factor in factors]
        label, color, marker = _style(solver)
        dashes = "--" if solver in peers else "-"
        axes.step(
            factors, shares, where="post", color=color, linestyle=dashes, marker=marker, markersize=4, label=label
        )
    axes.set(xlim=(0.95, _LARGEST_FACTOR), ylim=(-2, 103))
    _legend(figure, axes)
    return figure


def figure_fraction_of_roofline(records: Records, limits: Limits) -> Figure | None:
    """Draw the fraction of the memory roofline that each format reaches, by matrix, a panel for each number of vectors."""
    bandwidth = limits.get("read_GBps")
    panels: dict[int, dict[str, dict[str, float]]] = {}  # by vectors, format and matrix
    for record in records:
        floor = record.get("floor_seconds") or (bandwidth and record["bytes"] / (1e9 * bandwidth))
        if floor and _is_default(record):
            row = panels.setdefault(record["columns"], {}).setdefault(record["format"], {})
            row.setdefault(record["matrix"]["name"], floor / record["seconds"])
    if not panels:
        return None
    shown = {name for formats in panels.values() for row in formats.values() for name in row}
    matrices = [name for name in _matrices(records) if name in shown]
    solvers = _solvers({str(columns): dict.fromkeys(formats, 0.0) for columns, formats in panels.items()})
    height = min(16, max(3, 1.2 + 0.1 * len(matrices) * (len(solvers) + 1)))
    figure = Figure(figsize=(min(16, 3.2 + 3 * len(panels)), height), layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (columns, formats) in zip(every, sorted(panels.items()), strict=True):
        series: list[BarSeries] = [
            (_style(solver)[0], {"color": _style(solver)[1]}, formats.get(solver, {})) for solver in solvers
        ]
        _plot_bars(axes, matrices, series, horizontal=True)
        axes.axvline(1, color=_GREY, linestyle="--", linewidth=1)
        axes.set_title("one vector" if columns == 1 else f"{columns} vectors", fontsize=9)
    figure.suptitle("How near each product comes to the time that memory allows")
    figure.supxlabel("floor / measured seconds", fontsize=9)
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return figure


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
    """Write the pictures that the records hold data for as PNG files, and return their paths.

    Parameters
    ----------
    records : sequence of mappings
        Benchmark records of products ``Y = A X``, others are passed over; what a record lacks is left out of the
        pictures. Where a matrix has several times of a peer, the least is compared with.
    limits : mapping
        ``read_GBps``, the measured bandwidth; pictures of the model need it.
    folder : path
        Made if it does not exist.
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
