"""Strength of connection: which neighbours of a node may be in its aggregate (Vanek, Mandel and Brezina 1996, section 4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.solvers.amg.aggregates import AGGREGATION_KERNELS
from penstock.spmv import Array
from penstock.spmv.compilation.cuda_module import launch
from penstock.spmv.compilation.jit import inlined, shared_range
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.products.block_rows import BlockRows

#: On all levels. With half of it on each coarser one, as in that paper, aggregates of coarse levels mix stiff and soft parts:
#: at a million unknowns, elastic balls 1e4 times as stiff as the rest take 79 iterations for 46.
STRONG = 0.02


def strong_graph(rows: BlockRows) -> tuple[Array, Array]:
    """Return offsets and columns of the strong couplings of a square matrix, without its diagonal, on its device.

    Nodes i and j are coupled strongly if ``||A_ij||^2 > theta^2 ||A_ii|| ||A_jj||``, in Frobenius norms. Reads the matrix twice.
    """
    norms = rows.device.xp.zeros(len(rows.offsets) - 1)
    find_kernel("graph", "measure_diagonal", rows.device.kind)(rows, norms)
    return strong_among(rows, STRONG, norms)


def strong_among(rows: BlockRows, theta: float, norms: Array) -> tuple[Array, Array]:
    """Return offsets and columns of the strong couplings of some rows; ``norms`` are those of all diagonal blocks of the matrix.

    Reads the rows twice.
    """
    xp, counts = rows.device.xp, count_strong(rows, theta, norms)
    offsets = xp.zeros(len(counts) + 1, dtype=np.int64)
    xp.cumsum(counts, out=offsets[1:])
    columns = xp.empty(int(offsets[-1]), dtype=np.int32)
    find_kernel("graph", "list_strong", rows.device.kind)(rows, theta, norms, offsets, columns)
    return offsets, columns


def count_strong(rows: BlockRows, theta: float, norms: Array) -> Array:
    """Return how many strong couplings each of some rows has; with a theta of 0 those that are not zero. Reads the rows once."""
    counts = rows.device.xp.zeros(len(rows.offsets) - 1, dtype=np.int64)
    find_kernel("graph", "count_strong", rows.device.kind)(rows, theta, norms, counts)
    return counts


def _entries(rows: BlockRows) -> Array:
    """Return the scalars of the blocks, ``(blocks, scalars)``."""
    return rows.blocks.reshape(len(rows.blocks), -1)


@register_kernel("graph", "measure_diagonal", "cpu")
def _measure_cpu(rows: BlockRows, norms: Array) -> None:
    _measure_diagonal(len(norms), rows.offsets, rows.columns, _entries(rows), norms)


@register_kernel("graph", "count_strong", "cpu")
def _count_cpu(rows: BlockRows, theta: float, norms: Array, counts: Array) -> None:
    _count(len(counts), rows.start, rows.offsets, rows.columns, _entries(rows), theta, norms, counts)


@register_kernel("graph", "list_strong", "cpu")
def _list_cpu(rows: BlockRows, theta: float, norms: Array, offsets: Array, columns: Array) -> None:
    matrix = (rows.start, rows.offsets, rows.columns, _entries(rows))
    _list(len(offsets) - 1, *matrix, theta, norms, offsets, columns)


@register_kernel("graph", "measure_diagonal", "cuda")
def _measure_cuda(rows: BlockRows, norms: Array) -> None:
    nodes, size = len(norms), rows.blocks.shape[1] * rows.blocks.shape[2]
    arguments = (np.int32(nodes), np.int32(size), rows.offsets, rows.columns, rows.blocks, norms)
    launch(AGGREGATION_KERNELS.function("measure_diagonal"), nodes, 256, arguments)


@register_kernel("graph", "count_strong", "cuda")
def _count_cuda(rows: BlockRows, theta: float, norms: Array, counts: Array) -> None:
    arguments = (*_launched(rows), np.float64(theta), norms, counts)
    launch(AGGREGATION_KERNELS.function("count_strong"), len(counts), 256, arguments)


@register_kernel("graph", "list_strong", "cuda")
def _list_cuda(rows: BlockRows, theta: float, norms: Array, offsets: Array, columns: Array) -> None:
    arguments = (*_launched(rows), np.float64(theta), norms, offsets, columns)
    launch(AGGREGATION_KERNELS.function("list_strong"), len(offsets) - 1, 256, arguments)


def _launched(rows: BlockRows) -> tuple[Any, ...]:
    """Return rows as kernels take them."""
    nodes, size = len(rows.offsets) - 1, rows.blocks.shape[1] * rows.blocks.shape[2]
    return np.int32(nodes), np.int32(rows.start), np.int32(size), rows.offsets, rows.columns, rows.blocks


@shared_range(least=4096)
def _measure_diagonal(begin: int, end: int, offsets: Array, columns: Array, entries: Array, norms: Array) -> None:
    """Set the Frobenius norms of the diagonal blocks."""
    for node in range(begin, end):
        for place in range(offsets[node], offsets[node + 1]):
            if columns[place] == node:
                norms[node] = np.sqrt(np.sum(entries[place] ** 2))


# The condition stands in both kernels: a function of the arrays that returns it takes five times as long.
@inlined
def _square_at(place: int, entries: Array) -> float:
    """Return the square of the Frobenius norm of the block at a place."""
    total = 0.0
    for entry in range(entries.shape[1]):
        total += entries[place, entry] * entries[place, entry]
    return total


@shared_range(least=2048)
def _count(
    begin: int, end: int, start: int, offsets: Array, columns: Array, entries: Array, theta: float, norms: Array, counts: Array
) -> None:  # fmt: skip
    for node in range(begin, end):
        count, limit = 0, theta * theta * norms[start + node]
        for place in range(offsets[node], offsets[node + 1]):
            other = columns[place]
            if other != start + node and _square_at(place, entries) > limit * norms[other]:
                count += 1
        counts[node] = count


@shared_range(least=2048)
def _list(
    begin: int, end: int, start: int, offsets: Array, columns: Array, entries: Array, theta: float, norms: Array,
    of_strong: Array, strong: Array,
) -> None:  # fmt: skip
    for node in range(begin, end):
        following, limit = of_strong[node], theta * theta * norms[start + node]
        for place in range(offsets[node], offsets[node + 1]):
            other = columns[place]
            if other != start + node and _square_at(place, entries) > limit * norms[other]:
                strong[following] = other
                following += 1
