"""Measures a point of the study: sweeps with overlap and without, and transfers and computations alone."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numba
import numpy as np

from penstock.driver.progress import Stage
from penstock.experiments.overlap.configuration import OverlapCase, OverlapStudy
from penstock.experiments.overlap.study import OverlapPoint, host_matrix, plan_point
from penstock.experiments.overlap.vectors import CheckedVectors
from penstock.spmv import CPU, BudgetError, Device, PenstockError, SparseMatrix, format_nbytes
from penstock.spmv.formats.partition import cut_rows
from penstock.spmv.model.timing import time_by_host_clock
from penstock.streaming import FileStore, HostStore, LinkRates, StreamedMatrix, StreamPlan, Timeline


class CaseMeasurement:
    """Measures points of one matrix, which is assembled once, with rates of the machine measured in the same run."""

    def __init__(self, study: OverlapStudy, case: OverlapCase, rates: LinkRates, folder: Path, stage: Stage) -> None:
        self.study, self.case, self.rates, self.folder = study, case, rates, folder
        self.device = Device.parse(study.device)
        self.nnz = study.cantilever(case).nnz  # of the whole matrix, even if only half of it is stored
        stage.advance(0.0, "assembling")
        self.matrix = host_matrix(study, case)
        stage.advance(0.0, f"{format_nbytes(self.matrix.nbytes)}; one thread of the CPU")
        self.serial_gflops = 2 * self.nnz / _serial_seconds(self.matrix) / 1e9
        self._vectors: dict[tuple[int, int], CheckedVectors] = {}

    def measure(self, point: OverlapPoint) -> tuple[list[dict[str, Any]], dict[str, Timeline]]:
        """Return the records and timelines of a point, overlap off and on, or raise an error if a product is wrong."""
        with self.device.current():
            vectors = self._vectors_of(point)
            with _stored(self.matrix, point.subdivisions, self.device, self.folder) as store:
                plan = plan_point(self.study, store.index, point, self.rates)
                with _PointSweeps(self.study, point, store, plan, vectors, self.device) as sweeps:
                    times = sweeps.measure()
        return [self._record(kind, point, plan, times) for kind in ("off", "on")], times.timelines

    def _vectors_of(self, point: OverlapPoint) -> CheckedVectors:
        """Return the vectors of a point; those of the last point are reused or released."""
        key = (point.repeats, point.columns)
        if key not in self._vectors:
            self._vectors.clear()
            self._vectors[key] = CheckedVectors(self.matrix, 27 * self.case.dof, self.device, *key)
        return self._vectors[key]

    def _record(self, kind: str, point: OverlapPoint, plan: StreamPlan, times: _PointTimes) -> dict[str, Any]:
        estimate = plan.estimate()
        assert estimate is not None, "rates are known"
        other, seconds = "off" if kind == "on" else "on", times.seconds
        transfer, compute = seconds["transfer"], seconds["compute"]
        floor = max(transfer, compute) if kind == "on" else transfer + compute
        flops = 2 * self.nnz * point.repeats * point.columns
        return {
            "name": point.name(kind),
            "seconds": seconds[kind],
            "spread": [min(times.samples[kind]), max(times.samples[kind])],
            "floor_seconds": floor,
            "bytes": plan.streamed_nbytes,
            "peers": {f"overlap_{other}": seconds[other]},
            "matrix": self.case.name,
            "dof": self.case.dof,
            "nodes": self.case.nodes,
            "overlap": kind,
            "subdivisions": point.subdivisions,
            "repeats": point.repeats,
            "columns": point.columns,
            "protocol": self.study.protocol,
            "format": plan.index.format_name,
            "device": str(self.device),
            "nnz": self.nnz,
            "matrix_bytes": plan.index.nbytes,
            "transfer_seconds": transfer,
            "compute_seconds": compute,
            "compute_alone": times.compute_alone,
            "result_copy_seconds": seconds["result_copy"],
            "change_vectors_seconds": times.change_seconds,
            "predicted_seconds": estimate.overlapped if kind == "on" else estimate.sequential,
            "times_floor": seconds[kind] / floor,
            "gflops": flops / seconds[kind] / 1e9,
            "transfer_gflops": flops / transfer / 1e9,
            "compute_gflops": flops / compute / 1e9,
            "gain": seconds["off"] / seconds["on"] - 1,
            # As a fraction of the shorter of the two, the most that can be hidden. Compared with their sum, not with the sweep
            # without overlap, which may take longer than its parts: overlap would then seem to hide more than there is.
            "hidden": min(max((transfer + compute - seconds["on"]) / min(transfer, compute), 0.0), 1.0),
            "link_fraction": plan.streamed_nbytes / seconds[kind] / self.rates.link,
            "memory_fraction": point.repeats * plan.index.nbytes / seconds[kind] / self.rates.memory,
            "products_checked": point.repeats * point.columns,
            "worst_error": times.errors[kind],
            "serial_gflops": self.serial_gflops,
        }


@dataclass(frozen=True)
class _PointTimes:
    """What was measured at a point, by kind of sweep: ``on`` and ``off``, and transfers and computations alone."""

    seconds: dict[str, float]
    samples: dict[str, list[float]]
    change_seconds: float
    compute_alone: str
    errors: dict[str, float]
    timelines: dict[str, Timeline]


class _PointSweeps:
    """The streamed matrices of a point: ``on`` and ``off``, and ``compute``, which is resident if it fits in memory."""

    def __init__(
        self,
        study: OverlapStudy,
        point: OverlapPoint,
        store: FileStore | HostStore,
        plan: StreamPlan,
        vectors: CheckedVectors,
        device: Device,
    ) -> None:
        self.study, self.point, self.vectors, self.device = study, point, vectors, device
        self.errors: dict[str, float] = {}
        plans = {"on": plan, "off": replace(plan, ring=replace(plan.ring, overlap=False))}
        with contextlib.ExitStack() as opened:
            self.matrices = {
                kind: opened.enter_context(StreamedMatrix(store, plan.storage_nbytes, device=device, plan=plans[kind]))
                for kind in plans
            }
            with contextlib.suppress(BudgetError):
                resident = StreamedMatrix(store, store.index.nbytes, device=device)
                self.matrices["compute"] = opened.enter_context(resident)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def measure(self) -> _PointTimes:
        """Time all kinds of sweeps in turn and record timelines; every product is checked before and after."""
        for kind in self.matrices:
            self.vectors.forget()
            self._run(kind)
            self._check(kind)
        actions: dict[str, Callable[[], None]] = {
            "transfer": lambda: self.matrices["on"].sweep(lambda number, slab: None),
            "result_copy": self.vectors.copy_result,
            **{kind: (lambda kind=kind: self._run(kind)) for kind in self.matrices},  # type: ignore[misc]
        }
        samples = time_by_host_clock(actions, self.device, repeats=self.study.samples)
        self._check(list(self.matrices)[-1])
        change = time_by_host_clock({"change": self.vectors.change}, self.device, repeats=3, warmups=1)["change"]
        timelines = {kind: self._recorded(kind) for kind in ("on", "off")}
        seconds = {kind: statistics.median(times) for kind, times in samples.items()}
        alone = "resident"
        if "compute" not in seconds:
            alone, seconds["compute"] = "spans of a sweep without overlap", timelines["off"].seconds("compute")
            seconds["compute"] += seconds["result_copy"] if self.study.protocol == "paper" else 0.0
        return _PointTimes(seconds, samples, statistics.median(change), alone, self.errors, timelines)

    def _run(self, kind: str) -> None:
        self.matrices[kind].apply_each(self.vectors.x, self.vectors.products)
        if self.study.protocol == "paper":
            self.vectors.copy_result()

    def _recorded(self, kind: str) -> Timeline:
        self.vectors.forget()
        with self.matrices[kind].recording() as timeline:
            self.matrices[kind].apply_each(self.vectors.x, self.vectors.products)
        self._check(kind)
        return timeline

    def _check(self, kind: str) -> None:
        """Check the products of the last sweep."""
        error = max(self.errors.get(kind, 0.0), self.vectors.worst_error())
        if not error <= 1.0:
            raise PenstockError(
                f"{self.point.name(kind)}: a product is wrong, by {error:.3g} times the bound of rounding; the study is "
                "worthless until the cause is found"
            )
        self.errors[kind] = error


@contextlib.contextmanager
def _stored(A: SparseMatrix, subdivisions: int, device: Device, folder: Path) -> Iterator[FileStore | HostStore]:
    """Yield a store of the matrix: for a GPU in host memory, for a CPU on disk."""
    if device.kind == "cuda":
        with HostStore.from_matrix(A, subdivisions) as host_store:
            yield host_store
        return
    bounds = cut_rows(A, subdivisions)
    with tempfile.TemporaryDirectory(dir=folder, prefix="overlap-") as place:
        slabs = (A.rows(start, stop) for start, stop in itertools.pairwise(bounds))
        with FileStore.create(Path(place) / "matrix", slabs, shape=A.shape) as file_store:
            yield file_store


def _serial_seconds(A: SparseMatrix) -> float:
    """Return the time of a product in one thread."""
    x, threads = np.random.default_rng(1).standard_normal(A.shape[1]), numba.get_num_threads()
    out = np.empty(A.shape[0])
    numba.set_num_threads(1)
    try:
        return min(time_by_host_clock({"serial": lambda: A.apply(x, out)}, CPU, repeats=2, warmups=1)["serial"])
    finally:
        numba.set_num_threads(threads)
