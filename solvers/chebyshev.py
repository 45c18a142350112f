"""Chebyshev polynomial preconditioner: trades CG iterations for products with A."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np

from penstock.solvers.preconditioner_spec import PreconditionerSpec
from penstock.solvers.preconditioners import DiagonalBlocks, block_jacobi
from penstock.spmv import (
    Array,
    HasAbsoluteProduct,
    InputError,
    Operator,
    SweptOperator,
    ValidatedOperator,
    VectorSpace,
    as_operator,
)
from penstock.spmv.communicator import communicator_of
from penstock.spmv.operator import is_capturable
from penstock.spmv.vectors.noise import noise
from penstock.spmv.vectors.recurrence import Recurrence, RecurrenceStep, ScalesRows

# The largest eigenvalue is estimated from below; a bound that is slightly too high costs less than one that is too low.
_MARGIN = 1.05
_DEGREE, _LARGEST_DEGREE, _MOST_DEGREE = 9, 33, 999
# Degrees from which a plan for a streamed matrix chooses; 1, no polynomial, wins where a sweep has room for one product.
_STREAMED_DEGREES = (1, 5, 9, 13, 17, 21, 25, 33)
# Degree of a round that measures the largest eigenvalue: two rounds of 9 come closer to it than ten Lanczos steps.
_LEAST_MEASURED, _MOST_MEASURED = 9, 17
# The largest assumed ratio of an eigenvalue to the estimate, and the digits by which a vector may grow: float32 has 38.
_FURTHEST, _GROWTH_DIGITS = 10.0, 15.0
#: An estimate that a further round raises by no more than this share is settled: of a coarse matrix, and of a caller's matrix
#: that is smoothed by multigrid.
SETTLED, NEARLY_SETTLED = 0.002, 0.01
# Where the scales of unknowns differ by more than this factor, the entries of a random vector are scaled alike.
_FAR_APART = 1e4
# After this number of further rounds the bound must do.
_MOST_FURTHER = 12
_PRODUCT = RecurrenceStep(-1.0, 0.0, 0.0, scaled=False, driven=False)


class Scaling(ScalesRows, Protocol):
    """D that multiplies rows within recurrences, and on its own."""

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None: ...


@dataclass(frozen=True)
class Interval:
    """The interval, from ``low`` to ``high``, on which the polynomial is small."""

    low: float
    high: float

    def coefficients(self, degree: int) -> list[tuple[float, float]]:
        """Return ``(a, c)`` of ``z[j+1] = z[j] + c (z[j] - z[j-1]) + a D (r - A z[j])``; c of the first step is 0.

        Saad 2003, algorithm 12.1.
        """
        centre, radius = (self.high + self.low) / 2, (self.high - self.low) / 2
        ratio = centre / radius
        rho, steps = 1 / ratio, [(1 / centre, 0.0)]
        for _ in range(degree - 1):
            following = 1 / (2 * ratio - rho)
            steps.append((2 * following / radius, following * rho))
            rho = following
        return steps


class Chebyshev(ValidatedOperator):
    """``z = q(D A) D r``, where ``1 - t q(t)`` is the Chebyshev polynomial that is smallest between two eigenvalue bounds.

    Parameters
    ----------
    A : Operator
    diagonal : DiagonalBlocks
        D, the inverse of the diagonal of A, or of the dense blocks on it.
    degree : int
        Degree of ``1 - t q(t)``; odd. An application needs ``degree - 1`` products, or ``degree`` if it also computes ``A z``.
    low, high : float
        Bounds of the eigenvalues of ``D A``. CG itself handles eigenvalues below ``low``.

    Notes
    -----
    Because the degree is odd, the operator is positive definite for any ``high``: a value that is too small makes CG slow,
    never wrong. Each step reads 5 n values besides those of A and writes n. Two vectors are stored besides r and z, and three
    more for a matrix that is streamed to a GPU. The products of a streamed matrix share sweeps.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> M = chebyshev(Cantilever(nodes=(9, 3, 3), dof=3).matrix(), degree=5)
    >>> M.degree, round(M.high / M.low), M.shape
    (5, 100, (243, 243))
    """

    def __init__(self, A: Operator, diagonal: DiagonalBlocks, degree: int, low: float, high: float) -> None:
        self.A, self.degree, self.low, self.high = A, degree, low, high
        self.shape, self.dtype, self.device = A.shape, np.dtype(A.dtype), A.device
        self._jacobi, self._diagonal = diagonal, diagonal.blocks
        (self._first, _), *steps = Interval(low, high).coefficients(degree)
        # The vector before the first one is zero.
        self._steps = [RecurrenceStep(a, 1.0 + c, -c if number else 0.0) for number, (a, c) in enumerate(steps)]
        self._space = VectorSpace.of(A)
        self._image: Array | None = None
        self._other: Array | None = None
        # A GPU replays captured sweeps, which always use the same memory: they run on vectors owned by the preconditioner.
        self._replayed = isinstance(A, SweptOperator) and A.device.kind == "cuda"
        self._own: list[Array] = []
        # A vector in the direction of the largest eigenvalue, once the values of A have changed.
        self._fastest: Array | None = None

    def rebuilt(self, A: Operator) -> Chebyshev:
        """Return the same polynomial of a matrix with other values, whose bound is measured from the vector of the last one."""
        diagonal = block_jacobi(A, int(self._diagonal.shape[1]))
        rounds, self._fastest = rounds_from(A, self._fastest)
        with A.device.current():
            high = largest_eigenvalue(A, diagonal, rounds, self.degree, vector=self._fastest)
        new = Chebyshev(A, diagonal, self.degree, high * self.low / self.high, high)
        new._fastest, new._own, new._image, new._other = self._fastest, self._own, self._image, self._other
        return new

    @property
    def capturable(self) -> bool:
        """Whether products with A can be captured."""
        return is_capturable(self.A)

    def apply_with_product(self, r: Array, z: Array, w: Array) -> None:
        """Set ``z = M r`` and ``w = A z``, all of one shape, by ``degree`` consecutive products."""
        steps = [*self._steps, _PRODUCT]
        if not self._replayed:
            self._run(r, z, w, steps)
            return
        if not self._own or self._own[0].shape != r.shape:
            self._own = [self.device.xp.empty_like(r) for _ in range(3)]
        own_r, own_z, own_w = self._own
        own_r[...] = r
        self._run(own_r, own_z, own_w, steps)
        z[...], w[...] = own_z, own_w

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        if self._other is None or self._other.shape != x.shape:
            self._other = self.device.xp.empty_like(out)
        previous = out.copy() if beta != 0.0 else None
        self._run(x, out, self._other, self._steps)
        if alpha != 1.0:
            out *= alpha
        if previous is not None:
            out += beta * previous

    def _run(self, r: Array, z: Array, other: Array, steps: list[RecurrenceStep]) -> None:
        """Perform an even number of steps, with the result in z, and possibly one more, with the result in ``other``."""
        if self._image is None or self._image.shape != r.shape:
            self._image = self.device.xp.empty_like(z)
        self._jacobi._apply(r, z, self._first, 0.0)
        Recurrence(steps, z, other, r, self._diagonal, self._image, self._space).run(self.A)


@dataclass(frozen=True)
class ChebyshevSpec(PreconditionerSpec, name="chebyshev"):
    """Specification of :func:`chebyshev`; with ``degree="auto"`` the plan chooses the degree."""

    works_on_ranks: ClassVar[bool] = True
    follows_values: ClassVar[bool] = True  # it multiplies by the matrix, and its interval must hold the eigenvalues

    degree: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        check_degree(self.degree)

    def build(self, A: Operator) -> Operator:
        """Return the polynomial; if subdivisions cut blocks, of the matrix scaled by its diagonal. Of degree 1, the diagonal."""
        together = not isinstance(A, SweptOperator) or A.keeps_together(self.block_size)
        block_size = self.block_size if together else 1
        if self.degree == 1:  # a multiple of it, for which nothing needs to be measured
            return block_jacobi(A, block_size)
        return chebyshev(A, self.degree, block_size=block_size)

    def rebuild(self, M: Operator | None, A: Operator) -> Operator | None:
        """Return the polynomial of a matrix whose values have changed."""
        return M.rebuilt(A) if isinstance(M, Chebyshev) else self.build(A)

    def vectors(self, columns: int, *, streamed_to_gpu: bool) -> int:
        """Return the vectors for the diagonal blocks, for the products, and for captured CUDA graphs."""
        work = 2 if columns == 1 else 3
        return self.block_size + (work + 3 * streamed_to_gpu) * columns

    def products_per_iteration(self, *, streamed: bool) -> tuple[int, ...]:
        """Return the degree, or several to choose from: for a resident matrix a product costs the same at any degree."""
        if self.degree != "auto":
            return (self.degree,)
        return _STREAMED_DEGREES if streamed else (_DEGREE,)

    def with_products(self, products: int) -> Self:
        """Return this specification with the degree of a plan, which is the products of an iteration."""
        return replace(self, degree=products)

    @property
    def description(self) -> str:
        """The name and the degree, or what a polynomial of degree 1 is."""
        if self.degree == 1:
            return "jacobi" if self.block_size == 1 else "block_jacobi"
        return f"{self.name} of degree {self.degree}"


def check_degree(degree: float | str) -> None:
    """Refuse a degree that has no positive definite polynomial: one that is even or not positive."""
    if degree == "auto":
        return
    if not isinstance(degree, str) and degree > _MOST_DEGREE:
        raise InputError(
            f"a degree of {degree} is more than {_MOST_DEGREE}: this many products in one iteration do not pay; choose "
            "fewer, or auto"
        )
    if isinstance(degree, str) or degree < 1 or degree % 2 != 1:
        raise InputError(
            f"degree must be odd and positive, or auto, not {degree}: a polynomial of even degree is not positive beyond the "
            "largest eigenvalue assumed"
        )


def chebyshev(
    A: Any,
    degree: int | Literal["auto"] = 9,
    *,
    block_size: int = 1,
    rounds: int = 2,
    low: float | None = None,
    high: float | None = None,
) -> Chebyshev:
    """Return a Chebyshev polynomial in A as a preconditioner.

    Parameters
    ----------
    A : operator or matrix
        Symmetric positive definite. It must provide its diagonal and, without ``high``, products with its absolute values;
        matrices of penstock do, resident or streamed.
    degree : int or "auto"
        Products with A in an iteration of CG, including CG's own; odd. CG needs fewer iterations by about this factor, and a few
        more products in total. ``auto`` is 9; for a streamed matrix, the degree of its plan or the powers of one sweep, 33 at
        most: 1, which is no polynomial, where a sweep has room for one product.
    block_size : int
        Rows of the dense diagonal blocks that D inverts, for example the unknowns of a node; 1 to 8. A polynomial in ``D A``
        with such blocks saves as many iterations as :func:`block_jacobi` saves over :func:`jacobi`.
    rounds : int
        Rounds that measure the largest eigenvalue: 9 to 17 consecutive products in the last one, half as many in those before,
        which share sweeps. With 0 the bound is the rigorous ``||D A||_inf``.
    low, high : float, optional
        Bounds of the eigenvalues of ``D A``. By default ``high`` is measured, and ``low`` is ``high / (4 degree^2)``, its limit.

    Raises
    ------
    InputError
        If the degree is even or not positive, subdivisions cut blocks, or A does not provide the products needed.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import cg, jacobi
    >>> beam = Cantilever(nodes=(17, 5, 5), dof=3)
    >>> A, b = beam.matrix(), beam.load()
    >>> [cg(A, b, M=M, rtol=1e-8).iterations < 60 for M in (chebyshev(A, 9), jacobi(A))]
    [True, False]
    """
    operator = as_operator(A)
    communicator_of(operator).check_same(degree=degree, block_size=block_size, rounds=rounds, low=low, high=high)
    check_degree(degree)
    _check_rounds(rounds)
    if degree == "auto":
        degree = _degree_for(operator)
    _check_cut(operator, block_size)
    diagonal = block_jacobi(operator, block_size)
    with operator.device.current():
        if high is None:
            high = largest_eigenvalue(operator, diagonal, int(rounds), int(degree))
    low = high / (4 * degree**2) if low is None else low
    if not 0 < low < high or not math.isfinite(high):
        raise InputError(f"eigenvalue bounds must be positive and in order, not low={low} and high={high}")
    return Chebyshev(operator, diagonal, int(degree), low, high)


def _check_rounds(rounds: int) -> None:
    if rounds < 0 or rounds % 1:
        raise InputError(f"rounds must be a whole number, 0 or more, not {rounds}")


def _check_cut(A: Operator, block_size: int) -> None:
    if isinstance(A, SweptOperator) and not A.keeps_together(block_size):
        raise InputError(
            f"subdivisions of the matrix cut blocks of {block_size} rows; cut it at multiples of them, or set block_size=1"
        )


def _degree_for(A: Operator) -> int:
    """Return the best odd degree for A."""
    preferred = A.preferred_degree() if isinstance(A, SweptOperator) else None
    if preferred is None:
        return _DEGREE
    if preferred == 2:  # three products in two sweeps
        return 3
    return min(preferred - 1 + preferred % 2, _LARGEST_DEGREE)  # with one product a sweep, no polynomial


def scaled_row_sums(diagonal: DiagonalBlocks, sums: Array) -> Array:
    """Return the row sums of ``|D| |A|``, whose maximum bounds the eigenvalues of ``D A``, from those of ``|A|``."""
    return DiagonalBlocks(abs(diagonal.blocks)).apply(sums)


def rounds_from(A: Operator, vector: Array | None) -> tuple[int, Array]:
    """Return the rounds and the vector for :func:`largest_eigenvalue` of new values: None stands for the first time."""
    return (2, A.device.xp.zeros(A.shape[0], dtype=A.dtype)) if vector is None else (1, vector)


def largest_eigenvalue(
    A: Operator,
    diagonal: DiagonalBlocks | Scaling,
    rounds: int,
    degree: int = _DEGREE,
    *,
    row_sums: Array | None = None,
    settled: float | None = None,
    scales: Array | None = None,
    vector: Array | None = None,
) -> float:
    """Return a bound of the largest eigenvalue of ``D A``: ``||D A||_inf``, or the measured value plus a margin if smaller.

    D is the inverse of the diagonal of A or of the blocks on it, or of blocks on groups of nodes, for which there is no bound but
    the measured one. Each round applies to a vector, at first a random one, the
    Chebyshev polynomial that is smallest below the last estimate (Zhou et al. 2006), and computes the Rayleigh quotient of the
    result. The bound is then good but not rigorous.

    ``settled``: go on until a round raises the estimate by no more than this share of it, and raise the bound if it was
    exceeded. For matrices whose largest eigenvalues may stand alone, so that few rounds miss them, and for smoothers, which
    diverge beyond their interval. ``scales``, (n,), are about ``1 / sqrt(a_ii)``, by default the roots of the diagonal of D where
    its blocks are stored; see :func:`_random_vector`. A nonzero ``vector``, (n,), is the start, and is overwritten by the last
    vector: from that of a nearly equal matrix, one round suffices.
    """
    xp, n, space = A.device.xp, A.shape[0], VectorSpace.of(A)
    bound = math.inf
    image = xp.empty(n, dtype=A.dtype)
    blocks = diagonal.blocks if isinstance(diagonal, DiagonalBlocks) else diagonal
    if row_sums is None and isinstance(diagonal, DiagonalBlocks) and isinstance(A, HasAbsoluteProduct):
        row_sums = scaled_row_sums(diagonal, A.apply_absolute(xp.ones(n, dtype=A.dtype)))
    if row_sums is not None:
        bound = space.maximum(row_sums)
    elif not rounds:
        raise InputError(f"{type(A).__name__} cannot compute |A| x: set high, or rounds to measure it")
    if not rounds:
        return bound
    v = _random_vector(A, diagonal, scales, space) if vector is None or not space.any(vector) else vector.copy()
    product = xp.empty_like(v)
    most = min(max(degree, _LEAST_MEASURED), _MOST_MEASURED) // 2 * 2
    # Without a bound, the first estimate is the quotient of the random vector.
    # All rounds but the last only locate the eigenvalue.
    estimate, degrees = 1.0, [0] * (bound == math.inf) + [most // 4 * 2] * (rounds - 1) + [most]
    measured, further = len(degrees), [] if settled is None else [most] * _MOST_FURTHER
    estimated_bound = math.inf
    for number, round_degree in enumerate([*degrees, *further], start=1):
        v /= space.norm(v)
        # T[j+1] = 2 t T[j] - T[j-1] for t = 2 / estimate D A - 1, which is between -1 and 1 below the estimate.
        first = RecurrenceStep(-2 / estimate, -1.0, 0.0, driven=False)
        later = RecurrenceStep(-4 / estimate, -2.0, -1.0, driven=False)
        # For an eigenvalue x above the estimate, T[j] is at most (4 x / estimate)^j.
        growth = 4 * max(1.0, min(bound / estimate, _FURTHEST))
        stable_degree = min(round_degree, int(_GROWTH_DIGITS / math.log10(growth)) // 2 * 2)
        steps = [first, *[later] * (stable_degree - 1)][:stable_degree]
        Recurrence([*steps, _PRODUCT], v, product, v, blocks, image, space, repeats=False).run(A)
        # The Rayleigh quotient in the inner product of A, in which D A is symmetric.
        diagonal._apply(product, image, 1.0, 0.0)
        energy, quotient = space.dot(v, product), space.dot(product, image)
        if not (0 < energy < math.inf and 0 < quotient < math.inf):  # not positive definite, or badly scaled
            return bound if number <= measured else estimated_bound
        before, estimate = estimate, quotient / energy
        if number == measured or estimate > estimated_bound:
            estimated_bound = min(bound, _MARGIN * estimate)
        if _MARGIN * estimate >= bound:  # as it will be after further rounds
            estimated_bound = bound
            break
        if settled is not None and number > measured and estimate <= (1.0 + settled) * before:
            break
    if vector is not None:
        vector[...] = v
    return estimated_bound


def _random_vector(A: Operator, diagonal: DiagonalBlocks | Scaling, scales: Array | None, space: VectorSpace) -> Array:
    """Return random numbers, (n,), times the scales of the unknowns if these differ much.

    Rows that a penalty holds fixed have entries of 1e16 and more, and the energy ``v^T A v`` of a random vector is theirs alone:
    the eigenvalues of all other rows would not be seen. Scaled, every row contributes as much.
    """
    v = noise(A.device, space.communicator.before(A.shape[0]), A.shape[0]).astype(A.dtype, copy=False)
    if scales is None:
        if not isinstance(diagonal, DiagonalBlocks):
            return v
        scales = diagonal.diagonal_roots()
    with np.errstate(divide="ignore"):
        apart = space.maximum(scales) * space.maximum(1 / scales)
    if apart > _FAR_APART:
        v *= scales
    return v
