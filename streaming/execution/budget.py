"""An enforced limit on the memory for matrix storage."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.spmv import Array, BudgetError, Device, format_nbytes, parse_nbytes
from penstock.spmv.device import forked_from_cuda
from penstock.streaming.stores.buffers import aligned_buffer


class MemoryBudget:
    """Allocates the memory for a matrix on the computing device: slots and the resident part.

    Vectors, the CUDA context and library workspaces are not included.

    Parameters
    ----------
    device : int or str
        Bytes on the computing device, for example ``"6 GiB"``: GPU memory, or host memory for runs on the CPU.

    Raises
    ------
    InputError
        If it is not a positive size.

    Notes
    -----
    On a CUDA device the buffers come from a separate memory pool with this limit: the allocator enforces it, and arrays of the
    caller are neither counted nor limited.

    Examples
    --------
    >>> from penstock.spmv import CPU
    >>> from penstock.streaming import MemoryBudget
    >>> budget = MemoryBudget("1 MiB")
    >>> slot = budget.allocate("slot 0", 4096, CPU)
    >>> budget.limit_nbytes, budget.used_nbytes
    (1048576, 4096)
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
            If they do not fit; the message lists the memory in use.
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
        """Release all buffers of a purpose; the caller must have dropped its references to them."""
        self.used_nbytes -= self._ledger.pop(purpose, 0)
        if self._pool is not None and not forked_from_cuda():
            self._pool.free_all_blocks()


def check_room(device: Device, nbytes: int, purpose: str) -> None:
    """Raise a BudgetError if a GPU has less than ``nbytes`` free for vectors, named by ``purpose``, a plural.

    Host memory is not checked: operating systems promise more of it than they have.
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
