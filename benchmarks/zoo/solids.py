"""Elastic solids of hexahedra, as images, topology optimisation and meshing by blocks make them."""

from __future__ import annotations

import numpy as np
from scipy import ndimage

from penstock.fem import LinearElasticity
from zoo.meshes import body, box, gaussian_field, largest_part, supported, voxel_matrix
from zoo.system import Array, Generator, System, family


def _grid(size: int, proportions: tuple[float, ...] = (1, 1, 1), filled: float = 1.0) -> tuple[int, ...]:
    """Return the elements along each axis that give a number of unknowns, if a part of the box is filled."""
    return tuple(max(3, nodes - 1) for nodes in box(size / 3 / filled, proportions))


@family
def smooth_cube(size: int, rng: Generator) -> System:
    """A uniform elastic cube: the model problem of every solver."""
    return body(np.ones(_grid(size)))


@family
def smooth_beam(size: int, rng: Generator) -> System:
    """A uniform slender beam, 24 times as long as thick, bent by its end: the smallest eigenvalue is tiny."""
    return body(np.ones(_grid(size, (24, 1, 1))), axis=0)


@family
def bone(size: int, rng: Generator) -> System:
    """Trabecular bone in a voxel image: a random open structure of one stiffness, pressed from above.

    As in micro-CT finite elements: Arbenz et al., "A scalable multi-level preconditioner for matrix-free mu-finite element
    analysis of human bone structures" (Int. J. Numer. Meth. Engng 73, 2008). The structure is where a random field is near zero.
    """
    shape = _grid(size, filled=0.55)
    field = gaussian_field(shape, max(1.0, 0.06 * shape[0]), rng)
    return body(largest_part(abs(field) < 0.45).astype(float))


