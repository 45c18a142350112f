"""Matrices with the memory accesses of 3-D elasticity, built quickly: for measuring rates and compiling kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.spmv import BsrMatrix, InputError, SlicedBsrMatrix, SparseMatrix, SymmetricBsrMatrix
from penstock.spmv.formats.sliced_bsr import HEIGHT


def stencil_matrix(side: int, format_name: str, *, block_size: int = 3, xp: Any = np) -> SparseMatrix:
    """Return a matrix of ``side^3`` nodes, each coupled with its 26 neighbours by dense blocks of random values.

    Nodes at the sides are coupled with those of the next line: products need the same time as on a box mesh.
    """
    steps = (-1, 0, 1)
    offsets = sorted({(x * side + y) * side + z for x in steps for y in steps for z in steps})
    if format_name == "symmetric_bsr":
        offsets = [offset for offset in offsets if offset >= 0]
    nodes, scalars = side**3, block_size**2
    shape, dtype = (block_size * nodes, block_size * nodes), np.dtype(np.float64)
    # The structure is made on the host: CuPy would compile a dozen kernels for it.
    if format_name == "bsr":
        columns = np.arange(nodes)[:, None] + np.array(offsets)
        inside = (columns >= 0) & (columns < nodes)
        row_offsets = np.concatenate([[0], np.cumsum(inside.sum(axis=1))]).astype(np.int64)
        indices = columns[inside].astype(np.int32)
        values = xp.random.random((indices.size, block_size, block_size))
        for row in range(block_size):
            values[:, row, row] += 30.0
        return BsrMatrix(shape, dtype, xp.asarray(row_offsets), xp.asarray(indices), values)
    if format_name not in ("sliced_bsr", "symmetric_bsr"):
        raise InputError(f"a stencil is made in bsr, sliced_bsr and symmetric_bsr, not in {format_name}")
    rows = np.arange(-(-nodes // HEIGHT) * HEIGHT, dtype=np.int32).reshape(-1, 1, HEIGHT)
    columns = rows + np.array(offsets, dtype=np.int32)[:, None]
    columns[(columns < 0) | (columns >= nodes) | (rows >= nodes)] = -1
    chunk_offsets = xp.asarray(np.arange(len(rows) + 1) * (len(offsets) * HEIGHT))
    indices, none = xp.asarray(columns.reshape(-1)), xp.empty(0, dtype=np.int32)
    # The blocks of a chunk stand slot by slot; within a slot, scalar by scalar.
    values = xp.random.random((len(rows), len(offsets), scalars, HEIGHT))
    values[:, offsets.index(0)] = 0.0
    for diagonal in range(0, scalars, block_size + 1):
        values[:, offsets.index(0), diagonal] = 30.0 * block_size
    if format_name == "symmetric_bsr":
        return SymmetricBsrMatrix(shape, dtype, chunk_offsets, indices, values.reshape(-1), none, block_size)
    return SlicedBsrMatrix(shape, dtype, chunk_offsets, indices, values.reshape(-1), none, block_size)
