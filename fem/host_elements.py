"""Rows of the matrix of a mesh on a GPU whose elements stay in host memory: those of a slab are copied before it is made."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np

from penstock.fem.element_rows import ElementRowMaker, MeshElements, RowPattern, Window
from penstock.spmv import Array, Device, DeviceError, InputError, format_nbytes
from penstock.spmv.compilation.jit import strict_kernel
from penstock.spmv.formats.sliced_bsr import HEIGHT

_ALIGNED = 256


def windows_of(
    elements: MeshElements, pattern: RowPattern, bounds: Sequence[int]
) -> Iterator[tuple[MeshElements, RowPattern]]:
    """Yield the windows of all slabs of nodes between some bounds."""
    local = np.full(len(elements.connectivity), -1, dtype=np.int32)
    for start, stop in itertools.pairwise(bounds):
        yield _window_of(elements, pattern, start, stop, local)


def _window_of(
    elements: MeshElements, pattern: RowPattern, start: int, stop: int, local: Array
) -> tuple[MeshElements, RowPattern]:
    """Return the elements and the pattern for the rows of nodes ``start`` to ``stop``, on the host.

    In a format of chunks both are multiples of 32, or ``stop`` is the number of nodes. Elements are renumbered in their order, so
    that bits do not change; of the nodes all between the lowest and the highest are there. ``local`` is -1 for each element, and
    left so.
    """
    offsets, size, dof = elements.element_offsets, elements.connectivity.shape[1], elements.dof
    numbers, places = _touched(offsets[start], offsets[stop], elements.node_elements, size, local)
    connectivity = elements.connectivity[numbers]
    lowest = int(connectivity.min(initial=start))
    highest = int(connectivity.max(initial=stop - 1))
    some = replace(
        elements,
        coordinates=elements.coordinates[lowest : highest + 1],
        connectivity=connectivity,
        factors=elements.factors[numbers] if elements.factors.size else elements.factors,
        fixed=elements.fixed[lowest * dof : (highest + 1) * dof],
        element_offsets=offsets[start : stop + 1],
        node_elements=places,
        window=Window(first_row=start, first_node=lowest, columns=offsets.size - 1),
    )
    between = slice(pattern.offsets[start], pattern.offsets[stop])
    chunks = slice(start // HEIGHT, -(-stop // HEIGHT) + 1)
    rows = RowPattern(
        pattern.offsets[start : stop + 1], pattern.columns[between], pattern.chunk_starts[chunks], pattern.widest
    )
    return some, rows


@strict_kernel
def _touched(begin: int, end: int, places: Array, size: int, local: Array) -> tuple[Array, Array]:
    """Return the elements of some places in the connectivity, ascending, and these places in the connectivity of these alone."""
    first, last = local.size, 0
    for entry in range(begin, end):
        element = places[entry] // size
        local[element], first, last = 0, min(first, element), max(last, element)
    count = 0
    numbers = np.empty(min(local.size, end - begin), dtype=np.int32)
    for element in range(first, last + 1):
        if local[element] == 0:
            local[element], numbers[count] = count, element
            count += 1
    there = np.empty(end - begin, dtype=np.int32)
    for entry in range(begin, end):
        there[entry - begin] = local[places[entry] // size] * size + places[entry] % size
    local[numbers[:count]] = -1
    return numbers[:count], there


def windows_nbytes(elements: MeshElements, pattern: RowPattern, bounds: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of the windows of all slabs of nodes between some bounds, and those of the largest."""
    each = [_layout(*window)[1] for window in windows_of(elements, pattern, bounds)]
    return sum(each), max(each)


