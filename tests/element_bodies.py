"""Distorted bodies of tetrahedra and hexahedra, for tests of matrices that are known by their elements."""

import numpy as np

import penstock
from penstock.fem import BoxMesh, HeatConduction, LinearElasticity

#: Tetrahedra of a hexahedron.
SIX = ((0, 1, 2, 6), (0, 2, 3, 6), (0, 3, 7, 6), (0, 7, 4, 6), (0, 4, 5, 6), (0, 5, 1, 6))

LAWS = {3: LinearElasticity(young=2.0, poisson=0.4), 1: HeatConduction(3.0)}


def body(shape, dof, nodes=(5, 4, 9), *, shuffled=False, seed=1, fixed=True):
    """A distorted box of random material, held on one side, perhaps with its nodes and elements in random order."""
    rng, mesh = np.random.default_rng(seed), BoxMesh(nodes)
    points, elements = mesh.coordinates(), mesh.connectivity()
    points = points + 0.2 * min(mesh.spacing) * rng.uniform(-1, 1, points.shape)
    if shape == "tetrahedra":
        elements = np.concatenate([elements[:, list(corners)] for corners in SIX])
    held = np.flatnonzero(np.arange(len(points)) < nodes[1] * nodes[2])
    if shuffled:
        permutation = rng.permutation(len(points))
        place = np.argsort(permutation)
        points, elements, held = points[permutation], place[elements], place[held]
        elements = elements[rng.permutation(len(elements))]
    unknowns = (held[:, None] * dof + np.arange(dof)).reshape(-1)
    factors = np.exp(rng.standard_normal(len(elements)))
    return penstock.ElementMatrix(
        points, elements, element=LAWS[dof], material=factors, fixed=unknowns if fixed else None
    )
