"""Arrays of other libraries, such as Torch and JAX, as arrays of NumPy or CuPy that share their memory, through DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.spmv.device import Array
from penstock.spmv.errors import InputError

_CUDA = 2  # of DLPack's numbers of devices


def is_foreign(array: Any) -> bool:
    """Return whether something is an array of another library than NumPy and CuPy."""
    return hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray) and not hasattr(array, "get")


def as_array(array: Any) -> Array:
    """Return an array of another library as one of NumPy, or of CuPy on a GPU, that shares its memory."""
    if hasattr(array, "detach"):  # a tensor of Torch may record what is computed with it
        array = array.detach()
    kind, _ = array.__dlpack_device__()
    if int(kind) == _CUDA:
        import cupy

        return cupy.from_dlpack(array)
    try:
        return np.from_dlpack(array)
    except (RuntimeError, BufferError, TypeError) as error:  # of types that NumPy does not have, such as bfloat16
        kind = getattr(array, "dtype", "of another library")
        raise InputError(f"an array of type {kind} cannot be read: {error}; convert it to float64") from error
