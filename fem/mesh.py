"""Structured mesh of a box with 8-node hexahedra; counts and neighbours have closed forms."""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from penstock.spmv import InputError


def _numbers(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Convert a number, or a sequence to a tuple of numbers; return an empty tuple if any of them is invalid."""
    try:
        numbers = tuple(value) if np.iterable(value) else (value,)
        if any(isinstance(number, bool | str) for number in numbers):
            return ()
        converted = tuple(convert(number) for number in numbers)
    except (TypeError, ValueError):
        return ()
    return converted if np.iterable(value) else converted[0]


@dataclass(frozen=True)
class BoxMesh:
    """A structured mesh of the box ``[0, Lx] x [0, Ly] x [0, Lz]``.

    Parameters
    ----------
    nodes : int or (int, int, int)
        Nodes along each side, at least 2; one number for a cube.
    lengths : float or (float, float, float)
        Side lengths; one number is the length along x, and all elements are cubes.

    Raises
    ------
    InputError
        If a number of nodes is below 2 or not whole, or a length is not positive.

    Notes
    -----
    Nodes are numbered ``(ix * ny + iy) * nz + iz``, so planes of constant x are contiguous and a node couples
    only with nodes of its own and the two neighbouring planes.

    Examples
    --------
    >>> from penstock.fem import BoxMesh
    >>> mesh = BoxMesh(nodes=(5, 3, 2), lengths=2.0)
    >>> mesh.node_count, mesh.side_lengths, mesh.coordinates()[-1].tolist()
    (30, (2.0, 1.0, 0.5), [2.0, 1.0, 0.5])
    """

    nodes: int | tuple[int, int, int]
    lengths: float | tuple[float, float, float] = 1.0

    def __post_init__(self) -> None:
        nodes = _numbers(self.nodes, operator.index)
        nodes = nodes if isinstance(nodes, tuple) else (nodes,) * 3
        if len(nodes) != 3 or min(nodes) < 2:
            raise InputError(f"nodes must be one or three whole numbers of at least 2, not {self.nodes!r}")
        lengths = _numbers(self.lengths, float)
        if not isinstance(lengths, tuple):
            edge = lengths / (nodes[0] - 1)
            lengths = tuple(edge * (count - 1) for count in nodes)
        if len(lengths) != 3 or not all(np.isfinite(lengths)) or min(lengths) <= 0:
            raise InputError(f"lengths must be one or three positive numbers, not {self.lengths!r}")
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "lengths", lengths)

    def of_planes(self, planes: slice) -> Self:
        """Return the mesh of some planes of nodes across the x axis, two or more, numbered from the first one on."""
        count, (edge, *_), (_, *across) = planes.stop - planes.start, self.spacing, self.side_lengths
        return type(self)((count, *self.node_counts[1:]), (edge * (count - 1), *across))

    @property
    def node_counts(self) -> tuple[int, int, int]:
        """Nodes along x, y and z."""
        return self.nodes  # type: ignore[return-value]

    @property
    def side_lengths(self) -> tuple[float, float, float]:
        """Lengths along x, y and z."""
        return self.lengths  # type: ignore[return-value]

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Edge lengths of an element."""
        x, y, z = (length / (count - 1) for length, count in zip(self.side_lengths, self.node_counts, strict=True))
        return x, y, z

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return math.prod(self.node_counts)

    @property
    def element_counts(self) -> tuple[int, int, int]:
        """Elements along x, y and z."""
        x, y, z = (count - 1 for count in self.node_counts)
        return x, y, z

    @property
    def connections(self) -> int:
        """Number of ordered pairs of nodes that share an element, including each node with itself: the blocks of the matrix."""
        return math.prod(_connections_along(count, count) for count in self.node_counts)

    def connections_before(self, node: int) -> int:
        """Count the connections of all nodes before ``node`` (0 to ``node_count``), without listing them."""
        nx, ny, nz = self.node_counts
        line = _connections_along(nz, nz)
        plane = _connections_along(ny, ny) * line
        ix, rest = divmod(node, ny * nz)
        iy, iz = divmod(rest, nz)
        count = _connections_along(nx, ix) * plane
        if ix < nx:
            in_plane = _connections_along(ny, iy) * line + _neighbours_along(ny, iy) * _connections_along(nz, iz)
            count += _neighbours_along(nx, ix) * in_plane
        return count

    def cut(self, parts: int) -> list[int]:
        """Cut the nodes into contiguous parts of nearly equal numbers of connections.

        If all parts can have the same number of planes of constant x, they do; a part then couples only with its neighbours.

        Parameters
        ----------
        parts : int
            1 to ``node_count``.

        Returns
        -------
        list of int
            ``parts + 1`` node numbers from 0 to ``node_count``, never descending; with nearly one part per node, some
            parts are empty.
        """
        if not 1 <= parts <= self.node_count:
            raise InputError(f"cannot cut {self.node_count} nodes into {parts} parts")
        if self.node_counts[0] % parts == 0:
            return list(range(0, self.node_count + 1, self.node_count // parts))
        nodes = range(self.node_count + 1)
        targets = (self.connections * part // parts for part in range(parts))
        bounds = [bisect.bisect_left(nodes, target, key=self.connections_before) for target in targets]
        return [*bounds, self.node_count]

    def last_neighbour(self, start: int, stop: int) -> int:
        """Return the last neighbour of the nodes from start to stop; ``start - 1`` if there are no nodes."""
        if stop <= start:
            return start - 1
        nx, ny, nz = self.node_counts

        def last_of(node: int) -> int:
            ix, (iy, iz) = node // (ny * nz), divmod(node % (ny * nz), nz)
            return (min(ix + 1, nx - 1) * ny + min(iy + 1, ny - 1)) * nz + min(iz + 1, nz - 1)

        # The last node of the previous line, or of the previous plane, may have a later neighbour than the last node.
        ends = ((stop - 1) // length * length - 1 for length in (nz, ny * nz))
        return max(last_of(node) for node in (stop - 1, *(max(start, end) for end in ends)))

    def connectivity(self) -> np.ndarray[Any, Any]:
        """Return the nodes of every element, ``(elements, 8)`` int32, in the order of VTK, meshio and gmsh."""
        nx, ny, nz = self.node_counts
        first = np.arange(nx * ny * nz, dtype=np.int32).reshape(nx, ny, nz)[:-1, :-1, :-1].reshape(-1, 1)
        return first + np.array([(x * ny + y) * nz + z for x, y, z in _AROUND], dtype=np.int32)

    def axes(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Return the coordinates of the nodes along each axis, float64."""
        sides = zip(self.side_lengths, self.node_counts, strict=True)
        return tuple(np.linspace(0, length, count) for length, count in sides)

    def coordinates(self, planes: slice | None = None) -> np.ndarray[Any, Any]:
        """Return the coordinates of all nodes, or of those of some planes across the x axis, ``(nodes, 3)`` float64."""
        along, *across = self.axes()
        axes = (along if planes is None else along[planes], *across)
        return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)


#: Of the corners of an element, in the order of VTK and gmsh, the steps along x, y and z.
_AROUND = ((0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1))


def _connections_along(count: int, before: int) -> int:
    """Count the connections of the first ``before`` of ``count`` nodes of a line: 2 for each end, 3 inside."""
    return max(3 * before - 1, 0) - (before == count)


def _neighbours_along(count: int, node: int) -> int:
    return _connections_along(count, node + 1) - _connections_along(count, node)
