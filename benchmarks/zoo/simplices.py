"""Elasticity, heat and fields on triangles and tetrahedra, assembled by scikit-fem."""

from __future__ import annotations

from typing import Any

import numpy as np
import skfem
from skfem.helpers import curl, ddot, dot, eye, grad, trace
from skfem.models.elasticity import lame_parameters, linear_elasticity
from tetrahedra import TetrahedralBox

from penstock.solvers.amg.modes import rigid_body_modes
from zoo.meshes import gaussian_field, supported
from zoo.system import Array, Generator, System, family


def _cube(nodes: int, rng: Generator, grading: float = 1.0) -> Any:
    """Return tetrahedra of a cube whose inner nodes are moved; a grading above 1 draws the nodes towards an edge."""
    side = np.linspace(0, 1, max(3, nodes))
    mesh = skfem.MeshTet.init_tensor(side**grading, side**grading, side)
    inner = ((mesh.p > 0) & (mesh.p < 1)).all(axis=0)
    by = rng.uniform(-0.15, 0.15, mesh.p.shape) * inner / (len(side) - 1)
    by[:2] *= grading * mesh.p[:2] ** (1 - 1 / grading)  # of the width of the elements there
    return type(mesh)(mesh.p + by, mesh.t)


def _weight(basis: Any, direction: int) -> Array:
    @skfem.LinearForm
    def weight(v: Any, _: Any) -> Any:
        return -v[direction]

    return np.asarray(weight.assemble(basis))


def _elastic(basis: Any, poisson: float = 0.3, young: float = 1.0) -> Any:
    A = linear_elasticity(*lame_parameters(young, poisson)).assemble(basis).tocsr()
    return (A + A.T) / 2


def _clamped(mesh: Any, basis: Any, axis: int = 0) -> Array:
    """Return which unknowns lie on the face where a coordinate is least."""
    held = np.zeros(basis.N, bool)
    held[basis.get_dofs(lambda x: x[axis] == mesh.p[axis].min()).flatten()] = True
    return held


@family
def tetrahedra_p1(size: int, rng: Generator) -> System:
    """Linear tetrahedra with random moduli, their nodes given: what most meshes of parts are."""
    box = TetrahedralBox(max(4, round((size / 3) ** (1 / 3))), seed=int(rng.integers(1 << 30)))
    A = box.stiffness(np.exp(0.5 * rng.standard_normal(box.elements)))
    b = np.tile([0.0, 0.1, -1.0], len(box.points))
    return System(A, b, coordinates=box.points)


@family
def graded_tetrahedra(size: int, rng: Generator) -> System:
    """Linear tetrahedra refined towards an edge, as for a stress concentration; nothing is given."""
    mesh = _cube(round((size / 3) ** (1 / 3)), rng, grading=3.0)
    basis = skfem.Basis(mesh, skfem.ElementVector(skfem.ElementTetP1()), intorder=1)
    A, b = supported(_elastic(basis), _weight(basis, 2), _clamped(mesh, basis, axis=2))
    return System(A, b)


@family
def quadratic_tetrahedra(size: int, rng: Generator) -> System:
    """Quadratic tetrahedra, unknowns at nodes and edges, as engineers prefer them; nothing is given."""
    mesh = _cube(round((size / 3 / 8) ** (1 / 3)) + 1, rng)
    basis = skfem.Basis(mesh, skfem.ElementVector(skfem.ElementTetP2()), intorder=2)
    A, b = supported(_elastic(basis), _weight(basis, 2), _clamped(mesh, basis))
    return System(A, b)


@family
def quadratic_with_motions(size: int, rng: Generator) -> System:
    """The same with the rigid motions of all nodes and edges given as ``near_null_space``."""
    mesh = _cube(round((size / 3 / 8) ** (1 / 3)) + 1, rng)
    basis = skfem.Basis(mesh, skfem.ElementVector(skfem.ElementTetP2()), intorder=2)
    held = _clamped(mesh, basis)
    A, b = supported(_elastic(basis), _weight(basis, 2), held)
    return System(A, b, near_null_space=_motions(basis)[~held], block_size=3)


def _motions(basis: Any) -> Array:
    """Return the rigid motions of unknowns that stand three by three at points."""
    return np.asarray(rigid_body_modes(np.ascontiguousarray(basis.doflocs[:, ::3].T), 3))


@family
def nearly_incompressible_p2(size: int, rng: Generator) -> System:
    """Rubber with Poisson's ratio 0.499 in quadratic tetrahedra, which do not lock as linear ones do; motions are given."""
    mesh = _cube(round((size / 3 / 8) ** (1 / 3)) + 1, rng)
    basis = skfem.Basis(mesh, skfem.ElementVector(skfem.ElementTetP2()), intorder=2)
    held = _clamped(mesh, basis)
    A, b = supported(_elastic(basis, 0.499), _weight(basis, 2), held)
    return System(A, b, near_null_space=_motions(basis)[~held], block_size=3)


@family
def plane_strain(size: int, rng: Generator) -> System:
    """A dam: linear triangles in plane strain, with coordinates."""
    nodes = max(4, round((size / 2) ** 0.5))
    mesh = skfem.MeshTri.init_tensor(np.linspace(0, 1, nodes), np.linspace(0, 1, nodes))
    x, y = mesh.p
    mesh = type(mesh)(np.stack([x * (1 - 0.6 * y), y]), mesh.t)
    basis = skfem.Basis(mesh, skfem.ElementVector(skfem.ElementTriP1()), intorder=1)
    held = _clamped(mesh, basis, axis=1)
    A, b = supported(_elastic(basis, 0.2), _weight(basis, 1), held)
    return System(A, b, coordinates=np.ascontiguousarray(mesh.p.T[~held[::2]]), dimensions=2)


