"""A polynomial in A for a preconditioner: products instead of inner products, several of them for one iteration of CG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.solvers.preconditioners import DiagonalBlocks, block_jacobi
from penstock.spmv import (
    Array,
    HasAbsoluteProduct,
    InputError,
    Operator,
    ValidatedOperator,
    VectorSpace,
    as_operator,
)
from penstock.spmv.recurrence import AdvancesRecurrences, Recurrence, RecurrenceStep

__all__ = ["Chebyshev", "chebyshev", "check_products", "largest_eigenvalue"]

# The largest eigenvalue is found from below; a bound that is a little high costs little, one that is too low more.
_MARGIN = 1.05
_PRODUCTS, _MOST_PRODUCTS = 9, 33
# Products of a round that measures the largest eigenvalue: two rounds of 9 find more of it than ten Lanczos steps do.
_LEAST_MEASURED, _MOST_MEASURED = 9, 17
# How far above an estimate an eigenvalue is taken to be at most, and how many digits a vector may grow by: float32 has 38.
_FURTHEST, _GROWTH_DIGITS = 10.0, 15.0
_PRODUCT = RecurrenceStep(-1.0, 0.0, 0.0, scaled=False, driven=False)


@dataclass(frozen=True)
class _Interval:
    """Where the polynomial is small: from ``low`` to ``high``."""

    low: float
    high: float

    def coefficients(self, products: int) -> list[tuple[float, float]]:
        """Return ``(a, c)`` of ``z[j+1] = z[j] + c (z[j] - z[j-1]) + a D (r - A z[j])``; the first step has no c.

        Saad 2003, algorithm 12.1.
        """
        centre, radius = (self.high + self.low) / 2, (self.high - self.low) / 2
        ratio = centre / radius
        rho, steps = 1 / ratio, [(1 / centre, 0.0)]
        for _ in range(products - 1):
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
    products : int
        Degree of ``1 - t q(t)``; odd. An application takes one product less, that with ``A z`` as many.
    low, high : float
        Bounds of the eigenvalues of ``D A``. Smaller ones than ``low`` are left to CG.

    Notes
    -----
    Because the degree is odd, the operator is positive definite for any ``high``: one that is too small makes CG slow,
    never wrong. Each step reads 5 n values besides those of A and writes n. Two vectors are held besides r and z, and of a
    matrix that is streamed to a GPU three more.

    Streamed, the products share sweeps: see :meth:`StreamedMatrix.advance`.
    """

    def __init__(self, A: Operator, diagonal: DiagonalBlocks, products: int, low: float, high: float) -> None:
        self.A, self.products, self.low, self.high = A, products, low, high
        self.shape, self.dtype, self.device = A.shape, np.dtype(A.dtype), A.device
        self._jacobi, self._diagonal = diagonal, diagonal.blocks
        (self._first, _), *steps = _Interval(low, high).coefficients(products)
        # Zero came before the first vector.
        self._steps = [RecurrenceStep(a, 1.0 + c, -c if number else 0.0) for number, (a, c) in enumerate(steps)]
        self._space = VectorSpace(A.device)
        self._image: Array | None = None
        self._other: Array | None = None
        # A GPU replays sweeps from recordings, which are of certain vectors: those, whatever vectors a solve has.
        self._replayed = isinstance(A, AdvancesRecurrences) and A.device.kind == "cuda"
        self._own: list[Array] = []

    @property
    def recordable(self) -> bool:
        """Whether products with A are."""
        return isinstance(self.A, ValidatedOperator) and self.A.recordable

    def apply_with_product(self, r: Array, z: Array, w: Array) -> None:
        """Set ``z = M r`` and ``w = A z``, all of a shape, by ``products`` products that follow each other."""
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
        kept = out.copy() if beta != 0.0 else None
        self._run(x, out, self._other, self._steps)
        if alpha != 1.0:
            out *= alpha
        if kept is not None:
            out += beta * kept

    def _run(self, r: Array, z: Array, other: Array, steps: list[RecurrenceStep]) -> None:
        """Take an even number of steps, after which the last vector is z, and possibly one more, which leaves ``other``."""
        if self._image is None or self._image.shape != r.shape:
            self._image = self.device.xp.empty_like(z)
        self._jacobi._apply(r, z, self._first, 0.0)
        Recurrence(steps, z, other, r, self._diagonal, self._image, self._space).run(self.A)


def check_products(products: float | str) -> None:
    """Refuse a number of products of which no polynomial is made.

    Raises
    ------
    InputError
        If it is even or not positive.
    """
    if products == "auto":
        return
    if isinstance(products, str) or products < 1 or products % 2 != 1:
        raise InputError(
            f"products must be odd and positive, or auto, not {products}: of an even degree the polynomial is not positive "
            "beyond the largest eigenvalue assumed"
        )


