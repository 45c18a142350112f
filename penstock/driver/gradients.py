"""Derivatives of a solution: with a loss L of ``x = A^-1 b``, and ``A lambda = dL/dx``,

::

    dL/db = lambda,    dL/dA_ij = -(lambda_i x_j + lambda_j x_i) / 2    for every entry (i, j) that is stored.

A is symmetric: a change of one entry alone would leave it unsymmetric, so the gradient is shared out equally between an entry and
its mirror image. For a symmetric change dA, the sum of ``dL/dA_ij dA_ij`` is the change of L.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.driver.prepared import PreparedSystem, prepare
from penstock.spmv import Array, InputError, device_of

SECOND_DERIVATIVE = (
    "only first derivatives of a solution are computed, but a second one was requested: differentiate the loss once, or write "
    "the gradient as a solve of its own"
)
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
