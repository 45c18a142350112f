"""What ``penstock bench`` leaves: a table on the terminal, a JSON file of all records, and figures."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from penstock.experiments.bandwidth import measure_memory
from penstock.experiments.environment import describe_environment
from penstock.experiments.matrix_files import NamedMatrix
from penstock.experiments.product_benchmark import compare_products, default_cases, study_cases
from penstock.experiments.product_figures import write_product_figures
from penstock.experiments.progress import Reporter
from penstock.spmv import CPU, CsrMatrix, Device, InputError
from penstock.spmv.formats.from_csr import LARGEST_BLOCK, is_symmetric
from penstock.spmv.structure import MatrixStructure

__all__ = ["bench_products", "detect_block_size", "records_table", "write_bench", "write_records"]

_BANDWIDTH_NBYTES = {"cpu": 256 << 20, "cuda": 4 << 30}


def bench_products(
    matrices: Sequence[NamedMatrix],
    *,
    device: Device | str = CPU,
    columns: Sequence[int] = (1,),
    study: bool = False,
    repeats: int = 11,
    reporter: Reporter | None = None,
    keep: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Compare all formats and peers on matrices; return limits, machine and records as the JSON file holds them.

    Parameters
    ----------
    matrices : sequence of NamedMatrix
    device : Device or str
    columns : sequence of int
        Numbers of vectors.
    study : bool
        Also the variants that the sources of the formats compare.
    repeats : int
        Samples of each.
    reporter : Reporter, optional
    keep : callable
        Called with the result so far after each matrix, so that an interrupt loses one matrix at most.
    """
    device, reporter = Device.parse(device), reporter or Reporter()
    bandwidth = measure_memory(device, _BANDWIDTH_NBYTES[device.kind])
    records: list[dict[str, Any]] = []
    result = {
        **describe_environment(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": str(device),
        "limits": {"read_GBps": bandwidth / 1e9},
        "records": records,
    }
    refused: list[dict[str, str]] = []
    result["refused"] = refused
    converted = [CsrMatrix.from_csr(named.matrix) for named in matrices]
    for named, A in zip(matrices, converted, strict=True):
        if A.nnz == 0:
            raise InputError(f"{named.source} has no entries, so there is nothing to multiply by")
    with reporter.stage("products") as stage:
        for number, (name, named, A) in enumerate(zip(_distinct(matrices), matrices, converted, strict=True)):
            cases = default_cases(named.block_size or detect_block_size(A), is_symmetric(A))
            if study:
                cases += study_cases(A.shape[0], device.kind)
            records += compare_products(
                name,
                A,
                cases,
                device=device,
                columns=sorted(set(columns)),
                bandwidth=bandwidth,
                repeats=repeats,
                progress=lambda share, name=name, number=number: stage.advance(  # type: ignore[misc]
                    (number + share) / len(matrices), name
                ),
                refused=lambda case, error, name=name: refused.append(  # type: ignore[misc]
                    {"matrix": name, "case": case.label, "reason": str(error)}
                ),
            )
            keep(result)
        stage.advance(1.0)
    return result


def _distinct(matrices: Sequence[NamedMatrix]) -> list[str]:
    """Return the names, a number behind those that came before."""
    names: list[str] = []
    for named in matrices:
        name, number = named.name, 1
        while name in names:
            number += 1
            name = f"{named.name}-{number}"
        names.append(name)
    return names


def detect_block_size(A: CsrMatrix) -> int | None:
    """Return the largest block size, 2 to 8, whose blocks are nearly full of stored entries, or None."""
    structure = MatrixStructure.of(A)
    return next((size for size in range(LARGEST_BLOCK, 1, -1) if structure.fill(size) >= 0.95), None)


def records_table(records: Sequence[dict[str, Any]]) -> Table:
    """Return a table of records, the fastest of each matrix and number of vectors first."""
    table = Table(pad_edge=False)
    table.add_column("matrix", overflow="fold")
    table.add_column("k", justify="right")
    table.add_column("format", no_wrap=True)
    for column in ("ms", "GFLOP/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("MiB", "measured / model", "set-up, products", "over best peer", "error"):
        table.add_column(column, justify="right", overflow="fold")
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["matrix"]["name"], record["columns"]), []).append(record)
    for (name, count), group in groups.items():
        for record in sorted(group, key=lambda entry: entry["seconds"]):
            best = min(record["peers"].values(), default=None)
            table.add_row(
                name,
                str(count),
                record["format"] + (f" {record['variant']}" if record["variant"] else ""),
                f"{record['seconds'] * 1e3:.4g}",
                f"{record['gflops']:.4g}",
                f"{record['matrix_bytes'] / 2**20:.4g}",
                f"{record['measured_over_predicted']:.2f}",
                f"{record['setup_products']:.3g}",
                f"{best / record['seconds']:.2f} x" if best else "",
                "not a number" if record["error"] is None else f"{record['error']:.1e}",
            )
        for peer, seconds in group[0]["peers"].items():
            gflops = 2e-9 * group[0]["matrix"]["nonzeros"] * count / seconds
            table.add_row(name, str(count), f"[dim]{peer}[/dim]", f"{seconds * 1e3:.4g}", f"{gflops:.4g}")
        table.add_section()
    return table


def write_records(result: dict[str, Any], folder: Path) -> Path:
    """Write ``bench.json`` into a folder, made if it is not there; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bench.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def write_bench(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``bench.json`` and the figures that its records allow; return their paths."""
    return [write_records(result, folder), *write_product_figures(result["records"], result["limits"], folder)]
