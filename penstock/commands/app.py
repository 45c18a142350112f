"""The ``penstock`` command: the frame of all commands, each of which is a file of this folder."""

from __future__ import annotations

import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated

import typer

from penstock import commands
from penstock.commands.command import COMMANDS
from penstock.commands.help_texts import ListingCommand
from penstock.commands.terminal import refuse_copies, say
from penstock.host.signals import ended_as_interrupted
from penstock.spmv import PenstockError

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


for module in iter_modules(commands.__path__):
    import_module(f"{commands.__name__}.{module.name}")  # declares its command
for name in COMMANDS.keys():  # noqa: SIM118 - a registry
    app.command(name, cls=ListingCommand, epilog=COMMANDS[name].epilog)(COMMANDS[name].run)
