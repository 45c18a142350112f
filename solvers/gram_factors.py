"""Factors of small Gram matrices that may have lost rank: the part of a block solver that tells how many vectors it has."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["GramFactors", "GramFault", "factor_gram"]

Matrix = np.ndarray[Any, Any]

# Of a Gram matrix with ones on its diagonal, computed from vectors in float64. Its rounding errors are of the order of 1e-16
# times its size: eigenvalues below the rank's limit cannot be told from zero, and vectors orthogonalised with smaller ones
# than the other limit are so to ten digits at best, which a second pass mends. Less than the last is not rounding.
_RANK, _WELL, _NEGATIVE = 1e-12, 1e-6, -1e-8
# The same when one side of it was rounded to float32, as the products of a float32 operator are.
_RANK32, _WELL32, _NEGATIVE32 = 1e-6, 1e-3, -1e-3


class GramFault(enum.Enum):
    """Why a matrix has no such factors."""

    NOT_FINITE = enum.auto()
    NOT_POSITIVE = enum.auto()


@dataclass(frozen=True)
class GramFactors:
    """``W = (W T) C`` up to rounding, with columns of ``W T`` that are orthonormal in the inner product of the Gram matrix.

    Parameters
    ----------
    t : array, (k, rank)
    c : array, (rank, k)
    well : bool
        Whether Cholesky was enough: no pivot below the limit, so that no second pass is made.
    """

    t: Matrix
    c: Matrix
    well: bool

    @property
    def rank(self) -> int:
        """Columns that are linearly independent."""
        return int(self.c.shape[0])

    @property
    def inverse(self) -> Matrix:
        """Inverse of the Gram matrix, on the space that its columns span."""
        inverse: Matrix = self.t @ self.t.T
        return inverse


def factor_gram(gram: Matrix, *, rounded: bool = False) -> GramFactors | GramFault:
    """Factor a Gram matrix ``W^T M W``, columns of W of any length; ``rounded`` if M W was rounded to float32.

    By Cholesky, or, where a pivot tells that too many digits would be lost, by the eigenvectors of the matrix scaled to a unit
    diagonal, dropping directions that rounding cannot tell from zero (Stathopoulos and Wu 2002, SVQB).
    """
    least, well, negative = (_RANK32, _WELL32, _NEGATIVE32) if rounded else (_RANK, _WELL, _NEGATIVE)
    if not np.isfinite(gram).all():
        return GramFault.NOT_FINITE
    squares = np.diag(gram)
    if (squares < 0).any():
        return GramFault.NOT_POSITIVE
    present = squares > 0
    lengths = np.sqrt(np.where(present, squares, 0.0))
    scale = np.where(present, 1 / np.where(present, lengths, 1.0), 0.0)
    scaled = scale[:, None] * gram * scale
    if present.all():
        try:
            upper = np.linalg.cholesky(scaled).T
        except np.linalg.LinAlgError:
            pass
        else:
            if np.diag(upper).min() ** 2 > well:
                # A triangular matrix needs no pivots, so this is substitution, too.
                return GramFactors(scale[:, None] * np.linalg.inv(upper), upper * lengths, well=True)
    values, vectors = np.linalg.eigh(scaled)
    if values.size and values[0] < negative:
        return GramFault.NOT_POSITIVE
    kept = values > least
    root = np.sqrt(values[kept])
    vectors = vectors[:, kept]
    return GramFactors(scale[:, None] * vectors / root, root[:, None] * vectors.T * lengths, well=False)
