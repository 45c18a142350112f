"""Matrices with jumps, flat elements and inclusions, by ``penstock.solve`` as it is, in memory and streamed.

    python benchmarks/hard_matrices.py h200 --device cuda
    python benchmarks/hard_matrices.py cpu2 --scale 0.25 --matrix stretched

``jumps``: finite volumes whose coefficient is 1 or 1e4 in blocks of 8 x 8 x 8 cells. ``stretched``: trilinear elements a
thousand times as wide as high. ``flat``: elasticity on elements 30 times as wide as high, numbered layer by layer.
``elements``: a cantilever of which 30 % of the elements, at random, are 1000 times as stiff. ``inclusions``: an unstructured
mesh of tetrahedra with balls that are 1e4 times as stiff. Streamed, the call may use a quarter of the bytes of the values.

``seconds`` is a later call, from SciPy's arrays to a solution, ``setup_seconds`` and ``iterating_seconds`` are parts of it, and
``converged`` says whether the true residual is below 1e-8 after at most ``LIMIT`` iterations. ``floor_seconds`` is the time to
bring the arrays to the device and read them once an iteration. The peer is CG with Jacobi, of CuPy or SciPy, with the upload; it
may take 5,000 iterations, and ``peer_residual`` is what it leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from call import RTOL, Problem, copy_rate
from peer import Peer, seconds_of
from record import argument_parser, printed, record, write
from tetrahedra import TetrahedralBox
from zoo.diffusion import finite_volumes
from zoo.meshes import supported, voxel_matrix

import penstock
from penstock.fem import Cantilever, HeatConduction, LinearElasticity, TwoPhaseMaterial
from penstock.spmv import Device
from penstock.streaming.measurement.probes import measure_memory

LIMIT, LIMIT_OF_PEER = 500, 5_000


def jumps(side: int) -> Problem:
    """Return finite volumes with jumps between blocks of cells."""
    blocks = np.random.default_rng(1).random((-(-side // 8),) * 3) < 0.5
    k = np.kron(np.where(blocks, 1.0, 1e4), np.ones((8, 8, 8)))[:side, :side, :side]
    return Problem(f"jumps{side}-dof1", finite_volumes(k, (1.0, 1.0, 1.0), (0,)), None)


def stretched(side: int) -> Problem:
    """Return heat conduction on flat elements."""
    A, points = voxel_matrix(np.ones((side - 1,) * 3), HeatConduction(), (1000.0, 1000.0, 1.0))
    A, _ = supported(A, np.zeros(len(points)), points[:, 0] == 0)
    return Problem(f"stretched{side}-dof1", A, None)


def flat(side: int) -> Problem:
    """Return elasticity on flat elements; nodes are numbered layer by layer, as meshes that grow upwards are."""
    A, points = voxel_matrix(np.ones((side - 1,) * 3), LinearElasticity(), (30.0, 30.0, 1.0))
    order = np.lexsort(points.T)
    order = order[points[order, 0] > 0]  # one face is held
    unknowns = (3 * order[:, None] + np.arange(3)).ravel()
    A = A[unknowns][:, unknowns].tocsr()
    A.sort_indices()
    return Problem(f"flat{side}-dof3", A, points[order])


def elements(side: int) -> Problem:
    """Return elasticity with single stiff elements."""
    beam = Cantilever(nodes=side, dof=3, material=TwoPhaseMaterial(contrast=1000.0, fraction=0.3))
    return Problem(f"cube{side}-dof3-elements1e3", beam.matrix("csr").to_csr(), beam.mesh.coordinates())


def inclusions(side: int) -> Problem:
    """Return elasticity on tetrahedra with stiff balls, of a quarter of the volume."""
    box, rng = TetrahedralBox(side), np.random.default_rng(2)
    centres, moduli = box.centres(), np.ones(box.elements)
    for _ in range((side // 8) ** 3):
        stiff = ((centres - rng.random(3)) ** 2).sum(axis=1) < (rng.uniform(0.3, 0.5) * 8 / side) ** 2
        moduli[stiff] = 1e4
    return Problem(f"tets{side}-dof3-inclusions", box.stiffness(moduli), box.points)


#: The problems by their names, with the nodes a side at scale 1.
PROBLEMS: dict[str, tuple[Callable[[int], Problem], int]] = {
    "jumps": (jumps, 160), "stretched": (stretched, 160), "flat": (flat, 70), "elements": (elements, 96),
    "inclusions": (inclusions, 70),
}  # fmt: skip


def measure(problem: Problem, device: Device, rates: tuple[float, float], memory: int | None) -> dict[str, Any]:
    """Return the record of one problem, in memory or streamed."""

    def call() -> Any:
        return penstock.solve(
            problem.A,
            problem.b,
            coordinates=problem.points,
            device=str(device),
            memory=memory,
            rtol=RTOL,
            maxiter=LIMIT,
        )

    call()  # compiles, and measures the link
    samples, results = zip(*(seconds_of(device, call) for _ in range(1 if memory else 3)), strict=True)
    result, (copy, read) = results[-1], rates
    setup, iterating = (float(result.timings.get(part, 0.0)) for part in ("setting up", "iterating"))
    entry = record(
        f"hard/{'memory' if memory is None else 'streamed'}/{problem.name}", list(samples),
        floor=problem.nbytes / copy + result.iterations * problem.nbytes / (read if memory is None else copy),
        nbytes=problem.nbytes, peers={}, unknowns=problem.A.shape[0], iterations=result.iterations, sweeps=result.sweeps,
        converged=bool(result.converged), true_residual=result.true_residual, setup_seconds=setup,
        iterating_seconds=iterating,
        choice=next((line for line in result.explain().splitlines() if line.startswith("choice")), ""),
    )  # fmt: skip
    words = "converged" if result.converged else "not converged"
    return printed(
        entry, f"{words} in {result.iterations} iterations, set-up {setup:.2f} s, {iterating:.2f} s, the call"
    )


def peer_of(problem: Problem, device: Device) -> dict[str, Any]:
    """Return the seconds of the peer, and the residual that it leaves."""

    def solve() -> tuple[str, float]:
        peer, b = Peer(problem.A, device), device.asarray(problem.b)
        return peer.name, peer.true_residual(b, peer.solve(b, LIMIT_OF_PEER, RTOL))

    seconds, (name, residual) = seconds_of(device, solve)
    print(f"  {name}: {seconds:.2f} s, residual {residual:.1e}", flush=True)
    return {"peers": {f"{name} cg": seconds}, "peer_residual": residual}


def main() -> None:
    """Measure, and write the JSON after every problem."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--matrix", action="append", choices=list(PROBLEMS), help="default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="of the nodes a side")
    parser.add_argument("--no-streamed", action="store_true")
    arguments = parser.parse_args()
    device, records, began = Device.parse(arguments.device), list[dict[str, Any]](), time.perf_counter()
    rates = copy_rate(device), measure_memory(device, 256 << 20)
    for name in arguments.matrix or PROBLEMS:
        make, side = PROBLEMS[name]
        problem = make(round(side * arguments.scale))
        records.append(measure(problem, device, rates, None) | peer_of(problem, device))
        if not arguments.no_streamed:
            records.append(measure(problem, device, rates, problem.A.nnz * 8 // 4))
        print(f"{time.perf_counter() - began:.0f} s", flush=True)
        write("hard_matrices", arguments, {"copy_GBps": rates[0] / 1e9, "read_GBps": rates[1] / 1e9}, records)


if __name__ == "__main__":
    main()
