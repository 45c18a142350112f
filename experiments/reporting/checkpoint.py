"""Writes the state of a solve to disk so that it can be resumed, bit for bit."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.experiments.reporting.atomic import write_file
from penstock.files.arrays import ArrayArchive
from penstock.solvers import SOLVERS, SavedState
from penstock.solvers.states import StateLayout, check_counts, check_numbers, check_state
from penstock.spmv import CPU, InputError, StoreError

#: The state of any registered method: a :class:`SavedState`.
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


def write_checkpoint(path: Path, checkpoint: Checkpoint, *, aside: bool = False) -> Future[None] | None:
    """Write a checkpoint as ``.npz``; if that fails or is interrupted, the old one stays complete.

    With ``aside`` a thread writes it, and the future ends when it is there. Arrays of a GPU are copied first; those on the host
    must not change until then.
    A :class:`StoreError` says that the disk is full, or that the method of the state does not say how it is written.
    """
    contents = _contents_of(checkpoint)
    if aside:
        with suppress(RuntimeError), ExitStack() as stack:  # otherwise no thread is to be had
            thread = ThreadPoolExecutor(1, "penstock-checkpoint")
            stack.callback(thread.shutdown, wait=False)
            return thread.submit(write_sealed, path, contents)
    write_sealed(path, contents)
    return None


def _contents_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what is written of a checkpoint, as arrays on the host by their names."""
    state = checkpoint.state
    solvers = [name for name in SOLVERS.keys() if SOLVERS[name].State is type(state)]  # noqa: SIM118 - a registry
    if not isinstance(state, SavedState) or not solvers:
        raise StoreError(
            f"no checkpoint is written of a {type(state).__name__}; a solve that checkpoints hold has a registered Method, whose "
            "State is a SavedState"
        )
    contents = {
        "solver": np.array(solvers[0]),
        "settings": np.array(json.dumps(checkpoint.settings, sort_keys=True)),
        "spent_seconds": np.array(checkpoint.seconds),
        "spent": np.array([checkpoint.sweeps, checkpoint.bytes_streamed, checkpoint.direction, checkpoint.ranks]),
    }
    return contents | state.to_arrays()


def write_sealed(path: Path, contents: dict[str, Any]) -> None:
    """Write arrays and their checksum as ``.npz``, completely or not at all."""
    contents["checksum"] = np.array(checksum(contents))
    write_file(path, lambda file: np.savez(file, **contents), sync=True)


@contextmanager
def read_sealed(path: Path) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield the arrays of such a file; whatever is wrong with it, or with what it holds, becomes an InputError that names it."""
    if not path.exists():
        raise InputError(f"{path.parent} has no {path.name}; nothing to resume")
    try:
        with ArrayArchive(path) as archive:
            data = {name: archive.read(name) for name in archive.contents}
        if int(data.pop("checksum", np.array(-1))) != checksum(data):
            raise InputError("it does not match its checksum")
        yield data
    except Exception as error:  # whatever is in a file that anybody may have written
        cause = str(error) or type(error).__name__
        raise InputError(f"{path} cannot be resumed from: {cause}; start the run anew") from error


def checksum(contents: Mapping[str, np.ndarray[Any, Any]]) -> int:
    """Return the CRC-32 of names, types, shapes and bytes."""
    checksum = 0
    for name in sorted(contents):
        array = np.ascontiguousarray(contents[name])
        checksum = zlib.crc32(f"{name} {array.dtype.str} {contents[name].shape}".encode(), checksum)
        checksum = zlib.crc32(array.reshape(-1).view(np.uint8).data, checksum)
    return checksum


def read_checkpoint(path: Path, unknowns: int) -> Checkpoint:
    """Read a checkpoint to the host, or raise an InputError if it is damaged or of another number of unknowns."""
    with read_sealed(path) as data:
        checkpoint = _read(data)
        checkpoint.check()
        if checkpoint.state.system is None:  # type: ignore[union-attr]
            raise InputError("it does not say which system it is of")
        x = checkpoint.state.x  # type: ignore[union-attr]
        if x.shape[:1] != (unknowns,):
            raise InputError(f"it holds vectors of another length than the {unknowns} unknowns of this run")
        if x.dtype not in (np.float64, np.float32) or x.ndim > 2:
            raise InputError(f"it holds iterates of type {x.dtype} and shape {x.shape}")
        check_state(checkpoint.state, type(checkpoint.state), StateLayout(x.shape, x.dtype, CPU))
    return checkpoint


def _read(data: Mapping[str, np.ndarray[Any, Any]]) -> Checkpoint:
    """Return the checkpoint from its contents."""
    kind: Any = SOLVERS[str(data["solver"])].State
    sweeps, bytes_streamed, direction, ranks = data["spent"].tolist()
    seconds, settings = float(data["spent_seconds"]), json.loads(str(data["settings"]))
    return Checkpoint(kind.from_arrays(data, CPU), sweeps, bytes_streamed, seconds, direction, ranks, settings)


def check_settings(before: dict[str, Any], now: dict[str, Any], advice: str) -> None:
    """Raise an InputError that names the differences unless a run with one settings may be resumed with the others."""
    changes = _changes(before, now)
    if changes:
        raise InputError(f"this run was begun with other settings: {'; '.join(changes[:4])}; {advice}")


def _changes(before: Any, now: Any, name: str = "") -> list[str]:
    """Return what differs between two trees of plain values, as sentences."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            change
            for key in dict.fromkeys((*before, *now))
            for change in _changes(before.get(key), now.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if before == now else [f"{name} is {now} and was {before}"]
