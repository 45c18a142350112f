"""The command that prints and draws a finished run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.commands.command import command


@command(
    "penstock show results/beam",
)
def show(directory: Annotated[Path, typer.Argument(help="Folder of a finished run.")]) -> None:
    """Print and draw a finished run again, without solving."""
    from penstock.spmv import InputError, PenstockError

    try:
        _show(directory)
    except PenstockError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        # The files may have been edited, and the code that reads them expects what runs write.
        raise InputError(
            f"files in {directory} were altered or are damaged: {type(error).__name__}: {error}"
        ) from error


def _show(directory: Path) -> None:
    from penstock.experiments import ResultsFolder, read_experiment

    folder = ResultsFolder(directory)
    console, summary = Console(), folder.summary()
    console.print("[bold]Plan[/bold]")
    print(folder.plan.read_text(encoding="utf-8"))
    console.print("[bold]Result[/bold]")
    print(summary)
    described = folder.configuration.exists()  # a system in files has no body to draw
    for path in folder.draw(read_experiment(folder.configuration).cantilever() if described else None):
        print(f"drawn            {path}")
