"""A command of one's own, ``penstock diagonal A.mtx``: how far the entries on the diagonal of a matrix are apart."""

from typing import Annotated

import typer

from penstock.commands.command import command


@command("penstock diagonal A.mtx")
def diagonal(matrix: Annotated[str, typer.Argument(help="Matrix in a file (<matrix programs>).")]) -> None:
    """Print the smallest and the largest entry on the diagonal of a matrix."""
    from penstock.files.registry import read_matrix

    entries = read_matrix(matrix).matrix.diagonal()
    print(f"{entries.min():g} to {entries.max():g}")
