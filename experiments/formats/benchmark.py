"""Times products of one matrix in all formats and by the peers: records with times, set-up, errors and predictions.

Each case is measured on copies of matrix and vectors that together exceed the cache four times (256 copies at most; the factor is
``"caches"`` in a record). Cases that do not fit in memory together are timed in groups, each together with the peers. GFLOP/s
count two operations for each stored entry of ``A``, without padding. The error is the largest difference from the peer's product
in units of ``|A| |x|``; None if it is not a finite number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.experiments.formats.peers import cusparse_products, mkl_product, scipy_product
from penstock.spmv import (
    CPU,
    Array,
    BudgetError,
    CsrMatrix,
    Device,
    InputError,
    SparseMatrix,
    format_named,
    format_names,
)
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.model.roofline import chunk_occupancy, inferred_alpha, predicted_seconds
from penstock.spmv.model.timing import cache_nbytes, copies_wanted, memory_for_copies, time_in_turn, time_once

_SEED = 0  # of the random vectors


@dataclass(frozen=True)
class Case:
    """A format with its parameters; cases of one format have different variants, the default case has none."""

    format_name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    variant: str = ""

    @property
    def label(self) -> str:
        """Format and variant in one word."""
        return f"{self.format_name}-{self.variant}" if self.variant else self.format_name


def default_cases(
    statistics: MatrixStatistics, block_size: int | None = None, *, symmetric: bool | None = None
) -> list[Case]:
    """Return one case for each registered format that suits a matrix, with the format's most promising parameters.

    Unless the size of the matrix's dense blocks is known (1 without blocks), blocked formats look for one with few added
    zeros. Formats of half a symmetric matrix are included if the matrix is symmetric, unless ``symmetric`` is False.
    """
    cases = []
    for name in format_names():
        cls = format_named(name)
        if symmetric is False and cls.traits.half:
            continue
        parameters = next(iter(cls.candidates(statistics)), None)
        if cls.traits.blocked and block_size is not None:
            fits = block_size > 1 or cls.traits.half
            allowed = not cls.traits.half or parameters is not None
            parameters = {"block_size": block_size} if fits and allowed else None
        if parameters is not None:
            cases.append(Case(name, parameters))
    return cases


def study_cases(rows: int, device_kind: str) -> list[Case]:
    """Return variants known from the literature: HYB partitions, chunk heights and sorting scopes of SELL, CUDA kernels."""
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
    progress: Callable[[float], object] = lambda share: None,
    refused: Callable[[Case, Exception], object] = lambda case, error: None,
) -> list[dict[str, Any]]:
    """Time products of one matrix in every case and by the peers; return a record per case and number of vectors.

    Values should be random: products with zeros need less energy and time. The measured bandwidth, in bytes per second, gives
    floors and predictions. Peers use the type of ``A``, cases may store another one. ``progress`` receives the fraction done,
    ``refused`` each case whose conversion is refused, with the error; such cases have no records.
    """
    device = Device.parse(device)
    _check_cases(cases)
    with device.current():
        A = CsrMatrix.from_csr(A, strategy="auto").to_device(device)
        if A.nnz == 0:
            raise InputError(f"{name} has no entries, so there is nothing to multiply by")
        comparison = _Comparison(name, A, device, bandwidth, repeats, values_dtype)
        records: dict[int, list[dict[str, Any]]] = {count: [] for count in columns}
        done = 0
        for group in comparison.groups(cases, max(columns), refused):
            for count in columns:
                records[count] += comparison.records(group, count)
                done += len(group)
                progress(done / (len(cases) * len(columns)))
        return [record for count in columns for record in records[count]]


def _check_cases(cases: Sequence[Case]) -> None:
    for case in cases:
        format_named(case.format_name)  # a name that does not exist is an error, not a refused conversion
    if len({case.label for case in cases}) < len(cases):
        raise InputError("two cases have the same format and variant; give them different variants")


@dataclass
class _Built:
    case: Case
    copies: list[SparseMatrix]
    setup_seconds: float


class _Comparison:
    def __init__(
        self, name: str, A: CsrMatrix, device: Device, bandwidth: float, repeats: int, values_dtype: Any
    ) -> None:
        self.name, self.A, self.device, self.bandwidth = name, A, device, bandwidth
        self.repeats, self.values_dtype = repeats, values_dtype
        self.statistics = structure = MatrixStatistics.of(A)
        self._matrix = {
            "name": name,
            "rows": structure.shape[0],
            "columns": structure.shape[1],
            "nonzeros": structure.nnz,
            "mean_row": structure.mean,
            "longest_row": structure.longest,
            "variation": structure.variation,
        }

    def groups(
        self, cases: Sequence[Case], count: int, refused: Callable[[Case, Exception], object]
    ) -> Iterator[list[_Built]]:
        """Convert, and yield groups of cases that fit in memory together beside blocks of ``count`` vectors."""
        limit, group, nbytes = memory_for_copies(self.device), list[_Built](), 0
        for case in cases:
            try:
                # The first conversion may compile kernels, so the faster of two counts.
                (first, matrix), (second, _) = self._convert(case), self._convert(case)
            except (InputError, BudgetError, MemoryError) as error:
                refused(case, error)
                continue
            copies = copies_wanted(matrix.nbytes, self.device)
            needed = copies * matrix.product_nbytes(count)
            if group and nbytes + needed > limit:
                yield group
                group, nbytes = [], 0
            nbytes += needed
            group.append(_Built(case, [matrix, *(_copy(matrix) for _ in range(copies - 1))], min(first, second)))
        if group:
            yield group

    def _convert(self, case: Case) -> tuple[float, SparseMatrix]:
        convert = format_named(case.format_name).from_csr
        options = {**case.parameters, "values_dtype": self.values_dtype, "check": False}
        return time_once(lambda: convert(self.A, **options), self.device)

    def records(self, group: Sequence[_Built], count: int) -> list[dict[str, Any]]:
        """Time a group of cases and the peers in turn."""
        xp, generator = self.device.xp, np.random.default_rng(_SEED)
        shape = (self.A.shape[1],) if count == 1 else (self.A.shape[1], count)
        x = self.device.asarray(generator.uniform(-1, 1, shape).astype(self.A.dtype))
        copies = max(copies_wanted(self.A.nbytes, self.device), *(len(item.copies) for item in group))
        xs = [x, *(x.copy() for _ in range(copies - 1))]
        out = xp.empty((self.A.shape[0], *shape[1:]), dtype=self.A.dtype)
        peers = self._peers(xs, out)
        actions: dict[str, list[Any]] = {f"peer {name}": products for name, products in peers.items()}
        for item in group:
            products = [_product(matrix, other, out) for matrix, other in zip(item.copies, xs, strict=False)]
            actions[item.case.label] = products
        samples = time_in_turn(actions, self.device, repeats=self.repeats)
        peer_seconds = {name: statistics.median(samples[f"peer {name}"]) for name in peers}
        reference, scale = self._reference(x), self._scale(x)
        records = []
        for item in group:
            difference = abs(item.copies[0].apply(x) - reference) / xp.maximum(scale, np.finfo(np.float32).tiny)
            error = float(difference.max())
            records.append(self._record(item, count, samples[item.case.label], peer_seconds, error))
        return records

    def _peers(self, xs: list[Array], out: Array) -> dict[str, list[Any]]:
        copies = copies_wanted(self.A.nbytes, self.device)
        matrices: list[Any] = [self.A, *(_copy(self.A) for _ in range(copies - 1))]
        by_peer: dict[str, list[Any]] = {}
        for matrix, x in zip(matrices, xs, strict=False):
            if self.device.kind == "cuda":
                products: dict[str, Any] = dict(cusparse_products(matrix, x, out))
            else:
                products = {"scipy_csr": scipy_product(matrix, x), "mkl_csr": mkl_product(matrix, x)}
            for name, product in products.items():
                if product is not None:
                    by_peer.setdefault(name, []).append(product)
        return by_peer

    def _reference(self, x: Array) -> Array:
        if self.device.kind == "cuda" and self.A.nnz < 2**31:
            import cupyx.scipy.sparse

            arrays = (self.A.values, self.A.column_indices, self.A.row_offsets.astype(np.int32))
            return cupyx.scipy.sparse.csr_matrix(arrays, shape=self.A.shape) @ x
        return self.device.asarray(self.A.to_csr() @ CPU.asarray(x))

    def _scale(self, x: Array) -> Array:
        if x.ndim == 1:
            return self.A.apply_absolute(abs(x))
        columns = [self.A.apply_absolute(self.device.xp.ascontiguousarray(abs(x[:, k]))) for k in range(x.shape[1])]
        return self.device.xp.stack(columns, axis=1)

    def _record(
        self, item: _Built, count: int, samples: list[float], peers: dict[str, float], error: float
    ) -> dict[str, Any]:
        case, matrix = item.case, item.copies[0]
        seconds, nbytes = statistics.median(samples), matrix.product_nbytes(count)
        parameters = {**case.parameters, **matrix.parameters()}
        predicted = predicted_seconds(matrix, self.bandwidth, count)
        operation, vectors = ("spmv", "") if count == 1 else ("spmm", f"/k{count}")
        record = {
            "name": f"{operation}/{case.label}/{self.name}{vectors}",
            "format": case.format_name,
            "variant": case.variant,
            "matrix": self._matrix,
            "parameters": parameters,
            **({"threads": parameters["threads"]} if case.variant.startswith("threads") else {}),
            "columns": count,
            "seconds": seconds,
            "spread": [min(samples), max(samples)],
            "samples": samples,
            "bytes": nbytes,
            "matrix_bytes": matrix.nbytes,
            "floor_seconds": nbytes / self.bandwidth,
            "predicted_seconds": predicted,
            "measured_over_predicted": seconds / predicted,
            # What suggest_format ranks by.
            "ranked_seconds": predicted / matrix.efficiency(self.statistics, self.device.kind, count),
            "gflops": 2e-9 * self.statistics.nnz * count / seconds,
            "error": error if math.isfinite(error) else None,
            "seed": _SEED,
            "copies": len(item.copies),
            "caches": len(item.copies) * matrix.nbytes / cache_nbytes(self.device),
            "setup_seconds": item.setup_seconds,
            "setup_products": item.setup_seconds / seconds,
            "peers": peers,
        }
        if count == 1 and {"chunk_height", "sorting_scope"} <= parameters.keys():
            record |= self._chunks(parameters, seconds)
        return record

    def _chunks(self, parameters: dict[str, Any], seconds: float) -> dict[str, float]:
        """Return how full the chunks of SELL are, and how often each entry of x was loaded."""
        structure = self.statistics
        occupancy = chunk_occupancy(structure.lengths, parameters["chunk_height"], parameters["sorting_scope"])
        alpha = inferred_alpha(seconds * self.bandwidth, structure.nnz, structure.mean, occupancy=occupancy)
        return {"occupancy": occupancy, "alpha": alpha}


def _copy(matrix: SparseMatrix) -> SparseMatrix:
    arrays = {name: array.copy() for name, array in matrix.arrays().items()}
    return matrix.from_arrays(matrix.shape, matrix.dtype, arrays, matrix.parameters())


def _product(matrix: SparseMatrix, x: Array, out: Array) -> Any:
    return lambda: matrix._apply(x, out, 1.0, 0.0)
