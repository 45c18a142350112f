"""Smoothed aggregation and multigrid by name, in YAML files, on the command line and in :func:`penstock.solve`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from penstock.solvers.amg.grid_points import GridPoints
from penstock.solvers.amg.level import Grouped
from penstock.solvers.amg.line_factors import LinesLostError
from penstock.solvers.amg.modes import in_order
from penstock.solvers.amg.multigrid import Cycle, Smoother, multigrid
from penstock.solvers.amg.smoothed_aggregation import (
    COARSE_PRODUCTS,
    SmoothedAggregation,
    check_parts,
    smoothed_aggregation,
    with_new_values,
)
from penstock.solvers.chebyshev import check_degree
from penstock.solvers.preconditioner_spec import PreconditionerSpec
from penstock.spmv import InputError, Operator


class _Shape(NamedTuple):
    """A degree, the size of aggregates that suit it, and the iterations for eight digits."""

    degree: int
    aggregate_nodes: int
    iterations: float = math.nan

    @property
    def smoothing(self) -> int:
        """Products that smooth the prolongator: then aggregates couple with their neighbours only."""
        side: int = round(self.aggregate_nodes ** (1 / 3))
        return min(3, max(1, (side - 1) // 2))

    @property
    def products(self) -> int:
        """Products of an iteration."""
        return self.degree + 1 + 2 * self.smoothing


# Iterations of cubes and beams with 1 to 6 unknowns a node, sigma 0.5, at any size. More products save none. Small aggregates
# need less smoothing, and twice the coarse unknowns.
_SHAPES = (_Shape(9, 125, 10.5), _Shape(7, 125, 12.5), _Shape(5, 64, 15.0), _Shape(3, 64, 22.0))
_DEFAULT = _SHAPES[0]

# Six modes are the most usual: T takes 8 bytes for an unknown and a mode. Where a GPU computes it, it takes one for an unknown,
# and for a node those of its coordinates, unless the mesh is structured, and of the lists of aggregates.
_MODES, _COORDINATES, _LISTS = 6, 24, 8
# Blocks in a row of the coarse matrix of a mesh, how much larger all coarse matrices are together, and with the copies in float32
# that a GPU makes.
_NEIGHBOURS, _ALL_LEVELS, _COPIES = 27, 1.2, 1.5
# Vectors of the recurrence and of the iteration, beyond those of CG, with two copies for the result; without these there must be
# room for a test for the rounding floor.
_VECTORS, _COPIED = 6, 1
# Beside D of nodes, D of lines takes twice as much, lists of this many vectors over the unknowns of a node, and a vector for each
# right-hand side. Groups take as much as there is memory for.
_LISTS_OF_LINES = 2.5
# Rows of A and P that are held while the coarse matrix is formed on a GPU: that of a small one, or a window.
_WINDOW_VECTORS, _WINDOW_NBYTES = 60, 4 << 30
# Multigrid: vectors for prolongators, their transposes and the coarser matrices of 27-point stencils, and those of a cycle.
_STORED, _WORK = {True: 400, False: 40}, 10


@dataclass(frozen=True)
class SmoothedAggregationSpec(PreconditionerSpec, name="smoothed_aggregation"):
    """Specification of :func:`smoothed_aggregation`.

    Parameters
    ----------
    block_size : int
        Unknowns a node.
    degree : int or "auto"
        Of the polynomial; ``auto`` is 9.
    aggregate_nodes : int or "auto"
        Nodes in an aggregate, about; ``auto`` is 125. For a streamed matrix a plan chooses both, if both are ``auto``.
    near_null_space, coordinates, aggregates, grouped : optional
        As for :func:`smoothed_aggregation`; coordinates may also be a function that makes them.
    keep_vectors : bool
        Whether the vectors of a solve are kept for the next one. Without, a solve takes a vector less for each right-hand side,
        and the next one of a prepared system a little longer.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import SmoothedAggregationSpec
    >>> beam = Cantilever(nodes=(9, 3, 3), dof=3)
    >>> spec = SmoothedAggregationSpec(block_size=3, degree=5, aggregate_nodes=27, coordinates=beam.mesh.coordinates())
    >>> spec.build(beam.matrix()).shape, spec.name
    ((243, 243), 'smoothed_aggregation')
    """

    uses_near_null_space: ClassVar[bool] = True
    follows_values: ClassVar[bool] = True  # its iteration takes the coarse matrix for P^T A P
    works_on_ranks: ClassVar[bool] = True
    replicated_reads: ClassVar[int] = 2 * COARSE_PRODUCTS

    degree: int | Literal["auto"] = "auto"
    aggregate_nodes: int | Literal["auto"] = "auto"
    near_null_space: Any = field(default=None, compare=False, repr=False)
    coordinates: Any = field(default=None, compare=False, repr=False)
    aggregates: Any = field(default=None, compare=False, repr=False)
    grouped: Grouped = False
    keep_vectors: bool = True

    def __post_init__(self) -> None:
        check_degree(self.degree)
        check_parts(self.aggregates, self.grouped)
        if self.keep_vectors not in (True, False):
            raise InputError(f"keep_vectors must be true or false, not {self.keep_vectors!r}")
        if self.aggregate_nodes != "auto" and not (
            isinstance(self.aggregate_nodes, Integral) and self.aggregate_nodes >= 2
        ):
            raise InputError(
                f"aggregate_nodes must be a whole number, 2 or more, or 'auto', not {self.aggregate_nodes!r}"
            )

    @property
    def _shape(self) -> _Shape:
        """What a matrix in memory gets."""
        degree = _DEFAULT.degree if self.degree == "auto" else self.degree
        nodes = _DEFAULT.aggregate_nodes if self.aggregate_nodes == "auto" else self.aggregate_nodes
        return _Shape(degree, nodes)

    def _shapes(self, streamed: bool) -> dict[int, _Shape]:
        """Return what there is to choose from, by the products of an iteration."""
        left_open = streamed and self.degree == self.aggregate_nodes == "auto"
        shapes = _SHAPES if left_open else (self._shape,)
        return {shape.products: shape for shape in shapes}

    def build(self, A: Operator) -> Operator:
        """Return the preconditioner.

        Raises
        ------
        InputError
            If the subdivisions of a streamed matrix cut nodes.
        """
        degree, nodes, smoothing = self._shape.degree, self._shape.aggregate_nodes, self._shape.smoothing
        M = smoothed_aggregation(
            A,
            self.near_null_space,
            coordinates=self.coordinates() if callable(self.coordinates) else self.coordinates,
            aggregates=self.aggregates,
            block_size=self.block_size,
            aggregate_nodes=nodes,
            smoothing=smoothing,
            degree=degree,
            grouped=self.grouped,
        )
        M.keeps_vectors = bool(self.keep_vectors)
        return M

    def rebuild(self, M: Operator | None, A: Operator) -> Operator | None:
        """Return the preconditioner of a matrix whose values have changed: with the aggregates and T of the last one."""
        if not isinstance(M, SmoothedAggregation) or M.A is not A:
            return self.build(A)
        try:
            return with_new_values(M)
        except LinesLostError:
            return self.build(A)

    def vectors(self, columns: int, *, streamed_to_gpu: bool) -> int:
        """Return the vectors for the diagonal blocks, T, the coarse levels and the iteration."""
        return math.ceil(self._vectors(columns, streamed_to_gpu))

    def _vectors(self, columns: int, streamed_to_gpu: bool) -> float:
        of_iteration = (_VECTORS if self.keep_vectors else _VECTORS - _COPIED) * columns
        of_lines = 2 * self.block_size + _LISTS_OF_LINES / self.block_size + columns if self.grouped else 0
        return self.block_size + of_lines + self._transfer_vectors(streamed_to_gpu) + self._level_vectors + of_iteration

    def _transfer_vectors(self, streamed_to_gpu: bool) -> float:
        if not streamed_to_gpu or self.near_null_space is not None or self.coordinates is None:
            return _MODES
        of_node = _LISTS + self.block_size + (0 if isinstance(self.coordinates, GridPoints) else _COORDINATES)
        return of_node / (8 * self.block_size)

    @property
    def _level_vectors(self) -> float:
        modes = _MODES if self.block_size > 1 else 1
        if self.near_null_space is not None:
            modes = 1 if np.ndim(self.near_null_space) == 1 else int(np.shape(self.near_null_space)[-1])
        blocks = _COPIES * _ALL_LEVELS * _NEIGHBOURS / (self._shape.aggregate_nodes * self.block_size)
        return blocks * modes**2

    def parts(
        self, n: int, columns: int, dtype: Any = np.float64, *, streamed_to_gpu: bool = False
    ) -> tuple[tuple[str, int], ...]:
        """Return the bytes of the transfer, of the coarse levels and, on a GPU, of a window of rows during the set-up."""
        vector = n * int(np.dtype(dtype).itemsize)
        levels = f"levels above aggregates of {self._shape.aggregate_nodes} nodes"
        held = (
            ("the transfer", int(self._transfer_vectors(streamed_to_gpu) * vector)),
            (levels, int(self._level_vectors * vector)),
        )
        return (*held, ("the set-up", _window_nbytes(vector))) if streamed_to_gpu else held

    def workspace_nbytes(self, n: int, columns: int, dtype: Any = np.float64, *, streamed_to_gpu: bool = False) -> int:
        """Return the memory for the vectors, or that of the set-up if it is larger: a window replaces those of the iteration."""
        vector = n * int(np.dtype(dtype).itemsize)
        held = int(self._vectors(columns, streamed_to_gpu) * vector)
        setup = int(self._vectors(0, streamed_to_gpu) * vector) + _window_nbytes(vector)
        return max(held, setup) if streamed_to_gpu else held

    def replicated_nbytes(self, n: int) -> int:
        """Return the bytes of the coarse matrices, which every rank has."""
        return int(self._level_vectors * 8 * n)

    def products_per_iteration(self, *, streamed: bool) -> tuple[int, ...]:
        """Return the products of an iteration; a plan may choose fewer, which fit one sweep of a ring with few slots."""
        return tuple(sorted(self._shapes(streamed)))

    def iterations(self, products: int) -> float | None:
        """Return about how many iterations eight digits need, at any size; more products than the default's save none."""
        most = _DEFAULT.iterations if products > _DEFAULT.products else None
        return next((shape.iterations for shape in _SHAPES if shape.products == products), most)

    @property
    def description(self) -> str:
        """The name, and the degree of the polynomial between the coarse solves."""
        of_degree = self.name if self.degree == "auto" else f"{self.name} of degree {self.degree}"
        of_nodes = {False: "", True: " with groups of nodes", "lines": " with lines of nodes"}[self.grouped]
        by_pattern = " with aggregates of the pattern" if isinstance(self.aggregates, str) else ""
        return f"{of_degree}{of_nodes}{by_pattern}"

    def with_products(self, products: int) -> Self:
        """Return this specification with the products of a plan."""
        shape = self._shapes(streamed=True).get(products)
        if shape is None:
            return self
        return replace(self, degree=shape.degree, aggregate_nodes=shape.aggregate_nodes)

    def with_nodes(self, coordinates: Any, node_counts: tuple[int, ...]) -> Self:
        """Return this specification for a structured mesh: its coordinates, or what makes them, and the nodes along each axis."""
        return replace(self, coordinates=coordinates, aggregates=node_counts)

    def in_order(self, reorder: Callable[[Any], Any]) -> Self:
        """Return this specification with the near-null space in another order of the unknowns."""
        if self.aggregates is not None and not isinstance(self.aggregates, str):
            raise InputError("the matrix is stored in another order than that of its nodes; leave out aggregates")
        modes, points = in_order(self.near_null_space, self.coordinates, self.block_size, reorder)
        return replace(self, near_null_space=modes, coordinates=points)


def _window_nbytes(vector: int) -> int:
    return min(_WINDOW_VECTORS * vector, _WINDOW_NBYTES)


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
        points = self.coordinates() if callable(self.coordinates) else self.coordinates
        return multigrid(
            A,
            self.near_null_space,
            self.smoother,
            coordinates=np.asarray(points) if isinstance(points, GridPoints) else points,
            cycle=self.cycle,
            degree=self.degree,
            block_size=self.block_size,
        )

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the storage formats of which it uses the arrays as they are."""
        return ("csr",) if self.block_size == 1 else ("bsr",)

    def vectors(self, columns: int, *, streamed_to_gpu: bool) -> int:
        """Return about the vectors that the levels take."""
        return _STORED[self.block_size > 1] + _WORK * columns

    def with_nodes(self, coordinates: Any, node_counts: tuple[int, ...]) -> Self:
        """Return this specification with the coordinates, or what makes them."""
        return replace(self, coordinates=coordinates)

    def in_order(self, reorder: Callable[[Any], Any]) -> Self:
        """Return this specification with what is known of the unknowns in another order."""
        modes, points = in_order(self.near_null_space, self.coordinates, self.block_size, reorder)
        return replace(self, near_null_space=modes, coordinates=points)
