"""A system with what its user knows of it, and the registry of families that make such systems."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from penstock.solvers.amg.modes import rigid_body_modes

__all__ = ["FAMILIES", "SIZES", "Array", "Generator", "System", "build", "family", "load_system"]

Array = np.ndarray[Any, Any]
Generator = np.random.Generator

#: Unknowns, about, of every family. The tiny ones are for tests, the least ones to compile kernels: LAPACK answers smaller
#: systems.
SIZES = {"tiny": 700, "least": 7_000, "small": 25_000, "large": 90_000}


@dataclass(frozen=True)
class System:
    """``A x = b`` and what a user of such a problem would tell a solver.

    Parameters
    ----------
    A : csr_array
        Symmetric to rounding, positive definite, or semi-definite if there is a null space.
    b : array, (n,)
    coordinates : array, (nodes, 2) or (nodes, 3), optional
    near_null_space : array, (n, k), optional
    block_size : int, optional
    null_space : "constants" or array, (n, k), optional
    dimensions : int
        Of the problem, by which some peers choose their thresholds; it is not told to penstock.
    """

    A: scipy.sparse.csr_array
    b: Array
    coordinates: Array | None = None
    near_null_space: Array | None = None
    block_size: int | None = None
    null_space: Any = None
    dimensions: int = 3

    @property
    def given(self) -> dict[str, Any]:
        """What is given to :func:`penstock.solve` beside A and b."""
        names = ("coordinates", "near_null_space", "block_size", "null_space")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def unknowns_per_node(self) -> int:
        """What the same knowledge says of the blocks."""
        if self.coordinates is not None:
            return self.A.shape[0] // len(self.coordinates)
        return self.block_size or 1

    @property
    def slow_modes(self) -> Array | None:
        """The near-null space that peers get: the same knowledge in the form that they take."""
        if self.coordinates is not None:
            return np.asarray(rigid_body_modes(self.coordinates, self.unknowns_per_node))
        return self.near_null_space

    @property
    def kernel(self) -> Array | None:
        """The null space as an array, (n, k)."""
        return np.ones((self.A.shape[0], 1)) if isinstance(self.null_space, str) else self.null_space

    def save(self, folder: Path) -> None:
        """Write the system, and the same for peers, who know neither coordinates nor the word "constants"."""
        scipy.sparse.save_npz(folder / "A.npz", scipy.sparse.csr_matrix(self.A), compressed=False)
        arrays = {"b": self.b, "slow_modes": self.slow_modes, "kernel": self.kernel}
        arrays |= {name: of for name, of in self.given.items() if isinstance(of, np.ndarray)}
        np.savez(folder / "arrays.npz", **{name: of for name, of in arrays.items() if of is not None})
        numbers = {"unknowns_per_node": self.unknowns_per_node, "dimensions": self.dimensions}
        words = {name: of for name, of in self.given.items() if not isinstance(of, np.ndarray)}
        (folder / "facts.json").write_text(json.dumps({"given": words, **numbers}), encoding="utf-8")


def load_system(folder: Path) -> System:
    """Return the system that :meth:`System.save` wrote."""
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    with np.load(folder / "arrays.npz") as saved:
        arrays = {name: saved[name] for name in saved if name not in ("slow_modes", "kernel")}
    A = scipy.sparse.csr_array(scipy.sparse.load_npz(folder / "A.npz"))
    return System(A, **(arrays | facts["given"]), dimensions=facts["dimensions"])


Family = Callable[[int, Generator], System]
FAMILIES: dict[str, Family] = {}


def family(make: Family) -> Family:
    """Register a family under the name of its function."""
    assert make.__name__ not in FAMILIES
    FAMILIES[make.__name__] = make
    return make


def build(name: str, size: int) -> System:
    """Return the system of a family with about a number of unknowns, the same one at every call."""
    system = FAMILIES[name](size, np.random.default_rng(zlib.crc32(name.encode())))
    A = scipy.sparse.csr_array(system.A)
    A.sum_duplicates()
    return replace(system, A=A)
