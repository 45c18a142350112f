"""Matrices and vectors as callers have them: what they are, where they live, and how solutions go back there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import scipy.sparse

from penstock.driver.foreign import from_elsewhere, like, refuse_gradients
from penstock.solvers import BlockSolveResult, SolveResult
from penstock.spmv import CPU, Array, CsrMatrix, Device, DeviceError, InputError, SparseMatrix, as_operator, device_of
from penstock.spmv.conversion import FunctionOperator, as_operator_for
from penstock.spmv.device import cuda_device_count
from penstock.spmv.errors import advice_on_type
from penstock.spmv.foreign import as_array, is_foreign
from penstock.spmv.formats.statistics import MatrixStatistics, PieceConverter
from penstock.spmv.formats.validation import in_csr
from penstock.spmv.unchecked import UncheckedEntries
from penstock.streaming import FileStore, LevelOrder, Store

# Memory of a GPU, in sizes of a matrix in CSR, for that and the format that it is converted to.
_INGESTED = 2


@dataclass
class GivenMatrix:
    """A matrix of a caller, its name in messages, and the device of its arrays, None for a store.

    A CSR matrix may be converted at will; another format, a store and an operator are used as they are; a source makes a matrix
    or a store when it is decided how it is used, as a matrix of elements does. The entries of a caller's CSR or BSR matrix on
    the host are looked at by :meth:`checked`, where the matrix has been moved; ``sound()`` returns it in sorted rows of finite
    values, found the slow way on the host, or raises an error that says what is wrong.
    """

    matrix: Any
    kind: Literal["csr", "format", "store", "operator", "source", "elements"]
    name: str = "A"
    device: Device | None = None
    sound: Callable[[], CsrMatrix] | None = None
    lasting: bool = False  # whether the caller has the arrays of a CSR matrix anyway

    @property
    def rows(self) -> int:
        """Number of rows."""
        rows: int = (self.matrix.index if self.kind == "store" else self.matrix).shape[0]
        return rows

    def find_device(self, name: str) -> Device:
        """Return the device of a name; ``auto`` is where the matrix lives on a GPU, else the first GPU, else the CPU."""
        if name == "auto" and self.device is not None and self.device.kind == "cuda":
            return self.device
        return _device_named(name)

    def moved(self, device: Device, memory: int | None = None) -> CsrMatrix:
        """Return the CSR matrix where it will be used.

        That is a device if ``memory``, or what is free there, holds the matrix and its conversion; otherwise the host.
        """
        if self._fits(device, memory):
            return cast(CsrMatrix, self.matrix.to_device(device))
        if isinstance(self.matrix, UncheckedEntries):
            self.matrix = self.matrix.owned()
        return cast(CsrMatrix, self.matrix.to_device(CPU))

    def checked(
        self, A: CsrMatrix, device: Device = CPU, converter: type[PieceConverter] | None = None
    ) -> MatrixStatistics:
        """Return the statistics of the moved matrix, whose entries have been looked at; refuse what no kernel may read.

        Rows that are not sorted are sorted in a copy, and duplicates in them summed. A GPU looks also at a large matrix that
        does not fit there; what a ``converter`` makes of it meanwhile is kept for the format that uses it.
        """
        through = device if device.kind == "cuda" and A.device == CPU else None
        statistics = MatrixStatistics.of(A, through=through, converter=converter)
        if self.sound is None or not statistics.survey.defects:
            return statistics
        sound = self.sound()
        A = CsrMatrix.from_arrays(A.shape, A.dtype, sound.arrays(), sound.parameters()).to_device(A.device)
        return MatrixStatistics.of(A, through=through)

    def for_claims(
        self, converted: CsrMatrix, difference: float, device: Device, *, streams: bool
    ) -> CsrMatrix | UncheckedEntries | None:
        """Return the entries with which claims are settled: the caller's, or converted ones; None where they are not needed.

        They are if what is stored differs from them, and if the host streams a matrix whose arrays the caller has anyway. Solves
        on a GPU rarely look at them: it is then that they are copied, if at all.
        """
        if not (difference or (device.kind == "cpu" and streams and self.lasting)):
            return None
        if isinstance(self.matrix, UncheckedEntries):
            return self.matrix.to_device(CPU) if device.kind == "cpu" else self.matrix.owned()
        return self.matrix if self.kind == "csr" else converted

    def _fits(self, device: Device, memory: int | None) -> bool:
        if device.kind == "cpu" or self.matrix.device == device:
            return True
        wanted = _INGESTED * self.matrix.nbytes
        return bool(wanted < device.free_nbytes() and (memory is None or wanted < memory))

    @property
    def is_narrow(self) -> bool:
        """Whether the vectors of the matrix are of float32."""
        return getattr(self.matrix, "dtype", None) == np.float32

    def with_wide_vectors(self) -> GivenMatrix:
        """Return the matrix for vectors of float64, in which every solve computes; the stored values stay as they are."""
        if self.kind in ("csr", "format") and self.matrix.dtype != np.float64:
            A = self.matrix
            return replace(self, matrix=A.from_arrays(A.shape, np.float64, A.arrays(), A.parameters()))
        if self.kind == "operator" and isinstance(self.matrix, FunctionOperator):
            return replace(self, matrix=as_operator_for(self.matrix, np.empty(0)))
        return self


def _device_named(name: str) -> Device:
    if name != "auto":
        return Device.parse(name)
    with contextlib.suppress(DeviceError):
        if cuda_device_count():
            return Device("cuda")
    return CPU


def as_given_matrix(A: Any, device: str = "cpu") -> GivenMatrix:
    """Return a matrix of any kind that :func:`penstock.solve` takes, validated; refuse anything else and complex ones.

    Large arrays of a file may stay in it if the ``device`` of this name is a GPU.
    """
    if isinstance(A, str | Path):
        return _from_path(A, device)
    if hasattr(A, "row_maker") and hasattr(A, "renumbered"):
        return GivenMatrix(A, "elements", name="the matrix of elements")
    if isinstance(A, CsrMatrix):
        return GivenMatrix(A, "csr", device=A.device, lasting=True)
    if isinstance(A, SparseMatrix):
        return GivenMatrix(A, "format", device=A.device)
    if isinstance(A, Store) and not hasattr(A, "apply"):
        return GivenMatrix(A, "store", name=_name_of(A))
    refuse_gradients(A, "A")
    A = from_elsewhere(A)
    if scipy.sparse.issparse(A):
        if A.shape == (0, 0):  # nothing to place: it is applied as it is
            return GivenMatrix(as_operator(A), "operator", device=CPU)
        lasting = A.format == "csr"
        A = A if A.format == "bsr" and len(A.shape) == 2 else in_csr(A, "A")
        sound = partial(_sound, A)
        return GivenMatrix(UncheckedEntries.of(A, "A"), "csr", device=CPU, sound=sound, lasting=lasting)
    if type(A).__module__.startswith("cupyx.scipy.sparse") and hasattr(A, "tocsr"):
        matrix = CsrMatrix.from_csr(CsrMatrix.unchecked(in_csr(A, "A")), strategy="auto")
        return GivenMatrix(matrix, "csr", device=matrix.device, sound=partial(_sound_on_gpu, A))
    operator = as_operator(A)
    return GivenMatrix(operator, "operator", name=type(A).__name__, device=operator.device)


def _sound_on_gpu(A: Any) -> CsrMatrix:
    matrix = as_operator(A)
    assert isinstance(matrix, CsrMatrix), "what a sparse matrix of CuPy becomes"
    return matrix


def _sound(A: Any) -> CsrMatrix:
    return CsrMatrix.from_csr(in_csr(A, "A"), strategy="auto")


def _from_path(path: str | Path, device: str) -> GivenMatrix:
    from penstock.files.generated import generated_matrix  # loads the finite elements
    from penstock.files.registry import is_store, matrix_name, read_unchecked

    if is_store(Path(path)):
        store = FileStore(Path(path))
        return GivenMatrix(store, "store", name=_name_of(store))
    if (generated := generated_matrix(str(path))) is not None:
        return GivenMatrix(CsrMatrix.from_csr(generated[0], strategy="auto", check=False), "csr", str(path), CPU)
    in_file = _device_named(device).kind == "cuda"
    matrix, canonical = read_unchecked(Path(path), in_file=in_file)

    def sound() -> CsrMatrix:
        return CsrMatrix.from_csr(canonical(), strategy="auto", check=False)

    entries = UncheckedEntries.of(matrix, f"the matrix in {path}", in_file=in_file)
    return GivenMatrix(entries, "csr", matrix_name(path), CPU, sound=sound)


def _name_of(store: Store) -> str:
    path = getattr(store, "path", None)
    return "the stored matrix" if path is None else Path(path).resolve().name


def _refuse_what_is_no_vector(value: Any, name: str) -> None:
    """Refuse None, and sparse matrices, which NumPy would take for objects."""
    if value is None:
        raise InputError(f"{name} is None; give the right-hand sides, an array of shape (n,) or (n, k)")
    if scipy.sparse.issparse(value) or type(value).__module__.startswith("cupyx.scipy.sparse"):
        square = value.ndim == 2 and value.shape[0] == value.shape[1] != 1
        advice = "A comes first, then b: are they exchanged?" if square else f"make it dense: {name}.toarray()"
        raise InputError(f"{name} is a sparse matrix of shape {value.shape}, not an array; {advice}")


def _of_sequence(value: Any, name: str) -> Array:
    try:
        return np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"{name} must be an array of real numbers of shape (n,) or (n, k): {error}") from None


@dataclass(frozen=True)
class GivenVectors:
    """Right-hand sides or guesses, (n,) or (n, k), and the caller's original if it is of pandas, Torch or JAX."""

    array: Array
    name: str
    original: Any = None

    @classmethod
    def of(cls, value: Any, name: str) -> GivenVectors:
        """Read NumPy, CuPy, pandas, Torch or JAX vectors, or a sequence; refuse what is not real, in one or two dimensions."""
        _refuse_what_is_no_vector(value, name)
        refuse_gradients(value, name)
        labelled = hasattr(value, "to_numpy") and hasattr(value, "index")
        original = value if labelled or is_foreign(value) else None
        if labelled:
            array = value.to_numpy()
        elif original is not None:
            array = as_array(value)
        else:
            array = value if hasattr(value, "get") and hasattr(value, "dtype") else _of_sequence(value, name)
        if array.dtype.kind not in "fiub":
            raise InputError(f"{name} has type {array.dtype}; {advice_on_type(array.dtype.kind)}")
        if array.ndim not in (1, 2) or (array.ndim == 2 and not array.shape[1]):
            raise InputError(f"{name} must have shape (n,) or (n, k) with at least one column, not {array.shape}")
        return cls(array, name, original)

    @property
    def columns(self) -> int:
        """Number of vectors."""
        return 1 if self.array.ndim == 1 else int(self.array.shape[1])

    @property
    def is_narrow(self) -> bool:
        """Whether the vectors have at most the precision of float32."""
        return bool(self.array.dtype.kind == "f" and self.array.dtype.itemsize <= 4)

    def like(self, other: GivenVectors) -> GivenVectors:
        """Return these vectors, refused unless they have the shape of others; (n,) and (n, 1) are the same."""
        if self.array.size != other.array.size or self.columns != other.columns:
            raise InputError(f"{self.name} must have the shape of b, {other.array.shape}, not {self.array.shape}")
        return self

    def as_block(self) -> Array:
        """Return the vectors as float64, ``(n, k)``, where they live."""
        return self.array.reshape(len(self.array), self.columns).astype(np.float64, copy=False)

    def norms(self) -> np.ndarray[Any, Any]:
        """Return the Euclidean norms of the vectors, on the host."""
        return column_norms(self.as_block())

    def check_rows(self, rows: int) -> None:
        """Refuse vectors of another length than the matrix has rows."""
        if self.array.shape[0] != rows:
            raise InputError(
                f"{self.name} has {self.array.shape[0]} rows, but the matrix is {rows} x {rows}; give vectors of {rows} entries"
            )

    def column(self, device: Device, dtype: Any, order: LevelOrder | None) -> Array:
        """Return the only vector on a device, in the order of the matrix."""
        vector = self.array.reshape(-1)
        if order is not None:
            vector = order.forward(CPU.asarray(vector))
        return device.asarray(vector, dtype=dtype)

    def block(self, dtype: Any, order: LevelOrder | None) -> Array:
        """Return the vectors as a C-ordered block where they live, in the order of the matrix."""
        home = device_of(self.array)
        block = self.array if order is None else home.asarray(order.forward(CPU.asarray(self.array)))
        return home.xp.ascontiguousarray(block, dtype=dtype)

    def back(self, x: Array, order: LevelOrder | None) -> Array:
        """Return a solution where these vectors live, in their order, as a block ``(n, k)``."""
        if order is not None:
            x = order.back(CPU.asarray(x))
        return device_of(self.array).asarray(x).reshape(len(self.array), self.columns)

    def returned(self, result: Any, columns: list[SolveResult], x: Array) -> Any:
        """Return a result with these columns, whose solution ``(n, k)`` gets the shape and the library of these vectors."""
        x = x.reshape(self.array.shape)
        if isinstance(result, BlockSolveResult):
            iterations = max(result.iterations, *(column.iterations for column in columns))
            of_block = tuple(replace(column, x=x[:, number]) for number, column in enumerate(columns))
            return replace(result, x=self._wrapped(x), columns=of_block, iterations=iterations)
        return replace(columns[0], x=self._wrapped(x))

    def _wrapped(self, x: Array) -> Any:
        """Return a pandas object for a pandas object, and a tensor of Torch or an array of JAX for one of theirs."""
        if self.original is None:
            return x
        if is_foreign(self.original):
            return like(self.original, x)
        labels = {"index": self.original.index}
        if x.ndim == 2:
            labels["columns"] = self.original.columns
        return type(self.original)(x, **labels)


def column_norms(block: Array) -> np.ndarray[Any, Any]:
    """Return the norms of columns, on the host, without BLAS, whose threads would disturb the next solve for a while."""
    home = device_of(block)
    return home.to_host(home.xp.linalg.norm(block.astype(np.float64, copy=False), axis=0))
