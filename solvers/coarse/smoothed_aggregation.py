"""The two-level preconditioner coarse - polynomial - coarse, with a smoothed aggregation prolongator that is never stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from penstock.solvers.chebyshev import Interval
from penstock.solvers.coarse.galerkin import PRODUCT, smoothing_steps
from penstock.solvers.coarse.level import CoarseLevel
from penstock.solvers.preconditioners import DiagonalBlocks
from penstock.spmv import Array, Operator, ValidatedOperator, VectorSpace
from penstock.spmv.vectors.recurrence import Recurrence, RecurrenceStep

# Where the interval of the polynomial begins, as a multiple of ``high / degree^2``: where the coarse level does its part, and
# where the polynomial must do most of it.
_LOW, _WIDE_LOW = 4.0, 0.5


class SmoothedAggregation(ValidatedOperator):
    """``M = 2 Q - Q A Q + (I - Q A) q(D A) D (I - A Q)`` with ``Q = P B P^T``, B an inverse of ``P^T A P``, ``P = p(D A) T``.

    Parameters
    ----------
    A : Operator
    diagonal : DiagonalBlocks
        D, the inverse of the dense blocks on the diagonal of A.
    high : float
        Bound of the eigenvalues of ``D A``.
    degree : int
        Degree m of ``1 - t q(t)``, the Chebyshev polynomial that is smallest from ``4 high / m^2`` to ``high``; odd.
    smoothing : int
        Degree of p.
    level : CoarseLevel

    Notes
    -----
    Symmetric positive definite if B is and the eigenvalues of ``B P^T A P`` are below 2 (Mandel 1993, balancing). Applied on its
    own it needs ``4 smoothing + degree + 1`` products with A; :func:`cg` shares them with its own: ``2 smoothing + degree + 1``
    an iteration, in one sweep if A is streamed.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import smoothed_aggregation
    >>> beam = Cantilever(nodes=(9, 3, 3), dof=3)
    >>> M = smoothed_aggregation(beam.matrix(), coordinates=beam.mesh.coordinates(), aggregate_nodes=27)
    >>> M.degree, M.smoothing, (M @ beam.load()).shape
    (9, 2, (243,))
    """

    #: How :func:`cg` and :func:`block_cg` solve with this preconditioner.
    methods: ClassVar[tuple[str, str]] = ("coarse_cg", "coarse_block_cg")

    def __init__(
        self, A: Operator, diagonal: DiagonalBlocks, high: float, degree: int, smoothing: int, level: CoarseLevel
    ) -> None:
        self.A, self.diagonal, self.high, self.degree, self.smoothing = A, diagonal, high, degree, smoothing
        self.level, self.space = level, VectorSpace.of(A)
        self.shape, self.dtype, self.device = A.shape, np.dtype(A.dtype), A.device
        self.smooth = smoothing_steps(smoothing, high)
        self.first, self.polynomial = self._polynomial(_LOW)
        self._work: list[Array] = []
        self._lent: list[Array] = []
        #: A vector in the direction of the largest eigenvalue of ``D A``, once the values of A have changed.
        self.fastest: Array | None = None

    def wide_polynomial(self) -> tuple[float, list[RecurrenceStep]]:
        """Return ``first`` and the further steps of a polynomial that is small on an interval that begins lower."""
        return self._polynomial(_WIDE_LOW)

    def _polynomial(self, low: float) -> tuple[float, list[RecurrenceStep]]:
        (first, _), *steps = Interval(low * self.high / self.degree**2, self.high).coefficients(self.degree)
        return first, [RecurrenceStep(a, 1.0 + c, -c if number else 0.0) for number, (a, c) in enumerate(steps)]

    @property
    def capturable(self) -> bool:
        """Whether an application only starts kernels."""
        return all(
            isinstance(operator, ValidatedOperator) and operator.capturable for operator in (self.A, self.level.inverse)
        )

    def lend_vectors(self, like: Array) -> list[Array]:
        """Return eight vectors for a solve, those of the last one if they have been returned."""
        vectors, self._lent = self._lent, []
        if not vectors or vectors[0].shape != like.shape:
            vectors = [self.device.xp.empty_like(like) for _ in range(8)]
        return vectors

    def take_vectors(self, other: SmoothedAggregation) -> None:
        """Take over the vectors of a preconditioner that this one replaces."""
        self._lent, self._work, other._lent, other._work = other._lent, other._work, [], []

    def return_vectors(self, vectors: list[Array]) -> None:
        """Take them back, for the next solve."""
        self._lent = vectors

    def _vectors(self, like: Array) -> list[Array]:
        if not self._work or self._work[0].shape != like.shape:
            xp, coarse = self.device.xp, (self.level.T.unknowns, *like.shape[1:])
            self._work = [xp.zeros_like(like) for _ in range(6)] + [xp.zeros(coarse) for _ in range(2)]
        return self._work

    def _run(self, steps: list[RecurrenceStep], v: Array, other: Array, f: Array, image: Array) -> Array:
        return Recurrence(steps, v, other, f, self.diagonal.blocks, image, self.space).run(self.A) if steps else v

    def restrict(self, r: Array, out: Array, work: Sequence[Array]) -> None:
        """Set ``out = P^T r``; r is overwritten.

        ``P^T r = T^T p(A D) r``, and ``p(A D) r`` is what ``len(smooth)`` steps of Richardson's iteration from zero leave of r:
        as many products, in one sweep if A is streamed. The last of the three work vectors must be zero.
        """
        v, other, image = work
        self.diagonal._apply(r, v, self.smooth[0].a, 0.0)
        steps = [*(replace(step, driven=True) for step in self.smooth[1:]), PRODUCT]
        r -= Recurrence(steps, v, other, r, self.diagonal.blocks, image, self.space, repeats=False).run(self.A)
        self.level.T.restrict(r, out)

    def _coarse(self, r: Array) -> Array:
        """Return ``Q r``; the work vectors 0 to 2 are overwritten."""
        v, other, image, own, *_, restricted, solved = self._vectors(r)
        own[...] = r
        self.restrict(own, restricted, (v, other, image))
        self.level.inverse.apply(restricted, solved)
        self.level.T.prolong(solved, v)
        return self._run(self.smooth, v, other, v, image)

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        v, other, image, _, residual, total, *_ = self._vectors(x)
        total[...] = self._coarse(x)
        residual[...] = x
        self.A.apply(total, residual, alpha=-1.0, beta=1.0)
        self.diagonal._apply(residual, v, self.first, 0.0)
        total += self._run(self.polynomial, v, other, residual, image)
        residual[...] = x
        self.A.apply(total, residual, alpha=-1.0, beta=1.0)
        total += self._coarse(residual)
        out[...] = alpha * total if beta == 0.0 else alpha * total + beta * out
