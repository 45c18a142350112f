"""The command that stores matrices in files, so that they can be streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.commands.command import command
from penstock.commands.terminal import Quiet, Verbose, noting_interrupts, open_terminal

_SOURCES = typer.Argument(help="One file, or several with some of the rows each (<matrix programs>); or a store.")
_FORMAT = "auto, which finds dense blocks, or one of <formats>; the symmetric one keeps the upper half of the matrix."
_PLANES = typer.Option(
    "--planes/--no-planes",
    help="Store values in two planes of 32 bits, of which images in fewer digits read one; by default those of symmetric_bsr.",
)
_MEMORY = typer.Option(help="For the entries of Matrix Market files, which may come in any order.")


@command(
    "penstock store A.petsc A-store",
    "penstock store part1.npz part2.npz A-store",
    "penstock store A-store half --format symmetric_bsr --slab '64 MiB'",
)
def store(
    sources: Annotated[list[str], _SOURCES],
    path: Annotated[Path, typer.Argument(metavar="STORE", help="Folder to make.")],
    format_name: Annotated[str, typer.Option("--format", help=_FORMAT)] = "auto",
    block_size: Annotated[
        int | None, typer.Option(help="Rows of the dense blocks; by default they are detected.")
    ] = None,
    slab: Annotated[str, typer.Option(help="About the size of a subdivision.")] = "16 MiB",
    planes: Annotated[bool | None, _PLANES] = None,
    memory: Annotated[str, _MEMORY] = "1 GiB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a store of that name.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Store a matrix in files so that it can be streamed, without reading it whole; or cut and convert a store anew."""
    from penstock.files.to_store import store_files
    from penstock.spmv import format_nbytes

    console, reporter = open_terminal(quiet, verbose)
    total = sum(file.stat().st_size for source in sources for file in _files(Path(source)))

    def stored() -> str:
        with reporter.stage("store") as stage:
            made = store_files(
                sources,
                path,
                format=format_name,
                block_size=block_size or "auto",
                slab=slab,
                planes=planes,
                memory=memory,
                overwrite=overwrite,
                progress=lambda written: stage.advance(
                    written / max(total, written), f"{format_nbytes(written)} written"
                ),
            )
        with made:
            return repr(made)

    console.print(noting_interrupts(stored)[1:-1], highlight=False, soft_wrap=True, markup=False)


def _files(path: Path) -> list[Path]:
    """Return a file, or the files of a folder."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
