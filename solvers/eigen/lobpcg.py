"""The lowest modes of ``K x = lambda M x``: block LOBPCG whose iteration is one pass over K.

Locally optimal block preconditioned conjugate gradients (Knyazev 2001) look for Ritz vectors in the space of the present ones X,
of the last search directions Q and of the preconditioned residuals. Here the preconditioner is that of
:mod:`~penstock.solvers.amg.method`, a polynomial and a coarse level, and everything of an iteration that needs products with K
happens in one pass::

    X <- X + P c                     P = p(D K) T                                     smoothing products
    f  = M X Lambda - K X            the true residuals                               1 product
    m  = q(D K) D f                                                                   degree - 1 products
    u  = K m,  t = M m                                                                1 product
    P^T K m = T^T K p(D K) m,  P^T M m = T^T p(K D) t                                 smoothing products, of two blocks

``P^T f = T^T p(K D) f`` takes none: what the polynomial multiplies adds up to it. Between two passes there are only coarse
vectors and small dense matrices. With ``F = [X, Q + P c_q, m]`` and coarse vectors E, the Gram matrices of ``[F, P E]`` follow
from those of the fine vectors and from ``P^T K F`` and ``P^T M F``; E is the correction of the residuals of the Ritz vectors by
the coarse level, which is made three times, ``e = B P^T (K x - theta M x)``. The coarse part of the new X is added to it in the
next pass.

Columns whose residual is small enough get no new direction (soft locking). Modes that were found before, and motions of a free
body, stay among the directions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from penstock.host.adaptive_threads import most_threads
from penstock.host.threads import blas_limited
from penstock.solvers.eigen.coarse_modes import CoarseModes
from penstock.solvers.eigen.mass import mass_norms
from penstock.solvers.eigen.rayleigh_ritz import SHIFT, RitzPairs, complement, new_directions, ritz_pairs
from penstock.solvers.eigen.sweep import ModesSweep
from penstock.spmv import Array, device_of

Matrix = np.ndarray[Any, Any]

# Corrections by the coarse level between two passes.
_CORRECTIONS = 3
# Rows that are combined at a time.
_ROWS = {"cpu": 1 << 14, "cuda": 1 << 20}
# Passes without a residual that is a third smaller, after which the iteration has come as far as it can: at the rounding floor,
# and elsewhere.
_PATIENCE_AT_FLOOR, _PATIENCE, _LESS = 3, 10, 0.7
# A value that falls by this share counts as such a residual.
_FALLING = 1e-3
# Guard vectors get new directions until their residual is this share of the tolerance.
_OF_GUARDS = 1e-2


@dataclass
class Found:
    """Modes that are found: vectors (n, k), their products with M and K, those of ``P^T``, values and residuals."""

    vectors: Array
    of_mass: Array
    below_k: Array  # P^T K X
    below_m: Array
    gram_k: Array  # X^T K X
    gram_m: Array
    values: Matrix
    residuals: Matrix
    errors: Matrix  # norms of K x - lambda M x in that of the inverse of M

    def joined(self, other: Found) -> Found:
        """Return these modes and others, which were found later."""
        device = device_of(other.vectors)
        xp, of_m = device.xp, self.vectors.T @ other.of_mass
        gram_k = _bordered(self.gram_k, of_m * device.asarray(other.values), other.gram_k)
        gram_m = _bordered(self.gram_m, of_m, other.gram_m)
        vectors, of_mass, below_k, below_m = (
            xp.concatenate([getattr(part, name) for part in (self, other)], axis=1)
            for name in ("vectors", "of_mass", "below_k", "below_m")
        )
        values, residuals, errors = (
            np.concatenate([getattr(part, name) for part in (self, other)])
            for name in ("values", "residuals", "errors")
        )
        return Found(vectors, of_mass, below_k, below_m, gram_k, gram_m, values, residuals, errors)


@dataclass
class ModesIteration:
    """The state between two passes, for one block of columns."""

    sweep: ModesSweep
    coarse: CoarseModes
    values: Matrix  # Ritz values of the columns
    c: Array  # coarse parts of X that the next pass adds
    below_m: Array  # P^T M X
    locked: Found | None = None
    sigma: float = 0.0
    zero: float = 0.0  # values up to this size are zero but for rounding
    iteration: int = 0
    has_soft: bool = True  # whether X, or modes that are found, represent the soft modes of the coarse level
    fresh: slice | None = None  # columns that began at random in the last pass
    residuals: Matrix = field(default_factory=lambda: np.empty(0))
    # Of the search directions Q + P c_q: coarse parts, P^T K and P^T M of them, and their Gram matrices.
    c_q: Array | None = None
    below_k_q: Array | None = None
    below_m_q: Array | None = None
    gram_k_q: Array | None = None
    gram_m_q: Array | None = None

    @cached_property
    def _soft(self) -> tuple[Array, Array]:
        """The soft modes of the coarse level, and their products with its mass."""
        soft = device_of(self.coarse.vectors).xp.ascontiguousarray(self.coarse.vectors[:, : self.coarse.soft])
        return soft, self.coarse.mass.apply(soft)

    @property
    def columns(self) -> int:
        """Vectors that iterate."""
        return int(self.sweep.X.shape[1])

    def run(
        self,
        wanted: int,
        tol: float,
        maxiter: int,
        floor: Callable[[Matrix], Matrix],
        look: Callable[[ModesIteration], bool],
    ) -> str:
        """Iterate until the first ``wanted`` residuals are at most ``tol``; return why it ended.

        ``floor(values)`` are the residuals that rounding leaves, and ``look`` is called after each pass; True ends the iteration.
        """
        ending = _Ending(self, wanted, tol, maxiter, floor, look)
        with blas_limited(most_threads()):
            while (below := self.sweep.run(self.c, self.values, ending.goes_on)) is not None:
                # Directions of vectors that have converged as far as rounding lets them would be noise.
                reached = np.full(self.columns, tol)
                reached[wanted:] *= _OF_GUARDS
                self._combine(below, self._active(np.maximum(reached, floor(self.values))))
                self.iteration += 1
        return ending.reason

    def advance(self, passes: int, floor: Callable[[Matrix], Matrix]) -> None:
        """Make some passes, whatever the residuals; ``floor`` as for :meth:`run`."""
        with blas_limited(most_threads()):
            for _ in range(passes):
                below = self.sweep.run(self.c, self.values, lambda: True)
                assert below is not None, "it goes on"
                self.measure()
                self._combine(below, self._active(floor(self.values)))
                self.iteration += 1

    def _active(self, reached: Matrix) -> Matrix:
        """Return which columns get new directions: those above some residuals, and those that begin at random."""
        active = self.residuals > reached
        if self.fresh is not None:
            active[self.fresh] = True
        return active

    def forget_directions(self) -> None:
        """Go on from the vectors X alone."""
        self.c_q = self.below_k_q = self.below_m_q = self.gram_k_q = self.gram_m_q = None
        self.sweep.Q[...] = 0.0

    def measure(self) -> None:
        """Compute the residuals ``||K x - lambda M x|| / (lambda ||M x||)`` from what a pass has left.

        Those of values that are zero but for rounding are relative to the smallest other one.
        """
        sweep = self.sweep
        of_mass = column_norms(sweep.of_mass)
        scale = sizes_of(self.values, self.zero) * of_mass
        self.residuals = column_norms(sweep.f) / np.maximum(scale, np.finfo(float).tiny)
        self.residuals[of_mass == 0] = 1.0
        self.fresh = sweep.driven
        if self.fresh is not None:
            self.residuals[self.fresh] = 1.0

    def _combine(self, below: tuple[Array, Array, Array], active: Matrix) -> None:
        """Take the Rayleigh-Ritz step, and advance X and Q."""
        basis = _Basis(self, below, active)
        sigma = max(self.sigma, SHIFT * float(self.values.max()))
        device, E, zeros = self.sweep.K.device, self.coarse.free, int(self.coarse.free.shape[1])
        xp = device.xp
        for correction in range(_CORRECTIONS + 1):
            grams = basis.grams(E)
            number = np.arange(len(grams[0]))
            # Modes that are found, and free motions, have no part in the new vectors, whatever their values.
            found = (number < basis.locked) | ((basis.size <= number) & (number < basis.size + zeros))
            others = complement(grams[1], found)
            of_k, of_m = (others.T @ gram @ others for gram in grams)
            small = ritz_pairs(of_k, of_m, self.columns, sigma)
            pairs = small._replace(coefficients=others @ small.coefficients)
            numbers = np.flatnonzero(active[: len(pairs.values)])
            moving = device.asarray(numbers)
            if correction == _CORRECTIONS:
                break
            e = self._correction(basis, E, RitzPairs(pairs.values[numbers], pairs.coefficients[:, moving], pairs.shift))
            E = xp.ascontiguousarray(xp.concatenate([E, e], axis=1))
        B = others @ new_directions(of_k, of_m, small, moving, slice(0, self.columns))
        self._advance(basis, E, pairs, B, grams)

    def _correction(self, basis: _Basis, E: Array, pairs: RitzPairs) -> Array:
        """Return the corrections by the coarse level of the Ritz vectors, of unit M-norm.

        While Ritz vectors represent the soft modes of the coarse level, corrections have no part in these: it would be the
        rounding in residuals over values that are small, and most of the corrections.
        """
        device, level = self.sweep.K.device, self.sweep.M.level
        F, EA = pairs.coefficients[: basis.size], pairs.coefficients[basis.size :]
        values = device.asarray(pairs.values)
        r = basis.below_k @ F - (basis.below_m @ F) * values
        if E.shape[1]:
            e = E @ EA
            r += level.energy_product(e) - self.coarse.mass.apply(e) * values
        r[level.T.missing] = 0.0
        soft, of_soft = self._soft
        if self.has_soft:
            r -= of_soft @ (soft.T @ r)
        e = level.solve(device.xp.ascontiguousarray(r))
        if self.has_soft:
            e -= soft @ (of_soft.T @ e)
        squares = (e.T @ self.coarse.mass.apply(e)).diagonal()
        return e / device.xp.sqrt(device.xp.where(squares > 0, squares, 1.0))

    def _advance(self, basis: _Basis, E: Array, pairs: RitzPairs, B: Array, grams: tuple[Array, Array]) -> None:
        """Set the coarse parts and small matrices of X and Q to those of the new vectors, and combine the fine ones."""
        device, columns, count = self.sweep.K.device, self.columns, len(pairs.values)
        xp = device.xp
        A = xp.zeros((len(B), columns))
        A[:, :count] = pairs.coefficients
        both = xp.concatenate([A, B], axis=1)
        F, of_e = both[: basis.size], both[basis.size :]
        e = xp.ascontiguousarray(E @ of_e)
        below_k = basis.below_k @ F + self.sweep.M.level.energy_product(e)
        below_m = basis.below_m @ F + self.coarse.mass.apply(e)
        c = e + basis.coarse @ F
        self.c, self.below_m = (xp.ascontiguousarray(part[:, :columns]) for part in (c, below_m))
        self.c_q, self.below_k_q, self.below_m_q = (
            xp.ascontiguousarray(part[:, columns:]) for part in (c, below_k, below_m)
        )
        self.gram_k_q, self.gram_m_q = (B.T @ gram @ B for gram in grams)
        # Where fewer directions are independent, the last vectors are zero.
        self.values = np.full(columns, pairs.values[-1])
        self.values[:count] = pairs.values
        self._combine_rows(basis, F)

    def _combine_rows(self, basis: _Basis, F: Array) -> None:
        """Set X and Q to their combinations with the other fine vectors, some rows at a time."""
        sweep, xp = self.sweep, self.sweep.K.device.xp
        columns, step = self.columns, _ROWS[sweep.K.device.kind]
        q = F.shape[1] - columns
        for start in range(0, sweep.X.shape[0], step):
            rows = slice(start, start + step)
            total = xp.concatenate([of[rows] for of in basis.fine], axis=1) @ F
            sweep.X[rows] = total[:, :columns]
            sweep.Q[rows, :q] = total[:, columns:]
        sweep.Q[:, q:] = 0.0

    def found(self, chosen: slice) -> Found:
        """Return some of the columns as modes that are found, with the residuals of the last pass."""
        sweep, xp = self.sweep, self.sweep.K.device.xp
        values = self.values[chosen].copy()
        on_device = sweep.K.device.asarray(values)
        X, of_mass, f, below_m = (
            xp.ascontiguousarray(of[:, chosen]) for of in (sweep.X, sweep.of_mass, sweep.f, self.below_m)
        )
        gram_m = X.T @ of_mass
        gram_k = gram_m * on_device - X.T @ f
        # P^T f is left out: it is as small as the residuals.
        below_k = below_m * on_device
        errors = mass_norms(sweep.mass, f)
        return Found(X, of_mass, below_k, below_m, gram_k, gram_m, values, self.residuals[chosen].copy(), errors)


class _Ending:
    """Decides after the residuals of each pass whether the iteration goes on."""

    def __init__(
        self,
        state: ModesIteration,
        wanted: int,
        tol: float,
        maxiter: int,
        floor: Callable[[Matrix], Matrix],
        look: Callable[[ModesIteration], bool],
    ) -> None:
        self._state, self._wanted, self._tol, self._maxiter = state, wanted, tol, maxiter
        self._floor, self._look = floor, look
        self._best, self._since, self._values = np.inf, 0, np.empty(0)
        self.reason = ""

    def goes_on(self) -> bool:
        """Measure the residuals, and return whether a further pass is needed and makes sense."""
        self._state.measure()
        self.reason = self._judged()
        return not self.reason

    def _judged(self) -> str:
        state, residuals = self._state, self._state.residuals[: self._wanted]
        worst = float(residuals.max(initial=0.0))
        stops = self._look(state)
        if not np.isfinite(worst):
            return "not finite"
        if worst <= self._tol:
            return "converged"
        if stops:
            return "stopped"
        values = state.values[: self._wanted].copy()
        # Values that are zero but for rounding change without end.
        falling = self._values.shape == values.shape and bool(
            ((values < self._values * (1 - _FALLING)) & (values > state.zero)).any()
        )
        self._values = values
        if worst < _LESS * self._best or falling:
            self._best, self._since = min(worst, self._best), 0
        self._since += 1
        at_floor = (residuals <= np.maximum(self._tol, self._floor(state.values[: self._wanted]))).all()
        if self._since > (_PATIENCE_AT_FLOOR if at_floor else _PATIENCE):
            return "rounding floor" if at_floor else "stagnated"
        return "maxiter" if state.iteration >= self._maxiter else ""


class _Basis:
    """The fine directions of a Rayleigh-Ritz step: modes that are found, X, Q and m, with their Gram matrices."""

    def __init__(self, state: ModesIteration, below: tuple[Array, Array, Array], active: Matrix) -> None:
        sweep, device, locked = state.sweep, state.sweep.K.device, state.locked
        xp, values = device.xp, device.asarray(state.values)
        below_f, below_u, below_t = below
        moving = device.asarray(np.flatnonzero(active))
        m, u, t = sweep.m, sweep.u, sweep.t
        if not active.all():
            m, u, t = (xp.ascontiguousarray(of[:, moving]) for of in (m, u, t))
            below_u, below_t = below_u[:, moving], below_t[:, moving]
        self._q = 0 if state.c_q is None else int(state.c_q.shape[1])
        Q = sweep.Q[:, : self._q]
        self.locked = 0 if locked is None else int(locked.vectors.shape[1])
        below_k_x = state.below_m * values - below_f
        coarse = [xp.zeros_like(state.c), *([] if state.c_q is None else [state.c_q]), xp.zeros_like(below_u)]
        of_k, of_m = [below_k_x, below_u], [state.below_m, below_t]
        if state.c_q is not None:
            of_k.insert(1, state.below_k_q)
            of_m.insert(1, state.below_m_q)
        self.fine = [sweep.X, Q, m]
        if locked is not None:
            self.fine.insert(0, locked.vectors)
            coarse.insert(0, xp.zeros_like(locked.below_k))
            of_k.insert(0, locked.below_k)
            of_m.insert(0, locked.below_m)
        self.below_k, self.below_m, self.coarse = (xp.concatenate(parts, axis=1) for parts in (of_k, of_m, coarse))
        self.size = int(self.below_k.shape[1])
        self._device, self._level, self._mass = device, sweep.M.level, state.coarse.mass
        # Inner products with M X, f, u and t of all fine vectors.
        images = [sweep.of_mass, sweep.f, u, t]
        products = [[of.T @ image for image in images] for of in self.fine]
        self._fill(state, products, below_k_x, below_u, below_t)

    def _fill(
        self, state: ModesIteration, products: list[list[Array]], below_k_x: Array, below_u: Array, below_t: Array
    ) -> None:
        """Fill the Gram matrices of the fine directions."""
        values, n_l, b = self._device.asarray(state.values), self.locked, state.columns
        n_q, n_m = self._q, int(below_u.shape[1])
        bounds = np.cumsum([0, n_l, b, n_q, n_m])
        L, X, Q, N = (slice(*bounds[i : i + 2]) for i in range(4))
        self.gram_k, self.gram_m = (self._device.xp.zeros((self.size, self.size)) for _ in range(2))
        of = dict(zip("lxqm" if n_l else "xqm", products, strict=True))
        for key, place in (("l", L), ("x", X), ("q", Q), ("m", N)):
            if key not in of:
                continue
            mx, f, u, t = of[key]
            kx = mx * values - f
            if key == "q" and n_q:  # the coarse part of Q
                c_q = state.c_q
                assert c_q is not None
                kx, mx = kx + c_q.T @ below_k_x, mx + c_q.T @ state.below_m
                u, t = u + c_q.T @ below_u, t + c_q.T @ below_t
            if key in "lxq":
                self._set(place, X, kx, mx)
            self._set(place, N, u, t)
        if n_q:
            self._set(Q, Q, state.gram_k_q, state.gram_m_q)
        if state.locked is not None:
            self._set(L, L, state.locked.gram_k, state.locked.gram_m)
            if n_q:
                self._set_locked_directions(state, L, Q)

    def _set_locked_directions(self, state: ModesIteration, L: slice, Q: slice) -> None:
        """Set the products of found modes with the search directions, which are orthogonal to them but for rounding."""
        locked, c_q = state.locked, state.c_q
        assert locked is not None
        assert c_q is not None
        of_m = locked.of_mass.T @ state.sweep.Q[:, : self._q] + locked.below_m.T @ c_q
        self._set(L, Q, self._device.asarray(locked.values)[:, None] * of_m, of_m)

    def _set(self, rows: slice, columns: slice, of_k: Array, of_m: Array) -> None:
        for gram, of in ((self.gram_k, of_k), (self.gram_m, of_m)):
            gram[rows, columns] = of
            gram[columns, rows] = of.T

    def grams(self, E: Array) -> tuple[Array, Array]:
        """Return the Gram matrices of the fine directions and of ``P E``."""
        if not E.shape[1]:
            return self.gram_k, self.gram_m
        of_k = _bordered(self.gram_k, self.below_k.T @ E, E.T @ self._level.energy_product(E))
        of_m = _bordered(self.gram_m, self.below_m.T @ E, E.T @ self._mass.apply(E))
        return of_k, of_m


def _bordered(A: Array, B: Array, C: Array) -> Array:
    """Return ``[[A, B], [B^T, C]]``."""
    n, size = len(A), len(A) + len(C)
    whole = device_of(A).xp.empty((size, size))
    whole[:n, :n], whole[:n, n:], whole[n:, :n], whole[n:, n:] = A, B, B.T, C
    return whole


def sizes_of(values: Matrix, zero: float) -> Matrix:
    """Return what residuals of modes are relative to: values, and for those up to ``zero`` the least that is larger, or 1."""
    sizes = np.abs(values)
    regular = sizes > zero
    least = float(sizes[regular].min(initial=np.inf))
    return np.asarray(np.where(regular, sizes, least if np.isfinite(least) else 1.0))


def column_norms(vectors: Array) -> Matrix:
    """Return the norms of columns; a small Gram matrix is faster than sums of columns."""
    device = device_of(vectors)
    norms: Matrix = np.sqrt(np.maximum(np.diag(device.to_host(vectors.T @ vectors)), 0.0))
    return norms
