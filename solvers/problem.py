"""The linear problem that all Krylov methods solve: right-hand sides, tolerances, products that are counted, true residuals."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from penstock.solvers.checks import check_finite, check_tolerances
from penstock.solvers.own_preconditioner import as_preconditioner
from penstock.solvers.preconditioners import with_product
from penstock.solvers.result import SolveResult, StopReason
from penstock.solvers.states import SystemMark, direction_kept
from penstock.spmv import (
    Array,
    HasAbsoluteProduct,
    InputError,
    Operator,
    SweptOperator,
    VectorSpace,
    as_vectors,
)
from penstock.spmv.conversion import as_operator_for

Norms = np.ndarray[Any, np.dtype[np.float64]]

#: A true residual within this factor of the estimated rounding floor counts as having reached it.
FLOOR_FACTOR = 100
#: If the true residual stays above this fraction of its value at the last restart, further restarts are useless.
_USELESS_RESTART = 0.5
#: The share of the first residual by which a recorded one may differ from that of the iterate, in roots of the rounding unit;
#: and where the floor of rounding is unknown.
_DRIFT, _DRIFT_WITHOUT_FLOOR = 16, 0.01
#: Squares of norms must stay within the range of float64, also after products with the matrix and for small residuals.
_SMALLEST_NORM, _LARGEST_NORM = 1e-100, 1e140


def has_diverged(residual: float, first: float, unit: float) -> bool:
    """Return whether a relative residual is larger than conjugate gradients produce for any consistent system.

    ``first`` is that of the guess, ``unit`` the rounding unit; :meth:`LinearProblem.verdict` says why.
    """
    return residual > max(1.0, first) / math.sqrt(unit)


class LinearProblem:
    """``A x = b`` for one or several right-hand sides, with a preconditioner and tolerances.

    Parameters
    ----------
    A : operator or matrix
        Anything :func:`penstock.spmv.as_operator` accepts; square.
    b : array, (n,), (n, 1) or (n, k)
        Finite; on the device of A.
    M : operator, matrix or function, optional
        Approximates the inverse of A.
    rtol, atol : float
        A column b has converged when ``||b - A x|| <= max(rtol ||b||, atol)``, computed from A, b and x.
    name : str
        The name of the right-hand sides in messages.

    Attributes
    ----------
    b : array, (n,) or (n, k)
    b_norms, tolerances, thresholds : float64 array, (columns,)
        The true residual is tested when the recursive one is below the threshold: the tolerance, or one rounding unit of b,
        below which the recursive residual carries no information.
    n : int
        Rows of all ranks.
    space : VectorSpace
        With the ranks among which A is shared out.
    unit : float
        Rounding unit of the vectors.
    with_product : AppliesWithProduct, optional
        The preconditioner, if it is made of products with A and can append one more.
    products : int
        Number of the solver's own products with A.

    Raises
    ------
    InputError
        If A is not square, b has another length or holds NaN, or a tolerance is negative.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> from penstock.solvers import LinearProblem
    >>> problem = LinearProblem(2.0 * scipy.sparse.eye_array(4, format="csr"), np.ones(4), rtol=1e-6, atol=0.0)
    >>> problem.n, problem.columns, problem.true_residual(np.ones(4), np.empty(4)).tolist()
    (4, 1, [-1.0, -1.0, -1.0, -1.0])
    """

    def __init__(self, A: Any, b: Array, M: Any = None, *, rtol: float, atol: float, name: str = "b") -> None:
        self.A: Operator = as_operator_for(A, b)
        self.space = VectorSpace.of(self.A)
        self.n = self.space.length(self.A.shape[0])
        with self.space.communicator.together():
            if self.A.shape[0] != self.A.shape[1]:
                raise InputError(f"a solver needs a square matrix, not one of shape {self.A.shape}")
            check_tolerances(rtol, atol)
            self.b = self.vectors(name, b)
            self.M: Operator | None = None if M is None else as_preconditioner(M, self.A)
        self.rtol, self.atol = float(rtol), float(atol)
        self.columns = 1 if self.b.ndim == 1 else int(self.b.shape[1])
        kind = type(self.M).__name__
        self.space.communicator.check_same(rtol=self.rtol, atol=self.atol, columns=self.columns, preconditioner=kind)
        self.unit = float(np.finfo(str(self.A.dtype)).eps) / 2
        self.with_product = with_product(self.M, self.A)
        self.products = 0
        self.matrix_seconds = self.preconditioner_seconds = 0.0
        self.fewer_threads_seconds = 0.0
        self.floors: dict[int, float] = {}
        self.began = time.perf_counter()
        self._streamed = self.A if isinstance(self.A, SweptOperator) else None
        self._before = (0, 0) if self._streamed is None else (self._streamed.sweeps, self._streamed.bytes_streamed)

    def vectors(self, name: str, array: Array) -> Array:
        """Return the caller's vectors after checking that they are finite, on the device of A and of its type."""
        vectors = as_vectors(array, self.A.shape[0], self.A, name)
        check_finite(name, vectors, self.A.device)
        return vectors

    def guess(self, array: Array | str | None, state: object, name: str) -> Array | None:
        """Return an initial guess in the shape of b, or None; ``"Mb"`` is M applied to b, as in SciPy."""
        self.space.communicator.check_same(
            **{f"whether {name} is given": array is not None, "whether a state is given": state is not None}
        )
        with self.space.communicator.together():
            if array is None:
                return None
            if state is not None:
                raise InputError(f"a state contains the iterate to resume from; give {name} or state, not both")
            if isinstance(array, str):
                if array != "Mb":
                    raise InputError(f"{name} must be an array or 'Mb', not {array!r}")
                return self.b.copy() if self.M is None else self.M.apply(self.b)
            vectors = self.vectors(name, array)
            if vectors.size != self.b.size:
                raise InputError(
                    f"{name} must have the shape of the right-hand side, {self.b.shape}, not {vectors.shape}"
                )
            return vectors.reshape(self.b.shape)

    def set_norms(self, b_norms: Norms) -> None:
        """Set ``||b||`` of each column, as the method computes norms, and the tolerances."""
        self.b_norms = b_norms
        with np.errstate(invalid="ignore"):
            self.tolerances = np.maximum(self.rtol * b_norms, self.atol)
        self.thresholds = np.maximum(self.tolerances, self.unit * b_norms)

    @property
    def empty(self) -> list[int]:
        """Columns that ``x = 0`` solves: b is zero, or so small that its squares underflow, and below ``atol``."""
        small = (self.b_norms <= _SMALLEST_NORM) & (self.atol >= _SMALLEST_NORM)
        return [column for column in self._unusual if small[column] or not self.space.any(self.column(self.b, column))]

    @property
    def out_of_range(self) -> list[int]:
        """Other columns whose squares leave the range of numbers."""
        empty = self.empty
        return [column for column in self._unusual if column not in empty]

    @property
    def aside(self) -> dict[int, StopReason]:
        """Columns that need no solve, and how they end: those that are empty or out of range."""
        ends = dict.fromkeys(self.empty, StopReason.CONVERGED)
        return ends | dict.fromkeys(self.out_of_range, StopReason.NOT_FINITE)

    @property
    def _unusual(self) -> list[int]:
        in_range = (self.b_norms >= _SMALLEST_NORM) & (self.b_norms <= _LARGEST_NORM)
        unusual: list[int] = np.flatnonzero(~in_range).tolist()
        return unusual

    @staticmethod
    def column(vectors: Array, column: int) -> Array:
        """Return a view of a column of a vector or block."""
        return vectors if vectors.ndim == 1 else vectors[:, column]

    def product(self, x: Array, out: Array, alpha: float = 1.0, beta: float = 0.0) -> None:
        """Set ``out = alpha A x + beta out``, counted and timed."""
        began = time.perf_counter()
        self.A.apply(x, out, alpha=alpha, beta=beta)
        self.products += 1
        self.matrix_seconds += time.perf_counter() - began

    def precondition(self, r: Array, z: Array, w: Array | None = None) -> None:
        """Set ``z = M r``, and ``w = A z`` if M is made of products with A; counted and timed."""
        began = time.perf_counter()
        if self.M is None:
            z[...] = r
        elif w is None or self.with_product is None:
            self.M.apply(r, z)
        else:
            self.with_product.apply_with_product(r, z, w)
            self.products += 1
        self.preconditioner_seconds += time.perf_counter() - began

    def true_residual(self, x: Array, out: Array) -> Array:
        """Set ``out = b - A x`` at the cost of one product, and return it."""
        out[...] = self.b
        self.product(x, out, alpha=-1.0, beta=1.0)
        return out

    def relative(self, norm: float, column: int = 0) -> float:
        """Return a norm relative to ``||b||``; 1 for a column whose squares leave the range, as its iterate is zero."""
        b_norm = float(self.b_norms[column])
        if not _SMALLEST_NORM <= b_norm <= _LARGEST_NORM and column in self.out_of_range:
            return 1.0
        return float(norm) / b_norm if b_norm > 0 else float(norm)

    def absolute(self, norm: float, column: int = 0) -> float:
        """Return a norm that is recorded relative to ``||b||``."""
        b_norm = float(self.b_norms[column])
        return norm * b_norm if b_norm > 0 else norm

    def is_useless(self, residual: float, previous: float) -> bool:
        """Return whether the true residual has fallen too little since the last restart for another one to help."""
        return not residual < _USELESS_RESTART * previous

    def stagnation(self, x: Array, residual: float, column: int = 0, work: Array | None = None) -> StopReason:
        """Return why the residual no longer falls: the rounding floor of the system, or another cause.

        ``work``, of the shape of x, is overwritten; without it memory for a vector is taken.
        """
        if isinstance(self.A, HasAbsoluteProduct):
            self.floors[column] = self._floor(self.A, x, column, work)
            if residual <= FLOOR_FACTOR * self.floors[column]:
                return StopReason.ROUNDING_FLOOR
        return StopReason.STAGNATED

    def _floor(self, A: HasAbsoluteProduct, x: Array, column: int, work: Array | None = None) -> float:
        """Return an estimate of the rounding in ``b - A x``, at the cost of a product."""
        xp = self.A.device.xp
        sizes = xp.abs(xp.ascontiguousarray(self.column(x, column)), out=None if work is None or x.ndim > 1 else work)
        bound = A.apply_absolute(sizes)
        self.products += 1
        return self.unit * self.space.norm(bound)

    @property
    def mark(self) -> SystemMark:
        """What a state knows of this system."""
        return SystemMark.of(self.b_norms, self.M)

    def is_recorded(self, gap: float, history: list[float], x: Array, column: int = 0) -> bool:
        """Return whether a residual that a state records is that of its iterate in this system, from which it differs by ``gap``.

        They may differ by the rounding in the iterations so far, of whose relative residuals ``history`` consists.
        """
        scale = self._first_residual(history, column)
        if gap <= _DRIFT * math.sqrt(self.unit) * scale:
            return True
        allowed = _DRIFT_WITHOUT_FLOOR * scale
        if isinstance(self.A, HasAbsoluteProduct):
            with direction_kept(self.A):
                allowed = FLOOR_FACTOR * self._floor(self.A, x, column)
        return gap <= allowed

    def check_recorded(self, gap: float, history: list[float], x: Array, column: int = 0) -> None:
        """Refuse a state of another system with an InputError: one for which :meth:`is_recorded` is false."""
        if not self.is_recorded(gap, history, x, column):
            scale = self._first_residual(history, column)
            raise InputError(
                f"the state belongs to another system: its residual differs from b - A x by {gap / scale if scale else gap:.1g} "
                "of the first one, so A or b is another one; resume with the system that it came from"
            )

    def _first_residual(self, history: list[float], column: int) -> float:
        b_norm = float(self.b_norms[column])
        return max(1.0, history[0]) * b_norm if b_norm > 0 else history[0]

    def verdict(self, reason: StopReason, residual: float, history: list[float], column: int = 0) -> StopReason:
        """Return the final reason to stop, given the true residual.

        CONVERGED if the residual meets the tolerance, NOT_FINITE if it is not finite. INCONSISTENT if iterations ran out and the
        residual is larger than conjugate gradients produce for any consistent system: residuals exceed the first one at most by
        the square root of the condition number, which is less than ``1 / unit`` for every solvable system.
        """
        if residual <= self.tolerances[column]:
            return StopReason.CONVERGED
        if not math.isfinite(residual) and reason is not StopReason.STOPPED:
            return StopReason.NOT_FINITE
        if reason is StopReason.MAXITER and has_diverged(self.relative(residual, column), history[0], self.unit):
            return StopReason.INCONSISTENT
        return reason

    @property
    def bytes_streamed(self) -> int:
        """Bytes that A has moved since the solve began; 0 for a resident matrix."""
        return 0 if self._streamed is None else self._streamed.bytes_streamed - self._before[1]

    @property
    def waited_seconds(self) -> float:
        """Seconds that the host has ever waited in products with A; 0 where they are not counted."""
        return 0.0 if self._streamed is None else self._streamed.waited_seconds

    @property
    def sweeps(self) -> int:
        """Sweeps over the matrix since the solve began; for a resident matrix, the number of products."""
        return self.products if self._streamed is None else self._streamed.sweeps - self._before[0]

    def spent(self) -> dict[str, Any]:
        """Return the entries of a result that describe the cost of the solve."""
        seconds = {"total": time.perf_counter() - self.began}
        if self.A.device.kind == "cpu":  # on a GPU the host only starts the parts
            seconds |= {"matrix": self.matrix_seconds, "preconditioner": self.preconditioner_seconds}
            if self.fewer_threads_seconds:
                seconds["fewer_threads"] = self.fewer_threads_seconds
        return {"sweeps": self.sweeps, "bytes_streamed": self.bytes_streamed, "timings": seconds}

    def column_result(
        self, x: Array, reason: StopReason, history: list[float], residual: float, column: int = 0, **spent: Any
    ) -> SolveResult:
        """Return the result of one right-hand side."""
        floor = self.floors.get(column)
        relative_floor = None if floor is None else self.relative(floor, column)
        return SolveResult.of(x, reason, history, self.relative(residual, column), relative_floor, **spent)
