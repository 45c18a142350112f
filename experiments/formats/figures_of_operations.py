"""The picture of ``penstock bench --operation``: milliseconds of each way and of other libraries."""

from __future__ import annotations

from pathlib import Path

from penstock.experiments.formats.drawing import GREY, BarSeries, new_axes, plot_bars, use_plain_log
from penstock.experiments.formats.record_tables import Records

_COLOURS = ("#009e73", "#1f6fb2", "#e07b28", "#33237f", "#d98bb4")
_TITLES = {
    "trsv": "A solve with the lower triangle",
    "spgemm": "The product of a matrix with itself",
    "galerkin": "The coarse matrix P'AP of multigrid",
}


def write_operation_figures(records: Records, folder: Path) -> list[Path]:
    """Write ``OPERATION.png`` for every operation of the records, and return the paths."""
    written = []
    for operation in dict.fromkeys(entry["operation"] for entry in records):
        of_ways: dict[str, dict[str, float]] = {}
        of_peers: dict[str, dict[str, float]] = {}
        for entry in records:
            if entry["operation"] == operation:
                of_ways.setdefault(entry["way"], {})[entry["matrix"]] = 1e3 * entry["seconds"]
                for peer, seconds in entry["peers"].items():
                    of_peers.setdefault(peer, {})[entry["matrix"]] = 1e3 * seconds
        series: list[BarSeries] = [
            (way, {"color": _COLOURS[number % len(_COLOURS)]}, values)
            for number, (way, values) in enumerate(of_ways.items())
        ]
        series += [(peer, {"color": GREY}, values) for peer, values in of_peers.items()]
        figure, axes = new_axes("milliseconds, shorter is better", "", _TITLES.get(operation, operation))
        axes.set_xscale("log")
        plot_bars(axes, list(dict.fromkeys(entry["matrix"] for entry in records)), series, horizontal=True)
        use_plain_log(axes.xaxis)
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
        written.append(folder / f"{operation}.png")
        figure.savefig(written[-1], dpi=150, bbox_inches="tight")
    return written
