"""The page on systems as engineers and researchers have them: what each family is, what solved it, and performance profiles."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from readme_table import seconds_text  # of benchmarks/
from zoo.families import FAMILIES  # of benchmarks/
from zoo.peers import DIRECT
from zoo.summary import seconds_of_solvers, summary

from penstock.experiments.formats.drawing import add_legend, plot_profile, use_plain_log
from site_pages.benchmark_pages import RESULTS

SIZES = {"small": "15,000 to 40,000 unknowns", "large": "80,000 to 115,000 unknowns"}
_LARGEST_FACTOR = 50.0
_COLOURS = {"penstock": "#1f6fb2", "gamg": "#e07b28", "boomeramg": "#009e73", "pyamg": "#d98bb4", "cholmod": "#1c1c1c"}
_LABELS = {"gamg": "GAMG (PETSc)", "boomeramg": "BoomerAMG (hypre)", "pyamg": "PyAMG", "cholmod": "CHOLMOD"}


def write(folder: Path) -> None:
    """Write ``zoo.md`` and a profile for every file of results."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for path in sorted(RESULTS.glob("zoo-*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        picture = f"{path.stem}.png"
        draw(folder / picture, data["records"])
        lines += [
            "## On one core",
            "",
            f"Of {data['machine']['processor']}, on {data['date']}, commit `{data['commit'][:10]}`.",
            "",
        ]
        lines += [f"![Share of systems solved within a factor of the fastest CPU time](generated/{picture})", ""]
        for size, unknowns in SIZES.items():
            records = [entry for entry in data["records"] if entry["name"].startswith(f"zoo/{size}/")]
            if records:
                lines += [
                    f"### {size.capitalize()}: {unknowns}",
                    "",
                    "```",
                    summary(records),
                    "```",
                    "",
                    *_table(records),
                ]
    lines += ["## What the families are", "", *(f"`{name}`\n: {_described(name)}\n" for name in FAMILIES)]
    (folder / "zoo.md").write_text("\n".join(lines), encoding="utf-8")


def _described(name: str) -> str:
    """Return a docstring in one line; names in it are those of a family's code, not of the site."""
    return " ".join((inspect.getdoc(FAMILIES[name]) or "").replace("``", "`").split())


def draw(path: Path, records: list[dict[str, Any]]) -> None:
    """Draw a performance profile for each size."""
    sizes = [size for size in SIZES if any(entry["name"].startswith(f"zoo/{size}/") for entry in records)]
    figure, panels = plt.subplots(
        1, len(sizes), figsize=(2 + 4.2 * len(sizes), 3.8), layout="constrained", squeeze=False
    )
    for axes, size in zip(panels[0], sizes, strict=True):
        rows = [seconds_of_solvers(entry) for entry in records if entry["name"].startswith(f"zoo/{size}/")]
        solvers = dict.fromkeys(name for row in rows for name in row)
        plot_profile(axes, rows, solvers, _LARGEST_FACTOR, _style)
        axes.set(xscale="log", xlabel="within this factor of the least CPU time", ylabel="systems solved, %")
        axes.set(title=f"{len(rows)} {size} systems")
        axes.grid(alpha=0.3)
        use_plain_log(axes.xaxis)
    add_legend(figure, panels[0][0])
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _style(name: str, place: int) -> dict[str, Any]:
    return {
        "color": _COLOURS.get(name, "#8a8f98"),
        "linestyle": "--" if name in DIRECT else "-",
        "linewidth": 2.4 if name == "penstock" else 1.4,
        "label": _LABELS.get(name, name),
    }


def _table(records: list[dict[str, Any]]) -> list[str]:
    """Return what solved each system, and in what CPU time."""
    lines = [
        "| family | unknowns | given | preconditioner | iterations | CPU | best iterative peer | CHOLMOD |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in records:
        iterative = {name: of for name, of in entry["peers"].items() if name not in DIRECT}
        best = min(iterative, key=iterative.__getitem__, default="")
        cells = [
            f"`{entry['name'].rpartition('/')[2]}`",
            f"{entry['unknowns']:,}",
            ", ".join(entry["given"]).replace("_", " ") or "nothing",
            entry.get("preconditioner", "").replace("_", " "),
            f"{entry['iterations']:,}" if entry["converged"] else "",
            seconds_text(entry["seconds"]) if entry["converged"] else "not solved",
            f"{best} {seconds_text(iterative[best])}" if best else "",
            seconds_text(entry["peers"]["cholmod"]) if "cholmod" in entry["peers"] else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]
