"""
A body that is never assembled as a whole
=========================================

A ball of 33,000 tetrahedra with stiff grains, clamped at its lower end and pressed from above. penstock is given the mesh alone:
coordinates, the nodes of each element, and its stiffness. With memory for a fifth of the matrix, pieces of it are assembled from
the elements whenever they are used, and forgotten again; the nodes of this mesh are numbered at random before.
"""

import matplotlib.pyplot as plt
import numpy as np
import skfem

import penstock
from penstock.fem import LinearElasticity

mesh = skfem.MeshTet.init_ball(4)
generator = np.random.default_rng(1)
points, tetrahedra = mesh.p.T, mesh.t.T
shuffled = generator.permutation(len(points))
points, tetrahedra = points[shuffled], np.argsort(shuffled)[tetrahedra]

# %%
# Grains are ten times as stiff as what lies between them.
centres = points[tetrahedra].mean(axis=1)
grains = generator.uniform(-1, 1, (40, 3))
nearest = np.min([np.linalg.norm(centres - grain, axis=1) for grain in grains], axis=0)
factors = np.where(nearest < 0.2, 10.0, 1.0)

clamped, pressed = np.flatnonzero(points[:, 2] < -0.8), np.flatnonzero(points[:, 2] > 0.8)
fixed = (3 * clamped[:, None] + np.arange(3)).ravel()
body = penstock.ElementMatrix(points, tetrahedra, element=LinearElasticity(), material=factors, fixed=fixed)

load = np.zeros(body.shape[0])
load[3 * pressed + 2] = -1e-4
nbytes = body.nnz // 2 * 8  # of half of its values
result = penstock.solve(body, load, device="cpu", memory=nbytes // 3)
print(result.explain())
assert result.converged
assert result.bytes_streamed == 0

# %%
displacement = result.x.reshape(-1, 3)
moved = points + 0.3 * displacement / np.abs(displacement).max()
place = np.argsort(shuffled)
faces = place[mesh.facets[:, mesh.boundary_facets()]].T

figure = plt.figure(figsize=(6, 5))
axes = figure.add_subplot(projection="3d")
surface = axes.plot_trisurf(*moved.T, triangles=faces, cmap="viridis", linewidth=0)
surface.set_array(np.linalg.norm(displacement, axis=1)[faces].mean(axis=1))
surface.autoscale()
axes.set(title=f"{body.shape[0]:,} unknowns, {result.iterations} iterations", aspect="equal")
figure.colorbar(surface, label="displacement", shrink=0.7)
plt.show()
