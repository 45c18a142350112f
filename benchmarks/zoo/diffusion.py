"""Diffusion: heat, reservoirs, pores and plates on structured grids."""

from __future__ import annotations

import numpy as np
import scipy.sparse

from penstock.fem import HeatConduction
from zoo.laplacian import laplacian
from zoo.meshes import assembled, box, gaussian_field, largest_part, voxel_matrix
from zoo.system import Array, Generator, System, family


def finite_volumes(k: tuple[Array, ...] | Array, widths: tuple[float, ...], held: tuple[int, ...] = ()) -> Array:
    """Return the matrix of finite volumes with two-point fluxes.

    Parameters
    ----------
    k : array of the shape of the grid, or one for each axis
    widths : tuple of float
        Of a cell.
    held : tuple of int
        Axes at whose first face the value is given.
    """
    along = k if isinstance(k, tuple) else (k,) * k.ndim
    numbers, volume = np.arange(along[0].size).reshape(along[0].shape), float(np.prod(widths))
    lines, weights, diagonal = [], [], np.zeros(along[0].shape)
    for axis, (of, width) in enumerate(zip(along, widths, strict=True)):
        pairs = np.moveaxis(numbers, axis, 0)
        values = np.moveaxis(of, axis, 0)
        lines.append(np.stack([pairs[:-1].ravel(), pairs[1:].ravel()], axis=1))
        weights.append((volume / width**2 * 2 / (1 / values[:-1] + 1 / values[1:])).ravel())
        if axis in held:
            np.moveaxis(diagonal, axis, 0)[0] += 2 * volume / width**2 * values[0]
    return laplacian(numbers.size, np.concatenate(lines), np.concatenate(weights), diagonal.ravel())


@family
def poisson(size: int, rng: Generator) -> System:
    """Poisson's equation by 7-point finite volumes, held on three faces; nothing is given, as in most families of diffusion."""
    shape = box(size)
    return System(finite_volumes(np.ones(shape), (1.0, 1.0, 1.0), (0, 1, 2)), rng.standard_normal(np.prod(shape)))


@family
def anisotropic(size: int, rng: Generator) -> System:
    """Bilinear elements in a plane, diffusion along x a thousand times that along y."""
    return System(*_bilinear(size, 0.0, 1e-3), dimensions=2)


@family
def rotated_anisotropic(size: int, rng: Generator) -> System:
    """The same along a direction of 30 degrees, which no line of the grid follows: the hard case of algebraic multigrid.

    Among others Brannick, Chen and Zikatanov, "An algebraic multilevel method for anisotropic elliptic equations based on
    subgraph matching" (Numer. Linear Algebra Appl. 19, 2012).
    """
    return System(*_bilinear(size, np.pi / 6, 1e-3), dimensions=2)


def _bilinear(size: int, angle: float, across: float) -> tuple[Array, Array]:
    """Return bilinear squares of one diffusion tensor, zero at the boundary."""
    side = max(4, round(size**0.5))
    c, s = np.cos(angle), np.sin(angle)
    K = np.array([[c, -s], [s, c]]) @ np.diag([1.0, across]) @ np.array([[c, s], [-s, c]])
    xx = np.array([[2, -2, 1, -1], [-2, 2, -1, 1], [1, -1, 2, -2], [-1, 1, -2, 2]]) / 6
    yy = xx[np.ix_([0, 2, 1, 3], [0, 2, 1, 3])]
    xy = np.array([[1, 0, 0, -1], [0, -1, 1, 0], [0, 1, -1, 0], [-1, 0, 0, 1]]) / 2
    element = K[0, 0] * xx + K[1, 1] * yy + K[0, 1] * xy
    numbers = np.arange((side + 2) ** 2).reshape(side + 2, side + 2)  # x runs fastest
    corners = np.stack([numbers[:-1, :-1], numbers[:-1, 1:], numbers[1:, :-1], numbers[1:, 1:]], axis=-1).reshape(-1, 4)
    A = assembled(corners, np.broadcast_to(element, (len(corners), 4, 4)), 1, numbers.size)
    inner = numbers[1:-1, 1:-1].ravel()
    return A[inner][:, inner], np.ones(inner.size)


