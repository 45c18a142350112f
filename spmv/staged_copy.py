"""Copies large arrays between ordinary host memory and a GPU at the speed of the link.

The driver copies ordinary memory through a small buffer of its own, in one thread. Here several threads copy pieces to or from
page-locked buffers, while the link moves those of other pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from penstock.host.threads import usable_cores

#: Shorter arrays are copied as fast by the driver.
LEAST_STAGED_NBYTES = 16 << 20
_PIECE_NBYTES, _MOST_THREADS, _BUFFERS = 4 << 20, 8, 2

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def can_be_staged(array: Any) -> bool:
    """Return whether a host array is worth staging: large, and contiguous."""
    return array.nbytes >= LEAST_STAGED_NBYTES and bool(array.flags.c_contiguous)


def copy_to_gpu(source: np.ndarray[Any, Any], target: Any) -> None:
    """Copy a contiguous host array to a CuPy array of its size, in order on CuPy's current stream.

    The source has been read when the call returns.
    """
    import cupy

    def fill(stream: Any, places: list[slice], buffers: list[Bytes], events: list[Any]) -> None:
        for number, place in enumerate(places):
            buffer, event = buffers[number % _BUFFERS], events[number % _BUFFERS]
            event.synchronize()  # the link has read the buffer
            piece = buffer[: place.stop - place.start]
            np.copyto(piece, data[place])
            address = target.data.ptr + place.start
            cupy.cuda.runtime.memcpyAsync(
                address, piece.ctypes.data, piece.nbytes, cupy.cuda.runtime.memcpyHostToDevice, stream.ptr
            )
            event.record(stream)

    data = source.reshape(-1).view(np.uint8)
    _share_out(data.nbytes, fill)


def copy_from_gpu(source: Any, target: np.ndarray[Any, Any]) -> None:
    """Copy a contiguous CuPy array to a contiguous host array of its size, after the work on CuPy's current stream."""
    import cupy

    def drain(stream: Any, places: list[slice], buffers: list[Bytes], events: list[Any]) -> None:
        for number in range(len(places) + 1):
            if number < len(places):
                place, buffer = places[number], buffers[number % _BUFFERS]
                address = source.data.ptr + place.start
                cupy.cuda.runtime.memcpyAsync(
                    buffer.ctypes.data,
                    address,
                    place.stop - place.start,
                    cupy.cuda.runtime.memcpyDeviceToHost,
                    stream.ptr,
                )
                events[number % _BUFFERS].record(stream)
            if number:
                place, last = places[number - 1], (number - 1) % _BUFFERS
                events[last].synchronize()
                np.copyto(data[place], buffers[last][: place.stop - place.start])

    data = target.reshape(-1).view(np.uint8)
    _share_out(data.nbytes, drain)


def _share_out(nbytes: int, copy: Callable[[Any, list[slice], list[Bytes], list[Any]], None]) -> None:
    """Let threads copy pieces, each with a stream and page-locked buffers of its own, after what the current stream does."""
    import cupy

    places = [slice(start, min(start + _PIECE_NBYTES, nbytes)) for start in range(0, nbytes, _PIECE_NBYTES)]
    count = min(_MOST_THREADS, usable_cores(), len(places))
    device, current = cupy.cuda.Device(), cupy.cuda.get_current_stream()
    ready = current.record(cupy.cuda.Event(disable_timing=True))

    def work(first: int) -> None:
        with device:
            stream = cupy.cuda.Stream(non_blocking=True)
            stream.wait_event(ready)
            # CuPy keeps page-locked memory for the next copy.
            memory = [cupy.cuda.alloc_pinned_memory(_PIECE_NBYTES) for _ in range(_BUFFERS)]
            buffers = [np.frombuffer(one, np.uint8, _PIECE_NBYTES) for one in memory]
            events = [cupy.cuda.Event(disable_timing=True) for _ in range(_BUFFERS)]
            copy(stream, places[first::count], buffers, events)
            stream.synchronize()

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(work, range(count)))
