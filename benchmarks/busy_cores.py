"""A solve in memory beside busy processes on a machine of many cores: threads that adapt, and all threads all the time.

    python benchmarks/busy_cores.py h200

Each solve is in a process of its own, and solves twice: first a few iterations, which load the kernels. The peer ``all_threads``
is the same solve with as many threads as cores. ``ratio`` is to the quiet run. The floor is the time of threads that never wait
for each other beside k busy processes on c cores, (c + k) / c of the quiet time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

from busy import busy_loops
from record import argument_parser, printed, record, write

SOLVE = """
import json, sys, time
from penstock.host import adaptive_threads
from penstock.fem import Cantilever
from penstock.solvers import cg, chebyshev
if sys.argv[1] == "all_threads":
    adaptive_threads._WINDOW = float("inf")
beam = Cantilever(nodes=(101, 31, 31), dof=3)
A, b = beam.matrix("bsr"), beam.load()
M = chebyshev(A, 9)
cg(A, b, M=M, maxiter=2)
began = time.perf_counter()
result = cg(A, b, M=M, rtol=1e-8)
seconds = time.perf_counter() - began
assert result.converged, result.message
print(json.dumps([seconds, result.timings.get("fewer_threads", 0.0), result.sweeps * A.nbytes]))
"""


def solve(threads: str) -> list[float]:
    """Return the seconds of a solve, those with fewer threads, and the bytes of its products."""
    done = subprocess.run([sys.executable, "-c", SOLVE, threads], capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure all numbers of busy processes and write the records."""
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    records, quiet, cores = [], 0.0, len(os.sched_getaffinity(0))
    solve("adaptive")  # compiles
    for count in sorted({0, 1, 2, cores // 4, cores // 2, cores}):
        found: dict[str, list[list[float]]] = {"adaptive": [], "all_threads": []}
        with busy_loops(count):
            for _ in range(arguments.repeats):
                for threads, runs in found.items():
                    runs.append(solve(threads))
        samples, fewer, nbytes = (list(column) for column in zip(*found["adaptive"], strict=True))
        quiet = quiet or statistics.median(samples)
        entry = record(
            f"busy_cores/{count}_busy_loops",
            samples,
            floor=quiet * (cores + count) / cores,
            nbytes=int(nbytes[0]),
            peers={"all_threads": statistics.median(run[0] for run in found["all_threads"])},
            ratio=statistics.median(samples) / quiet,
            seconds_with_fewer_threads=statistics.median(fewer),
            cores=cores,
        )
        records.append(printed(entry, f"{entry['ratio']:.2f} x quiet"))
    write("busy_cores", arguments, {}, records)


if __name__ == "__main__":
    main()
