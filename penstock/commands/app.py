"""The ``penstock`` command."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from penstock.commands.examples import examples_of
from penstock.commands.plan import plan, print_plan
from penstock.commands.solve import solve
from penstock.commands.store import store
from penstock.commands.terminal import (
    Quiet,
    Verbose,
    check_inside_working_folder,
    complete,
    free_name,
    in_free_folder,
    noting_interrupts,
    open_terminal,
    refuse_copies,
    say,
    study_directory,
    tell_where,
)
from penstock.commands.warm_up import warm_up
from penstock.host.signals import ended_as_interrupted
from penstock.spmv import PenstockError

if TYPE_CHECKING:
    from penstock.experiments import RunOutcome

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Solve sparse symmetric positive definite systems whose matrix need not fit in device memory.",
)


def main() -> None:
    """Run the command; errors that penstock explains end in one message instead of a traceback."""
    try:
        with ended_as_interrupted():
            app(prog_name="penstock")  # by "python -m penstock" too: completion is that of the command
    except (PenstockError, OSError) as error:
        say("error:", error)
        sys.exit(2)
    except MemoryError as error:
        say("error: not enough memory:", error)
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__

        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    if context.invoked_subcommand != "run":  # which may be of ranks that share a system
        refuse_copies()


@app.command(epilog=examples_of("run"))
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


for command in (plan, solve, store, warm_up):
    name = command.__name__.replace("_", "-")
    app.command(name, epilog=examples_of(name))(command)


@app.command(epilog=examples_of("bench"))
def bench(
    matrices: Annotated[
        list[str], typer.Argument(help="Matrix Market or .npz files, or generated ones such as cube32-dof3.")
    ],
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    columns: Annotated[str, typer.Option(help="Numbers of vectors, such as 1,8,32.")] = "1",
    study: Annotated[
        bool, typer.Option("--study", help="Also compare kernels, partitions, chunks and sorting scopes.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each.")] = 11,
    output: Annotated[Path | None, typer.Option(help="Folder for the JSON and the figures.")] = None,
    operation: Annotated[
        str, typer.Option(help="spmv: products with vectors; trsv: triangular solves; spgemm: A A; galerkin: P' A P.")
    ] = "spmv",
) -> None:
    """Compare products with matrices in all formats, or other operations, and those of other libraries."""
    if operation != "spmv":
        _bench_operation(operation, matrices, device, repeats, output)
        return
    from penstock.experiments.formats.report import (
        BenchFolder,
        BenchRequest,
        bench_products,
        disagreements,
        records_table,
    )
    from penstock.files.registry import read_matrix
    from penstock.spmv import Device

    numbers = columns.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise typer.BadParameter(f"--columns takes whole numbers such as 1,8,32, not {columns!r}")
    request = BenchRequest(Device.parse(device), tuple(int(number) for number in numbers), study, repeats)
    named = [read_matrix(matrix) for matrix in matrices]
    folder = BenchFolder(output or free_name(Path("bench-results")))
    if folder.records.exists():
        raise typer.BadParameter(f"{folder.path} holds the records of another run; name another folder")
    console, reporter = open_terminal()
    hint = f"the records of matrices that were done are in {folder.path}"
    complete(lambda: bench_products(named, folder.path, request, reporter=reporter), hint, console, folder.records)
    result = folder.read()
    console.print(records_table(result["records"]))
    for sentence in disagreements(result["records"]):
        console.print(sentence, highlight=False, soft_wrap=True, markup=False)
    for case in result["refused"]:
        console.print(f"{case['matrix']}: no {case['case']}: {case['reason']}", highlight=False, markup=False)
    console.print(f"memory bandwidth {result['limits']['read_GBps']:.4g} GB/s", highlight=False)
    console.print(f"Records and {len(folder.figures())} figures are in {folder.path}", highlight=False, soft_wrap=True)


def _bench_operation(operation: str, matrices: list[str], device: str, repeats: int, output: Path | None) -> None:
    from penstock.experiments.formats.operations import OPERATIONS, OperationStudy, operations_table
    from penstock.files.registry import read_matrix
    from penstock.spmv import Device

    if operation not in OPERATIONS:
        raise typer.BadParameter(f"--operation is spmv, {', '.join(OPERATIONS)}, not {operation!r}")
    named, directory = [read_matrix(matrix) for matrix in matrices], output or free_name(Path("bench-results"))
    console, reporter = open_terminal()
    study = OperationStudy(operation, named, Device.parse(device), directory, repeats=repeats, reporter=reporter)
    hint = f"the records of matrices that were done are in {directory}"
    complete(lambda: (study.folder, study.run()), hint, console, study.folder.records)
    console.print(operations_table(study.records))
    console.print(f"Records and pictures are in {directory}", highlight=False, soft_wrap=True)


@app.command(epilog=examples_of("overlap"))
def overlap(
    file: Annotated[Path | None, typer.Argument(help="Study in YAML; examples/overlap has some.")] = None,
    output: Annotated[Path | None, typer.Option(help="Results folder to make.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the study in this folder.")] = None,
) -> None:
    """Measure which part of the transfers is hidden behind computation; writes a table, a JSON file and figures."""
    from penstock.experiments.overlap.configuration import read_overlap_study
    from penstock.experiments.overlap.report import OverlapFolder, run_overlap_study

    folder = OverlapFolder(study_directory("overlap", file, output, resume))
    study = None if file is None else read_overlap_study(file)
    console, reporter = open_terminal()
    hint = f"resume with: penstock overlap --resume {folder.path}"
    complete(lambda: run_overlap_study(study, folder.path, reporter=reporter), hint, console, folder.configuration)
    console.print(Markdown(folder.gains.read_text(encoding="utf-8")))
    console.print(f"Records, figures and timelines are in {folder.path}", highlight=False, soft_wrap=True)


@app.command(epilog=examples_of("compare"))
def compare(
    file: Annotated[Path | None, typer.Argument(help="Experiment in YAML, as for 'penstock run'.")] = None,
    output: Annotated[Path | None, typer.Option(help="Results folder to make.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the comparison in this folder.")] = None,
) -> None:
    """Solve one system in memory, streamed without and with overlap, and with several powers of A per sweep."""
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


@app.command(epilog=examples_of("show"))
def show(directory: Annotated[Path, typer.Argument(help="Folder of a finished run.")]) -> None:
    """Print and draw a finished run again, without solving."""
    from penstock.commands.show import show_run

    show_run(directory)


@app.command(epilog=examples_of("init"))
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


@app.command(epilog=examples_of("schema"))
def schema() -> None:
    """Print the JSON schema of experiment files, for editors."""
    from penstock.experiments import Experiment

    print(json.dumps(Experiment.model_json_schema(), indent=2))


@app.command(epilog=examples_of("info"))
def info(
    measure: Annotated[bool, typer.Option(help="Measure memory, disk and link bandwidth (a few seconds).")] = True,
    refresh: Annotated[
        bool, typer.Option(help="Measure the rates anew that plans use, for this folder's disk.")
    ] = False,
) -> None:
    """List devices, formats, kernels and libraries, and measure this machine."""
    from penstock.experiments.reporting.environment import (
        describe_environment,
        measure_machine,
        refresh_rates,
        why_no_gpu,
    )
    from penstock.spmv import registered_kernels

    environment = describe_environment()
    gpus, missing = len(environment["machine"]["gpus"]), why_no_gpu()
    if missing is not None:
        environment["machine"]["gpus"] = f"none: {missing}"
    table = Table(show_header=False, box=None, pad_edge=False)
    for section, entries in environment.items():
        for name, value in entries.items():
            table.add_row(section, name, json.dumps(value) if isinstance(value, list | dict) else str(value))
            section = ""
    title = "kernels"
    for name in sorted({key[0] for key in registered_kernels()}):
        kernels = ", ".join(
            f"{operation} ({kind})" for format_name, operation, kind in registered_kernels() if format_name == name
        )
        table.add_row(title, name, kernels)
        title = ""
    for name, rate in (measure_machine(gpus) if measure else []) + (refresh_rates(gpus) if refresh else []):
        table.add_row("measured", name, rate)
    Console().print(table, markup=False)
