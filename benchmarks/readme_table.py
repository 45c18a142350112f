"""Write the README's table from the records: python benchmarks/readme_table.py [--check]."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- made by benchmarks/readme_table.py -->\n", "<!-- end -->"


def seconds_text(seconds: float) -> str:
    """Return a time with three digits and a unit."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def records(name: str) -> dict[str, dict[str, Any]]:
    """Return the records of a file by their names."""
    data = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return {entry["name"]: entry for entry in data["records"]}


def both(entry: dict[str, Any]) -> str:
    """Return set-up and solve of a record."""
    return f"{seconds_text(entry['setup_seconds'])} + {seconds_text(entry['seconds'])}"


def share(entry: dict[str, Any]) -> str:
    """Return the part of the matrix that a streamed solve may hold."""
    return f"{100 * entry['budget_bytes'] / entry['matrix_bytes']:.0f} % of what is stored"


def whole_calls() -> list[tuple[str, str, str]]:
    """Return the rows of calls from the caller's arrays to the solution."""
    calls = records("call-h200")
    cube, laplace = calls["call/memory/scipy_csr/cube128-dof3"], calls["call/memory/scipy_csr/laplace7-256"]
    return [
        (
            "whole call, from SciPy arrays to x: elasticity, 6.3 million unknowns, H200",
            f"CuPy, upload and `cg`, {seconds_text(cube['peers']['cupy_csr cg'])}",
            seconds_text(cube["seconds"]),
        ),
        (
            "the same with memory for a sixth of these arrays",
            "does not fit",
            seconds_text(calls["call/streamed/scipy_csr/cube128-dof3"]["seconds"]),
        ),
        (
            "whole call: Poisson, 7-point, 16.8 million unknowns, H200",
            f"CuPy, upload and `cg`, {seconds_text(laplace['peers']['cupy_csr cg'])}",
            seconds_text(laplace["seconds"]),
        ),
    ]


def with_image() -> tuple[str, str, str]:
    """Return the row of a matrix of which an image in 16 bits is in memory."""
    images = records("precision_large-h100")
    image, every = (images[f"precision/streamed/{name}/cube320-dof3"] for name in ("int16", "float64"))
    return (
        f"elasticity, {image['unknowns'] / 1e6:.0f} million unknowns, memory for a third of what is stored, H100",
        f"streamed in every iteration, also ours, {both(every)}",
        both(image),
    )


def from_elements() -> list[tuple[str, str, str]]:
    """Return the rows of matrices that are assembled where they are used."""
    solve = records("on_arrival-h200")["on_arrival/solve/cube256-dof3"]
    large = records("on_arrival_large-h200")["on_arrival/large/billion"]
    memory = f"{seconds_text(solve['peer_setup_seconds']['memory'])} + {seconds_text(solve['peers']['memory'])}"
    return [
        (
            "elasticity, 50 million unknowns, nothing of the matrix stored, H200",
            f"in memory, also ours, {memory}",
            both(solve),
        ),
        (
            f"elasticity, {large['unknowns'] / 1e6:.0f} million unknowns, a matrix of {large['bytes'] / 1e9:.0f} GB that is not "
            "stored, H200",
            "does not fit",
            both(large),
        ),
    ]


def table() -> str:
    """Return the table; a sum is set-up + solve."""
    gpu, cpu, waves = records("coarse_level-h200"), records("coarse_level-cpu2"), records("wavefront-h200")
    in_memory, streamed = gpu["coarse_level/memory/cube128-dof3"], gpu["coarse_level/streamed/cube128-dof3"]
    host, disk = cpu["coarse_level/memory/cube48-dof3"], cpu["coarse_level/streamed/cube48-dof3"]
    large = records("coarse_level-h200x2")["coarse_level/streamed/cube300-dof6"]
    loads = records("cg-h200")["block_cg/memory/cube128-dof3/k32"]
    grid, products = records("multigrid-h200")["multigrid/laplace7-256"], records("spmv-h200")
    half, blocks = products["spmv/symmetric_bsr/cube128-dof3"], products["spmv/sliced_bsr/cube128-dof3"]
    plain = waves["wavefront/solve/streamed/cube128-dof3"]["seconds"]
    amg = host["amg"]
    rows = [
        *whole_calls(),
        (
            "elasticity, 6.3 million unknowns, H200",
            f"CuPy `cg` {seconds_text(in_memory['peers']['cupy_csr'])}",
            both(in_memory),
        ),
        (
            f"the same, memory for {share(streamed)}",
            f"streamed Jacobi `cg`, also ours, {seconds_text(plain)}",
            both(streamed),
        ),
        (
            f"elasticity, {large['unknowns'] / 1e6:.0f} million unknowns, {large['matrix_bytes'] / 1e9:.0f} GB, one H200 "
            f"of 141 GB, residual {large['rtol']:.0e}",
            "does not fit",
            both(large),
        ),
        with_image(),
        *from_elements(),
        (
            "Poisson, 7-point, 16.8 million unknowns, H200",
            f"PyAMG, one core of that machine, {both(grid['pyamg'])}",
            both(grid),
        ),
        (
            "32 random loads, 6.3 million unknowns, Jacobi, H200",
            f"CuPy `cg` one by one {seconds_text(loads['peers']['cupy_csr'])}",
            seconds_text(loads["seconds"]),
        ),
        (
            "one product, 3 x 3 blocks, 6.3 million rows, H200",
            f"cuSPARSE CSR {seconds_text(blocks['peers']['cusparse_csr'])}",
            f"{seconds_text(blocks['seconds'])}; half stored {seconds_text(half['seconds'])}",
        ),
        (
            "elasticity, 332,000 unknowns, 2 CPU cores",
            f"SciPy `cg` {seconds_text(host['peers']['scipy_csr'])}; PyAMG {both(amg['pyamg'])}; "
            f"PETSc GAMG {both(amg['gamg'])}",
            both(host),
        ),
        (f"the same from disk, memory for {share(disk)}", "no peer measured", both(disk)),
    ]
    lines = [
        "| solves to a true residual of 1e-8: whole calls, or set-up + solve | otherwise | penstock |",
        "|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def main(arguments: list[str]) -> int:
    """Write the table between the markers, or say whether it is up to date."""
    text = README.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{README} lacks the markers {BEGIN.strip()} and {END}")
        return 2
    wanted = before + begin + table() + end + after
    if "--check" in arguments:
        if wanted != text:
            print("the README's table differs from the records; run: python benchmarks/readme_table.py")
        return int(wanted != text)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
