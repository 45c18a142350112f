"""Sparse products in every format against the measured bandwidth and against what a user would pick instead, in one run.

    python benchmarks/spmv.py cpu2                      finite-element cube on the CPU, against SciPy (and MKL)
    python benchmarks/spmv.py h200 --device cuda        cubes of 1, 3 and 6 degrees of freedom a node, one to 32 vectors,
                                                        conversions, and the irregular matrices, against cuSPARSE
    python benchmarks/spmv.py h200 --device cuda --part irregular     one part only: cubes, blocks, irregular, study

Values are random: lognormal stiffness for the cubes, uniform for the others. Every product runs on copies that together
exceed the cache four times; each record carries its raw samples, its seed and its error against another implementation.
"""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from record import argument_parser, write

from penstock.experiments.formats.benchmark import Case, compare_products, default_cases, study_cases
from penstock.matrix_files import read_matrix
from penstock.spmv import CsrMatrix, Device, format_named
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.model.timing import time_in_turn
from penstock.streaming.measurement.probes import measure_memory

IRREGULAR = (
    "web",
    "circuit",
    "economics",
    "power",
    "full_row",
    "arrow",
    "rail",
    "amg_coarse",
    "empty_rows",
    "tall",
    "wide",
)
REGULAR = ("stencil5", "stencil7", "stencil27", "lattice4d", "fem_shell", "dense")


def generated(name: str) -> Any:
    """Return a matrix of benchmarks/matrices.py."""
    spec = importlib.util.spec_from_file_location("matrices", Path(__file__).with_name("matrices.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build(name)


def on_device(A: Any, device: Device) -> CsrMatrix:
    """Return a matrix on a device, as its own copy."""
    return CsrMatrix.from_csr(A, strategy="auto", check=False).to_device(device)


def conversions(name: str, A: CsrMatrix, records: list[dict[str, Any]], limit: float) -> list[dict[str, Any]]:
    """Time conversions from CSR on the device, in products of the format that comes out."""
    found = []
    for record in records:
        if record["columns"] != 1 or record["variant"] or record["format"] == "csr":
            continue
        parameters = {key: value for key, value in record["parameters"].items() if key == "block_size"}
        convert = format_named(record["format"]).from_csr
        actions = {"convert": [lambda convert=convert, parameters=parameters: convert(A, **parameters, check=False)]}
        try:
            samples = time_in_turn(actions, A.device, repeats=5)["convert"]
        except MemoryError:
            continue
        seconds, nbytes = statistics.median(samples), A.nbytes + record["matrix_bytes"]
        found.append(
            {
                "name": f"convert/{record['format']}/{name}",
                "format": record["format"],
                "matrix": record["matrix"],
                "seconds": seconds,
                "spread": [min(samples), max(samples)],
                "samples": samples,
                "bytes": nbytes,
                "floor_seconds": nbytes / limit,
                "products": seconds / record["seconds"],
                "peers": {},
            }
        )
        print(
            f"convert/{record['format']}/{name}: {seconds * 1e3:.3g} ms = {found[-1]['products']:.3g} products",
            flush=True,
        )
    return found


def show(records: list[dict[str, Any]]) -> None:
    """Print the records of one comparison."""
    for record in sorted(records, key=lambda entry: entry["seconds"]):
        peers = ", ".join(f"{peer} {seconds / record['seconds']:.2f} x" for peer, seconds in record["peers"].items())
        print(
            f"{record['name']:48s} {record['seconds'] * 1e3:9.4f} ms  {record['floor_seconds'] / record['seconds']:.3f} of the "
            f"limit  error {record['error']}  {peers}",
            flush=True,
        )


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", choices=("cubes", "blocks", "irregular", "study"), action="append", default=None)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument(
        "--nodes", type=int, default=None, help="nodes a side of the cubes; default 128 on a GPU, 40 else"
    )
    parser.add_argument("--benchmark", default="spmv", help="first part of the JSON's name")
    arguments = parser.parse_args()
    device = Device.parse(arguments.device)
    gpu = device.kind == "cuda"
    parts = arguments.part or (["cubes", "blocks", "irregular", "study"] if gpu else ["cubes", "irregular"])
    limit = measure_memory(device, (8 << 30) if gpu else (512 << 20))
    nodes = arguments.nodes or (128 if gpu else 40)
    records: list[dict[str, Any]] = []
    common: dict[str, Any] = {"device": device, "bandwidth": limit, "repeats": arguments.repeats}

    if "cubes" in parts or "blocks" in parts:
        for dof, side in ((1, nodes), (3, nodes), (6, nodes * 3 // 4)):
            named = read_matrix(f"cube{side}-dof{dof}")
            A = on_device(named.matrix, device)
            del named.matrix.data, named.matrix.indices
            name = named.name
            if "cubes" in parts:
                cases = default_cases(MatrixStatistics.of(A), dof)
                found = compare_products(name, A, cases, **common)
                show(found)
                records += found
                if gpu:
                    records += conversions(name, A, found, limit)
                if dof == 3:
                    stored = [Case("bsr", {"block_size": 3}, "float32"), Case("sell", {}, "float32")]
                    narrow = compare_products(name, A, stored, values_dtype=np.float32, **common)
                    show(narrow)
                    records += narrow
            if "blocks" in parts and dof < 6:
                names = ["csr", "sell"] if dof == 1 else ["csr", "bsr", "sliced_bsr"]
                cases = [Case(label, {"block_size": 3} if "bsr" in label else {}) for label in names]
                found = compare_products(name, A, cases, columns=(2, 4, 8, 16, 32), **common)
                show(found)
                records += found
            del A
            if gpu:
                device.xp.get_default_memory_pool().free_all_blocks()
    if "irregular" in parts:
        for name in (*IRREGULAR, *REGULAR):
            matrix = generated(name)
            A = on_device(matrix, device)
            kernels = [Case("csr", {"strategy": label}, label) for label in ("vector", "balanced")]
            cases = default_cases(MatrixStatistics.of(A), symmetric=False) + kernels
            found = compare_products(name, A, cases, **common)
            show(found)
            records += found
    if "study" in parts:
        for name in ("power", "web", "amg_coarse", "stencil7", "rail"):
            A = on_device(generated(name), device)
            known = {record["name"] for record in records}
            cases = [case for case in study_cases(A.shape[0], device.kind) if f"spmv/{case.label}/{name}" not in known]
            found = compare_products(name, A, cases, **{**common, "repeats": 5})
            show(found)
            records += found
    write(arguments.benchmark, arguments, {"read_GBps": limit / 1e9}, records)


if __name__ == "__main__":
    main()
