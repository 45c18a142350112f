"""A system that is prepared once: further solves and new values, against setting everything up again.

    python benchmarks/prepared.py cpu2
    python benchmarks/prepared.py h200 --device cuda

``first_seconds`` is ``prepare(A)`` and the first ``solve(b)``, of which ``opening_seconds`` open the matrix and
``setup_seconds`` make the preconditioner; kernels have been compiled before. ``seconds`` is a further ``solve`` with another b,
and ``iterations_seconds`` what its sweeps take, or in memory its products, those for the first residual included: the difference
of two solves, of a few and of many iterations, over the difference of their sweeps, times its sweeps; of a solve with an image of
the matrix, whose iterations make no sweeps, it means nothing. ``update_seconds`` is
``update(A_new)`` with new values in the same pattern, and ``updated_solve_seconds`` the solve after it. In memory on a GPU the
caller's matrices are there, too; ``from-host`` has them on the host. Peers solve with what they have set up, to the same
tolerance. ``floor_seconds`` is that of the iterations: bytes of the matrix, or bytes moved, over the measured bandwidth.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from peer import Peer, seconds_of
from record import argument_parser, printed, record, write
from tetrahedra import TetrahedralBox

import penstock
from penstock.fem import Cantilever, LognormalMaterial
from penstock.spmv import Device
from penstock.streaming.measurement.probes import measure_link, measure_memory

RTOL = 1e-8
REPEATS = 5


class Problem:
    """A matrix, the same with other values, and loads, where the caller has them."""

    def __init__(self, name: str, A: Any, new: Any, points: Any, home: Device) -> None:
        self.name, self.host, self.points, self.home = name, A, points, home
        self.A, self.new = (_on(home, matrix) for matrix in (A, new))
        loads = np.random.default_rng(2).standard_normal((REPEATS + 2, A.shape[0]))
        self.loads = [home.asarray(load) for load in loads]


def _on(home: Device, A: Any) -> Any:
    if home.kind == "cpu":
        return A
    from cupyx.scipy.sparse import csr_matrix

    return csr_matrix(A)


def measure(problem: Problem, device: Device, limit: float, memory: int | None, suffix: str = "") -> dict[str, Any]:
    """Return the record of one problem, in memory or streamed."""
    options: dict[str, Any] = {"device": str(device), "coordinates": problem.points, "memory": memory}
    b, *others, warm = problem.loads
    with penstock.prepare(problem.A, **options) as system:  # compiles, and measures the link
        system.solve(warm, rtol=RTOL)
        system.update(problem.new)
    del system
    gc.collect()
    first, system = seconds_of(device, functools.partial(penstock.prepare, problem.A, **options))
    solving, result = seconds_of(device, lambda: system.solve(b, rtol=RTOL))
    further = [seconds_of(device, functools.partial(system.solve, other, rtol=RTOL)) for other in others]
    counts = {one.iterations for _, one in further}
    of_sweep = _sweep_seconds(system, device, others[0], max(counts))
    update, _ = seconds_of(device, lambda: system.update(problem.new))
    updated, after = seconds_of(device, lambda: system.solve(b, rtol=RTOL))
    assert all(one.converged for one in (result, after, *(one for _, one in further)))
    again, _ = seconds_of(device, lambda: system.update(problem.A, "values"))
    nbytes = result.bytes_streamed or system.nbytes * result.sweeps
    seconds = [second for second, _ in further]
    own = [one.sweeps * of_sweep for _, one in further]
    kind = "memory" if memory is None else "streamed"
    entry = record(
        f"prepared/{kind}{suffix}/{problem.name}",
        seconds,
        floor=nbytes / limit,
        nbytes=nbytes,
        peers=peers(problem, device) if memory is None and not suffix else {},
        first_seconds=first + solving,
        opening_seconds=system.timings["open"],
        setup_seconds=system.timings["set up"],
        first_solve_seconds=solving,
        iterations=statistics.median(one.iterations for _, one in further),
        iterations_seconds=statistics.median(own),
        update_seconds=update,
        updated_solve_seconds=updated,
        updated_iterations=after.iterations,
        update_with_preconditioner_seconds=again,
        unknowns=problem.A.shape[0],
    )
    system.close()
    further_share = entry["seconds"] / entry["iterations_seconds"]
    anew = entry["setup_seconds"] + solving
    print(f"  a further solve is {further_share:.3f} of its iterations, update is {update / first:.3f} of prepare,")
    print(
        f"  update and solve {(update + updated) / anew:.3f} of set-up and solve ({update:.3g} + {updated:.3g} of {anew:.3g} s)"
    )
    return printed(entry, "a further solve")


def _sweep_seconds(system: Any, device: Device, b: Any, iterations: int) -> float:
    few, many = max(1, iterations // 3), max(2, iterations - 1)

    def solve(maxiter: int) -> Any:
        return system.solve(b, rtol=1e-14, maxiter=maxiter, on_failure="return")

    samples = []
    for _ in range(REPEATS):
        (short, less), (long, more) = (seconds_of(device, functools.partial(solve, count)) for count in (few, many))
        samples.append((long - short) / (more.sweeps - less.sweeps))
    return statistics.median(samples)


def peers(problem: Problem, device: Device) -> dict[str, float]:
    """Return the seconds of a further solve by what a user would pick instead."""
    b = problem.loads[0]
    found: dict[str, float] = {}
    if device.kind == "cuda":
        peer = Peer(problem.host, device)
        return {f"{peer.name} cg": _timed(device, functools.partial(peer.solve, b, 20_000, RTOL), 1)}
    try:
        import pyamg
    except ImportError:
        print("  without PyAMG")
    else:
        near = _rigid_motions(problem.points)
        levels = pyamg.smoothed_aggregation_solver(scipy.sparse.bsr_array(problem.A, blocksize=(3, 3)), B=near)
        found["pyamg"] = _timed(device, lambda: levels.solve(b, tol=RTOL, accel="cg", maxiter=500))
    try:
        from sksparse.cholmod import cholesky
    except ImportError:
        print("  without CHOLMOD")
    else:
        factor = cholesky(scipy.sparse.csc_matrix(problem.A))
        found["cholmod"] = _timed(device, lambda: factor(b))
    return found


def _rigid_motions(points: np.ndarray) -> np.ndarray:
    from penstock.solvers.amg.modes import rigid_body_modes

    return np.asarray(rigid_body_modes(points, 3))


def _timed(device: Device, action: Callable[[], Any], repeats: int = 3) -> float:
    action()
    return statistics.median(seconds_of(device, action)[0] for _ in range(repeats))


def main() -> None:
    """Measure and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nodes", type=int, help="nodes a side")
    arguments = parser.parse_args()
    device = Device.parse(arguments.device)
    began = time.perf_counter()
    limits, records = _on_cpu(arguments, device) if device.kind == "cpu" else _on_gpu(arguments, device)
    write("prepared", arguments, limits, records)
    print(f"{time.perf_counter() - began:.0f} s")


