"""What ``penstock compare`` measures for an experiment file: in memory, one product a sweep, and many.

    python benchmarks/compare.py cpu2 examples/cantilever.yaml --repeats 3

All ways run in turn, ``--repeats`` times; their medians count. Each solves the same system to the same tolerance, with the
format and cut that the plan chooses for it. ``floor_seconds`` is the bytes moved over the link (of the disk, or page-locked
memory), measured before and after.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from experiment import measured_link
from record import argument_parser, printed, record, write

from penstock.experiments import read_experiment
from penstock.experiments.cantilever.comparison import compare_experiment
from penstock.spmv import Device


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--repeats", type=int, default=1, help="turns of all ways")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats counts turns: 1 or more")
    experiment = read_experiment(arguments.experiment)
    device, mesh = Device.parse(experiment.memory.device), experiment.cantilever().mesh
    with tempfile.TemporaryDirectory(dir=".") as directory:
        links = [measured_link(device, Path(directory))]
        turns: list[dict[str, dict[str, Any]]] = []
        for turn in range(arguments.repeats):
            folder, _ = compare_experiment(experiment, Path(directory) / f"turn{turn}")
            ways = json.loads(folder.records.read_text(encoding="utf-8"))
            turns.append({way["way"]: way for way in ways if "refused" not in way})
        links.append(measured_link(device, Path(directory)))
    matrix = f"{'x'.join(map(str, mesh.node_counts))}-dof{experiment.model.dof}"
    seconds = {name: [ways[name]["seconds"] for ways in turns if name in ways] for name in turns[0]}
    entries = []
    for name, way in turns[0].items():
        nbytes = way["bytes_streamed"]
        peers = {other: statistics.median(taken) for other, taken in seconds.items() if other != name}
        entry = record(f"compare/{matrix}/{name}", seconds[name], floor=nbytes / max(links), nbytes=nbytes, peers=peers)
        entries.append(printed(entry | {"way": way | {"seconds": entry["seconds"]}}, "a solve"))
    write("compare", arguments, {"link_GBps": max(links) / 1e9}, entries)


if __name__ == "__main__":
    main()
