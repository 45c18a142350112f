"""Styles of formats and peers, and the axes, points and bars of benchmark pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from penstock.experiments.formats.peers import PEER_LABELS
from penstock.spmv import format_named, format_names

BarSeries = tuple[str, dict[str, Any], dict[str, float]]  # label, style, value of each group

GREY = "#8a8f98"
#: More matrices are not named on an axis or in a legend.
NAMED_MATRICES = 24
#: Colours and markers of formats in the order of the registry. Colours that look alike to some people differ in lightness, and
#: their markers differ.
_FORMAT_STYLES = (
    ("#009e73", "^"), ("#e3d23c", "P"), ("#1f6fb2", "o"), ("#d98bb4", "v"), ("#8fd0f0", "D"), ("#e07b28", "s"),
    ("#33237f", ">"), ("#7a1f4f", "<"), ("#7d7a1c", "p"), ("#a6761d", "h"), ("#5f6f52", "*"), ("#b2182b", "H"),
)  # fmt: skip
_PEER_STYLES = (("#1c1c1c", "X"), (GREY, "d"))
_OTHER_STYLES = (("#a6761d", "h"), ("#5f6f52", "*"), ("#b2182b", "H"), ("#4d4d4d", "8"))


def style_of(competitor: str) -> tuple[str, str, str]:
    """Return label, colour and marker of a format or a peer; the same in all pictures, also for unknown names."""
    formats, peers = format_names(), list(PEER_LABELS)
    if competitor in formats:
        color, marker = _FORMAT_STYLES[formats.index(competitor) % len(_FORMAT_STYLES)]
        return format_named(competitor).traits.label, color, marker
    if competitor in PEER_LABELS and peers.index(competitor) < len(_PEER_STYLES):
        return PEER_LABELS[competitor], *_PEER_STYLES[peers.index(competitor)]
    color, marker = _OTHER_STYLES[crc32(competitor.encode()) % len(_OTHER_STYLES)]
    return PEER_LABELS.get(competitor, competitor.replace("_", " ")), color, marker


def new_axes(xlabel: str, ylabel: str, title: str) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    return figure, axes


def add_legend(figure: Figure, axes: Axes) -> None:
    """Put a legend beside the axes, where it covers no data."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)


def use_plain_log(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers, even if it spans less than a decade."""
    low, high = sorted(axis.get_view_interval())
    if high < 4 * low:
        axis.set_major_locator(MaxNLocator(6))
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def plot_points(axes: Axes, competitor: str, points: Sequence[tuple[float, float]]) -> None:
    """Draw the points of a format or a peer in its style."""
    if points:
        label, color, marker = style_of(competitor)
        across, up = zip(*sorted(points), strict=True)
        axes.plot(
            across, up, marker, color=color, markersize=6, markeredgecolor="white", markeredgewidth=0.5, label=label
        )


def plot_profile(
    axes: Axes,
    seconds: Iterable[Mapping[str, float]],
    competitors: Iterable[str],
    largest: float,
    style: Callable[[str, int], dict[str, Any]],
) -> None:
    """Draw the percentage of problems on which each competitor is within a factor of the fastest.

    The performance profile of Dolan and More (2002).

    Parameters
    ----------
    axes : Axes
    seconds : iterable of dict
        Of each problem, by competitors. One that is missing counts as infinitely slow.
    competitors : iterable of str
    largest : float
        Factor at which the curves end.
    style : callable
        Returns the line's style of a competitor at a place, from the uppermost curve, 0, to the lowest: in this order the legend
        reads as the picture does.
    """
    rows = list(seconds)
    best = [min(row.values(), default=1.0) for row in rows]
    ratios = {
        name: np.array([row.get(name, np.inf) / least for row, least in zip(rows, best, strict=True)])
        for name in competitors
    }
    areas = {name: float(np.clip(largest - of, 0, None).sum()) for name, of in ratios.items()}
    for place, name in enumerate(sorted(ratios, key=areas.__getitem__, reverse=True)):
        factors = np.unique([1.0, *ratios[name][ratios[name] <= largest], largest])
        shares = [100 * float(np.mean(ratios[name] <= factor)) for factor in factors]
        axes.step(factors, shares, where="post", **style(name, place))
    axes.set(xlim=(0.95, largest), ylim=(-2, 103))


def plot_bars(axes: Axes, groups: Sequence[str], series: Sequence[BarSeries], horizontal: bool = False) -> None:
    """Draw one bar for each value of each series, side by side in groups; few groups are named, many only counted."""
    thickness = 0.8 / len(series)
    for number, (label, style, values) in enumerate(series):
        shift = (number - (len(series) - 1) / 2) * thickness
        places = [place + shift for place, group in enumerate(groups) if group in values]
        lengths = [values[group] for group in groups if group in values]
        draw = axes.barh if horizontal else axes.bar
        draw(places, lengths, thickness, label=label, **style)
    names = list(groups) if len(groups) <= NAMED_MATRICES else []
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
