"""Motions without energy: the near-null space of the coarse level on each part of the system that nothing supports."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import connected_components

from penstock.solvers.amg.level import CoarseLevel
from penstock.spmv import Array, BsrMatrix

# Motions of a part depend on each other if their Gram matrix, of unit diagonal, has an eigenvalue below this.
_DEPENDENT = 1e-12

_Arrays = np.ndarray[Any, Any]


def free_motions(level: CoarseLevel, mass: BsrMatrix, zero: float, most: int, part: _Arrays) -> Array:
    """Return ``most`` coarse motions that K maps to zero but for rounding, or as many as there are: (unknowns, motions).

    ``part`` is what :func:`parts_of` returns. Each motion is a combination of the near-null space on one of these parts, and zero
    on all others; they are M-orthonormal. The energy over that of ``mass``, which is ``P^T M P``, is at most ``zero``.
    """
    device = level.A.device
    N = device.xp.ascontiguousarray(level.near_null_space)
    if not N.shape[1]:
        return N
    of_k, of_m = level.energy_product(N), mass.apply(N)
    N, of_k, of_m = (device.to_host(vectors) for vectors in (N, of_k, of_m))
    members = np.split(np.argsort(part, kind="stable"), np.cumsum(np.bincount(part))[:-1])
    grams_k, grams_m = _grams(part, N, of_k), _grams(part, N, of_m)
    squares = np.diagonal(grams_m, axis1=1, axis2=2)
    scales = np.where(squares > 0, 1 / np.sqrt(np.where(squares > 0, squares, 1.0)), 0.0)
    grams_k, grams_m = (scales[:, :, None] * grams * scales[:, None, :] for grams in (grams_k, grams_m))
    found, columns = np.zeros((N.shape[0], most)), 0
    for number in np.flatnonzero(_may_be_free(grams_k, zero)):
        coefficients = scales[number][:, None] * _free(grams_k[number], grams_m[number], zero)[:, : most - columns]
        here, count = members[number], coefficients.shape[1]
        found[here, columns : columns + count] = N[here] @ coefficients
        columns += count
        if columns == most:
            break
    return device.asarray(np.ascontiguousarray(found[:, :columns]))


def parts_of(A: BsrMatrix) -> _Arrays:
    """Return the number of the connected part of each unknown."""
    size, count = A.row_granularity, A.shape[0] // A.row_granularity
    offsets, columns = (A.device.to_host(array) for array in (A.row_offsets, A.column_indices))
    graph = scipy.sparse.csr_array((np.ones(len(columns), dtype=np.int8), columns, offsets), (count, count))
    return np.repeat(connected_components(graph, directed=False)[1], size)


def _grams(part: _Arrays, vectors: _Arrays, images: _Arrays) -> _Arrays:
    """Return the symmetric matrices of the products of vectors with images on each part: (parts, vectors, vectors)."""
    columns, count = range(vectors.shape[1]), int(part.max(initial=-1)) + 1
    grams = np.empty((count, len(columns), len(columns)))
    for i in columns:
        for j in columns:
            grams[:, i, j] = np.bincount(part, weights=vectors[:, i] * images[:, j], minlength=count)
    return (grams + grams.swapaxes(1, 2)) / 2


def _may_be_free(grams_k: _Arrays, zero: float) -> _Arrays:
    """Return which parts may have a motion without energy.

    Of its coefficients y, of length 1, ``y^T G_k y <= zero y^T G_m y``, and that is at most ``zero`` times their number.
    """
    count = grams_k.shape[1]
    return np.asarray(np.linalg.eigvalsh(grams_k)[:, 0] <= zero * count)


def _free(gram_k: _Arrays, gram_m: _Arrays, zero: float) -> _Arrays:
    """Return coefficients of the motions of a part without energy, orthonormal in its ``gram_m``, whose diagonal is 1 or 0."""
    masses, vectors = np.linalg.eigh(gram_m)
    independent = masses > _DEPENDENT
    basis = vectors[:, independent] / np.sqrt(masses[independent])
    values, combinations = np.linalg.eigh(basis.T @ gram_k @ basis)
    return np.asarray(basis @ combinations[:, np.abs(values) <= zero])
