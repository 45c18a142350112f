"""Reads YAML files into pydantic models; every problem is one line that names the key."""

from __future__ import annotations

import difflib
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from penstock.spmv import InputError, format_nbytes

Configuration = TypeVar("Configuration", bound=BaseModel)

_MOST_NBYTES, _MOST_VALUES, _DEEPEST, _LONGEST_VALUE = 1 << 20, 10_000, 30, 4_000
#: The command for files that have a key.
_COMMANDS = {"model": "penstock run", "cases": "penstock overlap"}
#: Characters of a wrong value that a message shows.
_SHOWN = 80


def read_configuration(path: str | Path, kind: type[Configuration]) -> Configuration:
    """Read a YAML file of one kind; errors as for :func:`read_experiment`."""
    data = _read_plain_values(Path(path))
    if not isinstance(data, dict):
        advice = "; 'penstock init' writes an example" if kind.__name__ == "Experiment" else ""
        raise InputError(f"{path} must hold sections such as '{next(iter(kind.model_fields))}:'{advice}")
    for key, command in _COMMANDS.items():
        if (
            key in data
            and key not in kind.model_fields
            and not data.keys() & _COMMANDS.keys() & kind.model_fields.keys()
        ):
            raise InputError(f"{path} is a file of another command; try: {command} {path}")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        details = [dict(problem) for problem in error.errors()]
        # A list whose only entry is invalid is not reported as too short as well.
        described = [problem for problem in details if problem["type"] != "too_short" or len(details) == 1]
        problems = [f"  {_describe(problem, kind)}" for problem in described or details]
        raise InputError("\n".join([f"{path} cannot be used:", *dict.fromkeys(problems)])) from error
    except (OverflowError, RecursionError, ValueError) as error:  # of numbers out of any range
        raise InputError(f"{path} cannot be used: {error}") from error


def _read_plain_values(path: Path) -> Any:
    """Return what a YAML file says, if it is as small and as flat as files that people write."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_NBYTES + 1).decode("utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if len(text) > _MOST_NBYTES:
        raise InputError(f"{path} is larger than {format_nbytes(_MOST_NBYTES)}; such files are some lines")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, {}, 1)
        return loader.construct_document(node)
    except InputError as error:
        raise InputError(f"{path} {error}") from None
    except RecursionError:
        raise InputError(f"{path} is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        raise InputError(f"{path} is not valid YAML{_where(error)}") from error
    except Exception as error:  # invalid dates, numbers without digits: PyYAML does not document what it raises
        raise InputError(f"{path} is not valid YAML: {error}") from error


def _where(error: yaml.MarkedYAMLError) -> str:
    """Return line, column and cause in one line; the context, if there is one, says what began earlier."""
    mark = error.problem_mark or error.context_mark
    place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
    began = (
        ""
        if error.context_mark is None or error.context is None
        else (f" ({error.context} that begins in line {error.context_mark.line + 1})")
    )
    return f"{place}: {error.problem}{began}"


def _check_size(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Return the number of values below a node, aliases written out, which may double in every line of a file."""
    if depth > _DEEPEST:
        raise InputError(f"is nested more than {_DEEPEST} levels deep")
    if isinstance(node, yaml.ScalarNode):
        if len(node.value) > _LONGEST_VALUE:
            raise InputError(f"has a value of {len(node.value)} characters in line {node.start_mark.line + 1}")
        return 1
    if id(node) not in known:
        inner = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_check_size(part, known, depth + 1) for part in inner)
    if known[id(node)] > _MOST_VALUES:
        raise InputError(f"has more than {_MOST_VALUES:,} values, its aliases written out")
    return known[id(node)]


def _describe(problem: dict[str, Any], kind: type[BaseModel]) -> str:
    """Return one of pydantic's errors as one readable line."""
    path = [str(part) for part in problem["loc"]]
    # For a union, pydantic names the alternative it tried; the key is what a reader knows.
    key = ".".join(
        part
        for part in path
        if "[" not in part and part not in ("int", "constrained-int", "float", "constrained-float")
    )
    if problem["type"] == "extra_forbidden":
        section = _section_at(kind, path[:-1])
        valid = list(section.model_fields) if section else []
        near = difflib.get_close_matches(path[-1], valid, n=1, cutoff=0.5)
        advice = f"; did you mean {near[0]!r}?" if near else f"; valid keys: {', '.join(valid)}" if valid else ""
        return f"{key}: unknown key{advice}"
    if problem["type"] == "missing":
        return f"{key}: is required"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key else message
    value = repr(problem["input"])
    return f"{key}: {message} (got {value if len(value) <= _SHOWN else value[:_SHOWN] + '...'})"


def _section_at(kind: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    """Return the model that describes a place in a file, or None; numbers in the path are places in a list."""
    section: type[BaseModel] | None = kind
    for part in path:
        if section is not None and part in section.model_fields:
            section = _model_in(section.model_fields[part].annotation)
    return section


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a section, of one that may be left out, or of the entries of a list."""
    if hasattr(annotation, "model_fields"):
        return annotation  # type: ignore[no-any-return]
    return next(filter(None, map(_model_in, typing.get_args(annotation))), None)
