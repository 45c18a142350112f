"""Assembly that families share: elements of any kind, voxels of which some are missing, supports, loads and random fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse
from scipy import ndimage

from penstock.fem import LinearElasticity
from zoo.system import Array, Generator, System

__all__ = [
    "assembled",
    "body",
    "box",
    "connected",
    "gaussian_field",
    "largest_part",
    "supported",
    "voxel_matrix",
]

Law = Any  # what has `dof` and `stiffness(spacing)`


def assembled(elements: Array, blocks: Array, dof: int, nodes: int) -> scipy.sparse.csr_array:
    """Return the sum of element matrices.

    Parameters
    ----------
    elements : array of int, (elements, corners)
    blocks : array, (elements, corners * dof, corners * dof)
    dof, nodes : int
    """
    unknowns = (dof * elements[:, :, None] + np.arange(dof)).reshape(len(elements), -1)
    rows = np.repeat(unknowns, unknowns.shape[1], axis=1).ravel()
    columns = np.tile(unknowns, unknowns.shape[1]).ravel()
    return scipy.sparse.coo_array((blocks.ravel(), (rows, columns)), shape=2 * (dof * nodes,)).tocsr()


def box(size: float, proportions: Sequence[float] = (1, 1, 1), least: int = 2) -> tuple[int, ...]:
    """Return whole numbers in about these proportions whose product is about a size."""
    scale = (size / np.prod(proportions)) ** (1 / len(proportions))
    return tuple(max(least, round(scale * side)) for side in proportions)


def gaussian_field(shape: tuple[int, ...], width: float | Sequence[float], rng: Generator) -> Array:
    """Return smoothed white noise of mean 0 and variance 1; the width, in cells, is that of the smoothing."""
    field = ndimage.gaussian_filter(rng.standard_normal(shape), width, mode="wrap")
    return np.asarray((field - field.mean()) / field.std())


def largest_part(there: Array) -> Array:
    """Return where the largest part is of those cells that hang together by faces."""
    labels, _ = ndimage.label(there)
    counts = np.bincount(labels.ravel())
    counts[0] = 0
    return np.asarray(labels == counts.argmax())


def connected(elements: Array, nodes: int) -> Array:
    """Return whether each element is in the largest connected part of a mesh of lines between two nodes."""
    graph = scipy.sparse.coo_array((np.ones(len(elements)), elements.T), shape=(nodes, nodes))
    _, labels = scipy.sparse.csgraph.connected_components(graph, directed=False)
    return np.asarray(labels[elements[:, 0]] == np.bincount(labels).argmax())


def voxel_matrix(
    factors: Array, law: Law, spacing: Sequence[Any] = (1.0, 1.0, 1.0)
) -> tuple[scipy.sparse.csr_array, Array]:
    """Return the matrix of those 8-node hexahedra of a grid whose factor is positive, and the points of their nodes.

    Parameters
    ----------
    factors : array, (nx, ny, nz)
        Of the stiffness of each element; 0 where there is none.
    law : LinearElasticity or HeatConduction
    spacing : sequence of three floats or arrays
        Edges of the elements along each axis; an array has one for each layer.
    """
    edges = [np.broadcast_to(np.asarray(of, float), count) for of, count in zip(spacing, factors.shape, strict=True)]
    cells = np.argwhere(factors > 0)
    counts = np.array(factors.shape) + 1
    corners = np.stack(np.meshgrid(*3 * [[0, 1]], indexing="ij"), axis=-1).reshape(-1, 3)
    numbers = np.ravel_multi_index(tuple(np.moveaxis(cells[:, None] + corners, -1, 0)), tuple(counts))
    used, elements = np.unique(numbers, return_inverse=True)
    widths = np.stack([of[cells[:, axis]] for axis, of in enumerate(edges)], axis=1)
    kinds, kind = np.unique(widths, axis=0, return_inverse=True)
    stiffness = np.stack([law.stiffness(tuple(of)) for of in kinds])
    blocks = factors[tuple(cells.T)][:, None, None] * stiffness[kind.ravel()]
    places = np.unravel_index(used, tuple(counts))
    points = [np.concatenate([[0.0], np.cumsum(of)])[place] for of, place in zip(edges, places, strict=True)]
    A = assembled(elements.reshape(numbers.shape), blocks, law.dof, len(used))
    return A, np.stack(points, axis=1)


def supported(A: Any, b: Array, held: Array) -> tuple[scipy.sparse.csr_array, Array]:
    """Return the system without the unknowns that are held at zero."""
    free = np.flatnonzero(~held)
    return scipy.sparse.csr_array(A)[free][:, free], b[free]


def body(factors: Array, *, law: Law | None = None, spacing: Sequence[Any] = (1.0, 1.0, 1.0), axis: int = 2) -> System:
    """Return voxels that are clamped at one end of an axis and loaded at the other, down and a little sideways."""
    law = law or LinearElasticity()
    A, points = voxel_matrix(factors, law, spacing)
    along = points[:, axis]
    b = np.zeros((len(points), law.dof))
    b[along == along.max()] = (0.1, 0.03, -1.0) if law.dof == 3 else 1.0
    clamped = along == along.min()
    A, b = supported(A, b.ravel(), np.repeat(clamped, law.dof))
    return System(A, b, coordinates=points[~clamped])
