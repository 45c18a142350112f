"""Benchmark pages: for every file in benchmarks/results a table of all its records, and a chart of those that have peers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from readme_table import seconds_text  # of benchmarks/

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MOST_ROWS = 26  # of a chart

# In the order of the page: what was measured, and which of its records a chart shows (all with peers by default).
BENCHMARKS = {
    "coarse_level": ("Solves with a coarse level", "To a true residual of 1e-8, set-up apart.", r"."),
    "call": (
        "Whole calls",
        "From the caller's arrays to the solution, against upload and `cg` of CuPy or SciPy.",
        r".",
    ),
    "compilation": (
        "The first call on a machine",
        "With empty caches of compiled kernels; as its floor the first call of a process that finds them filled.",
        None,
    ),
    "prepared": ("A prepared system", "A further solve, and new values, against setting everything up again.", None),
    "modes": ("The lowest modes", "Whole calls of `penstock.eigsh`, against LOBPCG and shift-invert of others.", None),
    "wavefront": ("Streamed solves with many powers of A a sweep", "Solves to 1e-8, and single sweeps.", r"/solve/"),
    "wavefront_large": ("One load on a matrix of 211.7 GB", "26 billion nonzeros on one GPU of 141 GB.", None),
    "multigrid": ("Multigrid in memory", "Solves to 1e-8, against PyAMG on a core of the same machine.", r"."),
    "hard_matrices": (
        "Hard matrices",
        "Whole calls on a GPU: jumps, stretched meshes, plates; in memory and streamed.",
        None,
    ),
    "streamed_systems": (
        "Sweeps of real systems",
        "Set up and solved with a quarter of the bytes of the values: jumps, layers, plates, graphs, tetrahedra in random order.",
        None,
    ),
    "precision": (
        "An image in float32 of a matrix that does not fit",
        "Solves in memory, and with storage for 55 % of half of the matrix.",
        r".",
    ),
    "precision_disk": (
        "A matrix on a disk, with values in two planes",
        "Images of a cube that is read from a disk, and the cube read in every iteration.",
        None,
    ),
    "precision_large": ("An image in 16 bits of a large matrix", "With storage for a third of its stored half.", None),
    "cg": ("Conjugate gradients", "An iteration of `cg` with Jacobi, and whole solves with many loads.", r"^cg/"),
    "experiment": ("A whole run from a YAML file", "To 1e-8, against the solve in memory and other libraries.", r"."),
    "compare": ("The demo in five ways", "`penstock compare examples/cantilever.yaml`.", None),
    "spmv": ("Products with a vector", "One product, against cuSPARSE or SciPy and others.", r"^spmv/.*(cube|laplace)"),
    "stream": ("Sweeps over a streamed matrix", "Against the same sweep without overlap.", r"."),
    "stream_large": ("A sweep over a matrix of 211.7 GB", "From host memory, 26 billion nonzeros.", None),
    "overlap": (
        "Transfers and kernels overlapped",
        "Several products with each subdivision, overlap off, on.",
        r"/off/s16/",
    ),
    "overlap_block_krylov": ("Overlap with blocks of vectors", "As block Krylov methods have them.", r"/off/s32/"),
    "heterogeneous": ("A GPU and its host's CPU together", "An iteration of `cg` with block Jacobi.", r"."),
    "triangular": ("Triangular solves", "And Gauss-Seidel passes.", r"^trsv/"),
    "products": ("Products of sparse matrices", "Against cuSPARSE.", r"."),
    "laplacians": ("Kernels as a Laplacian grows", "7-point stencils.", r"laplace7-(128|256)$"),
    "distributed": ("Ranks", "Milliseconds of an iteration on one and two GPUs.", None),
    "busy": ("Beside other processes", "A streamed solve, against threads that spin.", r"."),
    "busy_cores": (
        "Beside other processes on many cores",
        "A solve in memory, against all threads all the time.",
        r".",
    ),
    "zoo": (
        "Systems as people have them",
        "CPU seconds of whole calls, set-up included; [what they are](real-systems.md).",
        r".",
    ),
    "on_arrival": (
        "Matrices assembled where they are used",
        "Assembly on a GPU, and solves with nothing of the matrix stored, against the matrix in memory and streamed.",
        r"/solve/",
    ),
    "on_arrival_large": (
        "Up to a billion unknowns on one GPU",
        "Matrices of 177 and 354 GB that are never stored.",
        None,
    ),
    "assembly": ("Assembly", "Of stiffness matrices.", None),
}


def write(folder: Path) -> None:
    """Write ``benchmarks.md``, a page and perhaps a chart for every file, ``benchmarks/*.md`` and ``*.png``."""
    pages = folder / "benchmarks"
    pages.mkdir(parents=True, exist_ok=True)
    files = sorted(RESULTS.glob("*.json"))
    unknown = [path.name for path in files if path.stem.rpartition("-")[0] not in BENCHMARKS]
    if unknown:
        raise ValueError(f"name {', '.join(unknown)} in BENCHMARKS of {__file__}")
    lines: list[str] = []
    for benchmark, (title, what, chart) in BENCHMARKS.items():
        lines += [f"## {title}", "", what, ""]
        for path in sorted(RESULTS.glob(f"{benchmark}-*.json"), key=lambda path: ("h200" not in path.stem, path.stem)):
            data = json.loads(path.read_text(encoding="utf-8"))
            records = [entry for entry in data["records"] if "seconds" in entry]
            drawn = _drawn(records, chart)
            if drawn:
                _draw(pages / f"{path.stem}.png", drawn, path.stem)
            _write(pages / f"{path.stem}.md", _file_page(title, path, data, records, drawn))
            lines += [f"{_machine(data)}: [{_count(records)}](generated/benchmarks/{path.stem}.md)", ""]
            if drawn:
                lines += [f"![Seconds of {title.lower()}](generated/benchmarks/{path.stem}.png)", ""]
            else:
                lines += _table(records)
    stems = [f"generated/benchmarks/{path.stem}" for path in files]
    _write(folder / "benchmarks.md", "\n".join([*lines, "```{toctree}", ":hidden:", "", *stems, "```", ""]))


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _count(records: list[Any]) -> str:
    return "its record" if len(records) == 1 else f"all {len(records)} records"


def _drawn(records: list[dict[str, Any]], pattern: str | None) -> list[dict[str, Any]]:
    """Return the records of a chart: those with peers, no more than it has room for."""
    if pattern is None:
        return []
    chosen = [entry for entry in records if entry.get("peers") and re.search(pattern, entry["name"])]
    step = -(-len(chosen) // MOST_ROWS) or 1
    return chosen[::step]


def _draw(path: Path, records: list[dict[str, Any]], title: str) -> None:
    """Draw a row for each record: penstock filled, its peers hollow, the floor a bar, over seconds."""
    peers = list(dict.fromkeys(name for entry in records for name in entry["peers"]))
    markers = dict(zip(peers, "sD^v<>ph*XdP+x|_1234", strict=False))
    height = 1.6 + 0.25 * len(records)
    figure, axes = plt.subplots(figsize=(9.0, height), layout="constrained")
    for row, entry in enumerate(records):
        axes.plot(entry["seconds"], row, "o", color="tab:blue", zorder=3, label="penstock" if row == 0 else None)
        if entry.get("floor_seconds"):
            axes.plot(entry["floor_seconds"], row, "|", color="0.4", ms=11, label="floor" if row == 0 else None)
        for name, seconds in entry["peers"].items():
            axes.plot(seconds, row, markers.get(name, "o"), mfc="none", color="tab:orange", label=name)
    handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))  # one of each name
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=5, fontsize="small", frameon=False
    )
    axes.set(xscale="log", xlabel=f"seconds ({title})", ylim=(len(records) - 0.5, -0.5))
    axes.set_yticks(range(len(records)), [entry["name"] for entry in records], fontsize="small")
    axes.grid(axis="x", alpha=0.4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _machine(data: dict[str, Any]) -> str:
    """Return where and when a file was measured, in a line."""
    machine = data["machine"]
    gpus = [gpu["name"] if isinstance(gpu, dict) else str(gpu) for gpu in machine.get("gpus", ())]
    counted = [f"{gpus.count(name)} x {name}" if gpus.count(name) > 1 else name for name in dict.fromkeys(gpus)]
    return f"On {', '.join(counted)}" if gpus else f"On {machine['cores']} CPU core{'s' * (machine['cores'] > 1)}"


def _file_page(title: str, path: Path, data: dict[str, Any], records: list[dict[str, Any]], drawn: list[Any]) -> str:
    limits = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in data.get("limits", {}).items())
    lines = [f"# {path.stem}: {title.lower()}", "", f"Measured on {data['date']}, commit `{data['commit'][:10]}`.", ""]
    if limits:
        lines += [f"Limits measured beside it: {limits}.", ""]
    lines += [
        "Times are medians. *Floor* is the least time that the measured limits allow for the bytes that move.",
        "",
    ]
    if drawn:
        lines += [f"![Seconds]({path.stem}.png)", ""]
    lines += _table(records)
    described = [f"- {name}: {_plain(value)}" for name, value in {**data["machine"], **data["versions"]}.items()]
    return "\n".join([*lines, "## Machine and versions", "", *described, ""])


def _table(records: list[dict[str, Any]]) -> list[str]:
    """Return the records as a table."""
    lines = ["| record | median | from, to | times floor | peers |", "|---|---|---|---|---|"]
    for entry in records:
        floor = entry.get("floor_seconds")
        peers = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in entry.get("peers", {}).items())
        spread = ", ".join(seconds_text(seconds) for seconds in entry.get("spread", ()))
        factor = f"{entry['seconds'] / floor:.2f}" if floor else ""
        lines.append(f"| `{entry['name']}` | {seconds_text(entry['seconds'])} | {spread} | {factor} | {peers} |")
    return [*lines, ""]


def _plain(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list | dict) else str(value)
