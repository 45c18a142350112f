"""How symmetric a matrix is: to the last bit, to rounding, or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange

from penstock.spmv.compilation.cuda_module import CudaSource, launch, type_names
from penstock.spmv.compilation.jit import parallel_kernel, serial_kernel
from penstock.spmv.device import CPU, Array, Device

#: Kernels that examine the entries of a CSR matrix, and fill other formats with them.
CONVERSION_KERNELS = CudaSource("penstock.spmv.kernels", "conversion.cu")

#: Largest difference of mirror images, relative to the diagonal entries of row and column, that counts as rounding: sums of
#: element matrices in another order differ by some 1e-16 of these.
_ROUNDING = 1e-12


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


def measure_symmetry(
    device: Device, shape: tuple[int, int], row_offsets: Array, column_indices: Array, values: Array
) -> Symmetry:
    """Compare every entry of a CSR matrix with its mirror image; sorted rows, one pass with a binary search an entry."""
    if shape[0] != shape[1]:
        return Symmetry(-1)
    rows = shape[0]
    if device.kind == "cuda":
        count = device.xp.zeros(1, dtype=np.int32)
        function = CONVERSION_KERNELS.function(f"count_asymmetric<{type_names(values, row_offsets)}>")
        launch(function, rows, 256, (np.int64(rows), row_offsets, column_indices, values, count))
        if not int(count[0]):
            return Symmetry(0)
        row_offsets, column_indices, values = (CPU.asarray(array) for array in (row_offsets, column_indices, values))
    row_offsets = row_offsets.astype(np.int64, copy=False)  # the kernels are compiled for one type of offsets
    differing, beyond = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
    largest, columns = np.zeros(rows), np.zeros(rows, dtype=np.int64)
    lengths, squares = np.zeros(rows), np.zeros(rows)
    _root_of_diagonal(row_offsets, column_indices, values, lengths)
    _compare(row_offsets, column_indices, values, lengths, _ROUNDING, differing, beyond, largest, columns, squares)
    worst = int(largest.argmax()) if rows else 0
    where: dict[str, Any] = {"row": worst, "column": int(columns[worst])} if rows else {}
    counts = {"differing": int(differing.sum()), "beyond_rounding": int(beyond.sum())}
    return Symmetry(
        **counts,
        largest=float(largest.max(initial=0.0)),
        skew_norm=max(float(np.sqrt(squares.sum())), np.finfo(float).tiny * counts["differing"]),
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


@parallel_kernel
def _root_of_diagonal(row_offsets: Array, columns: Array, values: Array, lengths: Array) -> None:
    for row in prange(lengths.shape[0]):
        entry = _find(row, row, row_offsets, columns)
        if entry >= 0:
            lengths[row] = np.sqrt(abs(np.float64(values[entry])))


@parallel_kernel
def _compare(
    row_offsets: Array,
    columns: Array,
    values: Array,
    lengths: Array,
    rounding: float,
    differing: Array,
    beyond: Array,
    largest: Array,
    where: Array,
    squares: Array,
) -> None:
    for row in prange(lengths.shape[0]):
        for entry in range(row_offsets[row], row_offsets[row + 1]):
            column = columns[entry]
            mirror = _find(column, row, row_offsets, columns)
            image = np.float64(values[mirror]) if mirror >= 0 else 0.0
            if mirror < 0 or values[mirror] != values[entry]:
                differing[row] += 1
                scale = lengths[row] * lengths[column]
                difference = abs(np.float64(values[entry]) - image)
                squares[row] += difference * difference
                relative = difference / scale if scale > 0.0 else (np.inf if difference > 0.0 else 0.0)
                if relative > rounding:
                    beyond[row] += 1
                if relative > largest[row]:
                    largest[row], where[row] = relative, column
