"""Frames of beams with 6 unknowns a node, and trusses: foams, lattices, buildings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.spatial import Voronoi

from penstock.solvers.amg.modes import rigid_body_modes
from zoo.meshes import assembled, box, connected, supported
from zoo.system import Array, Generator, System, family


@dataclass(frozen=True)
class Beams:
    """Beams between two nodes each.

    Parameters
    ----------
    points : array, (nodes, 3)
    ends : array of int, (beams, 2)
    radius : float or array, (beams,)
        Of a circular section.
    young : float
    """

    points: Array
    ends: Array
    radius: Array | float
    young: float = 1.0

    def matrix(self) -> Array:
        """Return the stiffness by Euler's and Bernoulli's theory, 6 unknowns a node.

        Przemieniecki, "Theory of Matrix Structural Analysis" (1968), section 5.6, without shear deformation.
        """
        axis = self.points[self.ends[:, 1]] - self.points[self.ends[:, 0]]
        length = np.linalg.norm(axis, axis=1)
        turned = np.zeros((len(axis), 12, 12))
        for part in range(4):
            turned[:, 3 * part : 3 * part + 3, 3 * part : 3 * part + 3] = _frames(axis / length[:, None])
        blocks = np.einsum("eki,ekl,elj->eij", turned, self._along_x(length), turned, optimize=True)
        return assembled(self.ends, (blocks + blocks.transpose(0, 2, 1)) / 2, 6, len(self.points))

    def _along_x(self, length: Array) -> Array:
        """Return the element matrices of beams along x."""
        radius = np.broadcast_to(self.radius, length.shape)
        area, inertia = np.pi * radius**2, np.pi * radius**4 / 4
        k = np.zeros((len(length), 12, 12))
        for place, of in ((0, self.young * area / length), (3, self.young / 2.6 * 2 * inertia / length)):
            k[:, place, place] = k[:, place + 6, place + 6] = of
            k[:, place, place + 6] = k[:, place + 6, place] = -of
        for across, turn, sign in ((1, 5, 1.0), (2, 4, -1.0)):
            unknowns = np.array([across, turn, across + 6, turn + 6])
            s = sign * length
            bending = np.array([
                [12 + 0 * s, 6 * s, -12 + 0 * s, 6 * s],
                [6 * s, 4 * s**2, -6 * s, 2 * s**2],
                [-12 + 0 * s, -6 * s, 12 + 0 * s, -6 * s],
                [6 * s, 2 * s**2, -6 * s, 4 * s**2],
            ])  # fmt: skip
            factor = self.young * inertia / length**3
            k[:, unknowns[:, None], unknowns] = (bending * factor).transpose(2, 0, 1)
        return k


def _frames(axis: Array) -> Array:
    """Return rotations whose first row is the axis of each beam, (beams, 3, 3)."""
    other = np.eye(3)[abs(axis).argmin(axis=1)]
    second = np.cross(axis, other)
    second /= np.linalg.norm(second, axis=1, keepdims=True)
    return np.stack([axis, second, np.cross(axis, second)], axis=1)


def _standing(beams: Beams, held: Array, force: tuple[float, float, float]) -> System:
    """Return the frame clamped at some nodes, with a force on every other one; its rigid motions are given."""
    points = beams.points
    loads = np.zeros((len(points), 6))
    loads[:, :3] = force
    A, b = supported(beams.matrix(), loads.ravel(), np.repeat(held, 6))
    return System(A, b, near_null_space=np.asarray(rigid_body_modes(points[~held], 6)), block_size=6)


def _used(points: Array, ends: Array) -> tuple[Array, Array]:
    """Return the largest connected part of a mesh of lines, its nodes numbered anew."""
    ends = ends[connected(ends, len(points))]
    used, numbers = np.unique(ends, return_inverse=True)
    return points[used], numbers.reshape(ends.shape)


@family
def foam_frame(size: int, rng: Generator) -> System:
    """An open-cell foam: a beam along every edge of a Voronoi diagram, four at a node, a twentieth as thick as long.

    Gibson and Ashby, "Cellular Solids" (1997). Edges of random foams are of all lengths; the shortest ones are contracted.
    """
    seeds = rng.random((max(20, round(size / 6 / 4.8)), 3))
    diagram = Voronoi(seeds)
    points, ridges = diagram.vertices, diagram.ridge_vertices
    inside = (abs(points - 0.5) < 0.5).all(axis=1)
    lines = np.concatenate([np.stack([of, np.roll(of, 1)], axis=1) for of in map(np.array, ridges)])
    lines = lines[(lines >= 0).all(axis=1)]
    lines = np.unique(np.sort(lines[inside[lines].all(axis=1)], axis=1), axis=0)
    mean = np.linalg.norm(points[lines[:, 0]] - points[lines[:, 1]], axis=1).mean()
    _, places, numbers = np.unique((points / (0.15 * mean)).round(), axis=0, return_index=True, return_inverse=True)
    lines = np.unique(np.sort(numbers.ravel()[lines], axis=1), axis=0)
    points, ends = _used(points[places], lines[lines[:, 0] != lines[:, 1]])
    held = points[:, 2] < points[:, 2].min() + 0.08
    return _standing(Beams(points, ends, 0.05 * mean), held, (0.0, 0.1, -1.0))


@family
def lattice_frame(size: int, rng: Generator) -> System:
    """A printed lattice: body-centred cubic cells of struts with random radii, a few of them broken."""
    counts = np.array(box(size / 12, (2, 1, 1)))
    corners = np.stack(np.meshgrid(*map(np.arange, counts + 1), indexing="ij"), axis=-1)
    cells = np.stack(np.meshgrid(*map(np.arange, counts), indexing="ij"), axis=-1).reshape(-1, 3)
    numbers = np.arange(np.prod(counts + 1)).reshape(counts + 1)
    middles = numbers.size + np.arange(len(cells))
    struts = [np.stack([middles, numbers[tuple((cells + step).T)]], axis=1) for step in np.ndindex(2, 2, 2)]
    lines = np.concatenate(struts)
    points = np.concatenate([corners.reshape(-1, 3), cells + 0.5])
    points, ends = _used(points, lines[rng.random(len(lines)) > 0.05])
    return _standing(Beams(points, ends, rng.uniform(0.03, 0.06, len(ends))), points[:, 0] < 0.2, (0.0, 0.0, -1.0))


@family
def building(size: int, rng: Generator) -> System:
    """The steel frame of a building: columns, thinner beams and bracing, four elements a member, in newtons and metres."""
    bays = np.array(box(size / 6 / 14, (1, 1, 2)))
    grid = np.stack(np.meshgrid(*map(np.arange, bays + 1), indexing="ij"), axis=-1).reshape(-1, 3)
    numbers = np.arange(len(grid)).reshape(bays + 1)
    members, radii = [], []
    for step, radius in (((0, 0, 1), 0.2), ((1, 0, 0), 0.12), ((0, 1, 0), 0.12), ((1, 0, 1), 0.06)):
        begins = numbers[tuple(slice(0, count + 1 - by) for count, by in zip(bays, step, strict=True))]
        if step == (1, 0, 1):
            begins = begins[:, ::2]  # every other frame is braced
        begins = begins.ravel()
        members.append(np.stack([begins, begins + np.ravel_multi_index(step, bays + 1)], axis=1))
        radii.append(np.full(len(begins), radius))
    points, ends, of = _divided(grid * [6.0, 5.0, 3.5], np.concatenate(members), 4)
    beams = Beams(points, ends, np.concatenate(radii)[of], young=2.1e11)
    return _standing(beams, points[:, 2] == 0, (300.0, 0.0, -2000.0))


def _divided(points: Array, members: Array, parts: int) -> tuple[Array, Array, Array]:
    """Return the mesh of members that are divided into parts, and which member each part belongs to."""
    shares = np.arange(1, parts) / parts
    first, last = points[members[:, :1]], points[members[:, 1:]]
    between = first + shares[:, None] * (last - first)
    inner = len(points) + np.arange(len(members) * (parts - 1)).reshape(len(members), -1)
    chains = np.concatenate([members[:, :1], inner, members[:, 1:]], axis=1)
    ends = np.stack([chains[:, :-1], chains[:, 1:]], axis=-1).reshape(-1, 2)
    return np.concatenate([points, between.reshape(-1, 3)]), ends, np.repeat(np.arange(len(members)), parts)


@family
def truss(size: int, rng: Generator) -> System:
    """A space truss: hinged bars along the edges and the diagonals of cubes, 3 unknowns a node, with coordinates."""
    counts = np.array(box(size / 3, (4, 1, 1)))
    grid = np.stack(np.meshgrid(*map(np.arange, counts), indexing="ij"), axis=-1).reshape(-1, 3)
    numbers = np.arange(len(grid)).reshape(counts)
    steps = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1)]
    bars = []
    for step in steps:
        begins = numbers[tuple(slice(0, count - by) for count, by in zip(counts, step, strict=True))].ravel()
        bars.append(np.stack([begins, begins + np.ravel_multi_index(step, counts)], axis=1))
    ends, points = np.concatenate(bars), grid + 0.1 * rng.uniform(-1, 1, grid.shape)
    axis = points[ends[:, 1]] - points[ends[:, 0]]
    axis /= np.linalg.norm(axis, axis=1, keepdims=True)
    stiffness = rng.uniform(0.5, 2.0, len(ends))
    ones = np.einsum("e,ei,ej->eij", stiffness, axis, axis)
    blocks = np.block([[ones, -ones], [-ones, ones]])
    held = grid[:, 0] == 0
    loads = np.zeros(points.shape)
    loads[grid[:, 0] == counts[0] - 1, 2] = -1.0
    A, b = supported(assembled(ends, blocks, 3, len(points)), loads.ravel(), np.repeat(held, 3))
    return System(A, b, coordinates=points[~held])
