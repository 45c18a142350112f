"""Reference pages: a page for each public name, the command line from the typer app, the keys of experiment files."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock.experiments import Experiment

PACKAGES = ("spmv", "streaming", "solvers", "distributed", "fem", "experiments", "streaming.testing")


def write(folder: Path) -> None:
    """Write ``api/*.rst``, ``command-line.md`` and ``schema.md`` into a folder."""
    (folder / "api").mkdir(parents=True, exist_ok=True)
    for package in ("penstock", *(f"penstock.{name}" for name in PACKAGES)):
        _write(folder / "api" / f"{package}.rst", _package_page(package))
    _write(folder / "command-line.md", _command_line())
    _write(folder / "schema.md", _schema_page(Experiment.model_json_schema()))


def _write(path: Path, text: str) -> None:
    """Write a page if it changed: Sphinx reads pages again by their times."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _package_page(package: str) -> str:
    """Return a page that lists the public names of a package by what they are."""
    module = importlib.import_module(package)
    kinds: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": [], "Data": []}
    below = importlib.import_module("penstock.spmv").__all__ if package == "penstock" else ()
    for name in sorted(set(module.__all__).difference(below), key=str.lower):
        if name.startswith("__"):
            continue
        thing = getattr(module, name)
        if inspect.isclass(thing):
            kinds["Errors" if issubclass(thing, BaseException) else "Classes"].append(name)
        else:
            kinds["Functions" if inspect.isroutine(thing) else "Data"].append(name)
    summary = (module.__doc__ or "").strip().splitlines()[0]
    lines = [
        package,
        "=" * len(package),
        "",
        summary,
        "",
        f".. module:: {package}",
        f".. currentmodule:: {package}",
        "",
    ]
    for kind, names in kinds.items():
        if names and kind != "Data":
            listed = [f"   {name}" for name in names]
            lines += [kind, "-" * len(kind), "", ".. autosummary::", "   :toctree: names", "", *listed, ""]
        elif names:
            lines += [kind, "-" * len(kind), ""]
            for name in names:
                lines += [f".. autodata:: {name}", "   :no-value:", ""]
    if shared := sorted(set(module.__all__).intersection(below)):  # each has one page only
        listed = [f"   ~spmv.{name}" for name in shared]
        lines += ["From penstock.spmv", "------------------", "", ".. autosummary::", "", *listed, ""]
    return "\n".join(lines)


def _command_line() -> str:
    """Return typer's own description of the command and its subcommands."""
    command = [sys.executable, "-m", "typer", "penstock.commands.app", "utils", "docs", "--name", "penstock"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    options, _, commands = text.partition("\n")[2].partition("**Commands**:")  # the page has a title of its own
    commands = commands[commands.index("## ") :]  # without the list of commands, whose lines are cut short
    return options + re.sub("^penstock ", "    penstock ", commands, flags=re.MULTILINE)  # the examples are code


def _schema_page(schema: dict[str, Any]) -> str:
    """Return a table for each section of an experiment file."""
    lines: list[str] = []
    for name, section in schema["properties"].items():
        target = _definition(section, schema)
        if target is None:
            continue
        lines += [f"## `{name}`", "", _first_line(target), "", *_rows(target, schema)]
    plain = {key: value for key, value in schema["properties"].items() if _definition(value, schema) is None}
    if plain:
        lines += ["## Keys beside the sections", "", *_rows({"properties": plain}, schema)]
    nested = schema["$defs"].get("LoadCase")
    if nested is not None:
        lines += ["## An entry of `load.cases`", "", _first_line(nested), "", *_rows(nested, schema)]
    return "\n".join(lines)


def _rows(section: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    required = set(section.get("required", ()))
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, entry in section["properties"].items():
        default = "required" if key in required else f"`{_plain(entry.get('default'))}`"
        cells = (f"`{key}`", _type(entry, schema), default, entry.get("description", ""))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def _definition(entry: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return the section that an entry refers to, if it is one."""
    reference = entry.get("$ref") or next((one["$ref"] for one in entry.get("allOf", ()) if "$ref" in one), None)
    found = schema["$defs"][reference.rpartition("/")[2]] if reference else None
    return found if found is not None and "properties" in found else None


def _type(entry: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return what a key may hold, in words."""
    if "anyOf" in entry:
        return " or ".join(dict.fromkeys(_type(one, schema) for one in entry["anyOf"]))
    if "$ref" in entry:
        found = schema["$defs"][entry["$ref"].rpartition("/")[2]]
        return "a section" if "properties" in found else _type(found, schema)
    if "enum" in entry:
        return ", ".join(f"`{value}`" for value in entry["enum"])
    if "const" in entry:
        return f"`{entry['const']}`"
    if entry.get("type") == "array":
        items = entry.get("items") or (entry.get("prefixItems") or [{}])[0]
        size = entry.get("maxItems") if entry.get("maxItems") == entry.get("minItems") else None
        return f"list of {size or ''} {_type(items, schema)}".replace("  ", " ")
    words = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "true or false",
        "null": "null",
    }
    return words.get(entry.get("type", ""), entry.get("type", "anything")) + _bounds(entry)


def _bounds(entry: dict[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    stated = [f"{sign} {entry[key]}" for key, sign in signs.items() if key in entry]
    return f" {' and '.join(stated)}" if stated else ""


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _first_line(section: dict[str, Any]) -> str:
    return str(section.get("description", "")).split("\n")[0]
