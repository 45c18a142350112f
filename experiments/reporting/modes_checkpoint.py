"""Checkpoints of a search for modes: the vectors that iterate, and the modes that earlier blocks found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from penstock.experiments.reporting.atomic import write_file
from penstock.experiments.reporting.checkpoint import checksum
from penstock.files.arrays import ArrayArchive
from penstock.solvers import ModesState
from penstock.spmv import CPU, InputError


def write_modes_checkpoint(path: Path, state: ModesState, settings: dict[str, Any], seconds: float) -> None:
    """Write a checkpoint as ``.npz``; if that fails or is interrupted, the old one stays complete."""
    contents = {
        "settings": np.array(json.dumps(settings, sort_keys=True)),
        "seconds": np.array(seconds),
        "vectors": CPU.asarray(state.vectors),
        "values": np.asarray(state.values),
        "found_values": np.asarray(state.found_values),
    }
    if state.found is not None:
        contents["found"] = CPU.asarray(state.found)
    contents["checksum"] = np.array(checksum(contents))
    write_file(path, lambda file: np.savez(file, **contents), sync=True)


def read_modes_checkpoint(path: Path, unknowns: int) -> tuple[ModesState, dict[str, Any], float]:
    """Return the state, the settings and the seconds spent, or raise an InputError if the file is damaged."""
    if not path.exists():
        raise InputError(f"{path.parent} has no {path.name}; nothing to resume")
    try:
        with ArrayArchive(path) as archive:
            data = {name: archive.read(name) for name in archive.contents}
        if int(data.pop("checksum", np.array(-1))) != checksum(data):
            raise InputError("it does not match its checksum")
        state = ModesState(data["vectors"], data["values"].copy(), data.get("found"), data["found_values"])
        if state.vectors.ndim != 2 or state.vectors.shape != (unknowns, len(state.values)):
            raise InputError(f"it holds vectors of shape {state.vectors.shape}, not of {unknowns} unknowns")
        return state, json.loads(str(data["settings"])), float(data["seconds"])
    except Exception as error:  # whatever is in a file that anybody may have written
        cause = str(error) or type(error).__name__
        raise InputError(f"{path} cannot be resumed from: {cause}; start the run anew") from error
