"""The files of a linear system: right-hand sides, a first guess, the solution."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from penstock.experiments.reporting.atomic import write_file
from penstock.files.arrays import check_fits_memory, open_array
from penstock.files.registry import read_vectors
from penstock.spmv import InputError

Matrix = np.ndarray[Any, Any]

_MOST_COLUMNS = 1_000_000


# Columns


def parse_columns(text: str) -> list[int]:
    """Read columns such as ``0,2-4``: numbers and ascending ranges."""
    columns: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", part, re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f"--columns takes columns of B, counted from 0, such as 0,2-4, not {text!r}")
        if len(columns) + int(match[2] or match[1]) - int(match[1]) > _MOST_COLUMNS:
            raise InputError(f"--columns {text!r} names more than {_MOST_COLUMNS:,} columns; choose fewer")
        columns += range(int(match[1]), int(match[2] or match[1]) + 1)
    return columns


def parse_count(text: str) -> int:
    """Read the number of right-hand sides to make up, a positive integer."""
    if not re.fullmatch(r"\s*\d{1,18}\s*", text, re.ASCII) or not int(text):
        raise InputError(
            f"without B, --columns is the number of right-hand sides to make up, 1 or more, not {text!r}; "
            "give a file B to choose columns of it"
        )
    return int(text)


def column_ranges(columns: Sequence[int]) -> str:
    """Write columns as :func:`parse_columns` reads them.

    Examples
    --------
    >>> column_ranges([0, 2, 3, 4])
    '0,2-4'
    """
    runs: list[list[int]] = []
    for column in columns:
        if runs and column == runs[-1][1] + 1:
            runs[-1][1] = column
        else:
            runs.append([column, column])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# Right-hand sides, guesses and solutions


def read_right_hand_sides(path: Path, columns: Sequence[int] | None = None) -> Matrix:
    """Read right-hand sides, float64 of shape (n, columns), all by default.

    Files are those for which :data:`~penstock.files.reader.READERS` has a reader of vectors, of shape (n,) or (n, columns).
    """
    array = read_vectors(path)
    count = array.shape[1]
    if not count:
        raise InputError(f"{path} holds an array of shape {array.shape}; expected at least one column")
    chosen = range(count) if columns is None else columns
    if max(chosen) >= count:
        raise InputError(
            f"{path} has no column {max(chosen)}: it has {count}, counted from 0; choose others with --columns"
        )
    check_fits_memory(2 * 8 * array.shape[0] * len(chosen), f"the right-hand sides of {path}")
    array = array[:, list(chosen)]
    dense = np.ascontiguousarray(array.toarray() if scipy.sparse.issparse(array) else array, dtype=np.float64)
    _check_finite(dense, path)
    return dense


def read_guess(path: Path, shape: tuple[int, int]) -> Matrix:
    """Read a first guess of the shape of the right-hand sides, such as the solution of an interrupted solve."""
    if not path.name.lower().endswith(".npy"):
        raise InputError(f"a guess is an array of numpy.save (.npy), such as solution.npy, not {path}")
    array = _load_array(path, "a guess")
    if array.shape != shape and not (shape[1] == 1 and array.shape == shape[:1]):
        expected = f"{shape[:1]}" if shape[1] == 1 else f"{shape}"
        raise InputError(f"the guess {path} has shape {array.shape}; expected {expected}, that of the solution")
    dense = np.ascontiguousarray(array.reshape(shape), dtype=np.float64)
    _check_finite(dense, path)
    return dense


def read_node_array(path: Path, purpose: str) -> Matrix:
    """Read coordinates of nodes or a near-null space, an ``.npy`` file of finite numbers, one row for each node or unknown."""
    if not path.name.lower().endswith(".npy"):
        raise InputError(f"{purpose} are an array of numpy.save (.npy), not {path}")
    array = _load_array(path, purpose)
    dense = np.ascontiguousarray(array.reshape(len(array), -1), dtype=np.float64)
    _check_finite(dense, path)
    return dense


def write_solution(path: Path, x: Matrix) -> None:
    """Write an array for ``numpy.load``, completely or not at all."""
    write_file(path, lambda file: np.save(file, x))


def _load_array(path: Path, purpose: str) -> Matrix:
    array = open_array(path)
    if array.ndim not in (1, 2) or array.dtype.kind not in "fiub":
        raise InputError(
            f"{path} holds an array of type {array.dtype} and shape {array.shape}; {purpose} are real, of shape (n,) or "
            "(n, columns)"
        )
    return array


def _check_finite(dense: Matrix, path: Path) -> None:
    finite = np.isfinite(dense)
    if not finite.all():
        row, column = (int(place) for place in np.unravel_index(int(finite.argmin()), dense.shape))
        which = f" of column {column} of those chosen" if dense.shape[1] > 1 else ""
        raise InputError(f"{path} holds {dense[row, column]} at row {row}{which}; all entries must be finite")
