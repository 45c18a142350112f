"""How symmetric a matrix is: to the last bit, to rounding, or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.spmv.compilation.cuda_module import launch, type_names
from penstock.spmv.compilation.jit import serial_kernel, shared_range
from penstock.spmv.device import Array, Device
from penstock.spmv.formats.survey import CONVERSION_KERNELS

#: Largest difference of mirror images, relative to the diagonal entries of row and column, that counts as rounding: sums of
#: element matrices in another order differ by some 1e-16 of these.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Symmetry:
    """How far the entries of a matrix are from their mirror images.

    Parameters
    ----------
    differing : int
        Entries that differ in any bit from their mirror image; -1 if the matrix is not square.
    largest : float
        Largest difference of two mirror images relative to ``sqrt(|a_ii a_jj|)``. An entry without a mirror image differs by
        itself.
    row, column : int
        Where that is.
    beyond_rounding : int
        Entries whose relative difference exceeds 1e-12.
    skew_norm : float
        Bound of the norm of ``A`` less its mirrored upper half: the root of the squared differences of all mirror images.
    """

    differing: int
    largest: float = 0.0
    row: int = 0
    column: int = 0
    beyond_rounding: int = 0
    skew_norm: float = 0.0

    @property
    def exact(self) -> bool:
        """Every entry equals its mirror image bit by bit."""
        return self.differing == 0

    @property
    def to_rounding(self) -> bool:
        """Mirror images differ by no more than rounding, as sums in another order do; true of exact symmetry, too."""
        return self.differing >= 0 and self.beyond_rounding == 0

    @property
    def description(self) -> str:
        """How symmetric a matrix is that is so to rounding, in words."""
        if self.exact:
            return "exact"
        return f"to rounding: mirror images differ by up to {self.largest:.2g} of the diagonal"


def measure_symmetry(
    device: Device, shape: tuple[int, int], row_offsets: Array, column_indices: Array, values: Array
) -> Symmetry:
    """Compare every entry of a CSR matrix with its mirror image, on its device: a binary search an entry, in sorted rows."""
    if shape[0] != shape[1]:
        return Symmetry(-1)
    rows, xp = shape[0], device.xp
    differing, beyond, columns, unpaired = (xp.zeros(rows, dtype=np.int64) for _ in range(4))
    lengths, largest, squares = (xp.zeros(rows) for _ in range(3))
    results = (unpaired, differing, beyond, largest, columns, squares)
    if device.kind == "cpu":
        row_offsets = row_offsets.astype(np.int64, copy=False)  # the kernels are compiled for one type of offsets
        _root_of_diagonal(len(lengths), row_offsets, column_indices, values, lengths)
    else:
        names, count = type_names(values, row_offsets), np.int64(rows)
        root_of_diagonal = CONVERSION_KERNELS.function(f"root_of_diagonal<{names}>")
        compare_mirrors = CONVERSION_KERNELS.function(f"compare_mirrors<{names}>")
        launch(root_of_diagonal, rows, 256, (count, row_offsets, column_indices, values, lengths))
    for below in (False, True):
        if below and not int(unpaired.sum()):
            break  # as many entries above the diagonal have an image as there are entries below it
        arrays = (row_offsets, column_indices, values, lengths)
        if device.kind == "cpu":
            _compare(len(lengths), *arrays, ROUNDING, below, *results)
        else:
            launch(compare_mirrors, rows, 256, (count, *arrays, np.float64(ROUNDING), np.int32(below), *results))
    worst = int(largest.argmax()) if rows else 0
    where: dict[str, Any] = {"row": worst, "column": int(columns[worst])} if rows else {}
    counts = {"differing": int(differing.sum()), "beyond_rounding": int(beyond.sum())}
    return Symmetry(
        **counts,
        largest=float(largest[worst]) if rows else 0.0,
        skew_norm=max(float(xp.sqrt(squares.sum())), np.finfo(float).tiny * counts["differing"]),
        **where,
    )


@serial_kernel
def _find(row: int, column: int, row_offsets: Array, columns: Array) -> int:
    """Return where an entry stands, or -1."""
    low, stop = row_offsets[row], row_offsets[row + 1]
    high = stop
    while low < high:
        middle = (low + high) // 2
        if columns[middle] < column:
            low = middle + 1
        else:
            high = middle
    return low if low < stop and columns[low] == column else -1


@shared_range(least=4096)
def _root_of_diagonal(begin: int, end: int, row_offsets: Array, columns: Array, values: Array, lengths: Array) -> None:
    for row in range(begin, end):
        entry = _find(row, row, row_offsets, columns)
        if entry >= 0:
            lengths[row] = np.sqrt(abs(np.float64(values[entry])))


@shared_range(least=2048)
def _compare(
    begin: int,
    end: int,
    row_offsets: Array,
    columns: Array,
    values: Array,
    lengths: Array,
    rounding: float,
    below: bool,
    unpaired: Array,
    differing: Array,
    beyond: Array,
    largest: Array,
    where: Array,
    squares: Array,
) -> None:
    """Compare the entries above the diagonal with those below it, or look only for entries below it that have no image."""
    for row in range(begin, end):
        for entry in range(row_offsets[row], row_offsets[row + 1]):
            column = columns[entry]
            if (column < row) != below:
                unpaired[row] -= not below
                continue
            mirror = _find(column, row, row_offsets, columns)
            if mirror >= 0:
                unpaired[row] += column > row
                if below or values[mirror] == values[entry]:
                    continue
            count, image = (2, np.float64(values[mirror])) if mirror >= 0 else (1, 0.0)
            scale = lengths[row] * lengths[column]
            difference = abs(np.float64(values[entry]) - image)
            relative = difference / scale if scale > 0.0 else (np.inf if difference > 0.0 else 0.0)
            differing[row] += count
            squares[row] += count * difference * difference
            if relative > rounding:
                beyond[row] += count
            if relative > largest[row]:
                largest[row], where[row] = relative, column
