"""``penstock bench --operation``: triangular solves and products of matrices, against what a user would take instead."""

from __future__ import annotations

import datetime
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from rich.table import Table

from penstock.driver.progress import Reporter, Stage
from penstock.experiments.formats.figures_of_operations import write_operation_figures
from penstock.experiments.reporting.environment import check_same_machine, describe_environment
from penstock.experiments.reporting.study import Record, Study, StudyFolder
from penstock.files.registry import NamedMatrix
from penstock.solvers import TriangularSolve, galerkin, galerkin_pattern, multigrid, multiply, product_pattern
from penstock.solvers.triangular.block_entries import SIZES
from penstock.spmv import BsrMatrix, CsrMatrix, Device, InputError
from penstock.spmv.model.timing import time_by_host_clock, time_once

#: What is timed of one matrix: calls by name, the seconds of their set-ups, and those of other libraries.
Ways = tuple[dict[str, Callable[[], Any]], dict[str, float], dict[str, Callable[[], Any]]]


class OperationFolder(StudyFolder):
    """The folder of ``penstock bench --operation``."""

    records_name: ClassVar[str] = "operations.json"


def triangular_ways(named: NamedMatrix, device: Device) -> Ways:
    """Return solves with the lower triangle of a matrix, by blocks where it has them."""
    lower = scipy.sparse.csr_array(scipy.sparse.tril(named.matrix.tocsr()))
    lower.sort_indices()
    size = named.block_size if named.block_size in SIZES else 1
    matrix: Any = BsrMatrix.from_csr(lower, block_size=size) if size > 1 else CsrMatrix.from_csr(lower)
    matrix = matrix.to_device(device)
    b = np.random.default_rng(0).normal(size=lower.shape[0])
    b_there = device.asarray(b)
    options: dict[str, dict[str, Any]] = {
        "auto": {},
        "natural order": {"order": "natural"},
        "by levels": {"order": "levels"},
    }
    if device.kind == "cuda":
        options |= {"levels, a graph": {"order": "levels", "schedule": "levels"}}
    calls: dict[str, Callable[[], Any]] = {}
    setups: dict[str, float] = {}
    for name, chosen in options.items():
        make = functools.partial(TriangularSolve, matrix, **chosen)
        make()  # compiles
        setups[name], solve = time_once(make, device)
        calls[name] = functools.partial(solve.apply, b_there, device.xp.empty(b.size))
    return calls, setups, {"SciPy on the host": lambda: scipy.sparse.linalg.spsolve_triangular(lower, b)}


def square_ways(named: NamedMatrix, device: Device) -> Ways:
    """Return the product of a matrix with itself."""
    A = CsrMatrix.from_csr(named.matrix.tocsr()).to_device(device)
    seconds, pattern = time_once(lambda: product_pattern(A, A), device)
    calls = {"pattern and values": lambda: multiply(A, A), "values alone": lambda: multiply(A, A, pattern=pattern)}
    return calls, {"values alone": seconds}, _peers(device, [named.matrix.tocsr()] * 2)


def galerkin_ways(named: NamedMatrix, device: Device) -> Ways:
    """Return the coarse matrix P' A P, with the prolongator of the first level of multigrid."""
    A = CsrMatrix.from_csr(named.matrix.tocsr()).to_device(device)
    levels = multigrid(A).levels
    if not levels:
        raise InputError(f"{named.name} is too small, or too sparse, for a coarse level; take a larger matrix")
    P = levels[0].P
    seconds, pattern = time_once(lambda: galerkin_pattern(A, P), device)
    calls = {"pattern and values": lambda: galerkin(A, P), "values alone": lambda: galerkin(A, P, pattern=pattern)}
    host = P.to_csr()
    return calls, {"values alone": seconds}, _peers(device, [host.T.tocsr(), named.matrix.tocsr(), host])


def _peers(device: Device, factors: Sequence[Any]) -> dict[str, Callable[[], Any]]:
    """Return the product of several matrices by SciPy, or by cuSPARSE, from the right to the left."""

    def product(matrices: Sequence[Any]) -> Any:
        result = matrices[-1]
        for matrix in reversed(matrices[:-1]):
            result = matrix @ result
        return result

    if device.kind == "cpu":
        return {"SciPy": lambda: product(factors)}
    import cupyx.scipy.sparse

    on_gpu = [cupyx.scipy.sparse.csr_matrix(scipy.sparse.csr_matrix(factor)) for factor in factors]
    return {"cuSPARSE": lambda: product(on_gpu)}


