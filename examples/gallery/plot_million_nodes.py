"""
An unstructured body of a million nodes
=======================================

A block of a gyroid, as printed implants and heat exchangers have it, under pressure: tetrahedra with nodes that are moved and
numbered at random, so that nothing of a grid is left. penstock is given the mesh and nothing else; if its matrix did not fit the
memory, pieces of it would be assembled whenever they are used.

The picture is that of a small block. ``python plot_million_nodes.py 134`` makes the one of a million nodes, 3 million unknowns.
"""

import itertools
import sys

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse

import penstock
from penstock.fem import LinearElasticity

cells = int(sys.argv[1]) if len(sys.argv) > 1 else 18


def gyroid(places):
    """Return what is 0 on the middle surface of the wall, and its gradient."""
    angles = 2 * np.pi * places
    sines, cosines = np.sin(angles), np.cos(angles)
    after = np.roll(cosines, -1, axis=-1)
    gradient = 2 * np.pi * (cosines * after - np.roll(sines, 1, axis=-1) * sines)
    return (sines * after).sum(axis=-1), gradient


# %%
# Cubes near the surface are cut into six tetrahedra each, all in the same way, so that neighbours fit.
wall = 0.6
steps = (np.arange(cells) + 0.5) / cells
centres = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), axis=-1)
solid = np.abs(gyroid(centres)[0]) < wall
del centres
corner = np.argwhere(solid)


def numbers(places):
    """Number the corners of cubes."""
    return (places[..., 0] * (cells + 1) + places[..., 1]) * (cells + 1) + places[..., 2]


tetrahedra = []
for axes in itertools.permutations(range(3)):
    path = np.concatenate([np.zeros((1, 3), dtype=int), np.cumsum(np.eye(3, dtype=int)[list(axes)], axis=0)])
    tetrahedra.append(numbers(corner[:, None, :] + path))
used, tetrahedra = np.unique(np.concatenate(tetrahedra), return_inverse=True)
tetrahedra = tetrahedra.reshape(-1, 4)
points = np.stack(np.unravel_index(used, (cells + 1,) * 3), axis=1) / cells

# %%
# Only what hangs together is kept. Nodes on the surface move towards where the gyroid has it, others a little at random, and all
# are numbered at random.
pairs = (tetrahedra[:, :3].ravel(), tetrahedra[:, 1:].ravel())
graph = scipy.sparse.coo_array((np.ones(pairs[0].size, dtype=bool), pairs), shape=(len(points),) * 2)
_, part = scipy.sparse.csgraph.connected_components(graph, directed=False)
kept = part == np.bincount(part).argmax()
generator = np.random.default_rng(1)
new = np.full(len(points), -1)
new[np.flatnonzero(kept)] = generator.permutation(kept.sum())
order = np.argsort(new[kept])
points, tetrahedra = points[kept][order], new[tetrahedra[kept[tetrahedra[:, 0]]]]
triangles = np.concatenate([np.delete(tetrahedra, vertex, axis=1) for vertex in range(4)])
_, first, count = np.unique(np.sort(triangles, axis=1), axis=0, return_index=True, return_counts=True)
triangles = triangles[first[count == 1]]  # of one tetrahedron only: the surface

moves = generator.uniform(-0.1, 0.1, points.shape) / cells
outer = np.unique(triangles)
value, gradient = gyroid(points[outer])
distance = (np.sign(value) * wall - value) / np.linalg.norm(gradient, axis=1)
step = np.clip(distance, -0.4 / cells, 0.4 / cells)
moves[outer] = step[:, None] * gradient / np.linalg.norm(gradient, axis=1)[:, None]
moves[(points == 0) | (points == 1)] = 0  # the faces of the block stay plane
points = points + moves

# %%
clamped, pressed = points[:, 2] == 0, points[:, 2] == 1
fixed = (3 * np.flatnonzero(clamped)[:, None] + np.arange(3)).ravel()
body = penstock.ElementMatrix(points, tetrahedra, element=LinearElasticity(young=1.0, poisson=0.3), fixed=fixed)
load = np.zeros(body.shape[0])
load[2::3][pressed] = -1e-3 / pressed.sum()
result = penstock.solve(body, load, rtol=1e-6)
print(result.explain())
assert result.converged

# %%
displacement = result.x.reshape(-1, 3)
moved = points + 0.1 * displacement / np.abs(displacement).max()

figure = plt.figure(figsize=(6.5, 5))
axes = figure.add_subplot(projection="3d")
surface = axes.plot_trisurf(*moved.T, triangles=triangles, cmap="viridis", linewidth=0)
surface.set_array(np.linalg.norm(displacement, axis=1)[triangles].mean(axis=1))
surface.autoscale()
axes.set(title=f"{len(points):,} nodes, {result.iterations} iterations", aspect="equal")
axes.view_init(elev=22, azim=35)
figure.colorbar(surface, label="displacement", shrink=0.7)
plt.show()
