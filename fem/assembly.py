"""Assembles the matrix of a box mesh, one slab of node rows at a time, directly into the arrays of its format."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from penstock.fem.box_rows import BoxElements, fill_rows
from penstock.fem.material import Material
from penstock.fem.mesh import BoxMesh
from penstock.fem.row_layouts import symbolic_array, symbolic_blocks, symbolic_chunks
from penstock.spmv import CsrMatrix, InputError, SparseMatrix, format_named
from penstock.spmv.formats.limits import INT32_MAX
from penstock.spmv.formats.sliced_bsr import HEIGHT

Array = np.ndarray[Any, Any]

#: Formats whose slabs hold whole chunks of :data:`HEIGHT` nodes.
CHUNKED_FORMATS = ("sliced_bsr", "symmetric_bsr")
#: Formats in which slabs can be assembled.
ASSEMBLED_FORMATS = ("csr", "bsr", *CHUNKED_FORMATS)


def assemble_rows(
    mesh: BoxMesh,
    element_matrix: Array,
    material: Material,
    start: int,
    stop: int,
    *,
    format_name: str = "bsr",
    clamped: bool = True,
    values_dtype: Any = np.float64,
    offsets_dtype: Any = np.int32,
) -> SparseMatrix:
    """Assemble the rows of nodes ``start`` to ``stop``; needs memory only for them and the material of their element layers.

    Parameters
    ----------
    mesh : BoxMesh
    element_matrix : array, (8 * dof, 8 * dof)
        Symmetric stiffness of an element with material factor 1.
    material : Material
        Factor of each element.
    start, stop : int
        Node numbers.
    format_name : str
        One of ``ASSEMBLED_FORMATS`` of this module; all but ``csr`` have blocks of dof x dof.
    clamped : bool
        Eliminate the unknowns of the face x = 0 symmetrically: their diagonal stays, everything else in their rows and
        columns becomes a stored zero, so that the pattern does not change.
    values_dtype, offsets_dtype : dtype
        Storage types; offsets of more than 2**31 - 1 entries need int64.

    Returns
    -------
    SparseMatrix, ((stop - start) * dof, node_count * dof)
        Every connection of two nodes is stored. An entry and its mirror image are equal to the last bit, because both
        sum the same products in the order of the element numbers.

    Raises
    ------
    InputError
        If there is no generator for the format, or the slab has too many entries for its offsets.

    Examples
    --------
    >>> from penstock.fem import BoxMesh, LinearElasticity, UniformMaterial, assemble_rows
    >>> mesh = BoxMesh(nodes=3)
    >>> stiffness = LinearElasticity().stiffness(mesh.spacing)
    >>> assemble_rows(mesh, stiffness, UniformMaterial(), 9, 18).shape
    (27, 81)
    """
    dof, plane = len(element_matrix) // 8, math.prod(mesh.node_counts[1:])
    types: dict[str, Any] = {"values_dtype": values_dtype, "offsets_dtype": offsets_dtype}
    slab = symbolic_rows(mesh, dof, start, stop, format_name=format_name, **types)
    arrays = {name: np.empty(array.shape, array.dtype) for name, array in slab.arrays().items()}
    layers = range(max(start // plane - 1, 0), min(max(stop - 1, 0) // plane, mesh.element_counts[0] - 1) + 1)
    elements = BoxElements.of(mesh, element_matrix, material, layers=layers, clamped=clamped)
    fill_rows(elements, format_name, start, stop, arrays, chunk_starts=slab.arrays().get("chunk_offsets"))
    return slab.from_arrays(slab.shape, slab.dtype, arrays, slab.parameters())


def chunked_slab(rows: SparseMatrix, format_name: str, first_row: int, dof: int) -> SparseMatrix:
    """Convert an assembled CSR slab to one of :data:`CHUNKED_FORMATS`; its row 0 is ``first_row`` of the matrix."""
    options: dict[str, Any] = {"block_size": dof, "check": False}
    if format_name == "sliced_bsr":
        # Rows of a mesh have similar lengths, and without sorting the slabs of any cut hold the same bits.
        options["sorting_scope"] = 1
    return format_named(format_name).slab_from_csr(rows, first_row, **options)


def symbolic_rows(
    mesh: BoxMesh,
    dof: int,
    start: int,
    stop: int,
    *,
    format_name: str = "bsr",
    values_dtype: Any = np.float64,
    offsets_dtype: Any = np.int32,
) -> SparseMatrix:
    """Return a symbolic slab: the shapes and types of the assembled slab, with arrays that need no memory.

    Parameters
    ----------
    mesh, start, stop, format_name, values_dtype, offsets_dtype
        As for :func:`assemble_rows`.
    dof : int
        Unknowns of a node: 1, 3 or 6.

    Raises
    ------
    InputError
        If there is no generator for the format, or a number does not fit 32-bit column indices or the type of the offsets.

    Examples
    --------
    >>> from penstock.fem import BoxMesh, symbolic_rows
    >>> from penstock.spmv import format_nbytes
    >>> mesh = BoxMesh(nodes=400)
    >>> slab = symbolic_rows(mesh, 3, 0, 400 * 400)
    >>> slab.shape, format_nbytes(slab.nbytes)
    ((480000, 192000000), '208.7 MiB')
    """
    connections = mesh.connections_before(stop) - mesh.connections_before(start)
    columns, entries = mesh.node_count, connections
    if format_name == "csr":
        columns, entries = columns * dof, entries * dof * dof
    if columns > INT32_MAX:
        raise InputError(f"{columns:,} columns do not fit 32-bit column indices; take fewer nodes")
    largest = int(np.iinfo(offsets_dtype).max)
    if entries > largest:
        raise InputError(
            f"nodes {start} to {stop} hold {entries} entries, a slab at most {largest}; cut the matrix into more slabs"
        )
    shape = ((stop - start) * dof, mesh.node_count * dof)
    if format_name == "bsr":
        return symbolic_blocks(shape, connections, dof, offsets_dtype, values_dtype)
    if format_name == "csr":
        arrays = {
            "row_offsets": symbolic_array(offsets_dtype, (stop - start) * dof + 1),
            "column_indices": symbolic_array(np.int32, connections * dof * dof),
            "values": symbolic_array(values_dtype, connections * dof * dof),
        }
        whole = CsrMatrix.whole_matrix_parameters(mesh.connections * dof * dof, mesh.node_count * dof)
        return CsrMatrix.from_arrays(shape, np.float64, arrays, whole)
    if format_name in CHUNKED_FORMATS:
        if start % HEIGHT or (stop % HEIGHT and stop != mesh.node_count):
            raise InputError(f"slabs of {format_name} hold whole chunks of {HEIGHT} nodes, not nodes {start} to {stop}")
        starts = chunk_starts(mesh, format_name)[start // HEIGHT : -(-stop // HEIGHT) + 1]
        return symbolic_chunks(format_name, shape, starts, dof, values_dtype)
    format_named(format_name)
    raise InputError(
        f"the generator assembles {', '.join(ASSEMBLED_FORMATS)}; convert one of these to {format_name} with from_csr"
    )


def chunk_starts(mesh: BoxMesh, format_name: str) -> Array:
    """Return where each chunk of the whole matrix begins, in blocks, and its end."""
    return _chunk_offsets(*mesh.node_counts, format_named(format_name).traits.half)


@functools.lru_cache(maxsize=4)
def _chunk_offsets(nx: int, ny: int, nz: int, upper: bool) -> Array:
    """Return where each chunk of the whole matrix begins; cached, because every cut has the same chunks."""
    return np.concatenate([[0], HEIGHT * np.cumsum(_chunk_widths(nx, ny, nz, upper), dtype=np.int64)])


def _chunk_widths(nx: int, ny: int, nz: int, upper: bool) -> Array:
    """Return the most connections of a node in each chunk; with ``upper``, only those with itself and later nodes.

    In NumPy: loading the compiler for a loop would take longer.
    """
    x, y, z = (np.full(count, 3, np.int8) for count in (nx, ny, nz))
    for axis in (x, y, z):
        axis[0] -= 1
        axis[-1] -= 1
    of_plane: Array = y[:, None] * z
    others: Any = 0
    if upper:  # all of the next plane, the next line of this plane, and of this line itself and the next node
        x, next_line, next_node = ((np.arange(count) < count - 1).astype(np.int8) for count in (nx, ny, nz))
        others = next_line[:, None] * z + next_node + np.int8(1)
    counts = x[:, None, None] * of_plane
    counts += others
    return np.maximum.reduceat(counts.reshape(-1), np.arange(0, counts.size, HEIGHT))
