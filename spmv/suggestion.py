"""Which format suits a matrix: a ranking by the roofline model, and the best few timed if asked for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.spmv.device import Device
from penstock.spmv.errors import InputError
from penstock.spmv.formats import SparseFormat, format_named
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.formats.csr_strategy import CsrStrategy
from penstock.spmv.formats.from_csr import LARGEST_BLOCK, is_symmetric
from penstock.spmv.roofline import predicted_seconds
from penstock.spmv.sizes import format_nbytes
from penstock.spmv.structure import MatrixStructure

__all__ = ["Suggestion", "suggest_format"]

_NOMINAL_BANDWIDTH = {"cpu": 30e9, "cuda": 4.4e12}
#: What a kernel reaches of the bandwidth where it is at its best, measured on an H200 and on two CPU cores; and what the
#: adding of partial rows costs where it is needed. They decide between formats that move about the same bytes.
_EFFICIENCY = {
    "cuda": {
        "csr": 0.87,
        "coo": 0.6,
        "ell": 0.75,
        "hyb": 0.75,
        "bsr": 0.93,
        "sell": 0.96,
        "sliced_ell": 0.96,
        "sliced_bsr": 0.97,
        "symmetric_bsr": 0.75,
    },
    "cpu": {
        "csr": 0.95,
        "coo": 0.6,
        "ell": 0.55,
        "hyb": 0.5,
        "bsr": 0.95,
        "sell": 0.7,
        "sliced_ell": 0.7,
        "sliced_bsr": 0.6,
        "symmetric_bsr": 0.25,
    },
}
#: With how many vectors the efficiency of a CUDA kernel has halved: those that were made for blocks, and the others.
_HALVING_COLUMNS = {"sell": 25, "sliced_ell": 25, "sliced_bsr": 28}
_HALVING_COLUMNS_OF_OTHERS = 5
#: Rows whose lengths vary more than this keep some lanes of a warp waiting for others.
_EVEN = 0.5


@dataclass(frozen=True)
class Suggestion:
    """One way to store a matrix.

    Parameters
    ----------
    format_name : str
    parameters : dict
        What to call ``from_csr`` with.
    nbytes : int
        Bytes it takes.
    predicted_seconds : float
        Of a product, by the roofline model and the efficiency of the format's kernel.
    measured_seconds : float or None
        Median of a product, if it was timed.
    """

    format_name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0
    predicted_seconds: float = 0.0
    measured_seconds: float | None = None

    def build(self, A: Any) -> SparseFormat:
        """Convert a matrix accordingly."""
        return format_named(self.format_name).from_csr(A, **self.parameters)

    def __str__(self) -> str:
        parameters = ", ".join(f"{name}={value!r}" for name, value in self.parameters.items())
        timed = "" if self.measured_seconds is None else f", measured {self.measured_seconds * 1e3:.3g} ms"
        return (
            f"{self.format_name}({parameters}): {format_nbytes(self.nbytes)}, predicted "
            f"{self.predicted_seconds * 1e3:.3g} ms{timed}"
        )


def suggest_format(
    A: Any,
    *,
    device: Device | str | None = None,
    columns: int = 1,
    bandwidth: float | None = None,
    symmetric: bool | None = None,
    measure: int = 0,
) -> list[Suggestion]:
    """Rank the formats for a matrix, best first.

    Parameters
    ----------
    A : scipy.sparse.csr_array or CsrMatrix
    device : Device or str, optional
        Where products will run; by default where ``A`` lives.
    columns : int
        Vectors that are multiplied at once.
    bandwidth : float, optional
        Measured memory bandwidth in bytes a second; it scales all predictions alike.
    symmetric : bool, optional
        Whether half of the matrix may stand for it; tested by default.
    measure : int
        Convert to so many of the best, time five products each after a warm-up, and rank these by their times.

    Returns
    -------
    list of Suggestion

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> suggest_format(Cantilever(nodes=8, dof=3).matrix().to_csr(), device="cpu")[0].format_name
    'bsr'
    """
    if not isinstance(A, CsrMatrix):
        A = CsrMatrix.from_csr(A.tocsr() if hasattr(A, "tocsr") else A, strategy="auto")
    if min(A.shape) == 0 or columns != int(columns) or columns < 1:
        raise InputError(f"a matrix of shape {A.shape} and {columns} vectors leave nothing to multiply")
    if bandwidth is not None and not bandwidth > 0:
        raise InputError(f"bandwidth is in bytes a second and positive, not {bandwidth}")
    if measure != int(measure) or measure < 0:
        raise InputError(f"measure is the number of formats to time, 0 or more, not {measure!r}")
    chosen = A.device if device is None else Device.parse(device)
    structure = MatrixStructure.of(A)
    rate = bandwidth or _NOMINAL_BANDWIDTH[chosen.kind]
    if symmetric is None:
        symmetric = is_symmetric(A)
    ranking = []
    for name, parameters in _candidates(structure, symmetric):
        cls = format_named(name)
        seconds = predicted_seconds(cls, rate, columns, structure=structure, **parameters)
        seconds /= _efficiency(name, structure, chosen.kind, columns)
        ranking.append(Suggestion(name, parameters, cls.predicted_nbytes(structure, **parameters), seconds))
    ranking.sort(key=lambda suggestion: suggestion.predicted_seconds)
    measured: list[Suggestion] = []
    left: list[Suggestion] = []
    source = A.to_device(chosen) if measure else A
    for suggestion in ranking:
        timed = _timed(suggestion, source, columns) if len(measured) < measure else None
        (left if timed is None else measured).append(timed or suggestion)
    return sorted(measured, key=lambda suggestion: suggestion.measured_seconds or 0.0) + left


def _candidates(structure: MatrixStructure, symmetric: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "csr", {}
    yield "coo", {}
    yield "hyb", {}
    yield "sell", {}
    yield "sliced_ell", {}
    yield "ell", {}
    fills = {size: fill for size in range(2, LARGEST_BLOCK + 1) if (fill := structure.fill(size)) > 0.5}
    for size in sorted(fills, key=lambda size: (fills[size], size), reverse=True)[:2]:
        yield "bsr", {"block_size": size}
        yield "sliced_bsr", {"block_size": size}
        if symmetric:
            yield "symmetric_bsr", {"block_size": size}
    if symmetric and not fills:
        yield "symmetric_bsr", {"block_size": 1}


def _efficiency(name: str, structure: MatrixStructure, kind: str, columns: int) -> float:
    efficiency = _EFFICIENCY[kind].get(name, 0.5)
    if kind == "cuda" and columns > 1:
        efficiency /= 1 + columns / _HALVING_COLUMNS.get(name, _HALVING_COLUMNS_OF_OTHERS)
    waits = structure.variation > _EVEN and kind == "cuda"
    if waits and name == "csr":
        balanced = structure.source.strategy == CsrStrategy.BALANCED
        return efficiency if balanced else efficiency / (1 + structure.variation)
    return efficiency / (1 + structure.variation) if waits and name not in ("coo", "hyb") else efficiency


def _timed(suggestion: Suggestion, A: CsrMatrix, columns: int) -> Suggestion | None:
    """Return the suggestion with its time on the matrix's device; None if the conversion is refused."""
    device = A.device
    try:
        matrix = suggestion.build(A)
    except (InputError, MemoryError):
        return None
    shape = (A.shape[1],) if columns == 1 else (A.shape[1], columns)
    x = device.asarray(np.random.default_rng(0).uniform(-1, 1, shape).astype(A.dtype))
    out = matrix.apply(x)
    samples = []
    for _ in range(5):
        device.synchronize()
        began = time.perf_counter()
        matrix.apply(x, out)
        device.synchronize()
        samples.append(time.perf_counter() - began)
    return replace(suggestion, measured_seconds=statistics.median(samples))
