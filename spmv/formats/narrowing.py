"""Column indices of 64 bits as those of 32 bits, with all cores of the host: NumPy converts in one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from penstock.host.threads import usable_cores
from penstock.spmv.device import Array

# Entries that a thread looks at or converts at a time; fewer are not worth threads.
_PIECE = 1 << 21

Result = TypeVar("Result")


def within(indices: Array, stop: int) -> bool:
    """Return whether all indices are 0 or more and below ``stop``."""
    if not indices.size:
        return True

    def looked_at(piece: Array) -> bool:
        return int(piece.min()) >= 0 and int(piece.max()) < stop

    return all(_of_pieces(looked_at, indices))


def narrowed(indices: Array) -> Array:
    """Return indices as int32, themselves if they are; they are known to fit."""
    if indices.dtype == np.int32 or indices.size <= _PIECE or hasattr(indices, "get"):
        return indices.astype(np.int32, copy=False)
    out = np.empty(indices.size, dtype=np.int32)

    def convert(start: int) -> None:
        out[start : start + _PIECE] = indices[start : start + _PIECE]

    with ThreadPoolExecutor(usable_cores()) as threads:
        list(threads.map(convert, range(0, indices.size, _PIECE)))
    return out


def _of_pieces(function: Callable[[Array], Result], array: Array) -> Iterator[Result]:
    """Yield what a function returns for each piece of an array; one of a GPU is a single piece."""
    if hasattr(array, "get") or array.size <= _PIECE:
        yield function(array)
        return
    with ThreadPoolExecutor(usable_cores()) as threads:
        yield from threads.map(function, (array[start : start + _PIECE] for start in range(0, array.size, _PIECE)))
