"""What all results folders have in common: made only where nothing is overwritten, and read with helpful errors."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from penstock.experiments.reporting.atomic import write_text
from penstock.experiments.reporting.ownership import LOCK_NAME, FolderTakenError, owned
from penstock.spmv import InputError, StoreError

#: What a user can do if an output folder is in use.
NEW_FOLDER_ADVICE = "choose another --output, or resume there with --resume"


class BaseFolder:
    """A results folder; subclasses name the files in it."""

    #: Name of the YAML file with the requested settings.
    configuration_name: ClassVar[str] = "configuration.yaml"
    #: What to add if a file is missing, and if it is damaged.
    missing_advice: ClassVar[str] = ""
    damaged_advice: ClassVar[str] = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.configuration = path / self.configuration_name
        self._is_made_here = False

    @contextlib.contextmanager
    def made(self, advice: str = NEW_FOLDER_ADVICE) -> Iterator[None]:
        """Make the folder, and own it while the block runs, or raise a FolderTakenError if it is not free."""
        if self.path.exists() and not self.path.is_dir():
            raise FolderTakenError(f"{self.path} is not an empty folder; {advice}")
        self._is_made_here = not self.path.exists()
        self.make_parents()
        with owned(self.path, advice):
            if any(entry.name != LOCK_NAME for entry in self.path.iterdir()):
                raise FolderTakenError(f"{self.path} is not an empty folder; {advice}")
            yield

    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """Own the folder of an earlier run while the block runs; an InputError if there was no run, or the folder is in use."""
        if not self.path.is_dir():
            raise InputError(f"{self.path} is no folder; there is nothing to resume")
        with owned(self.path, "wait until it has ended"):
            yield

    def make_parents(self) -> None:
        """Make the folder, and those above it, where they do not exist."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise StoreError(f"cannot make {self.path}: {getattr(error, 'strerror', None) or error}") from error

    def remove(self, *, but: Path | None = None) -> None:
        """Remove the files of a run, and the folder if this run made it and nothing else is in it; all else stays."""
        for entry in self.made_by_runs():
            if entry != but:
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        entry.unlink()
        if but is None and self._is_made_here:
            with contextlib.suppress(OSError):  # not empty, but for the lock of this process
                (self.path / LOCK_NAME).unlink()
                self.path.rmdir()

    def made_by_runs(self) -> list[Path]:
        """Return what a run may have made in the folder, partial files included."""
        named = {entry.name for entry in vars(self).values() if isinstance(entry, Path) and entry != self.path}
        try:
            entries = sorted(self.path.iterdir())
        except OSError:
            return []
        return [entry for entry in entries if entry.name in named or entry.name.partition(".partial")[0] in named]

    def write_configuration(self, data: Mapping[str, Any]) -> None:
        """Write the requested settings."""
        write_text(self.configuration, yaml.safe_dump(dict(data), sort_keys=False))

    def read_json(self, file: Path) -> Any:
        """Read a JSON file of this folder, or raise an InputError if it does not exist or is damaged."""
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{self.path} holds no {file.name}{self.missing_advice}") from None
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {file}: {error}{self.damaged_advice}") from error
