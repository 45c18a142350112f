"""Sweeps that systems take whose matrix is streamed: jumps, layers, flat elements, plates, graphs, tetrahedra in random order.

    python benchmarks/streamed_systems.py cpu2
    python benchmarks/streamed_systems.py h200 --device cuda --unknowns 45000 --unknowns 1000000

``penstock.prepare`` and a solve, as they are, may use a quarter of the bytes of the caller's values. ``sweeps`` are passes over A
of a solve to a true residual of 1e-8, ``wanted_sweeps`` what it should take at most, and ``setup_sweeps`` those before it: of the
preconditioner, or one by which an image of the matrix in fewer digits is made. ``seconds`` begin with SciPy's arrays; the floor
is to read the values once from the host's memory, or to bring them to the device.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.sparse
from call import RTOL, copy_rate
from on_arrival import distorted
from peer import seconds_of
from record import argument_parser, printed, record, write
from zoo.diffusion import finite_volumes
from zoo.meshes import box, supported, voxel_matrix
from zoo.networks import geometric_graph, preferential_attachment
from zoo.solids import plate_of_bricks
from zoo.system import System

import penstock
from penstock.fem import BoxMesh, HeatConduction
from penstock.spmv import Device

Array = np.ndarray[Any, Any]
Generator = np.random.Generator
_MOST_ITERATIONS = 5_000


def _in_blocks(shape: tuple[int, ...], side: int, rng: Generator, share: float = 0.5) -> Array:
    """Return which cells are in the chosen ones of cubes of ``side`` cells."""
    chosen = rng.random(tuple(-(-count // side) for count in shape)) < share
    for axis in range(3):
        chosen = chosen.repeat(side, axis=axis)
    return np.asarray(chosen[: shape[0], : shape[1], : shape[2]])


def _balls(shape: tuple[int, ...], share: float, radii: tuple[float, float], rng: Generator) -> Array:
    """Return which cells are in random balls that fill about a share of a box; radii in cells."""
    there, most = np.zeros(shape, bool), int(np.ceil(radii[1]))
    around = np.moveaxis(np.indices((2 * most + 1,) * 3) - most, 0, -1)
    while there.mean() < share:
        for centre in rng.integers(0, shape, (max(1, there.size // 20_000), 3)):
            ball = around[np.linalg.norm(around, axis=-1) < rng.uniform(*radii)] + centre
            there[tuple(ball[((ball >= 0) & (ball < shape)).all(axis=1)].T)] = True
    return there


def _solid(
    factors: Callable[[tuple[int, ...], Generator], Array],
    proportions: Sequence[int] = (1, 1, 1),
    spacing: Sequence[float] = (1, 1, 1),
) -> Callable[[int, Generator], System]:
    """Return what makes a body of trilinear elements with these factors of their stiffness, bent by its end."""

    def make(size: int, rng: Generator) -> System:
        nodes = box(size / 3, proportions)
        cells = tuple(count - 1 for count in nodes)
        mesh = BoxMesh(nodes, tuple(count * edge for count, edge in zip(cells, spacing, strict=True)))
        points, moduli = mesh.coordinates(), factors(cells, rng).ravel()
        held, loaded = (np.arange(3 * len(points)).reshape(nodes[0], -1, 3)[side] for side in (0, -1))
        A = penstock.ElementMatrix(points, mesh.connectivity(), material=moduli, fixed=held.ravel()).to_csr()
        b = np.zeros(A.shape[0])
        b[loaded] = (0.1, 0.03, -1.0)
        return System(A, b, coordinates=points)

    return make


def _fibres(shape: tuple[int, ...], rng: Generator) -> Array:
    there = np.zeros(shape, bool)
    for y, z in rng.integers(0, (shape[1] - 1, shape[2] - 1), (shape[1] * shape[2] // 16, 2)):
        there[:, y : y + 2, z : z + 2] = True
    return np.where(there, 1e4, 1.0)


def _tetrahedra(contrast: float) -> Callable[[int, Generator], System]:
    """Return what makes unstructured tetrahedra in random order, without coordinates, in cubes of alternating stiffness."""

    def make(size: int, rng: Generator) -> System:
        mesh = distorted((round((size / 3) ** (1 / 3)),) * 3, "tetrahedra", shuffled=True)
        centres = mesh.coordinates[mesh.connectivity].mean(axis=1)
        stiff = np.floor(centres * 4 / np.ptp(mesh.coordinates, axis=0)).sum(axis=1) % 2 == 0
        A = mesh.with_material(np.where(stiff, contrast, 1.0)).to_csr()
        return System(A, np.where(mesh.fixed, 0.0, rng.standard_normal(A.shape[0])))

    return make


def _volumes(k: Callable[[tuple[int, ...], Generator], Array], widths: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Any:
    """Return what makes finite volumes of a cube with these coefficients, held on one face."""

    def make(size: int, rng: Generator) -> System:
        shape = box(size)
        return System(finite_volumes(k(shape, rng), widths, (0,)), rng.standard_normal(np.prod(shape)))

    return make


def _heat(factors: Callable[[tuple[int, ...], Generator], Array], spacing: tuple[float, ...]) -> Any:
    """Return what makes trilinear elements of heat conduction, held on one face."""

    def make(size: int, rng: Generator) -> System:
        A, points = voxel_matrix(factors(tuple(count - 1 for count in box(size)), rng), HeatConduction(), spacing)
        return System(*supported(A, rng.standard_normal(len(points)), points[:, 0] == 0))

    return make


def _springs(size: int, rng: Generator) -> System:
    """Return a cube with springs to the ground, 1e8 times as stiff, on 2 % of the unknowns."""
    system = _solid(_uniform)(size, rng)
    n = system.A.shape[0]
    held = np.where(rng.random(n) < 0.02, 1e8, 0.0)
    return System(system.A + scipy.sparse.diags_array(held), system.b, coordinates=system.coordinates)


def _uniform(shape: tuple[int, ...], rng: Generator) -> Array:
    return np.ones(shape)


#: What makes each system of about ``size`` unknowns, and the sweeps that it may take.
SYSTEMS: dict[str, tuple[Callable[[int, Generator], System], int]] = {
    "cube": (_solid(lambda shape, rng: np.exp(0.5 * rng.standard_normal(shape))), 20),
    "beam": (_solid(_uniform, (15, 1, 1)), 20),
    "poisson": (_volumes(_uniform), 20),
    "lognormal-3": (_volumes(lambda shape, rng: np.exp(3.0 * rng.standard_normal(shape))), 20),
    "jumps-1e3": (_solid(lambda shape, rng: np.where(_in_blocks(shape, 4, rng), 1e3, 1.0)), 20),
    "jumps-1e6": (_solid(lambda shape, rng: np.where(_in_blocks(shape, 4, rng), 1e6, 1.0)), 20),
    "elements-1e3": (_solid(lambda shape, rng: np.where(rng.random(shape) < 0.3, 1e3, 1.0)), 18),
    "layers-1e4": (_solid(lambda shape, rng: np.where(np.arange(shape[2]) // 3 % 2, 1e4, 1.0) * np.ones(shape)), 20),
    "porous-1e6": (_solid(lambda shape, rng: np.where(_balls(shape, 0.35, (1.5, 3.5), rng), 1e-6, 1.0)), 20),
    "stretched-30": (_solid(_uniform, spacing=(1, 30, 30)), 20),
    "plate": (plate_of_bricks, 20),
    "springs-1e8": (_springs, 20),
    "fibres-1e4": (_solid(_fibres), 25),
    "inclusions-1e4": (_solid(lambda shape, rng: np.where(_balls(shape, 0.25, (1.2, 2.2), rng), 1e4, 1.0)), 25),
    "tetrahedra": (_tetrahedra(1.0), 20),
    "tetrahedra-checkered-1e3": (_tetrahedra(1e3), 20),
    "porous-scalar": (_heat(lambda shape, rng: np.where(_balls(shape, 0.35, (1.5, 3.5), rng), 1e-6, 1.0), (1.0,) * 3), 20),
    "stretched-1000": (_heat(_uniform, (1000.0, 1000.0, 1.0)), 20),
    "anisotropic-1e3": (_volumes(_uniform, (1.0, 1.0, 1000.0**-0.5)), 20),
    "cells-1e3": (_volumes(lambda shape, rng: np.where(rng.random(shape) < 0.5, 1e3, 1.0)), 20),
    "volumes-1e4": (_volumes(lambda shape, rng: np.where(_in_blocks(shape, 8, rng), 1e4, 1.0)), 20),
    "preferential-attachment": (preferential_attachment, 20),
    "geometric-graph": (geometric_graph, 20),
}  # fmt: skip


def measure(name: str, size: int, device: Device, copy: float) -> dict[str, Any]:
    """Return the record of one system."""
    make, most = SYSTEMS[name]
    system = make(size, np.random.default_rng(1))
    A, b = scipy.sparse.csr_array(system.A), np.asarray(system.b, dtype=np.float64)
    A.sum_duplicates()
    memory = A.data.nbytes // 4
    given = {"device": str(device), "memory": memory, **system.given}

    def call() -> tuple[Any, int]:
        with penstock.prepare(A, **given) as prepared:
            result = prepared.solve(b, rtol=RTOL, maxiter=_MOST_ITERATIONS, on_failure="return")
            matrix = prepared._system.matrix  # not as a caller sees it, in his order of the rows
            return result, int(getattr(matrix, "sweeps", 0)) - result.sweeps

    call()  # compiles, and measures the link
    seconds, (result, setup_sweeps) = seconds_of(device, call)
    explained = result.explain()
    residual = float(np.linalg.norm(b - A @ result.x) / np.linalg.norm(b))
    entry = record(
        f"streamed_systems/{size}/{name}", [seconds], floor=A.data.nbytes / copy, nbytes=int(A.data.nbytes), peers={},
        unknowns=A.shape[0], iterations=result.iterations, sweeps=result.sweeps, setup_sweeps=setup_sweeps,
        wanted_sweeps=most, converged=bool(result.converged), true_residual=residual,
        solver=next((line[12:] for line in explained.splitlines() if line.startswith("solver")), ""),
        precision=found[1] if (found := re.search(r"an image of the matrix in (\w+)", explained)) else "float64",
    )  # fmt: skip
    words = "met" if result.converged and result.sweeps <= most else f"not met ({most})"
    return printed(
        entry, f"{result.sweeps} sweeps after {setup_sweeps}, {words}, {result.iterations} iterations, a call"
    )


def main() -> None:
    """Measure, and write the JSON after every system."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--unknowns", type=int, action="append", help="about; default: 45,000")
    parser.add_argument("--system", action="append", choices=list(SYSTEMS), help="default: all")
    arguments = parser.parse_args()
    device, records, began = Device.parse(arguments.device), list[dict[str, Any]](), time.perf_counter()
    copy = copy_rate(device)
    for size in arguments.unknowns or [45_000]:
        for name in arguments.system or SYSTEMS:
            records.append(measure(name, size, device, copy))
            write("streamed_systems", arguments, {"copy": copy}, records)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
