"""Looks whether an operator is symmetric, for two products: where a solve hardly gets on, that is the first suspicion."""

from __future__ import annotations

from penstock.solvers.problem import LinearProblem
from penstock.solvers.result import BREAKDOWNS, StopReason
from penstock.spmv import Operator, VectorSpace
from penstock.spmv.vectors.noise import noise

# A solve makes progress if the residual halves in this many iterations, on average from the start.
_ITERATIONS = 64
# Rounding, also in float32, and sums in another order stay far below this share.
_LEAST = 1e-6


class SymmetryCheck:
    """Tests A and M once, when a solve has made some iterations and hardly gets on, or breaks down.

    Conjugate gradients do not notice that an operator is not symmetric: they go on without ever converging.
    """

    def __init__(self, problem: LinearProblem) -> None:
        self._problem = problem
        self._first: float | None = None
        self._done = False

    def look(self, iteration: int, residual_norm: float) -> StopReason | None:
        """Take note of a relative residual; return a reason to stop if it hardly falls and an operator is not symmetric."""
        if self._first is None:
            self._first = max(residual_norm, 1.0)
        slow = iteration >= _ITERATIONS and residual_norm > self._first * 0.5 ** (iteration / _ITERATIONS)
        return self._tested() if slow else None

    def of_breakdown(self, reason: StopReason) -> StopReason:
        """Return why a solve broke down: what is not symmetric shows as what is not positive definite, too."""
        return (self._tested() if reason in (*BREAKDOWNS, StopReason.STAGNATED) else None) or reason

    def _tested(self) -> StopReason | None:
        """Test A and M if that has not been done; return what is wrong."""
        if self._done:
            return None
        self._done, problem = True, self._problem
        if not _has_room(problem):
            return None
        problem.products += 2
        if not is_symmetric(problem.A, problem.space):
            return StopReason.NOT_SYMMETRIC
        if problem.M is not None and not is_symmetric(problem.M, problem.space):
            return StopReason.PRECONDITIONER_NOT_SYMMETRIC
        return None


def _has_room(problem: LinearProblem) -> bool:
    """Return whether every rank has memory for three vectors more; the solve itself has what it needs."""
    room = 1.0
    with problem.A.device.current():
        try:
            problem.A.device.xp.empty((3, problem.A.shape[0]), dtype=problem.A.dtype)
        except MemoryError:
            room = 0.0
    return problem.space.communicator.largest(-room) < 0


def is_symmetric(A: Operator, space: VectorSpace) -> bool:
    """Return whether ``u . A (A u)`` equals ``(A u) . (A u)`` for a vector u of random numbers, at the cost of two products.

    For ``A = H + S``, H symmetric and S skew, they differ by about ``|S u|^2``, so a skew part of a thousandth of A or more is
    detected. Collective on ranks; a streamed A sweeps in the same direction afterwards.
    """
    with A.device.current():
        u = noise(A.device, space.communicator.before(A.shape[0]), A.shape[0]).astype(A.dtype)
        image = A.apply(u)
        square = space.dot(image, image)
        return not abs(space.dot(u, A.apply(image)) - square) > _LEAST * square
