"""A matrix that does not fit, by iterations with an image of it in fewer digits, against streaming it in every iteration.

    python benchmarks/precision.py cpu2
    python benchmarks/precision.py h200 --device cuda
    python benchmarks/precision.py h200 --device cuda --large 320      one cube of 320^3 nodes, with storage for a third of it
    python benchmarks/precision.py cpu2 --disk 56 --folder /data       one cube of 56^3 nodes that is streamed from a disk

Cantilevers of random stiffness (lognormal, sigma 0.5) and random loads, to a true relative residual of 1e-8. Records are
``precision/<memory|streamed>/<precision>/<matrix>``; in memory the matrix and its image fit together, and streamed, the matrix
storage may take a share of the bytes of its stored half, ``SHARES``. ``setup_seconds`` make the preconditioner and ``seconds``
are a solve with another load, both with compiled kernels, of a matrix that has been opened. ``link_passes`` are the bytes over
the link for image, set-up and first solve together, in those of the stored half, and ``floor_seconds`` the time to move them. On
a CPU the link is a disk.

On a GPU ``-planes`` records are of a store in host memory whose values are in two planes. A large cube is given as such a store
for its image, as one of whole values for float64, and solved once with each.

With ``--disk`` the records are ``precision/disk/<precision>/<matrix>`` of a store on disk, those with ``-planes`` of one whose
values are in two planes; a GPU streams from the disk, too, as it would if the host had no memory for the matrix.
``link_passes`` are those of the disk then, and peers the same solve with A streamed from the disk in every iteration.
"""

from __future__ import annotations

import functools
import gc
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from peer import seconds_of
from record import argument_parser, printed, record, write

import penstock
from penstock.fem import Cantilever, LognormalMaterial
from penstock.spmv import Device
from penstock.streaming import FileStore, HostPlaneStore, HostStore, StreamedMatrix
from penstock.streaming.measurement.probes import measure_link, measure_memory
from penstock.streaming.stores.base import has_planes
from penstock.streaming.stores.buffers import aligned_buffer
from penstock.streaming.stores.planes import HighWords

RTOL, REPEATS = 1e-8, 5
#: Subdivisions of a store in host memory.
SLABS = 128
#: Of the bytes of the half that is stored in float64.
SHARES = {"float32": 0.55, "int16": 0.32}
# Nodes a side of a cube for which kernels are compiled before a large one is measured.
_SMALL = 64


def measure(
    name: str,
    A: Any,
    points: Any,
    device: Device,
    limits: dict[str, float],
    precision: str,
    memory: int | None,
    label: str = "",
    repeats: int = REPEATS,
) -> dict[str, Any]:
    """Return the record of one matrix, precision and memory."""
    rows = A.index.shape[0] if isinstance(A, HostStore | HostPlaneStore | FileStore) else A.shape[0]
    options: dict[str, Any] = {"device": str(device), "coordinates": points, "memory": memory, "precision": precision}
    loads = np.random.default_rng(2).standard_normal((repeats + 1, rows))
    warm, *others = [device.asarray(load) for load in loads]
    if repeats:
        with penstock.prepare(A, **options) as system:  # compiles, and measures the link
            system.solve(warm, rtol=RTOL)
        del system
        gc.collect()
    with penstock.prepare(A, **options) as system:
        matrix = system.matrix
        solving, first = seconds_of(device, functools.partial(system.solve, warm, rtol=RTOL))
        moved = matrix.bytes_streamed if isinstance(matrix, StreamedMatrix) else 0
        image = 0
        if isinstance(matrix, StreamedMatrix) and precision != "float64":
            assert f"an image of the matrix in {precision}" in system.explain()
            image = system.nbytes - matrix.plan.storage_nbytes
            moved += matrix.plan.resident_nbytes
            moved += _read_for_image(A, matrix, device, image)
        whole = matrix.store.index.nbytes if isinstance(matrix, StreamedMatrix) else matrix.nbytes
        solves = [seconds_of(device, functools.partial(system.solve, other, rtol=RTOL)) for other in others]
        setup = system.timings["set up"]
        opening = system.timings["open"]
    results = [first, *(result for _, result in solves)]
    assert all(result.converged for result in results)
    kind = "memory" if memory is None else "disk" if isinstance(A, FileStore) else "streamed"
    entry = record(
        f"precision/{kind}/{precision}/{name}{label}",
        [seconds for seconds, _ in solves] or [solving],
        floor=moved / limits["link"] if memory is not None else whole / limits["read"],
        nbytes=moved or whole,
        peers={},
        setup_seconds=setup,
        opening_seconds=opening,
        link_passes=moved / whole if memory is not None else 0.0,
        iterations=float(np.median([result.iterations for result in results])),
        passes=float(np.median([result.sweeps for result in results])) if memory is not None else 0.0,
        true_residual=max(result.true_residual for result in results),
        image_bytes=image,
        unknowns=rows,
    )
    print(
        f"  set-up {setup:.3g} s, {entry['iterations']:.0f} iterations, {entry['link_passes']:.2f} passes over the link, "
        f"{entry['passes']:.0f} sweeps a solve"
    )
    return printed(entry, "a solve")


def _read_for_image(A: Any, streamed: StreamedMatrix, device: Device, image_nbytes: int) -> int:
    """Return the bytes that were read to make the image and that ``bytes_streamed`` of the matrix does not count."""
    if has_planes(A):  # of which it has read one
        return int(HighWords(A).index.nbytes)
    moves = isinstance(A, FileStore) or device.kind == "cuda"
    return (
        int(streamed.store.index.part_nbytes("structure")) if moves else image_nbytes
    )  # rounded on the host, where A lies


