"""Small systems on a CPU are answered by LAPACK: a banded Cholesky factorisation, for which no kernel is compiled.

The rows are put into an order with a narrow band (reverse Cuthill-McKee: George and Liu 1981), and the factor solves for the
right-hand sides. What is claimed is what every solve claims: the residual is that of the caller's A and b, and a solution that
misses the tolerance is refined by solving for the residual (iterative refinement: Wilkinson 1963).

Whatever is not as it should be is left to iterations, so that refusals, warnings and messages are the same for small systems.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import scipy.sparse
from scipy.linalg import lapack
from scipy.sparse.csgraph import reverse_cuthill_mckee

from penstock.driver.foreign import is_sparse_of_jax
from penstock.driver.inputs import GivenVectors, as_given_matrix
from penstock.driver.open_system import AnyResult
from penstock.driver.progress import CallClock, Reporter, time_facts
from penstock.host.threads import blas_limited
from penstock.solvers import BlockSolveResult, SolveResult, StopReason
from penstock.solvers.amg.modes import check_shape_of_modes, motions_about_origin
from penstock.solvers.checks import check_tolerances
from penstock.spmv import CPU, CsrMatrix, DeviceError, InputError, device_of, format_nbytes
from penstock.spmv.foreign import is_foreign
from penstock.spmv.formats.symmetry import ROUNDING, Symmetry
from penstock.spmv.formats.validation import check_indices, check_values
from penstock.spmv.vectors.noise import noise

#: More rows than these are left to iterations, of which well conditioned systems need few.
LARGEST_ROWS = 5000
# Rows times the square of the bandwidth: of 2,000 rows without a zero, which take 0.06 s on a core; narrower ones up to 0.25 s.
_MOST_WORK = 2000**3
# Solves with the factor, the first one and refinements; each must halve the residual. They aim at a share of the tolerance: so
# near to it, rounding decides which side a residual is on.
_MOST_STEPS, _AIM = 6, 0.5
# Norm of the inverse, of the matrix scaled to a diagonal of ones, above which the matrix may be singular: such a system may have
# no solution, or many, of which iterations return a short one.
_LARGEST_INVERSE, _INVERSE_STEPS = 1e12, 3
# Norms of right-hand sides between which the squares of residuals are numbers.
_LEAST_NORM, _LARGEST_NORM = 1e-120, 1e120

_Block = np.ndarray[Any, np.dtype[np.float64]]


def solve_directly(
    A: Any, b: GivenVectors, hints: Mapping[str, Any], *, device: str, rtol: float, atol: float, reporter: Reporter
) -> AnyResult | None:
    """Return the result of a system that is small enough, or None if it is left to iterations, errors included.

    ``hints`` are coordinates and a near-null space, which a factorisation does not need; if they do not fit the matrix, the
    iterations say so.
    """
    if not _may_be_small(A) or device_of(b.array).kind != "cpu" or not _are_plain(hints):
        return None
    clock = CallClock(reporter)
    try:
        # More threads are slower for matrices as small as these, and give other bits.
        with clock.running(), np.errstate(all="ignore"), blas_limited(1):
            _check_hints(hints, A.shape[0])
            solved = _solved(A, b, device, rtol, atol, clock)
    except (InputError, DeviceError):
        return None
    if solved is None:
        return None
    result, facts = solved
    cost, parts = f"solved in {clock.seconds:.3g} s", clock.take()
    return replace(result, decisions="\n".join([*facts, *time_facts(cost, parts)]), timings={**result.timings, **parts})


def _may_be_small(A: Any) -> bool:
    """Whether something may become a CSR matrix on the host that is small and square."""
    if not (scipy.sparse.issparse(A) or isinstance(A, CsrMatrix) or is_foreign(A) or is_sparse_of_jax(A)):
        return False
    shape = tuple(getattr(A, "shape", ()))
    return len(shape) == 2 and 0 < shape[0] == shape[1] <= LARGEST_ROWS


def _are_plain(hints: Mapping[str, Any]) -> bool:
    """Whether all are NumPy arrays of real numbers."""
    return all(isinstance(hint, np.ndarray) and hint.dtype.kind in "fiu" for hint in hints.values())


def _check_hints(hints: Mapping[str, Any], rows: int) -> None:
    """Refuse coordinates and a near-null space that do not fit a matrix with ``rows`` rows."""
    points, modes = hints.get("coordinates"), hints.get("near_null_space")
    if modes is not None:
        check_shape_of_modes(modes.shape, rows, finite=bool(np.isfinite(modes).all()))
    if points is None:
        return
    nodes, dimensions = points.shape if points.ndim == 2 else (0, 0)
    if not nodes or rows % nodes or dimensions not in (2, 3) or not np.isfinite(points).all():
        raise InputError(f"coordinates of shape {points.shape} do not fit {rows} rows, or are not finite")
    motions_about_origin(points[:1], rows // nodes)  # which knows those of some numbers of unknowns a node


def _solved(
    A: Any, b: GivenVectors, device: str, rtol: float, atol: float, clock: CallClock
) -> tuple[AnyResult, list[str]] | None:
    """Return the result and what was decided."""
    with clock.part("read"):
        given = as_given_matrix(A)
        narrow = given.is_narrow and b.is_narrow  # solved to what float32 can mean, and rounded
        if given.kind != "csr" or narrow or given.find_device(device) != CPU:
            return None
        matrix = given.matrix.to_device(CPU).to_csr()
    with clock.part("look"):
        matrix, block = _sound(matrix), b.as_block()
        b.check_rows(matrix.shape[0])
        check_tolerances(rtol, atol)
        norms = np.linalg.norm(block, axis=0)
        usual = (norms > _LEAST_NORM) & (norms < _LARGEST_NORM) | ~block.any(axis=0)
        diagonal = matrix.diagonal()
        if not usual.all() or not (diagonal > 0).all():
            return None
        roots = np.sqrt(diagonal)
        symmetry = _symmetry(matrix, roots)
        if not symmetry.to_rounding:
            return None
    began = time.perf_counter()
    with clock.stage("prepare"):
        factor = _Factor.of(matrix)
        if factor is None or not factor.inverse_norm(roots) < _LARGEST_INVERSE:
            return None
    with clock.stage("solve"):
        refined = _refined(matrix, factor, block, norms, _AIM * np.maximum(float(rtol) * norms, float(atol)))
    if refined is None:
        return None
    return _result(b, *refined, time.perf_counter() - began), _facts(matrix, symmetry, factor)


def _sound(A: Any) -> scipy.sparse.csr_array:
    """Return a CSR matrix of float64 with sorted rows, that shares the caller's arrays if they are; refuse damaged ones."""
    check_indices(A, "A")
    values, entries = check_values(A, "A"), int(A.indptr[-1])  # SciPy's arrays may be longer than that
    values, columns = values[:entries].astype(np.float64, copy=False), A.indices[:entries].astype(np.int32, copy=False)
    matrix = scipy.sparse.csr_array((values, columns, A.indptr), shape=A.shape)
    if not matrix.has_canonical_format:
        matrix = matrix.copy()
        matrix.sum_duplicates()
        check_values(matrix, "A")
    return matrix


