"""Isotropic linear elasticity: three degrees of freedom per node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from penstock.fem.hexahedron import integrate_stiffness
from penstock.spmv import InputError


def lame_parameters(young: float, poisson: float) -> tuple[float, float]:
    """Return Lame's lambda and mu for Young's modulus and Poisson's ratio."""
    if not (0 < young < np.inf and -1 < poisson < 0.5):
        raise InputError(f"need young > 0 and -1 < poisson < 0.5, not {young} and {poisson}")
    return young * poisson / ((1 + poisson) * (1 - 2 * poisson)), young / (2 * (1 + poisson))


@dataclass(frozen=True)
class LinearElasticity:
    """Displacements ``ux uy uz`` in an isotropic elastic body.

    Parameters
    ----------
    young : float
        Young's modulus, positive.
    poisson : float
        Poisson's ratio, above -1 and below 0.5.

    Raises
    ------
    InputError
        If a modulus is out of range.

    Examples
    --------
    >>> from penstock.fem import LinearElasticity
    >>> steel = LinearElasticity(young=210e9, poisson=0.3)
    >>> steel.moduli().shape, f"{steel.moduli()[3, 3]:.3g}"  # the shear modulus, in Pa
    ((6, 6), '8.08e+10')
    """

    dof: ClassVar[int] = 3
    young: float = 1.0
    poisson: float = 0.3

    def __post_init__(self) -> None:
        lame_parameters(self.young, self.poisson)

    @property
    def parameters(self) -> tuple[float, float]:
        """Lame's lambda and mu."""
        return lame_parameters(self.young, self.poisson)

    def moduli(self) -> np.ndarray[Any, Any]:
        """Return the material matrix for the strains ``xx yy zz xy yz zx`` (engineering shears), ``(6, 6)``."""
        lame_lambda, mu = self.parameters
        C = np.diag([2 * mu] * 3 + [mu] * 3)
        C[:3, :3] += lame_lambda
        return C

    def stiffness(self, spacing: tuple[float, float, float]) -> np.ndarray[Any, Any]:
        """Return the element matrix, ``(24, 24)``; the three displacements of a node are adjacent."""
        return integrate_stiffness(_strain_operator, self.moduli(), spacing)

    def rigid_body_modes(self, coordinates: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return three translations and three rotations about the box's centre, ``(3 * nodes, 6)``."""
        r = coordinates - coordinates.mean(axis=0)
        modes = np.zeros((len(r), 3, 6))
        for axis in range(3):
            modes[:, axis, axis] = 1
            modes[:, :, 3 + axis] = np.cross(np.eye(3)[axis], r)
        return modes.reshape(-1, 6)


def _strain_operator(shape: np.ndarray[Any, Any], gradients: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x, y, z = gradients.T
    B = np.zeros((6, 8, 3))
    B[0, :, 0], B[1, :, 1], B[2, :, 2] = x, y, z
    B[3, :, 0], B[3, :, 1] = y, x
    B[4, :, 1], B[4, :, 2] = z, y
    B[5, :, 2], B[5, :, 0] = x, z
    return B.reshape(6, 24)
