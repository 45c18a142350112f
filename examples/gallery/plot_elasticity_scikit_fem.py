"""
Elasticity on an unstructured mesh
==================================

A ball of tetrahedra from scikit-fem, clamped at its lower end and pulled down by its weight. With the coordinates of the
nodes penstock knows the rigid motions of the body, and solves with a coarse level: about fifteen iterations in memory.
Through a budget of a quarter of the matrix there is room for a shorter polynomial only, and it takes some more.
"""

import matplotlib.pyplot as plt
import numpy as np
import skfem
from skfem.helpers import ddot, eye, sym_grad, trace

import penstock


@skfem.BilinearForm
def stiffness(u, v, _):
    young, poisson = 1.0, 0.3
    mu, lam = young / (2 * (1 + poisson)), young * poisson / ((1 + poisson) * (1 - 2 * poisson))
    strain = sym_grad(u)
    return ddot(2 * mu * strain + lam * eye(trace(strain), 3), sym_grad(v))


@skfem.LinearForm
def weight(v, _):
    return -0.01 * v[2]


mesh = skfem.MeshTet.init_ball(4)
basis = skfem.Basis(mesh, skfem.ElementVector(skfem.ElementTetP1()), intorder=1)  # exact for linear elements

# %%
# Whole nodes are clamped, and their unknowns are left out. So every node that stays has three unknowns, side by side, and the
# coordinates of those nodes are all that penstock needs to know.
free = np.flatnonzero(mesh.p[2] > -0.7)
unknowns = basis.nodal_dofs[:, free].T.ravel()
A = stiffness.assemble(basis).tocsr()[unknowns][:, unknowns]
b = weight.assemble(basis)[unknowns]
coordinates = mesh.p[:, free].T

resident = penstock.solve(A, b, coordinates=coordinates, device="cpu")
print(resident.explain())

# %%
# The same through a quarter of the memory: what does not fit streams from disk.
nbytes = 12 * A.nnz
streamed = penstock.solve(A, b, coordinates=coordinates, memory=nbytes // 4, device="cpu")
print(streamed.explain())

for result in (resident, streamed):
    assert np.linalg.norm(b - A @ result.x) <= 1e-8 * np.linalg.norm(b)
assert resident.iterations < 25

# %%
displacement = np.zeros((3, mesh.p.shape[1]))
displacement[:, free] = resident.x.reshape(-1, 3).T
moved = mesh.p + 0.3 * displacement / np.abs(displacement).max()
faces = mesh.facets[:, mesh.boundary_facets()]

figure = plt.figure(figsize=(6, 5))
axes = figure.add_subplot(projection="3d")
surface = axes.plot_trisurf(*moved, triangles=faces.T, cmap="viridis", linewidth=0.1)
surface.set_array(np.linalg.norm(displacement, axis=0)[faces].mean(axis=0))
surface.autoscale()
axes.set(title=f"{A.shape[0]:,} unknowns, {resident.iterations} iterations", aspect="equal")
figure.colorbar(surface, label="displacement", shrink=0.7)
plt.show()
