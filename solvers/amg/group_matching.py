"""Aggregates of groups by pairwise matching: rounds in which every one picks a neighbour, and mutual picks merge.

Aggregates that grow from a corner one group after another end in what the others have left over; matched ones are compact. The
rounds run on the host: groups are some ninety times fewer than unknowns.

Source: D'Ambra and Vassilevski (2019), aggregates by matching of couplings; here the pairs are those that pick each other.
"""

from __future__ import annotations

import numpy as np

from penstock.solvers.amg.group_growth import OF_A_LINE, SLACK, Couplings
from penstock.spmv import Array
from penstock.spmv.compilation.jit import serial_kernel
from penstock.spmv.products.block_rows import row_numbers

# In the last rounds a pair may have up to SLACK times the groups of an aggregate, if its coupling is above OF_A_LINE, as that of
# the halves of a line is, or if one of the two has fewer groups than this share of them.
_SMALL = 0.125
# Where signed couplings cancel, this share of their norms is taken.
_LEAST_SHARE = 1e-3
# Rounds, of which usually some twenty suffice.
_MOST_ROUNDS = 300


def matched_groups(couplings: Couplings, most: int, weak: float) -> Array:
    """Return the aggregate of each group, numbered from 0: int32.

    Groups that are coupled with no other form one aggregate together: D inverts the matrix on each of them.

    Parameters
    ----------
    couplings : row offsets, columns, couplings, norms
        As of :func:`~penstock.solvers.amg.group_growth.couplings`, of groups.
    most : int
        Groups of an aggregate at most; half as many again where the halves of a line or a small remainder join. The aggregate of
        uncoupled groups has no limit.
    weak : float
        Two merge only if their coupling, divided by the number of groups in the smaller one, is above this.
    """
    alone = _uncoupled(couplings)
    if alone.sum() <= 1:
        return _matched(couplings, most, weak)
    of_group, some = np.zeros(len(alone), dtype=np.int32), np.flatnonzero(~alone)
    of_group[some] = 1 + _matched(_among(couplings, some), most, weak)
    return of_group


def _matched(couplings: Couplings, most: int, weak: float) -> Array:
    """Return the aggregate of each group, numbered from 0: int32."""
    offsets, columns, signed, norms = couplings
    count = len(offsets) - 1
    of_group, sizes = np.arange(count, dtype=np.int64), np.ones(count, dtype=np.int64)
    graph = offsets.astype(np.int64), columns.astype(np.int64), np.asarray(signed), np.asarray(norms)
    last = False
    for _ in range(_MOST_ROUNDS):
        allowed = (int(SLACK * most), _SMALL * most) if last else (most, 0.0)
        picks = _pick(*graph, sizes, *allowed, weak, last, OF_A_LINE, _LEAST_SHARE)
        target = _mutual(picks)
        if np.array_equal(target, np.arange(len(target))):
            if last:
                break
            last = True
            continue
        number = np.unique(target, return_inverse=True)[1].reshape(-1)
        sizes = np.bincount(number, weights=sizes).astype(np.int64)
        of_group = number[of_group]
        graph = _merged(*graph, number, len(sizes))
    return of_group.astype(np.int32)


def _uncoupled(couplings: Couplings) -> Array:
    """Return which groups are coupled with no other: bool, (groups,)."""
    offsets, columns, _, norms = couplings
    row = row_numbers(offsets, len(columns))
    return np.bincount(row[(columns != row) & (norms > 0)], minlength=len(offsets) - 1) == 0


def _among(couplings: Couplings, some: Array) -> Couplings:
    """Return the couplings of some groups with each other; they have none with others."""
    offsets, columns, signed, norms = couplings
    row = row_numbers(offsets, len(columns))
    number = np.full(len(offsets) - 1, -1, dtype=np.int64)
    number[some] = np.arange(len(some))
    kept = (number[row] >= 0) & (number[columns] >= 0)
    starts = np.zeros(len(some) + 1, dtype=np.int64)
    np.cumsum(np.bincount(number[row[kept]], minlength=len(some)), out=starts[1:])
    return starts, number[columns[kept]], signed[kept], norms[kept]


@serial_kernel
def _pick(
    offsets: Array, columns: Array, signed: Array, norms: Array, sizes: Array,
    most: int, small: float, weak: float, last: bool, of_a_line: float, least_share: float,
) -> Array:  # fmt: skip
    """Return the neighbour that each one would merge with, or -1.

    Couplings are compared in steps of an eighth of a power of e, and ties are broken by a hash of the pair: else a homogeneous
    mesh would merge a pair a round.
    """
    count = sizes.shape[0]
    picks = np.full(count, -1, dtype=np.int64)
    for one in range(count):
        best, best_hash = 0.0, np.uint64(0)
        for place in range(offsets[one], offsets[one + 1]):
            other = columns[place]
            if other == one or sizes[one] + sizes[other] > most:
                continue
            smaller = min(sizes[one], sizes[other])
            if signed[place] <= weak * smaller or (last and smaller >= small and signed[place] <= of_a_line):
                continue
            worth = max(signed[place], least_share * norms[place]) / (1 if last else smaller)
            if not worth > 0.0:
                continue
            step = np.floor(8.0 * np.log(worth) + 0.5)
            mixed = _mixed(min(one, other), max(one, other))
            if picks[one] < 0 or step > best or (step == best and mixed < best_hash):
                picks[one], best, best_hash = other, step, mixed
    return picks


@serial_kernel
def _mixed(low: int, high: int) -> np.uint64:
    """Return a hash of a pair."""
    x = np.uint64(low) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(high) * np.uint64(0xC2B2AE3D27D4EB4F)
    x ^= x >> np.uint64(31)
    return (x * np.uint64(0xBF58476D1CE4E5B9)) >> np.uint64(33)


def _mutual(picks: Array) -> Array:
    """Return for each one the first of its pair, where two picked each other, else itself."""
    target = np.arange(len(picks))
    picking = np.flatnonzero(picks >= 0)
    pairs = picking[picks[picks[picking]] == picking]
    target[pairs] = np.minimum(pairs, picks[pairs])
    return target


@serial_kernel
def _merged(
    offsets: Array, columns: Array, signed: Array, norms: Array, number: Array, count: int
) -> tuple[Array, Array, Array, Array]:
    """Return the graph of what is numbered anew, whose couplings are sums; without the couplings inside."""
    members, starts = np.argsort(number, kind="mergesort"), np.zeros(count + 1, dtype=np.int64)
    for one in range(number.shape[0]):
        starts[number[one] + 1] += 1
    starts = np.cumsum(starts)
    place_of, row_offsets = np.full(count, -1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    new_columns, new_signed, new_norms = np.empty_like(columns), np.zeros_like(signed), np.zeros_like(norms)
    total = 0
    for new in range(count):
        begin = total
        for k in range(starts[new], starts[new + 1]):
            member = members[k]
            for place in range(offsets[member], offsets[member + 1]):
                other = number[columns[place]]
                if other == new:
                    continue
                if place_of[other] < begin:
                    place_of[other] = total
                    new_columns[total] = other
                    total += 1
                new_signed[place_of[other]] += signed[place]
                new_norms[place_of[other]] += norms[place]
        row_offsets[new + 1] = total
    return row_offsets, new_columns[:total].copy(), new_signed[:total].copy(), new_norms[:total].copy()
