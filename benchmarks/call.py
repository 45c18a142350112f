"""What a user waits for: from arrays, a file or a store to the solution, against CuPy's upload and ``cg``, or SciPy's.

    python benchmarks/call.py cpu2
    python benchmarks/call.py h200 --device cuda

``seconds`` is ``penstock.solve(A, b, coordinates=points)`` when it has been called before, to a true residual of 1e-8, and
``parts`` where they go. ``first_seconds`` is the same in a new process whose caches of compiled kernels are empty, and
``second_seconds`` in a new process that finds them filled; imports of penstock are included. ``floor_seconds`` is the time to
bring the given arrays to the device, at the measured rate of copies from ordinary memory, with set-up and iterations; on a CPU,
reading them once takes the place of the copy. ``cupy_csr`` lies on the GPU before the call. ``host_share`` is the
host memory that a call takes beside those arrays, in the bytes of CSR. ``store`` is a matrix that
``FileStore.create`` has written to disk; its floor has the bytes of the store at the same rate. ``cg`` of peers has
Jacobi.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import scipy.sparse
from peer import Peer, seconds_of
from record import argument_parser, printed, record, write
from tetrahedra import TetrahedralBox

import penstock
from penstock.fem import Cantilever, LognormalMaterial
from penstock.spmv import CPU, Device
from penstock.streaming import FileStore
from penstock.streaming.measurement.probes import measure_memory

RTOL, REPEATS = 1e-8, 3
_FIRST = """
import json, sys, time
began = time.perf_counter()
import numpy as np, scipy.sparse
folder, device = sys.argv[1:]
A, b = scipy.sparse.load_npz(folder + "/A.npz"), np.load(folder + "/b.npy")
points = np.load(folder + "/points.npy")
loaded = time.perf_counter()
import penstock
result = penstock.solve(A, b, coordinates=points, device=device)
assert result.converged
print(json.dumps(time.perf_counter() - loaded))
"""


class Problem:
    """A matrix, a load, and the coordinates of its nodes, if it has such."""

    def __init__(self, name: str, A: Any, points: Any) -> None:
        self.name, self.A, self.points = name, scipy.sparse.csr_matrix(A), points
        self.b = np.random.default_rng(2).standard_normal(A.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays in CSR."""
        return int(self.A.data.nbytes + self.A.indices.nbytes + self.A.indptr.nbytes)


def gpu_problems(nodes: int) -> Iterator[Problem]:
    """Yield the systems for a GPU, one at a time."""
    for name, shape in ((f"cube{nodes}-dof3", (nodes,) * 3), ("beam512x32x32-dof3", (512, 32, 32))):
        beam = Cantilever(nodes=shape, dof=3, material=LognormalMaterial(sigma=0.5))
        yield Problem(name, beam.matrix("csr").to_csr(), beam.mesh.coordinates())
    edge = 2 * nodes
    yield Problem(f"laplace7-{edge}", graphs.stencil(Device("cuda"), edge, 7).to_csr(), None)
    yield tetrahedra(70)


def cpu_problems() -> Iterator[Problem]:
    """Yield the systems for two cores."""
    beam = Cantilever(nodes=40, dof=3, material=LognormalMaterial(sigma=0.5))
    yield Problem("cube40-dof3", beam.matrix("csr").to_csr(), beam.mesh.coordinates())
    yield tetrahedra(35)


def tetrahedra(nodes: int) -> Problem:
    """Return elasticity on an unstructured mesh."""
    box = TetrahedralBox(nodes)
    moduli = np.exp(0.5 * np.random.default_rng(3).standard_normal(box.elements))
    return Problem(f"tetrahedra{nodes}-dof3", box.stiffness(moduli), box.points)


def further_host_memory(call: Callable[[], Any]) -> int:
    """Return the bytes of host memory that a call takes at most beside what there is before it; Linux only, elsewhere 0."""
    status, peak = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        peak.write_text("5")  # the peak is now what is in use
    except OSError:
        call()
        return 0
    before = _kilobytes(status.read_text(), "VmRSS")
    call()
    return (_kilobytes(status.read_text(), "VmHWM") - before) << 10


def _kilobytes(status: str, name: str) -> int:
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])


def copy_rate(device: Device) -> float:
    """Return the bytes a second at which ordinary memory reaches the device; on a CPU, at which it is read."""
    if device.kind == "cpu":
        return measure_memory(device, 256 << 20)
    host = np.ones(1 << 28)
    device.asarray(host)
    return host.nbytes / statistics.median(seconds_of(device, lambda: device.asarray(host))[0] for _ in range(3))


def measure(problem: Problem, kind: str, A: Any, device: Device, rate: float, memory: int | None) -> dict[str, Any]:
    """Return the record of one kind of input, in memory or streamed."""
    b, options = problem.b, {"device": str(device), "coordinates": problem.points, "memory": memory}
    if kind.startswith("cupy"):
        b = device.asarray(b)

    def call() -> Any:
        return penstock.solve(A, b, rtol=RTOL, **{name: of for name, of in options.items() if of is not None})

    call()  # compiles, and measures the link
    further = further_host_memory(call)
    samples, results = zip(*(seconds_of(device, call) for _ in range(REPEATS)), strict=True)
    result = results[samples.index(statistics.median(samples))]
    assert result.converged, result
    parts = {name: of for name, of in result.timings.items() if name.endswith("ing") or name in ("setting up", "rest")}
    moved = 0 if kind.startswith("cupy") else problem.nbytes
    if kind == "store":
        with FileStore(A) as store:
            moved = store.index.nbytes
    entry = record(
        f"call/{'memory' if memory is None else 'streamed'}/{kind}/{problem.name}",
        list(samples),
        floor=moved / rate + parts["setting up"] + parts["iterating"],
        nbytes=problem.nbytes,
        peers={},
        iterations=result.iterations,
        true_residual=result.true_residual,
        parts=parts,
        unknowns=problem.A.shape[0],
        host_share=further / problem.nbytes,
    )
    gc.collect()
    return printed(entry, "the call")


