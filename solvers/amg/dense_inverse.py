"""Inverses of small dense matrices: those of the coarsest levels, and many blocks of nodes at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy.sparse
from scipy.linalg import lapack

from penstock.host.adaptive_threads import most_threads
from penstock.host.threads import blas_limited
from penstock.spmv import Array, CsrMatrix, InputError, SparseMatrix, device_of

#: Matrices of up to this many unknowns are inverted.
DENSE_UNKNOWNS = 800
# Eigenvalues below this share of the largest are zero but for rounding.
_SINGULAR = 1e-13
# So are those below the second share that are smaller by the third than the next one: rounding of the sums that made the matrix.
_SUSPICIOUS, _GAP = 1e-10, 1e3


def inverse_of(A: SparseMatrix) -> CsrMatrix:
    """Return the dense inverse of a small matrix, all of whose entries are stored, on its device."""
    inverse, count = dense_inverse(A.to_csr().toarray()), A.shape[0]
    damaged = not np.isfinite(inverse).all()  # the check then says where
    columns, offsets = np.arange(count, dtype=np.int32), count * np.arange(count + 1, dtype=np.int32)
    of_rows = scipy.sparse.csr_array((inverse.ravel(), np.tile(columns, count), offsets), shape=A.shape)
    return CsrMatrix.from_csr(of_rows, check=damaged).to_device(A.device)


def dense_inverse(A: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the inverse of a small symmetric positive semidefinite matrix, or the pseudo-inverse of a singular one.

    An unsupported body has a singular matrix. Entries that are not finite are refused: the matrix that it is made of has entries
    that are too large or too small.
    """
    if not np.isfinite(A).all():
        raise InputError(
            "a coarse matrix holds numbers out of range: the matrix is badly scaled; scale its rows and columns"
        )
    with blas_limited(most_threads()):  # as in a solve: the bits must not depend on solves in other threads
        return _dense_inverse(A)


def _dense_inverse(A: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    diagonal = np.diag(A)
    scale = np.where(diagonal > 0.0, 1 / np.sqrt(np.maximum(diagonal, np.finfo(float).tiny)), 0.0)
    scaled = scale[:, None] * A * scale
    inverse = None
    factor, failed = lapack.dpotrf(scaled, lower=1)
    if not failed and (least_pivot := np.diag(factor).min() ** 2) > _SINGULAR:
        half, _ = lapack.dpotri(factor, lower=1)
        inverse = np.asarray((np.tril(half) + np.tril(half, -1).T) * np.outer(scale, scale))
        if least_pivot > len(A) * _SUSPICIOUS:  # no eigenvalue is that small
            return inverse
    values, vectors = np.linalg.eigh(scaled)
    least = _least_regular(values)
    if inverse is not None and least <= values[0]:
        return inverse
    inverses = np.where(values >= least, 1 / np.maximum(values, least), 0.0)
    return np.asarray(scale[:, None] * ((vectors * inverses) @ vectors.T) * scale)


def _least_regular(values: np.ndarray[Any, Any]) -> float:
    """Return the smallest of the ascending eigenvalues that is no rounding; infinite if there is none."""
    if not values[-1] > 0:
        return math.inf
    relative = values / values[-1]
    regular = relative > _SINGULAR
    gaps = (relative[:-1] <= _SUSPICIOUS) & (
        relative[1:] > _GAP * np.maximum(relative[:-1], np.finfo(float).eps / _GAP)
    )
    if gaps.any():
        regular[: int(np.flatnonzero(gaps)[-1]) + 1] = False
    return float(values[regular][0])


def symmetric_inverses(blocks: Array) -> Array:
    """Return the inverses of symmetric positive definite blocks, ``(count, rows, rows)``, made exactly symmetric."""
    try:
        inverses = device_of(blocks).xp.linalg.inv(blocks)
    except np.linalg.LinAlgError as error:
        raise InputError("the matrix is not positive definite: the block of some nodes of it is singular") from error
    return 0.5 * (inverses + inverses.swapaxes(1, 2))
