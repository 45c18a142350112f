"""Triangular solves in every order and schedule against cuSPARSE, and Gauss-Seidel in every order, in one run.

    python benchmarks/triangular.py h200                         all matrices
    python benchmarks/triangular.py h200 --matrix laplace7-128   one of them

``trsv/auto`` is what TriangularSolve chooses; ``natural`` is the natural order, each row as soon as it can; ``levels`` a launch
for every level; ``columns`` rows that push; ``colours`` the triangle of the matrix in the order of its colours, which is another
one. A set-up is timed at its second call, and so is cuSPARSE's analysis; kernels are compiled before. cuSPARSE solves with single
entries where ours has blocks, the same triangle. Times are means of runs of calls, medians of three runs;
what only launches kernels is replayed as a CUDA graph, as it is within CG. ``floor_seconds`` is
the bytes of the triangle and of the vectors over the measured bandwidth, which no solve with a long chain of rows can reach.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import graphs
import numpy as np
from cusparse import TriangularPeer
from peer import seconds_of
from record import argument_parser, printed, record, write
from systems import System

from penstock.solvers import TriangularSolve, block_jacobi, cg, gauss_seidel
from penstock.spmv import Array, CsrMatrix, Device, SparseMatrix
from penstock.spmv.compilation.cuda_graph import capture
from penstock.streaming.measurement.probes import measure_memory

WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "natural": {"order": "natural", "schedule": "dataflow"},
    "levels": {"order": "levels", "schedule": "levels"},
    "columns": {"order": "levels", "schedule": "columns"},
}
_RUNS, _RUN_SECONDS, _MOST_CALLS = 3, 0.1, 100


def samples_of(action: Callable[[], Any], *, captured: bool = False) -> list[float]:
    """Return the mean seconds of a call in each of several runs of calls, on the GPU's clock."""
    import cupy

    action()
    if captured:  # as CG replays what only launches kernels
        action = capture(action).launch
    began, ended = cupy.cuda.Event(), cupy.cuda.Event()

    def run(count: int) -> float:
        began.record()
        for _ in range(count):
            action()
        ended.record()
        ended.synchronize()
        return float(cupy.cuda.get_elapsed_time(began, ended)) / 1e3 / count

    count = int(min(_MOST_CALLS, max(1, _RUN_SECONDS / run(1))))
    return [run(count) for _ in range(_RUNS)]


@dataclass(frozen=True)
class Triangle:
    """A symmetric matrix, its lower triangle as TriangularSolve takes it, and the same in CSR."""

    name: str
    whole: SparseMatrix
    lower: SparseMatrix
    scalars: CsrMatrix


def matrices(device: Device, chosen: list[str] | None) -> Iterator[Triangle]:
    """Make the matrices one after another."""
    makers: dict[str, Callable[[], SparseMatrix]] = {
        "laplace7-128": lambda: graphs.stencil(device, 128, 7),
        "laplace7-200": lambda: graphs.stencil(device, 200, 7),
        "cube64-dof3": lambda: System("cube64", (64, 64, 64), Device("cpu")).make("bsr"),
        "cube96-dof3": lambda: System("cube96", (96, 96, 96), Device("cpu")).make("bsr"),
        "laplace7-100-permuted": lambda: graphs.permuted(graphs.stencil(device, 100, 7)),
        "powerlaw-1m": lambda: graphs.power_law(device, 1_000_000),
        "tridiagonal-1m": lambda: graphs.chain(device, 1_000_000),
    }
    for name, make in makers.items():
        if chosen and name not in chosen:
            continue
        whole = make()
        if isinstance(whole, CsrMatrix):
            lower = graphs.lower_triangle(whole)
            yield Triangle(name, whole, lower, lower)
        else:
            blocks, scalars = graphs.lower_blocks(whole)
            csr = CsrMatrix.from_csr(scalars, check=False).to_device(device)
            yield Triangle(name, whole.to_device(device), blocks.to_device(device), csr)


