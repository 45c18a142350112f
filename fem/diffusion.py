"""Heat conduction (the Poisson equation): one degree of freedom per node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from penstock.fem.hexahedron import integrate_stiffness
from penstock.spmv import InputError


@dataclass(frozen=True)
class HeatConduction:
    """``-div(conductivity grad u) = f``.

    Parameters
    ----------
    conductivity : float
        Positive.

    Raises
    ------
    InputError
        If the conductivity is not positive and finite.

    Examples
    --------
    >>> from penstock.fem import HeatConduction
    >>> element = HeatConduction(conductivity=3.0).stiffness((1.0, 1.0, 1.0))
    >>> element.shape, element[0, 0].round(6).item()
    ((8, 8), 1.0)
    """

    dof: ClassVar[int] = 1
    conductivity: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.conductivity < np.inf:
            raise InputError(f"conductivity must be positive and finite, not {self.conductivity}")

    @property
    def parameters(self) -> tuple[float, float]:
        """The conductivity, and 0."""
        return self.conductivity, 0.0

    def stiffness(self, spacing: tuple[float, float, float]) -> np.ndarray[Any, Any]:
        """Return the element matrix, ``(8, 8)``."""
        return integrate_stiffness(lambda shape, gradients: gradients.T, self.conductivity * np.eye(3), spacing)

    def rigid_body_modes(self, coordinates: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the null space of the unclamped matrix, the constants: ``(nodes, 1)``."""
        return np.ones((len(coordinates), 1))
