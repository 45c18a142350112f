"""Multigrid by name, in YAML files and in :func:`penstock.solve`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from penstock.solvers.chebyshev import check_degree
from penstock.solvers.coarse.modes import in_order
from penstock.solvers.multigrid.levels import Cycle, Smoother
from penstock.solvers.multigrid.setup import multigrid
from penstock.solvers.preconditioner_spec import PreconditionerSpec
from penstock.spmv import Operator

# Vectors for prolongators, their transposes and the coarser matrices of 27-point stencils, and for each right-hand side.
_STORED, _WORK = {True: 400, False: 40}, 10


@dataclass(frozen=True)
class MultigridSpec(PreconditionerSpec, name="multigrid"):
    """Specification of :func:`multigrid`.

    Parameters
    ----------
    block_size : int
        Unknowns of a node.
    degree : int or "auto"
        Of the smoothing polynomial; ``auto`` is 3.
    smoother, cycle, near_null_space, coordinates
        As for :func:`multigrid`; coordinates may also be a function that makes them.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import MultigridSpec
    >>> MultigridSpec(block_size=3, cycle="V").build(Cantilever(nodes=5, dof=3).matrix()).shape
    (375, 375)
    """

    uses_near_null_space: ClassVar[bool] = True
    needs_entries: ClassVar[bool] = True

    degree: int | Literal["auto"] = "auto"
    smoother: Smoother = "chebyshev"
    cycle: Cycle = "W"
    near_null_space: Any = field(default=None, compare=False, repr=False)
    coordinates: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_degree(self.degree)

    def build(self, A: Operator) -> Operator:
        """Return the preconditioner of a matrix that is held in memory."""
        return multigrid(
            A,
            self.near_null_space,
            self.smoother,
            coordinates=self.coordinates() if callable(self.coordinates) else self.coordinates,
            cycle=self.cycle,
            degree=3 if self.degree == "auto" else self.degree,
            block_size=self.block_size,
        )

    def vectors(self, columns: int, *, streamed_to_gpu: bool) -> int:
        """Return about the vectors that the levels take."""
        return _STORED[self.block_size > 1] + _WORK * columns

    def with_nodes(self, coordinates: Callable[[], Any], node_counts: tuple[int, ...]) -> Self:
        """Return this specification with what makes the coordinates."""
        return replace(self, coordinates=coordinates)

    def in_order(self, reorder: Callable[[Any], Any]) -> Self:
        """Return this specification with what is known of the unknowns in another order."""
        modes, points = in_order(self.near_null_space, self.coordinates, self.block_size, reorder)
        return replace(self, near_null_space=modes, coordinates=points)
