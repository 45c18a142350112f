"""Fills the arrays of matrix rows of a box mesh where they are used: in host memory, or on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np

from penstock.fem.material import Material, UniformMaterial
from penstock.fem.mesh import BoxMesh
from penstock.fem.row_layouts import LAYOUTS, Layout, SlabArrays, padded_rows
from penstock.host.threads import usable_cores
from penstock.spmv import CPU, Array, Device, device_of, format_named
from penstock.spmv.compilation.cuda_module import CudaSource, launch, type_names
from penstock.spmv.compilation.intrinsics import fused
from penstock.spmv.compilation.jit import inlined, shared_range, strict_kernel
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.formats.sliced_bsr import HEIGHT

BOX_ROW_KERNELS = CudaSource("penstock.fem.kernels", "box_rows.cu", enums=(Layout,))
_THREADS = 128
# Several threads make the factors of more elements than this.
_MANY = 1 << 17


@dataclass(frozen=True, eq=False)
class BoxElements:
    """The elements of a box mesh on a device, from which any rows of its matrix are made.

    Parameters
    ----------
    mesh : BoxMesh
    blocks : array, (8, 8, dof, dof) float64
        The stiffness of an element with factor 1, by pairs of its nodes.
    factors : array, (layers, ny - 1, nz - 1) or (0, 0, 0) float64
        Of the stiffness of each element; empty if all are 1.
    layers : range
        The layers of elements across the x axis that there are. Of planes of a larger mesh, layer -1 and the one behind the last
        plane are among them where other planes follow there.
    clamped : bool
        As in :func:`assemble_rows`.

    Notes
    -----
    An element takes 8 bytes, where half of the rows of a node with three unknowns takes about 1,050.

    Examples
    --------
    >>> from penstock.fem import BoxElements, BoxMesh, LinearElasticity, LognormalMaterial
    >>> mesh = BoxMesh(nodes=(17, 5, 5))
    >>> BoxElements.of(mesh, LinearElasticity().stiffness(mesh.spacing), LognormalMaterial()).factors.shape
    (16, 4, 4)
    """

    mesh: BoxMesh
    blocks: Array
    factors: Array
    layers: range
    clamped: bool = True

    @classmethod
    def of(
        cls,
        mesh: BoxMesh,
        element_matrix: Array,
        material: Material,
        *,
        layers: range | None = None,
        planes: slice | None = None,
        clamped: bool = True,
        device: Device = CPU,
    ) -> Self:
        """Return the elements of some layers across the x axis, or of all, on a device.

        With ``planes`` of nodes, two or more, they are what makes the rows of these with their columns among themselves, numbered
        from the first one on: the square of a rank. Elements that nodes of other planes share are there, too.
        """
        nx, ny, nz = mesh.element_counts
        if planes is not None:
            layers, clamped = range(max(planes.start - 1, 0), min(planes.stop, nx)), clamped and not planes.start
        held = range(nx) if layers is None else layers
        dof = len(element_matrix) // 8
        blocks = np.ascontiguousarray(element_matrix.reshape(8, dof, 8, dof).swapaxes(1, 2))
        factors = np.empty((0, 0, 0))
        if not isinstance(material, UniformMaterial):
            factors = np.empty((len(held), ny, nz))

            def fill(place: int) -> None:
                factors[place] = material.layer(held[place], (ny, nz))

            # NumPy draws and takes exponentials without Python's lock.
            threads = usable_cores() if factors.size > _MANY else 1
            with ThreadPoolExecutor(threads) as executor:
                list(executor.map(fill, range(len(held))))
        if planes is not None:
            mesh, held = mesh.of_planes(planes), range(held.start - planes.start, held.stop - planes.start)
        return cls(mesh, device.asarray(blocks), device.asarray(factors), held, clamped)

    @property
    def dof(self) -> int:
        """Unknowns of a node."""
        return int(self.blocks.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self.blocks.nbytes + self.factors.nbytes)


@dataclass(frozen=True, eq=False)
class BoxRowMaker:
    """Makes rows of a box mesh's matrix on a device, for a :class:`penstock.streaming.MadeStore`.

    Parameters
    ----------
    elements : BoxElements
        On the device.
    format_name : str
        A key of ``LAYOUTS``.
    device : Device
    chunk_starts : array, (chunks of the matrix + 1,) int64, optional
        Where the chunks begin, in blocks, in a format of chunks; on the device.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> beam = Cantilever(nodes=(17, 5, 5), dof=3)
    >>> slab = beam.symbolic_slabs(8)[0]
    >>> arrays = {name: np.empty(array.shape, array.dtype) for name, array in slab.arrays().items()}
    >>> beam.row_maker("bsr").make(0, slab.shape[0], arrays)
    >>> bool((arrays["values"] == beam.matrix().values[: len(arrays["values"])]).all())
    True
    """

    elements: BoxElements
    format_name: str
    device: Device = CPU
    chunk_starts: Array | None = None

    #: It holds all that rows are made from.
    moved_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.elements.nbytes + (0 if self.chunk_starts is None else int(self.chunk_starts.nbytes))

    def make(self, row_start: int, row_stop: int, arrays: Mapping[str, Array]) -> None:
        """Write the rows from one to another, whole nodes and chunks: offsets and column indices, or values, or all of them."""
        start, stop = row_start // self.elements.dof, row_stop // self.elements.dof
        starts = None
        if self.chunk_starts is not None:
            starts = self.chunk_starts[start // HEIGHT : -(-stop // HEIGHT) + 1]
        fill_rows(self.elements, self.format_name, start, stop, arrays, device=self.device, chunk_starts=starts)


def fill_rows(
    elements: BoxElements,
    format_name: str,
    start: int,
    stop: int,
    arrays: Mapping[str, Array],
    *,
    device: Device = CPU,
    chunk_starts: Array | None = None,
) -> None:
    """Write the rows of nodes ``start`` to ``stop`` into the arrays of a slab.

    Parameters
    ----------
    elements : BoxElements
        On the device.
    format_name : str
        A key of ``LAYOUTS``.
    start, stop : int
        Multiples of 32 in a format of chunks, unless ``stop`` is the last node.
    arrays : dict of arrays
        Offsets and column indices, or values, or all of them, by their names in the format.
    device : Device
    chunk_starts : array, (chunks of the slab + 1,) int64
        Where the chunks begin, in blocks and from any origin, in a format of chunks.

    Notes
    -----
    Every entry is a sum over the elements that two nodes share, in the order of their numbers and with fused multiplications:
    the CPU and a GPU make the same bits, and so does any cut. Writes the arrays once and reads 8 bytes an element.
    """
    if stop > start:
        find_kernel("box_rows", "fill", device.kind)(elements, format_name, start, stop, arrays, chunk_starts)
        return
    for array in (arrays[name] for name in ("row_offsets", "chunk_offsets") if name in arrays):
        array[...] = 0


@register_kernel("box_rows", "fill", "cuda")
def _fill_on_gpu(
    elements: BoxElements, name: str, start: int, stop: int, arrays: Mapping[str, Array], chunk_starts: Array | None
) -> None:
    xp = device_of(elements.blocks).xp
    slab = SlabArrays.of(name, arrays, xp)
    names = f"{type_names(slab.values, slab.offsets)}, {elements.dof}, {slab.template}"
    function = BOX_ROW_KERNELS.function(f"box_rows<{names}>")
    layers = elements.layers
    numbers = (*elements.mesh.node_counts, layers.start, layers.stop, elements.clamped, slab.parts)
    sizes = (np.int64(start), np.int64(stop - start), *(np.int32(number) for number in numbers))
    uniform = np.int32(elements.factors.size == 0)
    starts = xp.empty(0, dtype=np.int64) if chunk_starts is None else chunk_starts
    of_elements = (elements.blocks, elements.factors, uniform, starts)
    written = (slab.offsets, slab.columns, slab.values)
    launch(function, padded_rows(stop - start), _THREADS, (*sizes, *of_elements, *written))


@register_kernel("box_rows", "fill", "cpu")
def _fill_on_cpu(
    elements: BoxElements, name: str, start: int, stop: int, arrays: Mapping[str, Array], chunk_starts: Array | None
) -> None:
    layout, counts, dof = LAYOUTS[name], elements.mesh.node_counts, elements.dof
    structure, numbers = "column_indices" in arrays, "values" in arrays
    columns = arrays["column_indices"] if structure else np.empty(0, dtype=np.int32)
    values = arrays["values"].reshape(-1) if numbers else np.empty(0)
    blocks = elements.blocks.reshape(8, 8, dof * dof)
    factors, uniform = elements.factors, elements.factors.size == 0
    layers = elements.layers
    of_elements = (blocks, factors, uniform, layers.start, layers.stop, elements.clamped)
    parts = (structure, numbers, columns, values)
    if layout is Layout.CHUNKS:
        assert chunk_starts is not None, "the widths of chunks are known"
        starts = chunk_starts - chunk_starts[0]
        if structure:
            arrays["chunk_offsets"][...] = starts
        half = format_named(name).traits.half
        _fill_chunks(starts.size - 1, half, start, stop, *counts, dof, starts, *parts, *of_elements)
        return
    before = _connections_before(start, stop, *counts)
    by_scalar_rows = layout is Layout.SCALAR_ROWS
    if structure:
        _place_rows(arrays["row_offsets"], before, dof, by_scalar_rows)
    _fill_rows(stop - start, by_scalar_rows, start, stop, *counts, dof, before, *parts, *of_elements)


def _place_rows(offsets: Array, before: Array, dof: int, by_scalar_rows: bool) -> None:
    """Set the row offsets of a slab; not in the kernel, which would then be compiled for each type of offsets."""
    if not by_scalar_rows:
        offsets[...] = before
        return
    offsets[0] = 0
    np.cumsum(np.repeat(np.diff(before) * dof, dof), out=offsets[1:])


@strict_kernel
def _connections_before(start: int, stop: int, nx: int, ny: int, nz: int) -> Array:
    before = np.zeros(stop - start + 1, np.int64)
    for node in range(start, stop):
        ix, iy, iz = node // (ny * nz), node // nz % ny, node % nz
        x = 3 - (ix == 0) - (ix == nx - 1)
        y = 3 - (iy == 0) - (iy == ny - 1)
        z = 3 - (iz == 0) - (iz == nz - 1)
        before[node - start + 1] = before[node - start] + x * y * z
    return before


@inlined
def _sum_elements(
    ix: int, iy: int, iz: int, jx: int, jy: int, jz: int, ny: int, nz: int,
    blocks: Array, factors: Array, uniform: bool, first_layer: int, stop_layer: int, clamped: bool, total: Array,
) -> None:  # fmt: skip
    """Sum factor times element block over the elements that nodes i and j share, in the order of their numbers."""
    total[:] = 0.0
    for ex in range(max(ix - 1, jx - 1, first_layer), min(ix, jx, stop_layer - 1) + 1):
        for ey in range(max(iy, jy, 1) - 1, min(iy, jy, ny - 2) + 1):
            for ez in range(max(iz, jz, 1) - 1, min(iz, jz, nz - 2) + 1):
                a = (ix - ex) * 4 + (iy - ey) * 2 + (iz - ez)
                b = (jx - ex) * 4 + (jy - ey) * 2 + (jz - ez)
                factor = 1.0 if uniform else factors[ex - first_layer, ey, ez]
                for entry in range(total.shape[0]):
                    total[entry] = fused(factor, blocks[a, b, entry], total[entry])
    if clamped and (ix == 0 or jx == 0):  # all is zero but the diagonal of the node with itself
        dof = int(np.sqrt(total.shape[0]))
        same_node = ix == jx and iy == jy and iz == jz
        for entry in range(total.shape[0]):
            if not same_node or entry % (dof + 1) != 0:
                total[entry] = 0.0


@shared_range(least=256)
def _fill_rows(
    begin: int, end: int, by_scalar_rows: bool, start: int, stop: int, nx: int, ny: int, nz: int, dof: int, before: Array,
    structure: bool, numbers: bool, columns: Array, values: Array,
    blocks: Array, factors: Array, uniform: bool, first_layer: int, stop_layer: int, clamped: bool,
) -> None:  # fmt: skip
    """Fill BSR arrays, or CSR arrays if ``by_scalar_rows``; only the positions of a block's scalars differ."""
    for row in range(begin, end):
        node = start + row
        ix, iy, iz = node // (ny * nz), node // nz % ny, node % nz
        connections = before[row + 1] - before[row]
        first = before[row] * dof * dof
        total = np.empty(dof * dof)
        row_stride, block_stride = (connections * dof, dof) if by_scalar_rows else (dof, dof * dof)
        connection = 0
        for jx in range(max(ix - 1, 0), min(ix + 2, nx)):
            for jy in range(max(iy - 1, 0), min(iy + 2, ny)):
                for jz in range(max(iz - 1, 0), min(iz + 2, nz)):
                    other = (jx * ny + jy) * nz + jz
                    if structure and not by_scalar_rows:
                        columns[before[row] + connection] = other
                    if numbers:
                        _sum_elements(
                            ix, iy, iz, jx, jy, jz, ny, nz,
                            blocks, factors, uniform, first_layer, stop_layer, clamped, total,
                        )  # fmt: skip
                    for r in range(dof):
                        entry = first + r * row_stride + connection * block_stride
                        for c in range(dof):
                            if numbers:
                                values[entry + c] = total[r * dof + c]
                            if structure and by_scalar_rows:
                                columns[entry + c] = other * dof + c
                    connection += 1


