"""The command that finds the lowest modes of matrices in files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.commands.command import command
from penstock.commands.terminal import Quiet, in_free_folder, noting_interrupts, open_terminal, refuse_copies
from penstock.host.signals import INTERRUPTED

if TYPE_CHECKING:
    from penstock.experiments import RunOutcome

_K = typer.Argument(metavar="K", help="Stiffness: a file (<matrix programs>), a generated matrix or a store's folder.")
_M = typer.Argument(metavar="[M]", help="Mass: a matrix file, or a .npy of the diagonal; without it the identity.")
_COORDINATES = typer.Option(help="Coordinates of the nodes (.npy, nodes x 2 or 3), for bodies that bend.")
_NEAR_NULL_SPACE = typer.Option(
    help="Vectors that K nearly maps to zero (.npy, n x vectors), instead of --coordinates."
)
_MEMORY = typer.Option(help="For K on the device, such as '2 GiB'; by default what is free. A larger one is streamed.")


@command(
    "penstock modes K.mtx M.mtx -k 10 --coordinates X.npy",
    "penstock modes K.npz masses.npy --memory '8 GiB'",
)
def modes(
    stiffness: Annotated[str, _K],
    mass: Annotated[str | None, _M] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="How many modes.")] = 10,
    tol: Annotated[float, typer.Option(help="Of the residual of K x - lambda M x, relative to lambda M x.")] = 1e-6,
    maxiter: Annotated[int, typer.Option(min=1, help="Iterations at most.")] = 200,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1; auto is the GPU if there is one.")] = "auto",
    memory: Annotated[str | None, _MEMORY] = None,
    coordinates: Annotated[Path | None, _COORDINATES] = None,
    near_null_space: Annotated[Path | None, _NEAR_NULL_SPACE] = None,
    output: Annotated[Path | None, typer.Option(help="Results folder to make.")] = None,
    quiet: Quiet = False,
) -> None:
    """Find the lowest modes of K x = lambda M x for matrices of yours, and leave a results folder."""
    from penstock.experiments.systems.modes_file import ModesRequest, find_modes
    from penstock.files.registry import matrix_name

    refuse_copies()
    console, reporter = open_terminal(quiet)
    known = (coordinates, near_null_space)
    request = ModesRequest(stiffness, mass, k, tol, maxiter, device, memory, *known, progress=not quiet)

    def action() -> RunOutcome:
        default = Path("results") / f"modes-{matrix_name(stiffness)}"
        return in_free_folder(output, default, lambda folder: find_modes(request, folder, reporter=reporter))

    outcome = noting_interrupts(action)
    where = outcome.folder.path
    console.print(f"Results are in {where}, the modes in {where / 'modes.npz'}", highlight=False, soft_wrap=True)
    if outcome.reason.name != "CONVERGED":
        raise typer.Exit(INTERRUPTED if outcome.interrupted else 1)
