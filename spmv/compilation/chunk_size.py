"""Decides how CPU kernels share rows among threads: equal shares, or small pieces fetched by free threads."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numba import get_num_threads, parallel_chunksize

from penstock.spmv.device import Array

_STATIC_VARIATION = 0.4
_PIECES_PER_THREAD = 32
_LIKELY_CACHE_NBYTES = 32 << 20


def chunk_size(offsets: Array, nbytes: int) -> int:
    """Return the number of rows that a thread fetches at a time; 0 for equal static shares.

    A matrix that fits the last-level cache, or whose rows vary little in length, is scheduled statically: threads then find
    their part in their own caches again. Other matrices are cut into pieces that threads fetch when they are free (Kreutzer et
    al. 2014, section 5, with OpenMP's static and guided schedules; the limit of 0.4 for the coefficient of variation is ours).
    """
    rows = int(offsets.size) - 1
    if nbytes <= last_level_cache_nbytes() or rows < 2 * _PIECES_PER_THREAD:
        return 0
    lengths = np.diff(offsets)
    if lengths.std() <= _STATIC_VARIATION * lengths.mean():
        return 0
    return max(1, int(rows) // (_PIECES_PER_THREAD * int(get_num_threads())))


def scheduled(rows: int) -> AbstractContextManager[Any]:
    """Return a context in which threads of parallel kernels fetch ``rows`` iterations at a time; 0 for equal shares."""
    context: AbstractContextManager[Any] = parallel_chunksize(rows) if rows else nullcontext()
    return context


@functools.cache
def last_level_cache_nbytes() -> int:
    """Return the size of the largest cache that Linux reports, 32 MiB where it reports none."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
        except OSError:  # not for this process to read
            continue
        factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        if digits.isdigit():
            sizes.append(int(digits) * factor)
    return max(sizes, default=_LIKELY_CACHE_NBYTES)
