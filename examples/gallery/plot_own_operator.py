"""
An operator of your own in ``block_cg``
=======================================

A solver needs no matrix, only products. Here the operator is a few lines of NumPy: a diffusion problem with a coefficient that
varies over the grid, matrix-free, for several sources at once.
"""

import matplotlib.pyplot as plt
import numpy as np

from penstock.solvers import block_cg
from penstock.spmv import CPU, ValidatedOperator

n = 63
grid = np.linspace(0, 1, n + 1)
conductivity = 1 + 20 * (np.hypot(grid[:, None] - 0.5, grid[None, :] - 0.5) < 0.25)  # a disc that conducts well


class Diffusion(ValidatedOperator):
    """``-div(k grad u)`` on n x n interior nodes, u = 0 on the boundary; symmetric positive definite."""

    def __init__(self):
        self.shape, self.dtype, self.device = (n * n, n * n), np.dtype(np.float64), CPU

    def _apply(self, x, out, alpha, beta):
        u = np.pad(x.reshape(n, n, -1), ((1, 1), (1, 1), (0, 0)))
        along_x = conductivity[:, :-1, None] * np.diff(u, axis=0)[:, 1:-1]
        along_y = conductivity[:-1, :, None] * np.diff(u, axis=1)[1:-1]
        product = -(np.diff(along_x, axis=0) + np.diff(along_y, axis=1)).reshape(out.shape)
        out[...] = alpha * product if beta == 0.0 else alpha * product + beta * out


# %%
# The arguments of ``apply`` are checked once, in the base class: ``_apply`` holds only the mathematics. It is given one vector
# or a block of them. ``A @ X``, ``cg`` and ``block_cg`` work with it as with any matrix.
A = Diffusion()
places = [(13, 13), (13, 49), (49, 13), (49, 49), (31, 31), (6, 31)]
B = np.zeros((n * n, len(places)))
for column, (i, j) in enumerate(places):
    B[i * n + j, column] = 1.0

result = block_cg(A, B, rtol=1e-8)
residuals = np.linalg.norm(B - A @ result.x, axis=0)  # the columns of B have the norm 1
print(f"{result.iterations} iterations, largest true residual {residuals.max():.1e}")
assert residuals.max() <= 1e-8

# %%
figure, panels = plt.subplots(2, 3, figsize=(8, 5.2), layout="constrained")
for axes, u in zip(panels.flat, result.x.T, strict=True):
    axes.contourf(u.reshape(n, n), levels=20, cmap="magma")
    axes.set(aspect="equal", xticks=[], yticks=[])
figure.suptitle("Six sources beside and inside a disc that conducts well")
plt.show()
