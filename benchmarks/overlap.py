"""A communication-hiding study of a YAML file as benchmark records, with its figures.

python benchmarks/overlap.py h200 examples/overlap/paper.yaml
python benchmarks/overlap.py h200 examples/overlap/block_krylov.yaml --name overlap_block_krylov
python benchmarks/overlap.py cpu2 examples/overlap/small_cpu.yaml
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from record import argument_parser, write
from rich.console import Console

from penstock.experiments import RichReporter
from penstock.experiments.overlap.configuration import read_overlap_study
from penstock.experiments.overlap.report import run_overlap_study


def main() -> None:
    """Measure, print the table of gains and write the JSON; figures go beside it."""
    parser = argument_parser(__doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("--name", default="overlap", help="of the JSON file, before the machine's")
    arguments = parser.parse_args()
    figures = arguments.output / f"{arguments.name}-{arguments.machine}"
    figures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=".") as place:
        study = read_overlap_study(arguments.study)
        folder, _ = run_overlap_study(study, Path(place) / "study", reporter=RichReporter(Console()))
        result = folder.read()
        print(folder.gains.read_text(encoding="utf-8"), flush=True)
        for picture in folder.path.glob("*.png"):
            shutil.copy(picture, figures)
    write(arguments.name, arguments, result["limits"], result["records"])


if __name__ == "__main__":
    main()
