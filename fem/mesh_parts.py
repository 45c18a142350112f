"""Parts of the matrix of a mesh: the rows of some nodes, in the columns of the same nodes and in those of others."""

from __future__ import annotations

import numpy as np

from penstock.fem.element_matrix import ElementMatrix
from penstock.spmv import Array, BsrMatrix, InputError


def square_of(body: ElementMatrix, start: int, stop: int) -> ElementMatrix:
    """Return the rows of nodes ``start`` to ``stop`` in the columns of these: bit for bit those of the whole matrix.

    It holds the elements that these nodes have, and the coordinates of other nodes of those elements as its border.

    Raises
    ------
    InputError
        If there are no such nodes.
    """
    inside = _inside(body, start, stop)
    order = np.flatnonzero(inside.any(axis=1))
    corners = body.connectivity[order]
    border = np.unique(corners[~inside[order]])
    place = np.empty(len(body.coordinates), dtype=np.int32)
    place[start:stop] = np.arange(stop - start)
    place[border] = stop - start + np.arange(border.size)
    return body.with_mesh(slice(start, stop), body.coordinates[border], place[corners], order)


def coupling_of(body: ElementMatrix, start: int, stop: int) -> BsrMatrix:
    """Return the rows of nodes ``start`` to ``stop`` in the columns of all other nodes; columns are those of the whole matrix.

    Only the elements between these nodes and others are assembled, on the host; bits are those of the whole matrix.
    """
    inside = _inside(body, start, stop)
    order = np.flatnonzero(inside.any(axis=1) & ~inside.all(axis=1))
    corners = body.connectivity[order]
    nodes, dof = np.unique(corners), body.dof
    shape, own = ((stop - start) * dof, body.shape[1]), (nodes >= start) & (nodes < stop)
    counts, columns, values = np.zeros(stop - start, dtype=np.int64), np.empty(0, np.int32), np.empty((0, dof, dof))
    if nodes.size:
        place = np.empty(len(body.coordinates), dtype=np.int32)
        place[nodes] = np.arange(nodes.size)
        between: BsrMatrix = body.with_mesh(nodes, body.border, place[corners], order).matrix("bsr")  # type: ignore[assignment]
        row = np.repeat(np.arange(nodes.size), np.diff(between.row_offsets))
        wanted = own[row] & ~own[between.column_indices]
        np.add.at(counts, nodes[row[wanted]] - start, 1)
        columns, values = nodes[between.column_indices[wanted]].astype(np.int32), between.values[wanted]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    arrays = {"row_offsets": offsets, "column_indices": columns, "values": values}
    return BsrMatrix.from_arrays(shape, np.float64, arrays, {})


def _inside(body: ElementMatrix, start: int, stop: int) -> Array:
    """Return which nodes of the elements are among some."""
    nodes = len(body.coordinates)
    if not 0 <= start < stop <= nodes:
        raise InputError(f"a part has nodes from 0 to {nodes}, one at least, not {start} to {stop}")
    if len(body.border):
        raise InputError("this is a part of a mesh already; take parts of the whole mesh")
    inside: Array = (body.connectivity >= start) & (body.connectivity < stop)
    return inside
