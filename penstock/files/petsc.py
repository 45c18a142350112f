"""Matrices and vectors in PETSc's binary format, as ``MatView`` and ``VecView`` write them: numbers with the largest byte first.

A matrix is four integers (a mark, rows, columns, entries), the lengths of its rows, its columns and its values; a vector is a
mark, a length and its values (PETSc, *MatLoad* and *VecLoad*). Integers have 32 bits, or 64 where PETSc was configured so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from penstock.files.arrays import check_fits_memory
from penstock.files.parallel_read import read_numbers
from penstock.files.reader import READERS, Reader
from penstock.files.slabs import Arrays, Slabs, slab_bounds
from penstock.spmv import InputError

_MATRIX, _VECTOR = 1211216, 1211214


def is_petsc(path: Path) -> bool:
    """Return whether a file begins as a matrix or vector of PETSc does."""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
    except OSError:
        return False
    return any(int.from_bytes(start[:size], "big") in (_MATRIX, _VECTOR) for size in (4, 8) if len(start) == 8)


@dataclass(frozen=True)
class PetscMatrix:
    """A matrix in a file, read slab by slab; :meth:`open` and :meth:`slabs` refuse a damaged file."""

    path: Path
    integer: np.dtype[Any]
    shape: tuple[int, int]
    nnz: int

    @classmethod
    def open(cls, path: Path) -> PetscMatrix:
        """Read the header, and check that the file is as long as it says."""
        for integer in (np.dtype(">i4"), np.dtype(">i8")):
            header = np.fromfile(path, dtype=integer, count=4)
            if header.size == 4 and header[0] == _MATRIX:
                rows, columns, nnz = (int(number) for number in header[1:])
                matrix = cls(path, integer, (rows, columns), nnz)
                if min(rows, columns, nnz) < 0 or path.stat().st_size != matrix._values_start + 8 * nnz:
                    raise InputError(
                        f"{path} is a matrix of PETSc of {rows} x {columns} with {nnz} entries of 8 bytes, or -1 if dense, but "
                        f"has {path.stat().st_size} bytes: it was cut off, holds more objects, or is complex or of single "
                        "precision"
                    )
                return matrix
        raise InputError(f"{path} is not a matrix of PETSc: it does not begin with {_MATRIX}")

    @property
    def _columns_start(self) -> int:
        return self.integer.itemsize * (4 + self.shape[0])

    @property
    def _values_start(self) -> int:
        return self._columns_start + self.integer.itemsize * self.nnz

    def offsets(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return where rows begin among the entries."""
        rows = self.shape[0]
        check_fits_memory(4 * 8 * (rows + 1), f"the row lengths of {self.path}")
        lengths = read_numbers(self.path, 4 * self.integer.itemsize, rows, self.integer)
        if (lengths.size and lengths.min() < 0) or int(lengths.sum(dtype=np.int64)) != self.nnz:
            raise InputError(f"{self.path} is damaged: the lengths of its rows do not add up to {self.nnz} entries")
        return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))

    def arrays(self) -> Arrays:
        """Return the values, columns and offsets of all rows."""
        offsets = self.offsets()
        columns = read_numbers(self.path, self._columns_start, self.nnz, self.integer)
        return read_numbers(self.path, self._values_start, self.nnz, ">f8"), columns, offsets

    def slabs(self) -> Iterator[scipy.sparse.csr_array]:
        """Yield the rows in slabs."""
        size, offsets = self.integer.itemsize, self.offsets()
        for start, stop in slab_bounds(self.path, offsets):
            first, count = int(offsets[start]), int(offsets[stop] - offsets[start])
            columns = np.fromfile(self.path, self.integer, count, offset=self._columns_start + size * first)
            values = np.fromfile(self.path, ">f8", count, offset=self._values_start + 8 * first)
            if count and not 0 <= int(columns.min()) <= int(columns.max()) < self.shape[1]:
                raise InputError(f"{self.path} is damaged: rows {start} to {stop - 1} have columns outside the matrix")
            arrays = (values.astype(np.float64), columns.astype(np.int64), offsets[start : stop + 1] - first)
            yield scipy.sparse.csr_array(arrays, shape=(stop - start, self.shape[1]))


def read_petsc_vector(path: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Read a vector, or raise an InputError if the file is not such a vector, or damaged."""
    for integer in (np.dtype(">i4"), np.dtype(">i8")):
        header = np.fromfile(path, dtype=integer, count=2)
        if header.size == 2 and header[0] == _VECTOR:
            start, count = 2 * integer.itemsize, int(header[1])
            if count < 0 or path.stat().st_size != start + 8 * count:
                raise InputError(f"{path} is a vector of PETSc of {count} numbers of 8 bytes, but has another length")
            return np.fromfile(path, ">f8", count, offset=start).astype(np.float64)
    raise InputError(f"{path} is not a vector of PETSc: it does not begin with {_VECTOR}")


def _slabs(path: Path) -> Slabs:
    """Open a matrix in PETSc's binary format."""
    matrix = PetscMatrix.open(path)
    return Slabs(matrix.shape, matrix.nnz, matrix.slabs(), matrix.arrays)


READERS.add(
    "petsc",
    Reader(
        "PETSc",
        "file in PETSc's binary format",
        (".petsc",),
        recognizes=is_petsc,
        slabs=_slabs,
        vectors=read_petsc_vector,
    ),
)
