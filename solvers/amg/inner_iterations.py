"""An approximate inverse of a coarse matrix that is applied by iterations."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.spmv import Array, Operator, ValidatedOperator

# The iterations of an application at most.
_MOST = 40


class InnerIterations(ValidatedOperator):
    """About ``A^-1``, by some iterations of preconditioned conjugate gradients (Saad 2003, algorithm 9.1) from zero.

    An application reduces the residual to ``reduced`` times itself, if 40 iterations suffice. It differs a little from a linear
    operator, which flexible methods tolerate. All right-hand sides of a block iterate together, each with its own directions,
    until the last one has reached its tolerance.
    """

    def __init__(self, A: Operator, M: Operator, reduced: float = 1e-3) -> None:
        self.A, self.M, self.reduced = A, M, reduced
        self.shape, self.dtype, self.device = A.shape, np.dtype(A.dtype), A.device

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        solved = alpha * self._solve(x)
        out[...] = solved if beta == 0.0 else solved + beta * out

    def _solve(self, b: Array) -> Array:
        xp = self.device.xp
        x, r = xp.zeros_like(b), b.copy()
        p, before, limit = None, None, self.reduced**2 * _products(b, b, xp)
        for _ in range(_MOST):
            z = self.M.apply(r)
            product = _products(r, z, xp)
            p = z if p is None else z + _ratio(product, before, xp) * p
            image = self.A.apply(p)
            step = _ratio(product, _products(p, image, xp), xp)
            x += step * p
            r -= step * image
            before = product
            if bool((_products(r, r, xp) <= limit).all()):
                break
        return x


def _products(left: Array, right: Array, xp: Any) -> Array:
    # On a GPU sums along the first axis of a block take ten times as long as its Gram matrix.
    return (left * right).sum(axis=0) if xp is np or left.ndim == 1 else (left.T @ right).diagonal()


def _ratio(above: Array, below: Array, xp: Any) -> Array:
    """Return ``above / below``, and 0 where the latter is not positive: that column has ended."""
    positive = below > 0
    return xp.where(positive, above / xp.where(positive, below, 1.0), 0.0)
