"""Sparse symmetric matrices made on a device: stencils on cubes, a power-law graph, a chain."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from penstock.spmv import Array, CsrMatrix, Device

__all__ = ["chain", "lower_blocks", "lower_triangle", "matrix_of", "permuted", "power_law", "stencil"]


def matrix_of(offsets: Array, indices: Array, values: Array, *, columns: int | None = None) -> CsrMatrix:
    """Return a CSR matrix of arrays on a device; square by default."""
    rows = len(offsets) - 1
    arrays = {"row_offsets": offsets, "column_indices": indices.astype(np.int32), "values": values}
    return CsrMatrix.from_arrays((rows, columns or rows), np.float64, arrays, {"lanes": 8})


def from_triplets(device: Device, n: int, rows: Array, columns: Array, values: Array) -> CsrMatrix:
    """Return a matrix of triplets without duplicates, in any order."""
    xp = device.xp
    order = xp.argsort(rows.astype(np.int64) * n + columns)
    offsets = xp.searchsorted(rows[order], xp.arange(n + 1)).astype(np.int64)
    return matrix_of(offsets, columns[order], values[order])


def stencil(device: Device, edge: int, points: int) -> CsrMatrix:
    """Return the 7- or 27-point Laplacian of a cube of nodes: ``points - 1`` on the diagonal, -1 beside it."""
    xp, n = device.xp, edge**3
    steps = [s for s in itertools.product((-1, 0, 1), repeat=3) if points == 27 or sum(map(abs, s)) <= 1]
    axis = xp.arange(edge)
    inside = xp.ones((edge, edge, edge, len(steps)), dtype=np.bool_)
    for number, step in enumerate(steps):
        for direction, by in enumerate(step):
            fits = (axis + by >= 0) & (axis + by < edge)
            inside[..., number] &= fits.reshape([edge if d == direction else 1 for d in range(3)])
    inside = inside.reshape(n, len(steps))
    shifts = xp.asarray([(step[0] * edge + step[1]) * edge + step[2] for step in steps], dtype=np.int32)
    offsets = xp.concatenate([xp.zeros(1, dtype=np.int64), xp.cumsum(xp.count_nonzero(inside, axis=1))])
    columns = (xp.arange(n, dtype=np.int32)[:, None] + shifts)[inside]
    values = xp.broadcast_to(xp.where(shifts == 0, points - 1.0, -1.0), inside.shape)[inside]
    return matrix_of(offsets, columns, values)


def power_law(device: Device, n: int, degree: int = 8, seed: int = 1) -> CsrMatrix:
    """Return the Laplacian, plus the identity, of a graph in which every node joins earlier ones, old ones most often."""
    xp, rng = device.xp, np.random.default_rng(seed)
    later = np.repeat(np.arange(1, n, dtype=np.int64), degree)
    earlier = (later * rng.random(later.size) ** 3).astype(np.int64)
    names = rng.permutation(n)
    later, earlier = device.asarray(names[later]), device.asarray(names[earlier])
    pairs = xp.unique(xp.concatenate([later * n + earlier, earlier * n + later]))
    pairs = pairs[pairs // n != pairs % n]
    rows, columns = pairs // n, pairs % n
    degrees = xp.bincount(rows, minlength=n).astype(np.float64)
    own = xp.arange(n, dtype=np.int64)
    values = xp.concatenate([xp.full(rows.size, -1.0), degrees + 1])
    return from_triplets(device, n, xp.concatenate([rows, own]), xp.concatenate([columns, own]), values)


def chain(device: Device, n: int) -> CsrMatrix:
    """Return a tridiagonal matrix."""
    xp = device.xp
    own = xp.arange(n, dtype=np.int64)
    rows, columns = xp.concatenate([own, own[1:], own[:-1]]), xp.concatenate([own, own[:-1], own[1:]])
    return from_triplets(device, n, rows, columns, xp.where(rows == columns, 2.0, -1.0))


def permuted(A: CsrMatrix, seed: int = 3) -> CsrMatrix:
    """Return the matrix with rows and columns in a random order."""
    rows, columns, values = A.triplets()
    names = A.device.asarray(np.random.default_rng(seed).permutation(A.shape[0]))
    return from_triplets(A.device, A.shape[0], names[rows], names[columns], values)


def lower_triangle(A: CsrMatrix) -> CsrMatrix:
    """Return the entries on and below the diagonal."""
    rows, columns, values = A.triplets()
    kept = columns <= rows
    offsets = A.device.xp.searchsorted(rows[kept], A.device.xp.arange(A.shape[0] + 1)).astype(np.int64)
    return matrix_of(offsets, columns[kept], values[kept])


def lower_blocks(A: Any) -> tuple[Any, Any]:
    """Return the scalar lower triangle of a BSR matrix on the host, in BSR and in SciPy's CSR."""
    rows = np.repeat(np.arange(len(A.row_offsets) - 1), np.diff(A.row_offsets))
    kept = A.column_indices <= rows
    values = A.values[kept]
    own = rows[kept] == A.column_indices[kept]
    values[own] = np.tril(values[own])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows[kept], minlength=len(A.row_offsets) - 1))])
    arrays = {"row_offsets": offsets.astype(np.int64), "column_indices": A.column_indices[kept], "values": values}
    blocks = type(A).from_arrays(A.shape, A.dtype, arrays, A.parameters())
    scalars = blocks.to_csr()
    scalars.eliminate_zeros()
    return blocks, scalars
