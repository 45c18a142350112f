"""The lowest modes of the coarse level, with which the iteration on the fine one begins."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.linalg

from penstock.solvers.amg.galerkin import coarse_matrix
from penstock.solvers.amg.level import CoarseLevel
from penstock.solvers.amg.smoothed_aggregation import SmoothedAggregation
from penstock.solvers.eigen.free_motions import free_motions, parts_of
from penstock.solvers.eigen.mass import Mass
from penstock.solvers.eigen.rayleigh_ritz import SHIFT, new_directions, ritz_pairs
from penstock.spmv import Array, BsrMatrix
from penstock.spmv.vectors.noise import noise

# Up to this many unknowns of the coarse level its modes are those of dense matrices.
_DENSE = 900
# A larger coarse problem is solved to this relative residual, in this many iterations at most: its values are 5 to 100 % too high
# for the fine problem anyway.
_TOLERANCE, _ITERATIONS = 1e-2, 30
# Modes whose values are by this factor below all others are soft: those of slender bodies, and of bodies on soft springs. There
# are at most this many of several parts.
_SOFT, _MOST_SOFT = 3.0, 120


class CoarseModes(NamedTuple):
    """What the iteration knows of the coarse level.

    ``mass`` is ``P^T M P``; ``free``, (unknowns, zeros), are M-orthonormal motions without energy; ``vectors`` and ``values`` are
    the next modes, M-orthonormal to each other and to those. The first ``soft`` of them are far below the others.
    """

    mass: BsrMatrix
    free: Array
    vectors: Array
    values: np.ndarray[Any, Any]
    soft: int = 0


def coarse_mass(M: SmoothedAggregation, mass: Mass) -> BsrMatrix:
    """Return ``P^T M P``, in a pass over K."""
    D = M.level.diagonal if M.level.groups is None else M.level.groups
    return coarse_matrix(M.A, D, M.level.T, M.smooth, mass)


def coarse_modes(level: CoarseLevel, mass: BsrMatrix, count: int, zero: float, k: int) -> CoarseModes:
    """Return up to ``k + 1`` free motions of the coarse level, and about its lowest ``count`` other modes, or as many as it has.

    If k motions are free, one further mode shows what their residuals are small beside. Values up to ``zero`` are zero but for
    rounding.
    """
    part = parts_of(level.A)
    free = free_motions(level, mass, zero, k + 1, part)
    present = level.T.unknowns - int(level.T.missing.sum())
    soft = _most_soft(int(level.near_null_space.shape[1]), int(part.max(initial=0)) + 1)
    count = 1 if free.shape[1] >= k else max(count, soft + 1)
    count = max(0, min(count, present - free.shape[1]))
    if not count:
        return CoarseModes(mass, free, level.A.device.xp.zeros((level.T.unknowns, 0)), np.empty(0))
    if level.T.unknowns <= _DENSE or 4 * (count + free.shape[1]) > level.T.unknowns:
        values, vectors = _dense(level, mass, free, count)
    else:
        values, vectors = _by_iterations(level, mass, free, count)
    return CoarseModes(mass, free, vectors, values, _soft(values, soft))


def _most_soft(each: int, parts: int) -> int:
    """Return how many modes may be soft: the motions of each part of a system of few parts, else those of one."""
    return each * parts if each * parts <= _MOST_SOFT else each


def _soft(values: np.ndarray[Any, Any], most: int) -> int:
    """Return how many modes, up to ``most``, are far below all others; of several such numbers the largest."""
    gaps = np.flatnonzero(values[1 : most + 1] > _SOFT * np.maximum(values[:most], 0.0)[: len(values) - 1])
    return int(gaps[-1]) + 1 if gaps.size else 0


def _host(level: CoarseLevel, array: Array) -> np.ndarray[Any, Any]:
    host: np.ndarray[Any, Any] = level.A.device.to_host(array)
    return host


def _dense(level: CoarseLevel, mass: BsrMatrix, free: Array, count: int) -> tuple[np.ndarray[Any, Any], Array]:
    of_k, of_m = (A.to_csr().toarray() for A in (level.A, mass))
    of_k, of_m = (of_k + of_k.T) / 2, (of_m + of_m.T) / 2
    zeros = free.shape[1]
    sigma = 1e-8 * of_k.trace() / of_m.trace()
    # The largest 1 / (value + sigma): where columns of T vanish, those are zero. Motions that are known are shifted up.
    shifted = of_k + sigma * of_m
    if zeros:
        of_free = of_m @ _host(level, free)
        shifted += (shifted.trace() / max(of_m.trace(), np.finfo(float).tiny)) * of_free @ of_free.T
    scale = 1 / np.sqrt(np.diag(shifted))
    n = len(scale)
    wanted = (max(0, n - count), n - 1)
    inverses, vectors = scipy.linalg.eigh(
        scale[:, None] * of_m * scale, scale[:, None] * shifted * scale, subset_by_index=wanted
    )
    inverses, vectors = inverses[::-1], vectors[:, ::-1] * scale[:, None]
    positive = inverses > 0
    inverses, vectors = inverses[positive], vectors[:, positive] / np.sqrt(inverses[positive])
    return 1 / inverses - sigma, level.A.device.asarray(np.ascontiguousarray(vectors))


def _by_iterations(level: CoarseLevel, mass: BsrMatrix, free: Array, count: int) -> tuple[np.ndarray[Any, Any], Array]:
    """Find the modes by LOBPCG (Knyazev 2001), with the inverse of the coarse matrix as its preconditioner."""
    A, xp, n = level.A, level.A.device.xp, level.A.shape[0]
    random = noise(A.device, 0, n * count).reshape(n, count)
    random[level.T.missing] = 0.0
    X, Q = level.solve(random), xp.zeros((n, 0))
    zeros = free.shape[1]
    of_free = mass.apply(free) if zeros else free
    values: np.ndarray[Any, Any] | None = None
    X = _without(X, free, of_free)
    R = None
    for _ in range(_ITERATIONS):
        new = xp.zeros((n, 0)) if R is None else _without(level.solve(R), free, of_free)
        F = xp.ascontiguousarray(xp.concatenate([X, Q, new], axis=1))
        of_k, of_m = level.energy_product(F), mass.apply(F)
        gram_k, gram_m = F.T @ of_k, F.T @ of_m
        largest = gram_k.trace() / gram_m.trace() if values is None else values.max()
        pairs = ritz_pairs(gram_k, gram_m, count, SHIFT * float(largest))
        values, now = pairs.values, pairs.coefficients
        Q = F @ new_directions(gram_k, gram_m, pairs, slice(None), slice(0, X.shape[1]))
        of_kx, of_mx = of_k @ now, of_m @ now
        X = xp.ascontiguousarray(F @ now)
        scales = A.device.asarray(values)
        R = xp.ascontiguousarray(of_kx - of_mx * scales)
        squares = [np.diag(_host(level, of.T @ of)) for of in (R, of_mx)]
        norms = np.sqrt(squares[0] / squares[1]) / np.abs(values)
        if norms.max() <= _TOLERANCE:
            break
    assert values is not None, "there is at least one iteration"
    return values, X


def _without(vectors: Array, free: Array, of_free: Array) -> Array:
    """Return vectors M-orthogonal to the free motions."""
    return vectors - free @ (of_free.T @ vectors) if free.shape[1] else vectors
