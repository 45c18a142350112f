"""Draw docs/laplacians.png from what ``benchmarks/laplacians.py`` measured.

python docs/draw_laplacians.py [benchmarks/results/laplacians-h200.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

_HERE = Path(__file__).parent


def _edges(records: dict[str, Any], kind: str) -> list[int]:
    return sorted(int(name.rpartition("-")[2]) for name in records if name.startswith(f"{kind}/"))


def main() -> None:
    """Draw the three figures side by side."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else _HERE.parent / "benchmarks/results/laplacians-h200.json"
    records = {entry["name"]: entry for entry in json.loads(path.read_text(encoding="utf-8"))["records"]}
    figure, (products, solves, coarse) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")

    def line(axes: Any, kind: str, label: str, style: str, value: Any) -> None:
        edges = _edges(records, kind)
        axes.plot(
            [edge**3 / 1e6 for edge in edges],
            [value(records[f"{kind}/laplace7-{edge}"]) for edge in edges],
            style,
            label=label,
        )

    line(products, "spmv", "penstock, CSR", "o-", lambda entry: entry["gflops"])
    if records[f"spmv/laplace7-{_edges(records, 'spmv')[0]}"]["peers"]:
        line(products, "spmv", "cuSPARSE", "s--", lambda entry: entry["peer_gflops"]["cusparse"])
        forward = "gauss_seidel/forward/elements"
        line(solves, forward, "cuSPARSE, forward", "s--", lambda entry: entry["peer_gflops"]["cusparse"])
        line(coarse, "galerkin/RAP", "cuSPARSE", "s--", lambda entry: entry["peers"]["cusparse"])
        line(coarse, "galerkin/RAP", "penstock, 2 CPU cores", "^:", lambda entry: entry["peers"]["2 cores"])
    for direction, mark in (("forward", "o"), ("backward", "v")):
        for way, dash in (("elements", "-"), ("levels", "-.")):
            kind = f"gauss_seidel/{direction}/{way}"
            line(solves, kind, f"{direction}, by {way}", mark + dash, lambda entry: entry["gflops"])
    line(coarse, "galerkin/RAP", "penstock", "o-", lambda entry: entry["seconds"])
    products.set(title="Product with a vector", ylabel="GFLOPS", ylim=(0, None))
    solves.set(title="Triangular solves of Gauss-Seidel", ylabel="GFLOPS", ylim=(0, None))
    coarse.set(title="Galerkin product R (A P)", ylabel="seconds", yscale="log")
    for axes in (products, solves, coarse):
        axes.set(xlabel="million rows of a 7-point Laplacian", xscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(_HERE / "laplacians.png", dpi=130)


if __name__ == "__main__":
    main()
