"""Right-hand sides: body forces and end tractions, integrated with the shape functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.fem.hexahedron import CORNERS, gauss_points, shape_functions
from penstock.fem.mesh import BoxMesh
from penstock.spmv import InputError

Array = np.ndarray[Any, Any]
Field = Callable[[Array], Array]


def _nodal_lengths(count: int, length: float) -> Array:
    """Return the integrals of the linear shape functions along one direction: half an element at the ends, one inside."""
    weights = np.full(count, length / (count - 1))
    weights[[0, -1]] /= 2
    return weights


def body_load(mesh: BoxMesh, density: Array) -> Array:
    """Return the load of a constant density per volume.

    Parameters
    ----------
    mesh : BoxMesh
    density : array, (dof,)
        Force (or source) per volume.

    Returns
    -------
    float64 array, (node_count * dof,)
        Lumped: each node gets the integral of its shape function times the density.

    Examples
    --------
    >>> from penstock.fem import BoxMesh, body_load
    >>> body_load(BoxMesh(nodes=(3, 2, 2), lengths=2.0), [0.0, 0.0, -1.0]).reshape(-1, 3).sum(axis=0).tolist()
    [0.0, 0.0, -2.0]
    """
    x, y, z = (_nodal_lengths(*pair) for pair in zip(mesh.node_counts, mesh.side_lengths, strict=True))
    volumes = (x[:, None, None] * y[:, None] * z).reshape(-1, 1)
    return np.asarray(volumes * np.asarray(density, dtype=float)).reshape(-1)


def end_load(mesh: BoxMesh, traction: Field, dof: int) -> Array:
    """Return the load of a traction on the face x = L, linear in y and z.

    Parameters
    ----------
    mesh : BoxMesh
    traction : callable
        Maps coordinates ``(m, 3)`` to forces (and couples) per area, ``(m, dof)``.
    dof : int

    Returns
    -------
    float64 array, (node_count * dof,)
        Zero at all other nodes.

    Notes
    -----
    Lumped: each node of the face gets the integral of its shape function times the traction at the node. This is exact
    for constants, and the resultant force and moment about the face's centre are those of the nodal values.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.fem import BoxMesh, end_load
    >>> load = end_load(BoxMesh(nodes=3), lambda points: np.tile([0.0, 0.0, -4.0], (len(points), 1)), dof=3)
    >>> load.shape, load.reshape(-1, 3).sum(axis=0).tolist()
    ((81,), [0.0, 0.0, -4.0])
    """
    _, y, z = (_nodal_lengths(*pair) for pair in zip(mesh.node_counts, mesh.side_lengths, strict=True))
    face = mesh.coordinates(slice(-1, None))
    load = np.zeros((mesh.node_count, dof))
    load[-len(face) :] = (y[:, None] * z).reshape(-1, 1) * traction(face)
    return load.reshape(-1)


def integrate_body_load(mesh: BoxMesh, density: Field, dof: int, *, order: int = 3) -> Array:
    """Return the consistent load of a density that varies in space, by Gauss quadrature.

    Parameters
    ----------
    mesh : BoxMesh
    density : callable
        Maps coordinates ``(m, 3)`` to densities ``(m, dof)``.
    dof : int
    order : int
        Gauss points per direction.

    Returns
    -------
    float64 array, (node_count * dof,)

    Examples
    --------
    >>> from penstock.fem import BoxMesh, integrate_body_load
    >>> load = integrate_body_load(BoxMesh(nodes=3), lambda points: points[:, :1] ** 2, dof=1)
    >>> load.shape, load.sum().round(6).item()  # the integral of x^2 over the cube
    ((27,), 0.333333)
    """
    nx, ny, nz = mesh.element_counts
    spacing = np.array(mesh.spacing)
    element = np.stack(np.meshgrid(np.arange(nx), np.arange(ny), np.arange(nz), indexing="ij"), axis=-1)
    load = np.zeros((*mesh.node_counts, dof))
    for point, weight in gauss_points(order):
        positions = (element + (1 + point) / 2) * spacing
        values = density(positions.reshape(-1, 3)).reshape(nx, ny, nz, dof)
        for corner, shape in zip(CORNERS, shape_functions(point), strict=True):
            x, y, z = ((corner + 1) / 2).astype(int)
            load[x : x + nx, y : y + ny, z : z + nz] += weight * shape * spacing.prod() / 8 * values
    return load.reshape(-1)


def face_load(mesh: BoxMesh, axis: int, side: int, traction: Field, dof: int, *, order: int = 3) -> Array:
    """Return the consistent load of a traction on one face of the box, by Gauss quadrature.

    Parameters
    ----------
    mesh : BoxMesh
    axis : {0, 1, 2}
        Direction of the face's normal.
    side : {0, 1}
        The face at 0 or at the far end.
    traction : callable
        Maps coordinates ``(m, 3)`` to tractions ``(m, dof)``.
    dof : int
    order : int
        Gauss points per direction.

    Returns
    -------
    float64 array, (node_count * dof,)
        Zero at the nodes of no element on the face.

    Examples
    --------
    >>> from penstock.fem import BoxMesh, face_load
    >>> load = face_load(BoxMesh(nodes=3), axis=2, side=1, traction=lambda points: points[:, :1], dof=1)
    >>> load.shape, load.sum().round(6).item()  # the integral of x over the top
    ((27,), 0.5)
    """
    if axis not in (0, 1, 2) or side not in (0, 1):
        raise InputError(f"a face is that of an axis 0, 1 or 2 on side 0 or 1, not axis {axis}, side {side}")
    points, weights = _gauss(order)
    others = [other for other in range(3) if other != axis]
    n, m = (mesh.element_counts[other] for other in others)
    h, k = (mesh.spacing[other] for other in others)
    load = np.zeros((*mesh.node_counts, dof))
    face = np.moveaxis(load, axis, 0)[-1 if side else 0]
    for p, wp in zip(points, weights, strict=True):
        for q, wq in zip(points, weights, strict=True):
            positions = np.empty((n, m, 3))
            positions[..., axis] = mesh.side_lengths[axis] * side
            positions[..., others[0]] = (np.arange(n)[:, None] + (1 + p) / 2) * h
            positions[..., others[1]] = (np.arange(m)[None, :] + (1 + q) / 2) * k
            values = traction(positions.reshape(-1, 3)).reshape(n, m, dof)
            for a in (0, 1):
                for b in (0, 1):
                    shape = (1 + (2 * a - 1) * p) * (1 + (2 * b - 1) * q) / 4
                    face[a : a + n, b : b + m] += wp * wq * shape * h * k / 4 * values
    return load.reshape(-1)


def _gauss(order: int) -> tuple[Array, Array]:
    """Return points and weights of Gauss quadrature between -1 and 1."""
    if order < 1:
        raise InputError(f"order is the number of Gauss points per direction, 1 or more, not {order}")
    points, weights = np.polynomial.legendre.leggauss(order)
    return points, weights
