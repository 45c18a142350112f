"""A GPU and the CPU of its host that share every product of a streamed matrix, against each of them alone.

    python benchmarks/heterogeneous.py h200
    python benchmarks/heterogeneous.py cpu2 --device cpu --edge 24     (no GPU: both parts on the CPU, to try the script)

An iteration of ``cg`` with block Jacobi, whose products are a sweep each, with GPU memory for three subdivisions, so that nothing
stays there. ``seconds`` is the difference of two solves, of a few and of many iterations, over that of their iterations. So are
those of the peers: the GPU alone on the same store and budget, and the CPU alone in its memory. ``predicted_seconds`` is what the
matrix expected of a product when it was opened, from the rates that it measured, and what an iteration with the matrix in memory
takes beside its product.
``floor_seconds`` is the matrix over the sum of two rates measured alone: of the link, and of the cores reading host memory.
"""

from __future__ import annotations

import gc
import statistics
from pathlib import Path
from typing import Any

from peer import seconds_of
from record import argument_parser, printed, record, write

from penstock.experiments.reporting.figures import draw_timeline
from penstock.fem import Cantilever, LognormalMaterial
from penstock.solvers import block_jacobi, cg
from penstock.spmv import CPU, Device, Operator, format_named
from penstock.streaming import HeterogeneousMatrix, HostStore, Ring, StreamedMatrix
from penstock.streaming.measurement.probes import measure_link, measure_memory

_FEW, _MANY, _REPEATS, _SLOTS = 5, 45, 3, 3


def iteration_seconds(A: Operator, beam: Cantilever) -> list[float]:
    """Return the seconds of an iteration of CG with block Jacobi, measured several times."""
    b, M = A.device.asarray(beam.load()), block_jacobi(A, 3)

    def solve(iterations: int) -> float:
        return seconds_of(A.device, lambda: cg(A, b, M=M, rtol=0.0, maxiter=iterations))[0]

    solve(_FEW)
    return [(solve(_MANY) - solve(_FEW)) / (_MANY - _FEW) for _ in range(_REPEATS)]


def measured(
    beam: Cantilever, format_name: str, count: int, device: Device, rate: float, figure: Path | None
) -> dict[str, Any]:
    """Return the record of a format."""
    with HostStore.create(beam.subdivisions(count, format_name)) as store:
        nbytes = store.index.nbytes
        budget = _SLOTS * max(subdivision.nbytes for subdivision in store.index.subdivisions)
        ring = Ring(slots=_SLOTS)
        with StreamedMatrix(store, budget, device=device, ring=ring) as alone:
            gpu = iteration_seconds(alone, beam)
        opened, A = seconds_of(device, lambda: HeterogeneousMatrix(store, budget, device=device, ring=ring))
        with A:
            shared, division = iteration_seconds(A, beam), A.division
            if figure is not None:
                draw(A, beam, figure)
    gc.collect()
    whole = beam.matrix(format_name)
    cpu = iteration_seconds(whole, beam)
    resident = whole.to_device(device)
    del whole
    x = device.asarray(beam.load())
    product = statistics.median(seconds_of(device, lambda: resident.apply(x))[0] for _ in range(9))
    beside = max(0.0, statistics.median(iteration_seconds(resident, beam)) - product)
    entry = record(
        f"heterogeneous/cube{beam.mesh.node_counts[0]}-dof3/{format_name}",
        shared,
        floor=nbytes / rate,
        nbytes=nbytes,
        peers={"gpu_alone": statistics.median(gpu), "cpu_alone": statistics.median(cpu)},
        predicted_seconds=division.seconds + beside,
        seconds_beside_product=beside,
        subdivisions=count,
        gpu_nbytes=division.plan.index.nbytes,
        gpu_part_seconds=division.gpu_seconds,
        cpu_part_seconds=division.cpu_seconds,
        cpu_rate=division.cpu_rate,
        opening_seconds=opened,
    )
    ratio = entry["peers"]["gpu_alone"] / entry["seconds"]
    printed(
        entry,
        f"{ratio:.2f} x the GPU alone, predicted {1e3 * entry['predicted_seconds']:.4g} ms, opened in {opened:.2f} s;",
    )
    print(division.explain(), flush=True)
    return entry


def draw(A: HeterogeneousMatrix, beam: Cantilever, path: Path) -> None:
    """Draw when the parts of one product ran."""
    x = A.device.asarray(beam.load())
    A.apply(x)
    with A.recording() as timeline:
        A.apply(x)
    draw_timeline(path, timeline)


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--edge", type=int, default=128, help="nodes a side")
    parser.add_argument("--format", action="append", help="only these")
    parser.add_argument("--subdivisions", type=int, help="default: 32 of half the matrix, 64 of the whole")
    parser.add_argument("--figure", type=Path, help="draw a product of the last format")
    arguments = parser.parse_args()
    device = Device.parse(arguments.device)
    beam = Cantilever(nodes=(arguments.edge,) * 3, dof=3, material=LognormalMaterial(sigma=0.5, seed=1))
    host = measure_memory(CPU, 4 << 30)
    link = measure_link(device, 4 << 30) if device.kind == "cuda" else 0.0
    limits = {"host_read_GBps": host / 1e9, "link_GBps": link / 1e9}
    records = []
    formats = arguments.format or ("symmetric_bsr", "sliced_bsr", "bsr")
    for format_name in formats:
        # On a CPU, half of a matrix is multiplied the faster the larger the subdivisions are: all threads add to rows of others.
        count = arguments.subdivisions or (32 if format_named(format_name).traits.half else 64)
        figure = arguments.figure if format_name == formats[-1] else None
        records.append(measured(beam, format_name, min(count, arguments.edge), device, host + link, figure))
        write("heterogeneous", arguments, limits, records)


if __name__ == "__main__":
    main()
