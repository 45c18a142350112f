"""Writes fields for ParaView in the VTKHDF ImageData format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from penstock.fem.mesh import BoxMesh
from penstock.spmv import InputError


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

    Raises
    ------
    InputError
        If a field has another length than the mesh has nodes.

    Examples
    --------
    >>> import h5py, tempfile
    >>> from penstock.fem import Cantilever, write_vtkhdf
    >>> beam = Cantilever(nodes=(3, 2, 2), dof=3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_vtkhdf(f"{folder}/beam.vtkhdf", beam.mesh, {"load": beam.load().reshape(-1, 3)})
    ...     h5py.File(f"{folder}/beam.vtkhdf")["VTKHDF/PointData/load"].shape
    (2, 2, 3, 3)
    """
    for name, values in fields.items():
        if np.ndim(values) not in (1, 2) or len(values) != mesh.node_count:
            raise InputError(
                f"field {name!r} has shape {np.shape(values)}, not ({mesh.node_count},) or ({mesh.node_count}, k); "
                "reshape a solution with .reshape(-1, dof)"
            )
    with vtkhdf_writer(path, mesh) as write:
        write(fields)


def write_vtkhdf_series(
    path: str | Path, mesh: BoxMesh, name: str, times: Sequence[float], fields: Iterable[np.ndarray[Any, Any]]
) -> None:
    """Write a nodal field that changes from step to step, one step after the other (version 2.0 of the format).

    Parameters
    ----------
    path : path
    mesh : BoxMesh
    name : str
        Of the field.
    times : sequence of float
        The time of each step, or the frequency of each mode.
    fields : iterable of arrays, (nodes,) or (nodes, components)
        One for each step; only one is held at a time.

    Examples
    --------
    >>> import h5py, numpy as np, tempfile
    >>> from penstock.fem import BoxMesh, write_vtkhdf_series
    >>> mesh = BoxMesh(nodes=(3, 2, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_vtkhdf_series(f"{folder}/m.vtkhdf", mesh, "mode", [1.0, 2.0], (np.ones((12, 3)) for _ in range(2)))
    ...     h5py.File(f"{folder}/m.vtkhdf")["VTKHDF/PointData/mode"].shape
    (2, 2, 2, 3, 3)
    """
    nx, ny, nz = mesh.node_counts
    with h5py.File(path, "w") as file:
        root = _image_data(file, mesh)
        points, steps = root.create_group("PointData"), root.create_group("Steps")
        steps.attrs["NSteps"] = len(times)
        steps.create_dataset("Values", data=np.asarray(times, dtype=np.float64))
        steps.create_group("PointDataOffsets").create_dataset(name, data=np.arange(len(times), dtype=np.int64))
        for number, values in enumerate(fields):
            further = np.shape(values)[1:]
            if name not in points:
                points.create_dataset(name, (len(times), nz, ny, nx, *further), values.dtype)
            points[name][number] = np.ascontiguousarray(np.asarray(values).reshape(nx, ny, nz, *further).swapaxes(0, 2))


def _image_data(file: Any, mesh: BoxMesh) -> Any:
    """Return the root group of a new file, which describes the mesh."""
    nx, ny, nz = mesh.node_counts
    root = file.create_group("VTKHDF")
    root.attrs["Version"] = (2, 0)
    root.attrs.create("Type", b"ImageData", dtype=h5py.string_dtype("ascii", len(b"ImageData")))
    root.attrs["WholeExtent"] = (0, nx - 1, 0, ny - 1, 0, nz - 1)
    root.attrs["Origin"] = (0.0, 0.0, 0.0)
    root.attrs["Spacing"] = mesh.spacing
    root.attrs["Direction"] = np.eye(3).ravel()
    return root


@contextmanager
def vtkhdf_writer(path: str | Path, mesh: BoxMesh) -> Iterator[Callable[[Mapping[str, np.ndarray[Any, Any]]], None]]:
    """Return a function that writes fields of the next planes of nodes, for fields that are not in memory as a whole.

    Parameters
    ----------
    path : path
    mesh : BoxMesh

    Yields
    ------
    callable
        ``write(fields)`` takes values as :func:`write_vtkhdf` does, of whole planes from where the last call ended.

    Examples
    --------
    >>> import numpy as np, os, tempfile
    >>> from penstock.fem import BoxMesh, vtkhdf_writer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with vtkhdf_writer(f"{folder}/beam.vtkhdf", BoxMesh(nodes=(3, 2, 2))) as write:
    ...         for plane in range(3):
    ...             write({"plane": np.full(4, float(plane))})
    ...     os.listdir(folder)
    ['beam.vtkhdf']
    """
    nx, ny, nz = mesh.node_counts
    written = 0
    with h5py.File(path, "w") as file:
        points = _image_data(file, mesh).create_group("PointData")

        def write(fields: Mapping[str, np.ndarray[Any, Any]]) -> None:
            nonlocal written
            planes = 0
            for name, values in fields.items():
                further = np.shape(values)[1:]
                planes = len(values) // (ny * nz)
                if name not in points:
                    # x runs fastest in VTK, z in the mesh. Planes that come one after another go into pieces of their own.
                    pieces = None if planes == nx else (min(nz, 64), min(ny, 64), max(1, min(planes, nx)), *further)
                    points.create_dataset(name, (nz, ny, nx, *further), values.dtype, chunks=pieces)
                block = np.asarray(values).reshape(planes, ny, nz, *further).swapaxes(0, 2)
                points[name][:, :, written : written + planes] = np.ascontiguousarray(block)
            written += planes

        yield write
