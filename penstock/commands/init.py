"""The command that writes an experiment file to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.commands.command import command


@command(
    "penstock init beam.yaml",
)
def init(
    file: Annotated[Path, typer.Argument(help="File to write.")] = Path("experiment.yaml"),
) -> None:
    """Write a commented experiment file with every key."""
    from penstock.experiments.cantilever.template import experiment_template
    from penstock.spmv import InputError

    if file.exists():
        raise InputError(f"{file} exists; name another file")
    file.write_text(experiment_template(), encoding="utf-8")
    print(f"wrote {file}; run it with: penstock run {file}")
