"""Factors small Gram matrices that may have lost rank, for block solvers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

Matrix = np.ndarray[Any, Any]

# Limits for a Gram matrix with a unit diagonal, computed from float64 vectors. Its rounding errors are of the order of 1e-16
# times its size. Eigenvalues below _RANK are numerically zero. With eigenvalues below _WELL, vectors are orthogonal to ten
# digits at best, and a second pass is needed. An eigenvalue below _NEGATIVE is not due to rounding.
_RANK, _WELL, _NEGATIVE = 1e-12, 1e-6, -1e-8
# The same if one factor of the Gram matrix was rounded to float32, for example by a float32 operator.
_RANK32, _WELL32, _NEGATIVE32 = 1e-6, 1e-3, -1e-3


class GramFault(enum.Enum):
    """Why a matrix cannot be factored."""

    NOT_FINITE = enum.auto()
    NOT_POSITIVE = enum.auto()


@dataclass(frozen=True)
class GramFactors:
    """``W = (W T) C`` up to rounding; the columns of ``W T`` are orthonormal in the inner product of the Gram matrix.

    t is (k, rank), c is (rank, k). ``well``: no pivot of Cholesky is below the limit, so no second pass is needed.
    """

    t: Matrix
    c: Matrix
    well: bool

    @property
    def rank(self) -> int:
        """Number of linearly independent columns."""
        return int(self.c.shape[0])

    @property
    def inverse(self) -> Matrix:
        """Inverse of the Gram matrix on the space spanned by its columns."""
        inverse: Matrix = self.t @ self.t.T
        return inverse


def factor_gram(gram: Matrix, *, rounded: bool = False) -> GramFactors | GramFault:
    """Factor a Gram matrix ``W^T M W``, columns of W of any length; ``rounded`` if M W was rounded to float32.

    Uses Cholesky. If a small pivot shows that too many digits would be lost, uses the eigenvectors of the matrix scaled to a
    unit diagonal and drops directions with numerically zero eigenvalues (Stathopoulos and Wu 2002, SVQB).
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
                # For a triangular matrix, the inverse is computed by substitution without pivoting.
                return GramFactors(scale[:, None] * np.linalg.inv(upper), upper * lengths, well=True)
    values, vectors = np.linalg.eigh(scaled)
    if values.size and values[0] < negative:
        return GramFault.NOT_POSITIVE
    significant = values > least
    root = np.sqrt(values[significant])
    vectors = vectors[:, significant]
    return GramFactors(scale[:, None] * vectors / root, root[:, None] * vectors.T * lengths, well=False)
