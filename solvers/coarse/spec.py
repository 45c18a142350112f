"""The specification of the coarse level, for YAML files, the command line and :func:`penstock.solve`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np

from penstock.solvers.chebyshev import check_degree
from penstock.solvers.coarse.setup import smoothed_aggregation
from penstock.solvers.preconditioner_spec import PreconditionerSpec
from penstock.spmv import InputError, Operator

__all__ = ["SmoothedAggregationSpec"]

_DEGREE, _SMOOTHING = 9, 2
# Iterations for eight digits by degree, higher ones save none: of cubes and beams with 1 to 6 unknowns a node, sigma 0.5.
_ITERATIONS = {5: 16.0, 7: 12.5, 9: 10.5}
# Six modes are the most usual; T takes 8 bytes for an unknown and a mode.
_MODES = 6
# Vectors of the recurrence and of the iteration, beyond those of CG; coarse levels take as much memory as three.
_VECTORS, _LEVELS = 6, 3
# Rows of A and P that are held while the coarse matrix is formed on a GPU: that of a small one, or a window.
_WINDOW_VECTORS, _WINDOW_NBYTES = 60, 4 << 30


@dataclass(frozen=True)
class SmoothedAggregationSpec(PreconditionerSpec, name="smoothed_aggregation"):
    """Specification of :func:`smoothed_aggregation`.

    Parameters
    ----------
    block_size : int
        Unknowns a node.
    degree : int or "auto"
        Of the polynomial; ``auto`` is 9, or what a plan for a streamed matrix chooses.
    near_null_space, coordinates, aggregates : optional
        As for :func:`smoothed_aggregation`.
    """

    uses_near_null_space: ClassVar[bool] = True

    degree: int | Literal["auto"] = "auto"
    near_null_space: Any = field(default=None, compare=False, repr=False)
    coordinates: Any = field(default=None, compare=False, repr=False)
    aggregates: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_degree(self.degree)

    @property
    def _degree(self) -> int:
        return _DEGREE if self.degree == "auto" else self.degree

    def build(self, A: Operator) -> Operator:
        """Return the preconditioner.

        Raises
        ------
        InputError
            If the subdivisions of a streamed matrix cut nodes.
        """
        return smoothed_aggregation(
            A,
            self.near_null_space,
            coordinates=self.coordinates,
            aggregates=self.aggregates,
            block_size=self.block_size,
            smoothing=_SMOOTHING,
            degree=self._degree,
        )

    def vectors(self, columns: int, *, streamed_to_gpu: bool) -> int:
        """Return the vectors for the diagonal blocks, T, the coarse levels and the iteration."""
        return self.block_size + _MODES + _LEVELS + _VECTORS * columns

    def workspace_nbytes(self, n: int, columns: int, dtype: Any = np.float64, *, streamed_to_gpu: bool = False) -> int:
        """Return the memory for them, or that of the set-up if it is larger."""
        vector = n * int(np.dtype(dtype).itemsize)
        held = self.vectors(columns, streamed_to_gpu=streamed_to_gpu) * vector
        window = min(_WINDOW_VECTORS * vector, _WINDOW_NBYTES)
        return max(held, (self.block_size + _MODES + _LEVELS) * vector + window) if streamed_to_gpu else held

    def degrees(self, *, streamed: bool) -> tuple[int, ...]:
        """Return the products of an iteration; a plan with few slots may choose a polynomial whose products fit one sweep."""
        degrees = tuple(_ITERATIONS) if streamed and self.degree == "auto" else (self._degree,)
        return tuple(degree + 1 + 2 * _SMOOTHING for degree in degrees)

    def iterations(self, degree: int) -> float | None:
        """Return about how many iterations eight digits need, at any size."""
        return _ITERATIONS.get(degree - 1 - 2 * _SMOOTHING)

    def with_degree(self, degree: int) -> Self:
        """Return this specification with the products of a plan."""
        return replace(self, degree=degree - 1 - 2 * _SMOOTHING) if degree > 2 + 2 * _SMOOTHING else self

    def with_near_null_space(self, near_null_space: Any, aggregates: Any = None) -> Self:
        """Return this specification for a given near-null space."""
        return replace(self, near_null_space=near_null_space, aggregates=aggregates)

    def in_order(self, reorder: Callable[[Any], Any]) -> Self:
        """Return this specification with the near-null space in another order of the unknowns."""
        if self.coordinates is not None or self.aggregates is not None:
            raise InputError(
                "the matrix is stored in another order than its nodes are given; give near_null_space instead"
            )
        given = None if self.near_null_space is None else reorder(np.asarray(self.near_null_space, dtype=np.float64))
        return replace(self, near_null_space=given)