@family
def fibres(size: int, rng: Generator) -> System:
    """A composite: straight fibres along x, 200 times as stiff as the resin around them, cut off at random."""
    shape = _grid(size, (1.5, 1, 1))
    there = np.zeros(shape, bool)
    for _ in range(shape[1] * shape[2] // 6):
        y, z, begin = rng.integers(shape[1]), rng.integers(shape[2]), rng.integers(-shape[0] // 3, shape[0])
        there[max(0, begin) : begin + shape[0] // 2, y, z] = True
    return body(np.where(there, 200.0, 1.0), axis=0)


@family
def pavement(size: int, rng: Generator) -> System:
    """A road: asphalt, base and subgrade with stiffness 3000, 300 and 60 (MPa), in elements 10 times as wide as high.

    The load is that of one tyre. Layers and moduli as in mechanistic design, Huang, "Pavement Analysis and Design" (2004).
    """
    shape = _grid(size, (2, 2, 1))
    layers = np.full(shape[2], 60.0)
    layers[shape[2] // 2 :] = 300.0
    layers[-max(1, shape[2] // 6) :] = 3000.0
    system = body(np.ones(shape) * layers, law=LinearElasticity(poisson=0.35), spacing=(0.2, 0.2, 0.02))
    points = system.coordinates
    assert points is not None
    near = np.linalg.norm(points[:, :2] - points[:, :2].mean(axis=0), axis=1) < 0.25 * np.ptp(points[:, 0])
    loaded = near & (points[:, 2] == points[:, 2].max())
    b = np.zeros(points.shape)
    b[loaded, 2] = -1.0
    return System(system.A, b.ravel(), coordinates=points)


@family
def topology_optimised(size: int, rng: Generator) -> System:
    """A late step of topology optimisation: bars with stiffness 1 in a void of 1e-9, grey elements between them.

    SIMP with penalty 3 as in Andreassen et al., "Efficient topology optimization in MATLAB using 88 lines of code"
    (Struct. Multidisc. Optim. 43, 2011); the density is a filtered random structure, not the result of an optimisation.
    """
    shape = _grid(size, (2, 1, 1))
    field = gaussian_field(shape, max(1.0, 0.08 * shape[1]), rng)
    density = ndimage.uniform_filter(np.clip(4 * (0.6 - abs(field)), 0, 1), 3)
    return body(1e-9 + density**3 * (1 - 1e-9), axis=0)


@family
def block_jumps(size: int, rng: Generator) -> System:
    """A cube of blocks whose stiffness is 10 to a random power from -3 to 3, as rocks beside soil."""
    shape = _grid(size)
    block = max(1, shape[0] // 5)
    powers = rng.uniform(-3, 3, tuple(-(-count // block) for count in shape))
    for axis in range(3):
        powers = powers.repeat(block, axis=axis)
    return body(10.0 ** powers[: shape[0], : shape[1], : shape[2]])


@family
def element_jumps(size: int, rng: Generator) -> System:
    """A cube in which each element by itself is soft or 10,000 times as stiff: the worst case of a random mixture."""
    return body(np.where(rng.random(_grid(size)) < 0.3, 1e4, 1.0))


@family
def inclusions(size: int, rng: Generator) -> System:
    """Stiff balls of random size in a matrix a thousandth as stiff, as gravel in asphalt or particles in rubber."""
    return body(np.where(_balls(_grid(size), 0.35, rng), 1000.0, 1.0), law=LinearElasticity(poisson=0.4))


def _balls(shape: tuple[int, ...], share: float, rng: Generator) -> Array:
    """Return where random balls are, which fill about a share of a box."""
    grid = np.moveaxis(np.indices(shape) + 0.5, 0, -1)
    there = np.zeros(shape, bool)
    while there.mean() < share:
        centre, radius = rng.random(3) * shape, rng.uniform(0.06, 0.16) * min(shape)
        there |= np.linalg.norm(grid - centre, axis=-1) < max(1.0, radius)
    return there


@family
def porous_solid(size: int, rng: Generator) -> System:
    """What is left between overlapping spherical pores, as sintered metal or Swiss cheese."""
    return body(largest_part(~_balls(_grid(size, filled=0.7), 0.35, rng)).astype(float))


@family
def stretched_30(size: int, rng: Generator) -> System:
    """A block whose elements are 30 times as long as thick: a coating, or a layered rock."""
    return body(np.ones(_grid(size)), spacing=(30.0, 30.0, 1.0))


@family
def plate_of_bricks(size: int, rng: Generator) -> System:
    """A thin plate of two layers of flat bricks, a hundred times as wide as thick, clamped around and bent by its weight.

    Solid elements stand where shells would do. Thinner plates have rounding floors above 1e-8, which no solver passes.
    """
    side = max(6, round((size / 9) ** 0.5))
    A, points = voxel_matrix(np.ones((side, side, 2)), LinearElasticity(), (1.0, 1.0, side / 200))
    rim = (points[:, :2] == 0).any(axis=1) | (points[:, :2] == side).any(axis=1)
    A, b = supported(A, np.tile([0.0, 0.0, -1.0], len(points)), np.repeat(rim, 3))
    return System(A, b, coordinates=points[~rim])


@family
def thin_walled(size: int, rng: Generator) -> System:
    """A box girder with bulkheads, its walls one flat element thick, bent by its end."""
    width = max(4, round((size / 150) ** 0.5))
    shape = (6 * width, width, width)
    there = np.zeros(shape, bool)
    for axis in (1, 2):
        for side in (0, -1):
            np.moveaxis(there, axis, 0)[side] = True
    there[::width] = there[-1] = True
    thickness = np.ones(width)
    thickness[[0, -1]] = 0.15
    return body(there.astype(float), spacing=(1.0, thickness, thickness), axis=0)


@family
def nearly_incompressible(size: int, rng: Generator) -> System:
    """A rubber block with Poisson's ratio 0.49, in ordinary trilinear hexahedra."""
    return body(np.ones(_grid(size)), law=LinearElasticity(poisson=0.49))


@family
def shuffled_nodes(size: int, rng: Generator) -> System:
    """A body with pores, numbered at random and without coordinates, as some mesh generators leave it: nothing is given."""
    system = body(largest_part(~_balls(_grid(size, filled=0.8), 0.2, rng)).astype(float))
    nodes = rng.permutation(system.A.shape[0] // 3)
    order = (3 * nodes[:, None] + np.arange(3)).ravel()
    return System(system.A[order][:, order], system.b[order])


@family
def shuffled_unknowns(size: int, rng: Generator) -> System:
    """A cube whose unknowns are numbered at random one by one: neither blocks nor coordinates can be given."""
    system = body(np.exp(0.5 * rng.standard_normal(_grid(size))))
    order = rng.permutation(system.A.shape[0])
    return System(system.A[order][:, order], system.b[order])


@family
def by_components(size: int, rng: Generator) -> System:
    """A beam whose unknowns are numbered by components, all x first; their user gives the rigid motions."""
    system = body(np.ones(_grid(size, (4, 1, 1))), axis=0)
    order = np.arange(system.A.shape[0]).reshape(-1, 3).T.ravel()
    modes = system.slow_modes
    assert modes is not None
    return System(system.A[order][:, order], system.b[order], near_null_space=modes[order])
