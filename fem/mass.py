"""Mass matrices of boxes and of meshes of linear tetrahedra and hexahedra, as matrices of nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse

from penstock.fem.hexahedron import gauss_points
from penstock.fem.mesh import BoxMesh
from penstock.spmv import InputError, NodeMatrix

Array = np.ndarray[Any, Any]

# Corners of a hexahedron in the order of VTK: once around the bottom, then around the top.
_VTK_CORNERS = np.array(
    [[-1, -1, -1], [1, -1, -1], [1, 1, -1], [-1, 1, -1], [-1, -1, 1], [1, -1, 1], [1, 1, 1], [-1, 1, 1]], dtype=float
)


def node_weights(dof: int, rotary_inertia: float | None, spacing: tuple[float, ...]) -> Array:
    """Return the weights of the unknowns of a node: rotations have the inertia of a ball, or what the caller gives."""
    if dof != 6:
        if rotary_inertia is not None:
            raise InputError(f"rotary_inertia is for 6 unknowns a node, of which 3 are rotations, not for {dof}")
        return np.ones(dof)
    inertia = float(np.square(spacing).mean()) / 6 if rotary_inertia is None else float(rotary_inertia)
    if not (np.isfinite(inertia) and inertia > 0):
        raise InputError(f"rotary_inertia must be positive, not {rotary_inertia!r}")
    return np.array([1.0, 1.0, 1.0, inertia, inertia, inertia])


def box_mass(mesh: BoxMesh, density: float, weights: Array, *, lumped: bool, clamped: bool) -> NodeMatrix:
    """Return the mass matrix of a box of trilinear hexahedra, the Kronecker product of those of lines.

    ``clamped`` leaves rows and columns of nodes at x = 0 empty.
    """
    checked_density(density, 0)
    lines = [_line_mass(*pair, lumped=lumped) for pair in zip(mesh.node_counts, mesh.side_lengths, strict=True)]
    if clamped:
        first = lines[0].tolil()
        first[0, :] = first[:, 0] = 0.0
        lines[0] = first.tocsr()
        lines[0].eliminate_zeros()
    nodes = scipy.sparse.kron(scipy.sparse.kron(lines[0], lines[1], format="csr"), lines[2], format="csr")
    nodes.data *= float(density)
    nodes.sort_indices()
    return NodeMatrix(nodes, weights)


def _line_mass(count: int, length: float, *, lumped: bool) -> scipy.sparse.csr_array:
    side = length / (count - 1)
    ends = np.full(count, 2.0)
    ends[[0, -1]] = 1.0
    if lumped:
        return scipy.sparse.diags_array(ends * side / 2, format="csr")
    ones = np.full(count - 1, side / 6)
    return scipy.sparse.diags_array([ones, ends * side / 3, ones], offsets=[-1, 0, 1], format="csr")


def mesh_mass(
    coordinates: Array, connectivity: Array, density: Any, dof: int, fixed: Array, *, lumped: bool
) -> NodeMatrix:
    """Return the mass matrix of a mesh of linear tetrahedra or hexahedra, in the order of VTK.

    Exact for tetrahedra, 2 x 2 x 2 points of Gauss for hexahedra. ``fixed``, (unknowns,) or (0,), are 1 for unknowns whose rows
    and columns stay empty.
    """
    densities = checked_density(density, len(connectivity))
    of_elements = (_of_tetrahedra if connectivity.shape[1] == 4 else _of_hexahedra)(coordinates[connectivity])
    of_elements *= densities.reshape(-1, 1, 1)
    nodes, corners = len(coordinates), connectivity.shape[1]
    if lumped:
        sums = np.bincount(connectivity.ravel(), weights=of_elements.sum(axis=2).ravel(), minlength=nodes)
        matrix = scipy.sparse.diags_array(sums, format="csr")
    else:
        rows, columns = np.repeat(connectivity, corners, axis=1).ravel(), np.tile(connectivity, (1, corners)).ravel()
        matrix = scipy.sparse.coo_array((of_elements.ravel(), (rows, columns)), shape=(nodes, nodes)).tocsr()
    matrix.sort_indices()
    return NodeMatrix(matrix, np.ones(dof), fixed.astype(bool) if fixed.size else None)


def _of_tetrahedra(corners: Array) -> Array:
    """Return ``V (1 + [i = j]) / 20``, (elements, 4, 4)."""
    edges = corners[:, 1:] - corners[:, :1]
    volumes = np.abs(np.linalg.det(edges)) / 6
    return np.asarray(volumes[:, None, None] * ((np.ones((4, 4)) + np.eye(4)) / 20))


def _of_hexahedra(corners: Array) -> Array:
    """Return the integrals of products of shape functions, (elements, 8, 8)."""
    total = np.zeros((len(corners), 8, 8))
    for point, weight in gauss_points():
        factors = 1 + _VTK_CORNERS * point
        shape = factors.prod(axis=1) / 8
        gradients = np.stack(
            [_VTK_CORNERS[:, axis] * np.delete(factors, axis, axis=1).prod(axis=1) / 8 for axis in range(3)], axis=1
        )
        jacobians = np.abs(np.linalg.det(np.einsum("eij,ik->ejk", corners, gradients)))
        total += (weight * jacobians)[:, None, None] * np.outer(shape, shape)
    return total


def checked_density(density: Any, elements: int) -> Array:
    """Return a density, one number or one for each of the elements; refuse others, and what is not positive."""
    try:
        values = np.asarray(density, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"density must be a positive number, not {density!r}") from None
    if values.shape not in ((), (elements,)) or not (np.isfinite(values) & (values > 0)).all():
        shapes = f"one number, or one for each of {elements} elements" if elements else "one number"
        raise InputError(f"density must be positive and {shapes}, not of shape {values.shape}")
    return values
