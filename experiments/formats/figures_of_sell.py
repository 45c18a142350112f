"""Pictures of SELL-C-sigma: its parameters, and the model of its traffic."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from penstock.experiments.formats.drawing import (
    GREY,
    NAMED_MATRICES,
    BarSeries,
    add_legend,
    new_axes,
    plot_bars,
    plot_points,
    style_of,
    use_plain_log,
)
from penstock.experiments.formats.record_tables import (
    DEFAULT_THREADS,
    Limits,
    Record,
    Records,
    format_seconds,
    gflops,
    matrices_of,
    peer_seconds,
    vendor_in,
)

_UNIFIED_CHUNK = 32


def _sell_records(records: Records) -> dict[str, dict[tuple[int, int], Record]]:
    """Return the fastest SELL record with one vector by matrix, then chunk height and sorting scope."""
    fastest: dict[str, dict[tuple[int, int], Record]] = {}
    for record in records:
        parameters = record.get("parameters") or {}
        chunk, scope = parameters.get("chunk_height"), parameters.get("sorting_scope")
        usual = record["columns"] == 1 and record.get("threads") in (None, DEFAULT_THREADS)
        if record["format"] == "sell" and usual and chunk and scope:
            row = fastest.setdefault(record["matrix"]["name"], {})
            if (chunk, scope) not in row or record["seconds"] < row[chunk, scope]["seconds"]:
                row[chunk, scope] = record
    return fastest


def figure_sorting_scope(records: Records, limits: Limits) -> Figure | None:
    """Draw chunk occupancy, traffic of x and time of SELL-C-sigma against sigma, one line per matrix.

    After Kreutzer, Hager, Wellein, Fehske and Bishop (2014), figure 5. Each matrix is drawn for C = 32, or, if it was measured
    there with fewer than two sorting scopes, for the chunk height with the most.
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
        ("alpha", r"$\alpha$, loads of x per nonzero", 1),
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
    panels[0].set(title=r"SELL-C-$\sigma$: effect of the sorting scope")
    panels[2].set_xscale("log", base=2)
    panels[2].set(xlabel=r"sorting scope $\sigma$, rows", yscale="log")
    use_plain_log(panels[2].yaxis)
    if len(lines) <= NAMED_MATRICES:
        add_legend(figure, panels[0])
    return figure


def figure_unified_sell(records: Records, limits: Limits) -> Figure | None:
    """Draw SELL-32-sigma with its best sigma and SELL with its best C and sigma, as speed-ups over the vendor.

    After Kreutzer et al. (2014), figure 4: the loss from one chunk height for all matrices. Matrices are drawn that were
    measured with C = 32 and with another chunk height.
    """
    peers = peer_seconds(records)
    vendor = vendor_in(peers)
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
    name, color = style_of(vendor)[0], style_of("sell")[1]
    title = rf"SELL-32-$\sigma$ loses at most {worst:.0%} to the best C and $\sigma$ of a matrix"
    figure, axes = new_axes("", f"speed-up over {name}", title)
    figure.set_figwidth(min(14, max(7.2, 0.5 * len(unified))))
    axes.grid(visible=False)
    series: list[BarSeries] = [
        (r"C = 32, best $\sigma$", {"color": color}, unified),
        (r"best C and $\sigma$", {"color": color, "alpha": 0.45}, best),
    ]
    plot_bars(axes, list(unified), series)
    axes.axhline(1, color=GREY, linestyle="--", linewidth=1, label=name)
    add_legend(figure, axes)
    return figure


def figure_row_length_band(records: Records, limits: Limits) -> Figure | None:
    """Draw GFLOP/s of CSR and SELL against the mean row length, and the band that memory traffic allows.

    After Kreutzer et al. (2014), figure 6. A product moves ``(12 / beta + 8 alpha + 8 / mean) / 2`` bytes a flop: a value and
    a column index a nonzero, ``alpha`` loads of x, and one entry of y a row. The band lies between x loaded once
    (``alpha = 1 / mean``) and x loaded for each nonzero (``alpha = 1``), with ``beta = 1``, no padding.
    """
    matrices = matrices_of(records)
    points: dict[str, list[tuple[float, float]]] = {"csr": [], "sell": []}
    for name, row in format_seconds(records).items():
        matrix = matrices[name]
        mean = matrix.get("mean_row") or matrix["nonzeros"] / matrix["rows"]
        for format_name in points:
            if format_name in row:
                points[format_name].append((mean, gflops(matrix["nonzeros"], row[format_name])))
    bandwidth = limits.get("read_GBps")
    if not bandwidth or not any(points.values()):
        return None
    title = f"CSR and SELL in the band of the model at {bandwidth:.0f} GB/s"
    figure, axes = new_axes("mean row length, nonzeros", "GFLOP/s", title)
    axes.set_xscale("log")
    longest = max(mean for row_points in points.values() for mean, _ in row_points)
    means = np.geomspace(1, max(2.0, 1.5 * longest), 100)  # a row of less than a nonzero loads x less often than once
    once, each = (2 * bandwidth / (12 + 8 * alpha + 8 / means) for alpha in (1 / means, 1.0))
    axes.fill_between(means, each, once, color=GREY, alpha=0.2, linewidth=0)
    axes.plot(means, once, color=GREY, linewidth=1.2, label=r"x loaded once, $\alpha$ = 1 / mean")
    axes.plot(means, each, color=GREY, linewidth=1.2, linestyle="--", label=r"x loaded each time, $\alpha$ = 1")
    for format_name, row_points in points.items():
        plot_points(axes, format_name, row_points)
    axes.set_ylim(bottom=0)
    use_plain_log(axes.xaxis)
    add_legend(figure, axes)
    return figure
