"""Coordinates of the nodes of a structured mesh, which are known by those along its axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


class GridPoints:
    """Coordinates of the nodes of a structured mesh; the last axis varies fastest.

    NumPy makes an array ``(nodes, dimensions)`` of it, which takes 8 bytes for each number; this takes a few kilobytes.

    Parameters
    ----------
    axes : sequence of array
        The coordinates along each axis.

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.solvers.amg.grid_points import GridPoints
    >>> points = GridPoints([np.array([0.0, 1.0]), np.array([0.0, 0.5, 1.0])])
    >>> points.shape, np.asarray(points)[1].tolist(), points.centred().axes[0].tolist()
    ((6, 2), [0.0, 0.5], [-0.5, 0.5])
    """

    def __init__(self, axes: Sequence[Any]) -> None:
        self.axes = tuple(np.asarray(axis, dtype=np.float64) for axis in axes)
        #: Nodes along each axis.
        self.counts = tuple(len(axis) for axis in self.axes)
        self.shape = (math.prod(self.counts), len(self.axes))

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the coordinates of all nodes."""
        points = np.stack(np.meshgrid(*self.axes, indexing="ij"), axis=-1).reshape(self.shape)
        return points.astype(dtype or np.float64, copy=False)

    def centred(self) -> GridPoints:
        """Return the coordinates relative to their mean."""
        return GridPoints([axis - axis.mean() for axis in self.axes])
