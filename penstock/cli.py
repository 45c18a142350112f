"""The ``penstock`` command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from penstock import __version__
from penstock.spmv import PenstockError

__all__ = ["app", "main"]

Outcome = TypeVar("Outcome")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Solve sparse symmetric positive definite systems whose matrix need not fit in device memory.",
)
_INTERRUPTED = 130


def main() -> None:
    """Run the command; errors that penstock explains end in one message instead of a traceback."""
    try:
        app()
    except (PenstockError, OSError) as error:
        _say("error:", error)
        sys.exit(2)
    except MemoryError as error:
        _say("error: not enough memory:", error)
        sys.exit(2)


def _say(title: str, error: BaseException) -> None:
    Console(stderr=True).print(f"[bold red]{title}[/bold red]", end=" ")
    print(error, *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    file: Annotated[Path | None, typer.Argument(help="Experiment in YAML; 'penstock init' writes one.")] = None,
    output: Annotated[Path | None, typer.Option(help="Results folder to make.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder that did not converge.")
    ] = None,
    maxiter: Annotated[
        int | None, typer.Option(min=1, help="With --resume: iterations at most, from the start.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
) -> None:
    """Solve a cantilever described in YAML and leave a results folder."""
    from penstock.experiments import RichReporter, plan_experiment, read_experiment, resume_experiment, run_experiment
    from penstock.experiments.matrix_storage import measure_rates
    from penstock.spmv import Device

    console = Console()
    reporter = RichReporter(console)
    if resume is not None:
        if file is not None or output is not None or dry_run:
            raise typer.BadParameter(
                "--resume takes everything from the folder; give neither FILE, --output nor --dry-run"
            )
        outcome = _noting_interrupts(lambda: resume_experiment(resume, maxiter=maxiter, reporter=reporter))
    elif file is None:
        raise typer.BadParameter("name an experiment FILE, or a folder to --resume")
    else:
        experiment = read_experiment(file)
        if dry_run:
            rates = measure_rates(experiment, Device.parse(experiment.memory.device), Path.cwd())
            print(plan_experiment(experiment, rates).explain())
            return
        directory = output or _free_name(experiment.output.directory / file.stem)
        outcome = _noting_interrupts(lambda: run_experiment(experiment, directory, reporter=reporter))
    path = outcome.folder.path
    if outcome.interrupted:
        console.print(f"Stopped on request. Go on with: penstock run --resume {path}", highlight=False, soft_wrap=True)
        raise typer.Exit(_INTERRUPTED)
    console.print(f"Results are in {path}", highlight=False, soft_wrap=True)
    if outcome.reason.name == "MAXITER":
        console.print(f"Go on with: penstock run --resume {path} --maxiter N", highlight=False, soft_wrap=True)
    if outcome.reason.name != "CONVERGED":
        raise typer.Exit(1)


@app.command()
def solve(
    matrix: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="Matrix Market or .npz file, a generated matrix such as cube32-dof3, or the folder of a FileStore.",
        ),
    ],
    right_hand_sides: Annotated[
        Path | None,
        typer.Argument(metavar="[B]", help="Matrix Market or .npy file; without it A times ones is solved for."),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns of B, such as 0,2-4; without B, how many to make up.")
    ] = None,
    precond: Annotated[str, typer.Option(help="auto, none, jacobi, block_jacobi or chebyshev.")] = "auto",
    products: Annotated[
        int | None, typer.Option(help="With chebyshev: products with A an iteration, odd; by default the plan chooses.")
    ] = None,
    rtol: Annotated[float, typer.Option(help="Of the true residual, relative to B.")] = 1e-8,
    maxiter: Annotated[int | None, typer.Option(min=1, help="Iterations at most; 10 n by default.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    memory: Annotated[
        str | None, typer.Option(help="For the matrix on the device, such as '2 GiB'; a larger one is streamed.")
    ] = None,
    guess: Annotated[Path | None, typer.Option(help="Solution to start from (.npy).")] = None,
    output: Annotated[Path | None, typer.Option(help="Results folder to make.")] = None,
) -> None:
    """Solve A X = B for a symmetric positive definite matrix of yours and leave a results folder."""
    from penstock.experiments import RichReporter
    from penstock.experiments.solve_file import SolveRequest, solve_file
    from penstock.experiments.system_files import matrix_name

    request = SolveRequest(matrix, right_hand_sides, columns, precond, products, rtol, maxiter, device, memory, guess)
    directory = output or _free_name(Path("results") / f"solve-{matrix_name(matrix)}")
    console = Console()
    outcome = _noting_interrupts(lambda: solve_file(request, directory, reporter=RichReporter(console)))
    solution = outcome.folder.solution
    console.print(f"Results are in {outcome.folder.path}, the solution in {solution}", highlight=False, soft_wrap=True)
    if outcome.reason.name == "CONVERGED":
        return
    if outcome.reason.name in ("STOPPED", "MAXITER"):
        title = "Stopped on request. " if outcome.interrupted else ""
        other = "" if output is None else "another --output and "
        console.print(
            f"{title}Go on with the same command and {other}--guess {solution}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    raise typer.Exit(_INTERRUPTED if outcome.interrupted else 1)


def _noting_interrupts(action: Callable[[], Outcome]) -> Outcome:
    """Do something and, if it is interrupted, say what was kept; typer would end without a word."""
    try:
        return action()
    except KeyboardInterrupt as error:
        _say("interrupted", error)
        raise typer.Exit(_INTERRUPTED) from error


def _free_name(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3 ... that is not taken."""
    candidate, number = path, 1
    while candidate.exists() and any(candidate.iterdir()):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


