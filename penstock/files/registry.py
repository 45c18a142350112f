"""Matrices by name: in files of several programs, and finite-element matrices that are generated."""

from __future__ import annotations

import bz2
import enum
import gzip
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from penstock.fem import Cantilever, LognormalMaterial
from penstock.files.arrays import ArrayArchive, check_fits_memory, check_is_file, failures_named
from penstock.files.csr_groups import hdf5_slabs, zarr_slabs
from penstock.files.mat import read_mat
from penstock.files.matrix_market import open_plain, read_matrix_market
from penstock.files.petsc import is_petsc
from penstock.files.sizes import check_rows, check_whole_fits
from penstock.files.slabs import Slabs, petsc_slabs
from penstock.files.zarr_folders import is_zarr
from penstock.spmv import InputError
from penstock.spmv.formats.limits import INT32_MAX
from penstock.spmv.formats.validation import check_indices, check_values

ACCEPTED = (
    "a Matrix Market file (.mtx, .mtx.gz or .mtx.bz2), a file of scipy.sparse.save_npz (.npz), of PETSc (binary, any name), "
    "of HDF5 (.h5 or .hdf5) or Zarr (a folder), with data, indices and indptr in a group, of MATLAB (.mat), "
    "or a generated matrix such as cube32-dof3 or beam33x9x9-dof1 (nodes along each side; dof 1, 3 or 6)"
)

_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".mtx": open_plain,
    ".mtx.gz": gzip.open,
    ".mtx.bz2": bz2.open,
}


class FileKind(enum.Enum):
    """The kinds of files with a matrix."""

    MATRIX_MARKET = "Matrix Market file"
    NPZ = ".npz file of scipy.sparse.save_npz"
    MAT = "MATLAB file"
    HDF5 = "matrix in HDF5"
    ZARR = "matrix in Zarr"
    PETSC = "matrix in PETSc's binary format"


_SUFFIXES = {
    **dict.fromkeys(_OPENERS, FileKind.MATRIX_MARKET),
    ".npz": FileKind.NPZ,
    ".mat": FileKind.MAT,
    ".h5": FileKind.HDF5,
    ".hdf5": FileKind.HDF5,
}
_SLABS: dict[FileKind, Callable[[Path], Slabs]] = {
    FileKind.HDF5: hdf5_slabs,
    FileKind.ZARR: zarr_slabs,
    FileKind.PETSC: petsc_slabs,
}
_GENERATED = re.compile(r"(?:cube(\d+)|beam(\d+)x(\d+)x(\d+))-dof(\d+)", re.ASCII)


@dataclass(frozen=True, eq=False)
class NamedMatrix:
    """A matrix, a float64 ``csr_array`` in canonical form, and the argument of :func:`read_matrix` that it came from.

    Zeros that the file lists are stored. ``block_size`` is that of the dense blocks of a generated matrix, None for a file.
    """

    name: str
    matrix: scipy.sparse.csr_array
    source: str
    block_size: int | None = None


def read_matrix(source: str | Path) -> NamedMatrix:
    """Read a matrix from a file, or generate it.

    Parameters
    ----------
    source : str or path
        A Matrix Market file ``.mtx``, ``.mtx.gz`` or ``.mtx.bz2``; a file ``.npz`` of ``scipy.sparse.save_npz``; a binary file of
        PETSc; HDF5 (``.h5``, ``.hdf5``) or Zarr (a folder) with CSR arrays in a group; a MATLAB file ``.mat``;
        ``cube<nodes>-dof<d>`` or ``beam<nx>x<ny>x<nz>-dof<d>``, the matrix of a :class:`~penstock.fem.Cantilever` of
        lognormal material (sigma 0.5, seed 1).

    Returns
    -------
    NamedMatrix
        Indices are int32, row offsets too where the number of entries allows; int64 otherwise.

    Raises
    ------
    InputError
        If the name is none of these, the file is missing, damaged or not what its suffix says, or its values are
        complex, NaN or infinite.

    Notes
    -----
    A pattern has the value 1 at each entry, -1 above the diagonal of a skew-symmetric one. Repeated entries
    are summed, as float64. Zeros that the file lists as entries are stored, those of a dense file are not.
    """
    generated = _GENERATED.fullmatch(str(source))
    if generated:
        *nodes, dof = (int(number) for number in generated.groups() if number is not None)
        return NamedMatrix(str(source), _assemble(nodes, dof), str(source), dof)
    path = Path(source)
    kind = file_kind(path)
    with failures_named(path, kind.value):
        # The entries of a Matrix Market file: SciPy would sum integers with overflow.
        is_market = kind is FileKind.MATRIX_MARKET
        matrix = _read_whole(path, kind) if is_market else slabs_of(path).whole(path)
        return NamedMatrix(path.name[: len(path.name) - len(_suffix(path))], _canonical(matrix, str(path)), str(source))


