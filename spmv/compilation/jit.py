"""Numba decorators of the CPU kernels."""

import types
from collections.abc import Callable
from typing import Any

from numba import njit

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _kept_on_disk(**options: Any) -> Decorator:
    """Return a decorator whose compiled code is cached on disk, where any folder for it can be written."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            kernel: Callable[..., Any] = njit(cache=True, **options)(function)
        except RuntimeError:  # such as a container that may write nothing: each process compiles anew
            kernel = njit(**options)(function)
        return kernel

    return compiled


#: Contraction into fused multiply-adds is wanted; further fast-math would let LLVM emit slow gathers. The GIL is released,
#: so that a read-ahead thread keeps running.
parallel_kernel = _kept_on_disk(parallel=True, nogil=True, fastmath={"contract"}, error_model="numpy")

#: Small functions that kernels call for every entry; they are inlined.
serial_kernel = _kept_on_disk(nogil=True, fastmath={"contract"}, error_model="numpy")

#: Serial functions without any fast-math, with Python's errors.
strict_kernel = _kept_on_disk(nogil=True)

#: Functions that are copied into the kernels that call them, before anything is compiled.
inlined: Decorator = njit(nogil=True, inline="always")

#: Small functions whose sums may be formed in any order; the order depends only on the lengths.
reassociating_kernel = _kept_on_disk(nogil=True, fastmath={"contract", "reassoc"}, error_model="numpy", inline="never")

#: One kernel compiled twice: for one thread, and for all of them.
KernelPair = tuple[Callable[..., Any], Callable[..., Any]]


def serial_and_parallel(function: Callable[..., Any]) -> KernelPair:
    """Compile a kernel for one thread, for sizes at which waking others costs more than the work, and for all threads.

    The last digits of the two may differ; see :func:`rounded_serial_and_parallel`.
    """
    return serial_kernel(_alone(function)), parallel_kernel(function)


def rounded_serial_and_parallel(function: Callable[..., Any]) -> KernelPair:
    """Like :func:`serial_and_parallel`, without fused multiply-adds: the bits do not depend on the number of rows.

    The compiler would fuse multiplications and additions differently in the parallel loop and in the serial one.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    return _kept_on_disk(**options)(_alone(function)), _kept_on_disk(parallel=True, **options)(function)


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy under another name, because Numba's cache on disk distinguishes functions by name."""
    alone = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    alone.__qualname__ = f"{function.__name__}_in_one_thread"
    return alone
