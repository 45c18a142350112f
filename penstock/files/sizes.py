"""Limits for matrices in files: sizes that a file announces are checked before anything of that size is allocated."""

from __future__ import annotations

from pathlib import Path

from penstock.files.arrays import check_fits_memory
from penstock.spmv import InputError

# With more rows than this for its entries, nearly all rows of a matrix would be empty.
_ROWS_OF_FEW_ENTRIES, _ROWS_AN_ENTRY = 1_000_000, 1000
# Bytes of an entry while rows are sorted, summed and packed, and of a row: measured are 78 to 102 for an entry.
_PACKED_NBYTES, _ROW_NBYTES = 112, 64


def check_rows(path: Path, rows: int, entries: int) -> None:
    """Raise an InputError if nearly all rows that a file announces would be empty."""
    if rows > _ROWS_OF_FEW_ENTRIES + _ROWS_AN_ENTRY * entries:
        raise InputError(f"{path} announces {rows} rows with {entries} entries: nearly all rows would be empty")


def check_whole_fits(path: Path, shape: tuple[int, int], entries: int) -> None:
    """Raise an InputError unless a matrix fits the memory twice, with values and indices of 64 bits."""
    check_fits_memory(2 * (16 * entries + 8 * shape[0]), f"the matrix in {path}")


def check_slab_fits(what: str, rows: int, entries: int) -> None:
    """Raise an InputError unless rows fit the memory while they are sorted, summed and packed."""
    check_fits_memory(_PACKED_NBYTES * entries + _ROW_NBYTES * rows, what)
