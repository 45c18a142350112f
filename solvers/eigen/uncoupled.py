"""Modes of nodes that K couples with no others: each is a small dense problem of its own, which the coarse level leaves out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.linalg

from penstock.solvers.amg.smoothed_aggregation import SmoothedAggregation
from penstock.solvers.eigen.mass import Mass
from penstock.spmv import Array, InputError

Matrix = np.ndarray[Any, Any]

# An unknown whose ``k_ii / m_ii`` is this many times the largest value of the others is held: it has no part in their modes.
_HELD = 1e3


class UncoupledModes(NamedTuple):
    """Ascending values, M-orthonormal vectors (n, k) and their products with M."""

    values: Matrix
    vectors: Array
    of_mass: Array


def uncoupled_modes(M: SmoothedAggregation, mass: Mass, moves: Array, k: int) -> UncoupledModes | None:
    """Return the lowest k modes of unknowns that have mass and do not move with others; None if there are no such unknowns.

    Those that a penalty holds are left out where M couples them with others.

    Raises
    ------
    InputError
        If M couples other such unknowns with other nodes.
    """
    device, size = M.device, M.level.T.block_size
    apart = np.flatnonzero(device.to_host((mass.diagonal() > 0) & ~moves))
    if not apart.size:
        return None
    of_mass = mass.to_csr()
    coupled = _coupled_by_mass(of_mass, apart, size)
    if moves.any():
        kept = ~(coupled & _held(M, of_mass, apart))
        apart, coupled = apart[kept], coupled[kept]
    if not apart.size:
        return None
    if count := int(coupled.sum()):
        raise InputError(
            f"M couples {count:,} unknowns that K couples with no other, such as fixed ones: empty their rows and columns of M, "
            "or eliminate them from both"
        )
    nodes, first = np.unique(apart // size, return_index=True)
    inverses = device.to_host(M.level.diagonal.blocks[device.asarray(nodes)])
    found: list[tuple[float, Matrix, Matrix]] = []
    for node, inverse, own in zip(nodes, inverses, np.split(apart, first[1:]), strict=True):
        places = own - node * size
        K = np.linalg.inv(inverse)[np.ix_(places, places)]
        values, vectors = scipy.linalg.eigh(K, of_mass[own][:, own].toarray())
        found += [(float(value), own, vector) for value, vector in zip(values, vectors.T, strict=True)]
    found = sorted(found, key=lambda of: of[0])[:k]
    X = np.zeros((mass.shape[0], len(found)))
    for number, (_, own, vector) in enumerate(found):
        X[own, number] = vector
    on_device = device.asarray(X)
    return UncoupledModes(np.array([value for value, *_ in found]), on_device, mass.apply(on_device))


def _coupled_by_mass(of_mass: Any, unknowns: Matrix, size: int) -> Matrix:
    """Return which of some unknowns M couples with other nodes."""
    rows = of_mass[unknowns].tocoo()
    far = (rows.col // size != unknowns[rows.row] // size) & (rows.data != 0)
    return np.bincount(rows.row[far], minlength=len(unknowns)) > 0


def _held(M: SmoothedAggregation, of_mass: Any, unknowns: Matrix) -> Matrix:
    """Return which of some unknowns have values far above those of modes that move."""
    size, masses = M.level.T.block_size, of_mass.diagonal()
    inverses = M.device.to_host(M.level.diagonal.blocks[M.device.asarray(unknowns // size)])
    within = unknowns % size
    stiffnesses = 1 / inverses[np.arange(len(unknowns)), within, within]
    return np.asarray(stiffnesses * masses.mean() > _HELD * M.level.scale * masses[unknowns])
