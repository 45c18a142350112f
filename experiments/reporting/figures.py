"""Draws the pictures of a run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from mpl_toolkits.mplot3d.art3d import Poly3DCollection

from penstock.fem import BoxMesh
from penstock.streaming import Timeline
from penstock.streaming.planning.timeline import SpanKind

_BLUE, _ORANGE, _GREEN, _GREY = "#1f6fb2", "#e07b28", "#3f8f5a", "#8a8f98"
_ROWS: dict[SpanKind, tuple[str, str]] = {
    "compute": ("kernels", _BLUE),
    "transfer": ("transfers", _ORANGE),
    "host": ("CPU", _GREEN),
    "read": ("disk", _GREY),
}
_LARGEST_DRAWN = 0.15  # of the longest side
_FACE_POINTS = 33  # most points drawn along a side of the box
_RESIDUAL = "‖r‖ / ‖b‖"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class _PowersOfTen(LogFormatter):
    """Labels of a logarithmic axis in plain characters: typesetting formulas takes longer than all the rest of a picture."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the label of a value, empty where the axis has enough of them."""
        if not super().__call__(x, pos) or not x > 0:
            return ""
        exponent = int(np.floor(np.log10(x) + 1e-9))
        factor = x / 10.0**exponent
        power = f"10{str(exponent).translate(_SUPERSCRIPTS)}"
        return power if abs(factor - 1) < 1e-6 else f"{factor:.3g}\N{MULTIPLICATION SIGN}{power}"


def _use_powers_of_ten(axis: Any) -> None:
    """Label a logarithmic axis as Matplotlib does, without formulas."""
    axis.set_major_formatter(_PowersOfTen())
    axis.set_minor_formatter(_PowersOfTen(labelOnlyBase=False))


def _save(figure: Figure, path: Path) -> None:
    # A tight box takes a further drawing; the constrained layout of flat pictures has no need of one.
    figure.savefig(path, dpi=150, bbox_inches=None if figure.get_layout_engine() else "tight")


