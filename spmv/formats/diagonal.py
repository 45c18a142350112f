"""Copies the blocks on the diagonal of a matrix from its triplets."""

from __future__ import annotations

from penstock.spmv.device import Array


def copy_diagonal_blocks(rows: Array, columns: Array, values: Array, blocks: Array) -> None:
    """Copy the entries that lie in dense blocks on the diagonal."""
    size = blocks.shape[1]
    inside = rows // size == columns // size
    blocks[rows[inside] // size, rows[inside] % size, columns[inside] % size] = values[inside]
