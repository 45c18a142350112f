"""The registry of commands: each is declared in a file of its own, beside the examples that its help ends with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from penstock.spmv.registry import Registry

Function = TypeVar("Function", bound=Callable[..., None])


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Parameters
    ----------
    run : callable
        Its parameters are those of the command, as Typer takes them; its docstring is the help.
    examples : tuple of str
        Lines that a user may type.
    """

    run: Callable[..., None]
    examples: tuple[str, ...]

    @property
    def epilog(self) -> str:
        """The end of its help, a paragraph for each example."""
        return "\n\n".join(["For example:", *self.examples])


#: All commands by name; packages add theirs in the entry point group ``penstock.commands``.
COMMANDS: Registry[str, Command] = Registry("command", "penstock.commands")


def command(*examples: str) -> Callable[[Function], Function]:
    """Register a function as the command of its name."""

    def register(function: Function) -> Function:
        COMMANDS.add(function.__name__.replace("_", "-"), Command(function, examples))
        return function

    return register
