"""The command that solves a system in files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from penstock.commands.command import command
from penstock.commands.terminal import Quiet, Verbose, in_free_folder, noting_interrupts, open_terminal
from penstock.host.signals import INTERRUPTED

if TYPE_CHECKING:
    from penstock.experiments import RunOutcome


_A = typer.Argument(
    metavar="A",
    help="Matrix in a file (<matrix programs>), a generated one such as cube32-dof3, or a store's folder.",
)
_B = typer.Argument(metavar="[B]", help="Vectors in a file (<vector programs>); without it A times ones is solved for.")
_COLUMNS = typer.Option(help="Columns of B, such as 0,2-4; without B, how many to make up.")
_PRECOND = typer.Option(help="auto, or one of <preconditioners>.")
_METHOD = typer.Option(help="auto, which is cg, or one of <methods>.")
_PRECISION = typer.Option(
    help="Of the values held in memory of a matrix that does not fit: float32, int16, or auto, which is the first of these "
    "that fits. With float64 the matrix is streamed in every iteration."
)
_DEGREE = typer.Option(help="With chebyshev: products with A in an iteration, odd; by default the plan chooses.")
_MEMORY = typer.Option(
    help="For the matrix on the device, such as '2 GiB'; by default what is free. A larger one is streamed."
)
_COORDINATES = typer.Option(
    help="Coordinates of the nodes (.npy, nodes x 2 or 3): the rigid motions of that body make a coarse level."
)
_NEAR_NULL_SPACE = typer.Option(
    help="Vectors that A nearly maps to zero (.npy, n x vectors), which make a coarse level; instead of --coordinates."
)
_NULL_SPACE = typer.Option(
    help="What a singular A maps to zero: 'constants', or vectors (.npy, n x vectors); removed from b and x."
)
_FORMAT = typer.Option("--format", help="Storage format: auto, which is the best one, or one of <formats>.")
_VERIFY = typer.Option(
    help="How iterations with fewer digits end: bound, by a bound of the true residual, or norm, by a pass that computes it."
)
_OF_RESUMING = {"resume", "maxiter", "quiet", "verbose"}
_RESUME = typer.Option(help="Resume the solve in this folder; with --maxiter, up to this many iterations.")


def _options_of_new_solves(context: typer.Context) -> list[str]:
    """Return the options on the command line that do not apply to a resumed solve."""
    options = {parameter.name or "": parameter.opts[0] for parameter in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in options.keys() - _OF_RESUMING}
    return sorted(options[name] for name, source in sources.items() if source and source.name == "COMMANDLINE")


@command(
    "penstock solve A.mtx b.npy",
    "penstock solve A.mtx b.npy --coordinates X.npy",
    "penstock solve A.petsc b.petsc --memory '8 GiB' --dry-run",
    "penstock solve cube32-dof3 --precond chebyshev --format symmetric_bsr",
    "penstock solve --resume results/solve-A",
)
def solve(
    context: typer.Context,
    matrix: Annotated[str | None, _A] = None,
    right_hand_sides: Annotated[Path | None, _B] = None,
    columns: Annotated[str | None, _COLUMNS] = None,
    precond: Annotated[str, _PRECOND] = "auto",
    degree: Annotated[int | None, _DEGREE] = None,
    method: Annotated[str, _METHOD] = "auto",
    precision: Annotated[str, _PRECISION] = "auto",
    verify: Annotated[str, _VERIFY] = "bound",
    rtol: Annotated[float, typer.Option(help="Of the true residual, relative to B.")] = 1e-8,
    maxiter: Annotated[int | None, typer.Option(min=1, help="Iterations at most; 10 n by default.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1; auto is the GPU if there is one.")] = "auto",
    memory: Annotated[str | None, _MEMORY] = None,
    guess: Annotated[Path | None, typer.Option(help="Solution to start from (.npy).")] = None,
    format_name: Annotated[str, _FORMAT] = "auto",
    coordinates: Annotated[Path | None, _COORDINATES] = None,
    near_null_space: Annotated[Path | None, _NEAR_NULL_SPACE] = None,
    null_space: Annotated[str | None, _NULL_SPACE] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    output: Annotated[Path | None, typer.Option(help="Results folder to make.")] = None,
    resume: Annotated[Path | None, _RESUME] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Solve A X = B for a symmetric matrix of yours, as a rule positive definite, and leave a results folder."""
    from penstock.experiments.systems.solve_file import plan_file, resume_solve, solve_file
    from penstock.experiments.systems.solve_request import SolveRequest
    from penstock.files.registry import matrix_name

    if (matrix is None) == (resume is None):
        raise typer.BadParameter("name a matrix A, or a folder to --resume, which takes everything else from there")
    if resume is not None and (refused := _options_of_new_solves(context)):
        raise typer.BadParameter(
            f"--resume takes everything but --maxiter from the folder; leave out {', '.join(refused)}"
        )
    console, reporter = open_terminal(quiet, verbose)
    request = None
    if matrix is not None:
        modes = (coordinates, near_null_space, null_space)
        options = (precond, degree, rtol, maxiter, device, memory, guess, format_name, *modes)
        request = SolveRequest(
            matrix, right_hand_sides, columns, *options, method=method, precision=precision, verify=verify
        )
    if request is not None and dry_run:
        planned = noting_interrupts(lambda: plan_file(request, output or Path("results"), reporter=reporter))
        console.print(planned, highlight=False, markup=False, soft_wrap=True)
        return

    def action() -> RunOutcome:
        if request is None:
            assert resume is not None, "there is one or the other"
            return resume_solve(resume, maxiter=maxiter, reporter=reporter)
        default = Path("results") / f"solve-{matrix_name(request.matrix)}"
        return in_free_folder(output, default, lambda folder: solve_file(request, folder, reporter=reporter))

    _finish(noting_interrupts(action), output, console)


def _finish(outcome: RunOutcome, output: Path | None, console: Console) -> None:
    """Print where the results of a solve are, or how to resume it, and exit with the code of its outcome."""
    where = outcome.folder
    console.print(f"Results are in {where.path}, the solution in {where.solution}", highlight=False, soft_wrap=True)
    if outcome.reason.name == "CONVERGED":
        return
    if outcome.reason.name in ("STOPPED", "MAXITER"):
        title = "Stopped on request. " if outcome.interrupted else ""
        if where.checkpoint.exists():
            more = "" if outcome.interrupted else " --maxiter N"
            advice = f"Resume with: penstock solve --resume {where.path}{more}"
        else:  # right-hand sides in several blocks
            advice = (
                f"Repeat the command with {'' if output is None else 'another --output and '}--guess {where.solution}"
            )
        console.print(f"{title}{advice}", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(INTERRUPTED if outcome.interrupted else 1)
