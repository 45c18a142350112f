"""Groups of strongly coupled nodes, grown node by node.

The coupling of two nodes is the mean of ``-a_ij / sqrt(a_ii a_jj)`` over their unknowns of the same name, and its norm that of
all numbers ``a_ij / sqrt(a_ii a_jj)``. Sums of couplings are those of piecewise constant vectors: they tell which nodes move
alike, as the norms do not. Across flat elements they are as large as their norms, beside each other they are negative, as in a
mass matrix (compare :mod:`penstock.solvers.amg.groups`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import prange

from penstock.spmv import Array
from penstock.spmv.compilation.jit import parallel_kernel, serial_kernel
from penstock.spmv.products.block_rows import BlockRows, row_numbers

#: Couplings above this join nodes of groups that are full, up to half as many again: they are the halves of a line.
OF_A_LINE, SLACK = 0.35, 1.5
# Groups of fewer than this share of the most nodes join a neighbour.
_SMALL = 0.25


#: Row offsets, columns, couplings and their norms, on the host.
Couplings = tuple[Array, Array, Array, Array]


def couplings(rows: BlockRows, scales: Array) -> Couplings:
    """Return row offsets, columns, couplings and their norms of rows of a matrix, on the host, as of CSR without blocks.

    ``scales``, (nodes, size), are ``1 / sqrt(a_ii)`` of all unknowns. The entries of a node with itself are included; they are
    to be skipped.
    """
    xp, size, to_host = rows.device.xp, int(rows.blocks.shape[1]), rows.device.to_host
    row = row_numbers(rows.offsets, rows.columns.size) + rows.start
    scaled = rows.blocks * scales[row][:, :, None]
    scaled *= scales[rows.columns][:, None, :]
    signed = -xp.einsum("eii->e", scaled) / size
    norms = xp.sqrt(xp.einsum("eij,eij->e", scaled, scaled) / size)
    return tuple(map(to_host, (rows.offsets, rows.columns, signed, norms)))  # type: ignore[return-value]


def grown_groups(
    start: int,
    couplings: Couplings,
    parts: Sequence[int],
    most: int,
    *,
    alike: float = 0.0,
) -> Array:
    """Return the group of nodes ``start`` and following, numbered from 0 in the order of their first nodes: int32, on the host.

    Parameters
    ----------
    start : int
        The node of the first row.
    couplings : row offsets, columns, couplings, norms
        As of :func:`couplings`.
    parts : sequence of int
        Where parts of the nodes begin, and end at last: a group does not leave its part. Parts are grown in parallel.
    most : int
        Nodes of a group. Up to half as many again where a line of nodes would be cut, or a small group would remain.
    alike : float
        Share of the norm of the couplings between a group and a node that their sum must exceed for the node to join.
    """
    offsets, columns, signed, norms = couplings
    nodes = len(offsets) - 1
    label = np.full(nodes, -1, dtype=np.int64)
    bounds = np.asarray(parts, dtype=np.int64) - start
    limits = (most, int(SLACK * most), alike, OF_A_LINE, _SMALL)
    if nodes:
        _grow(offsets, columns, signed, norms, start, bounds, *limits, label)
    group = np.unique(label, return_inverse=True)[1]
    return group.reshape(-1).astype(np.int32)


@parallel_kernel
def _grow(
    offsets: Array, columns: Array, signed: Array, norms: Array, start: int, bounds: Array,
    most: int, at_most: int, alike: float, of_a_line: float, small: float, label: Array,
) -> None:  # fmt: skip
    """Label every node by the first one of its group, part by part."""
    nodes = label.shape[0]
    total, norm, seen = np.zeros(nodes), np.zeros(nodes), np.full(nodes, -1, dtype=np.int64)
    candidates, sizes = np.empty(nodes, dtype=np.int64), np.zeros(nodes, dtype=np.int64)
    for part in prange(bounds.shape[0] - 1):
        ends = bounds[part], bounds[part + 1]
        _grow_part(
            offsets, columns, signed, norms, start, ends, most, at_most, alike, of_a_line,
            total, norm, seen, candidates, sizes, label,
        )  # fmt: skip
        _join_small(offsets, columns, signed, start, ends, most, at_most, small, total, seen, sizes, label)


@serial_kernel
def _grow_part(
    offsets: Array, columns: Array, signed: Array, norms: Array, start: int, ends: tuple[int, int],
    most: int, at_most: int, alike: float, of_a_line: float,
    total: Array, norm: Array, seen: Array, candidates: Array, sizes: Array, label: Array,
) -> None:  # fmt: skip
    """Grow groups from the first nodes that belong to none, each by the node that couples most with it."""
    low, high = ends
    for seed in range(low, high):
        if label[seed] >= 0:
            continue
        node, size, known = seed, 0, 0
        while node >= 0:
            label[node] = seed
            size += 1
            for place in range(offsets[node], offsets[node + 1]):
                other = columns[place] - start
                if low <= other < high and label[other] < 0:
                    if seen[other] != seed:
                        seen[other], total[other], norm[other] = seed, 0.0, 0.0
                        candidates[low + known] = other
                        known += 1
                    total[other] += signed[place]
                    norm[other] += norms[place]
            node, known = _best(candidates[low:high], known, total, norm, label, alike)
            if node >= 0 and (size >= at_most or (size >= most and total[node] <= of_a_line)):
                node = -1
        sizes[seed] = size


@serial_kernel
def _best(candidates: Array, known: int, total: Array, norm: Array, label: Array, alike: float) -> tuple[int, int]:
    """Return the candidate with the largest coupling, or -1, and how many are left; those that have joined are dropped.

    Couplings are compared in steps of an eighth of a power of e, and the first one wins: else rounding would decide.
    """
    best, worth, left = -1, 0.0, 0
    for k in range(known):
        node = candidates[k]
        if label[node] < 0:
            candidates[left] = node
            left += 1
            if total[node] > max(alike * norm[node], 0.0):
                step = np.floor(8.0 * np.log(total[node]) + 0.5)
                if best < 0 or step > worth:
                    best, worth = node, step
    return best, left


@serial_kernel
def _join_small(
    offsets: Array, columns: Array, signed: Array, start: int, ends: tuple[int, int],
    most: int, at_most: int, small: float, total: Array, seen: Array, sizes: Array, label: Array,
) -> None:  # fmt: skip
    """Let small groups of a part, the smallest first, join the neighbour with which they couple most."""
    low, high = ends
    of_group = low + np.argsort(label[low:high], kind="mergesort")  # nodes by group
    into, begin = np.arange(low, high), np.empty(high - low, dtype=np.int64)
    for k in range(high - low):
        if k == 0 or label[of_group[k]] != label[of_group[k - 1]]:
            begin[label[of_group[k]] - low] = k
    seen[low:high] = -1
    chosen = low + np.flatnonzero((sizes[low:high] > 0) & (sizes[low:high] < small * most))
    touched = np.empty(high - low, dtype=np.int64)
    for group in chosen[np.argsort(sizes[chosen], kind="mergesort")]:
        count, own = 0, begin[group - low]
        while own < high - low and label[of_group[own]] == group:
            node = of_group[own]
            own += 1
            for place in range(offsets[node], offsets[node + 1]):
                other = columns[place] - start
                if low <= other < high:
                    root = _root(into, low, label[other])
                    if seen[root] != group:
                        seen[root], total[root] = group, 0.0
                        touched[count] = root
                        count += 1
                    total[root] += max(signed[place], 0.0)
        best = -1
        for k in range(count):
            root = touched[k]
            fits = root != group and sizes[root] + sizes[group] <= at_most and total[root] > 0.0
            if fits and (best < 0 or total[root] > total[best]):
                best = root
        if best >= 0:
            into[group - low] = best
            sizes[best] += sizes[group]
    for node in range(low, high):
        label[node] = _root(into, low, label[node])


@serial_kernel
def _root(into: Array, low: int, group: int) -> int:
    while into[group - low] != group:
        group = into[group - low]
    return group
