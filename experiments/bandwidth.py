"""Measured rates of this machine: memory, link to the GPU, disk."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from penstock.experiments.product_timing import time_in_turn
from penstock.fem import Cantilever
from penstock.spmv import CPU, BsrMatrix, Device, DeviceError, VectorSpace
from penstock.streaming import FileStore, HostStore, StreamedMatrix
from penstock.streaming.budget import aligned_buffer

__all__ = ["measure_disk", "measure_link", "measure_memory", "measure_scattering", "measure_starts"]

_REPEATS = 5
_STARTS, _SMALL_NBYTES = 64, 64 << 10
# Nodes a side, of which half of the matrix (a sixth of these bytes) is larger than caches; a GPU must have room for it.
_SCATTERING_NODES = {"cpu": (36,), "cuda": (96, 48, 24)}


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
    """Return the bytes a second from host memory to a CUDA device; page-locked, if the system lets it be."""
    with HostStore.create(_random_slabs(nbytes, 1)) as store:
        with contextlib.suppress(DeviceError):
            store.page_lock()
        [(_, piece)] = store.segments(0)
        with device.xp.cuda.Device(device.index):
            target = device.xp.empty(piece.nbytes, dtype=np.uint8)
            stream = device.xp.cuda.get_current_stream()
            copy = target.data.copy_from_host_async
            return int(piece.nbytes) / _seconds(lambda: copy(piece.ctypes.data, piece.nbytes, stream), device)


def measure_starts(device: Device, directory: Path) -> tuple[float, float, float]:
    """Return what starting a transfer and a product cost the host, and a product the GPU, in seconds, from many small ones.

    Parameters
    ----------
    device : Device
    directory : path
        On the disk that a CPU streams from.
    """
    A = BsrMatrix.from_csr(scipy.sparse.eye_array(96, format="csr"), block_size=3).to_device(device)
    x = device.xp.ones(96)
    out = device.xp.empty_like(x)

    def products() -> None:
        for _ in range(_STARTS):
            A.apply_slab(0, x, out, 1.0, 0.0)

    product = _seconds(products, device) / _STARTS
    gap = product
    if device.kind == "cuda":  # timed by events, behind a kernel that lets the host run ahead
        gap = statistics.median(time_in_turn({"products": [products]}, device, repeats=_REPEATS)["products"]) / _STARTS
    with contextlib.ExitStack() as opened:
        slabs = _random_slabs(_STARTS * _SMALL_NBYTES, _STARTS)
        store: FileStore | HostStore
        if device.kind == "cuda":
            store = opened.enter_context(HostStore.create(slabs))
        else:
            folder = opened.enter_context(_folder_in(directory))
            store = opened.enter_context(FileStore.create(folder / "probe", slabs))
        matrix = opened.enter_context(StreamedMatrix(store, store.index.nbytes // 2, device=device, at_end="continue"))
        seconds = _seconds(lambda: matrix.sweep(lambda number, slab: None), device)
        # What the bytes themselves take is small, but known only roughly: it stays in.
        return seconds / len(matrix.plan.schedule.streamed), product, gap


def measure_scattering(device: Device, memory: float) -> float:
    """Return what products of half a symmetric matrix reach of a rate at which memory is read.

    Parameters
    ----------
    device : Device
    memory : float
        Bytes a second, as :func:`measure_memory` has it.
    """
    beams = (Cantilever(nodes=nodes, dof=3) for nodes in _SCATTERING_NODES[device.kind])
    beam = next(beam for beam in beams if 8 * beam.nnz < device.free_nbytes() // 4 or beam.unknowns < 100_000)
    A = beam.matrix("symmetric_bsr").to_device(device)
    x = device.xp.ones(A.shape[0])
    out = device.xp.empty_like(x)
    return float(A.nbytes / _seconds(lambda: A.apply(x, out), device) / memory)


@contextlib.contextmanager
def _folder_in(directory: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=directory, prefix=f".penstock-{os.getpid()}-") as folder:
        yield Path(folder)


def measure_disk(directory: Path, nbytes: int = 128 << 20) -> tuple[float, bool]:
    """Return the bytes a second read from a store in ``directory``, and whether it went around the page cache."""
    with (
        _folder_in(directory) as folder,
        FileStore.create(folder / "probe", _random_slabs(nbytes, 16)) as store,
    ):
        buffer = aligned_buffer(max(subdivision.nbytes for subdivision in store.index.subdivisions))

        def read() -> None:
            for number in range(len(store.index.subdivisions)):
                store.read_into(number, buffer)

        return store.index.nbytes / _seconds(read, CPU), store.direct
