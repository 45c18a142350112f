"""Fills the arrays of matrix rows of a mesh of tetrahedra or hexahedra where they are used: on the host, or on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from penstock.fem.mesh_lists import find_columns, jacobian_of_hexahedron
from penstock.fem.own_element import OwnElement
from penstock.fem.row_layouts import LAYOUTS, Layout, SlabArrays
from penstock.spmv import CPU, Array, Device, InputError, device_of, format_named
from penstock.spmv.compilation.cuda_module import CudaSource, shared_limit, type_names
from penstock.spmv.compilation.jit import SharedRange, compiled_anew, serial_kernel, shared_range
from penstock.spmv.compilation.table import find_kernel, register_kernel
from penstock.spmv.formats.sliced_bsr import HEIGHT

ELEMENT_ROW_KERNELS = CudaSource("penstock.fem.kernels", "element_rows.cu", enums=(Layout,))
#: Nodes of an element, and the name of its shape in the kernels; unknowns of a node, and the name of the physics.
SHAPES, PHYSICS = {4: "Tetrahedron", 8: "Hexahedron"}, {1: "Diffusion", 3: "Elasticity"}
#: Formats in which rows are made.
FORMATS = ("sliced_bsr", "bsr", "symmetric_bsr")
#: By the nodes of an element: the lanes that make a row on a GPU, as the shapes in the kernels have them.
LANES = {4: 1, 8: 4}
# Blocks up to which a row is added up in shared memory: with more, too few threads have room beside each other.
_WIDEST_SHARED = 48


@dataclass(frozen=True)
class Window:
    """The part of a mesh that arrays hold: its first row, its first node, and the number of columns of the whole matrix."""

    first_row: int
    first_node: int
    columns: int  # of blocks, of the whole matrix


@dataclass(frozen=True, eq=False)
class MeshElements:
    """The elements of a mesh on a device, from which the values of any rows of its matrix are made.

    Parameters
    ----------
    coordinates : array, (nodes, 3) float64
        Those of ghost nodes, which have no rows and columns, after the others.
    connectivity : array, (elements, nodes of an element) int32
    factors : array, (elements,) or (0,) float64
        Of the stiffness of each element; empty if all are 1.
    fixed : array, (nodes * dof,) or (0,) uint8
        1 for unknowns whose rows and columns keep their diagonal only.
    parameters : array of float64
        Lame's lambda and mu, the conductivity and 0, or those of an element of the user.
    dof : int
        1, 3 or 6.
    element_offsets, node_elements : array, (rows + 1,) int64, and (places,) int32
        For each node that has a row, its places in the connectivity, ascending.
    own : OwnElement, optional
        An element of the user, in the place of tetrahedra and hexahedra.
    repeats : bool
        Whether an element names a node twice.
    window : Window, optional
        Where not all of the mesh is here; for a GPU.

    Notes
    -----
    A node of a mesh of tetrahedra has about 24 places of 4 bytes, and 6 elements of 16 to 24 bytes.
    """

    coordinates: Array
    connectivity: Array
    factors: Array
    fixed: Array
    parameters: Array
    dof: int
    element_offsets: Array
    node_elements: Array
    own: OwnElement | None = None
    repeats: bool = False
    window: Window | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(sum(array.nbytes for array in self.arrays().values()))

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name."""
        others = ("dof", "own", "repeats", "window")
        return {name: array for name, array in vars(self).items() if name not in others}

    def to_device(self, device: Device) -> Self:
        """Return the elements on a device."""
        return replace(self, **{name: device.asarray(array) for name, array in self.arrays().items()})


