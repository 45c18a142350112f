"""Tells from some rows of a matrix whether nodes alone are too small for its coarse level."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.solvers.preconditioners import DiagonalBlocks
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

    def shows_need(self, diagonal: DiagonalBlocks) -> bool:
        """Return whether many nodes cannot be smoothed alone, from the inverses of the diagonal blocks of all nodes.

        Elements are flat, or nodes are tied there. Unknowns that couple with no other do not count. Where coefficients jump
        between cells, nodes alone often suffice: iterations tell.
        """
        rows, columns, blocks = (np.concatenate([part[k] for part in self._taken]) for k in range(3))
        coupled = (rows != columns) & (np.abs(blocks).max(axis=(1, 2), initial=0.0) > 0)
        rows, columns, blocks = rows[coupled], columns[coupled], blocks[coupled]
        if not len(rows):
            return False
        # Of all nodes that take part, few among many, the diagonal blocks themselves.
        nodes, place = np.unique(np.concatenate([rows, columns]), return_inverse=True)
        rows, columns = np.split(place.reshape(-1), 2)
        own = np.linalg.inv(diagonal.device.to_host(diagonal.blocks[diagonal.device.asarray(nodes)]))
        scales = 1.0 / np.sqrt(np.einsum("nii->ni", own))
        scaled = blocks * scales[rows][:, :, None] * scales[columns][:, None, :]
        strong = np.sqrt((scaled**2).sum(axis=(1, 2)) / self._size) > _STRONG
        looked_at = np.unique(rows)
        alike = min(self._size, _ALIKE)  # rotations, which follow them, have other units
        values = np.linalg.eigvalsh(own[looked_at][:, :alike, :alike])
        shares = len(np.unique(rows[strong])) / len(looked_at), float((values[:, -1] > _UNLIKE * values[:, 0]).mean())
        return max(shares) > _SHARE
