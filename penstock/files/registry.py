"""Matrices and vectors in files of any kind that a reader is registered for, and finite-element matrices that are generated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.sparse

from penstock.files import hdf5, mat, matrix_market, npy, npz, petsc, zarr_folders  # noqa: F401 - each declares its reader
from penstock.files.arrays import check_is_file, failures_named
from penstock.files.generated import EXAMPLES, generated_matrix
from penstock.files.reader import READERS, Reader
from penstock.files.sizes import check_rows, check_whole_fits
from penstock.files.slabs import Slabs
from penstock.spmv import InputError
from penstock.spmv.formats.limits import INT32_MAX
from penstock.spmv.formats.validation import check_indices, check_values
from penstock.spmv.unchecked import lies_in_file

Purpose = Literal["matrix", "right-hand sides"]


@dataclass(frozen=True, eq=False)
class NamedMatrix:
    """A matrix, a float64 ``csr_array`` in canonical form, and the argument of :func:`read_matrix` that it came from.

    Zeros that the file lists are stored. ``block_size`` is that of the dense blocks of a generated matrix, None for a file.
    """

    name: str
    matrix: scipy.sparse.csr_array
    source: str
    block_size: int | None = None


def _readers(purpose: Purpose) -> list[Reader]:
    readers = [READERS[name] for name in READERS.keys()]  # noqa: SIM118 - a registry
    return [
        reader for reader in readers if (reader.reads_matrix if purpose == "matrix" else reader.vectors is not None)
    ]


def programs(purpose: Purpose) -> str:
    """Return where files come from that can be read, for the help of commands."""
    return ", ".join(reader.program for reader in _readers(purpose))


def reader_of(path: Path, purpose: Purpose = "matrix") -> Reader:
    """Return the reader of a file: by its suffix, else by its contents; of a folder by its contents first."""
    readers, is_folder = _readers(purpose), os.path.isdir(path)  # which takes names of any length
    by_suffix = sorted(readers, key=lambda reader: len(reader.suffix_of(path.name)), reverse=True)
    named = (reader for reader in by_suffix if reader.suffix_of(path.name))
    recognized = (reader for reader in readers if reader.folder == is_folder and reader.knows(path))
    reader = next(chain(recognized, named) if is_folder else chain(named, recognized), None)
    if reader is None:
        accepted = "; ".join(reader.described for reader in readers)
        generated = f"; or a generated matrix such as {EXAMPLES}" if purpose == "matrix" else ""
        raise InputError(f"cannot tell what {purpose} {str(path)!r} holds; expected one of: {accepted}{generated}")
    if not (is_folder and reader.folder):
        check_is_file(path)
    return reader


@contextmanager
def reading(path: Path, reader: Reader) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into an InputError that names it."""
    with failures_named(path, reader.label):
        try:
            yield
        except ImportError as error:
            advice = f"pip install '{reader.requirement}'" if reader.requirement else "install it"
            raise InputError(f"{path} is read with {error.name}, which is not installed: {advice}") from error


def is_store(path: Path) -> bool:
    """Return whether a path can only be that of a :class:`FileStore`: a folder that no reader recognizes."""
    return path.is_dir() and not any(reader.folder and reader.knows(path) for reader in _readers("matrix"))


def matrix_name(source: str | Path) -> str:
    """Return the name of a matrix: its file or folder without the path and the suffixes that matrix files have."""
    name = Path(source).resolve().name
    suffix = max((reader.suffix_of(name) for reader in _readers("matrix")), key=len)
    return name[: len(name) - len(suffix)]


def read_matrix(source: str | Path) -> NamedMatrix:
    """Read a matrix from a file, or generate it.

    Parameters
    ----------
    source : str or path
        A file or folder for which :data:`~penstock.files.reader.READERS` has a reader; or ``cube<nodes>-dof<d>`` or
        ``beam<nx>x<ny>x<nz>-dof<d>``, the matrix of a :class:`~penstock.fem.Cantilever` of lognormal material (sigma 0.5,
        seed 1).

    Returns
    -------
    NamedMatrix
        Indices are int32, row offsets too where the number of entries allows; int64 otherwise.

    Raises
    ------
    InputError
        If no reader knows the name; if the file is missing, damaged or not what its suffix says; or if its values are complex,
        NaN or infinite.

    Notes
    -----
    A pattern has the value 1 at each entry, -1 above the diagonal of a skew-symmetric one. Repeated entries
    are summed, as float64. Zeros that the file lists as entries are stored, those of a dense file are not.
    """
    if (generated := generated_matrix(str(source))) is not None:
        return NamedMatrix(str(source), generated[0], str(source), generated[1])
    path = Path(source)
    reader = reader_of(path)
    with reading(path, reader):
        # What is read whole stays as it is until it is float64: SciPy would sum integers with overflow.
        matrix = slabs_of(path).whole(path) if reader.matrix is None else _read_whole(path, reader)
        return NamedMatrix(matrix_name(path), _canonical(matrix, str(path)), str(source))


