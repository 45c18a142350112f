"""Micropolar (Cosserat) elasticity: displacements and independent rotations, six degrees of freedom per node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from penstock.fem.elasticity import LinearElasticity, lame_parameters
from penstock.fem.hexahedron import integrate_stiffness
from penstock.spmv import InputError

_LEVI_CIVITA = np.zeros((3, 3, 3))
for _i, _j, _k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
    _LEVI_CIVITA[_i, _j, _k], _LEVI_CIVITA[_i, _k, _j] = 1, -1


@dataclass(frozen=True)
class MicropolarElasticity:
    """Displacements ``ux uy uz`` and rotations ``phix phiy phiz`` with the strain energy of Eringen (1966).

    Strains ``e_ij = d_i u_j - eps_ijk phi_k`` and curvatures ``c_ij = d_i phi_j`` carry the energy density ::

        (lambda (tr e)^2 + (mu + kappa) e_ij e_ij + mu e_ij e_ji
         + alpha (tr c)^2 + gamma c_ij c_ij + beta c_ij c_ji) / 2

    Parameters
    ----------
    lame_lambda, mu, kappa, alpha, beta, gamma : float
        The six moduli. The energy is positive if kappa > 0, 2 mu + kappa > 0, 3 lambda + 2 mu + kappa > 0,
        ``gamma > |beta|`` and 3 alpha + beta + gamma > 0; other values are refused.

    Raises
    ------
    InputError
        If the energy is not positive.

    Examples
    --------
    >>> from penstock.fem import Cantilever, MicropolarElasticity
    >>> law = MicropolarElasticity.from_engineering(young=2.0, poisson=0.25, coupling=0.5, characteristic_length=0.1)
    >>> Cantilever(nodes=3, dof=6, element=law).shape
    (162, 162)
    """

    dof: ClassVar[int] = 6
    lame_lambda: float
    mu: float
    kappa: float
    alpha: float
    beta: float
    gamma: float

    def __post_init__(self) -> None:
        conditions = {
            "kappa > 0": self.kappa > 0,
            "2 mu + kappa > 0": 2 * self.mu + self.kappa > 0,
            "3 lambda + 2 mu + kappa > 0": 3 * self.lame_lambda + 2 * self.mu + self.kappa > 0,
            "gamma > |beta|": self.gamma > abs(self.beta),
            "3 alpha + beta + gamma > 0": 3 * self.alpha + self.beta + self.gamma > 0,
        }
        broken = [condition for condition, holds in conditions.items() if not holds]
        if broken:
            raise InputError(f"the micropolar moduli give no positive energy: {', '.join(broken)} must hold")

    @classmethod
    def from_engineering(
        cls, young: float = 1.0, poisson: float = 0.3, *, coupling: float = 0.5, characteristic_length: float = 0.1
    ) -> Self:
        """Compute the moduli from measurable quantities.

        Parameters
        ----------
        young, poisson : float
            Young's modulus and Poisson's ratio in uniaxial tension.
        coupling : float
            Coupling number squared ``kappa / (2 (mu + kappa))``, between 0 and 1: 0 is classical elasticity.
        characteristic_length : float
            Length in bending, squared ``gamma / (2 (2 mu + kappa))``; beta is set to gamma / 2 and alpha to 0.
        """
        if not (0 < coupling < 1 and characteristic_length > 0):
            raise InputError(
                f"need 0 < coupling < 1 and characteristic_length > 0, not {coupling}, {characteristic_length}"
            )
        lame_lambda, shear = lame_parameters(young, poisson)  # shear = mu + kappa / 2
        kappa = 2 * shear * coupling / (1 - coupling)
        gamma = 4 * shear * characteristic_length**2
        return cls(lame_lambda, shear - kappa / 2, kappa, 0.0, gamma / 2, gamma)

    def moduli(self) -> np.ndarray[Any, Any]:
        """Return the material matrix for the nine strains and nine curvatures in row-major order, ``(18, 18)``."""
        trace = np.outer(np.eye(3).ravel(), np.eye(3).ravel())
        transpose = np.eye(9).reshape(3, 3, 9).swapaxes(0, 1).reshape(9, 9)
        C = np.zeros((18, 18))
        C[:9, :9] = self.lame_lambda * trace + (self.mu + self.kappa) * np.eye(9) + self.mu * transpose
        C[9:, 9:] = self.alpha * trace + self.gamma * np.eye(9) + self.beta * transpose
        return C

    def stiffness(self, spacing: tuple[float, float, float]) -> np.ndarray[Any, Any]:
        """Return the element matrix, ``(48, 48)``; the six unknowns of a node are adjacent."""
        return integrate_stiffness(_strain_operator, self.moduli(), spacing)

    def rigid_body_modes(self, coordinates: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return three translations and three rotations ``u = omega x r, phi = omega``, ``(6 * nodes, 6)``."""
        modes = np.zeros((len(coordinates), 6, 6))
        modes[:, :3] = LinearElasticity().rigid_body_modes(coordinates).reshape(-1, 3, 6)
        for axis in range(3):
            modes[:, 3 + axis, 3 + axis] = 1
        return modes.reshape(-1, 6)


def _strain_operator(shape: np.ndarray[Any, Any], gradients: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    B = np.zeros((2, 3, 3, 8, 6))
    for j in range(3):
        B[0, :, j, :, j] = gradients.T  # d_i u_j
        B[1, :, j, :, 3 + j] = gradients.T  # d_i phi_j
    B[0, :, :, :, 3:] -= np.einsum("ijk,a->ijak", _LEVI_CIVITA, shape)
    return B.reshape(18, 48)
