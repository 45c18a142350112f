"""The model problem: a box clamped at x = 0, its matrix at any size, and its loads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from penstock.fem.assembly import CHUNKED_FORMATS, assemble_rows, chunk_starts, symbolic_rows
from penstock.fem.box_rows import BoxElements, BoxRowMaker
from penstock.fem.diffusion import HeatConduction
from penstock.fem.elasticity import LinearElasticity
from penstock.fem.load import body_load, end_load
from penstock.fem.mass import box_mass, node_weights
from penstock.fem.material import Material, UniformMaterial
from penstock.fem.mesh import BoxMesh
from penstock.fem.micropolar import MicropolarElasticity
from penstock.fem.row_layouts import assembled
from penstock.spmv import CPU, Device, InputError, NodeMatrix, SparseMatrix
from penstock.spmv.formats.sliced_bsr import HEIGHT

Array = np.ndarray[Any, Any]

#: Load cases of :meth:`Cantilever.load`. All but ``body`` act on the face x = L and need 3 or 6 degrees of freedom.
LOAD_KINDS = ("shear", "shear_y", "axial", "torsion", "body")


class Element(Protocol):
    """A material law on the 8-node hexahedron.

    Examples
    --------
    >>> from penstock.fem import Cantilever, LinearElasticity
    >>> law = LinearElasticity(young=210e9)
    >>> law.dof, law.stiffness((0.1, 0.1, 0.1)).shape, Cantilever(nodes=3, element=law).law.young
    (3, (24, 24), 210000000000.0)
    """

    @property
    def dof(self) -> int:
        """Degrees of freedom of a node."""

    def stiffness(self, spacing: tuple[float, float, float]) -> Array:
        """Return the symmetric element matrix, ``(8 * dof, 8 * dof)``."""

    def rigid_body_modes(self, coordinates: Array) -> Array:
        """Return a basis of the null space, ``(nodes * dof, modes)``."""


_ELEMENTS: dict[int, Callable[[], Element]] = {
    1: HeatConduction,
    3: LinearElasticity,
    6: MicropolarElasticity.from_engineering,
}


@dataclass(frozen=True)
class Cantilever:
    """A box of 8-node hexahedra clamped at x = 0.

    Parameters
    ----------
    nodes : int or (int, int, int)
        Nodes along each side; one number for a cube.
    dof : {1, 3, 6}
        Heat conduction, linear elasticity, micropolar elasticity.
    lengths : float or (float, float, float)
        Side lengths; one number is the length along x, and all elements are cubes.
    material : Material
        Factor of the stiffness of each element; uniform by default.
    element : Element, optional
        Material law; by default with conductivity 1, or Young's modulus 1 and Poisson's ratio 0.3.
    clamped : bool
        False keeps the null space of rigid motions.

    Raises
    ------
    InputError
        If ``dof`` is none of these or not that of the element, or the mesh is not possible.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> Cantilever(nodes=128, dof=3).nnz  # known without assembling
    501686712
    >>> beam = Cantilever(nodes=(9, 3, 3), dof=3)
    >>> beam.matrix().shape, beam.load("shear", "axial").shape
    ((243, 243), (243, 2))
    """

    nodes: int | tuple[int, int, int]
    dof: int = 3
    lengths: float | tuple[float, float, float] = 1.0
    material: Material = field(default_factory=UniformMaterial)
    element: Element | None = None
    clamped: bool = True

    def __post_init__(self) -> None:
        if self.dof not in _ELEMENTS:
            raise InputError(f"dof must be 1 (conduction), 3 (elasticity) or 6 (micropolar), not {self.dof!r}")
        if self.element is not None and self.element.dof != self.dof:
            raise InputError(f"the element has {self.element.dof} degrees of freedom per node, but dof is {self.dof}")
        self.mesh  # noqa: B018 - refuse bad nodes and lengths now

    @cached_property
    def mesh(self) -> BoxMesh:
        """The mesh."""
        return BoxMesh(self.nodes, self.lengths)

    @cached_property
    def law(self) -> Element:
        """The element in use."""
        return self.element if self.element is not None else _ELEMENTS[self.dof]()

    @property
    def unknowns(self) -> int:
        """Rows of the matrix, including clamped ones."""
        return self.mesh.node_count * self.dof

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix."""
        return self.unknowns, self.unknowns

    @property
    def nnz(self) -> int:
        """Number of stored scalars, known without assembling."""
        return self.mesh.connections * self.dof**2

    def matrix(
        self, format_name: str = "bsr", *, values_dtype: Any = np.float64, device: Device | str = CPU
    ) -> SparseMatrix:
        """Assemble the whole matrix in the memory of a device; formats other than ``csr`` store blocks of dof x dof."""
        device = Device.parse(device)
        if device.kind == "cpu":
            return self._assemble(0, self.mesh.node_count, format_name, values_dtype, np.int64)
        types = {"values_dtype": values_dtype, "offsets_dtype": np.int64}
        outline = symbolic_rows(self.mesh, self.dof, 0, self.mesh.node_count, format_name=format_name, **types)
        return assembled(outline, self.row_maker(format_name, device))

    def mass(self, density: float = 1.0, *, lumped: bool = False, rotary_inertia: float | None = None) -> NodeMatrix:
        """Return the mass matrix, or that of heat capacities; rows and columns of clamped unknowns are empty.

        Parameters
        ----------
        density : float
            Mass, or heat capacity, per volume.
        lumped : bool
            Whether it is a diagonal; otherwise it is consistent with the shape functions.
        rotary_inertia : float, optional
            For 6 unknowns a node: inertia of rotations per mass, in the unit of length squared; by default that of balls as large
            as the elements, about.

        Returns
        -------
        NodeMatrix
            12 bytes for each of 27 neighbours of a node, whatever its unknowns.

        Examples
        --------
        >>> from penstock.fem import Cantilever
        >>> M = Cantilever(nodes=(9, 3, 3), dof=3, clamped=False).mass(2.0)
        >>> x = [1.0, 0.0, 0.0] * 81
        >>> round(float(x @ (M @ x)), 9)  # the volume is 1 / 16
        0.125
        """
        weights = node_weights(self.dof, rotary_inertia, self.mesh.spacing)
        return box_mass(self.mesh, density, weights, lumped=lumped, clamped=self.clamped)

    @property
    def elements_nbytes(self) -> int:
        """Bytes, about, that :meth:`row_maker` holds on its device: 8 an element unless all are alike, 8 a chunk."""
        varies = not isinstance(self.material, UniformMaterial)
        chunks = -(-self.mesh.node_count // HEIGHT) + 1
        return 8 * (64 * self.dof**2 + math.prod(self.mesh.element_counts) * varies + chunks)

    def row_maker(
        self, format_name: str = "bsr", device: Device | str = CPU, *, planes: slice | None = None
    ) -> BoxRowMaker:
        """Return what makes any rows of the matrix on a device, from 8 bytes an element that it holds there.

        With ``planes`` of nodes, two or more, the rows and columns are those of these nodes only, as in the square of a rank.
        """
        device = Device.parse(device)
        with device.current():
            of = (self.mesh, self._element_matrix, self.material)
            elements = BoxElements.of(*of, planes=planes, clamped=self.clamped, device=device)
            starts = None
            if format_name in CHUNKED_FORMATS:
                starts = device.asarray(chunk_starts(elements.mesh, format_name))
        return BoxRowMaker(elements, format_name, device, starts)

    def rows(self, start: int, stop: int, format_name: str = "bsr", *, values_dtype: Any = np.float64) -> SparseMatrix:
        """Assemble some rows of the matrix, whole nodes, as a rank that has them does.

        Parameters
        ----------
        start, stop : int
            Multiples of the unknowns of a node.
        format_name : str
        values_dtype : dtype

        Raises
        ------
        InputError
            If the rows cut a node or leave the matrix.
        """
        if start % self.dof or stop % self.dof or not 0 <= start <= stop <= self.unknowns:
            raise InputError(
                f"rows {start} to {stop} are not those of whole nodes of {self.dof} of {self.unknowns} unknowns"
            )
        return self._assemble(start // self.dof, stop // self.dof, format_name, values_dtype, np.int64)

    def subdivisions(
        self, count: int, format_name: str = "bsr", *, values_dtype: Any = np.float64
    ) -> Iterator[SparseMatrix]:
        """Assemble the matrix in ``count`` row slabs of nearly equal size, one at a time.

        Needs memory for one slab. Joined, the slabs equal the arrays of :meth:`matrix` bit for bit. Slabs of ``sliced_bsr``
        and ``symmetric_bsr`` hold whole chunks of 32 nodes, except the last.
        """
        for start, stop in itertools.pairwise(self._cut(count, format_name)):
            yield self._assemble(start, stop, format_name, values_dtype, np.int32)

    def symbolic_slabs(
        self, count: int, format_name: str = "bsr", *, values_dtype: Any = np.float64
    ) -> list[SparseMatrix]:
        """Return the slabs of :meth:`subdivisions` with shapes and types but without memory: the input of a plan."""
        return [
            symbolic_rows(self.mesh, self.dof, start, stop, format_name=format_name, values_dtype=values_dtype)
            for start, stop in itertools.pairwise(self._cut(count, format_name))
        ]

    def _cut(self, count: int, format_name: str) -> list[int]:
        """Cut the nodes into slabs; slabs of chunked formats hold whole chunks."""
        if format_name not in CHUNKED_FORMATS:
            return self.mesh.cut(count)
        chunks = self.largest_cut(format_name)
        if not 1 <= count <= chunks:
            raise InputError(f"cannot cut {chunks} chunks of {HEIGHT} nodes into {count} slabs")
        bounds, last = [0], chunks - count + 1
        for part, bound in enumerate(self.mesh.cut(count)[1:-1], start=1):
            # At least one chunk per slab, with one left for each later slab.
            bounds.append(min(max(round(bound / HEIGHT), bounds[-1] + 1), last + part - 1))
        return [*(bound * HEIGHT for bound in bounds), self.mesh.node_count]

    def largest_cut(self, format_name: str = "bsr") -> int:
        """Return the largest number of slabs that a matrix of this format can be cut into."""
        nodes = self.mesh.node_count
        return -(-nodes // HEIGHT) if format_name in CHUNKED_FORMATS else nodes

    def _assemble(self, start: int, stop: int, format_name: str, values_dtype: Any, offsets_dtype: Any) -> SparseMatrix:
        return assemble_rows(
            self.mesh,
            self._element_matrix,
            self.material,
            start,
            stop,
            format_name=format_name,
            clamped=self.clamped,
            values_dtype=values_dtype,
            offsets_dtype=offsets_dtype,
        )

    @cached_property
    def _element_matrix(self) -> Array:
        return self.law.stiffness(self.mesh.spacing)

    def load(self, *kinds: str, magnitude: float = 1.0) -> Array:
        """Return one or several load cases.

        Parameters
        ----------
        *kinds : str
            ``shear`` (end force along -z), ``shear_y``, ``axial`` (along x), ``torsion`` (end moment about x), or
            ``body`` (along -z; a uniform source for 1 degree of freedom). Default: ``shear``, or ``body`` if dof is 1.
        magnitude : float
            Total force, moment or source over the whole face or volume.

        Returns
        -------
        array, (unknowns,) for at most one kind, (unknowns, k) for k kinds
            Zero at clamped unknowns.
        """
        loads = [self._one_load(kind, magnitude) for kind in kinds or ["body" if self.dof == 1 else "shear"]]
        return loads[0] if len(loads) == 1 else np.ascontiguousarray(np.stack(loads, axis=1))

    def _one_load(self, kind: str, magnitude: float) -> Array:
        if kind not in LOAD_KINDS:
            raise InputError(f"unknown load {kind!r}; known: {', '.join(LOAD_KINDS)}")
        if self.dof == 1 and kind != "body":
            raise InputError(f"load {kind!r} is a force; heat conduction (dof 1) has only 'body', a uniform source")
        if not np.isfinite(magnitude):
            raise InputError(f"the load's magnitude must be finite, not {magnitude}")
        x, y, z = self.mesh.side_lengths
        if kind == "body":
            density = np.zeros(self.dof)
            density[0 if self.dof == 1 else 2] = magnitude / (x * y * z) * (1 if self.dof == 1 else -1)
            load = body_load(self.mesh, density)
        elif kind == "torsion":
            load = end_load(self.mesh, self._twist, self.dof)
            arms = self.mesh.coordinates(slice(-1, None)) - np.array([0, y / 2, z / 2])
            forces = load.reshape(-1, self.dof)[-len(arms) :]
            # Summed with the zeros of all other nodes: in another order the sum might be rounded otherwise, and a checkpoint of
            # an earlier version would not know its load again.
            moments = np.zeros(self.mesh.node_count)
            moments[-len(arms) :] = arms[:, 1] * forces[:, 2] - arms[:, 2] * forces[:, 1]
            forces *= magnitude / float(moments.sum())
        else:
            direction = {"shear": (0, 0, -1), "shear_y": (0, 1, 0), "axial": (1, 0, 0)}[kind]
            force = np.zeros(self.dof)
            force[:3] = magnitude / (y * z) * np.array(direction)
            load = end_load(self.mesh, lambda positions: np.broadcast_to(force, (len(positions), self.dof)), self.dof)
        if self.clamped:
            load[: self._clamped_unknowns] = 0
        return load

    def _twist(self, positions: Array) -> Array:
        _, y, z = self.mesh.side_lengths
        traction = np.zeros((len(positions), self.dof))
        traction[:, 1], traction[:, 2] = z / 2 - positions[:, 2], positions[:, 1] - y / 2
        return traction

    @property
    def _clamped_unknowns(self) -> int:
        _, ny, nz = self.mesh.node_counts
        return ny * nz * self.dof

    def rigid_body_modes(self) -> Array:
        """Return a basis of the unclamped matrix's null space, ``(unknowns, 1)`` or ``(unknowns, 6)``."""
        return self.law.rigid_body_modes(self.mesh.coordinates())

    def tip_deflection(self, solution: Array) -> float:
        """Return the mean displacement of the end face in the direction it moves most, or its mean temperature.

        Parameters
        ----------
        solution : array, (unknowns,)
        """
        _, ny, nz = self.mesh.node_counts
        displacements = np.asarray(solution).reshape(-1, self.dof)[-ny * nz :, : min(self.dof, 3)].mean(axis=0)
        return float(displacements[np.argmax(abs(displacements))])

    def tip_twist(self, solution: Array) -> float:
        """Return the mean rotation of the end face about the axis of the body, in radians, of small displacements.

        Parameters
        ----------
        solution : array, (unknowns,)
        """
        _, ny, nz = self.mesh.node_counts
        _, y, z = self.mesh.side_lengths
        moved = np.asarray(solution).reshape(-1, self.dof)[-ny * nz :, 1:3]
        arms = self.mesh.coordinates(slice(-1, None))[:, 1:3] - np.array([y / 2, z / 2])
        return float((arms[:, 0] * moved[:, 1] - arms[:, 1] * moved[:, 0]).sum() / (arms**2).sum())