@family
def heat_time_step(size: int, rng: Generator) -> System:
    """An implicit step of heat conduction in tetrahedra, ``M + dt K``, in a medium of random conductivity; nothing is given."""
    mesh = _cube(round(size ** (1 / 3)), rng)
    basis = skfem.Basis(mesh, skfem.ElementTetP1(), intorder=2)
    conductivity = np.exp(rng.standard_normal(mesh.nelements))

    @skfem.BilinearForm
    def step(u: Any, v: Any, w: Any) -> Any:
        return u * v + 0.01 * conductivity[:, None] * dot(grad(u), grad(v))

    A = step.assemble(basis).tocsr()
    return System((A + A.T) / 2, np.asarray(_source(basis, rng)))


def _source(basis: Any, rng: Generator) -> Array:
    """Return a source that is random at every point."""
    strength = rng.standard_normal(basis.mesh.nelements)

    @skfem.LinearForm
    def source(v: Any, _: Any) -> Any:
        return strength[:, None] * v

    return np.asarray(source.assemble(basis))


@family
def heart_tissue(size: int, rng: Generator) -> System:
    """A step of the monodomain equation in a slab of heart: conduction 9 times as good along fibres that turn with depth.

    Vigmond et al., "Solvers for the cardiac bidomain equations" (Prog. Biophys. Mol. Biol. 96, 2008); nothing is given.
    """
    mesh = _cube(round(size ** (1 / 3)), rng)
    basis = skfem.Basis(mesh, skfem.ElementTetP1(), intorder=2)

    @skfem.BilinearForm
    def step(u: Any, v: Any, w: Any) -> Any:
        angle = 2.0 * (w.x[2] - 0.5)
        du, dv = grad(u), grad(v)
        along = np.cos(angle) * du[0] + np.sin(angle) * du[1]
        return u * v + 0.005 * (dot(du, dv) + 8 * along * (np.cos(angle) * dv[0] + np.sin(angle) * dv[1]))

    A = step.assemble(basis).tocsr()
    return System((A + A.T) / 2, _source(basis, rng))


@family
def eddy_currents(size: int, rng: Generator) -> System:
    """``curl curl E + E`` in edge elements of the lowest order; nothing is given.

    Its near-null space are all gradients, which no default of algebraic multigrid knows: Hiptmair and Xu, "Nodal auxiliary
    space preconditioning in H(curl) and H(div) spaces" (SIAM J. Numer. Anal. 45, 2007).
    """
    mesh = _cube(round((size / 7) ** (1 / 3)) + 1, rng)
    basis = skfem.Basis(mesh, skfem.ElementTetN0())

    @skfem.BilinearForm
    def energy(u: Any, v: Any, _: Any) -> Any:
        return dot(curl(u), curl(v)) + dot(u, v)

    A = energy.assemble(basis).tocsr()
    held = np.zeros(basis.N, bool)
    held[basis.get_dofs().flatten()] = True
    A, b = supported((A + A.T) / 2, _weight(basis, 2), held)
    return System(A, b)


@family
def morley_plate(size: int, rng: Generator) -> System:
    """A clamped Kirchhoff plate in Morley's triangles, unknowns at nodes and edges (Aero. Quart. 19, 1968); nothing is given."""
    nodes = max(4, round((size / 4) ** 0.5))
    mesh = skfem.MeshTri.init_tensor(np.linspace(0, 1, nodes), np.linspace(0, 1, nodes))
    basis = skfem.Basis(mesh, skfem.ElementTriMorley())

    @skfem.BilinearForm
    def bending(u: Any, v: Any, _: Any) -> Any:
        curvature = u.hess
        return ddot(0.7 * curvature + 0.3 * eye(trace(curvature), 2), v.hess)

    @skfem.LinearForm
    def pressure(v: Any, _: Any) -> Any:
        return -1.0 * v

    A = bending.assemble(basis).tocsr()
    held = np.zeros(basis.N, bool)
    held[basis.get_dofs().flatten()] = True
    A, b = supported((A + A.T) / 2, np.asarray(pressure.assemble(basis)), held)
    return System(A, b, dimensions=2)


@family
def high_order(size: int, rng: Generator) -> System:
    """Diffusion in a plane by quadrilaterals of order 4, in which condition numbers grow with the order; nothing is given."""
    cells = max(3, round((size / 16) ** 0.5))
    mesh = skfem.MeshQuad.init_tensor(np.linspace(0, 1, cells + 1), np.linspace(0, 1, cells + 1))
    basis = skfem.Basis(mesh, skfem.ElementQuadP(4))
    logarithm = gaussian_field((cells, cells), max(1, cells / 10), rng).ravel()

    @skfem.BilinearForm
    def diffusion(u: Any, v: Any, _: Any) -> Any:
        return np.exp(logarithm)[:, None] * dot(grad(u), grad(v))

    A = diffusion.assemble(basis).tocsr()
    held = np.zeros(basis.N, bool)
    held[basis.get_dofs().flatten()] = True
    A, b = supported((A + A.T) / 2, _source(basis, rng), held)
    return System(A, b, dimensions=2)
