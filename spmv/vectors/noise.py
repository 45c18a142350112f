"""Random numbers that belong to rows, so that they do not depend on the device or on which rank has a row."""

from __future__ import annotations

import numpy as np

from penstock.spmv.compilation.cuda_module import launch
from penstock.spmv.device import Array, Device
from penstock.spmv.vectors.space import VECTOR_KERNELS


def noise(device: Device, first: int, n: int) -> Array:
    """Return numbers between -1 and 1 without a pattern for n rows of a long vector, the same on every device.

    Those of splitmix64 (Steele, Lea and Flood 2014), which can begin anywhere.
    """
    if device.kind == "cuda":
        out = device.xp.empty(n)
        launch(VECTOR_KERNELS.function("fill_noise"), n, 256, (np.int64(n), np.int64(first), out))
        return out
    z = np.arange(first + 1, first + n + 1, dtype=np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
