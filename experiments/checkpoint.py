"""Writing down the state of a solve so that it can go on from there, bit for bit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.solvers import CgState
from penstock.spmv import Device, InputError, StoreError

__all__ = ["Checkpoint", "read_checkpoint", "write_checkpoint"]

_VECTORS = ("x", "r", "p")
_SCALARS = ("rho", "last_true_residual", "matrix_norm", "drift", "first_drift")
_COUNTS = ("iteration", "replacements", "within")


@dataclass(frozen=True)
class Checkpoint:
    """A state and what reaching it took.

    Parameters
    ----------
    state : CgState or None
        Between two iterations; None before the first.
    sweeps, bytes_streamed : int
        Spent so far, by all runs together.
    seconds : float
        Spent solving so far.
    direction : int
        Direction of the next sweep: 1, rows ascending, is the only one there is so far.
    """

    state: CgState | None
    sweeps: int = 0
    bytes_streamed: int = 0
    seconds: float = 0.0
    direction: int = 1


def write_checkpoint(path: Path, checkpoint: Checkpoint, device: Device) -> None:
    """Write a state so that either the old or the new checkpoint is whole, whatever happens meanwhile.

    Parameters
    ----------
    path : path
        Of an ``.npz`` file.
    checkpoint : Checkpoint
    device : Device
        Where its vectors live.

    Raises
    ------
    StoreError
        If the disk is full or refuses.
    """
    state = checkpoint.state
    assert state is not None, "a checkpoint on disk has a state"
    vectors: dict[str, Any] = {name: device.to_host(getattr(state, name)) for name in _VECTORS}
    temporary = path.with_name(path.name + ".partial")
    try:
        with open(temporary, "wb") as file:
            np.savez(
                file,
                **vectors,
                scalars=np.array([getattr(state, name) for name in _SCALARS]),
                counts=np.array([int(getattr(state, name)) for name in _COUNTS]),
                spent_seconds=checkpoint.seconds,
                spent=np.array([checkpoint.sweeps, checkpoint.bytes_streamed, checkpoint.direction]),
                residual_norms=np.array(state.residual_norms),
            )
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write the checkpoint {path}: {error.strerror or error}") from error


def read_checkpoint(path: Path, unknowns: int, device: Device) -> Checkpoint:
    """Read what :func:`write_checkpoint` wrote.

    Raises
    ------
    InputError
        If there is no checkpoint, it is damaged, or it belongs to a system of another size.
    """
    try:
        with np.load(path) as data:
            vectors = {name: device.asarray(data[name]) for name in _VECTORS}
            scalars = dict(zip(_SCALARS, data["scalars"].tolist(), strict=True))
            counts = dict(zip(_COUNTS, data["counts"].tolist(), strict=True))
            seconds = float(data["spent_seconds"])
            sweeps, bytes_streamed, direction = (int(number) for number in data["spent"])
            residual_norms = [float(norm) for norm in data["residual_norms"]]
    except FileNotFoundError:
        raise InputError(f"{path.parent} has no {path.name}; nothing to resume") from None
    except Exception as error:  # numpy raises many kinds for a damaged archive
        raise InputError(f"{path} is damaged ({error}); start the run anew") from error
    if any(vector.shape != (unknowns,) for vector in vectors.values()):
        raise InputError(f"{path} holds vectors of another length than the {unknowns} unknowns of this run")
    counts["within"] = bool(counts["within"])
    state = CgState(**vectors, **scalars, **counts, residual_norms=residual_norms)
    return Checkpoint(state, sweeps, bytes_streamed, seconds, direction)