def draw_convergence(path: Path, histories: list[list[float]], true_residual: float, rtol: float) -> None:
    """Draw the recursive residuals, one line per right-hand side, the largest true residual and the tolerance."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    several = len(histories) > 1
    axes.set(yscale="log")
    for number, norms in enumerate(histories):
        label = None if number else f"recursive residuals of {len(histories)}" if several else "recursive residual"
        axes.plot(norms, color=_BLUE, linewidth=0.7 if several else 1.2, alpha=0.6 if several else 1, label=label)
    if not any(norm > 0 for norms in histories for norm in norms):
        axes.set(yscale="linear")  # the right-hand side is zero
    if true_residual > 0:
        label = f"{'largest ' if several else ''}true residual {true_residual:.2e}"
        axes.plot([max(map(len, histories)) - 1], [true_residual], "o", color=_ORANGE, label=label)
    if rtol > 0:
        axes.axhline(rtol, color=_GREY, linestyle="--", linewidth=1, label=f"tolerance {rtol:.0e}")
    title = f"convergence of {len(histories)} right-hand sides" if several else "convergence"
    if axes.get_yscale() == "log":
        _use_powers_of_ten(axes.yaxis)
    axes.set(title=title, xlabel="iteration", ylabel=_RESIDUAL)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    _save(figure, path)


def draw_tip_deflections(path: Path, tips: dict[str, float], quantities: list[str], *, samples: bool) -> None:
    """Draw deflections: of load cases as bars, a panel for each quantity, of samples as a histogram with mean and deviation."""
    if samples:
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.subplots()
        values = np.array(list(tips.values()))
        axes.hist(values, bins=max(5, int(np.sqrt(values.size)) + 1), color=_BLUE, edgecolor="white")
        mean, deviation = values.mean(), values.std(ddof=1) if values.size > 1 else 0.0
        axes.axvspan(mean - deviation, mean + deviation, color=_ORANGE, alpha=0.2, label="mean and deviation")
        axes.axvline(mean, color=_ORANGE, label=f"mean {mean:.4g}")
        axes.set(xlabel=quantities[0], ylabel="samples", title=f"{values.size} samples of the load")
        axes.legend(frameon=False)
        axes.grid(alpha=0.3, axis="y")
    else:
        figure = _bars_of_load_cases(tips, quantities)
    _save(figure, path)


def _bars_of_load_cases(tips: dict[str, float], quantities: list[str]) -> Figure:
    distinct = list(dict.fromkeys(quantities))
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    widths = [1 + quantities.count(quantity) for quantity in distinct]
    panels = figure.subplots(1, len(distinct), squeeze=False, width_ratios=widths)[0]
    for axes, quantity in zip(panels, distinct, strict=True):
        values = {name: tip for (name, tip), of in zip(tips.items(), quantities, strict=True) if of == quantity}
        axes.bar([name.replace("_", " ", 1) for name in values], list(values.values()), color=_BLUE)
        axes.axhline(0, color=_GREY, linewidth=0.8)
        axes.set(ylabel=quantity)
        axes.margins(x=0.2)
        axes.tick_params(axis="x", rotation=45 if len(tips) > 6 else 0)
        axes.grid(alpha=0.3, axis="y")
    figure.suptitle("load cases")
    return figure


def draw_monte_carlo(path: Path, tips: list[float], quantity: str) -> None:
    """Draw mean and standard deviation of the deflection against the number of samples."""
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    values, count = np.array(tips), np.arange(1, len(tips) + 1)
    mean = np.cumsum(values) / count
    squares = np.array([values[:stop].var(ddof=1) if stop > 1 else np.nan for stop in count])
    error = np.sqrt(squares / count)
    above.plot(count, values, ".", color=_GREY, markersize=4, label="samples")
    above.plot(count, mean, color=_BLUE, label="mean")
    above.fill_between(count, mean - 2 * error, mean + 2 * error, color=_BLUE, alpha=0.2, label="two standard errors")
    above.set(ylabel=quantity)
    above.legend(frameon=False, fontsize=8)
    below.plot(count, np.sqrt(squares), color=_ORANGE)
    below.set(xlabel="samples of the stiffness", ylabel="standard deviation")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    _save(figure, path)


def draw_comparison(path: Path, records: list[dict[str, Any]], histories: list[list[float]]) -> None:
    """Draw the time of each variant of a solve as a bar, and its residuals over time."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    bars, curves = figure.subplots(1, 2, width_ratios=[1, 1.3])
    colors = [_GREY, "#c2456b", _BLUE, _ORANGE, _GREEN, "#7d5ba6", "#1b9aaa"]
    dashes = ["-", "--", "-.", ":", "-", "--", "-."]
    for place, (record, norms) in enumerate(zip(records, histories, strict=True)):
        color, seconds = colors[place % len(colors)], record["seconds"]
        bars.barh(place, seconds, color=color)
        bars.text(seconds, place, f" {seconds:.3g} s", va="center", fontsize=8)
        iterations = max(1, len(norms) - 1)
        times = [seconds * (k + 1) / (iterations + 1) for k in range(len(norms))]
        # Curves that cover each other show through each other's gaps.
        curves.plot(times, norms, dashes[place % len(dashes)], color=color, linewidth=1.5, label=record["title"])
    longest = max(record["seconds"] for record in records)
    bars.set(
        title="time of set-up and solve",
        xlabel="seconds",
        xlim=(0, 1.3 * longest),
        yticks=range(len(records)),
        yticklabels=[record["title"] for record in records],
    )
    bars.invert_yaxis()
    curves.set(title="residual", xscale="log", yscale="log", xlabel="seconds", ylabel=_RESIDUAL)
    _use_powers_of_ten(curves.xaxis)
    _use_powers_of_ten(curves.yaxis)
    figure.legend(*curves.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    for axes in (bars, curves):
        axes.grid(alpha=0.3, axis="x" if axes is bars else "both")
    _save(figure, path)


def draw_timeline(path: Path, timeline: Timeline, title: str = "") -> None:
    """Draw when transfers and kernels ran, one row each, with the numbers of the subdivisions."""
    figure = Figure(figsize=(9, 2.2), layout="constrained")
    axes = figure.subplots()
    draw_spans(axes, timeline)
    axes.set(xlabel="milliseconds", title=title)
    _save(figure, path)


def draw_spans(axes: Any, timeline: Timeline) -> None:
    """Draw the spans of a timeline, one row for each kind."""
    spans = timeline.spans
    kinds = [kind for kind in _ROWS if kind in ("compute", "transfer") or any(span.kind == kind for span in spans)]
    begin = min((span.start for span in spans), default=0.0)
    length = max((span.stop for span in spans), default=1.0) - begin
    for row, kind in enumerate(kinds):
        color, bars, edges = _ROWS[kind][1], [], []
        for span in spans:
            if span.kind != kind:
                continue
            start, width = (span.start - begin) * 1e3, (span.stop - span.start) * 1e3
            wide = width > 0.028 * length * 1e3
            bars.append((start, width))
            edges.append("white" if wide else color)  # a thin bar keeps its colour, and stays visible
            if wide:
                number = str(span.subdivision)
                axes.text(start + width / 2, row, number, ha="center", va="center", color="white", fontsize=7)
        # All bars of a row at once: one by one, hundreds of them would take longer than any other picture.
        axes.broken_barh(bars, (row - 0.38, 0.76), facecolor=color, edgecolor=edges, linewidth=0.4)
    axes.set_yticks(range(len(kinds)), [_ROWS[kind][0] for kind in kinds])
    axes.set_ylim(-0.6, len(kinds) - 0.4)
    axes.spines[["top", "right"]].set_visible(False)


def draw_deformed(path: Path, mesh: BoxMesh, solution: np.ndarray[Any, Any], title: str = "") -> None:
    """Draw the box, displaced by the solution ``(nodes, dof)`` and coloured by its magnitude; a temperature only colours it."""
    figure = Figure(figsize=(7, 4.5))
    axes: Any = figure.add_subplot(projection="3d")
    colors, moves = _draw_body(axes, mesh, solution)
    axes.set(title=title)
    label = f"displacement\n(the largest drawn as {100 * _LARGEST_DRAWN:.0f} % of the body)" if moves else "temperature"
    figure.colorbar(colors, ax=axes, shrink=0.7, pad=0.04, label=label)
    _save(figure, path)


#: How many modes are drawn.
MODES = 6


def draw_modes(path: Path, mesh: BoxMesh, shapes: Sequence[np.ndarray[Any, Any]], frequencies: Sequence[float]) -> None:
    """Draw the first modes, each as the box that it displaces or, for temperatures, colours."""
    columns = min(3, len(shapes))
    rows = -(-len(shapes) // columns)
    figure = Figure(figsize=(3.4 * columns, 3.0 * rows))
    for number, (shape, frequency) in enumerate(zip(shapes, frequencies, strict=False), start=1):
        axes: Any = figure.add_subplot(rows, columns, number, projection="3d")
        _draw_body(axes, mesh, shape)
        axes.set_title(f"{number}: {frequency:.4g}", fontsize=10)
    figure.suptitle("modes, with their frequencies")
    _save(figure, path)


def _draw_body(axes: Any, mesh: BoxMesh, solution: np.ndarray[Any, Any]) -> tuple[ScalarMappable, bool]:
    """Draw the box as a solution displaces or colours it; return the colours, and whether it moves."""
    values = np.asarray(solution, dtype=float).reshape(*mesh.node_counts, -1)
    moves = values.shape[-1] >= 3
    largest = max(float(values[..., :3].max()), -float(values[..., :3].min())) if moves else 0.0
    scale = _LARGEST_DRAWN * max(mesh.side_lengths) / largest if largest > 0 else 1.0
    # Only points that are drawn: those of the whole body may be millions.
    picks = [np.unique(np.linspace(0, count - 1, min(count, _FACE_POINTS)).astype(int)) for count in mesh.node_counts]
    lines = [
        np.linspace(0, length, count)[pick]
        for pick, count, length in zip(picks, mesh.node_counts, mesh.side_lengths, strict=True)
    ]
    polygons, colors = [], []
    for axis in range(3):
        for end in (0, -1):
            on_face = [pick[[end]] if side == axis else pick for side, pick in enumerate(picks)]
            at_rest = [line[[end]] if side == axis else line for side, line in enumerate(lines)]
            drawn = values[np.ix_(*on_face)].squeeze(axis)
            displacement = drawn[..., :3] if moves else np.zeros((*drawn.shape[:-1], 3))
            shade = np.linalg.norm(displacement, axis=-1) if moves else drawn[..., 0]
            face = np.stack(np.meshgrid(*at_rest, indexing="ij"), axis=-1).squeeze(axis) + scale * displacement
            quads = np.stack([face[:-1, :-1], face[1:, :-1], face[1:, 1:], face[:-1, 1:]], axis=2)
            polygons.append(quads.reshape(-1, 4, 3))
            colors.append(((shade[:-1, :-1] + shade[1:, :-1] + shade[1:, 1:] + shade[:-1, 1:]) / 4).ravel())
    color = np.concatenate(colors)
    norm = Normalize(float(color.min()), float(color.max()) or 1.0)
    quads = np.concatenate(polygons)
    shades = matplotlib.colormaps["viridis"](norm(color))
    shades[:, :3] *= _brightness(quads)[:, None]
    # Edges of the colour of their faces: without, the gaps between faces make a moire.
    axes.add_collection3d(Poly3DCollection(quads, facecolors=shades, edgecolors=shades, linewidths=0.4, clip_on=False))
    sides, starts = np.array(mesh.side_lengths), np.array(list(itertools.product((0, 1), repeat=3)))
    for start, stop in itertools.combinations(starts, 2):
        if moves and abs(stop - start).sum() == 1:  # the edges of the body at rest
            axes.plot(
                *np.stack([start * sides, stop * sides], axis=1),
                color=_GREY,
                linewidth=0.8,
                linestyle=":",
                clip_on=False,
            )
    corners = np.concatenate([quads.reshape(-1, 3), starts * sides])
    low, high = corners.min(axis=0), corners.max(axis=0)
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), zlim=(low[2], high[2]))
    axes.set_box_aspect(np.maximum(high - low, 1e-12), zoom=1.0)
    axes.view_init(elev=18, azim=-62)
    axes.set_axis_off()
    return ScalarMappable(norm=norm, cmap="viridis"), moves


def _brightness(quads: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return how bright faces are in light from above and the right, 0.7 to 1."""
    normals = np.cross(quads[:, 2] - quads[:, 0], quads[:, 3] - quads[:, 1])
    normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-300)
    return np.asarray(0.7 + 0.3 * np.abs(normals @ np.array([0.48, -0.36, 0.8])))
