"""The command that runs an experiment."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.commands.command import command
from penstock.commands.plan import print_plan
from penstock.commands.terminal import (
    Quiet,
    Verbose,
    check_inside_working_folder,
    free_name,
    in_free_folder,
    noting_interrupts,
    open_terminal,
    refuse_copies,
    tell_where,
)

if TYPE_CHECKING:
    from penstock.experiments import RunOutcome


@command(
    "penstock run beam.yaml",
    "penstock run beam.yaml --dry-run",
    "penstock run --resume results/beam",
)
def run(
    file: Annotated[Path | None, typer.Argument(help="Experiment in YAML; 'penstock init' writes one.")] = None,
    output: Annotated[Path | None, typer.Option(help="Results folder to make.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder, which did not converge.")] = None,
    maxiter: Annotated[
        int | None, typer.Option(min=1, help="With --resume: most iterations, counted from the start.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Solve a cantilever described in YAML and leave a results folder."""
    from penstock.experiments import read_experiment, resume_experiment, run_experiment
    from penstock.experiments.cantilever.ranked_run import runs_on_ranks

    console, reporter = open_terminal(quiet, verbose)
    if resume is not None and (file is not None or output is not None or dry_run):
        raise typer.BadParameter("--resume takes everything from the folder; give neither FILE, --output nor --dry-run")
    if file is not None:
        experiment = read_experiment(file)
        if experiment.parallel is None:
            refuse_copies()
        if dry_run:
            print_plan(experiment, console)
            return
        if output is None:
            check_inside_working_folder(experiment.output.directory)

        def action() -> RunOutcome:
            default, alone = experiment.output.directory / file.stem, experiment.parallel is None
            chosen = output if alone else output or free_name(default)  # ranks cannot try another one by one
            return in_free_folder(chosen, default, lambda folder: run_experiment(experiment, folder, reporter=reporter))
    elif resume is not None:
        if not runs_on_ranks(resume):
            refuse_copies()
        action = partial(resume_experiment, resume, maxiter=maxiter, reporter=reporter)
    else:
        raise typer.BadParameter("name an experiment FILE, or a folder to --resume")

    tell_where(noting_interrupts(action), console)