def _suffix(path: Path) -> str:
    return next((ending for ending in (*_SUFFIXES, ".zarr") if path.name.lower().endswith(ending)), "")


def file_kind(path: Path) -> FileKind:
    """Return the kind of a file: by its suffix, or, for PETSc and Zarr, by its contents."""
    if is_zarr(path):
        return FileKind.ZARR
    kind = _SUFFIXES.get(_suffix(path)) or (FileKind.PETSC if is_petsc(path) else None)
    if kind is None:
        raise InputError(f"cannot tell what matrix {str(path)!r} is; expected {ACCEPTED}")
    check_is_file(path)
    return kind


def is_store(path: Path) -> bool:
    """Return whether a path can only be that of a :class:`FileStore`: a folder that is not a Zarr group."""
    return path.is_dir() and not is_zarr(path)


def opener_of(path: Path) -> Callable[[Path], Any]:
    """Return the function that opens a Matrix Market file as a binary stream that is not compressed."""
    return _OPENERS[path.name[-len(_suffix(path)) :].lower()]


def slabs_of(path: Path) -> Slabs:
    """Return the shape of a matrix in a file, and its rows in slabs that are read one by one; ``.npz`` and ``.mat`` whole."""
    kind = file_kind(path)
    with failures_named(path, kind.value):
        if kind in _SLABS:
            slabs = _SLABS[kind](path)
            check_rows(path, slabs.shape[0], slabs.nnz)
            return slabs
        rows = scipy.sparse.csr_array(_read_whole(path, kind))
        return Slabs(rows.shape, rows.nnz, [rows])


def _read_whole(path: Path, kind: FileKind) -> Any:
    """Return a matrix as SciPy reads it, checked for a safe conversion."""
    if kind is FileKind.MATRIX_MARKET:
        return read_matrix_market(path, opener_of(path))
    matrix = _read_npz(path) if kind is FileKind.NPZ else read_mat(path)
    check_indices(matrix, f"the matrix in {path}")
    check_rows(path, matrix.shape[0], matrix.nnz)
    check_whole_fits(path, matrix.shape, matrix.nnz)
    return matrix


def _assemble(nodes: list[int], dof: int) -> scipy.sparse.csr_array:
    """Assemble straight into the arrays of the result; no other copy of them is made."""
    x, y, z = nodes * 3 if len(nodes) == 1 else nodes
    model = Cantilever((x, y, z), dof, material=LognormalMaterial(0.5, 1))
    unknowns = math.prod((x, y, z, dof))
    if unknowns > INT32_MAX:
        raise InputError(f"{x} x {y} x {z} nodes have {unknowns} unknowns, more than {INT32_MAX}; ask for fewer nodes")
    try:
        matrix = model.matrix("csr").to_csr()
    except MemoryError as error:
        raise InputError(
            f"{model.nnz} entries do not fit this machine's memory: {error}; ask for fewer nodes"
        ) from error
    if model.nnz <= INT32_MAX:  # SciPy converts indices at every operation if they differ in type from the offsets
        matrix.indptr = matrix.indptr.astype(np.int32)
    return matrix


def _read_npz(path: Path) -> Any:
    with ArrayArchive(path) as archive:
        nbytes = {name: archive.nbytes(name) for name in archive.contents}
        check_fits_memory(sum(nbytes.values()) + nbytes.get("data", 0) * 2, f"the matrix in {path}")
        for name in ("indptr", "indices", "row", "col", "offsets", "shape"):
            if name in nbytes and archive.contents[name][1].kind not in "iu":
                raise InputError(
                    f"{path} is damaged: its {name} are of type {archive.contents[name][1]}, not whole numbers"
                )
        lengths = {archive.contents[name][0] for name in ("data", "indices", "row", "col") if name in nbytes}
        if len(lengths) > 1 and "offsets" not in nbytes and str(archive.read("format").item(), "ascii") != "bsr":
            raise InputError(f"{path} is damaged: its values and indices have the shapes {sorted(lengths)}")
    matrix = scipy.sparse.load_npz(path)
    if matrix.ndim != 2:
        raise InputError(f"{path} holds an array of {matrix.ndim} dimension; expected a matrix, which has 2")
    return matrix


def _canonical(matrix: Any, what: str) -> scipy.sparse.csr_array:
    """Return a CSR array of float64 with columns ascending and unique; convert first, lest sums of integers overflow."""
    check_values(matrix, what)
    rows = scipy.sparse.csr_array(matrix.astype(np.float64, copy=False))
    rows.sum_duplicates()
    if rows.nnz <= INT32_MAX and rows.shape[1] <= INT32_MAX:
        rows.indptr, rows.indices = (of.astype(np.int32, copy=False) for of in (rows.indptr, rows.indices))
    return rows