def large(side: int, device: Device, limits: dict[str, float]) -> list[dict[str, Any]]:
    """Return the records of a cube with storage for a third of its stored half; kernels have been compiled for a small one."""
    records: list[dict[str, Any]] = []
    for nodes in (_SMALL, side):
        beam = Cantilever(nodes=nodes, dof=3, material=LognormalMaterial(sigma=0.5))
        of = (beam.mesh.coordinates(), device, limits)
        for precision, kind in (("int16", HostPlaneStore), ("float64", HostStore)):
            began = time.perf_counter()
            # Slab by slab, and one after the other: there is no memory for two matrices of that size.
            with kind.create(beam.subdivisions(nodes, "symmetric_bsr"), beam.shape) as half:
                nbytes, seconds = half.index.nbytes, time.perf_counter() - began
                print(f"  {nodes}^3 nodes, {nbytes / 1e9:.1f} GB, {half}, in {seconds:.0f} s", flush=True)
                memory = nbytes // 3 if nodes == side else nbytes // 2
                label = "-planes" if kind is HostPlaneStore else ""
                way = (*of, precision, memory, label)
                entry = measure(f"cube{nodes}-dof3", half, *way, repeats=1 if nodes < side else 0)
            if nodes == side:
                records.append(entry)
    return records


def on_disk(side: int, folder: Path | None, device: Device, limits: dict[str, float]) -> list[dict[str, Any]]:
    """Return the records of a cube on a disk, with its values as they are and in two planes."""
    beam = Cantilever(nodes=side, dof=3, material=LognormalMaterial(sigma=0.5))
    name, points, records = f"cube{side}-dof3", beam.mesh.coordinates(), []
    every: dict[str, dict[str, Any]] = {}  # with A read in every iteration
    with (
        tempfile.TemporaryDirectory(dir=folder) as place,
        mock.patch("penstock.driver.opening.nearest", lambda A, *_, **__: A),
    ):
        for label, planes in (("", False), ("-planes", True)):
            began = time.perf_counter()
            slabs = beam.subdivisions(side, "symmetric_bsr")
            with FileStore.create(Path(place) / f"A{label}", slabs, planes=planes) as store:
                print(f"  {store.index}{label}, written in {time.perf_counter() - began:.1f} s", flush=True)
                if not planes:
                    limits["link"] = _reading_rate(store)
                for precision, share in SHARES.items():
                    of = (name, store, points, device, limits, precision, int((share + 0.05) * store.index.nbytes))
                    entry = measure(*of, label, repeats=2)
                    if not planes:
                        every[precision] = measure(*of[:-2], "float64", of[-1], f"-beside-{precision}", repeats=0)
                        records.append(every[precision])
                    records.append({**entry, "peers": {"float64, in every iteration": every[precision]["seconds"]}})
    return records


def _reading_rate(store: FileStore) -> float:
    """Return the bytes a second with which a store is read that has been verified."""
    buffer, seconds = aligned_buffer(max(of.nbytes for of in store.index.subdivisions)), 0.0
    for _ in range(2):
        began = time.perf_counter()
        for number in range(len(store.index.subdivisions)):
            store.read_into(number, buffer)
        seconds = time.perf_counter() - began
    return store.index.nbytes / seconds


def main() -> None:
    """Measure and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", type=int, default=1, help="divides the nodes a side")
    parser.add_argument("--large", type=int, help="nodes a side of a cube that is measured instead")
    parser.add_argument("--disk", type=int, help="nodes a side of a cube on a disk that is measured instead")
    parser.add_argument("--folder", type=Path, help="on that disk, by default that of temporary files")
    arguments = parser.parse_args()
    device, began = Device.parse(arguments.device), time.perf_counter()
    on_gpu = device.kind == "cuda"
    limits = {"read": measure_memory(device, (4 << 30) if on_gpu else (256 << 20))}
    limits["link"] = measure_link(device, 1 << 28) if on_gpu else limits["read"]
    side = (128 if on_gpu else 40) // arguments.scale
    shapes = {
        f"cube{side}-dof3": (side,) * 3,
        f"beam{4 * side}x{side // 4}x{side // 4}-dof3": (4 * side, side // 4, side // 4),
    }
    if arguments.large:
        write("precision_large", arguments, limits, large(arguments.large, device, limits))
        print(f"{time.perf_counter() - began:.0f} s")
        return
    if arguments.disk:
        write("precision_disk", arguments, limits, on_disk(arguments.disk, arguments.folder, device, limits))
        print(f"{time.perf_counter() - began:.0f} s")
        return
    records = []
    for name, nodes in shapes.items():
        beam = Cantilever(nodes=nodes, dof=3, material=LognormalMaterial(sigma=0.5))
        half, points = beam.matrix("symmetric_bsr").nbytes, beam.mesh.coordinates()
        A = beam.matrix("csr").to_csr()
        del beam
        ways: list[tuple[Any, ...]] = [(precision, None) for precision in ("float64", *SHARES)]
        for precision, share in SHARES.items():
            memory = int(share * half)
            ways += [("float64", memory, f"-beside-{precision}"), (precision, memory)]
        records += [measure(name, A, points, device, limits, *way) for way in ways]
        if on_gpu:  # whose host holds the matrix in two planes
            del A
            beam = Cantilever(nodes=nodes, dof=3, material=LognormalMaterial(sigma=0.5))
            with HostPlaneStore.create(beam.subdivisions(SLABS, "symmetric_bsr"), beam.shape) as in_planes:
                for precision, share in SHARES.items():
                    way = (precision, int(share * half), "-planes")
                    records.append(measure(name, in_planes, points, device, limits, *way))
    write("precision", arguments, limits, records)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
