"""Arrays of other libraries, such as Torch and JAX, as arrays of NumPy or CuPy that share their memory, through DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.spmv.device import Array

_CUDA = 2  # of DLPack's numbers of devices


def is_foreign(given: Any) -> bool:
    """Return whether something is an array of another library than NumPy and CuPy."""
    return hasattr(given, "__dlpack__") and not isinstance(given, np.ndarray) and not hasattr(given, "get")


def as_array(given: Any) -> Array:
    """Return an array of another library as one of NumPy, or of CuPy on a GPU, that shares its memory."""
    if hasattr(given, "detach"):  # a tensor of Torch may record what is computed with it
        given = given.detach()
    kind, _ = given.__dlpack_device__()
    if int(kind) == _CUDA:
        import cupy

        return cupy.from_dlpack(given)
    return np.from_dlpack(given)
