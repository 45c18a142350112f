"""What all results folders have in common: made only where nothing is overwritten, and read with helpful errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from penstock.experiments.reporting.atomic import write_text
from penstock.spmv import InputError, StoreError

__all__ = ["NEW_FOLDER_ADVICE", "BaseFolder"]

#: What a user can do if an output folder is in use.
NEW_FOLDER_ADVICE = "choose another --output, or resume there with --resume"


class BaseFolder:
    """A results folder; subclasses name the files in it.

    Parameters
    ----------
    path : path
    """

    #: Name of the YAML file that says what was asked for.
    configuration_name: ClassVar[str] = "configuration.yaml"
    #: What to add if a file is missing, and if it is damaged.
    missing_advice: ClassVar[str] = ""
    damaged_advice: ClassVar[str] = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.configuration = path / self.configuration_name

    def make(self, advice: str = NEW_FOLDER_ADVICE) -> None:
        """Make the folder.

        Raises
        ------
        InputError
            If it is a file or not empty; the message ends with the advice.
        StoreError
            If it cannot be made.
        """
        if self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
            raise InputError(f"{self.path} is not an empty folder; {advice}")
        self.make_parents()

    def make_parents(self) -> None:
        """Make the folder, and those above it, where they do not exist."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make {self.path}: {error.strerror or error}") from error

    def write_configuration(self, data: Mapping[str, Any]) -> None:
        """Write what was asked for."""
        write_text(self.configuration, yaml.safe_dump(dict(data), sort_keys=False))

    def read_json(self, file: Path) -> Any:
        """Read a JSON file of this folder.

        Raises
        ------
        InputError
            If it does not exist or is damaged.
        """
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{self.path} holds no {file.name}{self.missing_advice}") from None
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {file}: {error}{self.damaged_advice}") from error
