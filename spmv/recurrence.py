"""Polynomials in a matrix applied to a vector: many products, each with the result of the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from penstock.spmv.device import Array
from penstock.spmv.operator import Operator, product_of
from penstock.spmv.vectors import VectorSpace

__all__ = ["AdvancesRecurrences", "Recurrence", "RecurrenceStep"]


@dataclass(frozen=True)
class RecurrenceStep:
    """``v[j+1] = a D (f - A v[j]) + b v[j] + c v[j-1]``; what a ``b`` or ``c`` of zero multiplies is not read.

    Parameters
    ----------
    a, b, c : float
    scaled, driven : bool
        Whether D and f are there: without them, ``RecurrenceStep(-1, 0, 0, scaled=False, driven=False)`` is the product
        ``A v[j]``, and steps with ``b`` make a Newton basis.
    """

    a: float
    b: float
    c: float
    scaled: bool = True
    driven: bool = True


@runtime_checkable
class AdvancesRecurrences(Protocol):
    """An operator that makes several products of a recurrence in one pass over its matrix."""

    def advance(self, recurrence: Recurrence) -> None:
        """Take all steps."""

    def following_products(self) -> int | None:
        """Return how many products had best follow each other; None if it does not matter."""

    def keeps_together(self, rows: int) -> bool:
        """Return whether steps are never taken for a part of so many rows only, which D may couple."""


@dataclass
class Recurrence:
    """A three-term recurrence, and the two vectors that it needs at any depth.

    Parameters
    ----------
    steps : sequence of RecurrenceStep
    v, before : array, (n,) or (n, k)
        ``v[0]`` and ``v[-1]``; every step overwrites the older one of them.
    f : array, (n,) or (n, k)
    diagonal : array, (n,) or (n / size, size, size)
        D: a diagonal, or dense blocks on it.
    image : array of the shape of v
        Work. :meth:`scatter` and :meth:`complete` take it as zero and leave it so.
    space : VectorSpace
    repeats : bool
        Whether the same steps will be taken of the same vectors again, so that a GPU had better record them.

    Notes
    -----
    Rows may be taken in any order in which a row is advanced after the stage before has advanced all rows that its product
    reads, and all whose products read it: the new vector takes the place of the one before the last, of which nothing is
    read any more (Demmel et al. 2007 have the wavefront, for caches).
    """

    steps: Sequence[RecurrenceStep]
    v: Array
    before: Array
    f: Array
    diagonal: Array
    image: Array
    space: VectorSpace
    repeats: bool = True

    def run(self, A: Operator) -> Array:
        """Take all steps and return the last vector; the one before it is the other of the two given."""
        if isinstance(A, AdvancesRecurrences):
            A.advance(self)
        else:
            self.run_whole(A, range(len(self.steps)))
        return self.vectors(len(self.steps))[0]

    def run_whole(self, A: Operator, stages: range) -> None:
        """Take some steps, each for all rows, by products of the whole matrix."""
        product, rows = product_of(A), slice(0, self.v.shape[0])
        for stage in stages:
            self.advance(stage, rows, lambda x, out: product(x, out, 1.0, 0.0))

    def vectors(self, stage: int) -> tuple[Array, Array]:
        """Return the vector that a stage multiplies, and the one that it replaces."""
        return (self.before, self.v) if stage % 2 else (self.v, self.before)

    def advance(self, stage: int, rows: slice, product: Callable[[Array, Array], object]) -> None:
        """Take a step for some rows, of which ``product(x, out)`` makes the product."""
        image = self.image[rows]
        product(self.vectors(stage)[0], image)
        self._step(stage, rows, image, clears=False)

    def scatter(self, stage: int, add: Callable[[Array, Array], object]) -> None:
        """Let ``add(x, image)`` add some of the product of a step to the image, a vector of all rows."""
        add(self.vectors(stage)[0], self.image)

    def complete(self, stage: int, rows: slice) -> None:
        """Take a step for rows of which the image has the whole product."""
        if rows.start < rows.stop:
            self._step(stage, rows, self.image[rows], clears=True)

    def _step(self, stage: int, rows: slice, image: Array, *, clears: bool) -> None:
        step, (v, new) = self.steps[stage], self.vectors(stage)
        size = self.diagonal.shape[-1] if self.diagonal.ndim == 3 else 1
        blocks = slice(rows.start // size, rows.stop // size)
        diagonal, f = self.diagonal[blocks] if step.scaled else None, self.f[rows] if step.driven else None
        self.space.three_terms(step.a, diagonal, f, image, step.b, v[rows], step.c, new[rows], clears)

    def places(self) -> tuple[object, ...]:
        """Return what a recording of kernels depends on: the steps and, on CUDA, the addresses of the vectors."""
        vectors = (self.v, self.before, self.f, self.diagonal, self.image)
        addresses = (int(vector.data.ptr) for vector in vectors)
        return (*self.steps, self.v.shape, self.diagonal.shape, str(self.v.dtype), *addresses)

    def kernels(self) -> tuple[object, ...]:
        """Return what decides which kernels take the steps, wherever the vectors are."""
        return (self.v.shape[1:], self.diagonal.shape[1:], *sorted({step.scaled for step in self.steps}))
