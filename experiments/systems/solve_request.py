"""The request for a solve: a system in files, and how to solve it; and what a results folder keeps of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from penstock.driver.argument_checks import checked_precision
from penstock.driver.request import Placement
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.systems.system_files import parse_columns, parse_count
from penstock.solvers import PreconditionerSpec, method_named, preconditioner_spec
from penstock.spmv import Device, InputError, format_named, parse_nbytes


@dataclass(frozen=True)
class SolveRequest:
    """What to solve, and how.

    Parameters
    ----------
    matrix : str
        What :func:`read_matrix` takes, or the folder of a :class:`FileStore`.
    right_hand_sides : path, optional
        What :func:`read_right_hand_sides` takes. Without it, A times ones is solved for.
    columns : str, optional
        Which columns of the file, such as ``0,2-4``; without a file, how many right-hand sides to make up.
    preconditioner : str
        As for :func:`penstock.solve`.
    degree : int, optional
        With ``chebyshev``: products with A in an iteration, odd; by default the plan chooses.
    rtol : float
    maxiter : int, optional
    device : str
    memory : int or str, optional
        For matrix storage on the device that computes; by default what is free there.
    guess : path, optional
        ``.npy`` of the shape of the solution, from which to start.
    format : str
        Registered name of the storage format, or ``auto``.
    coordinates, near_null_space : path, optional
        ``.npy`` of the coordinates of the nodes, or of the near-null space, as :func:`penstock.solve` takes them.
    null_space : str, optional
        ``constants``, or the path of the ``.npy`` of the vectors that A maps to zero.
    method, precision, verify : str
        As for :func:`penstock.solve`.
    """

    matrix: str
    right_hand_sides: Path | None = None
    columns: str | None = None
    preconditioner: str = "auto"
    degree: int | None = None
    rtol: float = 1e-8
    maxiter: int | None = None
    device: str = "auto"
    memory: int | str | None = None
    guess: Path | None = None
    format: str = "auto"
    coordinates: Path | None = None
    near_null_space: Path | None = None
    null_space: str | None = None
    method: str = "auto"
    precision: str = "auto"
    verify: str = "bound"

    def check(self) -> None:
        """Refuse, before a file is read, what no file could make right."""
        if self.preconditioner != "auto":
            spec = preconditioner_spec(self.preconditioner, degree=self.degree)
            if (self.coordinates or self.near_null_space) and not spec.uses_near_null_space:
                raise InputError(
                    f"--precond {self.preconditioner} has no use for --coordinates and --near-null-space; leave them out, or "
                    "choose auto, smoothed_aggregation or multigrid"
                )
        elif self.degree is not None:
            raise InputError("--degree is an option of a preconditioner; choose --precond chebyshev")
        if self.coordinates is not None and self.near_null_space is not None:
            raise InputError("the motions that --coordinates gives are a --near-null-space; give one or the other")
        if not 0 <= self.rtol < 1:
            raise InputError(f"--rtol is a share of the right-hand side, 0 or more and less than 1, not {self.rtol}")
        if self.columns is not None:
            (parse_count if self.right_hand_sides is None else parse_columns)(self.columns)
        if self.memory is not None:
            parse_nbytes(self.memory)
        if self.device != "auto":
            Device.parse(self.device)
        method_named(self.method)
        checked_precision(self.precision, self.verify)
        if self.format != "auto":
            format_named(self.format)


# Of solves that were begun when there was no other.
_OLD_PRECISION = "float64"
_PATHS = ("matrix", "right_hand_sides", "guess", "coordinates", "near_null_space", "null_space")


def settings_of(request: SolveRequest, placement: Placement | None = None) -> dict[str, Any]:
    """Return the request and, once they are made, the decisions, as plain values."""
    options = dataclasses.asdict(request)
    for name in _PATHS:  # a solve may be resumed from another folder
        if options[name] not in (None, "constants"):
            path = Path(options[name])
            options[name] = str(path.resolve() if path.exists() else path)
    return {"asked": options, "decided": None if placement is None else _decided(placement)}


def _decided(placement: Placement) -> dict[str, Any]:
    spec = placement.spec
    plain = {of.name: getattr(spec, of.name) for of in dataclasses.fields(spec)}
    options = {name: value for name, value in plain.items() if isinstance(value, int | float | str)}
    decided = {"preconditioner": spec.name, "options": options, "reordered": placement.order is not None}
    return {**decided, "precision": placement.precision}


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


def decided_precision(settings: Mapping[str, Any]) -> str | None:
    """Return the precision of the values with which the solve that is to be resumed iterates, if it got so far."""
    decided = settings.get("decided")
    return None if decided is None else str(decided.get("precision", _OLD_PRECISION))


def lasting_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that may change when a solve is resumed."""
    defaults = {of.name: of.default for of in dataclasses.fields(SolveRequest) if of.name != "matrix"}
    request = {**defaults, **settings.get("asked", {})}  # older checkpoints lack some
    fixed = {name: value for name, value in request.items() if name not in ("rtol", "maxiter", "guess")}
    decided = settings.get("decided")
    if decided is not None:
        decided = {"precision": _OLD_PRECISION, **decided}
    return {**settings, "asked": fixed, "decided": decided}
