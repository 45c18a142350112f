"""Draws docs/coarse_level.png from benchmarks/results/coarse_level-h200.json: iterations against the size of a cube.

python docs/draw_coarse_level.py
"""

import json
import re
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
WAYS = {
    "block_jacobi": ("block Jacobi", "#8a8f98"),
    "chebyshev": ("Chebyshev polynomial of degree 25", "#1f6fb2"),
    "coarse": ("with a coarse level: one sweep each", "#e07b28"),
}

records = json.loads((ROOT / "benchmarks/results/coarse_level-h200.json").read_text())["records"]
found = {}
for record in records:
    name = re.fullmatch(r"coarse_level/memory/cube(\d+)-dof3", record["name"])
    if name:
        found[3 * int(name[1]) ** 3] = {"coarse": record["iterations"], **record["peer_iterations"]}
sizes = sorted(found)
figure = Figure(figsize=(6.4, 3.6), layout="constrained")
axes = figure.subplots()
for way, (label, color) in WAYS.items():
    counts = {size: found[size][way] for size in sizes if way in found[size]}
    axes.plot(counts.keys(), counts.values(), "o-", color=color, label=label)
    for size, count in counts.items():
        axes.annotate(f"{count:,}", (size, count), (0, 6), textcoords="offset points", ha="center", fontsize=8)
axes.set(xscale="log", yscale="log", xlabel="unknowns of a cube, 3 a node", ylabel="iterations to 1e-8", ylim=(5, 5000))
axes.grid(alpha=0.3)
axes.legend(frameon=False, fontsize=8)
figure.savefig(Path(__file__).with_name("coarse_level.png"), dpi=150)
