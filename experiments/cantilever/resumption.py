"""What must be the same when a run is resumed: the settings on which its system and the iterations depend."""

from __future__ import annotations

from typing import Any

from penstock.experiments.cantilever.configuration import Experiment
from penstock.spmv import InputError

_SECTIONS = ("model", "material", "load")
_OF_SOLVER = ("preconditioner", "degree", "aggregate_nodes", "options")


def settings_of_system(experiment: Experiment) -> dict[str, Any]:
    """Return these settings as plain values, by section; a checkpoint keeps them."""
    data = experiment.model_dump(mode="json", exclude_none=True)
    solver = {name: data["solver"][name] for name in _OF_SOLVER if name in data["solver"]}
    return {**{name: data[name] for name in _SECTIONS}, "solver": solver}


def check_resumes(experiment: Experiment, settings: dict[str, Any]) -> None:
    """Raise an InputError that names the differences unless a run with these settings may be resumed with this experiment."""
    changes = _changes(settings, settings_of_system(experiment))
    if changes:
        raise InputError(
            f"this run was begun with other settings: {'; '.join(changes[:4])}; undo the change in configuration.yaml, or "
            "start a run of its own"
        )


def _changes(before: Any, now: Any, name: str = "") -> list[str]:
    """Return what differs between two trees of plain values, as sentences."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            change
            for key in dict.fromkeys((*before, *now))
            for change in _changes(before.get(key), now.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if before == now else [f"{name} is {now} and was {before}"]
