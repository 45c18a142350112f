"""The lowest modes of K x = lambda M x: whole calls of penstock.eigsh, against what a user would take instead.

    python benchmarks/modes.py cpu2
    python benchmarks/modes.py h200 --device cuda

``seconds`` is a call from matrices to modes whose residuals, relative to ``lambda ||M x||``, are at most 1e-6: on a GPU in memory
from matrices that are there, streamed from the host's, with storage for half of the upper half of K. ``setup_seconds`` and
``iterations_seconds`` are parts of it, ``sweeps`` passes over K with those of the set-up (in memory iterations), and
``cpu_seconds`` the time of all cores. Peers find as many modes to the same residual; where one does not, ``failed`` says in how
many seconds it reached which residual, or that it was given up. ``planned_bytes`` is the memory of a GPU that is planned for
before the start, ``pool_peak_bytes`` what iterations take of it beside a given K, without the ring of a streamed one.
``floor_seconds`` is that of the products: K and the vectors that they read and write over the measured bandwidth, or the bytes
streamed over the link.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from pool_peak import peak_of_pool
from record import argument_parser, printed, record, write

import penstock
from penstock.fem import Cantilever, LinearElasticity, TwoPhaseMaterial
from penstock.spmv import Device, SymmetricBsrMatrix
from penstock.streaming.measurement.probes import measure_link, measure_memory

TOL, REPEATS = 1e-6, 3
# Products with a block of an iteration: those of a chain of 14, and two of the second recurrence; four more where stiffness
# jumps.
_PRODUCTS = 16
# Iterations after which LOBPCG is given up.
_MOST_ITERATIONS = 60


@dataclass
class Problem:
    """K and M on the host, and the coordinates of the nodes."""

    name: str
    K: scipy.sparse.csr_array
    M: Any
    points: np.ndarray[Any, Any]

    @classmethod
    def of(cls, name: str, body: Cantilever, kept: np.ndarray[Any, Any] | None = None) -> Problem:
        """Return the problem of a body, of whose nodes some are kept."""
        K, M, X = body.matrix().to_csr(), body.mass(), body.mesh.coordinates()
        if kept is not None:
            rows = np.flatnonzero(np.repeat(kept, body.dof))
            K, M, X = K[rows][:, rows], M.to_csr()[rows][:, rows], X[kept]
        return cls(name, K, M, X)


def plate(side: int, through: int) -> Problem:
    """A plate that is held at all sides, 3 % as thick as wide."""
    body = Cantilever((side, side, through), lengths=(1.0, 1.0, 0.03), clamped=False)
    X = body.mesh.coordinates()[:, :2]
    return Problem.of(f"plate{side}x{side}x{through}-dof3", body, np.all((X > 1e-9) & (X < 1 - 1e-9), axis=1))


def jumps(side: int) -> Problem:
    """A cube of two stiffnesses, 1000 : 1, that alternate at random from element to element."""
    return Problem.of(f"jumps{side}-dof3", Cantilever(side, material=TwoPhaseMaterial(contrast=1000.0, fraction=0.5)))


def cube(side: int) -> Problem:
    """A clamped cube."""
    return Problem.of(f"cube{side}-dof3", Cantilever(side))


def beam(*nodes: int) -> Problem:
    """A clamped beam of cubic elements."""
    name = "beam" + "x".join(map(str, nodes)) + "-dof3"
    return Problem.of(name, Cantilever(nodes, lengths=float(nodes[0] - 1) / (nodes[1] - 1)))


def measure(problem: Problem, k: int, device: Device, limits: dict[str, float], *, streamed: bool) -> dict[str, Any]:
    """Return the record of a problem, in memory or streamed."""
    n, gpu = problem.K.shape[0], device.kind == "cuda"
    half = SymmetricBsrMatrix.from_csr(problem.K, block_size=3).nbytes
    options: dict[str, Any] = {"device": str(device), "coordinates": problem.points, "tol": TOL}
    if streamed:
        options["memory"] = half // 2
    K = problem.K
    if gpu and not streamed:
        from cupyx.scipy.sparse import csr_matrix

        K = csr_matrix(K)
    seconds, cpu, peak = [], [], 0
    find = functools.partial(penstock.eigsh, K, k, problem.M, **options, on_failure="return")
    if gpu:
        modes, peak = peak_of(find)  # which compiles, too
    for repeat in range(REPEATS + (not gpu)):
        device.synchronize()
        began, began_cpu = time.perf_counter(), time.process_time()
        modes = find()
        device.synchronize()
        if repeat or gpu:  # the first one compiles
            seconds.append(time.perf_counter() - began)
            cpu.append(time.process_time() - began_cpu)
        if not gpu and n > 100_000 and repeat:
            break
    reason = modes.reason.name.lower()
    columns = k + max(5, k // 3)
    nbytes = modes.bytes_streamed or modes.iterations * _PRODUCTS * (2 * half + 2 * 8 * n * columns)
    found, failed = {}, {}
    if not streamed:
        found, failed = peers(problem, k, gpu=gpu)
    return printed(
        record(
            f"modes/{'streamed' if streamed else 'memory'}/{problem.name}/k{k}",
            seconds,
            floor=nbytes / limits["link" if modes.bytes_streamed else "memory"],
            nbytes=nbytes,
            peers=found,
            failed=failed,
            setup_seconds=modes.timings["setting up"],
            iterations_seconds=modes.timings["iterating"],
            cpu_seconds=float(np.median(cpu)),
            sweeps=modes.sweeps,
            iterations=modes.iterations,
            reason=reason,
            residual=float(modes.residuals.max()),
            unknowns=n,
            first_value=float(modes.values[0]),
            planned_bytes=modes.planned_nbytes,
            pool_peak_bytes=peak,
        ),
        f"{reason}, {modes.iterations} iterations, {modes.sweeps} sweeps,",
    )


def peak_of(find: Callable[..., penstock.Modes]) -> tuple[penstock.Modes, int]:
    """Return the modes, and the most memory of the GPU that the iterations for them took beside what was there.

    The set-up takes what is free, up to two fifths of it, and is not counted.
    """
    import cupy

    gc.collect()
    before = cupy.get_default_memory_pool().used_bytes()
    with peak_of_pool() as most:

        def begin(record: penstock.solvers.ModesRecord) -> None:
            most[0] = 0 if record.iteration == 0 else most[0]

        modes = find(monitor=begin)
    return modes, most[0] - before


def residual_of(K: Any, M: Any, values: Any, vectors: Any) -> float:
    """Return the largest residual of some modes."""
    xp = np if isinstance(vectors, np.ndarray) else __import__("cupy")
    of_mass = M @ vectors
    norms = xp.linalg.norm(K @ vectors - of_mass * values, axis=0) / (values * xp.linalg.norm(of_mass, axis=0))
    return float(norms.max())


def peers(problem: Problem, k: int, *, gpu: bool) -> tuple[dict[str, float], dict[str, Any]]:
    """Return seconds of peers that reach the residual, CPU seconds on a CPU, and what others reach."""
    heavy = np.flatnonzero(problem.M.diagonal() > 0)
    K = problem.K[heavy][:, heavy]
    M = (problem.M.to_csr() if hasattr(problem.M, "to_csr") else problem.M)[heavy][:, heavy]
    X = np.random.default_rng(0).standard_normal((len(heavy), k + max(5, k // 3)))
    runs: dict[str, Callable[[], tuple[Any, Any, Any, Any]]] = {}
    if gpu:
        runs["cupy lobpcg, Jacobi"] = lambda: _lobpcg_on_gpu(K, M, X)
    else:
        if len(heavy) <= 50_000:  # of 192,000 it had not ended after 1,500 s
            runs["scipy shift-invert"] = lambda: (K, M, *_shift_invert(K, M, k))
        runs["scipy lobpcg, pyamg"] = lambda: (K, M, *_lobpcg_with_pyamg(K, M, X, problem.points[heavy[::3] // 3]))
    found: dict[str, float] = {}
    failed: dict[str, Any] = {}
    for name, run in runs.items():
        began = time.perf_counter() if gpu else time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                of_k, of_m, values, vectors = run()
        except Exception as error:  # a peer that breaks down has failed
            failed[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
            continue
        seconds = (time.perf_counter() if gpu else time.process_time()) - began
        reached = residual_of(of_k, of_m, values[:k], vectors[:, :k])
        if reached <= 1.01 * TOL:
            found[name] = seconds
        else:
            failed[name] = {"seconds": seconds, "residual": reached}
    return found, failed


def _shift_invert(K: Any, M: Any, k: int) -> tuple[Any, Any]:
    values, vectors = scipy.sparse.linalg.eigsh(K.tocsc(), k, M=M.tocsc(), sigma=0.0)
    return values, vectors


def _lobpcg_with_pyamg(K: Any, M: Any, X: Any, points: Any) -> tuple[Any, Any]:
    import pyamg

    motions = LinearElasticity().rigid_body_modes(points)
    hierarchy = pyamg.smoothed_aggregation_solver(K.tobsr((3, 3)), B=motions)
    tolerance = 1e-9  # of norms that are not relative
    values, vectors = scipy.sparse.linalg.lobpcg(
        K, X, B=M, M=hierarchy.aspreconditioner(), largest=False, tol=tolerance, maxiter=_MOST_ITERATIONS
    )
    return values, vectors


def _lobpcg_on_gpu(K: Any, M: Any, X: Any) -> tuple[Any, Any, Any, Any]:
    import cupy
    from cupyx.scipy.sparse import csr_matrix, diags
    from cupyx.scipy.sparse.linalg import lobpcg

    A, B = csr_matrix(K), csr_matrix(M)
    jacobi = diags(1 / A.diagonal())
    values, vectors = lobpcg(A, cupy.asarray(X), B=B, M=jacobi, largest=False, tol=1e-9, maxiter=_MOST_ITERATIONS)
    return A, B, values, vectors


def main() -> None:
    """Measure and write the records."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="measure matrices whose names contain this")
    arguments: argparse.Namespace = parser.parse_args()
    device = Device.parse(arguments.device)
    limits = {"memory": measure_memory(device)}
    if device.kind == "cuda":
        limits["link"] = measure_link(device)
    cases: list[tuple[Callable[[], Problem], int, bool]] = [
        (lambda: cube(128), 10, True),
        (lambda: beam(512, 32, 32), 10, True),
        (lambda: plate(129, 5), 10, False),
        (lambda: jumps(64), 10, False),
        (lambda: cube(64), 60, False),
        (lambda: cube(64), 200, False),
    ]
    if device.kind == "cpu":
        cases = [(lambda: cube(24), 10, False), (lambda: cube(40), 10, False), (lambda: plate(61, 4), 10, False)]
    records = []
    for make, k, both in cases:
        problem = make()
        if arguments.only not in problem.name:
            continue
        for streamed in (False, True) if both else (False,):
            records.append(measure(problem, k, device, limits, streamed=streamed))
    write("modes", arguments, limits, records)


if __name__ == "__main__":
    main()
