"""An approximate inverse of a coarse matrix that is applied by iterations."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.spmv import Array, Operator, ValidatedOperator
from penstock.spmv.compilation.cuda_graph import Replay
from penstock.spmv.operator import is_capturable

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
        self._steps: dict[tuple[int, ...], _Steps] = {}

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        solved = alpha * self._solve(x)
        out[...] = solved if beta == 0.0 else solved + beta * out

    def _solve(self, b: Array) -> Array:
        if b.shape not in self._steps:
            self._steps = {b.shape: _Steps(self.A, self.M, b)}  # those of one shape
        xp, steps = self.device.xp, self._steps[b.shape]
        r, p = steps.r, steps.p
        x, before, limit = xp.zeros_like(b), None, self.reduced**2 * _products(b, b, xp)
        r[...] = b
        for _ in range(_MOST):
            steps.precondition()
            product = _products(r, steps.z, xp)
            p[...] = steps.z if before is None else steps.z + _ratio(product, before, xp) * p
            steps.multiply()
            step = _ratio(product, _products(p, steps.image, xp), xp)
            x += step * p
            r -= step * steps.image
            before = product
            if bool((_products(r, r, xp) <= limit).all()):
                break
        return x


class _Steps:
    """The two steps of an iteration with many small kernels, which a GPU replays as CUDA graphs, and the vectors they use."""

    def __init__(self, A: Operator, M: Operator, like: Array) -> None:
        xp, apply, product = A.device.xp, M.apply, A.apply
        r, z, p, image = vectors = [xp.zeros_like(like) for _ in range(4)]
        self.r, self.z, self.p, self.image = vectors
        on_gpu = A.device.kind == "cuda"
        self.precondition = Replay(lambda: apply(r, z), capturable=on_gpu and is_capturable(M))
        self.multiply = Replay(lambda: product(p, image), capturable=on_gpu and is_capturable(A))


def _products(left: Array, right: Array, xp: Any) -> Array:
    # On a GPU sums along the first axis of a block take ten times as long as its Gram matrix.
    return (left * right).sum(axis=0) if xp is np or left.ndim == 1 else (left.T @ right).diagonal()


def _ratio(above: Array, below: Array, xp: Any) -> Array:
    """Return ``above / below``, and 0 where the latter is not positive: that column has ended."""
    positive = below > 0
    return xp.where(positive, above / xp.where(positive, below, 1.0), 0.0)
