"""The command that prints the schema of experiment files."""

from __future__ import annotations

import json

from penstock.commands.command import command


@command(
    "penstock schema > experiment.schema.json",
)
def schema() -> None:
    """Print the JSON schema of experiment files, for editors."""
    from penstock.experiments import Experiment

    print(json.dumps(Experiment.model_json_schema(), indent=2))