def solves(case: Triangle, bandwidth: float, b: Array) -> Iterator[dict[str, Any]]:
    """Yield the records of triangular solves."""
    device, n = case.lower.device, case.lower.shape[0]
    x, own = device.xp.empty(n), device.xp.empty(n)
    lower = case.scalars
    arrays = (lower.row_offsets.astype(np.int32), lower.column_indices, lower.values)
    with TriangularPeer(*arrays, b, x) as peer:
        first, _ = seconds_of(device, peer.analyse)
    with TriangularPeer(*arrays, b, x) as peer:
        analysis, _ = seconds_of(device, peer.analyse)
        seconds = statistics.median(samples_of(peer.solve))
        extra = peer.workspace_nbytes
    more = {"peer_setup_seconds": analysis, "peer_first_setup_seconds": first, "peer_extra_bytes": extra}
    long = case.name.startswith("tridiagonal")
    for way, options in WAYS.items():
        if (long and way in ("levels", "columns")) or (way == "columns" and case.lower.row_granularity > 1):
            continue
        make = lambda options=options: TriangularSolve(case.lower, **options)  # noqa: E731
        make() @ b
        setup, solve = seconds_of(device, make)
        samples = samples_of(lambda solve=solve: solve.apply(b, own), captured=solve.capturable)
        error = float(abs(own - x).max() / abs(x).max())
        nbytes = solve.rows.nbytes + 4 * 8 * n
        yield printed(
            record(
                f"trsv/{way}/{case.name}",
                samples,
                floor=nbytes / bandwidth,
                nbytes=nbytes,
                peers={"cusparse": seconds},
                **more,
                setup_seconds=setup,
                error=error,
                levels=solve.levels,
                order=solve.order,
            ),
            f"set-up {1e3 * setup:.2f} ms, error {error:.0e}, a solve",
        )
        del solve
    if long:
        return
    coloured = TriangularSolve(case.whole, order="colours")
    nbytes = coloured.rows.nbytes + 4 * 8 * n
    setup, _ = seconds_of(device, lambda: TriangularSolve(case.whole, order="colours"))
    samples, figures = (
        samples_of(lambda: coloured.apply(b, own), captured=coloured.capturable),
        {"setup_seconds": setup, "levels": coloured.levels},
    )
    entry = record(f"trsv/colours/{case.name}", samples, floor=nbytes / bandwidth, nbytes=nbytes, peers={}, **figures)
    yield printed(entry, f"{coloured.levels} colours, set-up {1e3 * setup:.2f} ms, a solve")


def smoothers(case: Triangle, bandwidth: float, b: Array) -> Iterator[dict[str, Any]]:
    """Yield the records of symmetric Gauss-Seidel, with the iterations of CG."""
    device = case.whole.device
    z = device.xp.empty_like(b)
    product = statistics.median(samples_of(lambda: case.whole.apply(b, z), captured=True))
    jacobi = cg(case.whole, b, M=block_jacobi(case.whole, case.whole.row_granularity), rtol=1e-8)
    for order in ("colours", "levels", "natural"):
        gauss_seidel(case.whole, order) @ b
        setup, M = seconds_of(device, lambda order=order: gauss_seidel(case.whole, order))
        samples = samples_of(lambda M=M: M.apply(b, z), captured=M.capturable)
        found = cg(case.whole, b, M=M, rtol=1e-8)
        nbytes = case.whole.nbytes + 6 * 8 * len(b)
        entry = record(
            f"gauss_seidel/{order}/{case.name}",
            samples,
            floor=nbytes / bandwidth,
            nbytes=nbytes,
            peers={"product": product},
            setup_seconds=setup,
            iterations=found.iterations,
            block_jacobi_iterations=jacobi.iterations,
            colours=M.colours,
        )
        yield printed(
            entry,
            f"{found.iterations} iterations ({jacobi.iterations} with block Jacobi), set-up {1e3 * setup:.2f} ms, it",
        )


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--matrix", action="append", help="only these")
    arguments = parser.parse_args()
    device = Device.parse("cuda")
    bandwidth, records = measure_memory(device, 4 << 30), []
    for case in matrices(device, arguments.matrix):
        b = device.asarray(np.random.default_rng(0).normal(size=case.whole.shape[0]))
        records += solves(case, bandwidth, b)
        if case.name in ("laplace7-128", "cube64-dof3"):
            records += smoothers(case, bandwidth, b)
        write("triangular", arguments, {"read_GBps": bandwidth / 1e9}, records)  # what is measured stays measured


if __name__ == "__main__":
    main()
