"""Tells from some rows of a matrix whether nodes alone are too small for its coarse level."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.spmv import SparseMatrix, SweptOperator
from penstock.spmv.products.completion import node_blocks

# Nodes that are looked at in all, about, and places of a matrix in memory at which they are.
_NODES, _PLACES = 20_000, 16
# A node cannot be smoothed alone if a block that couples it is so large beside the diagonal, or if the eigenvalues of its own
# diagonal block differ by this factor; and the share of such nodes from which groups are worth while.
_STRONG, _UNLIKE, _SHARE = 0.35, 30.0, 0.05
# Unknowns of a node that may be compared: its displacements.
_ALIKE = 3


class CouplingSample:
    """Some nodes of a matrix of nodes of ``size`` unknowns and their couplings, taken while its slabs pass."""

    def __init__(self, A: SparseMatrix | SweptOperator, size: int) -> None:
        self._A, self._size = A, size
        self._taken: list[tuple[np.ndarray[Any, Any], ...]] = []
        bounds = A.row_bounds if isinstance(A, SweptOperator) else None
        self._nodes = max(1, _NODES // (_PLACES if bounds is None else len(bounds)))

    def take(self, first_row: int, slab: SparseMatrix) -> None:
        """Take the couplings of the first nodes of a slab."""
        step = math.lcm(slab.row_granularity, self._size)
        rows = min(slab.shape[0], -(-self._nodes * self._size // step) * step)
        taken = node_blocks(slab.rows(0, rows), first_row, self._size)
        self._taken.append(tuple(map(slab.device.to_host, taken)))

    def take_places(self) -> None:
        """Take nodes from several places of a matrix in memory."""
        A = self._A
        assert isinstance(A, SparseMatrix)
        step = math.lcm(A.row_granularity, self._size)
        for start in sorted({A.shape[0] * place // _PLACES // step * step for place in range(_PLACES)}):
            if start < A.shape[0]:
                self.take(start, A.rows(start, A.shape[0]))

    def shows_need(self, diagonal_blocks: np.ndarray[Any, Any]) -> bool:
        """Return whether many nodes cannot be smoothed alone, from the inverse diagonal blocks of all nodes, on the host.

        Elements are flat, or nodes are tied there. Unknowns that couple with no other do not count. Where coefficients jump
        between cells, nodes alone often suffice: iterations tell.
        """
        rows, columns, blocks = (np.concatenate([part[k] for part in self._taken]) for k in range(3))
        coupled = (rows != columns) & (np.abs(blocks).max(axis=(1, 2), initial=0.0) > 0)
        rows, columns, blocks = rows[coupled], columns[coupled], blocks[coupled]
        if not len(rows):
            return False
        nodes, place = np.unique(rows, return_inverse=True)
        scales = 1.0 / np.sqrt(np.einsum("nii->ni", np.linalg.inv(diagonal_blocks)))
        norms = np.sqrt(
            ((blocks * scales[rows][:, :, None] * scales[columns][:, None, :]) ** 2).sum(axis=(1, 2)) / self._size
        )
        alike = min(self._size, _ALIKE)  # rotations, which follow them, have other units
        values = np.linalg.eigvalsh(np.linalg.inv(diagonal_blocks[nodes])[:, :alike, :alike])
        signs = (
            _any(place, norms > _STRONG, len(nodes)),
            values[:, -1] > _UNLIKE * values[:, 0],
        )
        return max(float(sign.mean()) for sign in signs) > _SHARE


def _any(place: np.ndarray[Any, Any], chosen: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    return np.bincount(place[chosen], minlength=count) > 0
