"""A streamed sweep against its two parts, transfer alone and compute alone, measured in turn in one run.

    python benchmarks/stream.py cpu2 --folder DIR     from disk, read around the page cache
    python benchmarks/stream.py h200 --device cuda    from page-locked host memory

Nothing is resident, and, but for the record that says so, sweeps do not turn: every sweep moves the whole matrix.
``floor_seconds`` is the larger of the two parts. A sample is several sweeps, so that what is fetched ahead of the next one
is counted with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from record import argument_parser, record, write

from penstock.fem import Cantilever, LognormalMaterial
from penstock.spmv import CPU, Device
from penstock.spmv.model.timing import time_by_host_clock
from penstock.streaming import FileStore, HostStore, Ring, StreamedMatrix, plan_stream
from penstock.streaming.measurement.probes import measure_disk, measure_link, measure_memory

SLOTS, SWEEPS = 3, 4
LONG_RUN = 1000


@dataclass(frozen=True)
class Case:
    """What is streamed, and how."""

    format: str = "bsr"
    subdivisions: int = 32
    columns: int = 1
    in_place: bool = False
    turning: bool = False

    def name(self, matrix: str) -> str:
        """Name of the record."""
        how = ("/in_place" if self.in_place else "") + ("/turning" if self.turning else "")
        return f"stream/{self.format}/{matrix}/s{self.subdivisions}/k{self.columns}{how}"


CPU_CASES = [Case(), Case(columns=8), Case(columns=16), Case("symmetric_bsr"), Case(turning=True, subdivisions=16)]
GPU_CASES = [
    *(Case(subdivisions=count) for count in (16, 32, 64)),
    Case(in_place=True),
    Case(in_place=True, subdivisions=64),
    Case(turning=True, subdivisions=16),
    Case(columns=16),
    *(Case(name) for name in ("csr", "sliced_bsr", "symmetric_bsr")),
]


@contextlib.contextmanager
def stored(case: Case, beam: Cantilever, device: Device, folder: Path) -> Iterator[FileStore | HostStore]:
    """Put the matrix where it is streamed from."""
    if case.in_place:
        store: FileStore | HostStore = HostStore.from_matrix(beam.matrix(case.format), case.subdivisions)
    elif device.kind == "cuda":
        store = HostStore.create(beam.subdivisions(case.subdivisions, case.format), shape=beam.shape)
    else:
        place = folder / case.name("m").replace("/", "-")
        store = FileStore.create(place, beam.subdivisions(case.subdivisions, case.format), shape=beam.shape)
    with store:
        yield store


def measure(
    case: Case, store: FileStore | HostStore, device: Device, repeats: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the seconds of a sweep with overlap on and off, and of its two parts; and what the plan says."""
    index = store.index
    shape = (index.shape[1],) if case.columns == 1 else (index.shape[1], case.columns)
    x = device.asarray(np.random.default_rng(0).standard_normal(shape))
    out = device.xp.empty_like(x)
    with contextlib.ExitStack() as opened:

        def matrix(overlap: bool) -> StreamedMatrix:
            ring = Ring(slots=SLOTS, overlap=overlap, sweeps="alternate" if case.turning else "cyclic")
            plan = plan_stream(index, None, ring=ring)
            return opened.enter_context(StreamedMatrix(store, plan.storage_nbytes, device=device, plan=plan))

        on, off = matrix(True), matrix(False)
        resident = opened.enter_context(StreamedMatrix(store, index.nbytes, device=device))
        actions = {
            # In the memory that the sweeps use: a disk reads faster into long physical runs, which not all memory has.
            "transfer": lambda: on.sweep(lambda number, slab: None),
            "compute": lambda: resident.apply(x, out),
            "on": lambda: on.apply(x, out),
            "off": lambda: off.apply(x, out),
        }

        def several(action: Callable[[], Any]) -> Callable[[], None]:
            def repeated() -> None:
                for _ in range(SWEEPS):
                    action()

            return repeated

        samples = time_by_host_clock(
            {name: several(action) for name, action in actions.items()}, device, repeats=repeats
        )
        moved = (on.plan.sweep_nbytes(1) + on.plan.sweep_nbytes(2)) // 2
    return {name: [seconds / SWEEPS for seconds in times] for name, times in samples.items()}, {"nbytes": moved}


