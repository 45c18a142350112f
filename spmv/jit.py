"""How every parallel CPU kernel is compiled."""

from collections.abc import Callable
from typing import Any

from numba import njit

__all__ = ["parallel_kernel", "serial_kernel"]

#: Contraction into fused multiply-adds is wanted; further fast-math would let LLVM emit slow gathers. The GIL is released,
#: so that a thread which reads ahead runs on. Compiled code is cached on disk.
parallel_kernel: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(
    parallel=True, nogil=True, cache=True, fastmath={"contract"}, error_model="numpy"
)

#: Small functions that kernels call for every entry; they are inlined.
serial_kernel: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(
    nogil=True, cache=True, fastmath={"contract"}, error_model="numpy"
)
