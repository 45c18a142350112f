"""The Rayleigh-Ritz step from Gram matrices, for the smallest eigenvalues.

It works in the inner product of ``K + sigma M``, where the wanted values ``1 / (lambda + sigma)`` are the largest: rounding is
then small beside them, while in that of M it is small beside the largest Ritz value, which may be 1e10 times the smallest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.linalg

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
    """Ascending Ritz values, M-orthonormal coefficients of the vectors, (directions, pairs), and the shift that was used."""

    values: Matrix
    coefficients: Matrix
    shift: float


def complement(of_m: Matrix, found: Matrix) -> Matrix:
    """Return coefficients of the other directions without their parts in ``found`` ones, bool (directions,).

    The columns, one for each other direction, are M-orthogonal to the found directions.
    """
    others = np.flatnonzero(~found)
    parts = np.zeros((len(found), len(others)))
    parts[others, np.arange(len(others))] = 1.0
    if found.any():
        parts[found] = -np.linalg.solve(of_m[np.ix_(found, found)], of_m[np.ix_(found, others)])
    return parts


def ritz_pairs(of_k: Matrix, of_m: Matrix, count: int, sigma: float = 0.0) -> RitzPairs:
    """Return the lowest ``count`` Ritz pairs, or as many as there are independent directions.

    ``of_k`` and ``of_m`` are ``F^T K F`` and ``F^T M F``; vanishing columns of F are ignored. Dependent directions are dropped by
    the eigenvectors of the scaled Gram matrix (Stathopoulos and Wu 2002, SVQB; Duersch, Shao, Yang and Gu 2018).
    """
    of_k, of_m = _symmetric(of_k), _symmetric(of_m)
    shifted = of_k + sigma * of_m
    squares = np.diag(shifted)
    scale = np.where(squares > 0, 1 / np.sqrt(np.where(squares > 0, squares, 1.0)), 0.0)
    values, vectors = scipy.linalg.eigh(scale[:, None] * shifted * scale)
    kept = values > _DEPENDENT * values[-1]
    basis = scale[:, None] * (vectors[:, kept] / np.sqrt(values[kept]))
    # The Gram matrix of the basis is the identity but for rounding, which the generalised problem takes into account.
    inner, mass = basis.T @ shifted @ basis, basis.T @ of_m @ basis
    inverses, vectors = scipy.linalg.eigh(_symmetric(mass), _symmetric(inner))
    inverses, vectors = inverses[::-1][:count], vectors[:, ::-1][:, :count]
    positive = inverses > 0  # where M is singular, the others are infinite
    inverses, vectors = inverses[positive], vectors[:, positive]
    return RitzPairs(1 / inverses - sigma, basis @ (vectors / np.sqrt(inverses)), sigma)


def new_directions(of_k: Matrix, of_m: Matrix, pairs: RitzPairs, wanted: Any, present: Any) -> Matrix:
    """Return coefficients of the search directions of the next step (Duersch, Shao, Yang and Gu 2018).

    Those are the parts of the ``wanted`` Ritz vectors in all directions but the ``present`` vectors, orthonormal to each other
    and to all Ritz vectors.
    """
    inner = _symmetric(of_k) + pairs.shift * _symmetric(of_m)
    coefficients, values = pairs.coefficients, pairs.values + pairs.shift
    directions: Matrix = coefficients[:, wanted].copy()
    directions[present] = 0.0
    before = np.einsum("ij,ij->j", directions, inner @ directions)
    for _ in range(2):
        directions -= coefficients @ ((coefficients.T @ (inner @ directions)) / values[:, None])
    squares = np.einsum("ij,ij->j", directions, inner @ directions)
    new = squares > _CANCELLED * np.maximum(before, 0.0)
    directions = directions[:, new] / np.sqrt(squares[new])
    if not directions.shape[1]:
        return directions
    sizes, vectors = scipy.linalg.eigh(_symmetric(directions.T @ inner @ directions))
    kept = sizes > _NEGLIGIBLE * sizes[-1]
    directions = directions @ (vectors[:, kept] / np.sqrt(sizes[kept]))
    return directions


def _symmetric(A: Matrix) -> Matrix:
    symmetric: Matrix = 0.5 * (A + A.T)
    return symmetric
