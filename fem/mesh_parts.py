"""Parts of the matrix of a mesh: the rows of some nodes, in the columns of the same nodes and in those of others."""

from __future__ import annotations

import numpy as np

from penstock.fem.element_matrix import ElementMatrix
from penstock.spmv import Array, BsrMatrix, InputError


def square_of(body: ElementMatrix, start: int, stop: int) -> ElementMatrix:
    """Return the rows of nodes ``start`` to ``stop`` in the columns of these: on a CPU bit for bit those of the whole matrix.

    It holds the elements of these nodes; further nodes of those are its ghost nodes.

    Raises
    ------
    InputError
        If there are no such nodes.
    """
    inside = _inside(body, start, stop)
    order = np.flatnonzero(inside.any(axis=1))
    corners = body.connectivity[order]
    ghosts = np.unique(corners[~inside[order]])
    place = np.empty(len(body.coordinates), dtype=np.int32)
    place[start:stop] = np.arange(stop - start)
    place[ghosts] = stop - start + np.arange(ghosts.size)
    return body.with_mesh(np.arange(start, stop), body.coordinates[ghosts], place[corners], order)


def coupling_of(body: ElementMatrix, start: int, stop: int) -> BsrMatrix:
    """Return the rows of nodes ``start`` to ``stop`` in the columns of all other nodes; columns are those of the whole matrix.

    Only the elements between these nodes and others are assembled, on the host; bits are those of the whole matrix.

    Raises
    ------
    InputError
        If there are no such nodes.
    """
    inside = _inside(body, start, stop)
    order = np.flatnonzero(inside.any(axis=1) & ~inside.all(axis=1))
    corners = body.connectivity[order]
    nodes, dof = np.unique(corners), body.dof
    own = (nodes >= start) & (nodes < stop)
    counts = np.zeros(stop - start, dtype=np.int64)
    columns, values = np.empty(0, dtype=np.int32), np.empty((0, dof, dof))
    if nodes.size:
        place = np.empty(len(body.coordinates), dtype=np.int32)
        place[nodes] = np.arange(nodes.size)
        between: BsrMatrix = body.with_mesh(nodes, body.ghosts, place[corners], order).matrix("bsr")  # type: ignore[assignment]
        row = np.repeat(np.arange(nodes.size), np.diff(between.row_offsets))
        wanted = own[row] & ~own[between.column_indices]
        counts = np.bincount(nodes[row[wanted]] - start, minlength=stop - start)
        columns, values = nodes[between.column_indices[wanted]].astype(np.int32), between.values[wanted]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    arrays = {"row_offsets": offsets, "column_indices": columns, "values": values}
    return BsrMatrix.from_arrays(((stop - start) * dof, body.shape[1]), np.float64, arrays, {})


def _inside(body: ElementMatrix, start: int, stop: int) -> Array:
    """Return which nodes of the elements are among some."""
    nodes = len(body.coordinates)
    if not 0 <= start < stop <= nodes:
        raise InputError(
            f"a part has one node or more of the nodes 0 to {nodes - 1}, not {start} to {stop}, without the last"
        )
    if len(body.ghosts):
        raise InputError("this is a part of a mesh already; take parts of the whole mesh")
    inside: Array = (body.connectivity >= start) & (body.connectivity < stop)
    return inside
