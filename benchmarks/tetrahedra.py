"""Elasticity on linear tetrahedra, as unstructured meshes have it: a clamped box whose inner nodes are moved at random."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import scipy.sparse

__all__ = ["TetrahedralBox"]

Array = np.ndarray[Any, Any]


class TetrahedralBox:
    """A unit cube of ``nodes`` nodes a side, six tetrahedra a cell, clamped at x = 0; its stiffness depends on moduli."""

    def __init__(self, nodes: int, seed: int = 1) -> None:
        rng, sides = np.random.default_rng(seed), np.arange(nodes)
        grid = np.stack(np.meshgrid(sides, sides, sides, indexing="ij"), axis=-1).reshape(-1, 3)
        inner = ((grid > 0) & (grid < nodes - 1)).all(axis=1)
        points = grid + 0.2 * rng.uniform(-1, 1, grid.shape) * inner[:, None]
        self._elements, self._all_points = _tetrahedra(nodes), points / (nodes - 1)
        self._gradients, self._volumes = _gradients(self._all_points[self._elements])
        free = grid[:, 0] > 0
        self.points = self._all_points[free]
        self._numbers = np.where(free, np.cumsum(free) - 1, -1)
        self.unknowns = 3 * int(free.sum())
        self.elements = len(self._elements)

    def centres(self) -> Array:
        """Return the centre of each element, (elements, 3)."""
        return self._all_points[self._elements].mean(axis=1)

    def stiffness(self, moduli: Array) -> scipy.sparse.csr_array:
        """Return the matrix for a Young's modulus of each element; Poisson's ratio is 0.3. The pattern is always the same."""
        ratio = 0.3
        lame, shear = ratio / ((1 + ratio) * (1 - 2 * ratio)), 1 / (2 * (1 + ratio))
        of, weights = self._gradients, self._volumes * moduli
        dots = np.einsum("eai,ebi->eab", of, of)
        blocks = lame * np.einsum("eai,ebj->eabij", of, of) + shear * np.einsum("eaj,ebi->eabij", of, of)
        blocks += shear * dots[..., None, None] * np.eye(3)
        blocks *= weights[:, None, None, None, None]
        numbers = self._numbers[self._elements]
        unknowns = 3 * numbers[:, :, None] + np.arange(3)
        shape = (len(numbers), 4, 4, 3, 3)
        rows = np.broadcast_to(unknowns[:, :, None, :, None], shape)
        columns = np.broadcast_to(unknowns[:, None, :, None, :], shape)
        keep = np.broadcast_to((numbers[:, :, None] >= 0) & (numbers[:, None, :] >= 0), shape[:3]).reshape(-1)
        keep = np.repeat(keep, 9)
        entries = (blocks.reshape(-1)[keep], (rows.reshape(-1)[keep], columns.reshape(-1)[keep]))
        A = scipy.sparse.coo_array(entries, shape=(self.unknowns, self.unknowns)).tocsr()
        A.sum_duplicates()
        return A


def _tetrahedra(nodes: int) -> Array:
    """Return six tetrahedra for each cell of a grid, along its diagonal."""
    strides = np.array([nodes * nodes, nodes, 1])
    cells = np.arange(nodes**3).reshape((nodes,) * 3)[:-1, :-1, :-1].reshape(-1)
    found = []
    for order in itertools.permutations(range(3)):
        corners = np.concatenate([[0], np.cumsum(strides[list(order)])])
        found.append(cells[:, None] + corners)
    return np.concatenate(found)


def _gradients(corners: Array) -> tuple[Array, Array]:
    """Return the gradients of the four linear functions of each tetrahedron, and the volumes."""
    edges = corners[:, 1:] - corners[:, :1]
    inverse = np.linalg.inv(edges)
    others = np.swapaxes(inverse, 1, 2)
    return np.concatenate([-others.sum(axis=1, keepdims=True), others], axis=1), np.abs(np.linalg.det(edges)) / 6
