"""The products of an iteration of conjugate gradients with a coarse level: see :mod:`penstock.solvers.amg.method`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from penstock.solvers.amg.galerkin import PRODUCT
from penstock.solvers.amg.smoothed_aggregation import SmoothedAggregation
from penstock.solvers.problem import LinearProblem
from penstock.solvers.result import StopReason
from penstock.solvers.states import direction_kept
from penstock.spmv import Array, Operator, SweptOperator
from penstock.spmv.vectors.recurrence import Recurrence, RecurrenceStep


class CoarseSweep:
    """All products of an iteration, for b of shape (n,) or a block (n, k); other vectors have the shape of b.

    x and y are the iterate and its fine part, which the solver advances; r, m and u are the residual ``b - A x``, ``m = q(D A)
    D r`` and ``u = A m``. e1 and g have a row for each unknown of the coarse level: the coarse correction that x contains, and
    ``P^T A m``.

    :meth:`run` computes e1, x and r, and :meth:`complete` the rest, from which the next update is made and which a residual that
    is small enough does not need. Where that division would cost a sweep, ``run`` computes all.
    """

    def __init__(self, problem: LinearProblem, b: Array) -> None:
        self.problem, self._b = problem, b
        self.M = M = cast(SmoothedAggregation, problem.M)
        # A GPU replays captured sweeps, which always use the same memory: the vectors of one solve go to the next.
        self._vectors = M.lend_vectors(b)
        self._v, self._other, self.m, self.u, self._image, self.r, self.x, self.y = self._vectors
        self._image[...] = 0
        self.g, self.e1 = (problem.A.device.xp.zeros((M.level.T.unknowns, *b.shape[1:])) for _ in range(2))
        self._set_steps(M.first, M.polynomial)

    def _set_steps(self, first: float, polynomial: Sequence[RecurrenceStep]) -> None:
        smooth = self.M.smooth
        steps = [
            *smooth[:-1],
            replace(smooth[-1], adds=True),
            RecurrenceStep(first, 0.0, 0.0, forms_residual=True, keeps=0),
            *polynomial,
            replace(smooth[0], keeps=1),
            *smooth[1:],
            PRODUCT,
        ]
        vectors: dict[str, Any] = {
            "f": self.r, "diagonal": self.M.scaling, "image": self._image, "space": self.problem.space, "added": self.y,
            "kept": ((self.x, None), (self.m, self.u)),
        }  # fmt: skip
        whole = Recurrence(steps, self._v, self._other, **vectors)
        residual = len(smooth) + 1
        self._first, self._rest = whole, None
        if _division_is_free(self.problem.A, residual, len(steps)):
            self._first = Recurrence(steps[:residual], self._v, self._other, **vectors)
            self._rest = Recurrence(steps[residual:], *whole.vectors(residual), **vectors)
        self._left = self._rest  # what :meth:`complete` has to do

    def widen(self) -> None:
        """Use the polynomial for a matrix whose slow modes the coarse level represents badly, from the next sweep on."""
        self._set_steps(*self.M.wide_polynomial())

    def state_arrays(self) -> dict[str, Array]:
        """Return the arrays of a state before the first iteration, x and y those of this object."""
        coarse = {name: self.problem.A.device.xp.zeros_like(self.g) for name in ("c", "p_c", "h", "rho")}
        return {"x": self.x, "y": self.y, "p": self.problem.A.device.xp.zeros_like(self.y), **coarse}

    def take_up(self, x: Array, y: Array, *, widened: bool) -> tuple[Array, Array]:
        """Go on where another solve ended, with a copy of its x and y, perhaps from the host, and repeat its last sweep."""
        if widened:
            self.widen()
        self._turn_back(self._first)
        for own, other in ((self.x, x), (self.y, y)):
            self.problem.A.device.fill(own, other)
        return self.x, self.y

    def start(self, x0: Array | None, c: Array, rho: Array) -> None:
        """Set y to the guess, c to the coarse part that is best for it, and ``rho = P^T (b - A x)``; a sweep of few products."""
        problem, level, began = self.problem, self.M.level, time.perf_counter()
        self.y[...] = 0 if x0 is None else x0
        self.r[...] = self._b
        if x0 is not None:
            problem.product(self.y, self.r, alpha=-1.0, beta=1.0)
        self.M.restrict(self.r, rho, (self._v, self._other, self._image))
        problem.products += len(self.M.smooth)
        problem.matrix_seconds += time.perf_counter() - began
        c[...] = level.solve(rho)
        level.A.apply(c, rho, alpha=-1.0, beta=1.0)

    def run(self, c: Array, rho: Array) -> None:
        """Compute the iterates and their residuals."""
        self.e1[...] = self.M.level.solve(rho)
        self.M.level.T.prolong(c + self.e1, self._v)
        self.r[...] = self._b
        self._left = self._rest
        self._advance(self._first)

    def complete(self) -> None:
        """Compute what the update after :meth:`run` needs."""
        if (rest := self._left) is not None:
            self._left = None
            self._advance(rest)

    def complete_ahead(self) -> None:
        """Let a GPU go on while the host waits for what :meth:`run` has begun.

        Ranks, whose devices may differ, do not, nor do matrices of which data move: their sweeps are too dear to do one in vain.
        """
        A = self.problem.A
        moves = isinstance(A, SweptOperator) and A.bytes_streamed > 0
        if A.device.kind == "cuda" and self.problem.space.communicator.size == 1 and not moves:
            self.complete()

    def _advance(self, recurrence: Recurrence) -> None:
        problem, began = self.problem, time.perf_counter()
        last = recurrence.run(problem.A)
        problem.products += len(recurrence.steps)
        problem.matrix_seconds += time.perf_counter() - began
        if self._left is None:
            self.M.level.T.restrict(last, self.g)

    def clear(self, column: int) -> None:
        """Set all to zero that is not finite in a column: NaN times zero would be NaN in every other one."""
        for vectors in (self._v, self._other, self._image, self.r, self.m, self.u, self.g, self.e1):
            self.problem.column(vectors, column)[...] = 0

    def at_floor(self, residual: float, column: int = 0) -> bool:
        """Return whether the residual of x has reached the rounding floor; a sweep that leaves the direction as it was."""
        work = self._v if self._left is None else self.u  # what is left to do overwrites u, and begins with v
        with direction_kept(self.problem.A):
            reason = self.problem.stagnation(self.x, residual, column, work=work)
        return reason is StopReason.ROUNDING_FLOOR

    def _turn_back(self, recurrence: Recurrence) -> None:
        """Let the next sweeps repeat the last ones in their direction, because half of a matrix adds in the order of the rows."""
        A = self.problem.A
        if isinstance(A, SweptOperator):
            A.turn_back(len(recurrence.steps))

    def end(self) -> tuple[Array, ...]:
        """Give the vectors back to the preconditioner, and return x and y."""
        if self._rest is not None and self._left is None:
            self._turn_back(self._rest)  # so that the last sweeps are those of :meth:`run`
            self._left = self._rest
        return self.M.return_vectors(self._vectors, self.x, self.y)


def _division_is_free(A: Operator, first: int, products: int) -> bool:
    """Return whether some products need no further sweep over A if others begin only after the ``first`` ones have ended."""
    if not isinstance(A, SweptOperator):
        return True
    return A.sweeps_of(first) + A.sweeps_of(products - first) == A.sweeps_of(products)