def _on_cpu(arguments: argparse.Namespace, device: Device) -> tuple[dict[str, float], list[dict[str, Any]]]:
    nodes = arguments.nodes or 35
    box, rng = TetrahedralBox(nodes), np.random.default_rng(3)
    moduli = np.exp(0.5 * rng.standard_normal(box.elements))
    A, new = (box.stiffness(values) for values in (moduli, moduli * (1 + 0.1 * rng.uniform(-1, 1, box.elements))))
    problem = Problem(f"tetrahedra{nodes}-dof3", A, new, box.points, device)
    limit = measure_memory(device, 256 << 20)
    budget = A.nnz * 12 // 4
    return {"read": limit}, [measure(problem, device, limit, memory) for memory in (None, budget)]


def _on_gpu(arguments: argparse.Namespace, device: Device) -> tuple[dict[str, float], list[dict[str, Any]]]:
    nodes = arguments.nodes or 128
    beams = [Cantilever(nodes=nodes, dof=3, material=LognormalMaterial(sigma=sigma)) for sigma in (0.5, 0.55)]
    A, new = (beam.matrix("csr").to_csr() for beam in beams)
    points, name = beams[0].mesh.coordinates(), f"cube{nodes}-dof3"
    read, link = measure_memory(device, 8 << 30), measure_link(device, 2 << 30)
    host, quarter = Device("cpu"), A.nnz * 8 // 4
    records = []
    problem = Problem(name, A, new, points, device)
    records.append(measure(problem, device, read, None))
    del problem
    gc.collect()
    problem = Problem(name, A, new, points, host)
    records.append(measure(problem, device, read, None, "-from-host"))
    records.append(measure(problem, device, link, quarter))
    return {"read": read, "link": link}, records


if __name__ == "__main__":
    main()
