"""Multigrid by smoothed aggregation in GPU memory: set-up and solve, in one run.

    python benchmarks/multigrid.py h200                       both systems, and PyAMG on the CPU of the same machine
    python benchmarks/multigrid.py h200 --no-peers            without it: it takes minutes

Both are solved to a true relative residual of 1e-8; a set-up and a solve are timed at their second call, with kernels compiled
and memory taken. ``floor_seconds`` is one reading of the matrix for every product with it on the finest level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import graphs
import numpy as np
from peer import seconds_of
from record import argument_parser, printed, record, write
from systems import System

from penstock.solvers import cg, multigrid
from penstock.spmv import Array, Device, SparseMatrix
from penstock.streaming.measurement.probes import measure_memory

_RTOL = 1e-8
# Products with the finest matrix in an iteration: two polynomials of degree 3, two residuals, and that of CG.
_PRODUCTS = 7


def systems(device: Device) -> dict[str, Callable[[], tuple[SparseMatrix, Array, Array | None]]]:
    """Return what makes the matrix, the load and the coordinates of every system."""

    def laplace() -> tuple[SparseMatrix, Array, None]:
        A = graphs.stencil(device, 256, 7)
        return A, device.asarray(np.random.default_rng(0).normal(size=A.shape[0])), None

    def cube() -> tuple[SparseMatrix, Array, Array]:
        system = System("cube128", (128, 128, 128), Device("cpu"))
        load = device.asarray(system.beam.load())
        return system.make("bsr").to_device(device), load, device.asarray(system.beam.mesh.coordinates())

    return {"laplace7-256": laplace, "cube128-dof3": cube}


def pyamg_seconds(A: SparseMatrix, b: Array, modes: Array | None) -> dict[str, Any]:
    """Return the seconds of PyAMG's set-up and of its solve, on the host."""
    import pyamg

    matrix, host = A.to_csr(), A.device.to_host(b)
    matrix.indptr = matrix.indptr.astype(matrix.indices.dtype)  # PyAMG takes one type for both
    near = None if modes is None else A.device.to_host(modes)
    if modes is not None:
        matrix = matrix.tobsr((3, 3))
    cpu = Device("cpu")
    setup, hierarchy = seconds_of(cpu, lambda: pyamg.smoothed_aggregation_solver(matrix, B=near, symmetry="hermitian"))
    residuals: list[float] = []
    solve, _ = seconds_of(cpu, lambda: hierarchy.solve(host, tol=_RTOL, accel="cg", residuals=residuals))
    return {"setup_seconds": setup, "seconds": solve, "iterations": len(residuals) - 1}


def measured(
    name: str, A: SparseMatrix, b: Array, points: Array | None, bandwidth: float, peers: bool
) -> dict[str, Any]:
    """Return the record of a system."""
    device = A.device
    make = lambda: multigrid(A, coordinates=points)  # noqa: E731
    first_setup, M = seconds_of(device, make)
    first, result = seconds_of(device, lambda: cg(A, b, M=M, rtol=_RTOL))
    del M
    setup, M = seconds_of(device, make)
    cg(A, b, M=M, rtol=_RTOL, maxiter=3)
    seconds, result = seconds_of(device, lambda: cg(A, b, M=M, rtol=_RTOL))
    true = float(device.xp.linalg.norm(b - A @ result.x) / device.xp.linalg.norm(b))
    nbytes = result.iterations * _PRODUCTS * A.nbytes
    more: dict[str, Any] = {"first_setup_seconds": first_setup, "first_seconds": first, "true_residual": true}
    more |= {"levels": [level.A.shape[0] for level in M.levels], "operator_complexity": M.operator_complexity}
    found = {}
    if peers:
        from penstock.solvers.amg.modes import rigid_body_modes

        more["pyamg"] = pyamg_seconds(A, b, None if points is None else rigid_body_modes(points, 3))
        found["pyamg"] = more["pyamg"]["seconds"]
    entry = record(
        f"multigrid/{name}",
        [seconds],
        floor=nbytes / bandwidth,
        nbytes=nbytes,
        peers=found,
        setup_seconds=setup,
        iterations=result.iterations,
        **more,
    )
    return printed(entry, f"{result.iterations} iterations, set-up {setup:.3f} s (first {first_setup:.2f}), solve")


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--matrix", action="append", help="only these")
    parser.add_argument("--no-peers", action="store_true", help="leave out PyAMG")
    arguments = parser.parse_args()
    device = Device.parse("cuda")
    bandwidth, records = measure_memory(device, 4 << 30), []
    for name, make in systems(device).items():
        if not arguments.matrix or name in arguments.matrix:
            records.append(measured(name, *make(), bandwidth, not arguments.no_peers))
            write("multigrid", arguments, {"read_GBps": bandwidth / 1e9}, records)  # what is measured stays measured


if __name__ == "__main__":
    main()
