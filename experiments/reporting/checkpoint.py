"""Writes the state of a solve to disk so that it can be resumed, bit for bit."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from penstock.experiments.reporting.atomic import write_file
from penstock.files.arrays import ArrayArchive
from penstock.solvers import SOLVERS, CoarseBlockCgState, CoarseCgState, StopReason
from penstock.solvers.states import StateLayout, SystemMark, check_counts, check_numbers
from penstock.spmv import CPU, Array, Device, InputError

#: The state of any registered method.
SolverState = Any


@dataclass(frozen=True)
class Checkpoint:
    """The state of a solve, and the time and traffic it needed so far.

    Parameters
    ----------
    state : SolverState or None
        Between two iterations; None before the first.
    sweeps, bytes_streamed : int
        Total of all runs so far.
    seconds : float
        Time of the solve, total of all runs so far.
    direction : int
        Direction of the next sweep, for :meth:`StreamedMatrix.turn_to`: 1 for ascending rows, -1 for descending rows; 1 for a
        resident matrix.
    ranks : int
        That shared out the system, each with aggregates of its own.
    settings : dict
        Plain values that say which system it is, such as its mesh and its loads.
    """

    state: SolverState | None
    sweeps: int = 0
    bytes_streamed: int = 0
    seconds: float = 0.0
    direction: int = 1
    ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise an InputError if a number cannot be."""
        check_counts(sweeps=self.sweeps, bytes_streamed=self.bytes_streamed, ranks=self.ranks)
        check_numbers({"seconds": self.seconds})
        if self.direction not in (1, -1) or not self.ranks:
            raise InputError(f"a direction of {self.direction} or {self.ranks} ranks cannot be")


def vectors_of(state: SolverState) -> dict[str, Array]:
    """Return the vectors of a state with a row for each unknown by name: what ranks share out."""
    coarse = isinstance(state, CoarseCgState | CoarseBlockCgState)
    names = ("x", "y", "p") if coarse else [of.name for of in fields(state) if of.type in ("Array", "Array | None")]
    return {name: getattr(state, name) for name in names if getattr(state, name) is not None}


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, which has a state, as ``.npz``; if that fails or is interrupted, the old one stays complete."""
    state = checkpoint.state
    assert state is not None, "a checkpoint on disk has a state"
    [solver] = [name for name in SOLVERS.keys() if SOLVERS[name].State is type(state)]  # noqa: SIM118 - a registry
    contents = {
        "solver": np.array(solver),
        "settings": np.array(json.dumps(checkpoint.settings, sort_keys=True)),
        "spent_seconds": np.array(checkpoint.seconds),
        "spent": np.array([checkpoint.sweeps, checkpoint.bytes_streamed, checkpoint.direction, checkpoint.ranks]),
    }
    for of in fields(state):
        value = getattr(state, of.name)
        if value is not None:
            contents |= _written(of.name, value)
    contents["checksum"] = np.array(_checksum(contents))
    write_file(path, lambda file: np.savez(file, **contents), sync=True)  # type: ignore[arg-type]


def _written(name: str, value: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays on the host that stand for one field of a state."""
    if isinstance(value, SystemMark):
        return {"b_norms": np.array(value.b_norms), "preconditioner": np.array(value.preconditioner)}
    if name == "reasons":
        return {name: np.array([reason.name if reason else "" for reason in value])}
    if name == "active":
        return {name: np.array(value, dtype=np.int64)}
    return {name: CPU.asarray(value) if hasattr(value, "ndim") else np.array(value)}


def _checksum(contents: Mapping[str, np.ndarray[Any, Any]]) -> int:
    """Return the CRC-32 of names, types, shapes and bytes."""
    checksum = 0
    for name in sorted(contents):
        array = np.ascontiguousarray(contents[name])
        checksum = zlib.crc32(f"{name} {array.dtype.str} {contents[name].shape}".encode(), checksum)
        checksum = zlib.crc32(array.reshape(-1).view(np.uint8).data, checksum)
    return checksum


def read_checkpoint(path: Path, unknowns: int, device: Device) -> Checkpoint:
    """Read a checkpoint to the device, or raise an InputError if it is damaged or of another number of unknowns."""
    if not path.exists():
        raise InputError(f"{path.parent} has no {path.name}; nothing to resume")
    try:
        with ArrayArchive(path) as archive:
            data = {name: archive.read(name) for name in archive.contents}
        if int(data.pop("checksum", np.array(-1))) != _checksum(data):
            raise InputError("it does not match its checksum")
        checkpoint = _read(data, device)
        checkpoint.check()
        x = checkpoint.state.x  # type: ignore[union-attr]
        if x.shape[:1] != (unknowns,):
            raise InputError(f"it holds vectors of another length than the {unknowns} unknowns of this run")
        if x.dtype not in (np.float64, np.float32) or x.ndim > 2:
            raise InputError(f"it holds iterates of type {x.dtype} and shape {x.shape}")
        checkpoint.state.check(StateLayout(x.shape, x.dtype, device))  # type: ignore[union-attr]
    except Exception as error:  # whatever is in a file that anybody may have written
        cause = str(error) or type(error).__name__
        raise InputError(f"{path} cannot be resumed from: {cause}; start the run anew") from error
    return checkpoint


def _read(data: Mapping[str, np.ndarray[Any, Any]], device: Device) -> Checkpoint:
    """Return the checkpoint from its contents."""
    kind = SOLVERS[str(data["solver"])].State
    values: dict[str, Any] = {}
    for of in fields(kind):
        annotation = str(of.type)
        if annotation == "SystemMark | None":
            values[of.name] = SystemMark(tuple(data["b_norms"].tolist()), str(data["preconditioner"]))
        elif of.name in data:
            array = data[of.name]
            values[of.name] = device.asarray(array) if "Array" in annotation else _PLAIN[annotation](array)
    sweeps, bytes_streamed, direction, ranks = data["spent"].tolist()
    seconds, settings = float(data["spent_seconds"]), json.loads(str(data["settings"]))
    return Checkpoint(kind(**values), sweeps, bytes_streamed, seconds, direction, ranks, settings)


#: How fields of states that are not vectors are read, by their annotation.
_PLAIN: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "int": lambda array: array.item(),
    "float": lambda array: array.item(),
    "bool": bool,
    "Matrix": np.asarray,
    "Numbers": np.asarray,
    "list[int]": lambda array: array.tolist(),
    "list[float]": lambda array: array.tolist(),
    "list[list[float]]": lambda array: array.tolist(),
    "list[StopReason | None]": lambda names: [StopReason[name] if name else None for name in names.tolist()],
}
