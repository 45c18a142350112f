"""Mean and deviation of the fields of several runs of the same body."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from penstock.experiments.reporting.atomic import replacing

_FIELDS = "VTKHDF/PointData"


def write_statistics(path: Path, files: Sequence[Path]) -> None:
    """Write the mean of every field in files of the same body, and the deviation of samples if there are several.

    Each file is read once for each of its fields, and three fields are in memory at a time.
    """
    with replacing(path) as partial:
        shutil.copyfile(files[0], partial)
        with h5py.File(partial, "r+") as written:
            points = written[_FIELDS]
            for name in list(points):
                mean, deviation = _moments(files, name)
                points[name][...] = mean
                if deviation is not None:
                    points.create_dataset(f"{name}_deviation", data=deviation)


def _moments(files: Sequence[Path], name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Return the mean and the deviation of a field, by Welford (1962), which subtracts no large numbers."""
    mean, squares = _read(files[0], name), np.zeros(())
    for count, file in enumerate(files[1:], start=2):
        value = _read(file, name)
        from_before = value - mean
        mean += from_before / count
        squares = squares + from_before * (value - mean)
    return mean, np.sqrt(squares / (len(files) - 1)) if len(files) > 1 else None


def _read(file: Path, name: str) -> np.ndarray[Any, Any]:
    with h5py.File(file) as opened:
        values: np.ndarray[Any, Any] = opened[_FIELDS][name][...]
    return values
