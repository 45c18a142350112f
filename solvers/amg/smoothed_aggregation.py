"""Smoothed aggregation: the two-level preconditioner coarse - polynomial - coarse, whose prolongator is never stored.

The method, of one sweep an iteration, is described in :mod:`penstock.solvers.amg.method`, and how a level is made in
:mod:`penstock.solvers.amg.coarsening`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np

from penstock.solvers.amg.aggregates import COARSE_SIDE
from penstock.solvers.amg.coarsening import coarsen, coarsen_again, measured
from penstock.solvers.amg.dense_inverse import DENSE_UNKNOWNS, inverse_of
from penstock.solvers.amg.galerkin import PRODUCT, smoothing_steps
from penstock.solvers.amg.inner_iterations import InnerIterations
from penstock.solvers.amg.level import CoarseLevel, Grouped, RowFactors
from penstock.solvers.amg.matrix_rows import block_size_of
from penstock.solvers.amg.multigrid import multigrid
from penstock.solvers.chebyshev import SETTLED, Chebyshev, Interval, check_degree, rounds_from
from penstock.solvers.preconditioners import DiagonalBlocks
from penstock.spmv import Array, InputError, Operator, ValidatedOperator, VectorSpace, as_operator
from penstock.spmv.communicator import communicator_of
from penstock.spmv.operator import is_capturable
from penstock.spmv.vectors.noise import noise
from penstock.spmv.vectors.recurrence import Recurrence, RecurrenceStep

# Where the interval of the polynomial begins, as a multiple of ``high / degree^2``: where the coarse level does its part, and
# where the polynomial must do most of it.
_LOW, _WIDE_LOW = 4.0, 0.5
# On coarse levels products are cheap, and prolongators of degree 1 with aggregates of 3 nodes a side couple neighbours only.
_COARSE_SMOOTHING, _COARSE_DEGREE, _COARSE_ROUNDS = 1, 5, 2
# How much an application of inner iterations reduces the residual on the coarse level of a matrix that jumps.
_REDUCED_OF_JUMPS = 1e-2
# By this share two energies may differ that are nearly the same.
_SAME = 0.03
#: Products with a coarse matrix when the level is applied once.
COARSE_PRODUCTS = 4 * _COARSE_SMOOTHING + _COARSE_DEGREE + 1


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

    def __init__(
        self,
        A: Operator,
        diagonal: DiagonalBlocks | RowFactors,
        high: float,
        degree: int,
        smoothing: int,
        level: CoarseLevel,
    ) -> None:
        self.A, self.diagonal, self.high, self.degree, self.smoothing = A, diagonal, high, degree, smoothing
        #: D as recurrences take it.
        self.scaling = diagonal.blocks if isinstance(diagonal, DiagonalBlocks) else diagonal
        self.level, self.space = level, VectorSpace.of(A)
        self.shape, self.dtype, self.device = A.shape, np.dtype(A.dtype), A.device
        self.smooth = smoothing_steps(smoothing, high)
        self.first, self.polynomial = self._polynomial(_LOW)
        self._work: list[Array] = []
        self._lent: list[Array] = []
        #: Whether the vectors of a solve are kept for the next one, whose captured graphs then fit; the result has copies.
        self.keeps_vectors = True
        #: A vector in the direction of the largest eigenvalue of ``D A``, once the values of A have changed.
        self.fastest: Array | None = None

    #: How :func:`cg` and :func:`block_cg` solve with this preconditioner.
    methods: ClassVar[tuple[str, str]] = ("coarse_cg", "coarse_block_cg")

    def wide_polynomial(self) -> tuple[float, list[RecurrenceStep]]:
        """Return ``first`` and the further steps of a polynomial that is small on an interval that begins lower."""
        return self._polynomial(_WIDE_LOW)

    def _polynomial(self, low: float) -> tuple[float, list[RecurrenceStep]]:
        (first, _), *steps = Interval(low * self.high / self.degree**2, self.high).coefficients(self.degree)
        return first, [RecurrenceStep(a, 1.0 + c, -c if number else 0.0) for number, (a, c) in enumerate(steps)]

    @property
    def capturable(self) -> bool:
        """Whether an application only starts kernels."""
        return is_capturable(self.A) and is_capturable(self.level.inverse)

    def lend_vectors(self, like: Array) -> list[Array]:
        """Return eight vectors for a solve, those of the last one if they have been returned."""
        vectors, self._lent = self._lent, []
        if not vectors or vectors[0].shape != like.shape:
            self.device.make_room(8 * like.nbytes)
            vectors = [self.device.xp.empty_like(like) for _ in range(8)]
        return vectors

    def take_vectors(self, other: SmoothedAggregation) -> None:
        """Take over the vectors of a preconditioner that this one replaces, and whether they are kept."""
        self.keeps_vectors = other.keeps_vectors
        self._lent, self._work, other._lent, other._work = other._lent, other._work, [], []

    def return_vectors(self, vectors: list[Array], *held: Array) -> tuple[Array, ...]:
        """Take them back for the next solve, and return copies of those that are ``held``, or these if none are kept."""
        if not self.keeps_vectors:
            return held
        copies = tuple(vector.copy() for vector in held)
        self._lent = vectors
        return copies

    def _vectors(self, like: Array) -> list[Array]:
        if not self._work or self._work[0].shape != like.shape:
            xp, coarse = self.device.xp, (self.level.T.unknowns, *like.shape[1:])
            self._work = [xp.zeros_like(like) for _ in range(6)] + [xp.zeros(coarse) for _ in range(2)]
        return self._work

    def _run(self, steps: list[RecurrenceStep], v: Array, other: Array, f: Array, image: Array) -> Array:
        return Recurrence(steps, v, other, f, self.scaling, image, self.space).run(self.A) if steps else v

    def restrict(self, r: Array, out: Array, work: Sequence[Array]) -> None:
        """Set ``out = P^T r``; r is overwritten.

        ``P^T r = T^T p(A D) r``, and ``p(A D) r`` is what ``len(smooth)`` steps of Richardson's iteration from zero leave of r:
        as many products, in one sweep if A is streamed. The last of the three work vectors must be zero.
        """
        v, other, image = work
        self.diagonal._apply(r, v, self.smooth[0].a, 0.0)
        steps = [*(replace(step, driven=True) for step in self.smooth[1:]), PRODUCT]
        r -= Recurrence(steps, v, other, r, self.scaling, image, self.space, repeats=False).run(self.A)
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
        self.space.write(alpha, total, beta, out)


def smoothed_aggregation(
    A: Any,
    near_null_space: Any = None,
    *,
    coordinates: Any = None,
    aggregates: Any = None,
    block_size: int | Literal["auto"] = "auto",
    aggregate_nodes: int = 125,
    smoothing: int = 2,
    degree: int = 9,
    rounds: int = 2,
    grouped: Grouped = False,
) -> SmoothedAggregation:
    """Return a preconditioner with a coarse level, with which CG needs about a dozen iterations at any size.

    Parameters
    ----------
    A : operator or matrix
        Symmetric positive definite: a matrix, resident or streamed, or what can be converted to one. Of ranks that share one,
        each gives what follows for its own nodes, which it aggregates; the call is collective.
    near_null_space : array, (n, modes), optional
        Vectors that A nearly maps to zero, for example the rigid motions of a body. Values at unknowns that couple with no
        other, such as clamped ones, do not matter.
    coordinates : array, (nodes, 2) or (nodes, 3), optional
        Of the nodes: rigid motions and aggregates are made from them. Without both, the near-null space is a constant for each
        unknown of a node, which suffices for scalar problems.
    aggregates : int array, (nodes,), tuple of int, or "pattern", optional
        The aggregate of every node; or the nodes along each axis of a structured mesh whose nodes couple with their neighbours
        only, which is cut into boxes; or ``"pattern"``: they are grown in the pattern of A, which costs a sweep, and is better
        where nodes lie near each other across gaps, as in thin walls and foams. By default they are made from the coordinates,
        as boxes if these lie on a lattice, and without them from the pattern.
    block_size : int or "auto"
        Unknowns a node; by default those of the blocks that A stores.
    aggregate_nodes : int
        Nodes in an aggregate, about.
    smoothing : int
        Products by which the prolongator is smoothed, 1 to 3. Aggregates should have ``2 smoothing + 1`` nodes a side.
    degree : int
        Degree of the polynomial, odd.
    rounds : int
        As for :func:`chebyshev`.
    grouped : bool or "lines"
        Whether D and aggregates are made of what is coupled strongly: of lines of nodes across flat elements, where there are
        many, or else of groups of nodes, with further columns of T where the near-null space misses slow modes, for jumps and
        ties. Lines take about two more sweeps in the set-up; groups take six and many times as long, and up to 200 bytes of D for
        an unknown. With ``"lines"`` nodes are not grouped if there are no lines. Not where ``aggregates`` are given. Lines and
        groups do not cross ranks, all of which must have nodes.

    Raises
    ------
    InputError
        If an argument does not fit the matrix.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import cg, smoothed_aggregation
    >>> beam = Cantilever(nodes=(17, 5, 5), dof=3)
    >>> A = beam.matrix()
    >>> result = cg(A, beam.load(), M=smoothed_aggregation(A, coordinates=beam.mesh.coordinates()), rtol=1e-8)
    >>> result.converged, result.iterations < 20
    (True, True)
    """
    operator = as_operator(A)
    communicator = communicator_of(operator)
    numbers = {"block_size": block_size, "aggregate_nodes": aggregate_nodes, "smoothing": smoothing}
    communicator.check_same(**numbers, degree=degree, rounds=rounds, grouped=str(grouped))
    are_given = communicator.largest(float(aggregates is not None)) > 0  # perhaps by some ranks only
    with communicator.together():
        size = block_size_of(operator) if block_size == "auto" else int(block_size)
        check_parts(aggregates, grouped)
        _check_numbers(operator, size, aggregate_nodes, smoothing, degree, rounds)
    size = int(communicator.largest(float(size)))  # a rank without rows may not know the blocks
    with operator.device.current():
        level = coarsen(
            operator, size, near_null_space, coordinates, aggregates,
            nodes=aggregate_nodes, smoothing=smoothing, grouped=False if are_given else grouped,
            rounds=rounds, degree=degree,
        )  # fmt: skip
        assert level is not None, "the caller's level is made whatever its size"
        return _preconditioner(level, degree, smoothing)


def with_new_values(M: SmoothedAggregation) -> SmoothedAggregation:
    """Return the preconditioner for new values of its matrix, with the same aggregates and tentative prolongators. Collective.

    The diagonal, the bound of the eigenvalues, which starts from the last vector, and the coarse matrices are computed anew.
    The vectors of the old preconditioner go to the new one.
    """
    with M.A.device.current():
        rounds, vector = rounds_from(M.A, M.fastest)
        level = coarsen_again(M.A, M.level, M.smoothing, rounds=rounds, degree=M.degree, vector=vector)
        new = _preconditioner(level, M.degree, M.smoothing, M)
    new.fastest = vector
    return new


def check_parts(aggregates: object, grouped: object) -> None:
    """Refuse other words for aggregates than ``"pattern"``, and for groups anything but true, false and ``"lines"``."""
    if isinstance(aggregates, str) and aggregates != "pattern":
        raise InputError(f"aggregates must be 'pattern', the aggregate of each node, or a mesh, not {aggregates!r}")
    if not (isinstance(grouped, bool) or grouped == "lines"):
        raise InputError(f"grouped must be true, false or 'lines', not {grouped!r}")


def _check_numbers(A: Operator, size: int, aggregate_nodes: int, smoothing: int, degree: int, rounds: int) -> None:
    check_degree(degree)
    if rounds < 0 or rounds % 1:
        raise InputError(f"rounds must be a whole number, 0 or more, not {rounds}")
    if A.shape[0] != A.shape[1] or not 1 <= size <= 8 or A.shape[0] % size:
        raise InputError(f"a matrix of shape {A.shape} does not consist of nodes of {size} unknowns")
    if not 1 <= smoothing <= 3 or smoothing % 1:
        raise InputError(f"smoothing must be 1, 2 or 3, not {smoothing}")
    if not aggregate_nodes >= 2:
        raise InputError(f"aggregate_nodes must be 2 or more, not {aggregate_nodes}")
    if np.dtype(A.dtype) != np.float64:
        raise InputError(f"a coarse level needs vectors of float64, not {A.dtype}")


def _preconditioner(
    level: CoarseLevel, degree: int, smoothing: int, before: SmoothedAggregation | None = None
) -> SmoothedAggregation:
    """Return the preconditioner, with the coarser levels of the one before if there is one."""
    level.inverse = _inverse(level, None if before is None else before.level.inverse)
    D = level.groups if isinstance(level.groups, RowFactors) else level.diagonal
    M = SmoothedAggregation(level.finer, D, level.high, degree, smoothing, level)
    if before is not None:
        M.take_vectors(before)
    return M


def _inverse(level: CoarseLevel, before: Operator | None) -> Operator:
    """Return an approximate inverse of a coarse matrix: a dense one, or the preconditioner of the next level."""
    A, T = level.A, level.T
    if T.unknowns <= DENSE_UNKNOWNS:
        return inverse_of(A)
    if level.jumps:  # multigrid follows strong couplings on all levels; two digits do
        return InnerIterations(A, multigrid(A, level.near_null_space, cycle="V"), _REDUCED_OF_JUMPS)
    if isinstance(before, InnerIterations):
        return InnerIterations(A, _coarser_inverse(level, before.M))
    inverse = _coarser_inverse(level, before)
    return inverse if level.groups is None else InnerIterations(A, inverse)


def _coarser_inverse(level: CoarseLevel, before: Operator | None) -> Operator:
    """Return the preconditioner made of the next coarser level, or a Chebyshev polynomial if the matrix cannot be coarsened."""
    A, T = level.A, level.T
    if isinstance(before, SmoothedAggregation):
        again = coarsen_again(A, before.level, _COARSE_SMOOTHING, rounds=_COARSE_ROUNDS, settled=SETTLED)
        return _in_fewer_digits(_preconditioner(again, _COARSE_DEGREE, _COARSE_SMOOTHING, before))
    grid = T.aggregates.grid
    nodes = COARSE_SIDE ** (3 if grid is None else len(grid))
    coarser = coarsen(A, T.modes, level.near_null_space, None, grid, nodes=nodes, rounds=_COARSE_ROUNDS, finest=False)
    if coarser is None:
        diagonal, high = measured(A, T.modes, rounds=_COARSE_ROUNDS, settled=SETTLED)
        return Chebyshev(A, diagonal, _COARSE_DEGREE, high / _COARSE_DEGREE**2, high)
    return _in_fewer_digits(_preconditioner(coarser, _COARSE_DEGREE, _COARSE_SMOOTHING))


def _in_fewer_digits(M: SmoothedAggregation) -> SmoothedAggregation:
    """Return the preconditioner of a coarse matrix that multiplies by a copy of it in float32, if that is nearly the same.

    The trial applies the preconditioner in float32 to noise. The result z consists mostly of soft modes, where rounding does most
    harm; z'Az by the matrix and by the copy must agree within 3 %. If the copy is indefinite, as for slender and flat bodies,
    they do not; the copy is given up then, also for new values.
    """
    A, level = M.A, M.level
    if level.finer_in_float32 is None:
        return M
    lower = SmoothedAggregation(level.finer_in_float32, M.diagonal, M.high, M.degree, M.smoothing, level)
    z = lower.apply(noise(A.device, 0, A.shape[0]))
    energy, of_copy = M.space.dots((z, A.apply(z)), (z, level.finer_in_float32.apply(z)))
    if not abs(of_copy - energy) <= _SAME * energy:
        level.finer_in_float32 = None
        return M
    lower.take_vectors(M)
    return lower
