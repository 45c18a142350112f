"""Numba decorators of the CPU kernels."""

from __future__ import annotations

import functools
import itertools
import os
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
from numba import njit

from penstock.host.threads import mapped, usable_cores

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

#: The same for functions of a user, which are not kept on disk.
compiled_anew: Decorator = njit(nogil=True, fastmath={"contract"}, error_model="numpy")

#: Serial functions without any fast-math, with Python's errors.
strict_kernel = _kept_on_disk(nogil=True)

#: Functions that are copied into the kernels that call them, before anything is compiled.
inlined: Decorator = njit(nogil=True, inline="always")

#: Functions of kernels whose machine code is copied into them: they are typed and translated once, not where they are called.
embedded_kernel = _kept_on_disk(nogil=True, fastmath={"contract"}, error_model="numpy", forceinline=True)

#: Small functions without fused multiply-adds.
rounded_kernel = _kept_on_disk(nogil=True, error_model="numpy")

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


class SharedRange:
    """A kernel ``function(begin, end, *arguments)`` of the items ``begin <= i < end``, called as ``kernel(count, *arguments)``.

    It is compiled once, for one thread, which takes a quarter of the time of a parallel loop of Numba.

    Items are shared out to as many threads as Numba would use, ``least`` or more each: as many as are worth waking a thread,
    which takes some 30 us. It suits what is done once in a set-up or an iteration. Results do not depend on the number of
    threads if items do not depend on each other.
    """

    def __init__(self, function: Callable[..., Any], least: int, decorator: Decorator) -> None:
        self.compiled, self._least = decorator(function), least
        functools.update_wrapper(self, function)

    def with_function(self, **functions: Callable[..., Any]) -> SharedRange:
        """Return the same kernel with other functions in the place of some that it calls, by their names in its module.

        They are a user's: the kernel is compiled anew in each process.
        """
        here: Any = self.compiled
        original = here.py_func
        other = types.FunctionType(original.__code__, {**original.__globals__, **functions}, original.__name__)
        return SharedRange(other, self._least, compiled_anew)

    def __call__(self, count: int, *arguments: Any) -> None:
        """Run the kernel for all items below ``count``."""
        count = int(count)  # of a narrow type of NumPy, products would overflow
        parts = max(1, min(numba.get_num_threads(), count // self._least))
        ends = [count * part // parts for part in range(parts + 1)]
        mapped(lambda part: self.compiled(*part, *arguments), itertools.pairwise(ends), parts, _threads)


def shared_range(least: int, *, rounded: bool = False) -> Callable[[Callable[..., Any]], SharedRange]:
    """Return a decorator of kernels of a range, whose threads get ``least`` items or more.

    A ``rounded`` kernel has no fused multiply-adds, as if the processor had none.
    """
    return functools.partial(SharedRange, least=least, decorator=rounded_kernel if rounded else serial_kernel)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(usable_cores(), "penstock-kernel")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of these threads
