"""Draws docs/precision.png: sweeps over A against the memory, and the residual of solves with their sweeps marked.

python docs/draw_precision.py
"""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import penstock
from penstock.fem import Cantilever, LognormalMaterial

BEAM = Cantilever(nodes=(49, 9, 9), dof=3, material=LognormalMaterial(sigma=0.5))
HALF = BEAM.matrix("symmetric_bsr").nbytes
SHARES = (0.2, 0.25, 0.3, 0.34, 0.38, 0.42, 0.46, 0.5, 0.56, 0.6, 0.7, 0.8, 0.9)
COLORS = {"float64": "#777777", "int16": "#e07b28", "float32": "#1f6fb2"}


def solved(share: float, precision: str) -> tuple[str, Any]:
    """Return the precision of what is held in memory, and the result of a solve with a share of the bytes of the stored half."""
    b = np.random.default_rng(0).standard_normal(BEAM.shape[0])
    options = {"device": "cpu", "coordinates": BEAM.mesh.coordinates(), "memory": int(share * HALF)}
    seen: list[tuple[float, int]] = []
    result = penstock.solve(
        BEAM.matrix().to_csr(), b, **options, precision=precision,
        monitor=lambda record: seen.append((record.residual_norm, record.bytes_streamed)),
    )  # fmt: skip
    held = next(
        (name for name in ("float32", "int16") if f"image of the matrix in {name}" in result.explain()), "float64"
    )
    return held, (result, seen)


def draw() -> None:
    """Solve with every share of memory, and draw both figures beside each other."""
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for precision, marker in (("float64", "o"), ("auto", "s")):
        of_share = [(share, *solved(share, precision)) for share in SHARES]
        for name, color in COLORS.items():
            points = [(share, found[0].sweeps) for share, held, found in of_share if held == name]
            if points and (precision == "float64" or name != "float64"):
                label = "A in every iteration" if name == "float64" else f"an image in {name}"
                left.plot(*zip(*points, strict=True), marker, color=color, label=label)
    left.set(xlabel="memory, in bytes of the stored half of A", ylabel="sweeps over A", yscale="log", ylim=(0.8, None))
    left.legend(frameon=False, loc=(0.5, 0.55))
    for share, name in ((0.2, "float64"), (0.38, "int16"), (0.6, "float32")):
        _, (_, seen) = solved(share, "auto")
        norms, moved = zip(*seen, strict=True)
        iterations = np.arange(1, len(norms) + 1)
        right.semilogy(iterations, norms, color=COLORS[name], label=name)
        passes = [place for place in range(1, len(moved)) if moved[place] > moved[place - 1]]
        right.semilogy(iterations[passes], np.array(norms)[passes], "o", color=COLORS[name], markersize=4)
    right.set(xlabel="iteration", ylabel="residual, relative to b")
    right.legend(frameon=False, title="dots: A was read before")
    figure.savefig(Path(__file__).parent / "precision.png", dpi=150)


if __name__ == "__main__":
    draw()
