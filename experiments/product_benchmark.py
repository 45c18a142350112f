"""All formats and the peers on one matrix, in one run: records of their times, their set-up, their errors and the model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.experiments.product_peers import cusparse_products, mkl_product, scipy_product
from penstock.experiments.product_timing import copies_wanted, time_in_turn
from penstock.experiments.progress import Stage
from penstock.spmv import (
    CPU,
    Array,
    BudgetError,
    CsrMatrix,
    Device,
    InputError,
    SparseFormat,
    format_named,
    format_names,
)
from penstock.spmv.roofline import chunk_occupancy, inferred_alpha, predicted_seconds
from penstock.spmv.structure import MatrixStructure

__all__ = ["Case", "compare_products", "default_cases", "study_cases"]


@dataclass(frozen=True)
class Case:
    """A format with its parameters; ``variant`` tells several cases of one format apart and is empty for the default."""

    format_name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    variant: str = ""

    @property
    def label(self) -> str:
        """Format and variant in one word."""
        return f"{self.format_name}-{self.variant}" if self.variant else self.format_name


def default_cases(block_size: int | None, symmetric: bool) -> list[Case]:
    """Return every registered format once, blocked ones only if there is a block size, half of it only if symmetric."""
    cases = []
    for name in format_names():
        if name == "symmetric_bsr" and symmetric:
            cases.append(Case(name, {"block_size": block_size or 1}))
        elif name in ("bsr", "sliced_bsr") and block_size:
            cases.append(Case(name, {"block_size": block_size}))
        elif name not in ("symmetric_bsr", "bsr", "sliced_bsr"):
            cases.append(Case(name))
    return cases


def study_cases(rows: int, device_kind: str) -> list[Case]:
    """Return the variants that the sources compare: HYB partitions, chunk heights and sorting scopes of SELL, CUDA kernels."""
    cases = _cuda_kernels() if device_kind == "cuda" else []
    cases += [Case("hyb", {"partition": name}, name) for name in ("hybrid25", "hybrid33", "hybrid67", "minstorage")]
    for height in (4, 8, 16, 32, 64):
        scopes = [1, *(height * 4**power for power in range(1, 9) if height * 4**power < 4 * rows)]
        for scope in scopes if height == 32 else scopes[::2]:
            parameters = {"chunk_height": height, "sorting_scope": scope, "lanes": 1}
            cases.append(Case("sell", parameters, f"C{height}-sigma{scope}"))
    return cases


def _cuda_kernels() -> list[Case]:
    cases = [Case("csr", {"strategy": name}, name) for name in ("scalar", "vector", "shared", "balanced")]
    cases += [Case("csr", {"strategy": "vector", "lanes": rule}, f"lanes-{rule}") for rule in ("mean", "longest")]
    cases += [Case("csr", {"thresholds": name}, name) for name in ("ginkgo_nvidia", "ginkgo_amd")]
    cases += [Case("csr", {"strategy": "vector", "threads": count}, f"threads{count}") for count in (128, 256, 512)]
    cases.append(Case("ell", {"lanes": 4}, "older"))
    return cases


def compare_products(
    name: str,
    A: Any,
    cases: Sequence[Case],
    *,
    device: Device | str = CPU,
    columns: Sequence[int] = (1,),
    bandwidth: float,
    repeats: int = 11,
    values_dtype: Any = None,
    seed: int = 0,
    stage: Stage | None = None,
) -> list[dict[str, Any]]:
    """Time products of one matrix in every case and by the peers.

    Parameters
    ----------
    name : str
        Of the matrix, for the records.
    A : scipy.sparse.csr_array or CsrMatrix
        Its values should be random: zeros would cost less energy and time.
    cases : sequence of Case
    device : Device or str
    columns : sequence of int
        Numbers of vectors.
    bandwidth : float
        Measured memory bandwidth in bytes a second, for floors and predictions.
    repeats : int
        Samples of each.
    values_dtype : dtype, optional
        Type to store the values in; peers keep that of ``A``.
    seed : int
        Of the vectors.
    stage : Stage, optional
        Told how much is done.

    Returns
    -------
    list of dict
        One record a case and number of vectors. A case whose conversion is refused gives none.

    Notes
    -----
    Every case is measured on fresh copies of matrix and vectors that together exceed the cache four times. GFLOP/s count
    two operations a stored entry of ``A``, whatever a format pads. The error is the largest difference from the peer's
    product in units of what ``|A| |x|`` rounds to.
    """
    device = Device.parse(device)
    with device.current():
        A = CsrMatrix.from_csr(A, strategy="auto").to_device(device)
        comparison = _Comparison(name, A, device, bandwidth, repeats, seed, values_dtype)
        records = []
        for number, count in enumerate(columns):
            built = list(comparison.build(cases))
            records += comparison.records(built, count)
            if stage is not None:
                stage.advance((number + 1) / len(columns), f"{name}, {count} vectors")
        return records


@dataclass
class _Built:
    case: Case
    matrix: SparseFormat
    setup_seconds: float


class _Comparison:
    def __init__(
        self, name: str, A: CsrMatrix, device: Device, bandwidth: float, repeats: int, seed: int, values_dtype: Any
    ) -> None:
        self.name, self.A, self.device, self.bandwidth = name, A, device, bandwidth
        self.repeats, self.seed, self.values_dtype = repeats, seed, values_dtype
        self.structure = MatrixStructure.of(A)
        # A device array would be counted twice here; what is read in one product decides how many copies are needed.
        self.copies = copies_wanted(A.nbytes, device)

    def build(self, cases: Sequence[Case]) -> Iterator[_Built]:
        """Convert, timing the second of two conversions: the first one may compile."""
        for case in cases:
            try:
                seconds = min(self._convert(case)[1] for _ in range(2))
                yield _Built(case, self._convert(case)[0], seconds)
            except (InputError, BudgetError, MemoryError):
                continue

    def _convert(self, case: Case) -> tuple[SparseFormat, float]:
        self.device.synchronize()
        began = time.perf_counter()
        matrix = format_named(case.format_name).from_csr(
            self.A, **case.parameters, values_dtype=self.values_dtype, check=False
        )
        self.device.synchronize()
        return matrix, time.perf_counter() - began

    def vectors(self, count: int) -> tuple[list[Array], Array]:
        """Return random x, a fresh one a copy, and an out."""
        xp, generator = self.device.xp, np.random.default_rng(self.seed)
        shape = (self.A.shape[1],) if count == 1 else (self.A.shape[1], count)
        first = self.device.asarray(generator.uniform(-1, 1, shape).astype(self.A.dtype))
        out = xp.empty((self.A.shape[0], *shape[1:]), dtype=self.A.dtype)
        return [first, *(first.copy() for _ in range(self.copies - 1))], out

    def records(self, built: Sequence[_Built], count: int) -> list[dict[str, Any]]:
        xs, out = self.vectors(count)
        peers = self._peers(xs, out)
        actions: dict[str, list[Any]] = {f"peer {name}": products for name, products in peers.items()}
        kept = []  # the copies must live until the timing is over
        for item in built:
            copies = [item.matrix, *(_copy(item.matrix) for _ in range(self.copies - 1))]
            kept.append(copies)
            actions[item.case.label] = [_product(matrix, x, out) for matrix, x in zip(copies, xs, strict=True)]
        samples = time_in_turn(actions, self.device, repeats=self.repeats)
        medians = {label: statistics.median(values) for label, values in samples.items()}
        peer_seconds = {name: medians[f"peer {name}"] for name in peers}
        reference = self._reference(xs[0])
        scale = self.A.apply_absolute(abs(xs[0])) if count == 1 else None
        return [
            self._record(item, count, samples[item.case.label], peer_seconds, reference, scale, xs[0]) for item in built
        ]

    def _peers(self, xs: list[Array], out: Array) -> dict[str, list[Any]]:
        matrices: list[Any] = [self.A, *(_copy(self.A) for _ in range(self.copies - 1))]
        found: dict[str, list[Any]] = {}
        for matrix, x in zip(matrices, xs, strict=True):
            if self.device.kind == "cuda":
                products: dict[str, Any] = dict(cusparse_products(matrix, x, out))
            else:
                products = {"scipy_csr": scipy_product(matrix, x), "mkl_csr": mkl_product(matrix, x)}
            for name, product in products.items():
                if product is not None:
                    found.setdefault(name, []).append(product)
        return found

    def _reference(self, x: Array) -> Array:
        if self.device.kind == "cuda" and self.A.nnz < 2**31:
            import cupyx.scipy.sparse

            arrays = (self.A.values, self.A.column_indices, self.A.row_offsets.astype(np.int32))
            return cupyx.scipy.sparse.csr_matrix(arrays, shape=self.A.shape) @ x
        return self.device.asarray(self.A.to_csr() @ CPU.asarray(x))

    def _record(
        self,
        item: _Built,
        count: int,
        samples: list[float],
        peers: dict[str, float],
        reference: Array,
        scale: Array | None,
        x: Array,
    ) -> dict[str, Any]:
        structure, matrix, seconds = self.structure, item.matrix, statistics.median(samples)
        difference = abs(matrix.apply(x) - reference)
        error = (
            float((difference / (scale + np.finfo(np.float32).tiny)).max())
            if scale is not None
            else float(difference.max() / abs(reference).max())
        )
        product = "spmv" if count == 1 else "spmm"
        variant = f"-{item.case.variant}" if item.case.variant else ""
        record = {
            "name": f"{product}/{item.case.format_name}{variant}/{self.name}" + (f"/k{count}" if count > 1 else ""),
            "format": item.case.format_name,
            "variant": item.case.variant,
            "matrix": {
                "name": self.name,
                "rows": structure.shape[0],
                "columns": structure.shape[1],
                "nonzeros": structure.nnz,
                "mean_row": structure.mean,
                "longest_row": structure.longest,
                "variation": structure.variation,
            },
            "parameters": matrix.parameters(),
            **({"threads": matrix.parameters()["threads"]} if item.case.variant.startswith("threads") else {}),
            "columns": count,
            "seconds": seconds,
            "spread": [min(samples), max(samples)],
            "samples": samples,
            "bytes": matrix.product_nbytes(count),
            "matrix_bytes": matrix.nbytes,
            "floor_seconds": matrix.product_nbytes(count) / self.bandwidth,
            "predicted_seconds": predicted_seconds(matrix, self.bandwidth, count),
            "measured_over_predicted": seconds / predicted_seconds(matrix, self.bandwidth, count),
            "gflops": 2e-9 * structure.nnz * count / seconds,
            "error": error,
            "seed": self.seed,
            "copies": self.copies,
            "setup_seconds": item.setup_seconds,
            "setup_products": item.setup_seconds / seconds,
            "peers": peers,
        }
        if item.case.format_name in ("sell", "sliced_ell") and count == 1:
            scope = matrix.parameters()["sorting_scope"]
            height = matrix.parameters()["chunk_height"]
            occupancy = chunk_occupancy(structure.lengths, height, scope)
            volume = seconds * self.bandwidth
            record["occupancy"] = occupancy
            record["alpha"] = inferred_alpha(volume, structure.nnz, structure.mean, occupancy=occupancy)
        return record


def _copy(matrix: SparseFormat) -> SparseFormat:
    arrays = {name: array.copy() for name, array in matrix.arrays().items()}
    return matrix.from_arrays(matrix.shape, matrix.dtype, arrays, matrix.parameters())


def _product(matrix: SparseFormat, x: Array, out: Array) -> Any:
    return lambda: matrix._apply(x, out, 1.0, 0.0)
