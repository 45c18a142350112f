"""Three-term recurrences: polynomials in a matrix applied to a vector, by consecutive products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from penstock.spmv.device import Array
from penstock.spmv.operator import Operator, SweptOperator, unchecked_product
from penstock.spmv.vectors.space import VectorSpace


@runtime_checkable
class ScalesRows(Protocol):
    """D of a recurrence that is more than dense blocks on the diagonal."""

    @property
    def device_arrays(self) -> tuple[Array, ...]:
        """Its arrays, on whose addresses a captured graph depends."""

    def three_terms(
        self,
        rows: slice,
        a: float,
        f: Array | None,
        y: Array,
        b: float,
        v: Array,
        c: float,
        out: Array,
        clears: bool = False,
    ) -> None:
        """Set ``out = a D (f - y) + b v + c out`` for some rows, of which the arrays are, as :meth:`VectorSpace.three_terms`."""


@dataclass(frozen=True)
class RecurrenceStep:
    """``v[j+1] = a D (f - A v[j]) + b v[j] + c v[j-1]``; terms with a zero factor are not read.

    Parameters
    ----------
    a, b, c : float
    scaled, driven : bool
        Whether D and f are present. Without them, ``RecurrenceStep(-1, 0, 0, scaled=False, driven=False)`` is the product
        ``A v[j]``, and steps with nonzero ``b`` build a Newton basis.
    adds : float
        Multiple of :attr:`Recurrence.added` that is added to ``v[j+1]``; 1 where steps are repeated, as others take memory.
    forms_residual : bool
        Whether ``f - A v[j]`` also replaces f; requires D and f, and no other terms.
    keeps : int, optional
        Entry of :attr:`Recurrence.kept` that receives copies of ``v[j]`` and ``A v[j]``.
    """

    a: float
    b: float
    c: float
    scaled: bool = True
    driven: bool = True
    adds: float = 0.0
    forms_residual: bool = False
    keeps: int | None = None


@dataclass
class Recurrence:
    """A three-term recurrence with the two vectors that it needs at any depth.

    Parameters
    ----------
    steps : sequence of RecurrenceStep
    v, before : array, (n,) or (n, k)
        ``v[0]`` and ``v[-1]``; every step overwrites the older one of them.
    f : array, (n,) or (n, k)
    diagonal : array, (n,) or (n / size, size, size), or ScalesRows
        D: a diagonal, dense blocks on it, or what multiplies rows that are advanced together.
    image : array of the shape of v
        Workspace. :meth:`scatter` and :meth:`complete` expect it to be zero and leave it zero.
    space : VectorSpace
    added : array of the shape of v, optional
        What steps with ``adds`` add.
    kept : sequence of (array, array or None)
        Where steps with ``keeps`` copy the vector that they multiply, and its product.
    repeats : bool
        Whether the same steps will be repeated on the same vectors, so that capturing them in a CUDA graph pays.

    Notes
    -----
    Rows may be advanced in any order that respects two dependencies: the previous stage has advanced all rows that the
    row's product reads, and all rows whose products read the row. The new vector then overwrites the one before the last,
    which nothing reads any more (Demmel et al. 2007 describe this wavefront, for caches).
    """

    steps: Sequence[RecurrenceStep]
    v: Array
    before: Array
    f: Array
    diagonal: Array | ScalesRows
    image: Array
    space: VectorSpace
    added: Array | None = None
    kept: Sequence[tuple[Array, Array | None]] = ()
    repeats: bool = True

    @cached_property
    def _known_parts(self) -> dict[tuple[int, int, int], tuple[Array, Array]]:
        """Vectors, and parts of them that have been asked for."""
        return {}

    def _part(self, vector: Array, rows: slice) -> Array:
        """Return some rows of a vector, which are kept for later steps: on a GPU slicing takes half as long as a launch."""
        key = (id(vector), rows.start, rows.stop)
        if key not in self._known_parts:
            self._known_parts[key] = vector, vector[rows]  # with the vector, so that no other one gets its id
        return self._known_parts[key][1]

    @cached_property
    def _by_rows(self) -> ScalesRows | None:
        """D, if it is more than dense blocks on the diagonal; asking takes as long as a launch."""
        return self.diagonal if isinstance(self.diagonal, ScalesRows) else None

    def run(self, A: Operator) -> Array:
        """Perform all steps and return the last vector, ``v`` or ``before``; the other is the one before it."""
        if isinstance(A, SweptOperator):
            A.advance(self)
        else:
            self.run_whole(A, range(len(self.steps)))
        return self.vectors(len(self.steps))[0]

    def clear(self) -> None:
        """Empty the image, in which an interrupted sweep may have left values."""
        self.image[...] = 0

    def run_whole(self, A: Operator, stages: range) -> None:
        """Perform some steps for all rows, by products of the whole matrix."""
        product, rows = unchecked_product(A), slice(0, self.v.shape[0])
        for stage in stages:
            self.advance(stage, rows, lambda x, out: product(x, out, 1.0, 0.0))

    def vectors(self, stage: int) -> tuple[Array, Array]:
        """Return the vector that a stage multiplies, and the one that it overwrites."""
        return (self.before, self.v) if stage % 2 else (self.v, self.before)

    def advance(self, stage: int, rows: slice, product: Callable[[Array, Array], object]) -> None:
        """Perform a step for some rows; ``product(x, out)`` computes their product."""
        image = self._part(self.image, rows)
        product(self.vectors(stage)[0], image)
        self._step(stage, rows, image, clears=False)

    def scatter(self, stage: int, add: Callable[[Array, Array], object]) -> None:
        """Let ``add(x, image)`` add part of a step's product to the image, a vector of all rows."""
        add(self.vectors(stage)[0], self.image)

    def complete(self, stage: int, rows: slice) -> None:
        """Perform a step for rows whose product is complete in the image."""
        if rows.start < rows.stop:
            self._step(stage, rows, self._part(self.image, rows), clears=True)

    def _step(self, stage: int, rows: slice, image: Array, *, clears: bool) -> None:
        step, (v, new) = self.steps[stage], self.vectors(stage)
        f = self._part(self.f, rows) if step.driven else None
        if step.keeps is not None:
            vector, product = self.kept[step.keeps]
            vector[rows] = v[rows]
            if product is not None:
                product[rows] = image
        if step.forms_residual:
            # With the residual in place of the product and without f, the step computes the same with both signs reversed.
            residual = self._part(self.f, rows)
            residual -= image
            self._three_terms(
                rows, step.scaled, -step.a, None, residual, 0.0, residual, 0.0, self._part(new, rows), False
            )
            if clears:
                image[...] = 0
        else:
            of_rows = (f, image, step.b, self._part(v, rows), step.c, self._part(new, rows), clears)
            self._three_terms(rows, step.scaled, step.a, *of_rows)
        if step.adds and self.added is not None:
            sums, added = self._part(new, rows), self._part(self.added, rows)
            sums += added if step.adds == 1.0 else step.adds * added

    def _three_terms(self, rows: slice, scaled: bool, a: float, *others: Any) -> None:
        """Set ``out = a D (f - y) + b v + c out``, with D or without it; ``others`` are f, y and what follows."""
        if not scaled:
            self.space.three_terms(a, None, *others)
        elif self._by_rows is not None:
            self._by_rows.three_terms(rows, a, *others)
        else:
            diagonal: Array = self.diagonal
            size = diagonal.shape[-1] if diagonal.ndim == 3 else 1
            nodes = slice(rows.start // size, rows.stop // size)
            self.space.three_terms(a, self._part(diagonal, nodes), *others)

    def capture_key(self) -> tuple[object, ...]:
        """Return what a captured graph depends on: the steps and, on CUDA, the addresses of the vectors."""
        further = [array for pair in [(self.added,), *self.kept] for array in pair if array is not None]
        scaling = (self.diagonal,) if self._by_rows is None else self._by_rows.device_arrays
        vectors = (self.v, self.before, self.f, *scaling, self.image, *further)
        addresses = (int(vector.data.ptr) for vector in vectors)
        return (*self.steps, self.v.shape, *self._kind_of_diagonal(), str(self.v.dtype), *addresses)

    def kernels(self) -> tuple[object, ...]:
        """Return what selects the kernels of the steps, regardless of the vectors' addresses."""
        kinds = {(step.scaled, bool(step.adds), step.forms_residual, step.keeps is not None) for step in self.steps}
        return (self.v.shape[1:], *self._kind_of_diagonal(), *sorted(kinds))

    def _kind_of_diagonal(self) -> tuple[object, ...]:
        """Return what selects the kernels that multiply by D."""
        if self._by_rows is not None:
            return (type(self.diagonal),)
        diagonal: Array = self.diagonal
        return tuple(diagonal.shape[1:])
