"""Matrices by name: Matrix Market files, SciPy's .npz files, and finite-element matrices that are generated."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import math
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import scipy.io
import scipy.sparse

from penstock.fem import Cantilever, LognormalMaterial
from penstock.spmv import InputError
from penstock.spmv.formats.limits import INT32_MAX
from penstock.spmv.formats.validation import check_values

__all__ = ["NamedMatrix", "read_matrix"]

ACCEPTED = (
    "a Matrix Market file (.mtx, .mtx.gz or .mtx.bz2), a file of scipy.sparse.save_npz (.npz), "
    "or a generated matrix such as cube32-dof3 or beam33x9x9-dof1 (nodes along each side; dof 1, 3 or 6)"
)

_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".mtx": partial(open, mode="rb"),
    ".mtx.gz": gzip.open,
    ".mtx.bz2": bz2.open,
}
_GENERATED = re.compile(r"(?:cube(\d+)|beam(\d+)x(\d+)x(\d+))-dof(\d+)", re.ASCII)

# What the numbers of a file can consist of, by the field of its header.
_WHOLE = b"0123456789+- \t\r\n"
_CHARACTERS = {"pattern": _WHOLE, "integer": _WHOLE, "real": _WHOLE + b".eEnNaAiIfFtTyY"}
_SPACE, _EXPONENT, _SIGN, _REST = range(4)
_KINDS = bytes(
    _SPACE if byte <= 32 else _SIGN if byte in b"+-" else _EXPONENT if byte in b"eE" else _REST for byte in range(256)
)
_SYMMETRIES = ("general", "symmetric", "skew-symmetric")


@dataclass(frozen=True, eq=False)
class NamedMatrix:
    """A matrix and where it came from.

    Parameters
    ----------
    name : str
        File name without folder and suffixes, or the name of a generated matrix.
    matrix : csr_array
        float64 values, columns ascending and unique in each row, stored zeros among them.
    source : str
        What :func:`read_matrix` was asked for.
    block_size : int or None
        Degrees of freedom a node of a generated matrix: it consists of dense blocks of this size. None for a file.
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
        A Matrix Market file ``.mtx``, ``.mtx.gz`` or ``.mtx.bz2``; a file ``.npz`` of ``scipy.sparse.save_npz``;
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
    A pattern has the value 1 at each entry, -1 above the diagonal of a skew-symmetric one. Entries given several times
    are summed, as float64. Zeros are kept where the file lists them as entries, so not those of a dense file.
    """
    generated = _GENERATED.fullmatch(str(source))
    if generated:
        *nodes, dof = (int(number) for number in generated.groups() if number is not None)
        return NamedMatrix(str(source), _assemble(nodes, dof), str(source), dof)
    path = Path(source)
    suffix = next((ending for ending in (*_OPENERS, ".npz") if path.name.lower().endswith(ending)), None)
    if suffix is None:
        raise InputError(f"cannot tell what matrix {str(source)!r} is; expected {ACCEPTED}")
    if not path.is_file():
        raise InputError(f"{path} {'is not a file' if path.exists() else 'does not exist'}; check the path")
    kind = ".npz file of scipy.sparse.save_npz" if suffix == ".npz" else "Matrix Market file"
    with _causes_named(path, kind):
        matrix = _read_npz(path) if suffix == ".npz" else _read_matrix_market(path, _OPENERS[suffix])
        return NamedMatrix(path.name[: -len(suffix)], _canonical(matrix, str(path)), str(source))


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


@contextlib.contextmanager
def _causes_named(path: Path, kind: str) -> Iterator[None]:
    """Turn whatever a damaged file makes other libraries raise into an error that names file and cause."""
    try:
        yield
    except InputError:
        raise
    except MemoryError as error:
        raise InputError(f"{path} announces a matrix that does not fit the memory of this machine: {error}") from error
    except Exception as error:  # SciPy, NumPy, zlib and zipfile leave open what they raise
        cause = str(error) or type(error).__name__
        raise InputError(f"cannot read {path}: {cause}; expected an undamaged {kind}") from error


def _read_npz(path: Path) -> Any:
    if not zipfile.is_zipfile(path):
        raise InputError(f"cannot read {path}: it is no whole zip archive; expected a file of scipy.sparse.save_npz")
    matrix = scipy.sparse.load_npz(path)
    if matrix.ndim != 2:
        raise InputError(f"{path} holds an array of {matrix.ndim} dimension; expected a matrix, which has 2")
    if hasattr(matrix, "check_format"):  # conversion of indices out of range would write past its arrays
        matrix.check_format(full_check=True)
    return matrix


def _canonical(matrix: Any, what: str) -> scipy.sparse.csr_array:
    """Return a CSR array of float64 with columns ascending and unique; convert first, lest sums of integers overflow."""
    check_values(matrix.data, what)
    rows = scipy.sparse.csr_array(matrix.astype(np.float64, copy=False))
    rows.sum_duplicates()
    return rows


# Matrix Market


@dataclass(frozen=True)
class _Header:
    """Everything down to the line of sizes, and what it says in lower case."""

    text: bytes
    layout: str
    field: str
    symmetry: str
    sizes: list[str]


def _read_matrix_market(path: Path, opener: Callable[[Path], BinaryIO]) -> Any:
    with opener(path) as stream:
        header = _read_header(path, stream)
        body = _CheckedStream(path, header, stream)
        matrix = scipy.io.mmread(body, spmatrix=False)
    entries = _entries(header, matrix.shape)
    numbers = entries * (1 if header.layout == "array" else 2 if header.field == "pattern" else 3)
    if body.numbers != numbers:
        raise InputError(f"{path} holds {body.numbers} numbers instead of {numbers} after its header; it is damaged")
    if header.layout == "array":
        return scipy.sparse.csr_array(matrix)
    if header.symmetry != "general":
        # SciPy puts the entries of the file first, then the mirror images.
        rows, columns = matrix.row[:entries], matrix.col[:entries]
        if (rows < columns).any() and (rows > columns).any():
            raise InputError(
                f"{path} is {header.symmetry} but lists entries on both sides of the diagonal, which would count twice; "
                "expected one triangle: remove the other or declare the file general"
            )
        if header.symmetry == "skew-symmetric" and matrix.diagonal().any():
            raise InputError(f"{path} is skew-symmetric but has a diagonal; remove it or declare the file general")
    return matrix


def _entries(header: _Header, shape: tuple[int, int]) -> int:
    """Return how many entries the file lists."""
    if header.layout != "array":
        return int(header.sizes[2])
    rows, columns = shape
    per_symmetry = {"symmetric": rows * (rows + 1) // 2, "skew-symmetric": rows * (rows - 1) // 2}
    return per_symmetry.get(header.symmetry, rows * columns)


def _read_header(path: Path, stream: BinaryIO) -> _Header:
    """Read down to the line of sizes and refuse what SciPy would read but is no real matrix, or no matrix at all."""
    lines = [stream.readline(1024)]  # a binary file may have no line end for long
    words = lines[0].decode("latin-1").lower().split()
    if len(words) != 5 or words[:2] != ["%%matrixmarket", "matrix"]:
        raise InputError(
            f"{path} does not start as a Matrix Market file does, with a line such as "
            f"'%%MatrixMarket matrix coordinate real general', but with {lines[0][:60].decode('latin-1').rstrip()!r}"
        )
    while lines[-1] and (len(lines) == 1 or lines[-1].startswith(b"%") or not lines[-1].strip()):
        lines.append(stream.readline())
    layout, field, symmetry = words[2:]
    if field == "complex" or symmetry == "hermitian":
        raise InputError(f"{path} holds a matrix that is {field} {symmetry}; only real matrices are supported")
    if field not in _CHARACTERS or symmetry not in _SYMMETRIES:
        raise InputError(
            f"{path} is declared {field} {symmetry}; expected one of {', '.join(_CHARACTERS)} "
            f"and one of {', '.join(_SYMMETRIES)}"
        )
    sizes = lines[-1].decode("latin-1").split()
    if symmetry != "general" and sizes[:1] != sizes[1:2]:
        raise InputError(f"{path} is declared {symmetry}, but {' x '.join(sizes[:2])}; such a matrix is square")
    return _Header(b"".join(lines), layout, field, symmetry, sizes)


class _CheckedStream:
    """What SciPy reads from; counts the numbers after the header and refuses what can be no part of any.

    SciPy by itself reads the Fortran numbers 1.5D+03 and 1.5-100 as 1.5, and 7.5 among integers as 7; it ignores the
    rest of a line, and takes no number with a leading plus.
    """

    def __init__(self, path: Path, header: _Header, stream: BinaryIO) -> None:
        self.numbers = 0
        self._path, self._field, self._stream = path, header.field, stream
        self._header = io.BytesIO(header.text)
        self._last = bytes([_SPACE])

    def read(self, size: int = -1) -> bytes:
        """Return at most ``size`` bytes; none at the end."""
        header = self._header.read(size)
        if header:
            return header
        text = self._stream.read(size)
        foreign = text.translate(None, _CHARACTERS[self._field])
        if foreign:
            character = foreign[:1].decode("latin-1")
            expected = "numbers such as 1.5e3 (write Fortran's 1.5D3 so)" if self._field == "real" else "whole numbers"
            raise InputError(f"{self._path} holds the character {character!r} among its numbers; expected {expected}")
        kinds = np.frombuffer(self._last + text.translate(_KINDS), np.uint8)
        before, after = kinds[:-1], kinds[1:]
        if ((before >= _SIGN) & (after == _SIGN)).any():
            raise InputError(f"{self._path} holds a sign within a number; write Fortran's 1.5-100 as 1.5e-100")
        self.numbers += int(np.count_nonzero((before == _SPACE) & (after != _SPACE)))
        self._last = kinds[-1:].tobytes()
        return text.replace(b"+", b"")