#: What can be measured besides products with vectors.
OPERATIONS: dict[str, Callable[[NamedMatrix, Device], Ways]] = {
    "trsv": triangular_ways,
    "spgemm": square_ways,
    "galerkin": galerkin_ways,
}


class OperationStudy(Study[NamedMatrix, OperationFolder]):
    """Times an operation (a key of :data:`OPERATIONS`) with matrices; a point is a matrix."""

    def __init__(
        self,
        operation: str,
        matrices: Sequence[NamedMatrix],
        device: Device,
        directory: str | Path,
        *,
        repeats: int = 11,
        reporter: Reporter | None = None,
    ) -> None:
        super().__init__(OperationFolder(Path(directory)), reporter)
        self.folder.make_parents()
        self.operation, self.matrices, self.device, self.repeats = operation, list(matrices), device, repeats
        for named in matrices:
            if named.matrix.shape[0] != named.matrix.shape[1]:
                raise InputError(f"{operation} takes square matrices; {named.source} has shape {named.matrix.shape}")
        self._stage = Stage()

    def points(self) -> list[NamedMatrix]:
        """Return the matrices."""
        return self.matrices

    def is_done(self, point: NamedMatrix) -> bool:
        """Return whether there are records of a matrix."""
        return any((entry["matrix"], entry["operation"]) == (point.name, self.operation) for entry in self.records)

    def header(self) -> Record:
        """Return machine, date and device."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return {**describe_environment(), "date": today, "device": str(self.device)}

    def load(self) -> list[Record]:
        """Return the records of an earlier run in the folder, of the same machine."""
        contents = self.folder.read()
        check_same_machine(contents, self.folder.path)
        return list(contents["records"])

    def prepare(self, missing: Sequence[NamedMatrix]) -> None:
        """Begin the progress bar."""
        self._stage = self.resources.enter_context(self.reporter.stage(self.operation))

    def measure(self, point: NamedMatrix) -> list[Record]:
        """Time all ways of an operation with a matrix, and other libraries."""
        calls, setups, peers = OPERATIONS[self.operation](point, self.device)
        samples = time_by_host_clock(calls, self.device, repeats=self.repeats, warmups=3)
        others = time_by_host_clock(peers, self.device, repeats=min(3, self.repeats), warmups=1)
        best = {name: statistics.median(taken) for name, taken in others.items()}
        self._stage.advance((self.matrices.index(point) + 1) / len(self.matrices), point.name)
        shape, entries = point.matrix.shape, int(point.matrix.nnz)
        return [
            {
                "operation": self.operation,
                "matrix": point.name,
                "rows": int(shape[0]),
                "nonzeros": entries,
                "way": way,
                "seconds": statistics.median(taken),
                "samples": taken,
                "setup_seconds": setups.get(way, 0.0),
                "peers": best,
            }
            for way, taken in samples.items()
        ]

    def report(self) -> None:
        """Draw the records."""
        write_operation_figures(self.records, self.folder.path)


def operations_table(records: Sequence[Record]) -> Table:
    """Return a table of records, the fastest of each matrix first."""
    table = Table(pad_edge=False)
    table.add_column("matrix", overflow="fold")
    table.add_column("operation", no_wrap=True)
    table.add_column("way", overflow="fold")
    for column in ("ms", "set-up, ms", "over best peer"):
        table.add_column(column, justify="right", no_wrap=True)
    groups: dict[tuple[str, str], list[Record]] = {}
    for entry in records:
        groups.setdefault((entry["matrix"], entry["operation"]), []).append(entry)
    for (name, operation), group in groups.items():
        best = min(group[0]["peers"].values())
        for entry in sorted(group, key=lambda one: one["seconds"]):
            cells = (f"{1e3 * entry['seconds']:.4g}", f"{1e3 * entry['setup_seconds']:.4g}")
            table.add_row(name, operation, entry["way"], *cells, f"{best / entry['seconds']:.2f} x")
        for peer, seconds in group[0]["peers"].items():
            table.add_row(name, operation, f"[dim]{peer}[/dim]", f"{1e3 * seconds:.4g}")
        table.add_section()
    return table
