"""Copies large arrays between ordinary host memory and a GPU at the speed of the link.

The driver copies ordinary memory through a small buffer of its own, in one thread. Here several threads copy pieces to or from
page-locked buffers, while the link moves those of other pieces.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from penstock.host.threads import usable_cores

#: Shorter arrays are copied as fast by the driver.
LEAST_STAGED_NBYTES = 16 << 20
_PIECE_NBYTES, _MOST_THREADS, _BUFFERS = 4 << 20, 8, 2

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
# Bytes of a host array, and the address on the GPU that they come from or go to.
_Piece = tuple[Bytes, int]


class _Lane:
    """A stream, and page-locked buffers that it copies to or from in turn; used by one thread at a time."""

    def __init__(self) -> None:
        import cupy

        self.lock, self.stream = threading.Lock(), cupy.cuda.Stream(non_blocking=True)
        self._memory = [cupy.cuda.alloc_pinned_memory(_PIECE_NBYTES) for _ in range(_BUFFERS)]
        self.buffers = [np.frombuffer(one, np.uint8, _PIECE_NBYTES) for one in self._memory]
        self.events = [cupy.cuda.Event(disable_timing=True) for _ in range(_BUFFERS)]
        self.done = cupy.cuda.Event(disable_timing=True)

    def copy(self, on_gpu: int, buffer: int, nbytes: int, kind: int) -> None:
        """Copy between the GPU and a buffer, in order on the stream."""
        from cupy.cuda import runtime

        places = self.buffers[buffer].ctypes.data, on_gpu
        source, target = places if kind == runtime.memcpyHostToDevice else places[::-1]
        runtime.memcpyAsync(target, source, nbytes, kind, self.stream.ptr)
        self.events[buffer].record(self.stream)


class _Lanes:
    """Threads, and as many lanes, that are kept for all copies of a process in one direction."""

    def __init__(self) -> None:
        self.all = [_Lane() for _ in range(min(_MOST_THREADS, usable_cores()))]
        self.threads = ThreadPoolExecutor(len(self.all), "penstock-copy")


@functools.cache
def _lanes(device: int, direction: int) -> _Lanes:
    return _Lanes()


def can_be_staged(array: Any) -> bool:
    """Return whether a host array is worth staging: large, and contiguous."""
    return array.nbytes >= LEAST_STAGED_NBYTES and bool(array.flags.c_contiguous)


def copy_to_gpu(source: np.ndarray[Any, Any], target: Any) -> None:
    """Copy a contiguous host array to a CuPy array of its size, in order on CuPy's current stream.

    The source has been read when the call returns.
    """
    copy_all_to_gpu([(source, target)])


def copy_all_to_gpu(pairs: Sequence[tuple[np.ndarray[Any, Any], Any]]) -> None:
    """Copy several host arrays as :func:`copy_to_gpu` does, with the threads of one."""
    import cupy

    kind = cupy.cuda.runtime.memcpyHostToDevice

    def fill(lane: _Lane, pieces: list[_Piece]) -> None:
        for number, (of_host, address) in enumerate(pieces):
            buffer = number % _BUFFERS
            lane.events[buffer].synchronize()  # the link has read the buffer
            np.copyto(lane.buffers[buffer][: of_host.size], of_host)
            lane.copy(address, buffer, of_host.size, kind)

    _share_out(pairs, fill, kind)


def copy_from_gpu(source: Any, target: np.ndarray[Any, Any]) -> None:
    """Copy a contiguous CuPy array to a contiguous host array of its size, after the work on CuPy's current stream."""
    copy_all_from_gpu([(source, target)])


def copy_all_from_gpu(pairs: Sequence[tuple[Any, np.ndarray[Any, Any]]]) -> None:
    """Copy several arrays to the host as :func:`copy_from_gpu` does, with the threads of one."""
    import cupy

    kind = cupy.cuda.runtime.memcpyDeviceToHost

    def drain(lane: _Lane, pieces: list[_Piece]) -> None:
        for number in range(len(pieces) + 1):
            if number < len(pieces):
                of_host, address = pieces[number]
                lane.copy(address, number % _BUFFERS, of_host.size, kind)
            if number:
                of_host, last = pieces[number - 1][0], (number - 1) % _BUFFERS
                lane.events[last].synchronize()
                np.copyto(of_host, lane.buffers[last][: of_host.size])

    _share_out([(target, source) for source, target in pairs], drain, kind)


def _share_out(
    pairs: Sequence[tuple[np.ndarray[Any, Any], Any]], copy: Callable[[_Lane, list[_Piece]], None], kind: int
) -> None:
    """Let lanes copy pieces of host and GPU arrays, after what the current stream does and before what it will do."""
    import cupy

    pieces: list[_Piece] = []
    for of_host, on_gpu in pairs:
        data, address = of_host.reshape(-1).view(np.uint8), int(on_gpu.data.ptr)
        pieces += [
            (data[start : start + _PIECE_NBYTES], address + start) for start in range(0, data.size, _PIECE_NBYTES)
        ]
    device, current = cupy.cuda.Device(), cupy.cuda.get_current_stream()
    lanes = _lanes(device.id, kind)
    ready = current.record(cupy.cuda.Event(disable_timing=True))

    def work(lane: _Lane, first: int) -> None:
        with device, lane.lock:
            lane.stream.wait_event(ready)
            copy(lane, pieces[first :: len(lanes.all)])
            lane.done.record(lane.stream)
            current.wait_event(lane.done)

    used, copying = lanes.all[: len(pieces)], []
    with contextlib.suppress(RuntimeError):  # Python is ending: this thread copies the rest
        for number, lane in enumerate(used):
            copying.append(lanes.threads.submit(work, lane, number))
    for number in range(len(copying), len(used)):
        work(used[number], number)
    for copied in copying:
        copied.result()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lanes.cache_clear)  # a child has none of these threads
