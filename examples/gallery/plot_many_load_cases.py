"""
32 load cases in one solve
==========================

``block_cg`` passes over the matrix once an iteration for all right-hand sides, and every column searches in the directions of
all. Samples of a random load share their modes, so the block also needs fewer iterations than each of them alone.
"""

import matplotlib.pyplot as plt
import numpy as np

from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import block_cg, block_jacobi, cg

beam = Cantilever(nodes=(29, 7, 7), dof=3, lengths=4.0, material=LognormalMaterial(sigma=0.5))
A = beam.matrix()
generator = np.random.default_rng(1)
B = beam.load("shear")[:, None] * (1 + 0.5 * generator.standard_normal((beam.unknowns, 32)))

M = block_jacobi(A, 3)
block = block_cg(A, B, M=M, rtol=1e-8)
alone = cg(A, B[:, 0], M=M, rtol=1e-8)
print(f"block: {block.iterations} iterations for 32 loads; one load alone: {alone.iterations}")

residuals = np.linalg.norm(B - A @ block.x, axis=0) / np.linalg.norm(B, axis=0)
assert residuals.max() <= 1e-8
assert block.iterations < alone.iterations

# %%
tips = np.array([beam.tip_deflection(np.ascontiguousarray(x)) for x in block.x.T])
figure, (history, deflections) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
history.semilogy(alone.residual_norms, color="0.4", label="one load by cg")
for number, column in enumerate(block.columns):
    history.semilogy(
        column.residual_norms, color="tab:blue", alpha=0.4, label=None if number else "32 loads by block_cg"
    )
history.set(xlabel="iteration, a pass over the matrix", ylabel="relative residual")
history.legend()
deflections.bar(np.arange(32), tips)
deflections.axhline(tips.mean(), color="k", lw=1)
deflections.set(xlabel="sample", ylabel="tip deflection", title=f"{tips.mean():.4g} +- {tips.std(ddof=1):.1g}")
plt.show()
