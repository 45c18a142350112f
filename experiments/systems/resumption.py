"""What a solve of a system in files leaves so that it can be resumed: the request, the decisions and the state."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from penstock.driver.open_system import OpenSystem
from penstock.driver.progress import Reporter
from penstock.driver.request import Placement
from penstock.experiments.reporting.atomic import write_json
from penstock.experiments.reporting.checkpoint import Checkpoint, SolverState, read_checkpoint, write_checkpoint
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.systems.solve_request import SolveRequest
from penstock.solvers import IterationRecord, PreconditionerSpec, preconditioner_spec
from penstock.spmv import Device, InputError, StoreError
from penstock.spmv.compilation.watch import seconds_without_compiling
from penstock.streaming import StreamedMatrix

_SECONDS = 60.0


def write_request(folder: ResultsFolder, request: SolveRequest, placement: Placement | None = None) -> None:
    """Write the request and, once they are made, the decisions."""
    write_json(folder.solve, _settings_of(request, placement))


def _settings_of(request: SolveRequest, placement: Placement | None) -> dict[str, Any]:
    options = dataclasses.asdict(request)
    for name in (
        "matrix",
        "right_hand_sides",
        "guess",
        "coordinates",
        "near_null_space",
        "null_space",
    ):  # a solve may be resumed from another folder
        if options[name] not in (None, "constants"):
            path = Path(options[name])
            options[name] = str(path.resolve() if path.exists() else path)
    return {"asked": options, "decided": None if placement is None else _decided(placement)}


def _decided(placement: Placement) -> dict[str, Any]:
    spec = placement.spec
    plain = {of.name: getattr(spec, of.name) for of in dataclasses.fields(spec)}
    options = {name: value for name, value in plain.items() if isinstance(value, int | float | str)}
    return {"preconditioner": spec.name, "options": options, "reordered": placement.order is not None}


def read_request(folder: ResultsFolder) -> tuple[SolveRequest, dict[str, Any]]:
    """Return request and settings of the solve to be resumed, or raise an InputError if the file is missing or damaged."""
    settings = folder.read_json(folder.solve)
    try:
        return TypeAdapter(SolveRequest).validate_python(settings["asked"]), settings
    except (ValidationError, LookupError, TypeError) as error:
        raise InputError(f"{folder.solve} was altered: {error}") from error


def decided_spec(settings: Mapping[str, Any]) -> PreconditionerSpec | None:
    """Return the preconditioner of the solve that is to be resumed, if it got so far."""
    decided = settings.get("decided")
    if decided is None:
        return None
    try:
        return preconditioner_spec(str(decided["preconditioner"]), **dict(decided["options"]))
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"the settings of this solve were altered: {error}") from error


def _of_system(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that may change when a solve is resumed."""
    # Older checkpoints lack these.
    request = {
        "format": "auto",
        "coordinates": None,
        "near_null_space": None,
        "null_space": None,
        **settings.get("asked", {}),
    }
    fixed = {name: value for name, value in request.items() if name not in ("rtol", "maxiter", "guess")}
    return {**settings, "asked": fixed}


class Checkpoints:
    """Writes the state of a solve every minute, and when it ends before it has converged; a full disk does not end the solve."""

    def __init__(self, folder: ResultsFolder, request: SolveRequest, system: OpenSystem, reporter: Reporter) -> None:
        self._folder, self._request, self._system, self._reporter = folder, request, system, reporter
        self._streamed = system.A if isinstance(system.A, StreamedMatrix) else None
        self.before, self._direction = Checkpoint(None), 1
        self._began, self._written = seconds_without_compiling(), time.perf_counter()

    def resumed(self, unknowns: int, device: Device) -> tuple[SolverState | None, int]:
        """Return the state to resume from, and the direction of the next sweep, or raise an InputError if it does not fit."""
        self.before = read_checkpoint(self._folder.checkpoint, unknowns, device)
        if _of_system(self.before.settings) != _of_system(self._settings()):
            raise InputError(
                f"the checkpoint in {self._folder.path} is of a solve with other settings, or another plan fits the memory that "
                "is free now: solve anew, from where it was with --guess"
            )
        return self.before.state, self.before.direction

    def _settings(self) -> dict[str, Any]:
        return _settings_of(self._request, self._system.placement)

    def note(self, record: IterationRecord) -> None:
        """Write a checkpoint if the last one is a minute old."""
        self._direction = 1 if self._streamed is None else self._streamed.direction
        if time.perf_counter() - self._written > _SECONDS:
            self.write(record.state)

    def write(self, state: Any) -> None:
        """Write a checkpoint."""
        before = self.before
        if self._streamed is not None:
            sweeps, moved = self._streamed.sweeps, self._streamed.bytes_streamed
        else:  # a product an iteration
            sweeps, moved = state.iteration - before.sweeps, 0
        seconds = before.seconds + seconds_without_compiling() - self._began
        spent = (before.sweeps + sweeps, before.bytes_streamed + moved, seconds, self._direction)
        try:
            # Building the preconditioner may have changed what was decided.
            write_request(self._folder, self._request, self._system.placement)
            write_checkpoint(self._folder.checkpoint, Checkpoint(state, *spent, settings=self._settings()))
        except StoreError as error:
            self._reporter.text("Warning", str(error))
        self._written = time.perf_counter()
