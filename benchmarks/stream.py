"""A streamed sweep against its two parts, transfer alone and compute alone, measured in turn in one run.

    python benchmarks/stream.py cpu2 --folder DIR     from disk, read around the page cache
    python benchmarks/stream.py h200 --device cuda    from page-locked host memory

Nothing is resident: the budget holds the ring of slots only. ``floor_seconds`` is the larger of the two parts.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from record import argument_parser, interleaved, record, write

from penstock.experiments.bandwidth import measure_disk, measure_link, measure_memory
from penstock.fem import Cantilever, LognormalMaterial
from penstock.spmv import CPU, Device
from penstock.streaming import FileStore, HostStore, StreamedMatrix
from penstock.streaming.budget import aligned_buffer

SLOTS = 3


def measure(store: FileStore | HostStore, device: Device, columns: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of a sweep with overlap on and off, and of its two parts."""
    index, numbers = store.index, range(len(store.index.subdivisions))
    largest = max(subdivision.nbytes for subdivision in index.subdivisions)
    shape = (index.shape[1],) if columns == 1 else (index.shape[1], columns)
    x = device.asarray(np.random.default_rng(0).standard_normal(shape))
    out = device.xp.empty_like(x)
    budget = SLOTS * largest
    resident = StreamedMatrix(store, index.nbytes, device=device)  # everything resident: compute alone
    on = StreamedMatrix(store, budget, device=device, slots=SLOTS)
    off = StreamedMatrix(store, budget, device=device, slots=SLOTS, overlap=False)

    if isinstance(store, HostStore):
        slots = [device.xp.empty(largest, dtype=np.uint8) for _ in range(2)]
        stream = device.xp.cuda.get_current_stream()

        def transfer() -> None:
            for number in numbers:
                piece = store.piece(number)
                slots[number % 2].data.copy_from_host_async(piece.ctypes.data, piece.nbytes, stream)
    else:
        buffers = [aligned_buffer(largest) for _ in range(2)]

        def transfer() -> None:
            for number in numbers:
                store.read_into(number, buffers[number % 2])

    actions: dict[str, Any] = {
        "transfer": transfer,
        "compute": lambda: resident.apply(x, out),
        "on": lambda: on.apply(x, out),
        "off": lambda: off.apply(x, out),
    }
    samples = interleaved(actions, device, repeats=repeats)
    for matrix in (resident, on, off):
        matrix.close()
    return samples


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nodes", type=int, default=None, help="nodes a side of the cube; default 64, or 128 on a GPU")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the store is written; default: a temporary place"
    )
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    device = Device.parse(arguments.device)
    nodes = arguments.nodes or (64 if device == CPU else 128)
    beam = Cantilever(nodes, dof=3, material=LognormalMaterial(0.5, 1))
    cases = [(32, 1), (32, 8), (32, 16)] if device == CPU else [(16, 1), (32, 1), (64, 1), (32, 16)]
    records = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        limits = {"read_GBps": measure_memory(device, 256 << 20 if device == CPU else 8 << 30) / 1e9}
        limits["link_GBps"] = (measure_disk(Path(folder))[0] if device == CPU else measure_link(device, 1 << 30)) / 1e9
        for count, columns in cases:
            name = f"cube{nodes}-dof3/s{count}/k{columns}"
            store: FileStore | HostStore
            if device == CPU:
                store = FileStore.create(
                    Path(folder) / name.replace("/", "-"), beam.subdivisions(count), shape=beam.shape
                )
            else:
                store = HostStore.create(beam.subdivisions(count), shape=beam.shape)
            with store:
                samples = measure(store, device, columns, arguments.repeats)
                medians = {part: statistics.median(values) for part, values in samples.items()}
                floor, nbytes = max(medians["transfer"], medians["compute"]), store.index.nbytes
                # A disk's rate drifts with what it did before: there, the link is the transfer measured in the same turns.
                link = nbytes / medians["transfer"] if device == CPU else limits["link_GBps"] * 1e9
                entry = record(
                    f"stream/bsr/{name}",
                    samples["on"],
                    floor=floor,
                    nbytes=nbytes,
                    peers={"overlap_off": medians["off"]},
                    transfer_alone_seconds=medians["transfer"],
                    compute_alone_seconds=medians["compute"],
                    times_floor=medians["on"] / floor,
                    link_fraction=nbytes / medians["on"] / link,
                    part_samples=samples,
                )
                records.append(entry)
                print(
                    f"{entry['name']}: transfer {medians['transfer'] * 1e3:.2f} ms, compute {medians['compute'] * 1e3:.2f} ms, "
                    f"off {medians['off'] * 1e3:.2f} ms, on {medians['on'] * 1e3:.2f} ms = {entry['times_floor']:.3f} x floor, "
                    f"{100 * entry['link_fraction']:.1f} % of the link",
                    flush=True,
                )
    write("stream", arguments, limits, records)


if __name__ == "__main__":
    main()
