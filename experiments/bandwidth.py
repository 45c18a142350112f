"""Measured rates of this machine: memory, link to the GPU, disk."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from penstock.spmv import CPU, Device, VectorSpace
from penstock.streaming import FileStore, HostStore
from penstock.streaming.budget import aligned_buffer

__all__ = ["measure_disk", "measure_link", "measure_memory"]

_REPEATS = 5


def _seconds(action: Any, device: Device) -> float:
    """Return the median time of an action after one warm-up."""
    times = []
    for _ in range(_REPEATS + 1):
        device.synchronize()
        began = time.perf_counter()
        action()
        device.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def measure_memory(device: Device, nbytes: int = 256 << 20) -> float:
    """Return the bytes a second that an inner product of fresh random vectors reads from memory."""
    host = np.random.default_rng().random(nbytes // 16)
    x, y = device.asarray(host), device.asarray(host[::-1].copy())
    return 2 * int(x.nbytes) / _seconds(lambda: VectorSpace(device).dot(x, y), device)


def _random_slabs(nbytes: int, count: int) -> list[scipy.sparse.csr_array]:
    """Return row slabs of random values that have about ``nbytes`` together."""
    generator = np.random.default_rng()
    entries = nbytes // count // 12
    offsets, columns = np.array([0, entries]), np.arange(entries, dtype=np.int32)
    return [
        scipy.sparse.csr_array((generator.random(entries), columns, offsets), shape=(1, entries)) for _ in range(count)
    ]


def measure_link(device: Device, nbytes: int = 512 << 20) -> float:
    """Return the bytes a second from page-locked host memory to a CUDA device."""
    with HostStore.create(_random_slabs(nbytes, 1)) as store:
        store.page_lock()
        piece = store.piece(0)
        with device.xp.cuda.Device(device.index):
            target = device.xp.empty(piece.nbytes, dtype=np.uint8)
            stream = device.xp.cuda.get_current_stream()
            copy = target.data.copy_from_host_async
            return piece.nbytes / _seconds(lambda: copy(piece.ctypes.data, piece.nbytes, stream), device)


def measure_disk(directory: Path, nbytes: int = 128 << 20) -> tuple[float, bool]:
    """Return the bytes a second read from a store in ``directory``, and whether it went around the page cache."""
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix=f".penstock-{os.getpid()}-") as folder,
        FileStore.create(Path(folder) / "probe", _random_slabs(nbytes, 16)) as store,
    ):
        buffer = aligned_buffer(max(subdivision.nbytes for subdivision in store.index.subdivisions))

        def read() -> None:
            for number in range(len(store.index.subdivisions)):
                store.read_into(number, buffer)

        return store.index.nbytes / _seconds(read, CPU), store.direct
