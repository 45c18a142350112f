"""What ``penstock compare`` finds for an experiment file: in memory, one product a sweep, and many.

    python benchmarks/compare.py cpu2 examples/cantilever.yaml

Each way solves the same system to the same tolerance, with the format and cut that the plan chooses for it. ``floor_seconds`` is
the bytes moved over the link (of the disk, or page-locked memory), measured before and after.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from experiment import measured_link
from record import argument_parser, record, told, write

from penstock.experiments import read_experiment
from penstock.experiments.comparison import compare_experiment
from penstock.spmv import Device


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("experiment", type=Path)
    arguments = parser.parse_args()
    experiment = read_experiment(arguments.experiment)
    device, mesh = Device.parse(experiment.memory.device), experiment.cantilever().mesh
    with tempfile.TemporaryDirectory(dir=".") as directory:
        links = [measured_link(device, Path(directory))]
        folder, _ = compare_experiment(experiment, Path(directory) / "ways")
        ways: list[dict[str, Any]] = json.loads(folder.records.read_text(encoding="utf-8"))
        links.append(measured_link(device, Path(directory)))
    ended = {way["way"]: way for way in ways if "refused" not in way}
    matrix = f"{'x'.join(map(str, mesh.node_counts))}-dof{experiment.model.dof}"
    entries, seconds = [], {name: way["seconds"] for name, way in ended.items()}
    for name, way in ended.items():
        nbytes = way["bytes_streamed"]
        peers = {other: taken for other, taken in seconds.items() if other != name}
        entry = record(
            f"compare/{matrix}/{name}", [way["seconds"]], floor=nbytes / max(links), nbytes=nbytes, peers=peers
        )
        entries.append(told(entry | {"way": way}, "a solve"))
    write("compare", arguments, {"link_GBps": max(links) / 1e9}, entries)


if __name__ == "__main__":
    main()
