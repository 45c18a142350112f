"""Generated matrices of lattices, and of rows or columns that are full."""

import itertools

import numpy as np
import scipy.sparse
from csr_arrays import Array, Generator, csr_of, row_offsets_of, scaled

__all__ = ["arrow", "dense", "fem_shell", "full_row", "lattice4d", "stencil5", "stencil7", "stencil27"]


def stencil5(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """5 points in 2-D."""
    return csr_of(rng, *_lattice((725, 725), scale, _cross(2)))


def stencil7(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """7 points in 3-D."""
    return csr_of(rng, *_lattice((126, 126, 126), scale, _cross(3)))


def stencil27(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """27 points in 3-D."""
    return csr_of(rng, *_lattice((96, 96, 96), scale, _box(3)))


def fem_shell(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Bilinear shell elements: 9 nodes around each node, 6 unknowns a node."""
    lengths, nodes = _lattice((191, 190), scale, _box(2))
    blocks = rng.uniform(-1, 1, (nodes.size, 6, 6))
    return scipy.sparse.bsr_array((blocks, nodes, row_offsets_of(lengths)), shape=2 * (6 * lengths.size,)).tocsr()


def lattice4d(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Wilson's hopping matrix of lattice QCD on a periodic 4-D lattice: 4 spins and 3 colours a site, no diagonal.

    A spatial neighbour couples two of its spins to each spin here, ``1 +- gamma``; in time ``1 +- gamma`` is a
    projection in the usual basis, so that a spin sees only one of the two neighbours: 6 * 2 + 1 = 13 times 3 colours.
    """
    extent = max(3, round(8 * scale**0.25))
    sites = np.arange(extent**4, dtype=np.int32).reshape(4 * (extent,))
    partners = ((3, 2, 1, 0), (3, 2, 1, 0), (2, 3, 0, 1))

    def neighbour(axis: int, step: int, spin: int) -> Array:
        return np.roll(sites, step, axis).ravel() * 4 + spin

    coupled = [
        [
            neighbour(axis, step, other)
            for axis in range(3)
            for step in (-1, 1)
            for other in (spin, partners[axis][spin])
        ]
        + [neighbour(3, -1 if spin < 2 else 1, spin)]
        for spin in range(4)
    ]
    spins: Array = np.sort(np.array(coupled).transpose(2, 0, 1).reshape(-1, 13), axis=1)
    columns = np.repeat((spins[:, :, None] * 3 + np.arange(3, dtype=np.int32)).reshape(-1, 39), 3, axis=0)
    return csr_of(rng, np.full(len(columns), 39), columns.ravel())


def _lattice(extents: tuple[int, ...], scale: float, offsets: list[tuple[int, ...]]) -> tuple[Array, Array]:
    """Return the row lengths and columns of a lattice without wrap-around; offsets ascend, and so do the columns."""
    extents = tuple(max(2, round(extent * scale ** (1 / len(extents)))) for extent in extents)
    points = np.indices(extents, dtype=np.int32).reshape(len(extents), -1)
    strides = [int(np.prod(extents[axis + 1 :])) for axis in range(len(extents))]
    rows = np.arange(points.shape[1], dtype=np.int32)
    columns = np.empty((rows.size, len(offsets)), np.int32)
    inside = np.ones(columns.shape, bool)
    for place, offset in enumerate(offsets):
        columns[:, place] = rows + np.dot(strides, offset)
        for point, extent, step in zip(points, extents, offset, strict=True):
            if step:
                inside[:, place] &= point != (0 if step < 0 else extent - 1)
    return inside.sum(axis=1), columns[inside]


def _box(dimensions: int) -> list[tuple[int, ...]]:
    return list(itertools.product((-1, 0, 1), repeat=dimensions))


def _cross(dimensions: int) -> list[tuple[int, ...]]:
    return [offset for offset in _box(dimensions) if np.count_nonzero(offset) <= 1]


# Matrices with full rows


def dense(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Every entry stored."""
    rows = scaled(2_000, scale)
    return csr_of(rng, np.full(rows, rows), np.tile(np.arange(rows), rows))


def full_row(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """Tridiagonal but for the row in the middle, which is full."""
    lengths, columns = _lattice((1_000_000,), scale, _cross(1))
    rows = lengths.size
    start, stop = row_offsets_of(lengths)[[rows // 2, rows // 2 + 1]]
    lengths[rows // 2] = rows
    return csr_of(rng, lengths, np.concatenate([columns[:start], np.arange(rows), columns[stop:]]))


def arrow(rng: Generator, scale: float = 1.0) -> scipy.sparse.csr_array:
    """First row, first column and diagonal."""
    rows = scaled(1_000_000, scale)
    lengths = np.full(rows, 2)
    lengths[0] = rows
    pairs = np.zeros((rows - 1, 2), np.int32)
    pairs[:, 1] = np.arange(1, rows)
    return csr_of(rng, lengths, np.concatenate([np.arange(rows), pairs.ravel()]))
