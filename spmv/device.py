"""Devices that hold arrays and run kernels: the ``cpu``, always available, or a ``cuda`` device."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.spmv.errors import DeviceError, InputError
from penstock.spmv.host_memory import available_nbytes
from penstock.spmv.staged_copy import can_be_staged, copy_from_gpu, copy_to_gpu

#: A NumPy array on the CPU or a CuPy array on a CUDA device; the two share the interface used here.
Array = Any


@dataclass(frozen=True)
class Device:
    """A device that holds arrays and runs kernels.

    Parameters
    ----------
    kind : {"cpu", "cuda"}
        ``cpu`` runs Numba kernels on NumPy arrays; ``cuda`` runs CUDA C++ on CuPy arrays.
    index : int
        Number of the CUDA device, 0 for the first.

    Examples
    --------
    >>> from penstock.spmv import Device
    >>> str(Device("cuda", 1)), Device.parse("cpu").xp.__name__
    ('cuda:1', 'numpy')
    """

    kind: Literal["cpu", "cuda"]
    index: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "cuda") or self.index < 0:
            raise InputError(f"unknown device {self.kind!r} with the number {self.index}; expected 'cpu' or 'cuda'")

    @classmethod
    def parse(cls, name: str | Device) -> Device:
        """Parse ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; a CUDA device must be usable.

        Raises
        ------
        InputError
            If the name is none of these.
        DeviceError
            If a CUDA device is named and CuPy, the driver or that device is missing.
        """
        if isinstance(name, Device):
            return name
        kind, _, index = name.partition(":")
        if kind == "cpu" and not index:
            return CPU
        if kind != "cuda" or not (index.isdigit() or not index):
            raise InputError(f"unknown device {name!r}; expected 'cpu', 'cuda' or 'cuda:<number>'")
        number, count = int(index or 0), cuda_device_count()
        if number >= count:
            raise DeviceError(f"device {name!r} requested, but {count} CUDA devices are visible; use a smaller number")
        return cls("cuda", number)

    @property
    def xp(self) -> Any:
        """The array module of this device: ``numpy`` or ``cupy``."""
        if self.kind == "cpu":
            return np
        import cupy

        return cupy

    def asarray(self, array: Array, dtype: Any = None) -> Array:
        """Return ``array`` on this device, copied only if it is elsewhere or of another type."""
        if self.kind == "cpu":
            return np.asarray(_fetched(array) if hasattr(array, "get") else array, dtype=dtype)
        with self.current():
            if isinstance(array, np.ndarray) and can_be_staged(array):
                on_device = self.xp.empty(array.shape, dtype=array.dtype)
                copy_to_gpu(array, on_device)
                return self.xp.asarray(on_device, dtype=dtype)
            return self.xp.asarray(array, dtype=dtype)

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """Return ``array`` as a NumPy array."""
        return CPU.asarray(array)  # type: ignore[no-any-return]

    def pinned_like(self, array: Array) -> np.ndarray[Any, Any]:
        """Return a page-locked host buffer for :meth:`copy_to_pinned`; on the CPU, the array itself."""
        if self.kind == "cpu":
            return array  # type: ignore[no-any-return]
        import cupyx

        return cupyx.empty_like_pinned(array)  # type: ignore[no-any-return]

    def copy_to_pinned(self, array: Array, pinned: np.ndarray[Any, Any]) -> None:
        """Copy an array to its pinned copy, in order on CuPy's current stream, and wait until it has arrived."""
        if self.kind == "cuda":
            stream = self.xp.cuda.get_current_stream()
            array.get(stream=stream, out=pinned, blocking=False)
            stream.synchronize()

    def fetch_later(self, array: Array) -> Callable[[], np.ndarray[Any, Any]]:
        """Begin to copy an array to the host, in the order of CuPy's stream, and return a function that waits for it alone."""
        if self.kind == "cpu":
            return lambda: array
        cuda, pinned = self.xp.cuda, self.pinned_like(array)
        stream, arrived = cuda.get_current_stream(), cuda.Event(disable_timing=True)
        array.get(stream=stream, out=pinned, blocking=False)
        arrived.record(stream)

        def wait() -> np.ndarray[Any, Any]:
            arrived.synchronize()
            return pinned

        return wait

    def copy_to_device(self, source: np.ndarray[Any, Any], array: Array) -> None:
        """Copy a small host array, in stream order; the source must not be page-locked and may be changed at once."""
        if self.kind == "cpu":
            array[...] = source
        else:
            array.set(source, stream=self.xp.cuda.get_current_stream())

    def fill(self, array: Array, source: Array) -> None:
        """Overwrite an array of this device with one of the same shape and type, of this device or of the host."""
        if self.kind == "cpu" or not isinstance(source, np.ndarray):
            array[...] = source
        elif can_be_staged(source):
            copy_to_gpu(source, array)
        else:
            self.copy_to_device(source, array)

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which CuPy allocates and launches on this device.

        Raises
        ------
        DeviceError
            If it is a GPU and this process was forked from one that used GPUs.
        """
        if self.kind == "cpu":
            return nullcontext()
        _check_not_forked()
        return self.xp.cuda.Device(self.index)  # type: ignore[no-any-return]

    def make_room(self, nbytes: int) -> None:
        """Give back what CuPy's pool holds and does not use, where less than this is free outside of it; costs milliseconds.

        A block of the pool that is used in part cannot serve larger arrays, and CUDA graphs take their memory elsewhere.
        """
        if self.kind == "cuda" and int(self.xp.cuda.runtime.memGetInfo()[0]) < nbytes:
            self.xp.get_default_memory_pool().free_all_blocks()

    def free_nbytes(self) -> int:
        """Return the bytes of free memory; on a GPU including the unused part of CuPy's pool."""
        if self.kind == "cpu":
            return available_nbytes()
        with self.current():
            return int(self.xp.cuda.runtime.memGetInfo()[0]) + int(self.xp.get_default_memory_pool().free_bytes())

    def synchronize(self) -> None:
        """Wait until all work queued on this device has ended."""
        if self.kind == "cuda":
            with self.current() as device:
                device.synchronize()

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


