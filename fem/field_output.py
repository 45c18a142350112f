"""Writes fields for ParaView in the VTKHDF ImageData format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from penstock.fem.mesh import BoxMesh
from penstock.spmv import InputError

__all__ = ["write_vtkhdf"]


def write_vtkhdf(path: str | Path, mesh: BoxMesh, fields: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write nodal fields on a box mesh as a VTKHDF file (version 2.0 of the format, type ImageData).

    Parameters
    ----------
    path : path
        Conventionally ends in ``.vtkhdf``.
    mesh : BoxMesh
    fields : mapping
        Values by name, ``(nodes,)`` or ``(nodes, components)`` in the order of the mesh. In ParaView, *Warp By Vector*
        on a displacement of three components shows the deformed body.
    """
    nx, ny, nz = mesh.node_counts
    for name, values in fields.items():
        if np.ndim(values) not in (1, 2) or len(values) != mesh.node_count:
            raise InputError(
                f"field {name!r} has shape {np.shape(values)}, not ({mesh.node_count},) or ({mesh.node_count}, k); "
                "reshape a solution with .reshape(-1, dof)"
            )
    with h5py.File(path, "w") as file:
        root = file.create_group("VTKHDF")
        root.attrs["Version"] = (2, 0)
        root.attrs.create("Type", b"ImageData", dtype=h5py.string_dtype("ascii", len(b"ImageData")))
        root.attrs["WholeExtent"] = (0, nx - 1, 0, ny - 1, 0, nz - 1)
        root.attrs["Origin"] = (0.0, 0.0, 0.0)
        root.attrs["Spacing"] = mesh.spacing
        root.attrs["Direction"] = np.eye(3).ravel()
        points = root.create_group("PointData")
        for name, values in fields.items():
            # x runs fastest in VTK, z in the mesh.
            points[name] = np.ascontiguousarray(
                np.asarray(values).reshape(nx, ny, nz, *np.shape(values)[1:]).swapaxes(0, 2)
            )
