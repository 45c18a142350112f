"""Complete rows of a matrix whose upper half is stored in chunks, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.spmv import Array, Device, SymmetricBsrMatrix, device_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch, type_names
from penstock.spmv.compilation.table import register_kernel
from penstock.spmv.products.block_rows import BlockRows

MIRRORED_ROW_KERNELS = CudaSource("penstock.spmv.kernels", "mirrored_rows.cu")
_THREADS, _COPY_THREADS = 256, 64


class Waiting(NamedTuple):
    """Blocks that mirror those of earlier rows: int32 block rows and block columns, and blocks of float64, in any order."""

    rows: Array
    columns: Array
    blocks: Array

    @classmethod
    def empty(cls, device: Device, count: int, size: int) -> Waiting:
        """Return lists for some blocks of ``size`` rows."""
        rows, columns = (device.xp.empty(count, dtype=np.int32) for _ in range(2))
        return cls(rows, columns, device.xp.empty((count, size, size)))

    def of_rows_from(self, stop: int, others: Waiting) -> Waiting:
        """Return the blocks of rows from one on, and other blocks."""
        xp = device_of(self.blocks).xp
        chosen = xp.flatnonzero(self.rows >= stop)
        if not chosen.size:
            return others
        return Waiting(*(xp.concatenate([own[chosen], other]) for own, other in zip(self, others, strict=True)))


@register_kernel("block_rows", "complete", "cuda")
def complete_rows(
    slabs: Sequence[tuple[int, SymmetricBsrMatrix]], waiting: Waiting | None, start: int, stop: int
) -> tuple[BlockRows, Waiting]:
    """Return block rows ``start`` to ``stop``, which the slabs hold one after another, and the blocks that later rows wait for.

    A slab comes with its first block row. Of each block 8 bytes a scalar are written, twice for those that are mirrored.
    """
    size, device = slabs[0][1].block_size, device_of(slabs[0][1].values)
    xp, waiting = device.xp, waiting or Waiting.empty(device, 0, size)
    upper, lower, counters = (xp.zeros(length, dtype=np.int32) for length in (stop - start, stop - start, 2))
    ends = np.int64(start), np.int64(stop)
    kernel, count = MIRRORED_ROW_KERNELS.function, np.int64(waiting.rows.size)
    for first, slab in slabs:
        arrays = (slab.chunk_offsets, slab.column_indices, upper, lower, counters)
        launch(kernel("count_mirrored"), *_threads(slab), (*_of_slab(first, slab), *ends, *arrays))
    launch(kernel("count_waiting"), int(count), _THREADS, (count, *ends, waiting.rows, lower))
    offsets = xp.zeros(stop - start + 1, dtype=np.int64)
    xp.cumsum(upper + lower, dtype=np.int64, out=offsets[1:])
    entries, later = (int(number) for number in device.to_host(xp.stack([offsets[-1], counters[0]])))

    columns, placed = xp.empty(entries, dtype=np.int32), xp.zeros(stop - start, dtype=np.int32)
    for first, slab in slabs:
        targets = (offsets, lower, placed, columns)
        structure = (slab.chunk_offsets, slab.column_indices)
        launch(kernel("list_mirrored"), *_threads(slab), (*_of_slab(first, slab), *ends, *structure, *targets))
    of_waiting = (waiting.rows, waiting.columns)
    launch(kernel("list_waiting"), int(count), _THREADS, (count, *ends, *of_waiting, offsets, placed, columns))
    rows = np.int64(stop - start)
    launch(kernel("sort_mirrored"), int(rows), _THREADS, (rows, offsets, lower, columns))

    places = (offsets, lower, columns, xp.empty((entries, size, size)))
    new = Waiting.empty(device, later, size)
    for first, slab in slabs:
        function = kernel(f"copy_mirrored<{type_names(slab.values)}, {size}>")
        stored = (slab.chunk_offsets, slab.column_indices, slab.values, *slab.lowered)
        arguments = (*_of_slab(first, slab), *ends, *stored, *places, counters[1:], *new)
        launch(function, slab.shape[0] // size, _COPY_THREADS, arguments)
    function = kernel(f"copy_waiting<{size}>")
    launch(function, int(count), _THREADS, (count, *ends, *waiting, *places))
    return BlockRows(start, offsets, columns, places[-1]), waiting.of_rows_from(stop, new)


def _threads(slab: SymmetricBsrMatrix) -> tuple[int, int]:
    return slab.shape[0] // slab.block_size, _THREADS


def _of_slab(first: int, slab: SymmetricBsrMatrix) -> tuple[np.int64, np.int64]:
    return np.int64(slab.shape[0] // slab.block_size), np.int64(first)
