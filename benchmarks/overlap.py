"""The communication-hiding study of a YAML file as a benchmark record, with its figures.

python benchmarks/overlap.py h200 examples/overlap/paper.yaml
python benchmarks/overlap.py cpu2 examples/overlap/small_cpu.yaml
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from record import argument_parser, write
from rich.console import Console

from penstock.experiments import RichReporter
from penstock.experiments.overlap_configuration import read_overlap_study
from penstock.experiments.overlap_report import run_overlap_study


def main() -> None:
    """Measure, print the tables of gains and write the JSON; figures go beside it."""
    parser = argument_parser(__doc__)
    parser.add_argument("studies", type=Path, nargs="+")
    arguments = parser.parse_args()
    figures, limits, records = arguments.output / f"overlap-{arguments.machine}", {}, []
    figures.mkdir(parents=True, exist_ok=True)
    for file in arguments.studies:
        with tempfile.TemporaryDirectory(dir=".") as place:
            folder = run_overlap_study(
                read_overlap_study(file), Path(place) / "study", reporter=RichReporter(Console())
            )
            result = folder.records()
            print(folder.gains.read_text(encoding="utf-8"), flush=True)
            for picture in folder.path.glob("*.png"):
                shutil.copy(picture, figures)
        limits = result["limits"]
        records += [{**record, "limits": limits} for record in result["records"]]
    write("overlap", arguments, limits, records)


if __name__ == "__main__":
    main()