def read_unchecked(path: Path, *, in_file: bool = False) -> tuple[Any, Callable[[], scipy.sparse.csr_array]]:
    """Return a matrix in CSR or BSR as it is in a file, at whose entries nobody has looked, and what :func:`read_matrix` returns.

    ``in_file``: large arrays may be those of the file, mapped into memory.
    Values are of float64 but for integers. The second is found when it is asked for, or the error raised that says what is wrong
    with the entries.
    """
    reader = reader_of(path)
    with reading(path, reader):
        in_file = in_file and reader.in_file is not None
        if reader.matrix is None and not in_file:
            matrix: Any = slabs_of(path).whole(path)
        else:
            matrix = _read_whole(path, reader, unchecked=True, in_file=in_file)
        what = f"the matrix in {path}"
        if matrix.format not in ("csr", "bsr"):
            # Entries are added up as float64, lest sums of integers overflow.
            check_indices(matrix, what)
            check_values(matrix, what)
            matrix = scipy.sparse.csr_array(matrix.astype(np.float64, copy=False))
        elif matrix.dtype == np.float32:
            matrix = matrix.astype(np.float64)
    return matrix, partial(_checked, matrix, path)


def _checked(matrix: Any, path: Path) -> scipy.sparse.csr_array:
    check_indices(matrix, f"the matrix in {path}")
    return _canonical(matrix, str(path))


def read_vectors(path: Path) -> Any:
    """Read right-hand sides, an array or sparse array (n, columns) that is not yet checked for NaN."""
    reader = reader_of(path, "right-hand sides")
    with reading(path, reader):
        assert reader.vectors is not None, "reader_of returns one that reads vectors"
        vectors = reader.vectors(path)
        if scipy.sparse.issparse(vectors):
            check_indices(vectors, f"the matrix in {path}")
            return _canonical(vectors, str(path)).tocsc()
        if vectors.ndim not in (1, 2) or vectors.dtype.kind not in "fiub":
            raise InputError(
                f"{path} holds an array of type {vectors.dtype} and shape {vectors.shape}; right-hand sides are real, of shape "
                "(n,) or (n, columns)"
            )
        return vectors.reshape(-1, 1) if vectors.ndim == 1 else vectors


def slabs_of(path: Path) -> Slabs:
    """Return the shape of a matrix in a file, and its rows in slabs, one by one where its reader can, else all in one."""
    reader = reader_of(path)
    with reading(path, reader):
        if reader.slabs is None:
            rows = scipy.sparse.csr_array(_read_whole(path, reader))
            return Slabs(rows.shape, rows.nnz, [rows])
        slabs = reader.slabs(path)
        check_rows(path, slabs.shape[0], slabs.nnz)
        return slabs


def _read_whole(path: Path, reader: Reader, *, unchecked: bool = False, in_file: bool = False) -> Any:
    """Return a matrix as SciPy reads it, checked for a safe conversion; ``unchecked``: nobody has looked at its indices."""
    read = reader.in_file if in_file else reader.matrix
    assert read is not None, "a reader without slabs reads the matrix as a whole"
    matrix = read(path)
    if not unchecked:
        check_indices(matrix, f"the matrix in {path}")
    check_rows(path, matrix.shape[0], matrix.nnz)
    if not (in_file and lies_in_file(matrix.data)):
        check_whole_fits(path, matrix.shape, matrix.nnz)
    return matrix


def _canonical(matrix: Any, what: str) -> scipy.sparse.csr_array:
    """Return a CSR array of float64 with columns ascending and unique; convert first, lest sums of integers overflow."""
    check_values(matrix, what)
    rows = scipy.sparse.csr_array(matrix.astype(np.float64, copy=False))
    rows.sum_duplicates()
    if rows.nnz <= INT32_MAX and rows.shape[1] <= INT32_MAX:
        rows.indptr, rows.indices = (of.astype(np.int32, copy=False) for of in (rows.indptr, rows.indices))
    return rows
