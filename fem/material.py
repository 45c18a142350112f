"""Material fields: a stiffness factor for each element, generated one layer of elements at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from penstock.spmv import InputError


def _check_seed(seed: Any) -> None:
    if not (isinstance(seed, int | np.integer) and seed >= 0):
        raise InputError(f"seed must be a whole number, 0 or more, not {seed!r}")


class Material(Protocol):
    """A positive factor for the stiffness of every element.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.fem import Cantilever
    >>> class StifferWithX:
    ...     def layer(self, index, shape):
    ...         return np.full(shape, 1.0 + index)
    >>> Cantilever(nodes=3, dof=1, material=StifferWithX()).matrix().to_csr().diagonal()[-1].round(3).item()
    0.333
    """

    def layer(self, index: int, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
        """Return the factors of the elements between node planes ``index`` and ``index + 1``, of shape (ny, nz)."""


@dataclass(frozen=True)
class UniformMaterial:
    """The same material everywhere.

    Examples
    --------
    >>> from penstock.fem import UniformMaterial
    >>> UniformMaterial().layer(0, (2, 3)).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    def layer(self, index: int, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
        """Return ones."""
        return np.ones(shape)


@dataclass(frozen=True)
class LognormalMaterial:
    """Independent factors ``exp(sigma * standard normal)`` per element.

    Parameters
    ----------
    sigma : float
        Standard deviation of the logarithm, not negative.
    seed : int
        Layers draw from ``numpy.random.default_rng([seed, layer])``, so any slab can be generated on its own.

    Raises
    ------
    InputError
        If sigma is negative or not finite, or the seed no whole number.

    Examples
    --------
    >>> from penstock.fem import Cantilever, LognormalMaterial
    >>> material = LognormalMaterial(sigma=0.5, seed=1)
    >>> material.layer(0, (2, 2)).round(3).tolist()
    [[1.189, 1.508], [1.18, 0.521]]
    >>> Cantilever(nodes=3, material=material).matrix().shape
    (81, 81)
    """

    sigma: float = 0.5
    seed: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < np.inf:
            raise InputError(f"sigma must be a finite number, 0 or more, not {self.sigma}")
        _check_seed(self.seed)

    def layer(self, index: int, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
        """Return the factors of one layer."""
        return np.exp(self.sigma * np.random.default_rng([self.seed, index]).standard_normal(shape))


@dataclass(frozen=True)
class TwoPhaseMaterial:
    """Random inclusions of another stiffness, drawn element by element.

    Parameters
    ----------
    contrast : float
        Factor of the inclusions, positive; the rest has factor 1.
    fraction : float
        Share of elements that are inclusions, 0 to 1.
    seed : int
        As in :class:`LognormalMaterial`.

    Raises
    ------
    InputError
        If an argument is out of range.

    Examples
    --------
    >>> from penstock.fem import TwoPhaseMaterial
    >>> sorted(set(TwoPhaseMaterial(contrast=10.0, fraction=0.5).layer(0, (8, 8)).ravel().tolist()))
    [1.0, 10.0]
    """

    contrast: float = 100.0
    fraction: float = 0.3
    seed: int = 1

    def __post_init__(self) -> None:
        if not (0 < self.contrast < np.inf and 0 <= self.fraction <= 1):
            raise InputError(f"need contrast > 0 and 0 <= fraction <= 1, not {self.contrast} and {self.fraction}")
        _check_seed(self.seed)

    def layer(self, index: int, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
        """Return the factors of one layer."""
        inclusion = np.random.default_rng([self.seed, index]).random(shape) < self.fraction
        return np.where(inclusion, self.contrast, 1.0)
