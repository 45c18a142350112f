"""One pass over the entries of a CSR matrix that sees all that a solver must know before it uses them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import Any, Self

import numpy as np

from penstock.spmv.compilation.cuda_module import NOMINAL_WARPS, CudaSource, launch, type_names
from penstock.spmv.compilation.jit import serial_kernel, shared_range
from penstock.spmv.device import CPU, Array, Device


class Defect(IntFlag):
    """What makes the arrays of a CSR matrix unfit for kernels, which check nothing."""

    NONE = 0
    OFFSETS = 1
    RANGE = 2
    ORDER = 4
    VALUES = 8


#: Kernels that examine the entries of a CSR matrix, and fill other formats with them.
CONVERSION_KERNELS = CudaSource("penstock.spmv.kernels", "conversion.cu")

# Odd numbers with well mixed bits (Steele, Lea and Flood 2014, SplitMix64).
_LOW, _HIGH, _MIX, _MIX_AGAIN = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Groups of lanes that share the rows on a GPU; each adds its results to the same numbers.
_GROUPS = 4 * NOMINAL_WARPS
# Rows whose results a CPU thread adds up.
_PIECE = 1024


@dataclass(frozen=True)
class Survey:
    """What one pass over rows of a CSR matrix has seen; those of several row slabs add up.

    Parameters
    ----------
    defects : Defect
        Offsets that descend or run past the entries, columns out of range, rows that do not ascend, values that are not finite.
    longest, squares : int
        Entries of the longest row, and the sum of the squares of all rows' entries.
    positive : int
        Rows with a positive entry on the diagonal.
    skew : int
        A sum modulo 2^64 over all entries off the diagonal, of mixed bits of row, column and value: added above the diagonal,
        and subtracted below it with row and column exchanged. It is 0 if each entry equals its mirror image, and otherwise with
        a chance of 2^-64; so nothing is searched for in a symmetric matrix.
    """

    defects: Defect = Defect.NONE
    longest: int = 0
    squares: int = 0
    positive: int = 0
    skew: int = 0

    def __add__(self, other: Self) -> Survey:
        return Survey(
            self.defects | other.defects,
            max(self.longest, other.longest),
            self.squares + other.squares,
            self.positive + other.positive,
            (self.skew + other.skew) % (1 << 64),
        )


def survey(
    device: Device,
    columns: int,
    row_offsets: Array,
    column_indices: Array,
    values: Array,
    first_row: int = 0,
) -> Survey:
    """Survey the rows of a CSR matrix from ``first_row`` on, on the device of its arrays; reads every entry once.

    ``row_offsets`` may be wrong in any way but their number; entries that they do not lead to are not read.
    """
    rows = row_offsets.size - 1
    if device.kind == "cuda":
        seen = device.xp.zeros(5, dtype=np.int64)
        add_survey(seen, columns, row_offsets, column_indices, values, first_row)
        return survey_of(seen)
    pieces = -(-rows // _PIECE)
    seen = np.zeros((5, pieces), dtype=np.int64)
    bits = values.view(np.uint64 if values.dtype.itemsize == 8 else np.uint32)
    infinite = np.uint64(0x7FF0000000000000 if values.dtype.itemsize == 8 else 0x7F800000)
    _survey(pieces, row_offsets.astype(np.int64, copy=False), column_indices, bits, infinite, first_row, columns, *seen)
    defects, longest = int(np.bitwise_or.reduce(seen[0])), int(seen[1].max(initial=0))
    squares, positive, skew = (int(of.sum()) for of in seen[2:])
    return Survey(Defect(defects), longest, squares, positive, skew % (1 << 64))


def add_survey(
    seen: Array, columns: int, row_offsets: Array, column_indices: Array, values: Array, first_row: int
) -> None:
    """Launch what adds a survey of rows on a GPU to what has been ``seen`` of others, at first five zeros: int64, (5,)."""
    rows, bits = row_offsets.size - 1, values.view(np.int64 if values.dtype.itemsize == 8 else np.int32)
    function = CONVERSION_KERNELS.function(f"survey<{type_names(bits, row_offsets)}>")
    numbers = (rows, first_row, columns, min(column_indices.size, values.size))
    arguments = (*map(np.int64, numbers), row_offsets, column_indices, bits, seen)
    launch(function, 32 * min(rows, _GROUPS), 256, arguments)


def survey_of(seen: Array) -> Survey:
    """Return the survey that :func:`add_survey` has added up; waits for it."""
    defects, longest, squares, positive, skew = CPU.asarray(seen).tolist()
    return Survey(Defect(defects), longest, squares, positive, skew % (1 << 64))


@serial_kernel
def mixed_bits(low: Any, high: Any, bits: Any) -> Any:
    """Return 64 mixed bits of a place and a value, as ``mixed`` of conversion.cu does."""
    mixed = bits + np.uint64(low) * np.uint64(_LOW) + np.uint64(high) * np.uint64(_HIGH)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_AGAIN)
    return mixed ^ (mixed >> np.uint64(31))


@shared_range(least=1)
def _survey(
    begin: int,
    end: int,
    row_offsets: Array,
    column_indices: Array,
    bits: Array,
    infinite: Any,
    first_row: int,
    columns: int,
    defects: Array,
    longest: Array,
    squares: Array,
    positive: Array,
    skew: Array,
) -> None:
    rows, entries = row_offsets.shape[0] - 1, min(column_indices.shape[0], bits.shape[0])
    # The sign bit stands just above the exponent, whose lowest bit the mask loses when it is doubled.
    negative_zero = (infinite << np.uint64(1)) & ~infinite
    for piece in range(begin, end):
        found, most, square, above, total = 0, 0, 0, 0, np.uint64(0)
        for place in range(piece * _PIECE, min(rows, (piece + 1) * _PIECE)):
            start, stop, row = row_offsets[place], row_offsets[place + 1], first_row + place
            if start < 0 or stop < start or stop > entries:
                found |= 1
                continue
            most, previous = max(most, stop - start), np.int64(-1)
            square += (stop - start) ** 2
            for entry in range(start, stop):
                column, value = np.int64(column_indices[entry]), np.uint64(bits[entry])
                if column < 0 or column >= columns:
                    found |= 2
                if column <= previous:
                    found |= 4
                previous = column
                if value & infinite == infinite:
                    found |= 8
                if value == negative_zero:
                    value = np.uint64(0)
                if column > row:
                    total += mixed_bits(row, column, value)
                elif column < row:
                    total -= mixed_bits(column, row, value)
                elif value != 0 and value < negative_zero:
                    above += 1
        defects[piece], longest[piece], squares[piece] = found, most, square
        positive[piece], skew[piece] = above, np.int64(total)
