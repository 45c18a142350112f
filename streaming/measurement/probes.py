"""Measures the rates of memory, of the link to the GPU and of the disk."""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from penstock.host.folders import scratch_folder
from penstock.spmv import CPU, BsrMatrix, CsrMatrix, Device, DeviceError, VectorSpace
from penstock.spmv.model.stencil import stencil_matrix
from penstock.spmv.model.timing import time_in_turn, time_once
from penstock.streaming import FileStore, HostStore, StreamedMatrix
from penstock.streaming.planning.workload import Ring
from penstock.streaming.stores.buffers import aligned_buffer

_REPEATS = 5
_STARTS, _SMALL_NBYTES = 64, 64 << 10
# Nodes per side: half of the symmetric matrix must be larger than the caches. A GPU uses the largest for which it has room.
_SCATTERING_SIDES = {"cpu": (36,), "cuda": (96, 48, 24)}


def _seconds(action: Any, device: Device) -> float:
    """Return the time of an action after one warm-up: the median, and on a CPU, which others use too, the shortest."""
    times = [time_once(action, device)[0] for _ in range(_REPEATS + 1)]
    return min(times[1:]) if device.kind == "cpu" else statistics.median(times[1:])


def cores_are_busy(seconds: float = 0.05) -> bool:
    """Return whether a thread that only computes gets less than four fifths of the time, because others want the cores."""
    began, spent = time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < seconds:
        pass
    return time.thread_time() - spent < 0.8 * (time.perf_counter() - began)


def measure_memory(device: Device, nbytes: int = 128 << 20) -> float:
    """Return the bytes per second that an inner product of random vectors reads from memory."""
    with device.current():  # made where they are read: bringing them there would last longer than the measurement
        x, y = (_random(device.xp, nbytes // 16) for _ in range(2))
    return 2 * int(x.nbytes) / _seconds(lambda: VectorSpace(device).dot(x, y), device)


def _random(xp: Any, count: int) -> Any:
    """Return random numbers that repeat after 8 MiB: making each anew would take longer than what they are measured with."""
    repeated, values = xp.random.random(min(count, 1 << 20)), xp.empty(count)
    for start in range(0, count, len(repeated)):
        values[start : start + len(repeated)] = repeated[: count - start]
    return values


def _random_slabs(nbytes: int, count: int) -> list[CsrMatrix]:
    """Return row slabs of random values with a total of about ``nbytes``."""
    entries = nbytes // count // 12
    offsets, columns = np.array([0, entries]), np.arange(entries, dtype=np.int32)
    of_float, shape = np.dtype(np.float64), (1, entries)
    return [CsrMatrix(shape, of_float, offsets, columns, _random(np, entries)) for _ in range(count)]


def measure_link(device: Device, nbytes: int = 512 << 20) -> float:
    """Return the bytes per second from host memory to a CUDA device; the memory is page-locked if the system allows it."""
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
    """Return the seconds to start a transfer, to start a product, and the GPU's gap between products, from many small ones."""
    size = 6 if device.kind == "cpu" else 3  # of blocks whose kernel most solves compile
    offsets, columns, values = np.arange(33), np.arange(32, dtype=np.int32), np.tile(np.eye(size), (32, 1, 1))
    A = BsrMatrix((32 * size, 32 * size), np.dtype(np.float64), offsets, columns, values).to_device(device)
    x = device.xp.ones(32 * size)
    out = device.xp.empty_like(x)

    def products() -> None:
        for _ in range(_STARTS):
            A.apply_slab(0, x, out, 1.0, 0.0)

    product = _seconds(products, device) / _STARTS
    gap = product
    if device.kind == "cuda":  # timed with events, after a kernel that lets the host run ahead
        gap = statistics.median(time_in_turn({"products": [products]}, device, repeats=_REPEATS)["products"]) / _STARTS
    with contextlib.ExitStack() as opened:
        slabs = _random_slabs(_STARTS * _SMALL_NBYTES, _STARTS)
        store: FileStore | HostStore
        if device.kind == "cuda":
            store = opened.enter_context(HostStore.create(slabs))
        else:
            folder = opened.enter_context(scratch_folder(".penstock-", directory))
            store = opened.enter_context(FileStore.create(folder / "probe", slabs))
        matrix = opened.enter_context(
            StreamedMatrix(store, store.index.nbytes // 2, ring=Ring(sweeps="cyclic"), device=device)
        )
        seconds = _seconds(lambda: matrix.sweep(lambda number, slab: None), device)
        # Includes the time for the bytes themselves, which is small but only roughly known.
        return seconds / len(matrix.plan.schedule.streamed), product, gap


def measure_scattering(device: Device, memory: float) -> float:
    """Return the fraction of the memory rate (bytes/s) that products with half of a symmetric matrix reach."""
    sides, room = _SCATTERING_SIDES[device.kind], device.free_nbytes() // 4
    side = next((side for side in sides if 14 * 76 * side**3 < room), sides[-1])
    with device.current():
        A = stencil_matrix(side, "symmetric_bsr", xp=device.xp)
    x = device.xp.ones(A.shape[0])
    out = device.xp.empty_like(x)
    return float(A.nbytes / _seconds(lambda: A.apply(x, out), device) / memory)


def measure_disk(directory: Path, nbytes: int = 64 << 20) -> tuple[float, bool]:
    """Return the bytes per second read from a store in ``directory``, and whether reads bypassed the page cache."""
    with (
        scratch_folder(".penstock-", directory) as folder,
        FileStore.create(folder / "probe", _random_slabs(nbytes, 16)) as store,
    ):
        buffer = aligned_buffer(max(subdivision.nbytes for subdivision in store.index.subdivisions))

        def read() -> None:
            for number in range(len(store.index.subdivisions)):
                store.read_into(number, buffer)

        return store.index.nbytes / _seconds(read, CPU), store.direct