def _symmetry(A: scipy.sparse.csr_array, roots: _Block) -> Symmetry:
    """Return how symmetric a matrix is, with the roots of its diagonal; mirror images are not located."""
    skew = (A - A.T).tocoo()
    rows, columns = skew.coords
    relative = abs(skew.data) / (roots[rows] * roots[columns])
    beyond, largest = int(np.count_nonzero(relative > ROUNDING)), float(relative.max(initial=0.0))
    return Symmetry(int(np.count_nonzero(skew.data)), largest, beyond_rounding=beyond)


@dataclass(frozen=True)
class _Factor:
    """A Cholesky factor: ``band`` is the lower band in LAPACK's storage, ``places`` where each row stands in its order."""

    band: _Block
    places: np.ndarray[Any, Any]
    reordered: bool

    @classmethod
    def of(cls, A: scipy.sparse.csr_array) -> Self | None:
        """Return the factor of a symmetric matrix; None if that takes too long, or the matrix is not positive definite."""
        half, count = scipy.sparse.tril(A, format="coo"), A.shape[0]
        given, narrow = np.arange(count), np.zeros(count, dtype=np.int64)
        narrow[reverse_cuthill_mckee(A, symmetric_mode=True)] = given
        rows, columns = half.coords
        widths = [int(abs(places[rows] - places[columns]).max()) for places in (given, narrow)]
        width, reordered = min(widths), widths[1] < widths[0]
        if count * width**2 > _MOST_WORK:
            return None
        places = narrow if reordered else given
        rows, columns = places[rows], places[columns]
        band = np.zeros((count, width + 1))
        band[np.minimum(rows, columns), abs(rows - columns)] = half.data
        factor, failed = lapack.dpbtrf(band.T, lower=1, overwrite_ab=1)
        return None if failed else cls(factor, places, reordered)

    def solve(self, right: _Block) -> _Block:
        """Return the solutions, (n, k)."""
        ordered = np.empty_like(right, order="F")
        ordered[self.places] = right
        solutions, _ = lapack.dpbtrs(self.band, ordered, lower=1, overwrite_b=1)
        back: _Block = solutions[self.places]
        return back

    def inverse_norm(self, roots: _Block) -> float:
        """Return an estimate of the norm of the inverse of the matrix scaled to ones on its diagonal, by power iterations."""
        length, vector = 0.0, noise(CPU, 0, len(roots))[:, None]
        for _ in range(_INVERSE_STEPS):
            vector = roots[:, None] * self.solve(roots[:, None] * (vector / np.linalg.norm(vector)))
            length = float(np.linalg.norm(vector))
        return length


