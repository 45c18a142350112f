"""What commands share: the terminal, folders for results, and the end of a command that is interrupted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console

from penstock.host.launcher import launched_copies, launched_rank
from penstock.host.signals import INTERRUPTED

if TYPE_CHECKING:
    from penstock.driver.progress import Reporter
    from penstock.experiments import RunOutcome

Outcome = TypeVar("Outcome")


def say(title: str, error: BaseException) -> None:
    """Print an error and its notes on the standard error stream; one that all ranks have, on the first rank."""
    if launched_rank() and getattr(error, "on_ranks", 0) >= launched_copies():
        return
    Console(stderr=True).print(f"[bold red]{title}[/bold red]", end=" ")
    print(error, *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)


#: Options of commands for the amount of output.
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say only where the results are.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say how it goes every second, instead of every minute.")
]


def open_terminal(quiet: bool = False, verbose: bool = False) -> tuple[Console, Reporter]:
    """Return a console, wide if the output is no terminal, and a reporter that prints on it."""
    from penstock.driver.progress import Reporter, RichReporter

    if launched_rank():  # only the first rank prints
        return Console(quiet=True), Reporter()
    console = Console(width=None if sys.stdout.isatty() else 160)
    return console, Reporter() if quiet else RichReporter(console, 1.0 if verbose else None)


def refuse_copies() -> None:
    """Refuse to run as several copies that do not know each other."""
    from penstock.spmv import InputError

    if (copies := launched_copies()) > 1:
        error = InputError(
            f"a launcher started {copies} copies of this command, which would all do the same work and write to the same "
            "folder; start it alone, or let ranks share an experiment by parallel: mpi in its file, or a system by a script "
            "with penstock.distributed"
        )
        error.on_ranks = copies  # type: ignore[attr-defined]
        raise error


def check_inside_working_folder(directory: Path) -> None:
    """Refuse results outside the working folder that a file asks for, which may be a stranger's."""
    from penstock.spmv import InputError

    if not directory.resolve().is_relative_to(Path.cwd()):
        raise InputError(
            f"output.directory {directory} lies outside the working folder {Path.cwd()}, which a file may not choose; name the "
            "results folder on the command line: --output FOLDER"
        )


def study_directory(command: str, file: Path | None, output: Path | None, resume: Path | None) -> Path:
    """Return the folder of a study: the one to resume, the one named by --output, or a free name."""
    if (file is None) == (resume is None) or (resume is not None and output is not None):
        raise typer.BadParameter("name a study FILE, with --output or not, or a folder to --resume")
    return resume or output or free_name(Path("results") / f"{command}-{file.stem if file else ''}")


def complete(
    action: Callable[[], tuple[Outcome, bool]], hint: str, console: Console, partial: Path | None = None
) -> Outcome:
    """Return the outcome of a long action; if it does not complete, print ``hint``: how to resume, or where partial results are.

    The action returns its outcome, and whether it completed: if not, it was stopped on request, and the command ends with exit
    code 130. The hint is added to errors if the file ``partial``, which marks partial results, exists.
    """

    def noted() -> tuple[Outcome, bool]:
        try:
            return action()
        except BaseException as error:
            if partial is not None and partial.exists():
                error.add_note(f"the work so far is saved; {hint}")
            raise

    outcome, completed = noting_interrupts(noted)
    if not completed:
        console.print(f"Stopped on request; {hint}", highlight=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED)
    return outcome


def tell_where(outcome: RunOutcome, console: Console) -> None:
    """Print where the results of a run are, or how to resume it, and exit with the code of its outcome."""
    hint = f"resume with: penstock run --resume {outcome.folder.path}"
    if outcome.interrupted:
        console.print(f"Stopped on request; {hint}", highlight=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED)
    console.print(f"Results are in {outcome.folder.path}", highlight=False, soft_wrap=True)
    if outcome.reason.name == "MAXITER":
        console.print(f"Not converged; {hint} --maxiter N", highlight=False, soft_wrap=True)
    if outcome.reason.name != "CONVERGED":
        raise typer.Exit(1)


def noting_interrupts(action: Callable[[], Outcome]) -> Outcome:
    """Return the result of an action; print the notes of an interrupt, which typer would not, and end with exit code 130."""
    try:
        return action()
    except KeyboardInterrupt as error:
        say("interrupted", error)
        raise typer.Exit(INTERRUPTED) from error


def in_free_folder(output: Path | None, default: Path, action: Callable[[Path], Outcome]) -> Outcome:
    """Return the outcome of an action in the requested folder, or in a free one with a name like the default.

    Another process may take a free folder first; then the next one is taken.
    """
    from penstock.experiments.reporting.ownership import FolderTakenError

    while output is None:
        with contextlib.suppress(FolderTakenError):
            return action(free_name(default))
    return action(output)


def free_name(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3 ... that does not exist or is empty."""
    candidate, number = path, 1
    while candidate.exists() and any(candidate.iterdir()):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
