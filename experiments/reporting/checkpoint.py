"""Writes the state of a solve to disk so that it can be resumed, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.experiments.reporting.atomic import write_file
from penstock.solvers import BlockCgState, CgState, CoarseBlockCgState, CoarseCgState, StopReason
from penstock.spmv import CPU, Array, Device, InputError

__all__ = ["Checkpoint", "SolverState", "read_checkpoint", "vectors_of", "write_checkpoint"]

_CG_VECTORS = ("x", "r", "p")
_CG_NUMBERS = (
    "rho",
    "last_true_residual",
    "matrix_norm",
    "drift",
    "first_drift",
    "iteration",
    "replacements",
)
_BLOCK_VECTORS = ("x", "w", "p")
_BLOCK_LISTS = ("t", "phi", "last_true_residuals", "residual_norms")
_FINE_VECTORS = ("x", "y", "p")
_COARSE_VECTORS = (*_FINE_VECTORS, "c", "p_c", "h", "rho")

SolverState = CgState | BlockCgState | CoarseCgState | CoarseBlockCgState


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
    """

    state: SolverState | None
    sweeps: int = 0
    bytes_streamed: int = 0
    seconds: float = 0.0
    direction: int = 1
    ranks: int = 1


def vectors_of(state: SolverState) -> dict[str, Array]:
    """Return the vectors of a state with a row for each unknown by name: what ranks share out."""
    if isinstance(state, CoarseCgState | CoarseBlockCgState):
        names: tuple[str, ...] = _FINE_VECTORS
    else:
        names = ("q", *_CG_VECTORS) if isinstance(state, CgState) else ("s", *_BLOCK_VECTORS)
    return {name: getattr(state, name) for name in names if getattr(state, name) is not None}


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; if that fails or is interrupted, the old one stays complete.

    Parameters
    ----------
    path : path
        Ends in ``.npz``.
    checkpoint : Checkpoint
        With a state.

    Raises
    ------
    StoreError
        If the disk is full or refuses.
    """
    state = checkpoint.state
    assert state is not None, "a checkpoint on disk has a state"
    contents = _contents(state)
    contents |= {
        "spent_seconds": checkpoint.seconds,
        "spent": np.array([checkpoint.sweeps, checkpoint.bytes_streamed, checkpoint.direction]),
        "ranks": checkpoint.ranks,
    }
    write_file(path, lambda file: np.savez(file, **contents), sync=True)


def read_checkpoint(path: Path, unknowns: int, device: Device) -> Checkpoint:
    """Read a checkpoint; its vectors come to the device.

    Raises
    ------
    InputError
        If it does not exist, is damaged, or belongs to a system with another number of unknowns.
    """
    try:
        with np.load(path) as data:
            state = _state(data, device)
            seconds = float(data["spent_seconds"])
            sweeps, bytes_streamed, direction = (int(number) for number in data["spent"])
            ranks = int(data["ranks"]) if "ranks" in data else 1
    except FileNotFoundError:
        raise InputError(f"{path.parent} has no {path.name}; nothing to resume") from None
    except Exception as error:  # numpy raises many kinds for a damaged archive
        raise InputError(f"{path} is damaged ({error}); start the run anew") from error
    if state.x.shape[0] != unknowns:
        raise InputError(f"{path} holds vectors of another length than the {unknowns} unknowns of this run")
    return Checkpoint(state, sweeps, bytes_streamed, seconds, direction, ranks)


def _contents(state: SolverState) -> dict[str, Any]:
    """Return the arrays and numbers of a state by name, on the host."""
    if isinstance(state, CgState):
        return {
            **{name: CPU.asarray(getattr(state, name)) for name in _CG_VECTORS},
            **_optional("q", state.q),
            "numbers": np.array([float(getattr(state, name)) for name in _CG_NUMBERS]),
            "residual_norms": np.array(state.residual_norms),
        }
    if isinstance(state, CoarseCgState):
        return {
            **{name: CPU.asarray(getattr(state, name)) for name in _COARSE_VECTORS},
            "curvature": state.curvature,
            "widened": state.widened,
            "iteration": state.iteration,
            "residual_norms": np.array(state.residual_norms),
        }
    if isinstance(state, CoarseBlockCgState):
        return {
            **{name: CPU.asarray(getattr(state, name)) for name in _COARSE_VECTORS},
            "curvatures": state.curvatures,
            "widened": state.widened,
            "reasons": _names(state.reasons),
            "iteration": state.iteration,
            "residual_norms": np.array(state.residual_norms),
        }
    return {
        **{name: CPU.asarray(getattr(state, name)) for name in _BLOCK_VECTORS},
        **_optional("s", state.s),
        **{name: np.array(getattr(state, name)) for name in _BLOCK_LISTS},
        "active": np.array(state.active, dtype=np.int64),
        "iteration": state.iteration,
        "reasons": _names(state.reasons),
    }


def _names(reasons: list[StopReason | None]) -> np.ndarray[Any, Any]:
    return np.array([reason.name if reason else "" for reason in reasons])


def _reasons(names: np.ndarray[Any, Any]) -> list[StopReason | None]:
    return [StopReason[name] if name else None for name in names.tolist()]


def _optional(name: str, vectors: Array | None) -> dict[str, Any]:
    return {} if vectors is None else {name: CPU.asarray(vectors)}


def _state(data: Any, device: Device) -> SolverState:
    """Return the state from its contents."""
    if "numbers" in data:
        numbers = dict(zip(_CG_NUMBERS, data["numbers"].tolist(), strict=True))
        counts = {name: int(numbers.pop(name)) for name in ("iteration", "replacements")}
        vectors = {name: device.asarray(data[name]) for name in _CG_VECTORS}
        q = device.asarray(data["q"]) if "q" in data else None
        return CgState(**vectors, **numbers, **counts, residual_norms=data["residual_norms"].tolist(), q=q)
    if "rho" in data:
        coarse: dict[str, Any] = {name: device.asarray(data[name]) for name in _COARSE_VECTORS}
        coarse |= {"iteration": int(data["iteration"]), "residual_norms": data["residual_norms"].tolist()}
        coarse["widened"] = "widened" in data and bool(data["widened"])
        if "curvature" in data:
            return CoarseCgState(**coarse, curvature=float(data["curvature"]))
        return CoarseBlockCgState(**coarse, curvatures=data["curvatures"], reasons=_reasons(data["reasons"]))
    x, w, p = (device.asarray(data[name]) for name in _BLOCK_VECTORS)
    return BlockCgState(
        x, w, p, data["t"], data["phi"], data["active"].tolist(), int(data["iteration"]),
        _reasons(data["reasons"]),
        data["last_true_residuals"].tolist(), data["residual_norms"].tolist(),
        device.asarray(data["s"]) if "s" in data else None,
    )  # fmt: skip
