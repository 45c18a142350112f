"""Lets a forked process compute: threads of OpenMP end before a fork, and parent and child start new ones."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

_SOFT_PAUSE = 1  # omp_pause_soft: threads end, settings stay
_FORKING = threading.local()  # the thread that forks is the only one of the child


def prepare_forks() -> None:
    """Let forked processes run parallel kernels, on systems that fork.

    A thread keeps the threads of GNU's OpenMP that it has started, and a child would wait for them for ever: it has only a
    copy of the thread that forked it. So Numba ends a child that starts a parallel kernel. Here those threads are released
    before the fork, and Numba is informed that the child may start its own, which takes less than a millisecond.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_release_threads, after_in_child=_begin_child)


def _gnu_layer() -> Any:
    """Return Numba's threading layer if it is loaded and runs on GNU's OpenMP; the other layers survive a fork."""
    layer = sys.modules.get("numba.np.ufunc.omppool")
    return layer if getattr(layer, "openmp_vendor", None) == "GNU" else None


def _release_threads() -> None:
    """End the threads that OpenMP keeps for the thread that is about to fork."""
    _FORKING.released = False
    layer = _gnu_layer()
    if layer is not None:
        import ctypes

        openmp = ctypes.CDLL(
            layer.__file__
        )  # it is loaded already; symbols are also found in the OpenMP it is linked to
        if hasattr(openmp, "omp_pause_resource"):  # since GCC 9
            _FORKING.released = openmp.omp_pause_resource(_SOFT_PAUSE, openmp.omp_get_initial_device()) == 0


def _begin_child() -> None:
    """Tell Numba that this process may run kernels: in one thread, where the threads of the parent could not be released."""
    layer = _gnu_layer()
    if layer is not None:
        import ctypes

        def call(name: str, threads: int) -> None:
            ctypes.CFUNCTYPE(None, ctypes.c_int)(getattr(layer, name))(threads)

        call("launch_threads", sys.modules["numba"].config.NUMBA_NUM_THREADS)
        if not _FORKING.released:
            call("set_num_threads", 1)
