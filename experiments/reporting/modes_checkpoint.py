"""Checkpoints of a search for modes: the vectors that iterate, and the modes that earlier blocks found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from penstock.experiments.reporting.checkpoint import read_sealed, write_sealed
from penstock.solvers import ModesState
from penstock.spmv import CPU, InputError


def write_modes_checkpoint(path: Path, state: ModesState, settings: dict[str, Any], seconds: float) -> None:
    """Write a checkpoint as ``.npz``; if that fails or is interrupted, the old one stays complete."""
    contents: dict[str, Any] = {
        "settings": np.array(json.dumps(settings, sort_keys=True)),
        "seconds": np.array(seconds),
        "vectors": CPU.asarray(state.vectors),
        "values": np.asarray(state.values),
        "found_values": np.asarray(state.found_values),
    }
    if state.found is not None:
        contents["found"] = CPU.asarray(state.found)
    write_sealed(path, contents)


def read_modes_checkpoint(path: Path, unknowns: int) -> tuple[ModesState, dict[str, Any], float]:
    """Return the state, the settings and the seconds spent, or raise an InputError if the file is damaged."""
    with read_sealed(path) as data:
        state = ModesState(data["vectors"], data["values"].copy(), data.get("found"), data["found_values"])
        if state.vectors.ndim != 2 or state.vectors.shape != (unknowns, len(state.values)):
            raise InputError(f"it holds vectors of shape {state.vectors.shape}, not of {unknowns} unknowns")
        return state, json.loads(str(data["settings"])), float(data["seconds"])
