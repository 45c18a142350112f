"""All of a small eigenvalue problem by LAPACK."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import scipy.sparse

from penstock.solvers.amg.coarsening import DECOUPLED
from penstock.spmv import InputError

Matrix = np.ndarray[Any, Any]

# Below the first share of the largest value rough values are rounding, below the second share accurate ones. Entries of K and
# their mirror images differ by less than the third share of the largest one.
_ROUNDING, _ZERO, _ASYMMETRY = 1e-11, 1e-13, 1e-10
# The largest value is at most this many times the largest that an unknown has alone. Those of decoupled unknowns, as a penalty
# holds, do not count: no other mode shares them.
_LARGEST = 100.0


class DenseModes(NamedTuple):
    """Ascending values, M-orthonormal vectors (n, k), products with M and residual vectors ``K x - lambda M x``."""

    values: Matrix
    vectors: Matrix
    of_mass: Matrix
    differences: Matrix
    zeros: int
    next_value: float | None


def dense_modes(K: scipy.sparse.csr_array, mass: scipy.sparse.csr_array, k: int) -> DenseModes:
    """Return the lowest k modes of a small problem.

    The largest values of ``M x = mu (K + sigma M) x`` are computed, whose rounding is small beside the smallest lambda, first for
    a rough sigma; unknowns without mass that K does not couple have no part in any mode.

    Raises
    ------
    InputError
        If an unknown without mass is coupled by K, M is not positive definite otherwise, or there are fewer than k modes.
    """
    if abs(K - K.T).max() > _ASYMMETRY * abs(K).max():
        raise InputError("K is not symmetric: check its assembly and boundary conditions")
    heavy = np.flatnonzero(mass.diagonal() > 0)
    check_massless(K, mass, K.shape[0] - len(heavy))
    if k > len(heavy):
        raise InputError(f"there are {len(heavy)} modes, fewer than k = {k}")
    of_k, of_m = (A[heavy][:, heavy].toarray() for A in (K, mass))
    of_k, of_m = (of_k + of_k.T) / 2, (of_m + of_m.T) / 2
    count = min(k + 1, len(heavy))
    try:
        np.linalg.cholesky(of_m)
    except np.linalg.LinAlgError as error:
        raise InputError(f"M is not positive definite: {error}") from error
    rough_sigma = _largest_alone(of_k, of_m)
    try:
        rough = 1 / _shifted(of_k, of_m, rough_sigma, eigvals_only=True)[::-1] - rough_sigma
    except np.linalg.LinAlgError as error:
        raise InputError(f"K is not positive semidefinite: it has an eigenvalue below {-rough_sigma:.3g}") from error
    largest = max(min(float(rough[-1]), _LARGEST * rough_sigma), 0.0)
    if rough[0] < -_ROUNDING * largest:
        raise InputError(f"K is not positive semidefinite: it has the eigenvalue {rough[0]:.3g}")
    # A shift of about the lowest value that is not zero: K may be singular.
    regular = rough[rough > _ROUNDING * largest]
    sigma = float(regular[0]) if regular.size else 1.0
    inverses, small = _shifted(of_k, of_m, sigma, subset_by_index=(len(heavy) - count, len(heavy) - 1))
    values = (1 / inverses - sigma)[::-1]
    zeros = int((values[:k] <= _ZERO * largest).sum())
    small = (small / np.sqrt(inverses))[:, ::-1][:, :k]
    vectors = np.zeros((K.shape[0], k))
    vectors[heavy] = small
    of_mass = np.asarray(mass @ vectors)
    return DenseModes(
        values[:k], vectors, of_mass, np.asarray(K @ vectors) - of_mass * values[:k], zeros,
        float(values[k]) if count > k else None,
    )  # fmt: skip


def _largest_alone(of_k: Matrix, of_m: Matrix) -> float:
    """Return the largest ``k_ii / m_ii`` of unknowns that are not decoupled; positive."""
    diagonal = np.diag(of_k)
    alone, couplings = diagonal / np.diag(of_m), np.abs(of_k).sum(axis=1) - np.abs(diagonal)
    moves = couplings > DECOUPLED * np.abs(diagonal)
    return max(float(alone[moves].max() if moves.any() else alone.max(initial=0.0)), 0.0) or 1.0


def _shifted(of_k: Matrix, of_m: Matrix, sigma: float, **options: Any) -> Any:
    """Return what LAPACK finds for ``M x = mu (K + sigma M) x``, with rows and columns scaled to a unit diagonal on the right."""
    right = of_k + sigma * of_m
    if not (np.diag(right) > 0).all():
        raise np.linalg.LinAlgError("a diagonal entry is not positive")
    scale = 1 / np.sqrt(np.diag(right))
    found = scipy.linalg.eigh(scale[:, None] * of_m * scale, scale[:, None] * right * scale, **options)
    return found if options.get("eigvals_only") else (found[0], scale[:, None] * found[1])


def check_massless(K: scipy.sparse.csr_array, mass: scipy.sparse.csr_array, count: int) -> None:
    """Refuse unknowns without mass that K or M couples; there are ``count`` unknowns without mass."""
    if not count:
        return
    massless = mass.diagonal() == 0
    entries = K.tocoo()
    coupled = (entries.row != entries.col) & (entries.data != 0) & massless[entries.row]
    of_mass = mass.tocoo()
    if coupled.any() or (massless[of_mass.row] & (of_mass.data != 0)).any():
        raise massless_error(int(np.unique(entries.row[coupled]).size))


def massless_error(count: int) -> InputError:
    """Return the error for unknowns without mass that K couples."""
    return InputError(
        f"M has no mass for {count:,} unknowns that K couples with others: they would move with infinite frequencies; give "
        "them a mass, or eliminate them from K"
    )
