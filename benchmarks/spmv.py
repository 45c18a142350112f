"""Sparse products in every format against the measured bandwidth and against what a user would pick instead, in one run.

    python benchmarks/spmv.py cpu2                      finite-element cube on the CPU, against SciPy (and MKL)
    python benchmarks/spmv.py h200 --device cuda        cubes of 1, 3 and 6 degrees of freedom a node, one to 32 vectors,
                                                        conversions, and the irregular matrices, against cuSPARSE
    python benchmarks/spmv.py h200 --device cuda --part irregular     one part only: cubes, blocks, irregular, study

Values are random: lognormal stiffness for the cubes, uniform for the others. Every product runs on copies that together
exceed the cache four times; each record carries its raw samples, its seed and its error against another implementation.
"""

from __future__ import annotations

import statistics
from typing import Any

import matrices
import numpy as np
from record import argument_parser, write

from penstock.experiments.formats.benchmark import Case, compare_products, default_cases, study_cases
from penstock.files.registry import read_matrix
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


class Comparison:
    """The records of all parts, measured one after the other."""

    def __init__(self, device: Device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self.gpu = device.kind == "cuda"
        self.limit = measure_memory(device, (8 << 30) if self.gpu else (512 << 20))
        self.records: list[dict[str, Any]] = []

    def compare(self, name: str, A: CsrMatrix, cases: list[Case], **options: Any) -> list[dict[str, Any]]:
        """Measure, print and keep."""
        common = {"device": self.device, "bandwidth": self.limit, "repeats": self.repeats}
        found = compare_products(name, A, cases, **{**common, **options})
        show(found)
        self.records += found
        return found

    def cubes(self, nodes: int, parts: list[str]) -> None:
        """Cubes of 1, 3 and 6 degrees of freedom a node: every format, and blocks of vectors."""
        for dof, side in ((1, nodes), (3, nodes), (6, nodes * 3 // 4)):
            named = read_matrix(f"cube{side}-dof{dof}")
            A = on_device(named.matrix, self.device)
            del named.matrix.data, named.matrix.indices
            if "cubes" in parts:
                found = self.compare(named.name, A, default_cases(MatrixStatistics.of(A), dof))
                if self.gpu:
                    self.records += conversions(named.name, A, found, self.limit)
                if dof == 3:
                    stored = [Case("bsr", {"block_size": 3}, "float32"), Case("sell", {}, "float32")]
                    self.compare(named.name, A, stored, values_dtype=np.float32)
            if "blocks" in parts and dof < 6:
                names = ["csr", "sell"] if dof == 1 else ["csr", "bsr", "sliced_bsr"]
                cases = [Case(label, {"block_size": 3} if "bsr" in label else {}) for label in names]
                self.compare(named.name, A, cases, columns=(2, 4, 8, 16, 32))
            del A
            if self.gpu:
                self.device.xp.get_default_memory_pool().free_all_blocks()

    def irregular(self) -> None:
        """The generated matrices."""
        for name in (*IRREGULAR, *REGULAR):
            A = on_device(matrices.build(name), self.device)
            kernels = [Case("csr", {"strategy": label}, label) for label in ("vector", "balanced")]
            self.compare(name, A, default_cases(MatrixStatistics.of(A), symmetric=False) + kernels)

    def study(self) -> None:
        """Parameters of formats that have some, as far as they have not been measured."""
        for name in ("power", "web", "amg_coarse", "stencil7", "rail"):
            A = on_device(matrices.build(name), self.device)
            known = {record["name"] for record in self.records}
            cases = study_cases(A.shape[0], self.device.kind)
            self.compare(name, A, [case for case in cases if f"spmv/{case.label}/{name}" not in known], repeats=5)


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
    comparison = Comparison(Device.parse(arguments.device), arguments.repeats)
    gpu = comparison.gpu
    parts = arguments.part or (["cubes", "blocks", "irregular", "study"] if gpu else ["cubes", "irregular"])
    if "cubes" in parts or "blocks" in parts:
        comparison.cubes(arguments.nodes or (128 if gpu else 40), parts)
    if "irregular" in parts:
        comparison.irregular()
    if "study" in parts:
        comparison.study()
    write(arguments.benchmark, arguments, {"read_GBps": comparison.limit / 1e9}, comparison.records)


if __name__ == "__main__":
    main()
