"""Draws docs/wavefront.png from a schedule: which product runs on which subdivision, and what is in the slots.

python docs/draw_wavefront.py
"""

from pathlib import Path

from matplotlib.figure import Figure

from penstock.streaming import Compute, Schedule

SUBDIVISIONS, PRODUCTS = 14, 4
COLORS = ["#d7e6f4", "#8fb8dd", "#1f6fb2", "#e07b28"]

schedule = Schedule(SUBDIVISIONS, frozenset(), PRODUCTS + 1, overlap=True, sweeps="restart")
figure = Figure(figsize=(8.4, 3.9), layout="constrained")
axes = figure.subplots()
for step in schedule.sweep(0, stages=PRODUCTS):
    if isinstance(step, Compute):
        row = step.subdivision + step.stage
        axes.barh(row, 0.94, left=step.subdivision - 0.47, height=0.86, color=COLORS[step.stage])
        ink = "white" if step.stage > 1 else "black"
        axes.text(step.subdivision, row, f"{step.stage + 1}", ha="center", va="center", fontsize=8, color=ink)
for row in range(SUBDIVISIONS - 1):
    axes.barh(row, 0.94, left=row + 0.53, height=0.86, color="none", edgecolor="#8a8f98", linestyle=":", linewidth=1)
    axes.text(row + 1, row, "arrives", ha="center", va="center", fontsize=6, color="#8a8f98")
axes.set(
    xlabel="subdivision", ylabel="time", xticks=range(SUBDIVISIONS), yticks=[],
    title=f"One sweep, {PRODUCTS} products: number n is the n-th product of a vector, made on one subdivision",
)  # fmt: skip
axes.title.set_fontsize(10)
axes.invert_yaxis()
for side in ("top", "right", "left"):
    axes.spines[side].set_visible(False)
figure.savefig(Path(__file__).with_name("wavefront.png"), dpi=150)
