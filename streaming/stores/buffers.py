"""Allocates page-aligned host buffers for disk reads and GPU transfers."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np

#: Slabs start at multiples of this and are padded to it, as unbuffered disk reads and page-locking require.
PAGE_NBYTES = 4096
_HUGE_PAGE_NBYTES = 2 << 20


def _private_memory(nbytes: int) -> mmap.mmap:
    """Return whole pages; those of Python's default are shared with forked processes, and most systems make none huge."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, which forks nothing
        return mmap.mmap(-1, nbytes)
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def aligned_buffer(nbytes: int) -> np.ndarray[Any, Any]:
    """Return a zeroed, page-aligned byte array; its memory is freed with the last view.

    Large buffers are aligned to huge pages and ask for them: a disk then writes into long physical runs, in half the time
    of scattered 4 KiB pages.
    """
    if nbytes < _HUGE_PAGE_NBYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(_private_memory(max(nbytes, 1)), dtype=np.uint8)[:nbytes]
    memory = _private_memory(nbytes + _HUGE_PAGE_NBYTES)
    with contextlib.suppress(OSError):  # a kernel without huge pages provides normal ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, dtype=np.uint8)
    start = -buffer.ctypes.data % _HUGE_PAGE_NBYTES
    buffer = buffer[start : start + nbytes]
    buffer[::PAGE_NBYTES] = 0  # touch every page now, so that the first read does not wait for memory
    return buffer
