"""Modes of nodes that K couples with no others: each is a small dense problem of its own, which the coarse level leaves out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.linalg

from penstock.solvers.amg.smoothed_aggregation import SmoothedAggregation
from penstock.solvers.eigen.mass import Mass
from penstock.spmv import Array, InputError

Matrix = np.ndarray[Any, Any]


class UncoupledModes(NamedTuple):
    """Ascending values, M-orthonormal vectors (n, k) and their products with M."""

    values: Matrix
    vectors: Array
    of_mass: Array


def uncoupled_modes(M: SmoothedAggregation, mass: Mass, moves: Array, k: int) -> UncoupledModes | None:
    """Return the lowest k modes of unknowns that have mass and do not move with others; None if there are no such unknowns.

    Raises
    ------
    InputError
        If M couples such unknowns with other nodes.
    """
    device, size = M.device, M.level.T.block_size
    apart = np.flatnonzero(device.to_host((mass.diagonal() > 0) & ~moves))
    if not apart.size:
        return None
    of_mass = mass.to_csr()
    rows = of_mass[apart].tocoo()
    far = (rows.col // size != apart[rows.row] // size) & (rows.data != 0)
    if far.any():
        count = np.unique(rows.row[far]).size
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