def peer_seconds(problem: Problem, device: Device) -> dict[str, float]:
    """Return the seconds of upload and ``cg`` by CuPy, or of ``cg`` by SciPy, and of PyAMG and CHOLMOD on a CPU."""

    def solve() -> Any:
        peer = Peer(problem.A, device)
        return peer.name, peer.solve(device.asarray(problem.b), 50_000, RTOL)

    if device.kind == "cuda":
        solve()  # compiles
    seconds, (name, _) = seconds_of(device, solve)
    found = {f"{name} cg": seconds}
    if device.kind == "cpu" and problem.points is not None:
        try:
            import pyamg
        except ImportError:
            print("  without PyAMG")
        else:
            found["pyamg"] = seconds_of(device, functools.partial(_by_pyamg, pyamg, problem))[0]
    if device.kind == "cpu":
        try:
            from sksparse.cholmod import cholesky
        except ImportError:
            print("  without CHOLMOD")
        else:
            found["cholmod"] = seconds_of(device, lambda: cholesky(scipy.sparse.csc_matrix(problem.A))(problem.b))[0]
    return found


def _by_pyamg(pyamg: Any, problem: Problem) -> Any:
    from penstock.solvers.amg.modes import rigid_body_modes

    levels = pyamg.smoothed_aggregation_solver(
        scipy.sparse.bsr_array(problem.A, blocksize=(3, 3)), B=np.asarray(rigid_body_modes(problem.points, 3))
    )
    return levels.solve(problem.b, tol=RTOL, accel="cg", maxiter=500)


def first_calls(problem: Problem, device: Device) -> dict[str, float]:
    """Return the seconds of the first call in a new process, with empty caches and then with filled ones."""
    with tempfile.TemporaryDirectory() as folder:
        scipy.sparse.save_npz(f"{folder}/A.npz", problem.A, compressed=False)
        np.save(f"{folder}/b.npy", problem.b)
        np.save(f"{folder}/points.npy", problem.points)
        caches = {name: f"{folder}/{name}" for name in ("NUMBA_CACHE_DIR", "CUPY_CACHE_DIR", "XDG_CACHE_HOME")}
        command = [sys.executable, "-c", _FIRST, folder, str(device)]
        seconds = []
        for _ in range(2):
            done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=True)
            seconds.append(float(json.loads(done.stdout.splitlines()[-1])))
    return {"first_seconds": seconds[0], "second_seconds": seconds[1]}


def measure_all(problem: Problem, device: Device, rate: float, *, kinds: tuple[str, ...], first: bool) -> list[Any]:
    """Return the records of one system."""
    inputs: dict[str, Callable[[Path], Any]] = {
        "scipy_csr": lambda folder: problem.A,
        "scipy_bsr": lambda folder: problem.A.tobsr((3, 3)),
        "cupy_csr": lambda folder: _on_gpu(problem.A),
        "npz": lambda folder: _saved(problem.A, folder),
        "store": lambda folder: _stored(problem.A, folder),
    }
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            A = inputs[kind](Path(folder))
            found.append(measure(problem, kind, A, device, rate, None))
            del A
            gc.collect()
    found.append(measure(problem, "scipy_csr", problem.A, device, rate, problem.A.nnz * 8 // 4))
    found[0]["peers"] = peer_seconds(problem, device)
    if first:
        found[0].update(first_calls(problem, device))
    print(f"  peers {found[0]['peers']}, first calls {found[0].get('first_seconds')}, {found[0].get('second_seconds')}")
    return found


def _on_gpu(A: Any) -> Any:
    from cupyx.scipy.sparse import csr_matrix

    return csr_matrix(A)


def _stored(A: Any, folder: Path) -> Path:
    rows = A.shape[0]
    cuts = itertools.pairwise([rows * part // 16 // 96 * 96 for part in range(16)] + [rows])
    FileStore.create(folder / "store", (A[start:stop] for start, stop in cuts), shape=A.shape).close()
    return folder / "store"


def _saved(A: Any, folder: Path) -> Path:
    scipy.sparse.save_npz(folder / "matrix.npz", A, compressed=False)
    return folder / "matrix.npz"


def main() -> None:
    """Measure and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nodes", type=int, default=128, help="nodes a side of the cube on a GPU")
    parser.add_argument("--brief", action="store_true", help="without BSR, files and first calls")
    parser.add_argument("--only", help="measure systems whose name begins so")
    arguments: argparse.Namespace = parser.parse_args()
    device, began, records = Device.parse(arguments.device), time.perf_counter(), []
    rate = copy_rate(device)
    for number, problem in enumerate(cpu_problems() if device == CPU else gpu_problems(arguments.nodes)):
        if arguments.only and not problem.name.startswith(arguments.only):
            continue
        kinds = ("scipy_csr",) if device == CPU else ("scipy_csr", "cupy_csr")
        first = not number and not arguments.brief
        kinds = (*kinds, "scipy_bsr", "npz", "store") if first else kinds
        records += measure_all(problem, device, rate, kinds=kinds, first=first)
        print(f"{time.perf_counter() - began:.0f} s", flush=True)
        write("call", arguments, {"copy": rate}, records)  # of what is measured so far


if __name__ == "__main__":
    main()
