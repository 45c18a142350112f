"""Sorting in kernels of the CPU, where NumPy's takes seconds to compile: few numbers by insertion, many by Shell's algorithm."""

from __future__ import annotations

from penstock.spmv.compilation.jit import inlined
from penstock.spmv.device import Array

# Up to this many numbers, insertion alone is fastest.
_FEW = 64


@inlined
def sort_part(numbers: Array, start: int, stop: int) -> None:
    """Sort the numbers from place ``start`` to ``stop`` of an array, in place."""
    gap = 1 if stop - start <= _FEW else (stop - start) * 5 // 11
    while gap > 0:
        for place in range(start + gap, stop):
            number, before = numbers[place], place - gap
            while before >= start and numbers[before] > number:
                numbers[before + gap] = numbers[before]
                before -= gap
            numbers[before + gap] = number
        gap = 0 if gap == 1 else max(1, gap * 5 // 11)


@inlined
def sort_with(numbers: Array, others: Array, count: int) -> None:
    """Sort the first ``count`` numbers of an array, and put others in the same order."""
    gap = 1 if count <= _FEW else count * 5 // 11
    while gap > 0:
        for place in range(gap, count):
            number, other, before = numbers[place], others[place], place - gap
            while before >= 0 and numbers[before] > number:
                numbers[before + gap], others[before + gap] = numbers[before], others[before]
                before -= gap
            numbers[before + gap], others[before + gap] = number, other
        gap = 0 if gap == 1 else max(1, gap * 5 // 11)
