"""The tentative prolongator T: on each aggregate an orthonormal basis of the near-null space."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from penstock.solvers.coarse.aggregates import Aggregates
from penstock.solvers.coarse.block_products import SERIAL_ROWS
from penstock.spmv import Array, CsrMatrix, Device, InputError
from penstock.spmv.compilation.jit import serial_and_parallel

__all__ = ["Tentative", "rigid_body_modes"]

# A mode whose part that is new on an aggregate is smaller than this share of it adds nothing there.
_DEPENDENT = 1e-6


def rigid_body_modes(coordinates: np.ndarray[Any, Any], block_size: int) -> np.ndarray[Any, Any]:
    """Return the rigid motions of nodes: 3 in a plane, 6 in space, constants for one unknown a node.

    Parameters
    ----------
    coordinates : array, (nodes, 2) or (nodes, 3)
    block_size : int
        Unknowns a node: 1; displacements (2 or 3); displacements and rotations (3 in a plane, 6 in space).

    Returns
    -------
    array, (nodes * block_size, modes)

    Raises
    ------
    InputError
        If no body has such unknowns.
    """
    nodes, dimensions = coordinates.shape
    if block_size == 1:
        return np.ones((nodes, 1))
    if (dimensions, block_size) not in {(2, 2), (2, 3), (3, 3), (3, 6)}:
        raise InputError(
            f"no rigid body motions are known for {block_size} unknowns a node in {dimensions} dimensions; give near_null_space"
        )
    x = np.zeros((nodes, 3))
    x[:, :dimensions] = coordinates - coordinates.mean(axis=0)
    axes = [2] if dimensions == 2 else [0, 1, 2]
    modes = np.zeros((nodes, block_size, dimensions + len(axes)))
    modes[:, range(dimensions), range(dimensions)] = 1.0
    for number, axis in enumerate(axes, start=dimensions):
        first, second = (axis + 1) % 3, (axis + 2) % 3
        modes[:, first, number] = -x[:, second]
        modes[:, second, number] = x[:, first]
        if block_size > dimensions:
            modes[:, number, number] = 1.0  # the rotation itself
    return modes.reshape(nodes * block_size, -1)


class Tentative:
    """T, of one block ``(block_size, modes)`` for each node, as two sparse matrices: T and its transpose.

    Parameters
    ----------
    candidates : array, (n, modes)
        The near-null space; on the host.
    free : bool array, (n,)
        False at unknowns that the coarse level leaves out, such as clamped ones.
    aggregates : Aggregates
    block_size : int
        Unknowns a node.
    device : Device

    Attributes
    ----------
    modes, unknowns : int
        Columns for each aggregate, and columns of T.
    candidates : array, (unknowns, modes)
        ``T^T`` times the given ones: the near-null space of the coarse level.
    missing : bool array, (unknowns,)
        Columns that vanish: a single node has three rigid motions, clamped nodes have none.
    """

    def __init__(
        self,
        candidates: np.ndarray[Any, Any],
        free: np.ndarray[Any, Any],
        aggregates: Aggregates,
        block_size: int,
        device: Device,
    ) -> None:
        self.aggregates, self.modes = aggregates, int(candidates.shape[1])
        self.unknowns = aggregates.count * self.modes
        offsets, order = aggregates.members()
        basis = np.empty(candidates.shape)
        coarse = np.zeros((aggregates.count, self.modes, self.modes))
        many = len(order) > SERIAL_ROWS
        _orthonormalise[many](
            offsets, order, block_size, np.ascontiguousarray(candidates, dtype=np.float64), free, basis, coarse
        )
        self.basis = basis
        self.candidates = coarse.reshape(self.unknowns, self.modes)
        self.missing = np.einsum("aii->ai", coarse).reshape(-1) == 0.0
        self._down, self._up = _transfers(offsets, order, basis, aggregates.of_node, block_size, device)

    @property
    def nbytes(self) -> int:
        """Bytes of both matrices."""
        return self._down.nbytes + self._up.nbytes

    def prolong(self, coarse: Array, out: Array) -> None:
        """Set ``out = T coarse``, a vector or a block of vectors."""
        self._down._apply(coarse, out, 1.0, 0.0)

    def restrict(self, fine: Array, out: Array) -> None:
        """Set ``out = T^T fine``, a vector or a block of vectors."""
        self._up._apply(fine, out, 1.0, 0.0)


def _transfers(
    offsets: Array, order: Array, basis: Array, of_node: Array, size: int, device: Device
) -> tuple[CsrMatrix, CsrMatrix]:
    """Return T and its transpose, whose rows hold one mode on the nodes of an aggregate."""
    xp, (rows, modes), count = device.xp, basis.shape, len(offsets) - 1
    values, aggregate = xp.asarray(basis), xp.asarray(of_node)
    columns = xp.repeat(aggregate * np.int32(modes), size)[:, None] + xp.arange(modes, dtype=np.int32)
    down = _csr((rows, count * modes), xp.arange(rows + 1) * modes, columns, values)
    # The unknowns of an aggregate follow each other, once for each of its modes.
    spans, starts = np.diff(offsets) * size, offsets[:-1] * size
    entries = np.concatenate([[0], np.cumsum(np.repeat(spans, modes))])
    members = (xp.asarray(order)[:, None] * size + xp.arange(size)).reshape(-1)
    of_member = xp.repeat(aggregate[xp.asarray(order)], size)
    first, span = xp.asarray(starts)[of_member], xp.asarray(spans)[of_member]
    place = first * (modes - 1) + xp.arange(rows)  # of the first mode
    by_mode, of_rows = xp.empty(rows * modes), xp.empty(rows * modes, dtype=np.int32)
    for mode in range(modes):
        by_mode[place + mode * span] = values[members, mode]
        of_rows[place + mode * span] = members
    return down, _csr((count * modes, rows), xp.asarray(entries), of_rows, by_mode)


def _csr(shape: tuple[int, int], offsets: Array, columns: Array, values: Array) -> CsrMatrix:
    arrays = {"row_offsets": offsets, "column_indices": columns.reshape(-1), "values": values.reshape(-1)}
    return CsrMatrix.from_csr(CsrMatrix.from_arrays(shape, np.float64, arrays, {}), check=False)


@serial_and_parallel
def _orthonormalise(
    offsets: Array, order: Array, block_size: int, candidates: Array, free: Array, basis: Array, coarse: Array
) -> None:
    """Gram and Schmidt's algorithm, twice, on every aggregate (Golub and Van Loan 2013, section 5.2.9)."""
    modes = candidates.shape[1]
    for aggregate in prange(offsets.shape[0] - 1):
        nodes = order[offsets[aggregate] : offsets[aggregate + 1]]
        count = nodes.shape[0] * block_size
        local, given = np.empty((modes, count)), 0.0
        for place in range(nodes.shape[0]):
            for unknown in range(block_size):
                row = nodes[place] * block_size + unknown
                for mode in range(modes):
                    local[mode, place * block_size + unknown] = candidates[row, mode] if free[row] else 0.0
        for mode in range(modes):
            given = 0.0
            for i in range(count):
                given += local[mode, i] * local[mode, i]
            for _ in range(2):
                for earlier in range(mode):
                    product = 0.0
                    for i in range(count):
                        product += local[mode, i] * local[earlier, i]
                    coarse[aggregate, earlier, mode] += product
                    for i in range(count):
                        local[mode, i] -= product * local[earlier, i]
            square = 0.0
            for i in range(count):
                square += local[mode, i] * local[mode, i]
            if square <= _DEPENDENT * _DEPENDENT * given or square == 0.0:
                for i in range(count):
                    local[mode, i] = 0.0
            else:
                norm = np.sqrt(square)
                coarse[aggregate, mode, mode] = norm
                for i in range(count):
                    local[mode, i] /= norm
        for place in range(nodes.shape[0]):
            for unknown in range(block_size):
                for mode in range(modes):
                    basis[nodes[place] * block_size + unknown, mode] = local[mode, place * block_size + unknown]
