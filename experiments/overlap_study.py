"""The communication-hiding study: sweeps with many products, transfers hidden behind them and not, and their two parts.

After O. A. Fagerlund, T. Kitayama, G. Hashimoto, H. Okuda, "Effect of GPU communication-hiding for SpMV using OpenACC".
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numba
import numpy as np

from penstock.experiments.overlap_configuration import OverlapCase, OverlapStudy
from penstock.experiments.product_timing import time_by_host_clock
from penstock.experiments.progress import Reporter
from penstock.spmv import CPU, Array, BudgetError, Device, InputError, PenstockError, SparseFormat, format_nbytes
from penstock.streaming import (
    FileStore,
    HostStore,
    LinkRates,
    MatrixIndex,
    StreamedMatrix,
    StreamPlan,
    Timeline,
    index_of,
    plan_stream,
)
from penstock.streaming.budget import check_room

__all__ = ["OverlapPoint", "check_study", "host_matrix", "measure_case", "study_points"]

_BASES = 3  # vectors that all others are combinations of, so that every product can be checked against a few
_EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class OverlapPoint:
    """One combination of the study's parameters."""

    case: OverlapCase
    subdivisions: int
    repeats: int
    columns: int

    def name(self, kind: str) -> str:
        """Return the name of a record of this point."""
        more = "" if self.columns == 1 else f"/k{self.columns}"
        return f"overlap/{self.case.name}/{kind}/s{self.subdivisions}/r{self.repeats}{more}"


def study_points(study: OverlapStudy) -> list[OverlapPoint]:
    """Return all combinations, case by case."""
    combinations = itertools.product(study.cases, study.repeats, study.columns, study.subdivisions)
    return [OverlapPoint(case, count, repeats, columns) for case, repeats, columns, count in combinations]


def host_matrix(study: OverlapStudy, case: OverlapCase) -> SparseFormat:
    """Assemble the matrix of a case in host memory, in the study's format."""
    name, dtype, beam = study.format_of(case), np.dtype(study.values), study.cantilever(case)
    return beam.matrix(name, values_dtype=dtype)


def check_study(study: OverlapStudy) -> None:
    """Plan every point, so that what cannot be measured is known before anything is.

    Raises
    ------
    PenstockError
        If the device or the folder is not there, a cut is too fine, or the budget too small.
    """
    Device.parse(study.device)
    if study.folder is not None and not study.folder.is_dir():
        raise InputError(f"folder: {study.folder} is not there; make it, or name another place for the matrices")
    for point in study_points(study):
        beam, name = study.cantilever(point.case), study.format_of(point.case)
        slabs = beam.outlines(point.subdivisions, name, values_dtype=np.dtype(study.values))
        try:
            plan_point(study, index_of(slabs, beam.shape), point, LinkRates(1.0, 1.0))
        except BudgetError as error:
            error.add_note(f"in {point.name('on')}")
            raise


def plan_point(study: OverlapStudy, index: MatrixIndex, point: OverlapPoint, rates: LinkRates) -> StreamPlan:
    """Plan a sweep with overlap.

    Sweeps of the study begin with an empty ring: what is fetched ahead of the next one would be hidden behind nothing.
    """
    options: dict[str, Any] = {"columns": point.columns, "repeats": point.repeats, "at_end": "stop", "rates": rates}
    if study.protocol == "paper":
        return plan_stream(index, None, slots=2, resident_structure=True, **options)
    return plan_stream(index, study.budget, slots=study.slots, **options)


