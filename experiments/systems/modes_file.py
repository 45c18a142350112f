"""The modes of matrices in files, found and written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.driver.eigsh import eigsh
from penstock.driver.progress import Reporter
from penstock.experiments.reporting.atomic import write_file, write_json, write_text
from penstock.experiments.reporting.environment import describe_environment
from penstock.experiments.reporting.folder import ResultsFolder
from penstock.experiments.reporting.interrupts import stop_requests
from penstock.experiments.reporting.outcome import RunOutcome
from penstock.experiments.systems.system_files import read_node_array
from penstock.files.arrays import open_array
from penstock.files.registry import matrix_name, read_matrix
from penstock.solvers import StopReason
from penstock.spmv import InputError


@dataclass(frozen=True)
class ModesRequest:
    """What to look for: ``stiffness`` and ``mass`` name files or generated matrices, the mass a ``.npy`` of its diagonal, too.

    The other fields are the parameters of :func:`penstock.eigsh`; ``coordinates`` and ``near_null_space`` are ``.npy`` files.
    """

    stiffness: str
    mass: str | None = None
    k: int = 10
    tol: float = 1e-6
    maxiter: int = 200
    device: str = "auto"
    memory: str | None = None
    coordinates: Path | None = None
    near_null_space: Path | None = None
    progress: bool = True


def find_modes(request: ModesRequest, directory: str | Path, *, reporter: Reporter | None = None) -> RunOutcome:
    """Find modes and leave a results folder in ``directory``, which must not exist or be empty.

    It holds ``modes.npz`` with values, vectors, residuals and errors, the same numbers without vectors in ``result.json``, and
    ``modes.txt``, which explains them. SIGINT or SIGTERM ends the search after a pass, and what is found by then is written.
    """
    folder, reporter = ResultsFolder(Path(directory)), reporter or Reporter()
    with folder.made("choose another --output"):
        try:
            return _found(request, folder, reporter)
        except BaseException:
            folder.remove()
            raise


def _found(request: ModesRequest, folder: ResultsFolder, reporter: Reporter) -> RunOutcome:
    known = {"coordinates": request.coordinates, "near_null_space": request.near_null_space}
    options: dict[str, Any] = {
        name: read_node_array(path, "coordinates of nodes" if name == "coordinates" else "vectors of a near-null space")
        for name, path in known.items()
        if path is not None
    }
    mass = None if request.mass is None else _mass_of(request.mass)
    with stop_requests(reporter, "this pass") as stop:
        modes = eigsh(
            request.stiffness, request.k, mass, tol=request.tol, maxiter=request.maxiter, device=request.device,
            memory=request.memory, monitor=lambda record: stop.is_set(), progress=request.progress, on_failure="return",
            folder=folder.path, **options,
        )  # fmt: skip
    numbers = {name: getattr(modes, name) for name in ("values", "frequencies", "residuals", "errors")}
    vectors = modes.vectors.get() if hasattr(modes.vectors, "get") else modes.vectors
    write_file(folder.path / "modes.npz", lambda file: np.savez(file, vectors=vectors, **numbers))
    write_text(folder.path / "modes.txt", modes.explain() + "\n")
    write_json(folder.environment, describe_environment())
    facts = {"matrix": matrix_name(request.stiffness), "converged": modes.converged, "message": modes.message}
    facts |= {"zeros": modes.zeros, "missed": modes.missed, "cuts_cluster": modes.cuts_cluster}
    facts |= {"iterations": modes.iterations, "sweeps": modes.sweeps, "seconds": modes.timings}
    write_json(folder.result, {**facts, **{name: of.tolist() for name, of in numbers.items()}})
    reporter.text("Result", modes.explain())
    return RunOutcome(folder, StopReason[modes.reason.name])


def _mass_of(source: str) -> Any:
    """Return the mass matrix in a file, or the diagonal that a ``.npy`` file of one column holds."""
    if not source.lower().endswith(".npy"):
        return read_matrix(source).matrix
    array = open_array(Path(source))
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise InputError(
            f"{source} holds an array of shape {array.shape}; a mass in .npy is the diagonal, of shape (n,)"
        )
    return np.asarray(array, dtype=np.float64)
