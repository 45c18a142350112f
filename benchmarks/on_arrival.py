"""Finite-element matrices that are assembled where they are used, against those held in memory or streamed from the host.

    python benchmarks/on_arrival.py cpu2
    python benchmarks/on_arrival.py h200 --device cuda
    python benchmarks/on_arrival.py h100 --device cuda --large examples/half_billion.yaml      a whole run, nothing else

Cantilevers of random stiffness (lognormal, sigma 0.5). ``on_arrival/assembly/<mesh>`` are seconds to make all entries of the
stored half, or of all blocks, in memory; the floor is the time to write them. ``on_arrival/solve/<mesh>`` are solves with a
random load to a true relative residual of 1e-8 with nothing of the matrix resident, with the one-sweep coarse level;
``setup_seconds`` make it. Peers are the same with the matrix in memory, and streamed through the same ring from page-locked host
memory, on a CPU from a disk. ``-tetrahedra`` and ``-hexahedra`` are meshes of any shape, here distorted boxes: assembly, and
whole calls of :func:`penstock.solve` from coordinates and connectivity in random order, whose peer is the call with a SciPy CSR
matrix of the same body, assembled before. ``on_arrival/elements/<mesh>`` are solves on a GPU while the elements stay in host
memory; the floor is the time to copy them, the peer is the solve with the elements on the GPU. ``on_arrival/run/cantilever_cuda``
is ``penstock run examples/cantilever_cuda.yaml`` on a GPU, a process from its start to the results; ``setup_seconds`` are those
of assembly and preconditioner.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from peer import seconds_of
from pool_peak import peak_of_pool
from record import argument_parser, printed, record, write

import penstock
from penstock.driver.progress import Reporter
from penstock.experiments import Experiment, read_experiment, run_experiment
from penstock.experiments.cantilever.matrix_storage import open_store, plan_experiment
from penstock.fem import BoxMesh, Cantilever, LognormalMaterial
from penstock.fem.element_matrix import ElementMatrix
from penstock.solvers import cg, smoothed_aggregation
from penstock.spmv import Device
from penstock.spmv.model.timing import time_in_turn
from penstock.streaming import MadeStore, MemoryBudget, StreamedMatrix, Workload, index_of
from penstock.streaming.measurement.probes import measure_memory
from penstock.streaming.measurement.rates import machine_rates

RTOL, REPEATS, SETUPS = 1e-8, 5, 3
#: An experiment that is run as a user would.
RUN = Path(__file__).parents[1] / "examples" / "cantilever_cuda.yaml"
#: Of the stored half, for the ring of slots.
SHARE = 0.25
#: Subdivisions of a mesh whose elements stay on the host, and products of a sweep.
SLABS, DEGREE = 64, 14
#: Nodes a side of the body of tetrahedra, and the tetrahedra of a hexahedron.
BODY = {"cpu": 40, "cuda": 146}
#: A body of this part of them a side is solved before, so that kernels are compiled.
WARM = 4
SIX = ((0, 1, 2, 6), (0, 2, 3, 6), (0, 3, 7, 6), (0, 7, 4, 6), (0, 4, 5, 6), (0, 5, 1, 6))


def experiment_of(nodes: tuple[int, int, int], device: Device, memory: dict[str, Any]) -> Experiment:
    """Return the experiment of a body."""
    return Experiment.model_validate(
        {
            "model": {"nodes": nodes, "dof": 3},
            "material": {"kind": "lognormal", "sigma": 0.5},
            "solver": {"preconditioner": "auto"},
            "memory": {"device": str(device), **memory},
        }
    )


class Solves:
    """Set-ups and solves of one body."""

    def __init__(self, nodes: tuple[int, int, int], device: Device) -> None:
        self.beam = Cantilever(nodes=nodes, dof=3, material=LognormalMaterial(sigma=0.5))
        self.nodes, self.device = nodes, device
        self.nbytes = sum(slab.nbytes for slab in self.beam.symbolic_slabs(1, "symmetric_bsr"))
        self.loads = np.random.default_rng(2).standard_normal((REPEATS + 1, self.beam.unknowns))

    def with_matrix(self, A: Any, spec: Any, repeats: int = REPEATS) -> dict[str, Any]:
        """Set up and solve once to warm up, then a few times, and return the medians of these."""
        setups = []
        for _ in range(SETUPS + 1 if repeats else 1):
            M = None  # its memory is that of the next one
            setup, M = seconds_of(self.device, functools.partial(spec.build, A))
            setups.append(setup)
            b = self.device.asarray(self.loads[0])
            seconds, result = seconds_of(self.device, functools.partial(cg, A, b, M=M, rtol=RTOL))
            assert result.converged
        samples = [
            seconds_of(self.device, functools.partial(cg, A, self.device.asarray(load), M=M, rtol=RTOL))[0]
            for load in self.loads[1 : repeats + 1]
        ]
        of_result = {"iterations": result.iterations, "true_residual": result.true_residual}
        setup = float(np.median(setups[1:] or setups))
        return {"samples": samples or [seconds], "setup_seconds": setup, "setup_samples": setups[1:], **of_result}

    def in_memory(self) -> dict[str, Any]:
        """The stored half in memory."""
        spec = experiment_of(self.nodes, self.device, {}).preconditioner
        [products] = spec.products_per_iteration(streamed=False)
        A = self.beam.matrix("symmetric_bsr", device=self.device)
        return self.with_matrix(A, spec.with_products(products))

    def streamed(self, matrix: str, budget: int, repeats: int = REPEATS) -> dict[str, Any]:
        """The matrix through a ring of slots, stored on the host or assembled on arrival."""
        memory = {"budget": budget, "matrix": matrix, "format": "symmetric_bsr"}
        experiment = experiment_of(self.nodes, self.device, memory)
        rates = machine_rates(self.device, Path(tempfile.gettempdir()))
        plan = plan_experiment(experiment, rates, solves=max(1, repeats))
        print(plan.explain(), flush=True)
        with ExitStack() as resources:
            folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
            store = open_store(experiment, plan, self.device, folder / "matrix", Reporter())
            if hasattr(store, "__enter__"):
                resources.enter_context(store)
            A = StreamedMatrix(store, MemoryBudget(budget), device=self.device, plan=plan)
            with A:
                found = self.with_matrix(A, experiment.preconditioner.with_products(plan.workload.degree), repeats)
                resident = len(plan.resident) / len(plan.index.subdivisions)
                return {**found, "sweeps": A.sweeps, "resident_share": resident, "storage_bytes": plan.storage_nbytes}


def assembly(name: str, nodes: tuple[int, int, int], device: Device, limits: dict[str, float]) -> list[dict[str, Any]]:
    """Return the records of assembling all entries."""
    records = []
    for format_name in ("symmetric_bsr", "sliced_bsr", "bsr"):
        beam = Cantilever(nodes=nodes, dof=3, material=LognormalMaterial(sigma=0.5))
        A, maker = beam.matrix(format_name, device=device), beam.row_maker(format_name, device)
        arrays = {key: array for key, array in A.arrays().items() if array.size}
        parts = {"": arrays, "-values": {"values": arrays["values"]}}
        for label, of_part in parts.items():
            make = functools.partial(maker.make, 0, beam.unknowns, of_part)
            samples = timed(make, device)
            nbytes = sum(array.nbytes for array in of_part.values())
            entry = record(
                f"on_arrival/assembly/{name}-{format_name}{label}",
                samples,
                floor=nbytes / limits["write"],
                nbytes=nbytes,
                peers={},
            )
            records.append(printed(entry, "assembly"))
        del A, maker, arrays, parts, make, of_part
        gc.collect()
    return records


def solve(name: str, nodes: tuple[int, int, int], device: Device, limits: dict[str, float]) -> dict[str, Any]:
    """Return the record of a solve on arrival, and of its peers."""
    of = Solves(nodes, device)
    held = of.in_memory()
    gc.collect()
    budget = int(SHARE * of.nbytes)
    moved = of.streamed("stored", budget)
    gc.collect()
    made = of.streamed("on_arrival", budget)
    for way, found in (("memory", held), ("streamed", moved), ("on arrival", made)):
        print(f"  {way}: set-up {1e3 * found['setup_seconds']:.4g} ms, {found['iterations']} iterations")
    samples = made.pop("samples")
    peers = {"memory": float(np.median(held["samples"])), "streamed": float(np.median(moved["samples"]))}
    entry = record(
        f"on_arrival/solve/{name}",
        samples,
        floor=peers["memory"],
        nbytes=of.nbytes,
        peers=peers,
        peer_setup_seconds={"memory": held["setup_seconds"], "streamed": moved["setup_seconds"]},
        peer_setup_samples={"memory": held["setup_samples"], "streamed": moved["setup_samples"]},
        unknowns=of.beam.unknowns,
        **made,
    )
    return printed(entry, "solve")


def large(path: Path, limits: dict[str, float]) -> dict[str, Any]:
    """Return the record of a whole run of an experiment file on a GPU."""
    experiment = read_experiment(path)
    with tempfile.TemporaryDirectory() as folder, peak_of_pool() as peak:
        began = time.perf_counter()
        outcome = run_experiment(experiment, Path(folder) / "run")
        total = time.perf_counter() - began
        result = outcome.folder.read_json(outcome.folder.result)
        plan = outcome.folder.plan.read_text(encoding="utf-8")
    print(plan)
    assert result["converged"]
    seconds = result["seconds"]
    entry = record(
        f"on_arrival/large/{path.stem}",
        [seconds["solve"]],
        floor=result["iterations"]
        * experiment.preconditioner.products_per_iteration(streamed=True)[0]
        * result["matrix_nbytes"]
        / limits["read"],
        nbytes=result["matrix_nbytes"],
        peers={},
        setup_seconds=seconds["preconditioner"],
        run_seconds=total,
        iterations=result["iterations"],
        true_residual=result["true_residual"],
        unknowns=experiment.cantilever().unknowns,
        pool_peak_bytes=peak[0],
        host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        plan=plan.splitlines(),
    )
    print(f"  set-up {seconds['preconditioner']:.3g} s, the run {total:.3g} s, {peak[0] / 2**30:.2f} GiB of the pool")
    return printed(entry, "solve")


def distorted(nodes: tuple[int, int, int], shape: str, *, shuffled: bool = False) -> ElementMatrix:
    """Return a box with displaced nodes, of hexahedra or six tetrahedra each, perhaps in random order."""
    rng, mesh = np.random.default_rng(7), BoxMesh(nodes)
    points, elements = mesh.coordinates(), mesh.connectivity()
    points += 0.2 * min(mesh.spacing) * rng.uniform(-1, 1, points.shape)
    if shape == "tetrahedra":
        elements = np.stack([elements[:, list(corners)] for corners in SIX], axis=1).reshape(-1, 4)
    held = np.arange(nodes[1] * nodes[2])
    if shuffled:
        permutation = rng.permutation(len(points))
        place = np.argsort(permutation)
        points, elements, held = points[permutation], place[elements][rng.permutation(len(elements))], place[held]
    factors = np.exp(0.5 * rng.standard_normal(len(elements)))
    fixed = (3 * held[:, None] + np.arange(3)).reshape(-1)
    return ElementMatrix(points, elements, material=factors, fixed=fixed)


def assembly_of_elements(
    name: str, nodes: tuple[int, int, int], device: Device, limits: dict[str, float]
) -> list[dict[str, Any]]:
    """Return the records of assembling the stored half of meshes of any shape."""
    records = []
    for shape in ("tetrahedra", "hexahedra"):
        body = distorted(nodes, shape)
        A, maker = body.matrix("symmetric_bsr", device=device), body.row_maker("symmetric_bsr", device)
        make = functools.partial(maker.make, 0, body.shape[0], {"values": A.values})
        samples = timed(make, device)
        nbytes = int(A.values.nbytes)
        of = {"floor": nbytes / limits["write"], "nbytes": nbytes, "peers": {}, "elements_bytes": maker.nbytes}
        records.append(printed(record(f"on_arrival/assembly/{name}-{shape}", samples, **of), "assembly"))
        del A, maker, make, body
        gc.collect()
    return records


def solves_of_elements(name: str, nodes: tuple[int, int, int], device: Device) -> list[dict[str, Any]]:
    """Return the records of solves on a GPU while the elements stay on the host; peers are those with elements on the GPU."""
    records = []
    for shape in ("tetrahedra", "hexahedra"):
        body = distorted(nodes, shape)
        index = index_of(body.symbolic_slabs(SLABS, "symmetric_bsr"), body.shape)
        loads = np.random.default_rng(2).standard_normal((REPEATS + 1, body.shape[0]))
        loads[:, body.fixed > 0] = 0
        seconds, held = {}, {}
        for way, bounds in (("device", None), ("host", index.row_bounds)):
            maker = body.row_maker("symmetric_bsr", device, row_bounds=bounds)
            budget, workload = int(SHARE * index.nbytes), Workload(degree=DEGREE)
            with StreamedMatrix(MadeStore(index, maker), budget, device=device, workload=workload) as A:
                M = smoothed_aggregation(A, block_size=body.dof, coordinates=body.coordinates)
                solves = [functools.partial(cg, A, device.asarray(load), M=M, rtol=RTOL) for load in loads]
                found = [seconds_of(device, one) for one in solves]
                assert all(result.converged for _, result in found)
                seconds[way], held[way] = [one for one, _ in found[1:]], maker.nbytes
                result, moved = found[-1][1], A.plan.sweep_nbytes(0)
            del maker, A, M, solves
            gc.collect()
        entry = record(
            f"on_arrival/elements/{name}-{shape}",
            seconds["host"],
            floor=result.bytes_streamed / (moved / transfer_seconds(device, moved)),
            nbytes=result.bytes_streamed,
            peers={"elements_on_the_device": float(np.median(seconds["device"]))},
            iterations=result.iterations,
            true_residual=result.true_residual,
            elements_bytes=held["device"],
            held_bytes=held["host"],
            bytes_of_a_sweep=moved,
            unknowns=body.shape[0],
        )
        records.append(printed(entry, "solve"))
    return records


def transfer_seconds(device: Device, nbytes: int) -> float:
    """Return the seconds in which this many bytes are copied from page-locked memory."""
    cupy = device.xp
    source, target = cupy.cuda.alloc_pinned_memory(nbytes), cupy.empty(nbytes, dtype=np.uint8)
    kind = cupy.cuda.runtime.memcpyHostToDevice
    return float(
        np.median(timed(lambda: cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.ptr, nbytes, kind, 0), device))
    )


def whole_calls(name: str, side: int, device: Device) -> dict[str, Any]:
    """Return the record of whole calls with a body of tetrahedra in random order, on arrival and of the stored matrix."""
    _calls(name, side // WARM, device)  # compiles
    return printed(_calls(name, side, device), "a call")


def _calls(name: str, side: int, device: Device) -> dict[str, Any]:
    nodes = (side,) * 3
    body = distorted(nodes, "tetrahedra", shuffled=True)
    b = np.random.default_rng(2).standard_normal(body.shape[0])
    b[body.fixed > 0] = 0
    A = body.to_csr()
    memory = int(SHARE * sum(slab.nbytes for slab in body.symbolic_slabs(1, "symmetric_bsr")))
    options: dict[str, Any] = {"device": str(device), "memory": memory, "rtol": RTOL}
    seconds, found = {}, {}
    for way in ("on arrival", "stored"):
        more = {} if way == "on arrival" else {"coordinates": body.coordinates}
        fresh = ElementMatrix(
            body.coordinates, body.connectivity, material=body.factors, fixed=np.flatnonzero(body.fixed)
        )  # nothing is known of it yet
        matrix = fresh if way == "on arrival" else A
        seconds[way], found[way] = seconds_of(device, functools.partial(penstock.solve, matrix, b, **options, **more))
        print(f"  {way}: {seconds[way]:.3g} s\n{found[way].explain()}", flush=True)
    result = found["on arrival"]
    return record(
        f"on_arrival/call/{name}-tetrahedra-shuffled",
        [seconds["on arrival"]],
        floor=result.timings["iterating"],
        nbytes=int(A.data.nbytes + A.indices.nbytes),
        peers={"stored": seconds["stored"]},
        iterations=result.iterations,
        true_residual=float(np.linalg.norm(b - A @ result.x) / np.linalg.norm(b)),
        parts=dict(result.timings),
        unknowns=body.shape[0],
    )


def whole_runs() -> dict[str, Any]:
    """Return the record of ``penstock run`` in processes of their own, from the start to the results, with warm caches."""
    seconds, parts = [], []
    with tempfile.TemporaryDirectory() as folder:
        # As an installed package: its bytecode is there.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = f"{folder}/bytecode"
        for number in range(REPEATS + 1):  # the first one compiles, and measures rates
            output, began = Path(folder) / f"run{number}", time.perf_counter()
            command = [sys.executable, "-m", "penstock", "run", str(RUN), "--output", str(output), "--quiet"]
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - began)
            parts.append(json.loads((output / "result.json").read_text()))
    timings = [of["timings"] for of in parts[1:]]
    medians = {name: float(np.median([of.get(name, 0.0) for of in timings])) for name in timings[0]}
    of = {"floor": medians["iterating"], "nbytes": 0, "peers": {}}
    entry = record(
        f"on_arrival/run/{RUN.stem}",
        seconds[1:],
        **of,
        setup_seconds=medians["assembling"] + medians["setting up"],
        first_seconds=seconds[0],
        parts=medians,
        iterations=parts[-1]["iterations"],
        true_residual=parts[-1]["true_residual"],
    )
    return printed(entry, "a run")


def timed(action: Callable[[], Any], device: Device) -> list[float]:
    """Return the seconds of an action, repeated."""
    action()
    if device.kind == "cuda":
        [samples] = time_in_turn({"action": [action]}, device, repeats=4 * REPEATS).values()
        return list(samples)
    return [seconds_of(device, action)[0] for _ in range(REPEATS)]


def measure_writing(device: Device, nbytes: int) -> float:
    """Return the bytes per second at which memory is written."""
    target = device.xp.empty(nbytes // 8)
    return nbytes / float(np.median(timed(lambda: target.fill(2.0), device)))


def main() -> None:
    """Measure and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--brief", action="store_true", help="leave out the beam")
    parser.add_argument("--large", type=Path, help="an experiment file that is run instead")
    arguments = parser.parse_args()
    device, began = Device.parse(arguments.device), time.perf_counter()
    on_gpu = device.kind == "cuda"
    limits = {"read": measure_memory(device, (4 << 30) if on_gpu else (256 << 20))}
    limits["write"] = measure_writing(device, (4 << 30) if on_gpu else (256 << 20))
    if arguments.large:
        write("on_arrival_large", arguments, limits, [large(arguments.large, limits)])
        return
    side = 128 if on_gpu else 40
    shapes = {
        f"cube{side}-dof3": (side,) * 3,
        f"beam{4 * side}x{side // 4}x{side // 4}-dof3": (4 * side, side // 4, side // 4),
    }
    if on_gpu:
        shapes["cube256-dof3"] = (256,) * 3
    if arguments.brief:
        shapes = dict(list(shapes.items())[:1])
    records = assembly(f"cube{side}-dof3", (side,) * 3, device, limits)
    records += assembly_of_elements(f"cube{side}-dof3", (side,) * 3, device, limits)
    if on_gpu:
        records += solves_of_elements(f"cube{side}-dof3", (side,) * 3, device)
        records.append(whole_runs())
    if not arguments.brief:
        records.append(whole_calls(f"cube{BODY[device.kind]}-dof3", BODY[device.kind], device))
    records += [solve(name, nodes, device, limits) for name, nodes in shapes.items()]
    write("on_arrival", arguments, limits, records)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
