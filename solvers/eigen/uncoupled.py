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
# One whose couplings with other nodes add up to more than this share of its row, in units of rounding, is coupled.
_COUPLED = 1e4


class UncoupledModes(NamedTuple):
    """Ascending values, M-orthonormal vectors (n, k) and their products with M."""

    values: Matrix
    vectors: Array
    of_mass: Array


def uncoupled_modes(
    K: Any, M: SmoothedAggregation, mass: Mass, moves: Array, k: int
) -> tuple[UncoupledModes | None, Array]:
    """Return the lowest k modes of unknowns that have mass and do not move with others, or None, and the unknowns that do move.

    Those that K couples with others, if by less than counts on the coarse level, are added to ``moves``, bool (n,). Those that a
    penalty holds are left out where K or M couples them with others. Where there are unknowns that do not move, their row sums
    take a product with K.

    Raises
    ------
    InputError
        If M couples unknowns that do not move with other nodes.
    """
    device = M.device
    rest = np.flatnonzero(device.to_host((mass.diagonal() > 0) & ~moves))
    if not rest.size:
        return None, moves
    of_mass, coupled = mass.to_csr(), _coupled(K, M, rest)
    held = _held(M, of_mass, rest) if moves.any() else np.zeros(len(rest), dtype=bool)
    if (coupled & ~held).any():
        moves = moves.copy()
        moves[device.asarray(rest[coupled & ~held])] = True
    rest, held = rest[~coupled], held[~coupled]
    rest = rest[~(held & _coupled_by_mass(of_mass, rest, M.level.T.block_size))]
    return (_modes_of_nodes(M, mass, of_mass, rest, k) if rest.size else None), moves


def _modes_of_nodes(M: SmoothedAggregation, mass: Mass, of_mass: Any, unknowns: Matrix, k: int) -> UncoupledModes:
    """Return the lowest k modes of some unknowns that K couples with those of their own nodes only."""
    device, size = M.device, M.level.T.block_size
    if count := int(_coupled_by_mass(of_mass, unknowns, size).sum()):
        raise InputError(
            f"M couples {count:,} unknowns that K couples with no other, such as fixed ones: empty their rows and columns of M, "
            "or eliminate them from both"
        )
    nodes, first = np.unique(unknowns // size, return_index=True)
    found: list[tuple[float, Matrix, Matrix]] = []
    for node, block, own in zip(nodes, _blocks(M, nodes), np.split(unknowns, first[1:]), strict=True):
        places = own - node * size
        values, vectors = scipy.linalg.eigh(block[np.ix_(places, places)], of_mass[own][:, own].toarray())
        found += [(float(value), own, vector) for value, vector in zip(values, vectors.T, strict=True)]
    found = sorted(found, key=lambda of: of[0])[:k]
    X = np.zeros((mass.shape[0], len(found)))
    for number, (_, own, vector) in enumerate(found):
        X[own, number] = vector
    on_device = device.asarray(X)
    return UncoupledModes(np.array([value for value, *_ in found]), on_device, mass.apply(on_device))


def _blocks(M: SmoothedAggregation, nodes: Matrix) -> Matrix:
    """Return the diagonal blocks of K of some nodes, on the host."""
    return np.linalg.inv(M.device.to_host(M.level.diagonal.blocks[M.device.asarray(nodes)]))


def _coupled(K: Any, M: SmoothedAggregation, unknowns: Matrix) -> Matrix:
    """Return which of some unknowns K couples with other nodes."""
    device, size = M.device, M.level.T.block_size
    nodes, of_node = np.unique(unknowns // size, return_inverse=True)
    of_block = np.abs(_blocks(M, nodes)).sum(axis=2)[of_node, unknowns % size]
    sums = device.to_host(K.apply_absolute(device.xp.ones(K.shape[0]))[device.asarray(unknowns)])
    return np.asarray(sums - of_block > _COUPLED * np.finfo(K.dtype).eps * sums)


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
    return np.asarray(stiffnesses * np.median(masses[masses > 0]) > _HELD * M.level.scale * masses[unknowns])
