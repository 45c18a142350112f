"""Help lists what is registered, and only when it is shown: a shell that completes names does not wait for it."""

import pytest
import typer
from typer.testing import CliRunner

from penstock.commands.app import app
from penstock.files.registry import programs
from penstock.solvers import METHODS, PRECONDITIONERS
from penstock.spmv import format_names


def shown(command):
    """Return the help of a command in one line."""
    ended = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "400"})
    assert ended.exit_code == 0, ended.output
    return " ".join(ended.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("command", "listed"),
    [
        ("solve", lambda: f"auto, or one of {', '.join(PRECONDITIONERS.keys())}."),
        ("solve", lambda: f"auto, which is the best one, or one of {', '.join(format_names())}."),
        ("solve", lambda: f"Matrix in a file ({programs('matrix')})"),
        ("solve", lambda: f"Vectors in a file ({programs('right-hand sides')})"),
        ("store", lambda: f"({programs('matrix')})"),
        ("store", lambda: f"or one of {', '.join(format_names())};"),
        ("bench", lambda: f"Files of {programs('matrix')}, or generated ones"),
    ],
)
def test_names_in_help_are_those_that_are_registered(command, listed):
    assert listed() in shown(command)


def test_a_method_that_takes_indefinite_matrices_says_so():
    text = shown("solve")
    for name in METHODS.keys():  # noqa: SIM118 - a registry
        beyond = "" if METHODS[name].definite else "; A need not be positive definite"
        assert f"{name} ({METHODS[name].label}{beyond})" in text


def test_nothing_is_listed_where_names_are_only_completed():
    command = typer.main.get_command(app).commands["solve"]
    context = command.make_context("solve", [], resilient_parsing=True)
    assert any("<preconditioners>" in (getattr(param, "help", None) or "") for param in command.get_params(context))
