"""Matrices in files of other programs, read as slabs of rows one after the other, so that none needs to fit in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.io
import scipy.sparse

from penstock.array_files import check_fits_memory
from penstock.petsc_files import PetscMatrix, slab_bounds
from penstock.spmv import InputError

__all__ = ["Slabs", "hdf5_slabs", "mat_slabs", "petsc_slabs", "recut"]

#: The shape of a matrix, and its rows in slabs.
Slabs = tuple[tuple[int, int], Iterator[scipy.sparse.csr_array]]

_MULTIPLE = 840  # rows: whole blocks of 1 to 8


def petsc_slabs(path: Path) -> Slabs:
    """Open a matrix in PETSc's binary format."""
    matrix = PetscMatrix.open(path)
    return matrix.shape, matrix.slabs()


def hdf5_slabs(path: Path) -> Slabs:
    """Open a matrix in HDF5: a group with the data sets ``data``, ``indices`` and ``indptr`` of CSR, and its ``shape``.

    The group is the first one that has them; ``shape`` is an attribute or a data set, and may be missing of a square matrix.
    """
    with h5py.File(path) as file:
        name, group = _csr_group(path, file)
        rows = len(group["indptr"]) - 1
        given = (
            group.attrs["shape"] if "shape" in group.attrs else group["shape"][()] if "shape" in group else (rows, rows)
        )
        shape = tuple(int(size) for size in given)
        if len(shape) != 2 or shape[0] != rows:
            raise InputError(f"{path} holds a matrix of shape {shape}, but offsets of {rows} rows; it is damaged")
    return (shape[0], shape[1]), _hdf5_rows(path, name, (shape[0], shape[1]))


def _csr_group(path: Path, file: h5py.File) -> tuple[str, h5py.Group]:
    found: list[str] = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Group) and {"data", "indices", "indptr"} <= item.keys():
            found.append(name)

    visit("/", file)
    file.visititems(visit)
    if not found:
        raise InputError(f"{path} holds no group with data, indices and indptr, the arrays of a matrix in CSR")
    return found[0], file[found[0]]


def _hdf5_rows(path: Path, name: str, shape: tuple[int, int]) -> Iterator[scipy.sparse.csr_array]:
    with h5py.File(path) as file:
        group = file[name]
        all_offsets = group["indptr"][:].astype(np.int64)
        entries = {len(group["indices"]), len(group["data"])}
        if (np.diff(all_offsets) < 0).any() or all_offsets[0] != 0 or entries != {int(all_offsets[-1])}:
            raise InputError(f"{path} is damaged: its row offsets do not fit its entries")
        for start, stop in slab_bounds(all_offsets):
            offsets = all_offsets[start : stop + 1]
            inside = slice(int(offsets[0]), int(offsets[-1]))
            indices, values = group["indices"][inside], group["data"][inside]
            if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < shape[1]:
                raise InputError(f"{path} is damaged: it has columns outside the matrix")
            yield scipy.sparse.csr_array((values, indices, offsets - offsets[0]), shape=(offsets.size - 1, shape[1]))


def mat_slabs(path: Path) -> Slabs:
    """Read a sparse matrix from a MATLAB file, ``Problem.A`` of the SuiteSparse collection or the only one there; as a whole."""
    check_fits_memory(3 * path.stat().st_size, f"the matrix in {path}")
    try:
        contents = scipy.io.loadmat(path, spmatrix=False)
    except NotImplementedError:
        raise InputError(f"{path} is of MATLAB 7.3, which is HDF5; save it in version 7, or as Matrix Market") from None
    problem = contents.get("Problem")
    given = problem["A"].item() if problem is not None and "A" in (problem.dtype.names or ()) else None
    matrices = [given] if given is not None else [of for of in contents.values() if scipy.sparse.issparse(of)]
    if len(matrices) != 1 or not scipy.sparse.issparse(matrices[0]):
        raise InputError(f"{path} holds {len(matrices)} sparse matrices; expected one, or Problem.A")
    A = scipy.sparse.csr_array(matrices[0])
    return A.shape, iter([A])


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
