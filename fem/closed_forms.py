"""Closed-form solutions to verify the generator."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def timoshenko_tip_deflection(
    force: float, length: float, height: float, width: float, young: float = 1.0, poisson: float = 0.3
) -> float:
    """Return the tip deflection of a cantilever of rectangular section under an end shear force.

    Bending and shear, ``F L^3 / (3 E I) + F L / (k G A)``, with Cowper's (1966) shear coefficient
    ``k = 10 (1 + nu) / (12 + 11 nu)``; ``height`` is measured along the force.

    Parameters
    ----------
    force : float
    length, height, width : float
        Of the beam; ``height`` is measured along the force.
    young, poisson : float
        Young's modulus, in the units of force and length, and Poisson's ratio.

    Returns
    -------
    float
        In the unit of length.

    Examples
    --------
    >>> from penstock.fem import timoshenko_tip_deflection
    >>> round(1e3 * timoshenko_tip_deflection(force=1000.0, length=2.0, height=0.1, width=0.05, young=210e9), 3)  # mm
    3.053
    """
    area, inertia = width * height, width * height**3 / 12
    shear_modulus = young / (2 * (1 + poisson))
    coefficient = 10 * (1 + poisson) / (12 + 11 * poisson)
    return force * length**3 / (3 * young * inertia) + force * length / (coefficient * shear_modulus * area)


def uniform_source_profile(x: Array, length: float, source: float = 1.0, conductivity: float = 1.0) -> Array:
    """Return ``u`` with ``-k u'' = source``, ``u(0) = 0`` and no flux through the other faces: a parabola in x.

    Parameters
    ----------
    x : float64 array, any shape
        Distance from the face at zero temperature.
    length : float
        Of the box along x.
    source : float
        Per volume.
    conductivity : float

    Returns
    -------
    float64 array of the shape of x

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.fem import uniform_source_profile
    >>> uniform_source_profile(np.array([0.0, 1.0, 2.0]), length=2.0).tolist()
    [0.0, 1.5, 2.0]
    """
    return np.asarray(source / conductivity * (length * x - x**2 / 2))


def cosine_mode(coordinates: Array, lengths: tuple[float, float, float]) -> Array:
    """Return ``sin(pi x / 2 Lx) cos(pi y / Ly) cos(pi z / Lz)``, zero at x = 0 and without flux elsewhere.

    One term of the double cosine series in y and z that solves any conduction problem on the box.

    Parameters
    ----------
    coordinates : float64 array, (m, 3)
    lengths : (float, float, float)
        Sides of the box, in the unit of the coordinates.

    Returns
    -------
    float64 array, (m,)

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.fem import cosine_mode
    >>> cosine_mode(np.array([[0.0, 0.0, 0.0], [2.0, 0.0, 1.0]]), (2.0, 1.0, 1.0)).round(6).tolist()
    [0.0, -1.0]
    """
    x, y, z = (np.pi * coordinates / lengths).T
    return np.asarray(np.sin(x / 2) * np.cos(y) * np.cos(z))


def cosine_mode_source(coordinates: Array, lengths: tuple[float, float, float], conductivity: float = 1.0) -> Array:
    """Return the source that drives :func:`cosine_mode`.

    Parameters
    ----------
    coordinates : float64 array, (m, 3)
    lengths : (float, float, float)
        Sides of the box, in the unit of the coordinates.
    conductivity : float

    Returns
    -------
    float64 array, (m,)
        Per volume.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.fem import cosine_mode_source
    >>> (cosine_mode_source(np.array([[2.0, 0.0, 0.0]]), (2.0, 1.0, 1.0)) / np.pi**2).round(6).tolist()
    [2.0625]
    """
    x, y, z = (np.pi / np.asarray(lengths)) ** 2
    return np.asarray(conductivity * (x / 4 + y + z) * cosine_mode(coordinates, lengths))