@family
def channels(size: int, rng: Generator) -> System:
    """Channels that conduct a million times as well as the rock, winding through a plane from side to side."""
    side = max(12, round(size**0.5))
    k = np.ones((side, side))
    for _ in range(max(3, side // 20)):
        y = rng.uniform(0, side) + np.cumsum(rng.normal(0, 0.6, side))
        k[np.arange(side), y.astype(int) % side] = 1e6
        k[np.arange(side), (y.astype(int) + 1) % side] = 1e6
    return System(finite_volumes(k, (1.0, 1.0), (0,)), rng.standard_normal(k.size), dimensions=2)


@family
def reservoir(size: int, rng: Generator) -> System:
    """An oil reservoir: lognormal layers, flat cells, vertical permeability far smaller, wells in the corners.

    After model 2 of Christie and Blunt, "Tenth SPE comparative solution project" (SPE Reserv. Eval. Eng. 4, 2001): 60 x 220 cells
    a layer of 20 x 10 x 2 feet; smooth upper layers, channels below, vertical permeability 0.3 or 1e-4 of the horizontal one.
    """
    shape = box(size, (1, 3, 1.4))
    field = gaussian_field(shape, (2.0, 6.0, 0.5), rng)
    logarithm = 4.6 + 1.5 * field + 1.5 * rng.standard_normal(shape[2])
    lower = np.arange(shape[2]) >= shape[2] // 2
    channel = gaussian_field(shape, (1.0, 12.0, 0.7), rng) > 0.8
    logarithm = np.where(lower, np.where(channel, 7.5, 0.5 + field), logarithm)
    k = np.exp(logarithm)
    vertical = k * np.where(lower & ~channel, 1e-4, 0.3)
    A, b = finite_volumes((k, k, vertical), (20.0, 10.0, 2.0)), np.zeros(shape)
    wells = np.zeros(shape)
    for x in (0, -1):
        for y in (0, -1):
            wells[x, y] = 2 * np.pi * 2.0 * k[x, y] / np.log(4.4 / 0.5)  # Peaceman's index at a given pressure
    b[shape[0] // 2, shape[1] // 2] = 500.0  # a well of given rate injects in the middle
    return System(A + scipy.sparse.diags_array(wells.ravel()), b.ravel())


@family
def checkerboard(size: int, rng: Generator) -> System:
    """A cube of cells whose conductivity is 10 to a random power from -3 to 3, each by itself."""
    shape = box(size)
    k = 10 ** rng.uniform(-3, 3, shape)
    return System(finite_volumes(k, (1.0, 1.0, 1.0), (0,)), rng.standard_normal(k.size))


@family
def stretched_1000(size: int, rng: Generator) -> System:
    """Cells a thousand times as wide as high, as in models of oceans and of the atmosphere."""
    shape = box(size, (1.4, 1.4, 1))
    return System(finite_volumes(np.ones(shape), (1000.0, 1000.0, 1.0), (0, 2)), rng.standard_normal(np.prod(shape)))


@family
def boundary_layer(size: int, rng: Generator) -> System:
    """The pressure on a grid whose cells grow geometrically from a wall, from flat to long ones; constants are its null space."""
    shape = box(size)
    heights = 1.0 * 1.25 ** np.arange(shape[2])
    A, points = voxel_matrix(np.ones(shape), HeatConduction(), (40.0, 40.0, heights / heights.sum() * 40 * shape[2]))
    b = rng.standard_normal(len(points))
    return System(A, b - b.mean(), null_space="constants")


@family
def heat_sink(size: int, rng: Generator) -> System:
    """An aluminium heat sink: thin fins on a plate that is heated from below, cooled by air at all of its surface."""
    side = max(8, round((size / 0.35) ** (1 / 3)))
    there = np.zeros((side, side, side), bool)
    there[:, :, : max(1, side // 8)] = True
    there[:, :: max(3, side // 8)] = True
    A, points = voxel_matrix(there.astype(float), HeatConduction(conductivity=200.0), (1e-3, 1e-3, 1e-3))
    neighbours, nodes = np.zeros((side + 1,) * 3), np.round(points / 1e-3).astype(int)
    for step in np.ndindex(2, 2, 2):
        neighbours[tuple(slice(by, by + side) for by in step)] += there
    exposed = 8 - neighbours[tuple(nodes.T)]  # in eighths of a corner, which stand for the surface of a node
    A = A + scipy.sparse.diags_array(20.0 * 1e-6 / 4 * exposed)
    return System(A, np.where(nodes[:, 2] == 0, 0.05, 0.0))


@family
def porous_medium(size: int, rng: Generator) -> System:
    """Diffusion in the pores of a random packing, as in a battery's electrode: cells of fluid only, one end held."""
    shape = box(size / 0.5)
    pores = largest_part(gaussian_field(shape, max(0.8, 0.05 * shape[0]), rng) > 0)
    cells = np.flatnonzero(pores.ravel())
    held = np.zeros(shape)
    held[0] = 2.0
    if not held.ravel()[cells].any():  # the pores of a tiny grid need not reach its end
        held.ravel()[cells[0]] = 2.0
    # A conductivity of zero has no harmonic mean: what is cut off is cut off by lines that are left out.
    A = finite_volumes(np.where(pores, 1.0, 1e-300), (1.0, 1.0, 1.0))
    A = scipy.sparse.csr_array(A[cells][:, cells])
    A.data[abs(A.data) < 1e-200] = 0.0
    A.eliminate_zeros()
    return System(A + scipy.sparse.diags_array(held.ravel()[cells]), rng.standard_normal(cells.size))


@family
def biharmonic(size: int, rng: Generator) -> System:
    """A clamped plate by finite differences, the 13-point stencil."""
    side = max(6, round(size**0.5))
    second = scipy.sparse.diags_array([1.0, -2.0, 1.0], offsets=[-1, 0, 1], shape=(side, side))
    fourth = scipy.sparse.diags_array([1.0, -4.0, 6.0, -4.0, 1.0], offsets=range(-2, 3), shape=(side, side)).tolil()
    fourth[0, 0] = fourth[-1, -1] = 7.0  # the mirrored values beyond the clamped ends
    one = scipy.sparse.eye_array(side)
    A = scipy.sparse.kron(fourth, one) + scipy.sparse.kron(one, fourth) + 2 * scipy.sparse.kron(second, second)
    return System(A.tocsr(), np.ones(side**2), dimensions=2)


@family
def mindlin_plate(size: int, rng: Generator) -> System:
    """A thin plate by Mindlin's theory, deflection and two rotations a node, shear integrated at one point.

    Hughes, Cohen and Haroun, "Reduced and selective integration techniques in the finite element analysis of plates" (Nucl. Eng.
    Des. 46, 1978). Clamped all around, a hundred times as wide as thick; its three rigid motions are given.
    """
    side = max(4, round((size / 3) ** 0.5))
    edge, thick = 1.0 / (side + 1), 0.01
    numbers = np.arange((side + 2) ** 2).reshape(side + 2, side + 2)
    corners = np.stack([numbers[:-1, :-1], numbers[:-1, 1:], numbers[1:, :-1], numbers[1:, 1:]], axis=-1).reshape(-1, 4)
    element = _mindlin_element(edge, thick)
    A = assembled(corners, np.broadcast_to(element, (len(corners), 12, 12)), 3, numbers.size)
    inner = numbers[1:-1, 1:-1].ravel()
    unknowns = (3 * inner[:, None] + np.arange(3)).ravel()
    x, y = edge * (inner % (side + 2)) - 0.5, edge * (inner // (side + 2)) - 0.5
    modes = np.zeros((inner.size, 3, 3))
    modes[:, 0, 0], modes[:, 0, 1], modes[:, 0, 2] = 1.0, x, y
    modes[:, 1, 1] = modes[:, 2, 2] = 1.0
    b = np.tile([-(edge**2), 0.0, 0.0], inner.size)
    return System(A[unknowns][:, unknowns], b, near_null_space=modes.reshape(-1, 3), block_size=3, dimensions=2)


def _mindlin_element(edge: float, thick: float, poisson: float = 0.3) -> Array:
    """Return the matrix of a square with unknowns ``w, dw/dx, dw/dy`` (of the normal) at four corners, (12, 12)."""
    signs = np.array([[-1, -1], [1, -1], [-1, 1], [1, 1]], float)
    bending = thick**3 / 12 / (1 - poisson**2) * np.array([[1, poisson, 0], [poisson, 1, 0], [0, 0, (1 - poisson) / 2]])
    shear = 5 / 6 * thick / 2 / (1 + poisson)
    K = np.zeros((12, 12))
    for point, weight in [*[(of / 3**0.5, 0.25) for of in signs], (np.zeros(2), 0.0)]:
        factors = 1 + signs * point
        gradients = signs * factors[:, ::-1] / 4 * 2 / edge
        if weight:
            B = np.zeros((3, 12))
            B[0, 1::3], B[1, 2::3] = gradients.T
            B[2, 1::3], B[2, 2::3] = gradients[:, 1], gradients[:, 0]
            K += weight * edge**2 * B.T @ bending @ B
        else:
            S = np.zeros((2, 12))
            S[0, ::3], S[1, ::3] = gradients.T
            S[0, 1::3] = S[1, 2::3] = -factors.prod(axis=1) / 4
            K += edge**2 * shear * S.T @ S
    return (K + K.T) / 2