def chebyshev(
    A: Any,
    products: int | Literal["auto"] = 9,
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
        Symmetric positive definite; it must know its diagonal, and without ``high`` its absolute values, as matrices of
        penstock do, resident or streamed.
    products : int or "auto"
        Products with A an iteration of CG takes, its own included: odd. CG needs about that many times fewer iterations,
        and a little more products in all. ``auto`` is 9, and of a streamed matrix what its plan says, or what one sweep
        makes, 33 at most.
    block_size : int
        Rows of the dense blocks on the diagonal whose inverse D is, such as the unknowns of a node; 1 to 8. The polynomial is
        then one in ``D A``, which saves as many iterations as :func:`block_jacobi` saves over :func:`jacobi`.
    rounds : int
        In which the largest eigenvalue is measured, each of 9 to 17 products that follow each other and so share sweeps. 0
        leaves its bound at the rigorous ``||D A||_inf``.
    low, high : float, optional
        Bounds of the eigenvalues of ``D A``. By default ``high`` is measured, and
        ``low`` is ``high / (4 products^2)``: the polynomial can do no more with so few products.

    Raises
    ------
    InputError
        If the number of products is even or not positive, subdivisions cut blocks, or A does not know what is asked of it.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import cg, jacobi
    >>> beam = Cantilever(nodes=(17, 5, 5), dof=3)
    >>> A, b = beam.matrix(), beam.load()
    >>> few, many = (cg(A, b, M=M, rtol=1e-8).iterations for M in (chebyshev(A, 9), jacobi(A)))
    >>> few < many / 5
    True
    """
    operator = as_operator(A)
    check_products(products)
    if rounds < 0 or rounds % 1:
        raise InputError(f"rounds must be a whole number, 0 or more, not {rounds}")
    if products == "auto":
        products = _products_for(operator)
    if isinstance(operator, AdvancesRecurrences) and not operator.keeps_together(block_size):
        raise InputError(
            f"subdivisions of the matrix cut blocks of {block_size} rows; cut it at multiples of them, or take block_size=1"
        )
    diagonal = block_jacobi(operator, block_size)
    with operator.device.current():
        if high is None:
            high = largest_eigenvalue(operator, diagonal, int(rounds), int(products))
    low = high / (4 * products**2) if low is None else low
    if not 0 < low < high or not math.isfinite(high):
        raise InputError(f"eigenvalue bounds must be positive and in order, not low={low} and high={high}")
    return Chebyshev(operator, diagonal, int(products), low, high)


def _products_for(A: Operator) -> int:
    """Return how many products suit A; an odd number."""
    found = A.following_products() if isinstance(A, AdvancesRecurrences) else None
    if found is None or found < 3:  # no sweep is saved
        return _PRODUCTS
    return min(found - 1 + found % 2, _MOST_PRODUCTS)


def largest_eigenvalue(A: Operator, diagonal: DiagonalBlocks, rounds: int, products: int = _PRODUCTS) -> float:
    """Return a bound of the largest eigenvalue of ``D A``: ``||D A||_inf``, or a little more than is measured if that is less.

    Parameters
    ----------
    A : Operator
    diagonal : DiagonalBlocks
        D, the inverse of the diagonal of A or of the blocks on it: the eigenvalues of ``D A`` are 1 on average.
    rounds : int
        Each applies to a vector, at first a random one, the Chebyshev polynomial that is smallest below the last estimate (Zhou
        et al. 2006), and takes the Rayleigh quotient of what is left. The bound is then a good guess rather than rigorous.
    products : int
        Of a round, which follow each other.
    """
    xp, n = A.device.xp, A.shape[0]
    bound = math.inf
    image = xp.empty(n, dtype=A.dtype)
    if isinstance(A, HasAbsoluteProduct):
        # ||D A|| <= || |D| |A| ||
        DiagonalBlocks(abs(diagonal.blocks))._apply(A.apply_absolute(xp.ones(n, dtype=A.dtype)), image, 1.0, 0.0)
        bound = float(image.max())
    elif not rounds:
        raise InputError(f"{type(A).__name__} cannot form |A| x: give high, or rounds to measure it")
    if not rounds:
        return bound
    # The same numbers on every device.
    v = A.device.asarray(np.random.default_rng(0).standard_normal(n), dtype=A.dtype)
    space, product = VectorSpace(A.device), xp.empty_like(v)
    most = min(max(products, _LEAST_MEASURED), _MOST_MEASURED) // 2 * 2
    # The quotient of the random vector is the first estimate where nothing is known.
    estimate, degrees = 1.0, [most] * rounds if bound < math.inf else [0] + [most] * rounds
    for degree in degrees:
        v /= space.norm(v)
        # Of t = 2 / estimate D A - 1, which is between -1 and 1 below the estimate: T[j+1] = 2 t T[j] - T[j-1].
        first = RecurrenceStep(-2 / estimate, -1.0, 0.0, driven=False)
        later = RecurrenceStep(-4 / estimate, -2.0, -1.0, driven=False)
        # T[j] of an eigenvalue x above the estimate is at most (4 x / estimate)^j.
        growth = 4 * max(1.0, min(bound / estimate, _FURTHEST))
        degree = min(degree, int(_GROWTH_DIGITS / math.log10(growth)) // 2 * 2)
        steps = [first, *[later] * (degree - 1)][:degree]
        Recurrence([*steps, _PRODUCT], v, product, v, diagonal.blocks, image, space, repeats=False).run(A)
        # In the inner product of A, in which D A is symmetric.
        diagonal._apply(product, image, 1.0, 0.0)
        energy, quotient = space.dot(v, product), space.dot(product, image)
        if not (0 < energy < math.inf and 0 < quotient < math.inf):  # of no positive definite matrix of usual size
            return bound
        estimate = quotient / energy
    return min(bound, _MARGIN * estimate)
