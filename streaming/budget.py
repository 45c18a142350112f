"""A limit on the memory of matrix storage that is kept, not hoped for."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np

from penstock.spmv import Array, BudgetError, Device, format_nbytes, parse_nbytes

__all__ = ["PAGE_NBYTES", "MemoryBudget", "aligned_buffer", "check_room"]

#: Slabs start at multiples of this and are padded to it, so that unbuffered disk reads and page-locking apply.
PAGE_NBYTES = 4096


_HUGE_PAGE_NBYTES = 2 << 20


def aligned_buffer(nbytes: int) -> np.ndarray[Any, Any]:
    """Return a zeroed byte array that starts at a page of its own; it frees its memory when the last view is gone.

    Large ones start at a huge page and ask for huge pages: a disk then writes into long physical runs, which takes half
    the time of scattered 4 KiB pages.
    """
    if nbytes < _HUGE_PAGE_NBYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=np.uint8)[:nbytes]
    # Private: most systems give no huge pages to shared memory, which is what mmap makes by default.
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages still gives plain ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, dtype=np.uint8)
    start = -buffer.ctypes.data % _HUGE_PAGE_NBYTES
    buffer = buffer[start : start + nbytes]
    buffer[::PAGE_NBYTES] = 0  # touch every page now: the first read must not wait for memory
    return buffer


class MemoryBudget:
    """Hands out the memory that holds a matrix on the compute side: slots and the resident part.

    Vectors, the CUDA context and library workspaces lie outside it.

    Parameters
    ----------
    device : int or str
        Bytes on the device that computes, such as ``"6 GiB"``: memory of the GPU, or host memory for runs on the CPU.

    Notes
    -----
    On a CUDA device the buffers come from a memory pool of its own with this limit, so the limit is enforced by the
    allocator, and arrays of the caller are neither counted nor refused.
    """

    def __init__(self, device: int | str) -> None:
        self.limit_nbytes = parse_nbytes(device)
        self.used_nbytes = 0
        self.peak_nbytes = 0
        self._ledger: dict[str, int] = {}
        self._pool: Any = None

    def allocate(self, purpose: str, nbytes: int, device: Device) -> Array:
        """Return ``nbytes`` bytes on a device as a uint8 array aligned to at least 256 bytes.

        Raises
        ------
        BudgetError
            If they do not fit; the message says who holds what.
        """
        if self.used_nbytes + nbytes > self.limit_nbytes:
            held = ", ".join(f"{name} {format_nbytes(size)}" for name, size in self._ledger.items()) or "nothing"
            raise BudgetError(
                f"{purpose} needs {format_nbytes(nbytes)}, but the budget of {format_nbytes(self.limit_nbytes)} has "
                f"{format_nbytes(self.limit_nbytes - self.used_nbytes)} left (held: {held}); raise the budget"
            )
        buffer = aligned_buffer(nbytes) if device.kind == "cpu" else self._allocate_cuda(purpose, nbytes, device)
        self._ledger[purpose] = self._ledger.get(purpose, 0) + nbytes
        self.used_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)
        return buffer

    def _allocate_cuda(self, purpose: str, nbytes: int, device: Device) -> Array:
        import cupy

        with cupy.cuda.Device(device.index):
            if self._pool is None:
                self._pool = cupy.cuda.MemoryPool()
                self._pool.set_limit(size=self.limit_nbytes)
            try:
                with cupy.cuda.using_allocator(self._pool.malloc):
                    return cupy.empty(nbytes, dtype=np.uint8)
            except cupy.cuda.memory.OutOfMemoryError as error:
                free, total = cupy.cuda.runtime.memGetInfo()
                raise BudgetError(
                    f"{purpose} needs {format_nbytes(nbytes)}, but {device} refused: {format_nbytes(free)} of "
                    f"{format_nbytes(total)} are free; lower the budget of {format_nbytes(self.limit_nbytes)} or free memory"
                ) from error

    def release(self, purpose: str) -> None:
        """Give back all buffers of a purpose; the caller drops its references to them first."""
        self.used_nbytes -= self._ledger.pop(purpose, 0)
        if self._pool is not None:
            self._pool.free_all_blocks()


def check_room(device: Device, nbytes: int, purpose: str) -> None:
    """Refuse to start what would run out of a GPU's memory in the middle.

    Parameters
    ----------
    device : Device
        Host memory is not looked at: systems promise more of it than they have.
    nbytes : int
    purpose : str
        What they are for, in the plural, as the message says it.

    Raises
    ------
    BudgetError
        If less than ``nbytes`` are free.
    """
    if device.kind == "cpu" or not nbytes:
        return
    with device.current():
        free, total = device.free_nbytes(), device.xp.cuda.runtime.memGetInfo()[1]
    if nbytes > free:
        raise BudgetError(
            f"{purpose} need {format_nbytes(nbytes)}, but {format_nbytes(free)} of the {format_nbytes(total)} of {device} are "
            "free; lower the budget or free memory"
        )
