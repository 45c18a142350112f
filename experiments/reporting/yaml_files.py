"""Reads YAML files into pydantic models; every problem is one line that names the key."""

from __future__ import annotations

import difflib
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from penstock.spmv import InputError

__all__ = ["read_configuration"]

Configuration = TypeVar("Configuration", bound=BaseModel)


def read_configuration(path: str | Path, kind: type[Configuration]) -> Configuration:
    """Read a YAML file of a given kind; errors as for :func:`read_experiment`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        advice = "; 'penstock init' writes an example" if kind.__name__ == "Experiment" else ""
        raise InputError(f"{path} must hold sections such as '{next(iter(kind.model_fields))}:'{advice}")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        found = [dict(problem) for problem in error.errors()]
        # A list that lost its only entry to another problem is not too short besides.
        described = [problem for problem in found if problem["type"] != "too_short" or len(found) == 1]
        problems = [f"  {_describe(problem, kind)}" for problem in described or found]
        raise InputError("\n".join([f"{path} cannot be used:", *dict.fromkeys(problems)])) from error


def _describe(problem: dict[str, Any], kind: type[BaseModel]) -> str:
    """Turn one of pydantic's problems into a line for people."""
    path = [str(part) for part in problem["loc"]]
    # For a union, pydantic names the alternative it tried; the key is what a reader knows.
    key = ".".join(
        part
        for part in path
        if "[" not in part and part not in ("int", "constrained-int", "float", "constrained-float")
    )
    if problem["type"] == "extra_forbidden":
        section = _section_at(kind, path[:-1])
        valid = list(section.model_fields)
        near = difflib.get_close_matches(path[-1], valid, n=1, cutoff=0.5)
        advice = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}"
        return f"{key}: unknown key; {advice}"
    if problem["type"] == "missing":
        return f"{key}: is required"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}: {message} (got {problem['input']!r})"


def _section_at(kind: type[BaseModel], path: list[str]) -> type[BaseModel]:
    """Return the model that describes a place in a file; numbers in the path are places in a list."""
    section: Any = kind
    for part in path:
        if not part.isdecimal():
            section = section.model_fields[part].annotation
        section = next((inner for inner in typing.get_args(section) if hasattr(inner, "model_fields")), section)
    return section  # type: ignore[no-any-return]
