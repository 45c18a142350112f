"""Checksums of the entries that a CSR matrix stores, to recognise another matrix with the same pattern."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numba import prange

from penstock.spmv.compilation.jit import parallel_kernel
from penstock.spmv.device import Array, Device
from penstock.spmv.errors import InputError
from penstock.spmv.formats.csr import CsrMatrix

# Entries of an array that share a checksum; on a GPU this many are worked on at once, in four times as much memory.
_PIECE, _PIECE_ON_GPU = 1 << 12, 1 << 22
# Odd numbers with well mixed bits (Steele, Lea and Flood 2014, SplitMix64).
_PLACE, _MIX, _MIX_AGAIN = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class Pattern:
    """The checksums of a CSR matrix's row offsets and column indices, one for every ``piece`` entries.

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
    piece: int

    @classmethod
    def of(cls, A: CsrMatrix) -> Self:
        """Return the pattern of a matrix; reads 4 bytes an entry."""
        piece = _PIECE_ON_GPU if A.device.kind == "cuda" else _PIECE
        offsets, columns = (_checksums(A.device, array, piece) for array in (A.row_offsets, A.column_indices))
        return cls(A.shape, A.nnz, offsets, columns, piece)

    def check(self, A: CsrMatrix, name: str = "the new matrix") -> None:
        """Raise an InputError that says what differs, and about where, unless a matrix has this pattern."""
        if self.shape != A.shape:
            raise InputError(f"{name} has shape {A.shape}, the prepared one {self.shape}; prepare the new one")
        offsets = _checksums(A.device, A.row_offsets, self.piece)
        columns = _checksums(A.device, A.column_indices, self.piece)
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
            first = int(np.argmax(offsets != self.row_offsets)) * self.piece
            return range(max(0, first - 1), min(A.shape[0], first + self.piece))
        first = int(np.argmax(columns != self.column_indices)) * self.piece
        ends = A.device.xp.asarray([first, min(A.nnz, first + self.piece) - 1])
        start, stop = A.device.xp.searchsorted(A.row_offsets, ends, side="right").tolist()
        return range(start - 1, stop)


def _checksums(device: Device, array: Array, piece: int) -> np.ndarray[Any, Any]:
    """Return a checksum of each piece of an array of integers: a sum of mixed entries and places, modulo 2^64."""
    count = -(-array.size // piece)
    if device.kind == "cpu":
        sums = np.zeros(count, dtype=np.uint64)
        _add_up(array, piece, sums)
        return sums
    xp, totals = device.xp, []
    for number in range(count):
        part = array[number * piece : (number + 1) * piece].astype(np.uint64)
        mixed = part + xp.arange(number * piece + 1, number * piece + 1 + part.size, dtype=np.uint64) * np.uint64(
            _PLACE
        )
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_AGAIN)
        totals.append((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))
    return np.array([int(one) for one in totals], dtype=np.uint64)


@parallel_kernel
def _add_up(array: Array, piece: int, sums: Array) -> None:
    for number in prange(sums.size):
        total = np.uint64(0)
        for place in range(number * piece, min(array.size, (number + 1) * piece)):
            mixed = np.uint64(array[place]) + np.uint64(place + 1) * np.uint64(_PLACE)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_AGAIN)
            total += mixed ^ (mixed >> np.uint64(31))
        sums[number] = total
