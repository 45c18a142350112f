"""Column indices of 64 bits as those of 32 bits, with all cores of the host: NumPy converts in one thread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.host.threads import mapped
from penstock.spmv.device import Array, device_of
from penstock.spmv.formats.limits import INT32_MAX

# Entries that a thread looks at or converts at a time; fewer are not worth threads.
_PIECE = 1 << 21


def within(indices: Array, stop: int) -> bool:
    """Return whether all indices are 0 or more and below ``stop``."""

    def is_within(place: slice) -> bool:
        return int(indices[place].min()) >= 0 and int(indices[place].max()) < stop

    return all(_in_pieces(is_within, indices))


def narrowed(indices: Array) -> Array:
    """Return indices as int32, themselves if they are; those that do not fit become -1 or the largest number of int32."""
    if indices.dtype == np.int32:
        return indices
    if indices.dtype.itemsize < 4:
        return indices.astype(np.int32)
    xp, least = device_of(indices).xp, -1 if indices.dtype.kind == "i" else 0
    out = xp.empty(indices.size, dtype=np.int32)

    def convert(place: slice) -> bool:
        out[place] = xp.clip(indices[place], least, INT32_MAX)
        return True

    _in_pieces(convert, indices)
    return out


def _in_pieces(function: Callable[[slice], bool], indices: Array) -> list[bool]:
    """Return what a function returns for the places of all pieces of an array; on a GPU that is a single piece."""
    if indices.size <= _PIECE or device_of(indices).kind == "cuda":
        return [function(slice(0, indices.size))] if indices.size else []
    return mapped(function, (slice(start, start + _PIECE) for start in range(0, indices.size, _PIECE)))
