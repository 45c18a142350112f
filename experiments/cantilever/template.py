"""Writes an experiment file with all keys, generated from the schema so that it is always complete."""

from __future__ import annotations

import textwrap
import typing
from typing import Any

import yaml
from pydantic import BaseModel

from penstock.experiments.cantilever.configuration import Experiment

# Values for a small first run; all other keys are commented out, with their defaults.
_CHOSEN: dict[str, Any] = {
    "model.nodes": [65, 17, 17],
    "model.dof": 3,
    "material.kind": "lognormal",
    "load.kind": "shear",
    "solver.rtol": 1e-8,
    "solver.preconditioner": "auto",
    "memory.device": "cpu",
    "memory.budget": "8 MiB",
    "output.directory": "results",
}


def experiment_template() -> str:
    """Return the commented example that ``penstock init`` writes."""
    lines = ["# An experiment for penstock: penstock run FILE.yaml. Keys that are commented out have their defaults."]
    for section, info in Experiment.model_fields.items():
        if info.description is not None:  # a key without a section
            lines += ["", *textwrap.wrap(info.description, 100, initial_indent="# ", subsequent_indent="# ")]
            lines.append(f"# {section}: {_yaml_value(info.get_default())}")
            continue
        model = typing.cast(type[BaseModel], info.annotation)
        properties = model.model_json_schema()["properties"]
        lines += ["", f"# {(model.__doc__ or '').strip()}", f"{section}:"]
        for key, field in model.model_fields.items():
            lines += textwrap.wrap(field.description or "", 100, initial_indent="  # ", subsequent_indent="  # ")
            choices = _choices(properties.get(key, {}))
            if choices:
                lines.append(f"  # one of: {', '.join(choices)}")
            chosen = _CHOSEN.get(f"{section}.{key}")
            value = field.get_default(call_default_factory=True) if chosen is None else chosen
            lines.append(f"  {'# ' if chosen is None else ''}{key}: {_yaml_value(value)}")
    text = "\n".join(lines) + "\n"
    Experiment.model_validate(yaml.safe_load(text))
    return text


def _yaml_value(value: Any) -> str:
    plain = value if isinstance(value, str | int | float | list | dict | bool | None) else str(value)
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip()


def _choices(schema: dict[str, Any]) -> list[str]:
    """Return the words that a key allows, by its JSON schema."""
    parts = [schema, *schema.get("anyOf", ())]
    return [str(choice) for part in parts for choice in part.get("enum", ())]