@app.command()
def bench(
    matrices: Annotated[
        list[str], typer.Argument(help="Matrix Market or .npz files, or generated ones such as cube32-dof3.")
    ],
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    columns: Annotated[str, typer.Option(help="Numbers of vectors, such as 1,8,32.")] = "1",
    study: Annotated[
        bool, typer.Option("--study", help="Also kernels, partitions, chunks and sorting scopes.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each.")] = 11,
    output: Annotated[Path | None, typer.Option(help="Folder for the JSON and the figures.")] = None,
) -> None:
    """Multiply by matrices in every format, and by what others offer, and say which is the fastest."""
    from penstock.experiments import RichReporter
    from penstock.experiments.matrix_files import read_matrix
    from penstock.experiments.product_report import bench_products, records_table, write_bench, write_records
    from penstock.spmv import Device

    numbers = columns.split(",")
    if not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise typer.BadParameter(f"--columns takes whole numbers such as 1,8,32, not {columns!r}")
    Device.parse(device)  # before matrices are read, which may take long
    console = Console(width=None if sys.stdout.isatty() else 160)
    reporter = RichReporter(console)
    named = [read_matrix(matrix) for matrix in matrices]
    folder = output or _free_name(Path("bench-results"))
    if (folder / "bench.json").exists():
        raise typer.BadParameter(f"{folder} holds the records of another run; name another folder")
    folder.mkdir(parents=True, exist_ok=True)  # a place that cannot be written to is better known now than at the end
    counts = [int(number) for number in numbers]

    def compare() -> dict[str, Any]:
        try:
            return bench_products(
                named,
                device=device,
                columns=counts,
                study=study,
                repeats=repeats,
                reporter=reporter,
                keep=lambda so_far: write_records(so_far, folder),
            )
        except KeyboardInterrupt as error:
            error.add_note(f"the records of matrices that were done are in {folder}")
            raise

    result = _noting_interrupts(compare)
    console.print(records_table(result["records"]))
    for case in result["refused"]:
        console.print(f"{case['matrix']}: no {case['case']}: {case['reason']}", highlight=False, markup=False)
    console.print(f"memory bandwidth {result['limits']['read_GBps']:.4g} GB/s", highlight=False)
    paths = write_bench(result, folder)
    console.print(f"Records and {len(paths) - 1} figures are in {paths[0].parent}", highlight=False, soft_wrap=True)


@app.command()
def overlap(
    file: Annotated[Path | None, typer.Argument(help="Study in YAML; examples/overlap has some.")] = None,
    output: Annotated[Path | None, typer.Option(help="Results folder to make.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the study in this folder.")] = None,
) -> None:
    """Measure how much of the transfers hides behind computation, and leave a table, a JSON file and figures."""
    from penstock.experiments import RichReporter
    from penstock.experiments.overlap_configuration import read_overlap_study
    from penstock.experiments.overlap_report import run_overlap_study

    if (file is None) == (resume is None) or (resume is not None and output is not None):
        raise typer.BadParameter("name a study FILE, with --output or not, or a folder to --resume")
    study = None if file is None else read_overlap_study(file)
    directory = resume or output or _free_name(Path("results") / f"overlap-{file.stem if file else ''}")
    console = Console(width=None if sys.stdout.isatty() else 160)

    def measure() -> Any:
        try:
            return run_overlap_study(study, directory, reporter=RichReporter(console))
        except BaseException as error:
            if (directory / "configuration.yaml").exists():
                error.add_note(f"what was measured is kept; go on with: penstock overlap --resume {directory}")
            raise

    folder = _noting_interrupts(measure)
    console.print(Markdown(folder.gains.read_text(encoding="utf-8")))
    console.print(f"Records, figures and timelines are in {folder.path}", highlight=False, soft_wrap=True)


