"""Runs each solver in a fresh process on one core, and judges what it leaves by the true residual."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zoo.peers import PEERS
from zoo.system import System

__all__ = ["Limits", "judge", "measured", "pythons_of_peers"]

_BENCHMARKS = Path(__file__).parents[1]
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
#: A peer ends by a residual that it updates, which may be smaller than the true one; it has solved the system up to this factor.
_SLACK_OF_PEERS = 10.0
#: Times the residual that rounding the solution leaves: no solver gets much lower, and iterations end some way above.
_SLACK_OF_ROUNDING = 10.0


@dataclass(frozen=True)
class Limits:
    """What a solve has to reach, and what it may take.

    Parameters
    ----------
    rtol : float
    cap : float
        CPU seconds.
    core : int
    """

    rtol: float
    cap: float
    core: int


def _run(command: list[str], core: int, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=_BENCHMARKS,
        env={**os.environ, **_ONE_THREAD},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def pythons_of_peers(core: int) -> dict[str, str]:
    """Return the Python that can import each peer: this one, or that of the system; tell of peers that none can."""
    candidates = [sys.executable, shutil.which("python3", path=os.defpath)]
    found = {}
    for name, peer in PEERS.items():
        for python in filter(None, candidates):
            if not _run([python, "-c", f"import numpy, scipy, {peer.module}"], core).returncode:
                found[name] = python
                break
        else:
            print(f"without {name}: no Python here imports {peer.module}", flush=True)
    return found


def measured(system: System, folder: Path, limits: Limits, python: str, peer: str | None = None) -> dict[str, Any]:
    """Return what a solver took and reached for a system that was saved in a folder.

    Returns
    -------
    dict
        ``message``, and unless the process was ended, ``samples``, ``cpu_seconds``, ``wall_seconds``, ``iterations``,
        ``true_residual``, ``rounding_floor``, and ``preconditioner`` of penstock.
    """
    for name in ("outcome.json", "x.npy"):
        (folder / name).unlink(missing_ok=True)
    program = ["zoo.ours"] if peer is None else ["zoo.theirs"]
    command = [python, "-m", *program, str(folder), str(limits.rtol), str(limits.cap), *([peer] if peer else [])]
    try:
        done = _run(command, limits.core, 10 * limits.cap + 600)
    except subprocess.TimeoutExpired:
        return {"message": "the process did not end"}
    if not (folder / "outcome.json").exists():
        return {"message": _cause(done, limits)}
    outcome = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    if (folder / "x.npy").exists():
        x, scale = np.load(folder / "x.npy"), np.linalg.norm(system.b)
        residual = np.linalg.norm(system.b - system.A @ x) / scale
        if np.isfinite(residual):
            outcome["true_residual"] = float(residual)
            outcome["rounding_floor"] = float(2.0**-53 * np.linalg.norm(abs(system.A) @ abs(x)) / scale)
    return outcome


def judge(own: dict[str, Any], peers: dict[str, dict[str, Any]], rtol: float) -> None:
    """Enter in outcomes whether each is ``converged``: to the tolerance, or to what rounding allows, seen at the best solution.

    ``at_rounding_floor`` tells the latter.
    """
    reached = [of for of in (own, *peers.values()) if "true_residual" in of]
    best = min(reached, key=lambda of: of["true_residual"], default={"rounding_floor": 0.0})
    allowed = _SLACK_OF_ROUNDING * best["rounding_floor"]
    for outcome, slack in [(own, 1.0), *((of, _SLACK_OF_PEERS) for of in peers.values())]:
        residual = outcome.get("true_residual", np.inf)
        outcome["converged"] = bool(residual <= max(slack * rtol, allowed))
        outcome["at_rounding_floor"] = bool(outcome["converged"] and residual > slack * rtol)


def _cause(done: subprocess.CompletedProcess[str], limits: Limits) -> str:
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"more than {limits.cap:g} s of CPU time" if done.returncode == -signal.SIGXCPU else "killed"
    return f"ended with {done.returncode}: {' '.join(done.stderr.split()[-30:])}"
