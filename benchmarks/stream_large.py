"""Matrices of many GB on one GPU, streamed from the ordinary arrays in which they were assembled, and checked.

    python benchmarks/stream_large.py h200

6 unknowns a node: 160^3 nodes (3.9 billion nonzeros, 32 GB) within 8 GiB of the GPU, and 300^3 nodes (26 billion, 211 GB,
more than any GPU here holds) within 6 GiB; the second takes 256 GiB of host memory. Nothing is clamped, so the matrix must
annihilate the six rigid motions: ``worst_residual`` is the largest entry of ``A X`` in units of the rounding of its terms,
``2^-53 |A| |X|``; a row has 162 terms. ``floor_seconds`` is the bytes moved over the measured link.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import numpy as np
from record import argument_parser, record, write

from penstock.fem import Cantilever
from penstock.spmv import Device
from penstock.spmv.model.timing import time_by_host_clock
from penstock.streaming import HostStore, Ring, StreamedMatrix, plan_stream
from penstock.streaming.measurement.probes import measure_link, measure_memory

CASES = {160: ("8 GiB", 64), 300: ("6 GiB", 128)}  # nodes a side: budget, subdivisions


def timed(action: Any) -> tuple[float, Any]:
    """Return the seconds of one call, and its result."""
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def worst_residual(A: StreamedMatrix, beam: Cantilever) -> float:
    """Return the largest entry of ``A X``, with the rigid motions as X, in units of its rounding."""
    xp, worst = A.device.xp, 0.0
    modes = beam.rigid_body_modes()
    products = A @ A.device.asarray(np.ascontiguousarray(modes))
    for number in range(modes.shape[1]):
        bound = A.apply_absolute(A.device.asarray(np.abs(modes[:, number])))
        unit = 2.0**-53 * xp.maximum(bound, xp.finfo(np.float64).tiny)
        worst = max(worst, float(xp.max(xp.abs(products[:, number]) / unit)))
    return worst


def main() -> None:
    """Assemble, stream, check, print and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(CASES), help="nodes a side of each cube")
    arguments = parser.parse_args()
    device, records = Device.parse("cuda"), []
    limits = {"read_GBps": measure_memory(device, 8 << 30) / 1e9, "link_GBps": measure_link(device, 1 << 30) / 1e9}
    for nodes in arguments.nodes:
        budget, count = CASES.get(nodes, ("256 MiB", 32))
        beam = Cantilever(nodes, dof=6, clamped=False)
        assembly, matrix = timed(beam.matrix)
        print(f"{nodes}^3 nodes: {matrix.nbytes / 1e9:.1f} GB assembled in {assembly:.1f} s", flush=True)
        with HostStore.from_matrix(matrix, count) as store:
            locking, _ = timed(store.page_lock)
            plan = plan_stream(store.index, budget, ring=Ring(slots=3, sweeps="cyclic"))
            print(plan.explain(), flush=True)
            with StreamedMatrix(store, budget, device=device, plan=plan) as A:
                x = device.asarray(np.random.default_rng(0).standard_normal(beam.unknowns))
                out = device.xp.empty_like(x)
                samples = time_by_host_clock({"on": partial(A.apply, x, out)}, device, repeats=3, warmups=1)["on"]
                peak = A.budget.peak_nbytes
                del x, out
                worst = worst_residual(A, beam)
            device.xp.get_default_memory_pool().free_all_blocks()
        seconds, floor = statistics.median(samples), plan.streamed_nbytes / limits["link_GBps"] / 1e9
        entry = record(
            f"stream/bsr/cube{nodes}-dof6/s{count}/k1/in_place",
            samples,
            floor=floor,
            nbytes=plan.streamed_nbytes,
            peers={},
            matrix_bytes=matrix.nbytes,
            nnz=matrix.nnz,
            budget_bytes=plan.budget_nbytes,
            peak_budget_bytes=peak,
            assembly_seconds=assembly,
            page_lock_seconds=locking,
            link_fraction=floor / seconds,
            worst_residual=worst,
        )
        records.append(entry)
        print(
            f"{entry['name']}: page-locked in {locking:.1f} s; a sweep of {plan.streamed_nbytes / 1e9:.1f} GB in "
            f"{seconds:.3f} s = {100 * entry['link_fraction']:.1f} % of the link; rigid motions to {worst:.2f} roundings",
            flush=True,
        )
        del matrix, store, A
    write("stream_large", arguments, limits, records)


if __name__ == "__main__":
    main()