class _Vectors:
    """The vectors of a point, their products and what these must be; ``longest`` is the number of entries of a full row.

    Every vector is a combination of three, whose products are formed on the host by the CPU's kernels: so each of the many
    products is checked, entry by entry, against a rounding bound.
    """

    def __init__(self, A: SparseFormat, longest: int, device: Device, repeats: int, columns: int) -> None:
        self._device = device
        generator = np.random.default_rng(0)
        bases = [generator.standard_normal(A.shape[1]) for _ in range(_BASES)]
        with device.current():
            need = 8 * ((repeats * columns) * sum(A.shape) + 4 * _BASES * max(A.shape))
            check_room(device, need, f"{repeats * columns} vectors and their products")
            self._bases = [device.asarray(base) for base in bases]
            self._products = [device.asarray(A @ base) for base in bases]
            magnitude = A.apply_absolute(np.sum(np.abs(bases), axis=0))
            self._bound = device.asarray(8 * _EPSILON * (longest + _BASES) * magnitude)
            self._factors = generator.uniform(0.5, 1.0, (repeats, columns, _BASES)) * generator.choice(
                [-1, 1], (repeats, columns, _BASES)
            )
            block = (columns,) if columns > 1 else ()
            self.x = device.xp.empty((repeats, A.shape[1], *block))
            self.products = device.xp.empty((repeats, A.shape[0], *block))
            self._result: Array = np.empty((A.shape[0], *block))
            if device.kind == "cuda":
                import cupyx

                self._result = cupyx.empty_pinned(self._result.shape)
        self.change()

    def change(self) -> None:
        """Write all vectors."""
        for x, factors in zip(self.x, self._factors, strict=True):
            for target, chosen in zip(x.reshape(x.shape[0], -1).T, factors, strict=True):
                target[:] = _combined(self._bases, chosen)

    def bring_home(self) -> None:
        """Copy the result of the last product to the host; on a CPU it is there."""
        if self._device.kind == "cuda":
            self.products[-1].get(out=self._result)

    def forget(self) -> None:
        """Fill the products with NaN, so that none of an earlier run can pass for one of the next."""
        self.products.fill(np.nan)

    def worst_error(self) -> float:
        """Return the largest deviation of an entry of a product, in units of its rounding bound."""
        xp, worst = self._device.xp, 0.0
        for product, factors in zip(self.products, self._factors, strict=True):
            for found, chosen in zip(product.reshape(product.shape[0], -1).T, factors, strict=True):
                error = float(xp.max(xp.abs(found - _combined(self._products, chosen)) / self._bound))
                worst = max(worst, error if error == error else np.inf)
        return worst


def _combined(vectors: list[Array], factors: np.ndarray[Any, Any]) -> Array:
    total = float(factors[0]) * vectors[0]
    for vector, factor in zip(vectors[1:], factors[1:], strict=True):
        total += float(factor) * vector
    return total


def measure_case(
    study: OverlapStudy,
    case: OverlapCase,
    points: list[OverlapPoint],
    rates: LinkRates,
    folder: Path,
    reporter: Reporter,
    keep: Callable[[list[dict[str, Any]], dict[str, Timeline]], None],
) -> None:
    """Measure the points of a case, and hand on the records of each as soon as it is done.

    Parameters
    ----------
    study : OverlapStudy
    case : OverlapCase
    points : list of OverlapPoint
        Of this case.
    rates : LinkRates
        Of the machine, measured in the same run.
    folder : path
        Where matrices are written, if they are streamed from disk.
    reporter : Reporter
    keep : callable
        Called with the two records of a point, overlap off and on, and the timelines of both.
    """
    device = Device.parse(study.device)
    with reporter.stage(case.name) as stage, device.current():
        stage.advance(0.0, "assembling")
        A = host_matrix(study, case)
        stage.advance(0.0, f"{format_nbytes(A.nbytes)}; one thread of the CPU")
        serial = 2 * study.cantilever(case).nnz / _serial_seconds(A) / 1e9
        vectors: dict[tuple[int, int], _Vectors] = {}
        for done, point in enumerate(points):
            stage.advance(done / len(points), f"{point.subdivisions} subdivisions, {point.repeats} products")
            key = (point.repeats, point.columns)
            if key not in vectors:
                vectors.clear()
                vectors[key] = _Vectors(A, 27 * case.dof, device, *key)
            with _stored(A, point.subdivisions, device, folder) as store:
                records, timelines = _measure_point(study, point, store, vectors[key], rates, device)
            for record in records:
                record["serial_gflops"] = serial
            keep(records, timelines)
        stage.advance(1.0)


@contextlib.contextmanager
def _stored(A: SparseFormat, subdivisions: int, device: Device, folder: Path) -> Iterator[FileStore | HostStore]:
    """Cut a matrix: for a GPU in the memory where it lies, for a CPU on disk."""
    if device.kind == "cuda":
        with HostStore.from_matrix(A, subdivisions) as host_store:
            yield host_store
        return
    bounds = A.cut(subdivisions)
    with tempfile.TemporaryDirectory(dir=folder, prefix="overlap-") as place:
        slabs = (A.rows(start, stop) for start, stop in itertools.pairwise(bounds))
        with FileStore.create(Path(place) / "matrix", slabs, shape=A.shape) as file_store:
            yield file_store


def _serial_seconds(A: SparseFormat) -> float:
    """Return the time of a product in one thread."""
    x, threads = np.random.default_rng(1).standard_normal(A.shape[1]), numba.get_num_threads()
    out = np.empty(A.shape[0])
    numba.set_num_threads(1)
    try:
        return min(time_by_host_clock({"serial": lambda: A.apply(x, out)}, CPU, repeats=2, warmups=1)["serial"])
    finally:
        numba.set_num_threads(threads)


