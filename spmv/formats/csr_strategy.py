"""Strategies by which CUDA kernels divide the work on a CSR matrix, chosen by row lengths."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, NamedTuple

from penstock.spmv.errors import InputError

Lanes = Literal["auto", "mean", "longest"]


class CsrStrategy(IntEnum):
    """How a CUDA kernel divides the work."""

    VECTOR = 0  #: lanes of a warp on each row, combined by shuffles; one lane is the scalar kernel
    SHARED = 1  #: the same, combined through shared memory
    BALANCED = 2  #: equal shares of rows and entries for every block of threads


class Thresholds(NamedTuple):
    """Limits for the balanced strategy: more ``entries``, or a row longer than ``longest_row`` and ``over_mean`` mean rows."""

    entries: float
    longest_row: float
    over_mean: float = 0.0


#: Tsai, Cojean and Anzt (2020), Algorithm 3, with their values for a V100 and a Radeon VII, and our own. On an H200 the
#: vector kernel is faster at any size unless some row keeps its lanes busy much longer than the others.
THRESHOLDS = {
    "ginkgo_nvidia": Thresholds(1e6, 1024),
    "ginkgo_amd": Thresholds(1e8, 768),
    "h200": Thresholds(float("inf"), 64, 8.0),
}


def choose_strategy(entries: int, rows: int, longest_row: int, thresholds: str = "h200") -> CsrStrategy:
    """Choose between one row for a group of lanes and balanced shares (Tsai, Cojean and Anzt 2020, Algorithm 3)."""
    if thresholds not in THRESHOLDS:
        raise InputError(f"unknown thresholds {thresholds!r}; known: {', '.join(THRESHOLDS)}")
    limits = THRESHOLDS[thresholds]
    longest = max(limits.longest_row, limits.over_mean * entries / max(rows, 1))
    uneven = entries > limits.entries or longest_row > longest
    return CsrStrategy.BALANCED if uneven else CsrStrategy.VECTOR


def choose_lanes(mean_row: float, longest_row: int, rule: Lanes = "auto") -> int:
    """Choose the lanes that share a row: a power of two up to 32.

    Parameters
    ----------
    mean_row : float
        Mean entries per row.
    longest_row : int
        Entries of the longest row.
    rule : {"auto", "mean", "longest"}
        The largest power of two not above the mean row (AMD lab notes 2022; Zhang, Li and Jiang 2019), not above the
        longest (Tsai, Cojean and Anzt 2020), or, by default, not above a third of the mean: each lane then has three
        entries or more to load at once, which on an H200 was the fastest for rows of 27, 81 and 162 entries.

    Examples
    --------
    >>> [choose_lanes(27, 27, rule) for rule in ("auto", "mean", "longest")]
    [8, 16, 16]
    """
    if rule not in ("auto", "mean", "longest"):
        raise InputError(f"lanes must be a number, 'auto', 'mean' or 'longest', not {rule!r}")
    entries = {"auto": mean_row / 3, "mean": mean_row, "longest": longest_row}[rule]
    return min(32, 1 << (max(int(entries), 1).bit_length() - 1))