#: The host, where arrays are those of NumPy.
CPU = Device("cpu")


@functools.cache
def cuda_device_count() -> int:
    """Count the usable CUDA devices.

    A DeviceError says whether CuPy or a driver is missing, and what to install, or that this process was forked from one that
    used GPUs.
    """
    _check_not_forked()
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            "a CUDA device was requested, but CuPy is not installed: pip install 'penstock[cuda]' (CUDA 13) or "
            "'penstock[cuda12]', or use device: cpu"
        ) from error
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"a CUDA device was requested, but none is usable ({error}); use device: cpu") from error


@functools.cache
def forked_from_cuda() -> bool:
    """Return whether this process was forked from one that had used CUDA, which refuses to work here."""
    cupy = sys.modules.get("cupy")
    if not _FORKED or cupy is None:
        return False
    try:
        cupy.cuda.runtime.free(0)  # needs the driver, unlike a count of devices
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return bool(error.status == _INITIALIZATION_ERROR)
    return False


_FORKED = False
_INITIALIZATION_ERROR = 3  # cudaErrorInitializationError


def _begin_child() -> None:
    """Clear the cached answers of the parent process."""
    global _FORKED
    _FORKED = True
    cuda_device_count.cache_clear()
    forked_from_cuda.cache_clear()


def _check_not_forked() -> None:
    if forked_from_cuda():
        raise DeviceError(
            "this process was forked from one that had used CUDA, which does not survive a fork; start processes with "
            "multiprocessing.get_context('spawn') or 'forkserver', or compute on the CPU here: device='cpu'"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)


def _fetched(array: Array) -> np.ndarray[Any, Any]:
    """Return a CuPy array as a NumPy array."""
    if not can_be_staged(array):
        return array.get()  # type: ignore[no-any-return]
    on_host = np.empty(array.shape, dtype=array.dtype)
    with device_of(array).current():
        copy_from_gpu(array, on_host)
    return on_host


def count_true(mask: Array) -> int:
    """Count the elements of a boolean array that hold; for CuPy's ``count_nonzero`` NVRTC would compile CUB, for four seconds."""
    return int(np.count_nonzero(mask) if isinstance(mask, np.ndarray) else mask.nonzero()[0].size)


def address_of(array: Array) -> int:
    """Return where an array begins in the memory of its device."""
    return int(array.data.ptr if hasattr(array, "get") else array.ctypes.data)


def loadable_in_pairs(blocks: Array, size: int) -> Array:
    """Return an array of blocks of ``size`` rows as kernels load them, rows of an even size in pairs of scalars.

    A caller's view may begin in the middle of a pair; it is then copied.
    """
    return blocks.copy() if size % 2 == 0 and address_of(blocks) % (2 * blocks.itemsize) else blocks


def device_of(array: Array) -> Device:
    """Return the device an array lives on.

    Parameters
    ----------
    array : NumPy or CuPy array

    Returns
    -------
    Device

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.spmv import device_of
    >>> str(device_of(np.ones(2)))
    'cpu'
    """
    return Device("cuda", array.device.id) if hasattr(array, "get") else CPU
