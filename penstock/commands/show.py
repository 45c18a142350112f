"""Prints and draws a finished run again."""

from pathlib import Path

from rich.console import Console

from penstock.experiments import ResultsFolder, read_experiment
from penstock.spmv import InputError, PenstockError


def show_run(directory: Path) -> None:
    """Print plan and result of a finished run, and draw its pictures again."""
    folder = ResultsFolder(directory)
    try:
        _show(folder)
    except PenstockError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        # The files may have been edited, and the code that reads them expects what runs write.
        raise InputError(
            f"files in {directory} were altered or are damaged: {type(error).__name__}: {error}"
        ) from error


def _show(folder: ResultsFolder) -> None:
    console, summary = Console(), folder.summary()
    console.print("[bold]Plan[/bold]")
    print(folder.plan.read_text(encoding="utf-8"))
    console.print("[bold]Result[/bold]")
    print(summary)
    described = folder.configuration.exists()  # a system in files has no body to draw
    for path in folder.draw(read_experiment(folder.configuration).cantilever() if described else None):
        print(f"drawn            {path}")
