"""Matrices in files of other programs, read as slabs of rows one after the other, so that none needs to fit in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import scipy.io
import scipy.sparse

from penstock.array_files import check_fits_memory
from penstock.petsc_files import PetscMatrix
from penstock.spmv import InputError

__all__ = ["Slabs", "mat_slabs", "petsc_slabs", "recut"]

_MULTIPLE = 840  # rows: whole blocks of 1 to 8


class Slabs(NamedTuple):
    """A matrix in a file: its shape, its entries, and its rows in slabs, a list of one if it has been read as a whole."""

    shape: tuple[int, int]
    nnz: int
    rows: Iterable[scipy.sparse.csr_array]

    def whole(self, what: str) -> scipy.sparse.csr_array:
        """Return all rows; those that are to be read must fit the memory twice, with indices of 64 bits."""
        if isinstance(self.rows, list):
            [rows] = self.rows
            return rows
        check_fits_memory(2 * (16 * self.nnz + 8 * self.shape[0]), what)
        return scipy.sparse.vstack(list(self.rows), format="csr")


def petsc_slabs(path: Path) -> Slabs:
    """Open a matrix in PETSc's binary format."""
    matrix = PetscMatrix.open(path)
    return Slabs(matrix.shape, matrix.nnz, matrix.slabs())


def mat_slabs(path: Path) -> Slabs:
    """Read a sparse matrix from a MATLAB file, ``Problem.A`` of the SuiteSparse collection or the only one there; as a whole."""
    check_fits_memory(3 * path.stat().st_size, f"the matrix in {path}")
    try:
        contents = scipy.io.loadmat(path, spmatrix=False)
    except NotImplementedError:  # what SciPy raises of version 7.3
        raise InputError(f"{path} is of MATLAB 7.3, which is HDF5; save it in version 7, or as Matrix Market") from None
    problem = contents.get("Problem")
    given = problem["A"].item() if problem is not None and "A" in (problem.dtype.names or ()) else None
    matrices = [given] if given is not None else [of for of in contents.values() if scipy.sparse.issparse(of)]
    if len(matrices) != 1 or not scipy.sparse.issparse(matrices[0]):
        raise InputError(f"{path} holds {len(matrices)} sparse matrices; expected one, or Problem.A")
    A = scipy.sparse.csr_array(matrices[0])
    return Slabs(A.shape, A.nnz, [A])


def recut(slabs: Iterable[Any], nbytes: int) -> Iterator[scipy.sparse.csr_array]:
    """Yield the same rows in slabs of about so many bytes, which end at multiples of 840 rows."""
    held: list[scipy.sparse.csr_array] = []
    for slab in slabs:
        held.append(scipy.sparse.csr_array(slab))
        if sum(12 * of.nnz for of in held) >= nbytes:
            whole = scipy.sparse.vstack(held, format="csr")
            each = max(1, math.floor(whole.shape[0] * nbytes / max(1, 12 * whole.nnz)) // _MULTIPLE) * _MULTIPLE
            last = whole.shape[0] // each * each
            yield from (whole[start : start + each] for start in range(0, last, each))
            held = [whole[last:]] if last < whole.shape[0] else []
    if held:
        yield scipy.sparse.vstack(held, format="csr")