def _refined(
    A: scipy.sparse.csr_array, factor: _Factor, b: _Block, norms: _Block, aims: _Block
) -> tuple[_Block, list[list[float]]] | None:
    """Return solutions, refined until the residuals of all columns meet their aims, and these; None if they do not get there.

    An iteration is a solve with the factor: the first one, and a refinement each. Right-hand sides that are zero, or below
    the aim, need none.
    """
    x, residuals, lengths, steps = np.zeros(b.shape), b, norms.copy(), 0
    scales = np.where(norms > 0, norms, 1.0)
    histories = [[length] for length in (lengths / scales).tolist()]
    while (left := np.flatnonzero(~(lengths <= aims))).size:
        before = lengths[left]
        x[:, left] += factor.solve(residuals[:, left])
        residuals = b - A @ x
        lengths[left] = np.linalg.norm(residuals[:, left], axis=0)
        steps += 1
        met = lengths[left] <= aims[left]
        if not (met | (lengths[left] < 0.5 * before)).all() or (steps == _MOST_STEPS and not met.all()):
            return None
        for column in left:
            histories[column].append(float(lengths[column] / scales[column]))
    return x, histories


def _result(b: GivenVectors, x: _Block, histories: list[list[float]], seconds: float) -> AnyResult:
    """Return the result of columns that have converged, in the shape and the library of b."""
    steps = max(len(history) for history in histories) - 1  # each has formed the residuals once
    cost: dict[str, Any] = {"sweeps": steps, "bytes_streamed": 0, "timings": {"total": seconds}}
    x = b.back(x, None)
    columns = [
        SolveResult.of(x[:, number], StopReason.CONVERGED, history, history[-1], None, **cost)
        for number, history in enumerate(histories)
    ]
    result: AnyResult = columns[0] if b.columns == 1 else BlockSolveResult(x, tuple(columns), steps, **cost)
    returned: AnyResult = b.returned(result, columns, x)
    return returned


def _facts(A: scipy.sparse.csr_array, symmetry: Symmetry, factor: _Factor) -> list[str]:
    """Return what was decided, one line a fact."""
    rows, width = A.shape[0], factor.band.shape[0] - 1
    order = "in the order of reverse Cuthill-McKee" if factor.reordered else "in the given order of the rows"
    facts = {
        "matrix": f"{rows:,} x {rows:,}, {A.nnz:,} entries, used as it is",
        "memory": f"{format_nbytes(factor.band.nbytes)} for its factor",
        "symmetry": symmetry.description,
        "solver": f"banded Cholesky factorisation by LAPACK, bandwidth {width:,} {order}, refined if need be",
        "choice": "a factorisation: the system is small, and no kernel has to be compiled for it",
        "device": str(CPU),
    }
    return [f"{title:<11} {text}" for title, text in facts.items()]
