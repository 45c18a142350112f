"""Complete rows of a matrix whose upper half is stored in chunks, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.spmv import Array, Device, SymmetricBsrMatrix, device_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch, type_names
from penstock.spmv.compilation.table import register_kernel
from penstock.spmv.device import address_of
from penstock.spmv.products.block_rows import BlockRows

MIRRORED_ROW_KERNELS = CudaSource("penstock.spmv.kernels", "mirrored_rows.cu")
_THREADS = 256


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
    count_of_rows = np.int64(stop - start)
    upper, lower, counters = (xp.zeros(length, dtype=np.int32) for length in (stop - start, stop - start, 2))
    ends = np.int64(start), np.int64(stop)
    kernel, count = MIRRORED_ROW_KERNELS.function, np.int64(waiting.rows.size)
    for first, slab in slabs:
        arrays = (slab.chunk_offsets, slab.column_indices, upper, lower, counters)
        launch(kernel("count_mirrored"), *_threads(slab), (*_of_slab(first, slab), *ends, *arrays))
    launch(kernel("count_waiting"), int(count), _THREADS, (count, *ends, waiting.rows, lower))
    offsets = xp.zeros(stop - start + 1, dtype=np.int64)
    launch(kernel("add_counts"), stop - start, _THREADS, (count_of_rows, upper, lower, offsets))
    xp.cumsum(offsets, out=offsets)
    entries, later = (int(number) for number in device.to_host(xp.stack([offsets[-1], counters[0]])))

    columns, placed, blocks = xp.empty(entries, dtype=np.int32), xp.zeros_like(lower), xp.empty((entries, size, size))
    for first, slab in slabs:
        structure = (slab.chunk_offsets, slab.column_indices)
        targets = (*structure, offsets, lower, placed, columns)
        launch(kernel("list_mirrored"), *_threads(slab), (*_of_slab(first, slab), *ends, *targets))
    area, of_waiting = np.int32(size * size), (waiting.rows, waiting.columns, offsets, lower, placed, columns)
    launch(kernel("list_waiting"), int(count), _THREADS, (count, *ends, *of_waiting, area, blocks))
    launch(kernel("sort_mirrored"), stop - start, _THREADS, (count_of_rows, offsets, lower, columns, area, blocks))

    assert len({slab.values.dtype for _, slab in slabs}) == 1, "kernels read all slabs as values of one type"
    new, table = Waiting.empty(device, later, size), device.asarray(np.array(list(map(_entry, slabs)), dtype=np.int64))
    for number, (first, slab) in enumerate(slabs):
        template, threads = f"<{type_names(slab.values)}, {size}>", 32 * (slab.shape[0] // size)
        given = (np.int64(slab.shape[0] // size), ends[0], np.int32(number), table, *slab.lowered[1:], waiting.blocks)
        launch(kernel(f"fill_mirrored{template}"), threads, _THREADS, (*given, offsets, lower, columns, blocks))
        if later:
            stored = (slab.chunk_offsets, slab.column_indices, slab.values, slab.lowered[0])
            kept = (*_of_slab(first, slab), ends[1], *stored, counters[1:], *new)
            launch(kernel(f"keep_mirrored{template}"), *_threads(slab), kept)
    return BlockRows(start, offsets, columns, blocks), waiting.of_rows_from(stop, new)


def _threads(slab: SymmetricBsrMatrix) -> tuple[int, int]:
    return slab.shape[0] // slab.block_size, _THREADS


def _of_slab(first: int, slab: SymmetricBsrMatrix) -> tuple[np.int64, np.int64]:
    return np.int64(slab.shape[0] // slab.block_size), np.int64(first)


def _entry(slab: tuple[int, SymmetricBsrMatrix]) -> tuple[int, ...]:
    """Return what the kernels' structure Slab has: the first block row, and where the arrays are in the memory of the device."""
    first, matrix = slab
    arrays = (matrix.chunk_offsets, matrix.column_indices, matrix.values, matrix.lowered[0])
    return (first, *(address_of(array) if array.size else 0 for array in arrays))
