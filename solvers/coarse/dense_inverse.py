"""Inverses of the small matrices of the coarsest levels."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.adaptive_threads import most_threads
from penstock.threads import blas_limited

__all__ = ["dense_inverse"]

# Eigenvalues below this share of the largest are zero but for rounding.
_SINGULAR = 1e-13


def dense_inverse(A: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the inverse of a small matrix; if it is singular, as that of a body which nothing holds, the pseudo-inverse."""
    with blas_limited(most_threads()):  # as in a solve: the bits must not depend on solves in other threads
        return _dense_inverse(A)


def _dense_inverse(A: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    scale = 1 / np.sqrt(np.diag(A))
    scaled = scale[:, None] * A * scale
    try:
        if np.diag(np.linalg.cholesky(scaled)).min() ** 2 > _SINGULAR:
            return np.asarray(scale[:, None] * np.linalg.inv(scaled) * scale)
    except np.linalg.LinAlgError:
        pass
    values, vectors = np.linalg.eigh(scaled)
    inverses = np.where(values > _SINGULAR * values[-1], 1 / np.maximum(values, _SINGULAR * values[-1]), 0.0)
    return np.asarray(scale[:, None] * ((vectors * inverses) @ vectors.T) * scale)
