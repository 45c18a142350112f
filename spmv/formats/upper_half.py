"""The upper half of a large matrix on the host, in blocks, made by a GPU of the pieces that it looks at."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from penstock.spmv.device import Array, Device
from penstock.spmv.formats.convert import chunk_offsets, launch_fill_blocks
from penstock.spmv.formats.sliced_bsr import HEIGHT
from penstock.spmv.formats.statistics import first_kept
from penstock.spmv.formats.through_device import Returning, Rows

# Blocks, of those that are expected, for which there is room; memory that is not written takes none.
_ROOM = 1.5


class UpperHalf:
    """Blocks on and right of the diagonal, in chunks of 32 block rows, of a matrix whose pieces are looked at.

    A matrix that is too large for a GPU would have to go there twice: once to be looked at, and once to be converted. Most are
    symmetric, and stored as their upper half, so that is made at once; it is given up if it becomes larger than expected.

    Parameters
    ----------
    device : Device
        The GPU to which the pieces come.
    size : int
        Rows of a block.
    blocks : int
        The blocks that are expected.
    values_dtype : dtype
    """

    def __init__(self, device: Device, size: int, blocks: int, values_dtype: Any) -> None:
        self._device, self._size, room = device, size, int(_ROOM * blocks)
        self._indices, self._values = np.empty(room, np.int32), np.empty(room * size * size, values_dtype)
        self._offsets: list[Array] = [np.zeros(1, dtype=np.int64)]
        self._stored, self._returning = 0, Returning(device)

    @property
    def granularity(self) -> int:
        """Rows of a chunk: pieces end at multiples of them."""
        return HEIGHT * self._size

    def add(self, rows: Rows, counts: Array) -> None:
        """Convert the next rows, which are sound; ``counts`` are the blocks to be stored of each block row, on the GPU."""
        xp, size = self._device.xp, self._size
        offsets = chunk_offsets(counts, HEIGHT)
        begin, end = self._stored, self._stored + int(offsets[-1])
        if end > self._indices.size:
            self._indices = self._indices[:0]  # there is no room for what follows either
            return
        made = xp.full(end - begin, -1, dtype=np.int32), xp.zeros((end - begin) * size * size, self._values.dtype)
        kept = first_kept(rows.first // size)
        launch_fill_blocks(counts.size, kept, HEIGHT, size, rows[1:], xp.empty(0, dtype=np.int32), offsets, *made)
        targets = self._indices[begin:end], self._values[begin * size * size : end * size * size]
        self._returning.add(list(zip(made, targets, strict=True)))
        self._offsets.append(self._device.to_host(offsets[1:]) + begin)
        self._stored = end

    def arrays(self, rows: int) -> tuple[Array, Array, Array] | None:
        """Return chunk offsets, column indices and values of the whole matrix, which has ``rows`` rows, or None if given up."""
        self._returning.wait()
        offsets = np.concatenate(self._offsets)
        if len(offsets) != -(-rows // self.granularity) + 1:
            return None
        return offsets, self._indices[: self._stored], self._values[: self._stored * self._size**2]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._returning.close()