def memory_in_use(device: Device) -> dict[str, int]:
    """Return the bytes of this process and of the GPU in use."""
    gc.collect()
    with open("/proc/self/statm", encoding="utf-8") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/status", encoding="utf-8") as file:
        locked = next((int(line.split()[1]) << 10 for line in file if line.startswith(("VmPin", "VmLck"))), 0)
    used = {"host_resident": resident, "host_locked": locked}
    if device.kind == "cuda":
        device.synchronize()
        free, total = device.xp.cuda.runtime.memGetInfo()
        used["device"] = total - free
    return used


def long_run(store: FileStore | HostStore, device: Device, matrix_name: str) -> dict[str, Any]:
    """Return a record of what 1,000 sweeps add to the memory that 10 of them left in use."""
    x = device.xp.ones(store.index.shape[1])
    plan = plan_stream(store.index, None, ring=Ring(slots=SLOTS))
    with StreamedMatrix(store, plan.storage_nbytes, device=device, plan=plan) as A:
        out = A @ x
        for _ in range(9):
            A.apply(x, out)
        before = memory_in_use(device)
        for _ in range(LONG_RUN):
            A.apply(x, out)
        after = memory_in_use(device)
    growth = {kind: after[kind] - before[kind] for kind in before}
    print(f"{LONG_RUN} sweeps added {growth} bytes", flush=True)
    return {"name": f"stream/memory/{matrix_name}", "sweeps": LONG_RUN, "before": before, "growth": growth}


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nodes", type=int, default=None, help="nodes a side of the cube; default 64, or 128 on a GPU")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the store is written; default: a temporary place"
    )
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    device = Device.parse(arguments.device)
    nodes = arguments.nodes or (64 if device == CPU else 128)
    beam = Cantilever(nodes, dof=3, material=LognormalMaterial(0.5, 1))
    matrix = f"cube{nodes}-dof3"
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        limits = {"read_GBps": measure_memory(device, 256 << 20 if device == CPU else 8 << 30) / 1e9}
        limits["link_GBps"] = (measure_disk(Path(folder))[0] if device == CPU else measure_link(device, 1 << 30)) / 1e9
        for case in CPU_CASES if device == CPU else GPU_CASES:
            with stored(case, beam, device, Path(folder)) as store:
                samples, moved = measure(case, store, device, arguments.repeats)
            medians = {part: statistics.median(values) for part, values in samples.items()}
            floor = max(medians["transfer"], medians["compute"])
            # A disk's rate drifts with what it did before: there, the link is the transfer measured in the same turns.
            link = moved["nbytes"] / medians["transfer"] if device == CPU else limits["link_GBps"] * 1e9
            entry = record(
                case.name(matrix),
                samples["on"],
                floor=floor,
                **moved,
                peers={"overlap_off": medians["off"]},
                matrix_bytes=store.index.nbytes,
                transfer_alone_seconds=medians["transfer"],
                compute_alone_seconds=medians["compute"],
                times_floor=medians["on"] / floor,
                link_fraction=moved["nbytes"] / medians["on"] / link,
                part_samples=samples,
            )
            records.append(entry)
            print(
                f"{entry['name']}: {moved['nbytes'] / 1e9:.3f} GB, transfer {medians['transfer'] * 1e3:.2f} ms, compute "
                f"{medians['compute'] * 1e3:.2f} ms, off {medians['off'] * 1e3:.2f} ms, on {medians['on'] * 1e3:.2f} ms = "
                f"{entry['times_floor']:.3f} x floor, {100 * entry['link_fraction']:.1f} % of the link",
                flush=True,
            )
        small = Cantilever(24 if device == CPU else 64, dof=3)
        with stored(Case(subdivisions=16), small, device, Path(folder)) as store:
            records.append(long_run(store, device, f"cube{small.mesh.node_counts[0]}-dof3"))
    write("stream", arguments, limits, records)


if __name__ == "__main__":
    main()
