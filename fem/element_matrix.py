"""The matrix of a mesh of tetrahedra, hexahedra or other elements, known by these and assembled where it is used."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import scipy.sparse

from penstock.fem.diffusion import HeatConduction
from penstock.fem.elasticity import LinearElasticity
from penstock.fem.element_rows import LANES, SHAPES, ElementRowMaker, MeshElements, RowPattern, check_format
from penstock.fem.host_elements import HostElementRowMaker, windows_nbytes
from penstock.fem.mass import mesh_mass
from penstock.fem.mesh_lists import degenerate_elements, largest_span, list_elements, names_twice, renamed
from penstock.fem.own_element import OwnElement
from penstock.fem.row_layouts import LAYOUTS, Layout, assembled, symbolic_blocks, symbolic_chunks
from penstock.spmv import CPU, Array, Device, InputError, NodeMatrix, SparseMatrix, format_named
from penstock.spmv.formats.limits import INT32_MAX
from penstock.spmv.formats.sliced_bsr import HEIGHT

# Determinants of the Jacobian below this share of the cube of an edge are taken for rounding.
_FLAT = 1e-13
# What rounding may make of the entries of a user's element on a GPU, as a share of the largest.
_ALIKE = 1e-9


class ElementMatrix:
    """A stiffness matrix that is known by its elements: a matrix for :func:`penstock.solve` and :func:`penstock.prepare`.

    Where it does not fit, its rows are assembled whenever they are used. A node of tetrahedra then takes about 300 bytes, of
    hexahedra 150, where half of its rows would take 600 and 1,050. Nothing of the matrix is stored, on the host or on a disk.

    Parameters
    ----------
    coordinates : array, (nodes, 3)
        As of scikit-fem (``mesh.p.T``), meshio (``mesh.points``) or gmsh.
    connectivity : array of int, (elements, 4) or (elements, 8), or (elements, nodes of an element of one's own)
        The nodes of tetrahedra, or of hexahedra in the order of VTK, meshio and gmsh: once around the bottom, then around the
        top. In scikit-fem ``mesh.t.T`` of a ``MeshTet``; its hexahedra are in another order.
    element : LinearElasticity, HeatConduction or OwnElement
        Three displacements or one temperature a node; the default is elasticity with Young's modulus 1 and Poisson's ratio 0.3.
        With :class:`penstock.OwnElement` any other element, such as a quadratic one.
    material : float or array, (elements,), optional
        Factor of the stiffness or conductivity of each element, positive. Arrays are copied.
    fixed : array of int, or of bool (unknowns,), optional
        Unknowns held at zero: their rows and columns keep their diagonal only. Unknown ``dof * node + component``.

    Raises
    ------
    InputError
        If arrays do not fit each other, an element has no volume or is folded (elements of one's own are looked at as
        :class:`penstock.OwnElement` says), or a node has no element.

    Notes
    -----
    Full integration: one point of linear tetrahedra, 2 x 2 x 2 of hexahedra. ``rhs[fixed]`` should be 0. Entries are sums over
    elements in the order of their numbers, so bits depend neither on the cut nor on the number of threads; those of a CPU and of
    a GPU differ in last digits.

    Examples
    --------
    >>> import numpy as np, penstock
    >>> from penstock.fem import BoxMesh
    >>> mesh = BoxMesh(nodes=(9, 3, 3))
    >>> body = penstock.ElementMatrix(mesh.coordinates(), mesh.connectivity(), fixed=np.arange(27))
    >>> load = np.zeros(body.shape[0])
    >>> load[-3:] = 0, 0, -1e-3
    >>> result = penstock.solve(body, load, device="cpu")
    >>> result.converged, body.nnz, body.matrix("symmetric_bsr").shape
    (True, 11025, (243, 243))
    """

    #: Coordinates of ghost nodes: those of a part of a mesh that have no rows and columns. They are numbered after the others.
    ghosts: Array = np.empty((0, 3))
    #: The number that each element has in the matrix of which this one is a renumbering or a part.
    element_order: Array | None = None
    #: The number of elements of that matrix.
    elements_before: int = 0

    def __init__(
        self,
        coordinates: Any,
        connectivity: Any,
        *,
        element: LinearElasticity | HeatConduction | OwnElement | None = None,
        material: Any = None,
        fixed: Any = None,
    ) -> None:
        self.element = LinearElasticity() if element is None else element
        if not isinstance(self.element, LinearElasticity | HeatConduction | OwnElement):
            kind = type(element).__name__
            raise InputError(f"element must be LinearElasticity, HeatConduction or OwnElement, not {kind}")
        self.coordinates = _checked_coordinates(coordinates)
        sizes = (self.element.nodes,) if isinstance(self.element, OwnElement) else tuple(SHAPES)
        self.connectivity = _checked_connectivity(connectivity, len(self.coordinates), sizes)
        self.factors = _checked_factors(material, len(self.connectivity))
        self.fixed = _checked_fixed(fixed, self.shape[0])
        if isinstance(self.element, OwnElement):
            self.element.check(self.coordinates, self.connectivity)
        else:
            self._check_volumes()
        self._lists  # noqa: B018 - refuse lonely nodes now

    @property
    def dof(self) -> int:
        """Unknowns of a node."""
        return self.element.dof

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, those of fixed unknowns among them."""
        rows = len(self.coordinates) * self.dof
        return rows, rows

    @property
    def nnz(self) -> int:
        """Number of entries of both halves, stored zeros among them."""
        half = self._pattern(half=True)
        return (2 * int(half.columns.size) - len(self.coordinates)) * self.dof**2

    def __repr__(self) -> str:
        if isinstance(self.element, OwnElement):
            return (
                f"<ElementMatrix {self.shape[0]:,} x {self.shape[1]:,}, {len(self.connectivity):,} of {self.element!r}>"
            )
        shape = SHAPES[self.connectivity.shape[1]].lower()
        kind = "elasticity" if self.dof == 3 else "heat conduction"
        return (
            f"<ElementMatrix {self.shape[0]:,} x {self.shape[1]:,}, {kind} on {len(self.connectivity):,} {shape[:-2]}a>"
        )

    def __matmul__(self, x: Any) -> Any:
        """Refuse products, for which all of the matrix would be assembled each time."""
        raise InputError("assemble the matrix once and multiply by that: A = body.matrix('symmetric_bsr'); A @ x")

    def with_material(self, material: Any) -> Self:
        """Return the matrix of the same mesh with other factors of the elements; what is known of the mesh is shared."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), factors=_checked_factors(material, len(self.connectivity)))
        return other

    def matrix(self, format_name: str = "bsr", *, device: Device | str = CPU) -> SparseMatrix:
        """Assemble the whole matrix in the memory of a device, in ``bsr``, ``sliced_bsr`` or ``symmetric_bsr``."""
        check_format(format_name)
        outline = self._outline(0, len(self.coordinates), format_name, np.int64)
        return assembled(outline, self.row_maker(format_name, device))

    def to_csr(self) -> scipy.sparse.csr_array:
        """Return the matrix as a SciPy CSR array, with the zeros of fixed unknowns."""
        return self.matrix("bsr").to_csr()

    def mass(self, density: Any = 1.0, *, lumped: bool = False) -> NodeMatrix:
        """Return the mass matrix, or that of heat capacities, for :func:`penstock.eigsh`; rows of fixed unknowns are empty.

        Parameters
        ----------
        density : float or array, (elements,)
            Mass per volume.
        lumped : bool
            Whether it is a diagonal of row sums; otherwise it is consistent with the shape functions.

        Raises
        ------
        InputError
            If a density is not positive, or there is not one for each element, the elements are the caller's own, or this is a
            part of a mesh.
        """
        if len(self.ghosts):
            raise InputError(
                "the mass of a part of a mesh is not known; take rows and columns of that of the whole mesh: "
                "body.mass().to_csr()[own, own]"
            )
        if isinstance(self.element, OwnElement):
            raise InputError(f"the mass of {self.element!r} is not known; give the mass matrix itself")
        return mesh_mass(self.coordinates, self.connectivity, density, self.dof, self.fixed, lumped=lumped)

    def row_maker(
        self, format_name: str, device: Device | str = CPU, *, row_bounds: Sequence[int] | None = None
    ) -> ElementRowMaker | HostElementRowMaker:
        """Return what makes rows of the matrix on a device.

        Parameters
        ----------
        format_name : str
            ``bsr``, ``sliced_bsr`` or ``symmetric_bsr``.
        device : Device or str
        row_bounds : sequence of int, optional
            Rows at which slabs begin, and the number of rows. The elements then stay in host memory, and those of a slab are
            copied to a GPU to make it; as many bytes are page-locked. Without effect on a CPU.

        Raises
        ------
        InputError
            If the code of an element of one's own does not compile for a GPU, or computes other entries there, or bounds cut
            nodes or chunks.
        """
        device = Device.parse(device)
        pattern = self._pattern(half=format_named(format_name).traits.half)
        if row_bounds is None or device.kind == "cpu":
            with device.current():
                maker = ElementRowMaker(
                    self._elements.to_device(device), pattern.to_device(device), format_name, device
                )
            self._compare_with_host(maker)
            return maker
        if isinstance(self.element, OwnElement):
            first = [0, min(HEIGHT, len(self.coordinates))]
            self._compare_with_host(HostElementRowMaker(self._elements, pattern, format_name, device, first))
        return HostElementRowMaker(
            self._elements, pattern, format_name, device, self._node_bounds(format_name, row_bounds)
        )

    def _node_bounds(self, format_name: str, row_bounds: Sequence[int]) -> list[int]:
        rows = self.dof * (HEIGHT if LAYOUTS[format_name] is Layout.CHUNKS else 1)
        if any(bound % rows for bound in row_bounds[:-1]) or row_bounds[-1] % self.dof:
            raise InputError(
                f"slabs of {format_name} begin at multiples of {rows} rows here, not at {row_bounds[:4]} ..."
            )
        return [bound // self.dof for bound in row_bounds]

    def _compare_with_host(self, maker: ElementRowMaker | HostElementRowMaker) -> None:
        """Refuse elements of the user of which a GPU makes other rows than the CPU; the first rows are looked at."""
        if not isinstance(self.element, OwnElement) or maker.device.kind == "cpu":
            return
        outline = self._outline(0, min(HEIGHT, len(self.coordinates)), maker.format_name, np.int64)
        made = maker.device.to_host(assembled(outline, maker).values)
        expected = np.asarray(assembled(outline, self.row_maker(maker.format_name)).values)
        if not abs(made - expected).max(initial=0.0) <= _ALIKE * abs(expected).max(initial=0.0):
            raise InputError(f"the CUDA C++ code of {self.element!r} computes other entries than its function")

    def elements_nbytes(self, format_name: str = "symmetric_bsr") -> int:
        """Return the bytes that a :meth:`row_maker` holds on its device."""
        return self._elements.nbytes + self._pattern(half=format_named(format_name).traits.half).nbytes

    def window_nbytes(self, format_name: str, row_bounds: Sequence[int]) -> tuple[int, int]:
        """Return the bytes of elements that are copied to make all slabs between bounds, and to make the largest."""
        pattern = self._pattern(half=format_named(format_name).traits.half)
        return windows_nbytes(self._elements, pattern, self._node_bounds(format_name, row_bounds))

    def largest_cut(self, format_name: str) -> int:
        """Return the largest number of slabs that a matrix of this format can be cut into."""
        nodes = len(self.coordinates)
        return -(-nodes // HEIGHT) if LAYOUTS[format_name] is Layout.CHUNKS else nodes

    def symbolic_slabs(self, count: int, format_name: str) -> list[SparseMatrix]:
        """Return row slabs with shapes and types but without memory: the input of a plan."""
        check_format(format_name)
        limit = self.largest_cut(format_name)
        if not 1 <= count <= limit:
            raise InputError(f"cannot cut {limit} pieces of {format_name} into {count} slabs")
        return [self._outline(*nodes, format_name) for nodes in itertools.pairwise(self._cut(count, format_name))]

    def _cut(self, count: int, format_name: str) -> list[int]:
        """Return nodes between which slabs have about the same number of blocks."""
        pattern = self._pattern(half=format_named(format_name).traits.half)
        chunked = LAYOUTS[format_name] is Layout.CHUNKS
        ends, size = (pattern.chunk_starts, HEIGHT) if chunked else (pattern.offsets, 1)
        pieces = len(ends) - 1
        inner = np.searchsorted(ends, int(ends[-1]) * np.arange(1, count) / count)
        # At least one piece for each slab.
        inner = np.maximum.accumulate(np.maximum(inner, np.arange(1, count)) - np.arange(count - 1)) + np.arange(
            count - 1
        )
        inner = np.minimum(inner, pieces - count + np.arange(1, count))
        return [0, *(int(piece) * size for piece in inner), len(self.coordinates)]

    def _outline(self, start: int, stop: int, format_name: str, offsets_dtype: Any = np.int32) -> SparseMatrix:
        dof, pattern = self.dof, self._pattern(half=format_named(format_name).traits.half)
        shape = ((stop - start) * dof, self.shape[1])
        if LAYOUTS[format_name] is Layout.CHUNKS:
            starts = pattern.chunk_starts[start // HEIGHT : -(-stop // HEIGHT) + 1]
            return symbolic_chunks(format_name, shape, starts, dof)
        stored = int(pattern.offsets[stop] - pattern.offsets[start])
        if stored > np.iinfo(offsets_dtype).max:
            raise InputError(
                f"nodes {start} to {stop} have {stored} blocks, a slab at most {INT32_MAX}; cut it into more"
            )
        return symbolic_blocks(shape, stored, dof, offsets_dtype)

    def coupled_columns(self, row_start: int, row_stop: int) -> range:
        """Return the columns from a slab's first row to the last one that it couples with."""
        start, stop = row_start // self.dof, -(-row_stop // self.dof)
        last = int(self._last_columns[start:stop].max(initial=start))
        return range(row_start, self.dof * (last + 1))

    @cached_property
    def _last_columns(self) -> Array:
        pattern = self._pattern(half=True)
        return pattern.columns[pattern.offsets[1:] - 1]

    def graph(self) -> scipy.sparse.csr_array:
        """Return the graph of the nodes that share an element, each with itself: a SciPy CSR array of ones."""
        pattern, nodes = self._pattern(half=False), len(self.coordinates)
        return scipy.sparse.csr_array(
            (np.ones(pattern.columns.size, dtype=np.int8), pattern.columns, pattern.offsets), shape=(nodes, nodes)
        )

    def renumbered(self, permutation: Array) -> Self:
        """Return the matrix with its nodes in another order, and its elements in that of their first nodes.

        Parameters
        ----------
        permutation : array of int, (nodes,)
            The old number of each node.
        """
        place = np.arange(len(self._points), dtype=np.int32)  # ghost nodes keep their numbers
        place[permutation] = np.arange(len(permutation), dtype=np.int32)
        connectivity, order = renamed(self.connectivity, place)
        return self.with_mesh(permutation, self.ghosts, connectivity, order)

    def with_mesh(self, nodes: Array, ghosts: Array, connectivity: Array, order: Array) -> Self:
        """Return the matrix of some of its nodes and elements, perhaps in another order.

        Parameters
        ----------
        nodes : array of int
            Their numbers in this matrix.
        ghosts : array, (ghost nodes, 3)
            Coordinates of further nodes of the elements.
        connectivity : array of int32, (elements, nodes of an element)
            In new numbers: those of nodes, then those of ghost nodes.
        order : array of int, (elements,)
            The numbers of the elements in this matrix.
        """
        other = object.__new__(type(self))
        other.element, other.coordinates, other.ghosts = self.element, self.coordinates[nodes], ghosts
        other.connectivity, other.element_order = connectivity, order
        other.elements_before = len(self.connectivity)
        other.factors = self.factors[order] if self.factors.size else self.factors
        other.fixed = self.fixed.reshape(-1, self.dof)[nodes].reshape(-1) if self.fixed.size else self.fixed
        return other

    def with_factors_of(self, other: ElementMatrix) -> Self:
        """Return the matrix with the factors of ``other``, of which this one is a renumbering or a part."""
        factors = other.factors
        if factors.size and self.element_order is not None:
            if factors.size != self.elements_before:
                raise InputError(
                    f"this matrix is a part or a renumbering of one of {self.elements_before} elements, not of {factors.size}"
                )
            factors = factors[self.element_order]
        return self.with_material(factors if factors.size else None)

    @cached_property
    def reach(self) -> int:
        """The largest difference of the numbers of two nodes that share an element, without ghost nodes."""
        return largest_span(self.connectivity, len(self.coordinates))

    @cached_property
    def _lists(self) -> tuple[Array, Array]:
        offsets, places = list_elements(len(self._points), self.connectivity)
        offsets = offsets[: len(self.coordinates) + 1]
        places = places[: offsets[-1]]
        if (lonely := np.flatnonzero(np.diff(offsets) == 0)).size:
            raise InputError(f"{lonely.size} nodes, the first is {lonely[0]}, belong to no element; leave them out")
        return offsets, places

    @cached_property
    def _points(self) -> Array:
        """The coordinates of all nodes that elements have."""
        return np.concatenate([self.coordinates, self.ghosts]) if len(self.ghosts) else self.coordinates

    @property
    def _elements(self) -> MeshElements:
        arrays = (self._points, self.connectivity, self.factors, self.fixed)
        numbers = np.array(self.element.parameters, dtype=np.float64)
        if isinstance(self.element, OwnElement):
            return MeshElements(*arrays, numbers, self.dof, *self._lists, own=self.element)
        return MeshElements(*arrays, numbers, self.dof, *self._lists, repeats=self._repeats)

    @cached_property
    def _repeats(self) -> bool:
        """Whether an element names a node twice, which matters where several lanes make a row."""
        return LANES[self.connectivity.shape[1]] > 1 and bool(names_twice(self.connectivity))

    @cached_property
    def _patterns(self) -> dict[bool, RowPattern]:
        return {}

    def _pattern(self, *, half: bool) -> RowPattern:
        if half not in self._patterns:
            self._patterns[half] = RowPattern.of(self._elements, half=half)
        return self._patterns[half]

    def _check_volumes(self) -> None:
        bad = degenerate_elements(self.coordinates, self.connectivity, _FLAT)
        if bad.size:
            order = (
                "" if self.connectivity.shape[1] == 4 else "; hexahedra go once around the bottom, then around the top"
            )
            raise InputError(
                f"{bad.size} elements, the first is {bad[0]}, have no volume, are folded, or name their nodes in another "
                f"order{order}"
            )


def _checked_coordinates(coordinates: Any) -> Array:
    points = _converted(coordinates, np.float64, "coordinates")
    if points.ndim != 2 or points.shape[1] != 3 or not len(points):
        hint = "; transpose it" if points.ndim == 2 and points.shape[0] == 3 else ""
        raise InputError(f"coordinates must have shape (nodes, 3), not {points.shape}{hint}")
    if not np.isfinite(points).all():
        raise InputError("coordinates hold a number that is not finite")
    return points


def _checked_connectivity(connectivity: Any, nodes: int, sizes: tuple[int, ...]) -> Array:
    numbers = _converted(connectivity, None, "connectivity")
    if numbers.ndim != 2 or numbers.shape[1] not in sizes or not len(numbers) or numbers.dtype.kind not in "iu":
        hint = "; transpose it" if numbers.ndim == 2 and numbers.shape[0] in sizes else ""
        linear = "(elements, 4) for tetrahedra or (elements, 8) for hexahedra"
        shapes = linear if len(sizes) > 1 else f"(elements, {sizes[0]})"
        raise InputError(
            f"connectivity must be whole numbers of shape {shapes}, not {numbers.dtype} of {numbers.shape}{hint}"
        )
    if numbers.min() < 0 or numbers.max() >= nodes:
        raise InputError(
            f"connectivity names nodes {numbers.min()} to {numbers.max()}, but there are {nodes}, from 0 on"
        )
    if numbers.size > INT32_MAX:
        raise InputError(f"{len(numbers)} elements have more than {INT32_MAX} places; take fewer")
    return numbers.astype(np.int32, order="C", copy=False)


def _checked_factors(material: Any, elements: int) -> Array:
    if material is None:
        return np.empty(0)
    factors = _converted(material, np.float64, "material")
    if factors.shape not in ((), (elements,)):
        raise InputError(
            f"material must be one number or one for each of {elements} elements, not of shape {factors.shape}"
        )
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise InputError("material must be positive and finite")
    return factors if factors.ndim else np.full(elements, float(factors))


def _checked_fixed(fixed: Any, unknowns: int) -> Array:
    if fixed is None:
        return np.empty(0, dtype=np.uint8)
    numbers = _converted(fixed, None, "fixed")
    mask = np.zeros(unknowns, dtype=np.uint8)
    if numbers.dtype == bool:
        if numbers.shape != (unknowns,):
            raise InputError(f"fixed, if of bool, must have shape ({unknowns},), not {numbers.shape}")
        mask[numbers] = 1
    elif numbers.ndim == 1 and (numbers.dtype.kind in "iu" or not numbers.size):
        if numbers.size and (numbers.min() < 0 or numbers.max() >= unknowns):
            raise InputError(
                f"fixed names unknowns {numbers.min()} to {numbers.max()}, but there are {unknowns}, from 0 on"
            )
        mask[numbers.astype(np.int64)] = 1
    else:
        raise InputError(f"fixed must be numbers of unknowns or a mask of them, not {numbers.dtype} of {numbers.shape}")
    return mask if mask.any() else np.empty(0, dtype=np.uint8)


def _converted(values: Any, dtype: Any, name: str) -> Array:
    """Return a copy as a C-ordered array: what a caller changes afterwards must not change the matrix."""
    try:
        given = np.asarray(values)
        if given.dtype.kind == "c":
            raise ValueError("they are complex")
        return np.array(given, dtype=dtype, order="C")
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must be an array of real numbers: {error}") from None
