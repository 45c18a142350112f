"""The command that measures how much of the transfers is hidden behind computation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.commands.command import command
from penstock.commands.terminal import complete, open_terminal, study_directory


@command(
    "penstock overlap examples/overlap/small_cpu.yaml",
    "penstock overlap --resume results/overlap-small_cpu",
)
def overlap(
    file: Annotated[Path | None, typer.Argument(help="Study in YAML; examples/overlap has some.")] = None,
    output: Annotated[Path | None, typer.Option(help="Results folder to make.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the study in this folder.")] = None,
) -> None:
    """Measure which part of the transfers is hidden behind computation; writes a table, a JSON file and figures."""
    from rich.markdown import Markdown

    from penstock.experiments.overlap.configuration import read_overlap_study
    from penstock.experiments.overlap.report import OverlapFolder, run_overlap_study

    folder = OverlapFolder(study_directory("overlap", file, output, resume))
    study = None if file is None else read_overlap_study(file)
    console, reporter = open_terminal()
    hint = f"resume with: penstock overlap --resume {folder.path}"
    complete(lambda: run_overlap_study(study, folder.path, reporter=reporter), hint, console, folder.configuration)
    console.print(Markdown(folder.gains.read_text(encoding="utf-8")))
    console.print(f"Records, figures and timelines are in {folder.path}", highlight=False, soft_wrap=True)
