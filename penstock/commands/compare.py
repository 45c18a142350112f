"""The command that solves one system in several ways."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.commands.command import command
from penstock.commands.terminal import complete, open_terminal, study_directory


@command(
    "penstock compare beam.yaml",
    "penstock compare --resume results/compare-beam",
)
def compare(
    file: Annotated[Path | None, typer.Argument(help="Experiment in YAML, as for 'penstock run'.")] = None,
    output: Annotated[Path | None, typer.Option(help="Results folder to make.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the comparison in this folder.")] = None,
) -> None:
    """Solve one system in memory, streamed without and with overlap, and with several powers of A per sweep."""
    from rich.markdown import Markdown

    from penstock.experiments import read_experiment
    from penstock.experiments.cantilever.comparison import ComparisonFolder, compare_experiment

    folder = ComparisonFolder(study_directory("compare", file, output, resume))
    experiment = None if file is None else read_experiment(file)
    console, reporter = open_terminal()

    def compared() -> tuple[ComparisonFolder, bool]:
        _, completed = compare_experiment(experiment, folder.path, reporter=reporter)
        if folder.table.exists():
            console.print(Markdown(folder.table.read_text(encoding="utf-8")))
        return folder, completed

    complete(compared, f"resume with: penstock compare --resume {folder.path}", console, folder.configuration)
    console.print(
        f"A results folder for each variant, the records and a figure are in {folder.path}",
        highlight=False,
        soft_wrap=True,
    )
    if not all(record.get("converged") for record in folder.read()["records"]):
        raise typer.Exit(1)  # a variant was refused, or did not converge