@app.command()
def compare(
    file: Annotated[Path | None, typer.Argument(help="Experiment in YAML, as for 'penstock run'.")] = None,
    output: Annotated[Path | None, typer.Option(help="Results folder to make.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the comparison in this folder.")] = None,
) -> None:
    """Solve one system in memory, streamed without and with overlap, and with many products a sweep."""
    from penstock.experiments import RichReporter, read_experiment
    from penstock.experiments.comparison import compare_experiment

    if (file is None) == (resume is None) or (resume is not None and output is not None):
        raise typer.BadParameter("name an experiment FILE, with --output or not, or a folder to --resume")
    experiment = None if file is None else read_experiment(file)
    directory = resume or output or _free_name(Path("results") / f"compare-{file.stem if file else ''}")
    console = Console(width=None if sys.stdout.isatty() else 160)
    hint = f"go on with: penstock compare --resume {directory}"

    def solved() -> Any:
        try:
            return compare_experiment(experiment, directory, reporter=RichReporter(console))
        except BaseException as error:
            if (directory / "experiment.yaml").exists():
                error.add_note(f"what was done is kept; {hint}")
            raise

    folder, ended = _noting_interrupts(solved)
    if folder.table.exists():
        console.print(Markdown(folder.table.read_text(encoding="utf-8")))
    if not ended:
        console.print(f"Stopped on request; {hint}", highlight=False, soft_wrap=True)
        raise typer.Exit(_INTERRUPTED)
    console.print(
        f"A results folder for each way, the records and a figure are in {folder.path}", highlight=False, soft_wrap=True
    )
    if not all(record.get("converged") for record in json.loads(folder.records.read_text(encoding="utf-8"))):
        raise typer.Exit(1)  # a way was refused, or did not converge


@app.command()
def show(directory: Annotated[Path, typer.Argument(help="Folder of a finished run.")]) -> None:
    """Print and draw a finished run again, without solving."""
    from penstock.experiments import ResultsFolder, read_experiment

    folder, console = ResultsFolder(directory), Console()
    summary = folder.summary()
    console.print("[bold]Plan[/bold]")
    print(folder.plan.read_text(encoding="utf-8"))
    console.print("[bold]Result[/bold]")
    print(summary)
    described = folder.configuration.exists()  # a system in files has no body to draw
    for path in folder.draw(read_experiment(folder.configuration).cantilever() if described else None):
        print(f"drawn            {path}")


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="File to write.")] = Path("experiment.yaml"),
) -> None:
    """Write a commented experiment file with every key."""
    from penstock.experiments.template import experiment_template
    from penstock.spmv import InputError

    if file.exists():
        raise InputError(f"{file} exists; name another file")
    file.write_text(experiment_template(), encoding="utf-8")
    print(f"wrote {file}; run it with: penstock run {file}")


@app.command()
def schema() -> None:
    """Print the JSON schema of experiment files, for editors."""
    from penstock.experiments import Experiment

    print(json.dumps(Experiment.model_json_schema(), indent=2))


@app.command()
def info(
    measure: Annotated[bool, typer.Option(help="Measure memory, disk and link bandwidth (a few seconds).")] = True,
) -> None:
    """List devices, formats, kernels and libraries, and measure this machine."""
    from penstock.experiments.environment import describe_environment
    from penstock.spmv import registered_kernels

    environment = describe_environment()
    table = Table(show_header=False, box=None, pad_edge=False)
    for section, entries in environment.items():
        for name, value in entries.items():
            table.add_row(section, name, json.dumps(value) if isinstance(value, list | dict) else str(value))
            section = ""
    for name in sorted({key[0] for key in registered_kernels()}):
        kernels = ", ".join(
            f"{operation} ({kind})" for format_name, operation, kind in registered_kernels() if format_name == name
        )
        table.add_row("kernels", name, kernels)
    if measure:
        for name, rate in _measurements(environment["machine"]["gpus"]):
            table.add_row("measured", name, rate)
    Console().print(table)


def _measurements(gpus: list[Any]) -> list[tuple[str, str]]:
    from penstock.experiments.bandwidth import measure_disk, measure_link, measure_memory
    from penstock.spmv import CPU, Device

    def rate(measurement: Callable[[], float], device: Device = CPU) -> str:
        with device.current():
            return f"{measurement() / 1e9:.3g} GB/s"

    rows = [("host memory, read", rate(lambda: measure_memory(CPU)))]
    try:
        disk, direct = measure_disk(Path.cwd())
        rows.append(
            (
                "disk here, read",
                f"{disk / 1e9:.3g} GB/s" + (" around the page cache" if direct else " through the page cache"),
            )
        )
    except (OSError, PenstockError) as error:
        rows.append(("disk here, read", f"not measured: {error}"))
    for number in range(len(gpus)):
        device = Device("cuda", number)
        rows.append((f"{device} memory, read", rate(partial(measure_memory, device, 1 << 30), device)))
        rows.append((f"{device} link", rate(partial(measure_link, device), device)))
    return rows
