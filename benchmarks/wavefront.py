"""Many products a sweep: what a sweep and a whole solve take, against one product a sweep and against memory.

    python benchmarks/wavefront.py h200 --device cuda

Three systems of random stiffness (lognormal, sigma 0.5), to a true relative residual of 1e-8, with matrix storage of a quarter
of the BSR matrix: a cube, a slender beam, and the cube with its nodes shuffled and put in the order of levels again. Ways:

- ``memory``: CG with Jacobi and with block Jacobi on symmetric BSR, whichever is faster;
- ``no_overlap``, ``streamed``: CG with Jacobi on BSR in the same storage, part of it resident, some iterations measured and
  scaled to those that the same solve takes in memory, with the same bits;
- ``wavefront``: CG with a Chebyshev polynomial in the matrix scaled by the blocks of its nodes; format, cut and degree are
  chosen by the plan.

Sweeps are timed several in a row; ``floor_seconds`` is the bytes moved over the measured link.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from peer import seconds_of
from record import argument_parser, printed, record, write
from systems import FORMATS, Reordered, System

from penstock.solvers import block_jacobi, cg, chebyshev, jacobi
from penstock.spmv import Array, Device
from penstock.streaming import LinkRates, Ring, StreamedMatrix, StreamPlan
from penstock.streaming.measurement.probes import measure_link
from penstock.streaming.measurement.rates import machine_rates

RTOL, SWEEPS, SCALED = 1e-8, 8, 60
#: Degrees of the polynomial that are tried; the first is taken where nothing need be streamed.
DEGREES = (9, 5, 13, 17, 21, 25, 33)


def measure_sweeps(system: System, rates: LinkRates, link: float, many: int) -> list[dict[str, Any]]:
    """A sweep with one product, and with many that follow each other, in the same storage and the same cut."""
    records = []
    for name in ("bsr", "symmetric_bsr"):
        single = 0.0
        for products in (1, many):
            ring = Ring(slots=max(3, products + 1))
            plan = system.plan(rates, [name], [products], ring, counts=[system.planes])
            with system.streamed(plan) as A:
                x = system.load()
                z, w = (system.device.xp.empty_like(x) for _ in range(2))
                M = None if products == 1 else chebyshev(A, products, high=4.2)
                sweep: Callable[[], Any] = (
                    partial(A.apply, x, w) if M is None else partial(M.apply_with_product, x, z, w)
                )
                assert products == 1 or A.powers_per_sweep() >= products, "one sweep"
                samples, moved = times(system.device, sweep, A)
            single = single or statistics.median(samples)
            entry = record(f"wavefront/sweep/{name}/{system.name}/p{products}", samples, floor=moved / link, nbytes=moved,
                           peers={"p1": single}, **described(plan))  # fmt: skip
            records.append(printed(entry, "a sweep"))
    return records


def times(device: Device, sweep: Callable[[], Any], A: StreamedMatrix) -> tuple[list[float], int]:
    """Return samples of the seconds of a sweep, and the bytes that one moves."""

    def several() -> None:
        for _ in range(SWEEPS):
            sweep()

    several()
    before, sweeps = A.bytes_streamed, A.sweeps
    samples = [seconds_of(device, several)[0] / SWEEPS for _ in range(5)]
    return samples, (A.bytes_streamed - before) // (A.sweeps - sweeps)


def described(plan: StreamPlan) -> dict[str, Any]:
    """Return what a plan decided."""
    return {
        "format": plan.index.format_name, "subdivisions": len(plan.index.subdivisions), "slots": plan.slots,
        "resident": len(plan.resident), "products": plan.workload.degree, "products_a_sweep": plan.powers_per_sweep,
        "matrix_bytes": plan.index.nbytes, "budget_bytes": plan.budget_nbytes, "storage_bytes": plan.storage_nbytes,
    }  # fmt: skip


def measure_solves(system: System, rates: LinkRates, link: float) -> list[dict[str, Any]]:
    """The same system in every way."""
    device, b = system.device, system.load()
    memory, best, jacobi_iterations = solves_in_memory(system, b)
    streamed = {
        way: streamed_seconds(system, rates, b, jacobi_iterations, overlap=way == "streamed")
        for way in ("no_overlap", "streamed")
    }
    peers = {"memory": memory, **{way: seconds for way, (seconds, _) in streamed.items()}}
    entries = [record(f"wavefront/solve/memory/{system.name}", [memory], floor=0.0, nbytes=0, peers={}, **best)]
    for way, (seconds, more) in streamed.items():
        moved = int(more.pop("bytes_moved"))
        entries.append(
            record(
                f"wavefront/solve/{way}/{system.name}", [seconds], floor=moved / link, nbytes=moved, peers={}, **more
            )
        )
    plan = system.plan(rates, FORMATS, DEGREES)
    print(plan.explain(), flush=True)
    with system.streamed(plan) as A:
        M = chebyshev(A, "auto", block_size=3)
        cg(A, b, M=M, rtol=RTOL, maxiter=6)
        samples = [seconds_of(device, partial(cg, A, b, M=M, rtol=RTOL)) for _ in range(3)]
        result = samples[0][1]
        peak = A.budget.peak_nbytes
    seconds = [taken for taken, _ in samples]
    middle = statistics.median(seconds)
    more = {
        **outcome(result),
        **described(plan),
        "peak_budget_bytes": peak,
        "times_memory": middle / memory,
        "times_faster_than_streamed": peers["streamed"] / middle,
        "predicted_sweep_seconds": plan.predicted_seconds(),
    }
    moved, name = result.bytes_streamed, f"wavefront/solve/wavefront/{system.name}"
    entries.append(record(name, seconds, floor=moved / link, nbytes=moved, peers=peers, **more))
    for entry in entries:
        printed(entry, "a solve")
    print(f"  {middle / memory:.2f} x memory, {peers['streamed'] / middle:.1f} x faster than overlap alone", flush=True)
    return entries


def outcome(result: Any) -> dict[str, Any]:
    """Return what a solver says."""
    return {
        "iterations": result.iterations, "sweeps": result.sweeps, "true_residual": result.true_residual,
        "rounding_floor": result.rounding_floor, "reason": result.reason.name.lower(),
        "replacements": result.state.replacements,
    }  # fmt: skip


def solves_in_memory(system: System, b: Array) -> tuple[float, dict[str, Any], int]:
    """Return the least seconds in memory, what the solver says, and the iterations of Jacobi on BSR."""
    A = system.matrix("symmetric_bsr").to_device(system.device)
    found = []
    for kind, M in (("jacobi", jacobi(A)), ("block_jacobi", block_jacobi(A, 3))):
        cg(A, b, M=M, maxiter=300)
        seconds, result = seconds_of(system.device, partial(cg, A, b, M=M, rtol=RTOL))
        found.append((seconds, {"preconditioner": kind, "format": "symmetric_bsr", **outcome(result)}))
    del A
    whole = system.matrix("bsr").to_device(system.device)
    iterations = cg(whole, b, M=jacobi(whole), rtol=RTOL).iterations
    return *min(found, key=lambda one: one[0]), iterations


def streamed_seconds(
    system: System, rates: LinkRates, b: Array, iterations: int, *, overlap: bool
) -> tuple[float, dict[str, Any]]:
    """Return the seconds of a solve with one product a sweep, from some of its iterations."""
    plan = system.plan(rates, ["bsr"], [1], Ring(overlap=overlap))
    with system.streamed(plan) as A:
        M = jacobi(A)
        cg(A, b, M=M, maxiter=3)
        seconds, result = seconds_of(system.device, partial(cg, A, b, M=M, rtol=0.0, maxiter=SCALED))
    scale = (iterations + 1) / result.sweeps
    more = {"iterations": iterations, "measured_iterations": SCALED, "bytes_moved": scale * result.bytes_streamed}
    return scale * seconds, {**more, **described(plan)}


def same_bits(system: System, rates: LinkRates, many: int) -> list[dict[str, Any]]:
    """Some iterations with BSR, resident and streamed: must have the same bits."""
    b, found = system.load(), []
    resident = system.matrix("bsr").to_device(system.device)
    options: dict[str, Any] = {"rtol": 0.0, "maxiter": 20}
    found.append(cg(resident, b, M=chebyshev(resident, many, high=4.2), **options).x)
    del resident
    plan = system.plan(rates, ["bsr"], [many], Ring(slots=many + 1), counts=[system.planes])
    with system.streamed(plan) as A:
        seconds, result = seconds_of(system.device, partial(cg, A, b, M=chebyshev(A, many, high=4.2), **options))
        found.append(result.x)
    equal = bool((found[0] == found[1]).all())
    print(f"the same bits after {result.iterations} iterations: {equal}", flush=True)
    return [record(f"wavefront/bits/{system.name}", [seconds], floor=0.0, nbytes=0, peers={}, equal=equal)]


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the seconds of every way, system by system."""
    ways = {
        "memory": ("in memory", "#8a8f98", "s"),
        "wavefront": ("streamed, many products a sweep", "#e07b28", "o"),
        "streamed": ("streamed, one product a sweep", "#1f6fb2", "D"),
        "no_overlap": ("the same without overlap", "#8fa3b8", "x"),
    }
    solves = {tuple(entry["name"].split("/")[2:]): entry["seconds"] for entry in records if "/solve/" in entry["name"]}
    systems = list(dict.fromkeys(system for _, system in solves))
    figure = Figure(figsize=(8, 1.1 + 0.7 * len(systems)), layout="constrained")
    axes = figure.subplots()
    for place, system in enumerate(systems):
        found = [solves[way, system] for way in ways]
        axes.plot([min(found), max(found)], [place, place], color="#d5d9de", zorder=1)
    for way, (label, color, marker) in ways.items():
        seconds = [solves[way, system] for system in systems]
        axes.plot(seconds, range(len(systems)), marker, color=color, markersize=8, label=label)
        for place, value in enumerate(seconds):
            above = way in ("wavefront", "streamed")  # the others lie close to these
            offset, up = ((0, 8), "bottom") if above else ((0, -8), "top")
            axes.annotate(
                f"{value:.3g} s",
                (value, place),
                xytext=offset,
                textcoords="offset points",
                ha="center",
                va=up,
                fontsize=8,
            )
    axes.set(xscale="log", xlabel="seconds to a true residual of 1e-8", yticks=range(len(systems)), yticklabels=systems)
    axes.margins(x=0.1, y=0.25)
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print, draw and write the JSON after every part."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nodes", type=int, default=128, help="nodes a side of the cube, a multiple of 4")
    parser.add_argument("--products", type=int, default=17, help="of the sweep that is timed, odd")
    parser.add_argument("--skip", default="", help="systems to leave out, such as beam,reordered")
    arguments = parser.parse_args()
    device, side = Device.parse(arguments.device), arguments.nodes
    with device.current():
        rates = machine_rates(device, Path.cwd(), fresh=True)
        link = measure_link(device) if device.kind == "cuda" else rates.link
        limits = {"link_GBps": link / 1e9, "read_GBps": rates.memory / 1e9}
        systems: dict[str, Callable[[], System]] = {
            "cube": partial(System, f"cube{side}-dof3", (side,) * 3, device),
            "beam": partial(
                System, f"beam{4 * side}x{side // 4}x{side // 4}-dof3", (4 * side, side // 4, side // 4), device
            ),
            "reordered": partial(Reordered, f"cube{side}-dof3-reordered", (side,) * 3, device),
        }
        records: list[dict[str, Any]] = []
        for name, make in systems.items():
            if name in arguments.skip.split(","):
                continue
            system = make()
            if name == "cube":
                records += measure_sweeps(system, rates, link, arguments.products)
                records += same_bits(system, rates, arguments.products)
            records += measure_solves(system, rates, link)
            write("wavefront", arguments, limits, records)
            draw(records, arguments.output / f"wavefront-{arguments.machine}.png")


if __name__ == "__main__":
    main()
