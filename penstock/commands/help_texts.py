"""Help texts that list what is registered, made when they are asked for: the registries take long to load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand


def _preconditioners() -> str:
    from penstock.solvers import PRECONDITIONERS

    return ", ".join(PRECONDITIONERS.keys())


def _methods() -> str:
    from penstock.solvers import METHODS

    beyond = {True: "", False: "; A need not be positive definite"}
    methods = {name: METHODS[name] for name in METHODS.keys()}  # noqa: SIM118 - a registry
    return ", ".join(f"{name} ({method.label}{beyond[method.definite]})" for name, method in methods.items())


def _formats() -> str:
    from penstock.spmv import format_names

    return ", ".join(format_names())


def _matrix_programs() -> str:
    from penstock.files.registry import programs

    return programs("matrix")


def _vector_programs() -> str:
    from penstock.files.registry import programs

    return programs("right-hand sides")


#: What stands in help texts for names that are registered.
_LISTS: dict[str, Callable[[], str]] = {
    "<preconditioners>": _preconditioners,
    "<methods>": _methods,
    "<formats>": _formats,
    "<matrix programs>": _matrix_programs,
    "<vector programs>": _vector_programs,
}


class ListingCommand(TyperCommand):
    """A command in whose help ``<preconditioners>`` and the like stand for the names that are registered."""

    def get_params(self, ctx: Any) -> Any:
        """Return arguments and options, their help texts complete unless a shell only completes their names."""
        params: list[Any] = list(super().get_params(ctx))
        for param in params if not ctx.resilient_parsing else ():
            text: str = getattr(param, "help", None) or ""
            for mark in _LISTS:
                if mark in text:
                    text = text.replace(mark, _LISTS[mark]())
                    param.help = text
        return params
