"""A matrix that no GPU here holds, solved for one right-hand side by many products a sweep.

    python benchmarks/wavefront_large.py h200x2
    python benchmarks/wavefront_large.py h200x2 --coarse-level --budget "80 GiB"

A cantilever of 300^3 nodes with 6 unknowns each (26 billion nonzeros, 211 GB of BSR in 256 GiB of host memory, streamed from the
arrays in which it was assembled) on one GPU, to a true relative residual of 1e-6. A subdivision is a plane of nodes; the plan
chooses how many products share a sweep. With a coarse level the record is ``coarse_level/streamed/cube300-dof6``.
``floor_seconds`` is the bytes moved over the measured link.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import argument_parser, record, write
from wavefront import DEGREES

from penstock.fem import Cantilever
from penstock.solvers import (
    IterationRecord,
    SmoothedAggregationSpec,
    cg,
    cg_workspace_nbytes,
    chebyshev,
    preconditioner_spec,
)
from penstock.spmv import Device, Operator, parse_nbytes
from penstock.streaming import Candidate, HostStore, StreamedMatrix, Workload, choose
from penstock.streaming.measurement.rates import machine_rates

RTOL = 1e-6


class Stages:
    """Seconds of the parts, printed as they end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        """Note that a part has ended."""
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now
        print(f"{name}: {self.seconds[name]:.1f} s", flush=True)


def preconditioner(A: StreamedMatrix, beam: Cantilever, *, coarse_level: bool) -> Operator:
    """Return a coarse level or a polynomial."""
    if not coarse_level:
        return chebyshev(A, "auto", block_size=6)
    mesh, spec = beam.mesh, SmoothedAggregationSpec(block_size=6).with_products(A.plan.workload.degree)
    return replace(spec, coordinates=mesh.coordinates(), aggregates=mesh.node_counts).build(A)


def compile_kernels(device: Device, *, coarse_level: bool) -> None:
    """Solve a small system of the same kind."""
    beam = Cantilever((40, 12, 12), dof=6)
    with HostStore.create(beam.subdivisions(40, "bsr")) as store:
        budget = 18 * max(store.index.sizes["whole"])
        with StreamedMatrix(store, budget, device=device, workload=Workload(degree=14)) as A:
            M = preconditioner(A, beam, coarse_level=coarse_level)
            cg(A, device.asarray(beam.load()), M=M, rtol=RTOL)


def main() -> None:
    """Assemble, stream, solve, print and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nodes", type=int, default=300, help="nodes a side")
    parser.add_argument("--coarse-level", action="store_true", help="instead of a Chebyshev polynomial")
    parser.add_argument("--budget", default="100 GiB", help="of GPU memory for matrix storage")
    arguments = parser.parse_args()
    device, side, stages = Device.parse(arguments.device), arguments.nodes, Stages()
    rates = machine_rates(device, Path(), fresh=True)
    compile_kernels(device, coarse_level=arguments.coarse_level)
    beam = Cantilever(side, dof=6)
    plane = 6 * side * side
    stages.end("start")
    matrix = beam.matrix("bsr")
    stages.end("assemble")
    with HostStore.from_matrix(matrix, range(0, beam.unknowns + 1, plane)) as store:
        if device.kind == "cuda":
            store.page_lock()
        stages.end("page-lock")
        spec = preconditioner_spec("smoothed_aggregation" if arguments.coarse_level else "chebyshev", block_size=6)
        held = spec.workspace_nbytes(beam.unknowns, 1, streamed_to_gpu=True)
        workspace = cg_workspace_nbytes(beam.unknowns) + held
        degrees = spec.products_per_iteration(streamed=True) if arguments.coarse_level else DEGREES
        workloads = [
            Workload(degree=degree, workspace_nbytes=workspace, iterations=spec.iterations(degree))
            for degree in degrees
        ]
        candidates = (Candidate(store.index, workload) for workload in workloads)
        plan = choose(candidates, arguments.budget, rates=rates)
        print(plan.explain(), flush=True)
        with StreamedMatrix(store, parse_nbytes(arguments.budget), device=device, plan=plan) as A:
            stages.end("open")
            M = preconditioner(A, beam, coarse_level=arguments.coarse_level)
            b, setup_sweeps = device.asarray(beam.load()), A.sweeps
            stages.end("prepare")
            before = time.perf_counter()

            def monitor(of: IterationRecord) -> None:
                print(f"  iteration {of.iteration}, residual {of.residual_norm:.2e}, {of.seconds:.0f} s", flush=True)

            result = cg(A, b, M=M, rtol=RTOL, monitor=monitor)
            seconds = time.perf_counter() - before
            stages.end("solve")
            more: dict[str, Any] = {
                "matrix_bytes": matrix.nbytes, "nnz": matrix.nnz, "unknowns": beam.unknowns, "rtol": RTOL,
                "iterations": result.iterations, "sweeps": result.sweeps, "true_residual": result.true_residual,
                "reason": result.reason.name.lower(), "products": plan.workload.degree,
                "setup_seconds": stages.seconds["prepare"], "setup_sweeps": setup_sweeps,
                "products_a_sweep": A.powers_per_sweep(), "slots": plan.slots, "resident": len(plan.resident),
                "budget_bytes": plan.budget_nbytes, "peak_budget_bytes": A.budget.peak_nbytes, "seconds_of": stages.seconds,
            }  # fmt: skip
    print(f"{result.message}: {result.sweeps} sweeps, {seconds / result.sweeps:.3f} s each")
    floor, moved = result.bytes_streamed / rates.link, result.bytes_streamed
    file, name = ("coarse_level", "streamed") if arguments.coarse_level else ("wavefront_large", "large")
    entry = record(
        f"{file.partition('_large')[0]}/{name}/cube{side}-dof6", [seconds], floor=floor, nbytes=moved, peers={}, **more
    )
    write(file, arguments, {"link_GBps": rates.link / 1e9, "read_GBps": rates.memory / 1e9}, [entry])


if __name__ == "__main__":
    main()
