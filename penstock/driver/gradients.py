"""Derivatives of solutions and of eigenvalues.

With a loss L of ``x = A^-1 b``, and ``A lambda = dL/dx``::

    dL/db = lambda,    dL/dA_ij = -(lambda_i x_j + lambda_j x_i) / 2    for every entry (i, j) that is stored.

With one of eigenvalues lambda of ``K x = lambda M x``, ``x^T M x = 1`` (Fox and Kapoor 1968)::

    dlambda/dK_ij = x_i x_j,    dlambda/dM_ij = -lambda x_i x_j.

The matrices are symmetric: a change of one entry alone would leave them unsymmetric, so an entry and its mirror image share the
gradient equally. For a symmetric change dA, the sum of ``dL/dA_ij dA_ij`` is the change of L.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from penstock.driver.eigsh import eigsh
from penstock.driver.prepared import PreparedSystem, prepare
from penstock.solvers.eigen.result import CLUSTER, Modes, ModesReason
from penstock.spmv import Array, InputError, device_of

SECOND_DERIVATIVE = (
    "only first derivatives are computed, but a second one was requested: differentiate the loss once, or write "
    "the gradient as a solve of its own"
)
# Ends of a search whose eigenvalues are as accurate as they can be.
_ACCURATE = (ModesReason.CONVERGED, ModesReason.ROUNDING_FLOOR)
# Numbers that are gathered at a time.
_GATHERED = 1 << 20


def system_for(A: Any, columns: int, options: dict[str, Any]) -> PreparedSystem:
    """Return a prepared system as it is, and prepare any other matrix."""
    if not isinstance(A, PreparedSystem):
        return prepare(A, columns=columns, **options)
    if options:
        raise InputError(f"the system is prepared already; give {', '.join(sorted(options))} to penstock.prepare")
    return A


@dataclass(frozen=True, eq=False)
class DifferentiableSystem:
    """A prepared system with the tolerance of both solves, that for the solution and that for its gradient."""

    system: PreparedSystem
    rtol: float
    maxiter: int | None

    def solve(self, b: Any) -> Any:
        """Return x; raises a NotConvergedError if it is not accurate."""
        return self.system.solve(b, rtol=self.rtol, maxiter=self.maxiter, on_failure="raise").x

    def adjoint(self, gradient: Any, version: int) -> Any:
        """Return lambda for the gradient of x, which was solved for with that version of the values."""
        if (now := self.system.version) != version:
            raise InputError(
                f"the prepared system was updated between a solve and its gradient, from version {version} of its values to "
                f"{now}: compute gradients before update(), or prepare a system for each matrix"
            )
        return self.solve(gradient)


def values_gradient(rows: Array, columns: Array, adjoint: Array, x: Array) -> Array:
    """Return dL/dA_ij at the given entries, from lambda and x of shape (n,) or (n, k), all of them on one device."""
    xp = device_of(x).xp
    adjoint, x = adjoint.reshape(len(x), -1), x.reshape(len(x), -1)
    gradient = xp.empty(rows.shape, x.dtype)
    step = max(1, _GATHERED // x.shape[1])
    for start in range(0, len(rows), step):
        i, j = rows[start : start + step], columns[start : start + step]
        pairs = xp.einsum("pk,pk->p", adjoint[i], x[j]) + xp.einsum("pk,pk->p", adjoint[j], x[i])
        gradient[start : start + step] = -0.5 * pairs
    return gradient


def accurate_modes(K: Any, k: int, M: Any, options: dict[str, Any]) -> Modes:
    """Return the modes of a matrix or a prepared system; raises a NotConvergedError if they are not accurate."""
    if "on_failure" in options:
        raise InputError("modes that are not accurate have no gradients: leave out on_failure")
    find = K.eigsh if isinstance(K, PreparedSystem) else partial(eigsh, K)
    modes: Modes = find(k, M, **options, on_failure="return")
    return modes if modes.reason in _ACCURATE else modes.check()


def checked_gradient(
    values: np.ndarray[Any, Any], zeros: int, next_value: float, gradient: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return the gradient of eigenvalues, (k,), if it is defined.

    Equal eigenvalues have no derivatives of their own, as a change of the matrices sorts them anew; their sum has. Of each
    cluster all must be there, with the same gradient. ``next_value`` is that after the last one, or NaN.

    Raises
    ------
    InputError
        If a gradient is not defined.
    """
    number = np.arange(1, len(values))
    # Whether each value belongs with the one before it; free motions are a cluster of their own.
    together = (number < zeros) | ((number != zeros) & (values[1:] <= values[:-1] * (1 + CLUSTER)))
    starts = [0, *number[~together]]
    for start, stop in zip(starts, [*starts[1:], len(values)], strict=True):
        of_cluster = gradient[start:stop]
        cut = stop == len(values) and stop > zeros and bool(next_value <= values[-1] * (1 + CLUSTER))
        if of_cluster.any() and cut:
            raise InputError(
                f"eigenvalue {len(values)} has the gradient {gradient[-1]:g}, but the next one is equal: ask for more modes, so "
                "that all of the cluster are there"
            )
        if (of_cluster != of_cluster[0]).any():
            raise InputError(
                f"eigenvalues {start + 1} to {stop} are equal, so they have no derivatives of their own: let the loss depend on "
                "their sum only"
            )
    return gradient


def eigenvalues_gradient(rows: Array, columns: Array, X: Array, gradient: Array) -> Array:
    """Return dL/dK_ij at the given entries, from modes (n, k) and the gradient of their values.

    dL/dM_ij is that of ``-values gradient``.
    """
    return values_gradient(rows, columns, -X * gradient, X)