@dataclass(frozen=True, eq=False)
class RowPattern:
    """The columns of every row of blocks: all of them, or those from the diagonal on; ghost nodes have none.

    Parameters
    ----------
    offsets : array, (nodes + 1,) int64
    columns : array of int32, ascending in each row
    chunk_starts : array, (chunks + 1,) int64
        Where chunks of 32 rows begin, in blocks, if rows are stored so.
    widest : int
        The most columns of a row.
    """

    offsets: Array
    columns: Array
    chunk_starts: Array
    widest: int

    @classmethod
    def of(cls, elements: MeshElements, *, half: bool) -> Self:
        """Find the columns on the host."""
        limit = int(np.diff(elements.element_offsets).max(initial=0)) * elements.connectivity.shape[1]
        lists = (elements.element_offsets, elements.node_elements, elements.connectivity, half, limit)
        counts = find_columns(*lists, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32))
        offsets = np.concatenate([[0], np.cumsum(counts)])
        columns = np.empty(int(offsets[-1]), dtype=np.int32)
        find_columns(*lists, offsets, columns)
        widths = np.zeros(-(-counts.size // HEIGHT) * HEIGHT, dtype=np.int64)
        widths[: counts.size] = counts
        widths = widths.reshape(-1, HEIGHT).max(axis=1)
        starts = np.concatenate([[0], np.cumsum(widths * HEIGHT)])
        return cls(offsets, columns, starts, int(counts.max(initial=0)))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return int(sum(array.nbytes for array in self.arrays().values()))

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name."""
        return {name: array for name, array in vars(self).items() if name != "widest"}

    def to_device(self, device: Device) -> Self:
        """Return the pattern on a device."""
        return replace(self, **{name: device.asarray(array) for name, array in self.arrays().items()})


@dataclass(frozen=True, eq=False)
class ElementRowMaker:
    """Makes rows of the matrix of a mesh on a device, for a :class:`penstock.streaming.MadeStore`.

    Parameters
    ----------
    elements : MeshElements
    pattern : RowPattern
    format_name : str
    device : Device

    Examples
    --------
    >>> import penstock
    >>> from penstock.fem import BoxMesh
    >>> from penstock.streaming import MadeStore, StreamedMatrix, index_of
    >>> mesh = BoxMesh(nodes=(17, 5, 5))
    >>> body = penstock.ElementMatrix(mesh.coordinates(), mesh.connectivity())
    >>> store = MadeStore(index_of(body.symbolic_slabs(8, "bsr")), body.row_maker("bsr"))
    >>> with StreamedMatrix(store, "400 KiB") as A:
    ...     A.shape, A.plan.slots
    ((1275, 1275), 2)
    """

    elements: MeshElements
    pattern: RowPattern
    format_name: str
    device: Device = CPU

    #: It holds all that rows are made from.
    moved_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.elements.nbytes + self.pattern.nbytes

    def with_factors(self, factors: Array) -> Self:
        """Return what makes rows of the same mesh with other factors of its elements; the rest is shared."""
        with self.device.current():
            return replace(self, elements=replace(self.elements, factors=self.device.asarray(factors)))

    def make(self, row_start: int, row_stop: int, arrays: Mapping[str, Array]) -> None:
        """Write the rows from one to another, whole nodes and chunks: offsets and column indices, or values, or all of them.

        Every entry is a sum over the elements that two nodes share, in the order of their numbers, whatever the cut.
        """
        start, stop = row_start // self.elements.dof, row_stop // self.elements.dof
        fill = find_kernel("element_rows", "fill", self.device.kind)
        fill(self.elements, self.pattern, self.format_name, start, stop, arrays)


@register_kernel("element_rows", "fill", "cuda")
def _fill_on_gpu(
    elements: MeshElements, pattern: RowPattern, name: str, start: int, stop: int, arrays: Mapping[str, Array]
) -> None:
    slab = SlabArrays.of(name, arrays, device_of(elements.coordinates).xp)
    nodes, own, source = elements.connectivity.shape[1], elements.own, ELEMENT_ROW_KERNELS
    if own is None:
        kinds = f"{SHAPES[nodes]}, {PHYSICS[elements.dof]}"
    else:
        kinds, source = "OwnElement, OwnPhysics", _own_source(own)
    expression = f"element_rows<{kinds}, {type_names(slab.offsets)}, {slab.template}>"
    try:
        function: Any = source.function(expression)
    except Exception as error:
        if own is None:
            raise
        raise InputError(f"the CUDA C++ code of {own!r} does not compile: {error}") from error
    mesh = (elements.coordinates, elements.connectivity, elements.factors, np.int32(elements.factors.size == 0))
    fixed = (elements.fixed, np.int32(elements.fixed.size > 0), np.int32(elements.repeats))
    lists = (elements.element_offsets, elements.node_elements, pattern.offsets, pattern.columns)
    window = elements.window or Window(0, 0, columns=elements.element_offsets.size - 1)
    first = (np.int64(window.first_row), np.int32(window.first_node))
    sizes = (np.int64(start), np.int64(stop - start), np.int32(window.columns), *first, np.int32(slab.parts))
    starts = pattern.chunk_starts[(start - window.first_row) // HEIGHT :]
    of_column = pattern.columns.itemsize
    of_block = elements.dof**2 * slab.values.itemsize + of_column
    widest = min(pattern.widest, shared_limit(slab.values) // (HEIGHT * of_block) - 1, _WIDEST_SHARED)
    shared = HEIGHT * (widest * of_block + of_column)
    if shared > function.max_dynamic_shared_size_bytes:
        function.max_dynamic_shared_size_bytes = shared
    written = (slab.offsets, slab.columns, slab.values)
    arguments = (*sizes, *mesh, elements.parameters, *fixed, *lists, starts, np.int32(widest), *written)
    lanes = 1 if own is not None else LANES[nodes]
    function((-(-(stop - start) // HEIGHT),), (HEIGHT * lanes,), arguments, shared_mem=shared)


@register_kernel("element_rows", "fill", "cpu")
def _fill_on_cpu(
    elements: MeshElements, pattern: RowPattern, name: str, start: int, stop: int, arrays: Mapping[str, Array]
) -> None:
    assert elements.window is None, "a CPU has the whole mesh in its memory"
    chunked, half = LAYOUTS[name] is Layout.CHUNKS, format_named(name).traits.half
    starts = (
        pattern.chunk_starts[start // HEIGHT : -(-stop // HEIGHT) + 1] if chunked else pattern.offsets[start : stop + 1]
    )
    starts = starts - starts[0]
    structure, numbers = "column_indices" in arrays, "values" in arrays
    columns = arrays["column_indices"] if structure else np.empty(0, dtype=np.int32)
    values = arrays["values"].reshape(-1) if numbers else np.empty(0)
    if structure:
        arrays["chunk_offsets" if chunked else "row_offsets"][...] = starts
        rows = (starts.size - 1) * (HEIGHT if chunked else 1)
        _fill_structure(rows, chunked, start, stop, starts, pattern.offsets, pattern.columns, columns)
    if numbers:
        mesh = (elements.coordinates, elements.connectivity, elements.factors, elements.parameters, elements.fixed)
        lists = (elements.element_offsets, elements.node_elements, pattern.offsets, pattern.columns)
        values[...] = 0.0
        fill = _fill_values if elements.own is None else _own_filling(elements.own.compiled())
        fill(stop - start, chunked, half, start, elements.dof, starts, *mesh, *lists, values)


@shared_range(least=4096)
def _fill_structure(
    begin: int,
    end: int,
    chunked: bool,
    start: int,
    stop: int,
    starts: Array,
    offsets: Array,
    pattern: Array,
    columns: Array,
) -> None:
    between = HEIGHT if chunked else 1
    for row in range(begin, end):
        node = start + row
        count = offsets[node + 1] - offsets[node] if node < stop else 0
        first = starts[row // HEIGHT] + row % HEIGHT if chunked else starts[row]
        width = (starts[row // HEIGHT + 1] - starts[row // HEIGHT]) // HEIGHT if chunked else count
        for slot in range(width):
            columns[first + slot * between] = pattern[offsets[node] + slot] if slot < count else -1


@serial_kernel
def _gradients_of_tetrahedron(x: Array, g: Array) -> float:
    """Write the gradients of the shape functions, and return the volume."""
    for e in range(3):
        u, v = (e + 1) % 3 + 1, (e + 2) % 3 + 1
        for c in range(3):
            i, j = (c + 1) % 3, (c + 2) % 3
            first = (x[u, i] - x[0, i]) * (x[v, j] - x[0, j])
            g[e + 1, c] = first - (x[u, j] - x[0, j]) * (x[v, i] - x[0, i])
    determinant = 0.0
    for c in range(3):
        determinant += (x[1, c] - x[0, c]) * g[1, c]
    for c in range(3):
        for e in range(1, 4):
            g[e, c] /= determinant
        g[0, c] = -(g[1, c] + g[2, c] + g[3, c])
    return float(abs(determinant) / 6.0)


@serial_kernel
def _gradients_of_hexahedron(point: int, x: Array, g: Array) -> float:
    """Write the gradients at one of eight Gauss points, and return its weight."""
    J, cofactor = np.empty((3, 3)), np.empty((3, 3))
    jacobian_of_hexahedron(point, x, g, J)
    for r in range(3):
        for c in range(3):
            i, j, k, m = (r + 1) % 3, (r + 2) % 3, (c + 1) % 3, (c + 2) % 3
            cofactor[r, c] = J[i, k] * J[j, m] - J[i, m] * J[j, k]
    determinant = J[0, 0] * cofactor[0, 0] + J[0, 1] * cofactor[0, 1] + J[0, 2] * cofactor[0, 2]
    for b in range(8):
        u, v, w = g[b, 0], g[b, 1], g[b, 2]
        for c in range(3):
            g[b, c] = (cofactor[0, c] * u + cofactor[1, c] * v + cofactor[2, c] * w) / determinant
    return float(abs(determinant))


@serial_kernel
def _add_row(
    own: int, dof: int, wanted: Array, x: Array, factor: float, parameters: Array, g: Array, blocks: Array
) -> None:
    """Write wanted blocks of a node's row of an element's matrix; products do not depend on the order of two nodes."""
    size, first, second = x.shape[0], parameters[0], parameters[1]
    blocks[:] = 0.0
    for point in range(1 if size == 4 else 8):
        weight = factor * (_gradients_of_tetrahedron(x, g) if size == 4 else _gradients_of_hexahedron(point, x, g))
        for b in range(size):
            if not wanted[b]:
                continue
            product = g[own, 0] * g[b, 0] + g[own, 1] * g[b, 1] + g[own, 2] * g[b, 2]
            if dof == 1:
                blocks[b, 0] += weight * (first * product)
                continue
            for r in range(3):
                for c in range(3):
                    total = first * (g[own, r] * g[b, c]) + second * (g[own, c] * g[b, r])
                    blocks[b, r * 3 + c] += weight * (total + second * product if r == c else total)


@shared_range(least=64)
def _fill_values(
    begin: int, end: int, chunked: bool, half: bool, start: int, dof: int, starts: Array, coordinates: Array, connectivity: Array,
    factors: Array, parameters: Array, fixed: Array, element_offsets: Array, places: Array,
    offsets: Array, pattern: Array, values: Array,
) -> None:  # fmt: skip
    """Add the rows of all elements of each node, in the order of their numbers, to zeros."""
    size, scalars, between = connectivity.shape[1], dof * dof, HEIGHT if chunked else 1
    columns = element_offsets.size - 1
    for row in range(begin, end):
        node = start + row
        x, g, blocks, wanted = (
            np.empty((size, 3)),
            np.empty((size, 3)),
            np.empty((size, scalars)),
            np.empty(size, np.bool_),
        )
        first = starts[row // HEIGHT] * scalars + row % HEIGHT if chunked else starts[row] * scalars
        for entry in range(element_offsets[node], element_offsets[node + 1]):
            element, own = places[entry] // size, places[entry] % size
            for b in range(size):
                wanted[b] = connectivity[element, b] < columns and (not half or connectivity[element, b] >= node)
                for c in range(3):
                    x[b, c] = coordinates[connectivity[element, b], c]
            factor = factors[element] if factors.size else 1.0
            _add_row(own, dof, wanted, x, factor, parameters, g, blocks)
            for b in range(size):
                other = connectivity[element, b]
                if not wanted[b]:
                    continue
                slot = np.searchsorted(pattern[offsets[node] : offsets[node + 1]], other)
                target = first + slot * between * scalars
                for k in range(scalars):
                    held = fixed.size > 0 and (fixed[node * dof + k // dof] or fixed[other * dof + k % dof])
                    if not held or (other == node and k // dof == k % dof):
                        values[target + k * between] += blocks[b, k]


@functools.lru_cache(maxsize=16)
def _own_source(element: OwnElement) -> CudaSource:
    """Return the kernels with the code of a user's element before them; every piece of a matrix asks for it."""
    return replace(ELEMENT_ROW_KERNELS, before=element.cuda_text())


@functools.lru_cache(maxsize=16)
def _own_filling(row_of: Any) -> SharedRange:
    """Return what adds rows of a user's elements on a CPU: compiled once in a process for a function."""

    @compiled_anew
    def add_row(
        own: int, dof: int, wanted: Array, x: Array, factor: float, parameters: Array, g: Array, blocks: Array
    ) -> None:
        blocks[:] = 0.0
        row_of(x, parameters, own, blocks.reshape(x.shape[0], dof, dof))
        blocks *= factor

    return _fill_values.with_function(_add_row=add_row)


def check_format(name: str) -> None:
    """Refuse a format in which no rows are made, with an InputError."""
    if name not in FORMATS:
        raise InputError(f"a matrix of elements is assembled in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, not {name}")
