"""``penstock bench``: products of several matrices, with a table on the terminal, a JSON file of all records, and figures."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from penstock.driver.progress import Reporter, Stage
from penstock.experiments.formats.benchmark import compare_products, default_cases, study_cases
from penstock.experiments.formats.figures import write_product_figures
from penstock.experiments.reporting.environment import check_same_machine, describe_environment
from penstock.experiments.reporting.study import Record, Study, StudyFolder
from penstock.files.registry import NamedMatrix
from penstock.spmv import CPU, CsrMatrix, Device, InputError
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.streaming.measurement.probes import measure_memory

# A format that takes this many times as long as another is the wrong one, whatever the noise of a quiet machine.
_CLEARLY = 1.1
_BANDWIDTH_NBYTES = {"cpu": 256 << 20, "cuda": 4 << 30}


class BenchFolder(StudyFolder):
    """The folder of ``penstock bench``: all records, and pictures of them."""

    records_name: ClassVar[str] = "bench.json"

    def figures(self) -> list[Path]:
        """Return the pictures in the folder."""
        return sorted(self.path.glob("*.png"))


@dataclass(frozen=True)
class BenchRequest:
    """What to measure: device, numbers of vectors, samples of each product, and whether variants from the literature too."""

    device: Device = CPU
    columns: tuple[int, ...] = (1,)
    variants: bool = False
    repeats: int = 11


class BenchStudy(Study[NamedMatrix, BenchFolder]):
    """Times products of matrices in all formats and by the peers; a point is a matrix."""

    def __init__(
        self,
        matrices: Sequence[NamedMatrix],
        request: BenchRequest,
        folder: BenchFolder,
        reporter: Reporter | None = None,
    ) -> None:
        super().__init__(folder, reporter)
        self.request = request
        self.matrices = [
            replace(named, name=name) for name, named in zip(_distinct_names(matrices), matrices, strict=True)
        ]
        for named in matrices:
            if named.matrix.nnz == 0:
                raise InputError(f"{named.source} has no entries, so there is nothing to multiply by")
        self._header: Record = {}
        self._stage = Stage()

    def points(self) -> list[NamedMatrix]:
        """Return the matrices, each with a name of its own."""
        return self.matrices

    def is_done(self, point: NamedMatrix) -> bool:
        """Return whether there are records of a matrix."""
        return any(record["matrix"]["name"] == point.name for record in self.records)

    def header(self) -> Record:
        """Return machine, date, bandwidth and the refused conversions."""
        return self._header

    def load(self) -> list[Record]:
        """Return the records of an earlier run on the same machine and device."""
        self._header, device = self.folder.read(), str(self.request.device)
        check_same_machine(self._header, self.folder.path)
        if self._header.get("device", device) != device:
            raise InputError(f"{self.folder.path} holds records of {self._header['device']}; choose another folder")
        return list(self._header.pop("records"))

    def prepare(self, missing: Sequence[NamedMatrix]) -> None:
        """Measure the memory bandwidth and begin the progress bar."""
        device = self.request.device
        bandwidth = measure_memory(device, _BANDWIDTH_NBYTES[device.kind])
        self._header = {
            **describe_environment(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "device": str(device),
            "limits": {"read_GBps": bandwidth / 1e9},
            "refused": self._header.get("refused", []),
        }
        self._stage = self.resources.enter_context(self.reporter.stage("products"))

    def measure(self, point: NamedMatrix) -> list[Record]:
        """Compare all formats and peers on a matrix."""
        request, number = self.request, self.matrices.index(point)
        A = CsrMatrix.from_csr(point.matrix)
        cases = default_cases(MatrixStatistics.of(A), point.block_size)
        if request.variants:
            cases += study_cases(A.shape[0], request.device.kind)
        records = compare_products(
            point.name,
            A,
            cases,
            device=request.device,
            columns=sorted(set(request.columns)),
            bandwidth=1e9 * self._header["limits"]["read_GBps"],
            repeats=request.repeats,
            progress=lambda done: self._stage.advance((number + done) / len(self.matrices), point.name),
            refused=lambda case, error: self._header["refused"].append(
                {"matrix": point.name, "case": case.label, "reason": str(error)}
            ),
        )
        self._stage.advance((number + 1) / len(self.matrices), point.name)
        return records

    def report(self) -> None:
        """Draw all pictures for which there are data."""
        write_product_figures(self.records, self._header.get("limits", {}), self.folder.path)


def bench_products(
    matrices: Sequence[NamedMatrix],
    directory: str | Path,
    request: BenchRequest | None = None,
    *,
    reporter: Reporter | None = None,
) -> tuple[BenchFolder, bool]:
    """Compare all formats and peers on matrices; return the folder of records and pictures, and whether all are done.

    An interrupt loses the records of one matrix at most.
    """
    folder = BenchFolder(Path(directory))
    folder.make_parents()
    return folder, BenchStudy(matrices, request or BenchRequest(), folder, reporter).run()


def _distinct_names(matrices: Sequence[NamedMatrix]) -> list[str]:
    """Return the names of the matrices; equal ones get numbers from the second on."""
    names: list[str] = []
    for named in matrices:
        name, number = named.name, 1
        while name in names:
            number += 1
            name = f"{named.name}-{number}"
        names.append(name)
    return names


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


def disagreements(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each matrix where a format was clearly faster than the one that the roofline model puts first."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in records:
        if not record["variant"] and "ranked_seconds" in record:  # not in records of older versions
            groups.setdefault((record["matrix"]["name"], record["columns"]), []).append(record)
    sentences = []
    for (name, count), group in groups.items():
        chosen, fastest = (min(group, key=itemgetter(key)) for key in ("ranked_seconds", "seconds"))
        if (ratio := chosen["seconds"] / fastest["seconds"]) > _CLEARLY:
            vectors = f" with {count} vectors" if count > 1 else ""
            sentences.append(
                f"{name}{vectors}: {fastest['format']} was fastest here; {chosen['format']}, which the roofline model puts "
                f"first, took {ratio:.2f} times as long. On a machine that was not busy, name the format yourself."
            )
    return sentences
