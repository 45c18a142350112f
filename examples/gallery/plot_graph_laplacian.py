"""
A graph Laplacian
=================

A network of resistors between random points. One node is grounded, a current enters at another, and the voltages solve a system
with the Laplacian of the graph. Nothing here has a mesh or blocks; the preconditioners differ all the more.
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse
from scipy.spatial import cKDTree

from penstock.solvers import cg, gauss_seidel, incomplete_cholesky, jacobi, smoothed_aggregation
from penstock.spmv import CsrMatrix

generator = np.random.default_rng(7)
points = generator.random((8_000, 2))
edges = cKDTree(points).query_pairs(0.022, output_type="ndarray")
conductance = 1 / generator.lognormal(sigma=1.0, size=len(edges))

# %%
# The Laplacian of the largest connected part, without the row and the column of the grounded node.
count = len(points)
W = scipy.sparse.coo_array((conductance, edges.T), shape=(count, count))
W = (W + W.T).tocsr()
part = scipy.sparse.csgraph.connected_components(W)[1]
kept = np.flatnonzero(part == np.bincount(part).argmax())
L = scipy.sparse.csgraph.laplacian(W[kept][:, kept]).tocsr()
ground = np.argmin(points[kept].sum(axis=1))
others = np.delete(np.arange(kept.size), ground)
A = CsrMatrix.from_csr(L[others][:, others])
where = points[kept][others]

b = np.zeros(A.shape[0])
b[np.argmax(where.sum(axis=1))] = 1.0  # the current

# %%
histories = {}
for name, make in {
    "Jacobi": jacobi,
    "Gauss-Seidel": gauss_seidel,
    "incomplete Cholesky": incomplete_cholesky,
    "coarse level": smoothed_aggregation,
}.items():
    result = cg(A, b, M=make(A), rtol=1e-8)
    assert np.linalg.norm(b - A @ result.x) <= 1e-8 * np.linalg.norm(b)
    histories[f"{name}, {result.iterations} iterations"] = result.residual_norms
    print(f"{name:<20} {result.message}")

# %%
figure, (network, history) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
shown = network.scatter(*where.T, c=result.x, s=2, cmap="plasma")
network.set(title="voltage", aspect="equal", xticks=[], yticks=[])
figure.colorbar(shown, ax=network)
for label, norms in histories.items():
    history.semilogy(norms, label=label)
history.set(xlabel="iteration", ylabel="relative residual")
history.legend()
plt.show()
