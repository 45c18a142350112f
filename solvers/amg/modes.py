"""The near-null space of a matrix: what the caller knows of it, or the rigid motions of a body."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.solvers.amg.grid_points import GridPoints
from penstock.spmv import CPU, Array, Device, InputError, Operator, VectorSpace, device_of
from penstock.spmv.communicator import ALONE, Communicator, communicator_of
from penstock.spmv.compilation.cuda_module import CudaSource, launch
from penstock.spmv.compilation.table import find_kernel, register_kernel

MOTION_KERNELS = CudaSource("penstock.solvers.kernels", "rigid_motions.cu")

# Columns of a near-null space.
_MOST_MODES = 8
_SUM_BLOCKS = 128


def rigid_body_modes(coordinates: Array, block_size: int) -> Array:
    """Return the rigid motions of nodes, (nodes * block_size, modes): 3 in a plane, 6 in space, constants for block size 1.

    Coordinates are (nodes, 2) or (nodes, 3), on the host or a GPU, where the result is made. Unknowns are displacements (2 or 3
    a node), or displacements and rotations (3 in a plane, 6 in space); other block sizes are refused.
    """
    return motions_about_origin(centred(coordinates), block_size)


def centred(coordinates: Array, communicator: Communicator = ALONE) -> Array:
    """Return coordinates relative to the mean of those of all ranks."""
    device = device_of(coordinates)
    sums = find_kernel("points", "sum", device.kind)(coordinates)
    *sums, nodes = communicator.total(np.array([*sums, float(len(coordinates))]))
    centre = np.array(sums) / max(1.0, nodes)
    relative: Array = find_kernel("points", "centre", device.kind)(coordinates, centre)
    return relative


@register_kernel("points", "sum", "cpu")
def _sum_cpu(coordinates: Array) -> list[float]:
    # Each in one piece, whose sum is by pairs.
    return [float(along.sum()) for along in np.ascontiguousarray(coordinates.T)]


@register_kernel("points", "centre", "cpu")
def _centre_cpu(coordinates: Array, centre: Array) -> Array:
    return coordinates - centre


@register_kernel("points", "sum", "cuda")
def _sum_cuda(coordinates: Array) -> list[float]:
    device, (nodes, dimensions) = device_of(coordinates), coordinates.shape
    partial = device.xp.empty((_SUM_BLOCKS, dimensions))
    arguments = (
        np.int64(nodes),
        np.int32(dimensions),
        device.xp.ascontiguousarray(coordinates, dtype=np.float64),
        partial,
    )
    launch(MOTION_KERNELS.function("sum_coordinates"), 256 * _SUM_BLOCKS, 256, arguments)
    return [float(along) for along in device.to_host(partial).sum(axis=0)]


@register_kernel("points", "centre", "cuda")
def _centre_cuda(coordinates: Array, centre: Array) -> Array:
    device, (nodes, dimensions) = device_of(coordinates), coordinates.shape
    out = device.xp.empty((nodes, dimensions))
    source = (device.xp.ascontiguousarray(coordinates, dtype=np.float64), device.asarray(centre), out)
    arguments = (np.int64(out.size), np.int32(dimensions), *source)
    launch(MOTION_KERNELS.function("centre_coordinates"), out.size, 256, arguments)
    return out


def motions_about_origin(coordinates: Array, block_size: int) -> Array:
    """Return what :func:`rigid_body_modes` does, with rotations about the origin of the coordinates."""
    device: Device = device_of(coordinates)
    xp, (nodes, dimensions) = device.xp, coordinates.shape
    if block_size == 1:
        return xp.ones((nodes, 1))
    if (dimensions, block_size) not in {(2, 2), (2, 3), (3, 3), (3, 6)}:
        raise InputError(
            f"no rigid body motions are known for {block_size} unknowns a node in {dimensions} dimensions; give near_null_space"
        )
    x = xp.zeros((nodes, 3))
    x[:, :dimensions] = coordinates
    axes = [2] if dimensions == 2 else [0, 1, 2]
    modes = xp.zeros((nodes, block_size, dimensions + len(axes)))
    for direction in range(dimensions):
        modes[:, direction, direction] = 1.0
    for number, axis in enumerate(axes, start=dimensions):
        first, second = (axis + 1) % 3, (axis + 2) % 3
        modes[:, first, number] = -x[:, second]
        modes[:, second, number] = x[:, first]
        if block_size > dimensions:
            modes[:, number, number] = 1.0  # the rotation itself
    return modes.reshape(nodes * block_size, -1)


def modes_of(nodes: int, size: int, modes: Array | None, points: Array | None, device: Device) -> Array:
    """Return a near-null space, or the rigid motions of points, or without both a constant for each unknown of a node."""
    if modes is not None:
        return modes
    return device.xp.tile(device.xp.eye(size), (nodes, 1)) if points is None else motions_about_origin(points, size)


def checked_near_null_space(
    A: Operator, size: int, near_null_space: Any, coordinates: Any
) -> tuple[Array | None, Array | GridPoints | None]:
    """Return the near-null space, ``(n, modes)``, and centred coordinates, each None or on the device of A. Collective.

    Those of a structured mesh stay :class:`GridPoints`; they are for a single rank.
    """
    nodes, communicator = A.shape[0] // size, communicator_of(A)
    with communicator.together():
        modes = None if near_null_space is None else _checked_modes(near_null_space, nodes * size, A.device)
        points = None if coordinates is None else _checked_points(coordinates, nodes, A.device)
        if modes is None and points is not None:
            # Its checks, before the matrix is read; on the host, since a GPU would compile kernels for one node.
            motions_about_origin(np.zeros((min(1, nodes), points.shape[1])), size)
    widths = {
        "modes": None if modes is None else modes.shape[1],
        "dimensions": None if points is None else points.shape[1],
    }
    communicator.check_same(**widths)
    if points is None:
        return modes, None
    return modes, points.centred() if isinstance(points, GridPoints) else centred(points, communicator)


def _checked_modes(near_null_space: Any, unknowns: int, device: Device) -> Array:
    modes = _real(near_null_space, "near_null_space", device)
    check_shape_of_modes(modes.shape, unknowns, finite=_finite(modes))
    return modes.reshape(-1, 1) if modes.ndim == 1 else modes


def check_shape_of_modes(shape: tuple[int, ...], unknowns: int, *, finite: bool = True) -> None:
    """Refuse a near-null space of another shape than ``(unknowns, 1 to 8)`` or ``(unknowns,)``, or of numbers not finite."""
    one_to_eight = len(shape) == 1 or (len(shape) == 2 and 1 <= shape[1] <= _MOST_MODES)
    if not (one_to_eight and shape[0] == unknowns):
        raise InputError(
            f"near_null_space must be of shape ({unknowns}, modes) with 1 to {_MOST_MODES} modes, not {shape}"
        )
    if not finite:
        raise InputError("near_null_space must be finite; some of its numbers are NaN or infinite")


def _checked_points(coordinates: Any, nodes: int, device: Device) -> Array | GridPoints:
    if isinstance(coordinates, GridPoints) and len(coordinates) == nodes:
        return coordinates
    points = _real(coordinates, "coordinates", device)
    if points.ndim != 2 or len(points) != nodes:
        raise InputError(f"coordinates must be of shape ({nodes}, dimensions), not {points.shape}")
    if not _finite(points):
        raise InputError("coordinates must be finite; some are NaN or infinite")
    return points


def _real(values: Any, name: str, device: Device) -> Array:
    """Return an array on a device as float64; refuse complex numbers, of which a part would be lost."""
    kind = np.dtype(getattr(values, "dtype", None) or np.asarray(values).dtype)
    if kind.kind == "c":
        raise InputError(f"{name} must be real numbers, not {kind}")
    return device.asarray(values, dtype=np.float64)


def in_order(modes: Any, points: Any, block_size: int, reorder: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return a near-null space and coordinates, each of which may be None, in another order; ``reorder`` maps vectors to it."""
    if modes is not None:
        modes = reorder(CPU.asarray(modes, dtype=np.float64))
    if points is not None:  # those of a node stay together
        points = CPU.asarray(points() if callable(points) else points, dtype=np.float64)
        points = points[reorder(np.arange(len(points) * block_size))[::block_size] // block_size]
    return modes, points


def _finite(array: Array) -> bool:
    """Return whether all numbers are finite, and their squares not too large."""
    flat = array.reshape(-1)
    return math.isfinite(VectorSpace(device_of(array)).dot(flat, flat))
