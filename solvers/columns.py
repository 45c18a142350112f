"""The right-hand sides of one solve, one or several: how each of them begins, is tested, ends, and which iterate it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.solvers.problem import LinearProblem
from penstock.solvers.result import StopReason
from penstock.solvers.states import direction_kept, histories_of
from penstock.spmv import Array, VectorSpace, device_of
from penstock.spmv.communicator import ALONE, Communicator
from penstock.spmv.vectors.block_space import BlockSpace

Numbers = np.ndarray[Any, np.dtype[np.float64]]


class ColumnSpace:
    """Inner products and updates of vectors ``(n,)``, or of equal columns of blocks ``(n, k)``; results have a row of k numbers.

    They are those of :class:`VectorSpace` or of :class:`BlockSpace`, which differ in rounding; ``single`` chooses the former for
    a block of one column.
    """

    def __init__(self, like: Array, communicator: Communicator = ALONE, *, single: bool = False) -> None:
        device = device_of(like)
        self._vectors, self._blocks = VectorSpace(device, communicator), None
        if like.ndim == 2 and not single:
            self._blocks = BlockSpace(device, len(like), like.shape[1], communicator)

    @property
    def blocks(self) -> BlockSpace:
        """The space of blocks, where there is one."""
        assert self._blocks is not None, "vectors are blocks"
        return self._blocks

    def dots(self, *pairs: tuple[Array, Array]) -> Numbers:
        """Return the inner products of equal columns of several pairs, ``(pairs, k)``."""
        if self._blocks is None:
            return np.array(self._vectors.dots(*((x.reshape(-1), y.reshape(-1)) for x, y in pairs))).reshape(-1, 1)
        return np.array([self._blocks.dots(x, y) for x, y in pairs])

    def dots_with(
        self, pairs: Sequence[tuple[Array, Array]], other: ColumnSpace, others: Sequence[tuple[Array, Array]]
    ) -> tuple[Numbers, Numbers]:
        """Return the inner products of pairs, and of pairs of another space; of vectors of one process, the host waits once."""
        if self._blocks is not None or self._vectors.communicator.size > 1:
            return self.dots(*pairs), other.dots(*others)
        both = self.dots(*pairs, *others)
        return both[: len(pairs)], both[len(pairs) :]

    def norms(self, x: Array) -> Numbers:
        """Return the norms of the columns."""
        return _roots(self.dots((x, x))[0])

    def norms_later(self, x: Array) -> Callable[[], Numbers]:
        """Begin to compute the norms of the columns; return a function that waits for them, but not for what begins later."""
        if self._blocks is not None:
            norms = self.norms(x)
            return lambda: norms
        squares = self._vectors.dots_later((x.reshape(-1), x.reshape(-1)))
        return lambda: _roots(np.array(squares()))

    def combine(self, alpha: Numbers, x: Array, beta: Numbers, y: Array) -> None:
        """Set ``y = alpha x + beta y`` with a number for each column."""
        if self._blocks is None:
            self._vectors.combine(float(alpha[0]), x.reshape(-1), float(beta[0]), y.reshape(-1))
        else:
            self._blocks.add(y, x, np.diag(alpha), y, np.diag(beta))

    def factor(self, numbers: Numbers) -> Any:
        """Return what multiplies each column of a vector or block by its number."""
        return float(numbers[0]) if self._blocks is None else self._vectors.device.asarray(numbers)


def _roots(squares: Numbers) -> Numbers:
    roots: Numbers = np.sqrt(np.maximum(squares, 0.0))
    return roots


def least_error(
    zz: Numbers, zr: Numbers, ss: Numbers | None = None, sz: Numbers | None = None, sr: Numbers | None = None
) -> tuple[Numbers, Numbers]:
    """Return the coefficients of z and of the last step s with which the error is least in the norm of A.

    The arguments are inner products: ``z.Az``, ``z.r``, ``s.As``, ``s.Az`` and ``s.r``.
    """
    alone = np.divide(zr, zz, out=np.zeros_like(zz), where=zz > 0)
    if ss is None or sz is None or sr is None:
        return alone, np.zeros_like(zz)
    of_z, of_s = alone, np.zeros_like(zz)
    for column in range(len(zz)):
        if zz[column] > 0 and ss[column] > 0:
            scale = 1.0 / np.sqrt([zz[column], ss[column]])
            cosine = sz[column] * scale[0] * scale[1]
            gram = np.array([[1.0, cosine], [cosine, 1.0]])
            known = np.array([zr[column], sr[column]]) * scale
            of_z[column], of_s[column] = np.linalg.lstsq(gram, known, rcond=1e-12)[0] * scale
    return of_z, of_s


class Columns:
    """The k >= 1 right-hand sides of one solve.

    Parameters
    ----------
    problem : LinearProblem
        With its norms.

    Attributes
    ----------
    reasons : list of StopReason or None
        Why each column has ended, shared with a state that holds them.
    histories : list of list of float
        The relative residual norms of each column, shared with the state.
    residuals : float64 array, (k,)
        ``||b - A x||`` of each column; NaN while it is not known.
    aside : dict
        Columns that need no solve, and how they end.
    """

    def __init__(self, problem: LinearProblem) -> None:
        self._problem, self.aside = problem, problem.aside
        self.reset()

    def reset(self) -> None:
        """Begin anew: columns that need a solve run, and nothing is known of their residuals."""
        count = self._problem.columns
        self.reasons: list[StopReason | None] = [self.aside.get(column) for column in range(count)]
        self.histories: list[list[float]] = [[] for _ in range(count)]
        self.residuals: Numbers = np.full(count, math.nan)
        for column in self.aside:
            self.residuals[column] = self._problem.b_norms[column]

    def begin(self, norms: Sequence[float] | Numbers) -> None:
        """Begin with first residuals, which were computed from A, b and x."""
        self.reset()
        self.append(norms)
        for column in self.running:
            self.test(column, float(norms[column]))

    def share(self, state: Any) -> None:
        """Go on with what a state holds; both change it from now on."""
        self.histories = histories_of(state)
        self.reasons = getattr(state, "reasons", self.reasons)

    @property
    def running(self) -> list[int]:
        """The columns that are still being solved."""
        return [column for column, reason in enumerate(self.reasons) if reason is None]

    @property
    def ended(self) -> list[int]:
        """The columns that stand still."""
        return [column for column, reason in enumerate(self.reasons) if reason is not None]

    @property
    def last(self) -> list[float]:
        """The last relative residual of every column."""
        return [history[-1] for history in self.histories]

    @property
    def residual_norm(self) -> float:
        """The largest relative residual of the running columns, or of all if none runs."""
        last = self.last
        return max([last[column] for column in self.running] or last)

    @property
    def iterations_left(self) -> float:
        """The expected number of further iterations at the mean rates so far; infinite without a rate."""
        most = 0.0
        for column in self.running:
            norms, target = self.histories[column], self._problem.relative(self._problem.thresholds[column], column)
            if len(norms) < 2 or not 0 < norms[-1] < norms[0] or target <= 0:
                return math.inf
            rate = math.log(norms[0] / norms[-1]) / (len(norms) - 1)
            most = max(most, math.log(norms[-1] / target) / rate)
        return most

    def append(self, norms: Sequence[float] | Numbers) -> None:
        """Append a residual to the history of every column; that of a column aside is b."""
        for column, history in enumerate(self.histories):
            norm = self.residuals[column] if column in self.aside else norms[column]
            history.append(self._problem.relative(float(norm), column))

    def test(self, column: int, residual: float) -> bool:
        """Note the true residual of a column; end it if that meets the tolerance or is not finite, and return whether it has."""
        self.residuals[column] = residual
        if residual <= self._problem.tolerances[column]:
            self.reasons[column] = StopReason.CONVERGED
        elif not math.isfinite(residual):
            self.reasons[column] = StopReason.NOT_FINITE
        return self.reasons[column] is not None

    def end(self, column: int, reason: StopReason | None, residual: float | None = None) -> None:
        """End a column if there is a reason; without a residual what was known of it stays."""
        if reason is not None:
            self.reasons[column] = reason
            if residual is not None:
                self.residuals[column] = residual

    def stop(self, reason: StopReason, residuals: Numbers) -> None:
        """End all running columns for a reason, unless their true residuals know better."""
        for column in self.running:
            residual = float(residuals[column])
            self.end(column, self._problem.verdict(reason, residual, self.histories[column], column), residual)

    def check_recorded(self, gaps: Numbers, x: Array) -> None:
        """Refuse a state whose residuals differ from those of its iterates by more than rounding."""
        for column, history in enumerate(self.histories):
            if column not in self.aside:
                self._problem.check_recorded(float(gaps[column]), history, x, column)

    def are_recorded(self, gaps: Numbers, x: Array) -> bool:
        """Return whether the residuals of a state are those of its iterates but for rounding."""
        return all(
            self._problem.is_recorded(float(gaps[column]), history, x, column)
            for column, history in enumerate(self.histories)
            if column not in self.aside
        )

    def choose(self, x: Array, best: BestIterate) -> Array:
        """Return the iterates, in columns where they are better those of ``best``, whose memory is used up, or zero."""
        problem, space = self._problem, self._problem.space
        better = [
            column
            for column, reason in enumerate(self.reasons)
            if reason is not None
            and column not in self.aside
            and best.is_better(reason, problem.relative(self.residuals[column], column), column)
        ]
        if not better:
            return x
        with direction_kept(problem.A):
            true_residuals = problem.true_residual(best.x, problem.A.device.xp.empty_like(x))
        for column in range(problem.columns):
            chosen, last = problem.column(best.x, column), problem.column(x, column)
            if column not in better:
                chosen[...] = last
                continue
            norm = space.norm(problem.A.device.xp.ascontiguousarray(problem.column(true_residuals, column)))
            changed = norm < self.residuals[column]
            if not changed:
                chosen[...] = last
            else:
                self.residuals[column] = norm
                if norm <= problem.tolerances[column] and self.reasons[column] is not StopReason.NOT_FINITE:
                    self.reasons[column] = StopReason.CONVERGED
            of_zero = problem.absolute(1.0, column)
            if not self.residuals[column] <= of_zero:  # x = 0 is better
                chosen[...], self.residuals[column] = 0, of_zero
                changed = True
            if changed:
                self._judge_anew(problem, best.x, column)
        return best.x

    def _judge_anew(self, problem: LinearProblem, x: Array, column: int) -> None:
        """Correct the reason for another iterate than the last one.

        The floor was estimated for the last iterate; the other one may be smaller, and its floor lower. Directions at the floor
        are noise, with which residuals may grow as they do where no x solves the system. Without memory to tell, it stands.
        """
        reason = self.reasons[column]
        if reason not in (StopReason.ROUNDING_FLOOR, StopReason.INCONSISTENT):
            return
        try:
            with direction_kept(problem.A):
                verdict = problem.stagnation(x, float(self.residuals[column]), column)
        except MemoryError:
            if problem.space.communicator.size > 1:  # the other ranks wait in the product
                raise
            return
        if reason is StopReason.ROUNDING_FLOOR or verdict is StopReason.ROUNDING_FLOOR:
            self.reasons[column] = verdict


# Copies cost less than a hundredth of a solve: one at each halving of the residual, and in between one in 16 looks.
_LOOKS_PER_COPY = 16
#: After these reasons the last iterate has the smallest error, although its residual may be somewhat larger.
_LAST_WILL_DO = (
    StopReason.MAXITER,
    StopReason.STOPPED,
    StopReason.NOT_FINITE,
    StopReason.NOT_POSITIVE_DEFINITE,
    StopReason.PRECONDITIONER_NOT_POSITIVE_DEFINITE,
)
_EARLY = (StopReason.MAXITER, StopReason.STOPPED, StopReason.NOT_FINITE)
# A solve that breaks down with a residual above three times the norm of b has gone astray.
_BROKEN = 3.0
# Residuals of a solve that gets on rise and fall by less than this factor, as a rule.
_GROWN = 100.0
# Growth counts as no more than this, so that its square stays finite.
_MOST_GROWN = 1e150


class BestIterate:
    """Keeps a copy of the iterate of each right-hand side whose relative residual was smallest; ``x`` starts as the guess.

    The copy is renewed when the residual has halved, and between halvings at most once in 16 looks: on the way down it lags by
    less than a factor of two, on a plateau hardly at all.

    Residuals of a recurrence drift from the true ones. They grow by at most the root of the condition number, and rounding is
    about u times that number: where a residual has grown by a factor g, one below ``u g^2`` counts as that much.
    """

    def __init__(self, x: Array, residuals: Sequence[float]) -> None:
        self.x, self.last, self.residuals = x.copy(), list(residuals), list(residuals)
        for column, residual in enumerate(residuals):
            if not residual <= 1.0:  # x = 0 has the relative residual 1
                (self.x if x.ndim == 1 else self.x[:, column])[...] = 0
                self.residuals[column] = 1.0
        self._looks = self._copies = 0
        self._first = [max(1.0, residual) for residual in self.residuals]
        self._largest, self._unit = list(self._first), float(np.finfo(x.dtype).eps) / 2

    def note(self, x: Array, residuals: Sequence[float]) -> None:
        """Copy the columns of an iterate that are better than the copy."""
        self._looks += 1
        self.last = list(residuals)
        self._largest = [max(pair) for pair in zip(self._largest, residuals, strict=True)]
        grown = [min(most / first, _MOST_GROWN) for most, first in zip(self._largest, self._first, strict=True)]
        drifted = [self._unit * factor**2 for factor in grown]
        pairs = list(zip(map(max, residuals, drifted), self.residuals, strict=True))
        between = _LOOKS_PER_COPY * self._copies < self._looks
        better = [residual < 0.5 * best or (between and residual < best) for residual, best in pairs]
        if not any(better):
            return
        self._copies += not any(residual < 0.5 * best for residual, best in pairs)
        if all(better):
            self.x[...] = x
        else:  # in one pass over the block
            xp = device_of(x).xp
            xp.copyto(self.x, x, where=xp.asarray(better))
        self.residuals = [residual if taken else best for taken, (residual, best) in zip(better, pairs, strict=True)]

    def is_better(self, reason: StopReason, residual: float, column: int = 0) -> bool:
        """Return whether the copy was better than the last iterate, given the reason for stopping and its relative residual.

        A solve that was merely ended early keeps the last iterate, whose error is the smallest in the norm of A, unless the
        residual has grown out of proportion.
        """
        if reason is StopReason.CONVERGED:
            return False
        last = residual if math.isfinite(residual) else self.last[column]
        factor = _GROWN if reason in _LAST_WILL_DO else 1.0
        broken = reason not in _EARLY and math.isfinite(residual) and residual > _BROKEN
        return broken or not last <= factor * self.residuals[column]
