"""Ranks the formats for a matrix by the roofline model, and on request by timing the best few."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from penstock.spmv.device import Device
from penstock.spmv.errors import InputError
from penstock.spmv.formats import SparseMatrix, format_named, format_names
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.formats.statistics import MatrixStatistics
from penstock.spmv.formats.validation import in_csr
from penstock.spmv.model.timing import time_by_host_clock
from penstock.spmv.sizes import format_nbytes

#: Bytes a second of memory, for choices that must not depend on the machine.
NOMINAL_BANDWIDTH = {"cpu": 30e9, "cuda": 4.4e12}


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

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.spmv import suggest_format
    >>> A = Cantilever(nodes=6, dof=3).matrix().to_csr()
    >>> best = suggest_format(A, device="cpu")[0]
    >>> best.format_name, best.parameters, best.build(A).shape
    ('bsr', {'block_size': 3}, (648, 648))
    """

    format_name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0
    predicted_seconds: float = 0.0
    measured_seconds: float | None = None

    def build(self, A: Any) -> SparseMatrix:
        """Convert a matrix accordingly."""
        return format_named(self.format_name).from_csr(A, **self.parameters)

    def of_statistics(self, statistics: MatrixStatistics) -> SparseMatrix:
        """Convert a valid matrix accordingly, of which the statistics may know what the format needs."""
        return format_named(self.format_name).of_statistics(statistics, **self.parameters)

    @property
    def label(self) -> str:
        """The format in words, with the size of its blocks, and the bytes."""
        traits, size = format_named(self.format_name).traits, self.parameters.get("block_size")
        blocks = f" of {size} x {size} blocks" if traits.blocked else ""
        words = traits.label.replace(r"$\sigma$", "sigma")  # as a terminal can show it
        return f"{words}{blocks}, {format_nbytes(self.nbytes)}"

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
        False leaves out formats of half a symmetric matrix. By default they are ranked if the matrix is symmetric to rounding.
    measure : int
        Convert to this many of the best, time five products each after a warm-up, and rank these by their times.

    Returns
    -------
    list of Suggestion

    Raises
    ------
    InputError
        If A is empty, or an option is out of range.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.spmv import suggest_format
    >>> suggest_format(Cantilever(nodes=8, dof=3).matrix().to_csr(), device="cpu")[0].format_name
    'bsr'
    """
    if not isinstance(A, CsrMatrix):
        if not hasattr(A, "tocsr") and not hasattr(A, "to_csr"):
            raise InputError(f"a {type(A).__name__} is no sparse matrix; pass one of SciPy, CuPy or penstock")
        A = A.to_csr() if hasattr(A, "to_csr") else A
        A = CsrMatrix.from_csr(in_csr(A, "the matrix") if hasattr(A, "tocsr") else A, strategy="auto")
    if min(A.shape) == 0 or columns != int(columns) or columns < 1:
        raise InputError(f"a matrix of shape {A.shape} and {columns} vectors leave nothing to multiply")
    if bandwidth is not None and not bandwidth > 0:
        raise InputError(f"bandwidth is in bytes a second and positive, not {bandwidth}")
    if measure != int(measure) or measure < 0:
        raise InputError(f"measure is the number of formats to time, 0 or more, not {measure!r}")
    chosen = A.device if device is None else Device.parse(device)
    ranking = list(rank_formats(MatrixStatistics.of(A), chosen.kind, columns, bandwidth=bandwidth))
    if symmetric is False:
        ranking = [suggestion for suggestion in ranking if not format_named(suggestion.format_name).traits.half]
    measured: list[Suggestion] = []
    left: list[Suggestion] = []
    source = A.to_device(chosen) if measure else A
    for suggestion in ranking:
        timed = _timed(suggestion, source, columns) if len(measured) < measure else None
        (left if timed is None else measured).append(timed or suggestion)
    return sorted(measured, key=lambda suggestion: suggestion.measured_seconds or 0.0) + left


def rank_formats(
    statistics: MatrixStatistics,
    device_kind: str,
    columns: int = 1,
    *,
    bandwidth: float | None = None,
    by_bytes: bool = False,
    names: Sequence[str] = (),
    most_nbytes: float = math.inf,
) -> Iterator[Suggestion]:
    """Yield all registered formats, best first, by the product time that the roofline model and their efficiency predict.

    ``by_bytes`` ranks them by their size instead; those of other ``names``, if some are given, or of more than ``most_nbytes``
    are left out. A bandwidth in bytes a second may replace the nominal one, which ranks just as well. Storage is worked out only
    for the formats that are asked for, and for those that may be better: for the others a bound suffices.
    """
    rate = bandwidth or NOMINAL_BANDWIDTH[device_kind]
    vectors = columns * sum(statistics.shape) * statistics.dtype.itemsize

    def seconds(cls: type[SparseMatrix], nbytes: float) -> float:
        return (nbytes + vectors) / rate / cls.efficiency(statistics, device_kind, columns)

    waiting: list[tuple[float, int, type[SparseMatrix], dict[str, Any], int | None]] = []
    for name in format_names():
        if names and name not in names:
            continue
        cls = format_named(name)
        for parameters in cls.candidates(statistics):
            bound = cls.least_nbytes(statistics, **parameters)
            if bound > most_nbytes:
                continue
            waiting.append((bound if by_bytes else seconds(cls, bound), len(waiting), cls, parameters, None))
    heapq.heapify(waiting)
    while waiting:
        _, number, cls, parameters, nbytes = heapq.heappop(waiting)
        if nbytes is None:
            nbytes = cls.predicted_nbytes(statistics, **parameters)
            if nbytes <= most_nbytes:
                entry = (nbytes if by_bytes else seconds(cls, nbytes), number, cls, parameters, nbytes)
                heapq.heappush(waiting, entry)
        else:
            yield Suggestion(cls.name, parameters, nbytes, seconds(cls, nbytes))


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
    samples = time_by_host_clock({"product": lambda: matrix.apply(x, out)}, device, repeats=5)["product"]
    return replace(suggestion, measured_seconds=median(samples))
