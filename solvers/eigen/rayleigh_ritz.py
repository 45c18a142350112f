"""The Rayleigh-Ritz step from Gram matrices, for the smallest eigenvalues.

It works in the inner product of ``K + sigma M``, where the wanted values ``1 / (lambda + sigma)`` are the largest: rounding is
then small beside them, while in that of M it is small beside the largest Ritz value, which may be 1e10 times the smallest.

Gram matrices are where the vectors are: on a GPU the eigenvectors of 480 directions take 5 ms, on its host 30 to 50.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.spmv import Array, device_of

Matrix = np.ndarray[Any, Any]

# Directions whose Gram matrix, of unit diagonal, has an eigenvalue below the first share of the largest are dependent; new search
# directions below the second.
_DEPENDENT, _NEGLIGIBLE = 1e-12, 1e-11
# A direction of which orthogonalising leaves less than this share of its square is rounding.
_CANCELLED = 1e-10
#: A good shift, as a share of the largest wanted value: where K is nearly singular, rounding in ``F^T K F`` must stay small
#: beside the inner product; and the lowest values lose no more digits than they are smaller than the shift.
SHIFT = 1e-2


class RitzPairs(NamedTuple):
    """Ascending Ritz values on the host, M-orthonormal coefficients of the vectors, (directions, pairs), and the shift used."""

    values: Matrix
    coefficients: Array
    shift: float


def complement(of_m: Array, found: Matrix) -> Array:
    """Return coefficients of the other directions without their parts in ``found`` ones, bool (directions,) on the host.

    The columns, one for each other direction, are M-orthogonal to the found directions; those of which only rounding is left are
    zero.
    """
    device = device_of(of_m)
    others, those = (device.asarray(np.flatnonzero(chosen)) for chosen in (~found, found))
    parts = device.xp.eye(len(found))[:, others]
    if found.any():
        parts[those] = -device.xp.linalg.solve(of_m[those[:, None], those], of_m[those[:, None], others])
        left, squares = (parts * (of_m @ parts)).sum(axis=0), of_m.diagonal()[others]
        parts *= left > _CANCELLED * squares
    return parts


def ritz_pairs(of_k: Array, of_m: Array, count: int, sigma: float = 0.0) -> RitzPairs:
    """Return the lowest ``count`` Ritz pairs, or as many as there are independent directions.

    ``of_k`` and ``of_m`` are ``F^T K F`` and ``F^T M F``; vanishing columns of F are ignored. Dependent directions are dropped by
    the eigenvectors of the scaled Gram matrix (Stathopoulos and Wu 2002, SVQB; Duersch, Shao, Yang and Gu 2018).

    Raises
    ------
    numpy.linalg.LinAlgError
        If numbers are not finite, or the shifted matrix is not positive definite.
    """
    device = device_of(of_k)
    xp, linalg, host = device.xp, device.xp.linalg, device.to_host
    of_k, of_m = _symmetric(of_k), _symmetric(of_m)
    shifted = of_k + sigma * of_m
    squares = shifted.diagonal()
    scale = xp.where(squares > 0, 1 / xp.sqrt(xp.where(squares > 0, squares, 1.0)), 0.0)
    values, vectors = linalg.eigh(_finite(scale[:, None] * shifted * scale))
    kept = slice(int((values <= _DEPENDENT * values[-1]).sum()), None)
    basis = scale[:, None] * (vectors[:, kept] / xp.sqrt(values[kept]))
    # The Gram matrix of the basis is the identity but for rounding, which its Cholesky factor takes into account.
    inner, mass = basis.T @ shifted @ basis, basis.T @ of_m @ basis
    factor = linalg.inv(linalg.cholesky(_symmetric(inner)))
    inverses, vectors = linalg.eigh(_finite(_symmetric(factor @ mass @ factor.T)))
    of_values: Matrix = host(inverses)[::-1][:count]
    positive = slice(0, int((of_values > 0).sum()))  # where M is singular, the others are infinite
    of_values = of_values[positive]
    vectors = factor.T @ vectors[:, ::-1][:, positive]
    return RitzPairs(1 / of_values - sigma, basis @ (vectors / device.asarray(np.sqrt(of_values))), sigma)


def new_directions(of_k: Array, of_m: Array, pairs: RitzPairs, wanted: Any, present: Any) -> Array:
    """Return coefficients of the search directions of the next step (Duersch, Shao, Yang and Gu 2018).

    Those are the parts of the ``wanted`` Ritz vectors in all directions but the ``present`` vectors, orthonormal to each other
    and to all Ritz vectors.
    """
    device = device_of(of_k)
    xp, host = device.xp, device.to_host
    inner = _symmetric(of_k) + pairs.shift * _symmetric(of_m)
    coefficients, values = pairs.coefficients, device.asarray(pairs.values + pairs.shift)
    directions = coefficients[:, wanted].copy()
    directions[present] = 0.0
    before = xp.einsum("ij,ij->j", directions, inner @ directions)
    for _ in range(2):
        directions -= coefficients @ ((coefficients.T @ (inner @ directions)) / values[:, None])
    squares = xp.einsum("ij,ij->j", directions, inner @ directions)
    new = device.asarray(np.flatnonzero(host(squares > _CANCELLED * xp.maximum(before, 0.0))))
    directions = directions[:, new] / xp.sqrt(squares[new])
    if not directions.shape[1]:
        return directions
    sizes, vectors = xp.linalg.eigh(_symmetric(directions.T @ inner @ directions))
    kept = slice(int((sizes <= _NEGLIGIBLE * sizes[-1]).sum()), None)
    return directions @ (vectors[:, kept] / xp.sqrt(sizes[kept]))


def _symmetric(A: Array) -> Array:
    return 0.5 * (A + A.T)


def _finite(A: Array) -> Array:
    """Refuse numbers that are not finite, of which libraries make errors of several kinds, or none."""
    if not bool(device_of(A).xp.isfinite(A).all()):
        raise np.linalg.LinAlgError("matrices of inner products are not finite, or not positive definite")
    return A