@shared_range(least=8)
def _fill_chunks(
    begin: int, end: int, half: bool, start: int, stop: int, nx: int, ny: int, nz: int, dof: int, starts: Array,
    structure: bool, numbers: bool, columns: Array, values: Array,
    blocks: Array, factors: Array, uniform: bool, first_layer: int, stop_layer: int, clamped: bool,
) -> None:  # fmt: skip
    """Fill chunks of HEIGHT nodes; ``half`` leaves out what is left of the diagonal."""
    scalars = dof * dof
    for chunk in range(begin, end):
        width, total = (starts[chunk + 1] - starts[chunk]) // HEIGHT, np.empty(scalars)
        for lane in range(HEIGHT):
            node, slot = start + chunk * HEIGHT + lane, 0
            ix, iy, iz = node // (ny * nz), node // nz % ny, node % nz
            stop_x = min(ix + 2, nx) if node < stop else 0
            for jx in range(ix if half else max(ix - 1, 0), stop_x):
                for jy in range(max(iy - 1, 0), min(iy + 2, ny)):
                    for jz in range(max(iz - 1, 0), min(iz + 2, nz)):
                        other = (jx * ny + jy) * nz + jz
                        if half and other < node:
                            continue
                        first = starts[chunk] + slot * HEIGHT
                        if structure:
                            columns[first + lane] = other
                        if numbers:
                            _sum_elements(
                                ix, iy, iz, jx, jy, jz, ny, nz,
                                blocks, factors, uniform, first_layer, stop_layer, clamped, total,
                            )  # fmt: skip
                            for entry in range(scalars):
                                values[first * scalars + entry * HEIGHT + lane] = total[entry]
                        slot += 1
            for padding in range(slot, width):
                first = starts[chunk] + padding * HEIGHT
                if structure:
                    columns[first + lane] = -1
                if numbers:
                    for entry in range(scalars):
                        values[first * scalars + entry * HEIGHT + lane] = 0.0
