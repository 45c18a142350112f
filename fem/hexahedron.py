"""The 8-node hexahedron with trilinear shape functions, on an axis-parallel box."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

Matrix = np.ndarray[Any, Any]

#: Corners of the reference element [-1, 1]^3, in the order of the mesh: z runs fastest.
CORNERS: Matrix = np.array(list(itertools.product((-1.0, 1.0), repeat=3)))


def shape_functions(point: Matrix) -> Matrix:
    """Return the eight shape functions at a point of the reference element, ``(8,)``."""
    return np.asarray(np.prod(1 + CORNERS * point, axis=1) / 8)


def shape_gradients(point: Matrix, spacing: tuple[float, float, float]) -> Matrix:
    """Return the gradients of the eight shape functions in physical coordinates, ``(8, 3)``."""
    factors = 1 + CORNERS * point
    gradients = np.empty((8, 3))
    for axis in range(3):
        others = [other for other in range(3) if other != axis]
        gradients[:, axis] = CORNERS[:, axis] * factors[:, others].prod(axis=1) / 4 / spacing[axis]
    return gradients


def gauss_points(order: int = 2) -> list[tuple[Matrix, float]]:
    """Return points and weights of the tensor Gauss rule with ``order`` points per direction (total weight 8)."""
    points, weights = np.polynomial.legendre.leggauss(order)
    return [
        (points[list(index)], float(weights[list(index)].prod())) for index in itertools.product(range(order), repeat=3)
    ]


def integrate_stiffness(strain_operator: Any, moduli: Matrix, spacing: tuple[float, float, float]) -> Matrix:
    """Integrate ``B^T C B`` over an element by full (2 x 2 x 2) Gauss quadrature: (8 * dof, 8 * dof).

    ``strain_operator(shape, gradients)`` returns B, ``(strains, 8 * dof)``; C is the symmetric matrix of moduli. The result is
    averaged with its transpose and so symmetric to the last bit: exchanging rows and columns, or storing one half, loses
    nothing.
    """
    jacobian = float(np.prod(spacing)) / 8
    stiffness = sum(
        weight * jacobian * (B.T @ moduli @ B)
        for point, weight in gauss_points()
        for B in [strain_operator(shape_functions(point), shape_gradients(point, spacing))]
    )
    return np.asarray((stiffness + stiffness.T) / 2)
