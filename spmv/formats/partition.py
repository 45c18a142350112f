"""Cuts a matrix into row slabs with nearly equal numbers of stored entries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from penstock.spmv.device import Array
from penstock.spmv.errors import InputError
from penstock.spmv.formats.base import SparseMatrix


def count_granules(A: SparseMatrix, together: int = 1) -> int:
    """Return into how many slabs a matrix can be cut at most, without cutting groups of ``together`` rows."""
    return -(-A.shape[0] // math.lcm(A.row_granularity, together))


def cut_rows(A: SparseMatrix, parts: int, together: int = 1) -> list[int]:
    """Return ``parts + 1`` row numbers that cut a matrix on the CPU into slabs with nearly equal numbers of stored entries.

    No slab is empty, and all but the last end at a multiple of the granularity and of ``together``, such as the unknowns of a
    node. Formats without offsets of rows or chunks are cut into equal numbers of rows.
    """
    granule, granules = math.lcm(A.row_granularity, together), count_granules(A, together)
    if not 1 <= parts <= granules:
        raise InputError(f"cannot cut {granules} pieces of {granule} rows into {parts} slabs")
    offsets = (A.arrays().get(name) for name in ("row_offsets", "chunk_offsets"))
    stored: Array = next((array for array in offsets if array is not None), np.arange(granules + 1))
    if stored.size > granules + 1:  # several chunks a granule
        stored = np.append(stored[: -1 : granule // A.chunk_rows], stored[-1])
    targets = [int(stored[-1]) * part // parts for part in range(parts)]
    bounds = np.searchsorted(stored, targets, side="left")
    # At least one granule a slab, and one left for each slab to come.
    each = np.arange(parts)
    bounds = np.minimum(np.maximum.accumulate(np.maximum(bounds, each) - each) + each, granules - parts + each)
    return [*(int(bound) * granule for bound in bounds), A.shape[0]]


def row_slabs(A: SparseMatrix, parts: int, together: int = 1) -> Iterator[SparseMatrix]:
    """Yield the row slabs between the rows of :func:`cut_rows`."""
    for start, stop in itertools.pairwise(cut_rows(A, parts, together)):
        yield A.rows(start, stop)