def _measure_point(
    study: OverlapStudy,
    point: OverlapPoint,
    store: FileStore | HostStore,
    vectors: _Vectors,
    rates: LinkRates,
    device: Device,
) -> tuple[list[dict[str, Any]], dict[str, Timeline]]:
    plan = plan_point(study, store.index, point, rates)
    plans = {"on": plan, "off": replace(plan, overlap=False)}
    with contextlib.ExitStack() as opened:
        matrices = {
            kind: opened.enter_context(StreamedMatrix(store, plan.storage_nbytes, device=device, plan=plans[kind]))
            for kind in plans
        }
        with contextlib.suppress(BudgetError):  # it does not fit: compute alone then comes from spans
            matrices["compute"] = opened.enter_context(StreamedMatrix(store, store.index.nbytes, device=device))

        def run(kind: str) -> None:
            matrices[kind].apply_each(vectors.x, vectors.products)
            if study.protocol == "paper":
                vectors.bring_home()

        errors: dict[str, float] = {}

        def check(kind: str) -> None:
            errors[kind] = max(errors.get(kind, 0.0), vectors.worst_error())
            if not errors[kind] <= 1.0:
                raise PenstockError(
                    f"{point.name(kind)}: a product is wrong, by {errors[kind]:.3g} times what rounding explains; the study "
                    "is worth nothing until this is understood"
                )

        for kind in matrices:
            vectors.forget()
            run(kind)
            check(kind)
        actions: dict[str, Callable[[], None]] = {
            "transfer": lambda: matrices["on"].sweep(lambda number, slab: None),
            "home": vectors.bring_home,
            **{kind: (lambda kind=kind: run(kind)) for kind in matrices},  # type: ignore[misc]
        }
        samples = time_by_host_clock(actions, device, repeats=study.samples)
        check(list(matrices)[-1])  # what the last sample left
        change = time_by_host_clock({"change": vectors.change}, device, repeats=3, warmups=1)["change"]
        timelines = {}
        for kind in plans:
            vectors.forget()
            timelines[kind] = _recorded(matrices[kind], vectors)
            check(kind)
    seconds = {kind: statistics.median(times) for kind, times in samples.items()}
    alone = "resident"
    if "compute" not in seconds:
        alone, seconds["compute"] = "spans of a sweep without overlap", timelines["off"].seconds("compute")
        seconds["compute"] += seconds["home"] if study.protocol == "paper" else 0.0
    forecast = plan.forecast()
    assert forecast is not None, "rates were given"
    nnz = study.cantilever(point.case).nnz  # of the whole matrix, half of which may be stored
    flops = 2 * nnz * point.repeats * point.columns
    transfer, compute = seconds["transfer"], seconds["compute"]
    records = []
    for kind, other in (("off", "on"), ("on", "off")):
        floor = max(transfer, compute) if kind == "on" else transfer + compute
        record = {
            "name": point.name(kind),
            "seconds": seconds[kind],
            "spread": [min(samples[kind]), max(samples[kind])],
            "floor_seconds": floor,
            "bytes": plan.streamed_nbytes,
            "peers": {f"overlap_{other}": seconds[other]},
            "matrix": point.case.name,
            "dof": point.case.dof,
            "nodes": point.case.nodes,
            "overlap": kind,
            "subdivisions": point.subdivisions,
            "repeats": point.repeats,
            "columns": point.columns,
            "protocol": study.protocol,
            "format": store.index.format_name,
            "device": str(device),
            "nnz": nnz,
            "matrix_bytes": store.index.nbytes,
            "transfer_seconds": transfer,
            "compute_seconds": compute,
            "compute_alone": alone,
            "result_copy_seconds": seconds["home"],
            "change_vectors_seconds": statistics.median(change),
            "predicted_seconds": forecast.overlapped if kind == "on" else forecast.sequential,
            "times_floor": seconds[kind] / floor,
            "gflops": flops / seconds[kind] / 1e9,
            "transfer_gflops": flops / transfer / 1e9,
            "compute_gflops": flops / compute / 1e9,
            "gain": seconds["off"] / seconds["on"] - 1,
            "hidden": (seconds["off"] - seconds["on"]) / min(transfer, compute),
            "link_fraction": plan.streamed_nbytes / seconds[kind] / rates.link,
            "memory_fraction": point.repeats * store.index.nbytes / seconds[kind] / rates.memory,
            "products_checked": point.repeats * point.columns,
            "worst_error": errors[kind],
        }
        records.append(record)
    return records, timelines


def _recorded(matrix: StreamedMatrix, vectors: _Vectors) -> Timeline:
    with matrix.recording() as timeline:
        matrix.apply_each(vectors.x, vectors.products)
    return timeline
