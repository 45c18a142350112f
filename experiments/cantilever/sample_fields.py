"""The fields of several runs side by side, some planes of nodes at a time, so that many do not need to fit the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from penstock.experiments.reporting.folder import FIELD_NAMES
from penstock.fem import Cantilever

__all__ = ["stacked_fields"]

_TOGETHER_NBYTES = 1 << 26


def stacked_fields(files: Sequence[Path], body: Cantilever) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the solutions in files of the same body, ``(unknowns, files)``, in parts of whole planes of nodes."""
    nx, ny, nz = body.mesh.node_counts
    step = max(1, min(nx, _TOGETHER_NBYTES // (8 * ny * nz * body.dof * len(files))))
    for start in range(0, nx, step):
        planes = slice(start, min(start + step, nx))
        yield np.stack([_planes(file, body.dof, planes) for file in files], axis=1)


def _planes(file: Path, dof: int, planes: slice) -> np.ndarray[Any, Any]:
    """Return the unknowns of some planes, node by node; in the file x runs fastest, in a solution z does."""
    with h5py.File(file) as opened:
        points = opened["VTKHDF/PointData"]
        names = [FIELD_NAMES[dof], *(["rotation"] if dof == 6 else [])]
        values = [np.atleast_1d(points[name][:, :, planes]) for name in names]
    columns = [of.reshape(*of.shape[:3], -1).swapaxes(0, 2) for of in values]
    return np.concatenate(columns, axis=-1).ravel()
