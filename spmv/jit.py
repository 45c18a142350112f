"""How every parallel CPU kernel is compiled."""

import types
from collections.abc import Callable
from typing import Any

from numba import njit

__all__ = [
    "KernelPair",
    "inlined",
    "parallel_kernel",
    "reassociating_kernel",
    "rounded_serial_and_parallel",
    "serial_and_parallel",
    "serial_kernel",
]

#: Contraction into fused multiply-adds is wanted; further fast-math would let LLVM emit slow gathers. The GIL is released,
#: so that a thread which reads ahead runs on. Compiled code is cached on disk.
parallel_kernel: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(
    parallel=True, nogil=True, cache=True, fastmath={"contract"}, error_model="numpy"
)

#: Small functions that kernels call for every entry; they are inlined.
serial_kernel: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(
    nogil=True, cache=True, fastmath={"contract"}, error_model="numpy"
)

#: Functions that are copied into the kernels that call them, before anything is compiled.
inlined: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(nogil=True, inline="always")

#: Small functions whose sums may be formed in any order, the same one whenever they are called with the same lengths.
reassociating_kernel: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(
    nogil=True, cache=True, fastmath={"contract", "reassoc"}, error_model="numpy", inline="never"
)

#: One kernel compiled twice: for one thread, and for all of them.
KernelPair = tuple[Callable[..., Any], Callable[..., Any]]


def serial_and_parallel(function: Callable[..., Any]) -> KernelPair:
    """Return a kernel for sizes at which waking other threads takes longer than the work, and the same one for the rest.

    Last digits of the two may differ: see :func:`rounded_serial_and_parallel`.
    """
    return serial_kernel(_alone(function)), parallel_kernel(function)


def rounded_serial_and_parallel(function: Callable[..., Any]) -> KernelPair:
    """Return the same for a kernel whose every operation is rounded, so that its bits do not depend on how many rows it takes.

    The compiler fuses multiplications and additions in a loop for all threads other than in one for a single thread.
    """
    options: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}
    return njit(**options)(_alone(function)), njit(parallel=True, **options)(function)


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy under another name: by names, Numba's cache on disk tells functions apart."""
    alone = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    alone.__qualname__ = f"{function.__name__}_in_one_thread"
    return alone