def _layout(elements: MeshElements, pattern: RowPattern) -> tuple[list[tuple[Any, str, int]], int]:
    """Return the owner, the name and the byte offset of every array of a window in one buffer, and the bytes of the buffer."""
    placed, end = [], 0
    for owner in (elements, pattern):
        for name, array in owner.arrays().items():
            placed.append((owner, name, end))
            end += -(-array.nbytes // _ALIGNED) * _ALIGNED
    return placed, max(end, _ALIGNED)


class _Slab(NamedTuple):
    """The bytes of a window in page-locked memory, and what makes the slab of them when they have been copied to the GPU."""

    memory: Any
    nbytes: int
    maker: ElementRowMaker


class HostElementRowMaker:
    """Makes rows of the matrix of a mesh on a GPU, for a :class:`penstock.streaming.MadeStore`, from elements in host memory.

    Parameters
    ----------
    elements : MeshElements
        On the host.
    pattern : RowPattern
        On the host.
    format_name : str
    device : Device
        A GPU.
    bounds : sequence of int
        Nodes at which slabs begin, and the number of nodes.

    Attributes
    ----------
    nbytes : int
        Bytes on the device: what the largest slab is made from.
    moved_nbytes : int
        Bytes that are copied to make all slabs once. As many are held in page-locked memory.

    Raises
    ------
    DeviceError
        If the system refuses to page-lock memory.

    Notes
    -----
    All slabs are made from one buffer on the GPU. Use a maker in one stream at a time, and wait for that stream before another
    one uses it.
    """

    def __init__(
        self, elements: MeshElements, pattern: RowPattern, format_name: str, device: Device, bounds: Sequence[int]
    ) -> None:
        self.elements, self.pattern, self.format_name, self.device = elements, pattern, format_name, device
        self.bounds = list(bounds)
        self.moved_nbytes, self.nbytes = windows_nbytes(elements, pattern, self.bounds)
        with device.current():
            self._buffer = device.xp.empty(self.nbytes, dtype=np.uint8)
            windows = windows_of(elements, pattern, self.bounds)
            ends = itertools.pairwise(self.bounds)
            self._slabs = {of: self._slab(*window) for of, window in zip(ends, windows, strict=True)}

    def _slab(self, elements: MeshElements, pattern: RowPattern) -> _Slab:
        """Copy what a slab is made from to page-locked memory."""
        placed, nbytes = _layout(elements, pattern)
        memory = self._page_locked(nbytes)
        there: dict[int, dict[str, Array]] = {id(elements): {}, id(pattern): {}}
        buffer = np.frombuffer(memory, np.uint8, nbytes)
        for owner, name, offset in placed:
            array = owner.arrays()[name]
            end = offset + array.nbytes
            buffer[offset:end].view(array.dtype).reshape(array.shape)[...] = array
            there[id(owner)][name] = self._buffer[offset:end].view(array.dtype).reshape(array.shape)
        on_gpu = replace(elements, **there[id(elements)]), replace(pattern, **there[id(pattern)])
        return _Slab(memory, nbytes, ElementRowMaker(*on_gpu, self.format_name, self.device))

    def _page_locked(self, nbytes: int) -> Any:
        import cupy

        try:
            # CuPy's pool of such memory would take up to twice as much.
            return cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(nbytes), 0)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"the system refused {format_nbytes(self.moved_nbytes)} of page-locked memory for the elements ({error}); raise "
                "the limit on locked memory (ulimit -l), or free host memory"
            ) from error

    def with_factors(self, factors: Array) -> Self:
        """Return what makes rows of the same mesh with other factors of its elements, from page-locked memory of its own."""
        elements = replace(self.elements, factors=factors)
        return type(self)(elements, self.pattern, self.format_name, self.device, self.bounds)

    def make(self, row_start: int, row_stop: int, arrays: Mapping[str, Array]) -> None:
        """Write a slab: its structure, its values, or both; in CuPy's current stream.

        Raises
        ------
        InputError
            If there is no such slab.
        """
        dof, cuda = self.elements.dof, self.device.xp.cuda
        slab = self._slabs.get((row_start // dof, row_stop // dof))
        if slab is None:
            raise InputError(f"rows {row_start} to {row_stop} are no slab: those begin at nodes {self.bounds[:4]} ...")
        to_gpu = (self._buffer.data.ptr, slab.memory.ptr, slab.nbytes, cuda.runtime.memcpyHostToDevice)
        cuda.runtime.memcpyAsync(*to_gpu, cuda.get_current_stream().ptr)
        slab.maker.make(row_start, row_stop, arrays)
