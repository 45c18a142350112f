"""Rows of the matrix of a mesh on a GPU whose elements stay in host memory: those of a slab are copied before it is made."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np

from penstock.fem.element_rows import ElementRowMaker, MeshElements, RowPattern, Window
from penstock.spmv import Array, Device
from penstock.spmv.compilation.jit import strict_kernel
from penstock.spmv.formats.sliced_bsr import HEIGHT

_HOST_TO_DEVICE = 1  # cudaMemcpyHostToDevice
_ALIGNED = 256


def windowed(elements: MeshElements, pattern: RowPattern, start: int, stop: int) -> tuple[MeshElements, RowPattern]:
    """Return views of what the rows of nodes ``start`` to ``stop``, whole chunks if there are any, are made from, on the host.

    All elements and nodes between the first and the last needed one are among them: few more than needed where the elements of a
    node, and the nodes of an element, have numbers that lie close together.
    """
    offsets, places = elements.element_offsets, elements.node_elements
    first, last, lowest, highest = _extent(start, stop, offsets, places, elements.connectivity)
    dof, factors = elements.dof, elements.factors
    some = replace(
        elements,
        coordinates=elements.coordinates[lowest : highest + 1],
        connectivity=elements.connectivity[first : last + 1],
        factors=factors[first : last + 1] if factors.size else factors,
        fixed=elements.fixed[lowest * dof : (highest + 1) * dof],
        element_offsets=offsets[start : stop + 1],
        node_elements=places[offsets[start] : offsets[stop]],
        window=Window(start, lowest, first, columns=offsets.size - 1),
    )
    between = slice(pattern.offsets[start], pattern.offsets[stop])
    chunks = slice(start // HEIGHT, -(-stop // HEIGHT) + 1)
    rows = RowPattern(
        pattern.offsets[start : stop + 1], pattern.columns[between], pattern.chunk_starts[chunks], pattern.widest
    )
    return some, rows


@strict_kernel
def _extent(start: int, stop: int, offsets: Array, places: Array, connectivity: Array) -> tuple[int, int, int, int]:
    """Return the first and the last element of some nodes, and the lowest and the highest node of these elements."""
    size = connectivity.shape[1]
    first, last, lowest, highest = connectivity.shape[0], 0, start, stop - 1
    for entry in range(offsets[start], offsets[stop]):
        element = places[entry] // size
        first, last = min(first, element), max(last, element)
        for b in range(size):
            lowest, highest = min(lowest, connectivity[element, b]), max(highest, connectivity[element, b])
    return first, last, lowest, highest


def windows_nbytes(elements: MeshElements, pattern: RowPattern, bounds: Sequence[int]) -> tuple[int, int]:
    """Return the bytes that all slabs of nodes between some bounds are made from, and the most for one of them."""
    each = [_layout(*windowed(elements, pattern, *ends))[1] for ends in itertools.pairwise(bounds)]
    return sum(each), max(each)


def _layout(elements: MeshElements, pattern: RowPattern) -> tuple[list[tuple[str, Array, int]], int]:
    """Return names, arrays and places of what lies one after another in a buffer, and its bytes."""
    placed, end = [], 0
    for name, array in [*elements.arrays().items(), *((f"pattern {key}", a) for key, a in pattern.arrays().items())]:
        placed.append((name, array, end))
        end += -(-array.nbytes // _ALIGNED) * _ALIGNED
    return placed, max(end, 1)


class _Piece(NamedTuple):
    """What a slab is made from: its bytes in page-locked memory, and the same as arrays on the GPU when they have been copied."""

    memory: Any
    nbytes: int
    maker: ElementRowMaker


class StreamedRowMaker:
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
        Nodes between which slabs are made. What each is made from is copied to page-locked memory.

    Attributes
    ----------
    nbytes : int
        Bytes that the device holds: what the largest slab is made from.
    moved_nbytes : int
        Bytes that are copied for all slabs together.

    Notes
    -----
    A slab is copied and made in order in one stream.
    """

    def __init__(
        self, elements: MeshElements, pattern: RowPattern, format_name: str, device: Device, bounds: Sequence[int]
    ) -> None:
        self.elements, self.pattern, self.format_name, self.device = elements, pattern, format_name, device
        self.bounds = list(bounds)
        self.moved_nbytes, self.nbytes = windows_nbytes(elements, pattern, bounds)
        with device.current():
            self._staging = device.xp.empty(self.nbytes, dtype=np.uint8)
            self._pieces = {ends: self._piece(*ends) for ends in itertools.pairwise(self.bounds)}

    def _piece(self, start: int, stop: int) -> _Piece:
        """Copy what a slab is made from."""
        import cupy

        elements, pattern = windowed(self.elements, self.pattern, start, stop)
        placed, nbytes = _layout(elements, pattern)
        memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(nbytes), 0)  # the pool would hold more
        buffer, there = np.frombuffer(memory, np.uint8, nbytes), dict[str, Array]()
        for name, array, place in placed:
            end = place + array.nbytes
            buffer[place:end].view(array.dtype).reshape(array.shape)[...] = array
            there[name] = self._staging[place:end].view(array.dtype).reshape(array.shape)
        of_pattern = {name: there.pop(f"pattern {name}") for name in pattern.arrays()}
        made_from = replace(elements, **there), replace(pattern, **of_pattern)
        return _Piece(memory, nbytes, ElementRowMaker(*made_from, self.format_name, self.device))

    def with_factors(self, factors: Array) -> Self:
        """Return what makes rows of the same mesh with other factors of its elements."""
        elements = replace(self.elements, factors=factors)
        return type(self)(elements, self.pattern, self.format_name, self.device, self.bounds)

    def make(self, row_start: int, row_stop: int, arrays: Mapping[str, Array]) -> None:
        """Write a slab between two neighbouring bounds: its structure, its values, or both; in CuPy's current stream."""
        dof = self.elements.dof
        piece = self._pieces[row_start // dof, row_stop // dof]
        stream = self.device.xp.cuda.get_current_stream()
        runtime = self.device.xp.cuda.runtime
        runtime.memcpyAsync(self._staging.data.ptr, piece.memory.ptr, piece.nbytes, _HOST_TO_DEVICE, stream.ptr)
        piece.maker.make(row_start, row_stop, arrays)
