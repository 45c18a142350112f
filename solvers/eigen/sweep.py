"""One pass over K of the eigenvalue iteration: see :mod:`penstock.solvers.eigen.lobpcg`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.solvers.amg.galerkin import PRODUCT
from penstock.solvers.amg.smoothed_aggregation import SmoothedAggregation
from penstock.solvers.eigen.mass import Mass
from penstock.spmv import Array, SweptOperator, VectorSpace
from penstock.spmv.vectors.recurrence import Recurrence, RecurrenceStep

#: Blocks of vectors of a pass, and of the iteration between two of them.
BLOCKS = 14


@dataclass
class ModesRecurrence(Recurrence):
    """The products of a pass, with those by M where they are needed, and a second recurrence beside the last steps.

    The step that forms residuals takes ``f = M X Lambda``. Its residuals, and the products of the steps after it, times weights,
    add up in ``gathered``. Behind the step ``split``, whose product is ``K m``, the recurrence ``side`` begins with ``M m``.
    """

    mass: Mass | None = None
    theta: Array | None = None  # the diagonal of Lambda
    of_mass: Array | None = None  # receives M X
    gathered: Array | None = None
    driving: Array | None = None  # added to f
    weights: dict[int, float] = field(default_factory=dict)
    split: int = 0
    side: Recurrence | None = None
    side_first: float = 0.0

    def advance(self, stage: int, rows: slice, product: Callable[[Array, Array], object]) -> None:
        """Perform a step for some rows, and that of the second recurrence."""
        super().advance(stage, rows, product)
        if stage > self.split and self.side is not None:
            self.side.advance(stage - self.split - 1, rows, product)

    def scatter(self, stage: int, add: Callable[[Array, Array], object]) -> None:
        """Let ``add`` add part of the products to both images."""
        super().scatter(stage, add)
        if stage > self.split and self.side is not None:
            self.side.scatter(stage - self.split - 1, add)

    def complete(self, stage: int, rows: slice) -> None:
        """Perform the steps for rows whose products are complete."""
        super().complete(stage, rows)
        if stage > self.split and self.side is not None:
            self.side.complete(stage - self.split - 1, rows)

    def clear(self) -> None:
        """Empty both images."""
        super().clear()
        if self.side is not None:
            self.side.clear()

    def _step(self, stage: int, rows: slice, image: Array, *, clears: bool) -> None:
        of = self.vectors(stage)[0]
        if self.steps[stage].forms_residual:
            assert self.mass is not None, "of every pass"
            assert self.of_mass is not None, "of every pass"
            assert self.gathered is not None, "of every pass"
            self.mass.apply_rows(rows, of, self.of_mass[rows])
            self.mass.device.xp.multiply(self.of_mass[rows], self.theta, out=self.f[rows])
            if self.driving is not None:
                f = self.f[rows]
                f += self.driving[rows]
            super()._step(stage, rows, image, clears=clears)
            self.gathered[rows] = self.f[rows]
            return
        if (weight := self.weights.get(stage)) is not None:
            assert self.gathered is not None
            self.space.combine(weight, image.reshape(-1), 1.0, self.gathered[rows].reshape(-1))
        super()._step(stage, rows, image, clears=clears)
        if stage == self.split and self.side is not None and self.mass is not None:
            of_mass = self.side.f[rows]
            self.mass.apply_rows(rows, of, of_mass)
            self._three_terms(rows, True, -self.side_first, None, of_mass, 0.0, of_mass, 0.0, self.side.v[rows], False)

    def capture_key(self) -> tuple[object, ...]:
        """Return what a captured graph depends on."""
        own = (self.of_mass, self.gathered, self.theta, self.driving)
        addresses = tuple(int(array.data.ptr) for array in own if array is not None)
        side = () if self.side is None else self.side.capture_key()
        return (*super().capture_key(), *side, *addresses, *sorted(self.weights.items()), id(self.mass))

    def kernels(self) -> tuple[object, ...]:
        """Return what selects the kernels of the steps."""
        side = () if self.side is None else self.side.kernels()
        return (*super().kernels(), *side, *sorted(self.weights), type(self.mass), self.driving is None)


class ModesSweep:
    """All products of an iteration, for X of shape (n, columns), and the vectors that the iteration keeps.

    X and Q are the fine parts of the Ritz vectors and of the search directions, which the iteration advances. A pass adds
    ``P c`` to X, and leaves ``f = M X Lambda - K X``, ``of_mass = M X``, ``m = q(D K) D f``, ``u = K m`` and ``t = M m``; of the
    coarse level it returns ``P^T f``, ``P^T K m`` and ``P^T M m``.
    """

    def __init__(self, K: Any, mass: Mass, M: SmoothedAggregation, columns: int) -> None:
        xp, shape = K.device.xp, (K.shape[0], columns)
        self.K, self.mass, self.M = K, mass, M
        vectors = [xp.zeros(shape) for _ in range(BLOCKS)]
        self.X, self.Q, self.m, self.of_mass, self.f, self.u, self.t, self._gathered = vectors[:8]
        self._v, other, image, v_side, other_side, image_side = vectors[8:]
        self.theta = xp.zeros(columns)
        #: Columns of X that are zero, in place of whose residuals the next pass takes those of Q, which it empties.
        self.driven: slice | None = None
        smooth, space = M.smooth, VectorSpace.of(K)
        split = len(smooth) + 1 + len(M.polynomial)
        steps = [
            *smooth[:-1],
            replace(smooth[-1], adds=1.0),
            RecurrenceStep(M.first, 0.0, 0.0, forms_residual=True, keeps=0),
            *M.polynomial,
            replace(smooth[0], keeps=1),
            *smooth[1:],
            PRODUCT,
        ]
        side = Recurrence(
            [*(replace(step, driven=True) for step in smooth[1:]), PRODUCT],
            v_side, other_side, self.t, M.scaling, image_side, space,
        )  # fmt: skip
        weights = weights_of_products(M.first, M.polynomial, [step.a for step in smooth])
        first = len(smooth) + 1
        self._recurrence = ModesRecurrence(
            steps, self._v, other, self.f, M.scaling, image, space,
            added=self.X, kept=((self.X, None), (self.m, self.u)), mass=mass, theta=self.theta, of_mass=self.of_mass,
            gathered=self._gathered, weights={first + i: weight for i, weight in enumerate(weights)},
            split=split, side=side, side_first=smooth[0].a,
        )  # fmt: skip

    def run(
        self, c: Array, values: np.ndarray[Any, Any], goes_on: Callable[[], bool]
    ) -> tuple[Array, Array, Array] | None:
        """Make a pass with ``X + P c`` in place of X; return ``P^T f``, ``P^T K m`` and ``P^T M m``.

        A pass over a matrix in memory ends with f, and returns None, if ``goes_on`` says so; one over a matrix that is streamed
        has the further products in any case.
        """
        T, of, xp = self.M.level.T, self._recurrence, self.K.device.xp
        of.driving = None if self.driven is None else self.Q
        self.theta[...] = self.K.device.asarray(np.ascontiguousarray(values))
        T.prolong(c, self._v)
        if isinstance(self.K, SweptOperator):
            of.run(self.K)
            if not goes_on():
                return None
        else:
            residuals = len(self.M.smooth) + 1
            of.run_whole(self.K, range(residuals))
            if not goes_on():
                return None
            of.run_whole(self.K, range(residuals, len(of.steps)))
        side = of.side
        assert side is not None
        below = [xp.empty_like(c) for _ in range(3)]
        T.restrict(self._gathered, below[0])
        T.restrict(of.vectors(len(of.steps))[0], below[1])
        self._gathered[...] = self.t
        self._gathered -= side.vectors(len(side.steps))[0]
        T.restrict(self._gathered, below[2])
        if self.driven is not None:
            self.f[:, self.driven], below[0][:, self.driven] = 0.0, 0.0
            self.Q[...] = 0.0
            self.driven = None
        return below[0], below[1], below[2]

    def restrict(self, vectors: Array) -> Array:
        """Return ``P^T v``, by a pass of few products; vectors that a pass leaves are overwritten."""
        out = self.K.device.xp.empty((self.M.level.T.unknowns, vectors.shape[1]))
        self.u[...] = vectors
        self._recurrence.image[...] = 0
        self.M.restrict(self.u, out, (self._v, self._recurrence.before, self._recurrence.image))
        return out


def weights_of_products(first: float, polynomial: list[RecurrenceStep], factors: list[float]) -> list[float]:
    """Return weights with which products of a Chebyshev iteration add up to ``p(K D) r``, besides r itself.

    The products are ``K z`` of the iterates, which begin with ``z = first D r`` and go on with the steps of the polynomial; both
    they and ``p(K D) r``, ``p(t)`` being the product of ``1 - factor t``, are polynomials in ``K D`` applied to r.
    """
    degree = len(factors)
    # Rows: K z of one iterate after the other; columns: the powers 1 to degree of K D.
    before, now = np.zeros(degree), np.zeros(degree)
    now[0] = first
    images = [now]
    for step in polynomial[: degree - 1]:
        following = step.b * now + step.c * before
        following[0] += step.a
        following[1:] -= step.a * now[:-1]
        before, now = now, following
        images.append(now)
    wanted = np.array([1.0])
    for factor in factors:
        wanted = np.convolve(wanted, [1.0, -factor])
    return [float(weight) for weight in np.linalg.solve(np.array(images).T, wanted[1:])]
