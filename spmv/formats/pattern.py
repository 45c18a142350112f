"""Checksums of the entries that a CSR matrix stores, to recognise another matrix with the same pattern."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from penstock.spmv.compilation.cuda_module import launch, type_names
from penstock.spmv.compilation.jit import shared_range
from penstock.spmv.device import CPU, Array, Device
from penstock.spmv.errors import InputError
from penstock.spmv.formats.csr import CsrMatrix
from penstock.spmv.formats.survey import CONVERSION_KERNELS, mixed_bits

# Entries of an array that share a checksum.
_PIECE = 1 << 12


@dataclass(frozen=True)
class Pattern:
    """The checksums of a CSR matrix's row offsets and column indices, one for every 4,096 entries.

    Two matrices with the same checksums have the same pattern, but for a chance of 2^-64.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> A = Cantilever(nodes=4, dof=3).matrix("csr")
    >>> Pattern.of(A).check(A)
    """

    shape: tuple[int, int]
    nnz: int
    row_offsets: np.ndarray[Any, Any]
    column_indices: np.ndarray[Any, Any]

    @classmethod
    def of(cls, A: CsrMatrix) -> Self:
        """Return the pattern of a matrix; reads 4 bytes an entry."""
        return cls(A.shape, A.nnz, *_checksums_of(A))

    def check(self, A: CsrMatrix, name: str = "the new matrix") -> None:
        """Raise an InputError that says what differs, and about where, unless a matrix has this pattern."""
        if self.shape != A.shape:
            raise InputError(f"{name} has shape {A.shape}, the prepared one {self.shape}; prepare the new one")
        offsets, columns = _checksums_of(A)
        same_counts = np.array_equal(offsets, self.row_offsets)
        if same_counts and np.array_equal(columns, self.column_indices):
            return
        what = f"{name} stores {A.nnz} entries, the prepared one {self.nnz}"
        if self.nnz == A.nnz:
            what = f"{name} stores {A.nnz} entries like the prepared one, but at other places"
        rows = self._rows_of_first(offsets, columns, A, by_counts=not same_counts)
        raise InputError(
            f"{what}: the patterns differ first in rows {rows.start} to {rows.stop - 1}; store zeros where the pattern has "
            "entries that are zero now, or prepare the new matrix"
        )

    def _rows_of_first(self, offsets: Any, columns: Any, A: CsrMatrix, *, by_counts: bool) -> range:
        """Return a range of rows that holds the first difference."""
        if by_counts:
            first = int(np.argmax(offsets != self.row_offsets)) * _PIECE
            return range(max(0, first - 1), min(A.shape[0], first + _PIECE))
        first = int(np.argmax(columns != self.column_indices)) * _PIECE
        ends = A.device.xp.asarray([first, min(A.nnz, first + _PIECE) - 1])
        start, stop = A.device.xp.searchsorted(A.row_offsets, ends, side="right").tolist()
        return range(start - 1, stop)


def _checksums_of(A: CsrMatrix) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the checksums of the row offsets and of the column indices."""
    return checksums(A.device, A.row_offsets), checksums(A.device, A.column_indices)


def checksums(device: Device, array: Array) -> np.ndarray[Any, Any]:
    """Return a checksum of each piece of an array of integers: a sum of mixed entries and places, modulo 2^64."""
    pieces = -(-array.size // _PIECE)
    sums = device.xp.zeros(pieces, dtype=np.uint64)
    if device.kind == "cpu":
        _add_up(sums.size, array, sums)
        return sums  # type: ignore[no-any-return]
    function = CONVERSION_KERNELS.function(f"checksums<{type_names(array)}>")
    launch(function, 32 * pieces, 256, (*map(np.int64, (pieces, _PIECE, array.size)), array, sums))
    return CPU.asarray(sums)  # type: ignore[no-any-return]


@shared_range(least=1)
def _add_up(begin: int, end: int, array: Array, sums: Array) -> None:
    for number in range(begin, end):
        total = np.uint64(0)
        for place in range(number * _PIECE, min(array.size, (number + 1) * _PIECE)):
            total += mixed_bits(place + 1, 0, np.uint64(array[place]))
        sums[number] = total
