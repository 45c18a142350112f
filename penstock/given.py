"""Matrices and vectors as callers have them: what they are, where they live, and how solutions go back there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.sparse

from penstock.foreign import as_matrix, like
from penstock.solvers import BlockSolveResult, SolveResult
from penstock.spmv import CPU, Array, CsrMatrix, Device, InputError, SparseMatrix, as_operator, device_of
from penstock.spmv.foreign import as_array, is_foreign
from penstock.spmv.formats.validation import in_csr
from penstock.streaming import FileStore, LevelOrder, Store

__all__ = ["GivenMatrix", "GivenVectors", "as_given_matrix"]


@dataclass
class GivenMatrix:
    """A matrix of a caller.

    Parameters
    ----------
    matrix : CsrMatrix, SparseMatrix, Store or Operator
    kind : {"csr", "format", "store", "operator"}
        A CSR matrix may be converted at will; another format, a store and an operator are used as they are.
    name : str
        What messages call it.
    device : Device or None
        Where its arrays live; None for a store.
    """

    matrix: Any
    kind: Literal["csr", "format", "store", "operator"]
    name: str = "A"
    device: Device | None = None

    def promoted(self, dtype: np.dtype[Any]) -> GivenMatrix:
        """Return the matrix for vectors of the wider of its own and the given type; the stored values stay as they are."""
        if self.kind == "csr" and np.result_type(self.matrix.dtype, dtype) == np.float64:
            self.matrix = replace(self.matrix, dtype=np.dtype(np.float64))
        return self


def as_given_matrix(A: Any) -> GivenMatrix:
    """Return a matrix of any kind that :func:`penstock.solve` takes, validated.

    Raises
    ------
    InputError
        If it is none of these, complex, or not valid.
    """
    if isinstance(A, str | Path):
        return _from_path(A)
    if isinstance(A, CsrMatrix):
        return GivenMatrix(A, "csr", device=A.device)
    if isinstance(A, SparseMatrix):
        return GivenMatrix(A, "format", device=A.device)
    if isinstance(A, Store) and not hasattr(A, "apply"):
        return GivenMatrix(A, "store", name=_name_of(A))
    if is_foreign(A):
        A = as_matrix(A)
    if scipy.sparse.issparse(A):
        if A.shape == (0, 0):  # nothing to place: it is applied as it is
            return GivenMatrix(as_operator(A), "operator", device=CPU)
        return GivenMatrix(CsrMatrix.from_csr(in_csr(A, "A"), strategy="auto"), "csr", device=CPU)
    if type(A).__module__.startswith("cupyx.scipy.sparse") and hasattr(A, "tocsr"):
        matrix: Any = as_operator(A)
        return GivenMatrix(matrix, "csr", device=matrix.device)
    operator = as_operator(A)
    return GivenMatrix(operator, "operator", name=type(A).__name__, device=operator.device)


def _from_path(path: str | Path) -> GivenMatrix:
    from penstock.matrix_files import is_store, read_matrix  # loads the finite elements, for generated matrices

    if is_store(Path(path)):
        store = FileStore(Path(path))
        return GivenMatrix(store, "store", name=_name_of(store))
    named = read_matrix(path)
    return GivenMatrix(CsrMatrix.from_csr(named.matrix, strategy="auto", check=False), "csr", named.name, CPU)


def _name_of(store: Store) -> str:
    path = getattr(store, "path", None)
    return "the stored matrix" if path is None else Path(path).resolve().name


def _of_sequence(given: Any, name: str) -> Array:
    try:
        return np.asarray(given)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"{name} must be an array of real numbers of shape (n,) or (n, k): {error}") from None


@dataclass(frozen=True)
class GivenVectors:
    """Right-hand sides or guesses of a caller.

    Parameters
    ----------
    array : array, (n,) or (n, k)
        On the host or a GPU.
    name : str
        What messages call them.
    original : object
        What the caller has, if it is of pandas, Torch or JAX.
    """

    array: Array
    name: str
    original: Any = None

    @classmethod
    def of(cls, given: Any, name: str) -> GivenVectors:
        """Read NumPy, CuPy, pandas, Torch or JAX vectors, or a sequence of numbers.

        Raises
        ------
        InputError
            If they are not real numbers in one or two dimensions.
        """
        labelled = hasattr(given, "to_numpy") and hasattr(given, "index")
        original = given if labelled or is_foreign(given) else None
        if labelled:
            array = given.to_numpy()
        elif original is not None:
            array = as_array(given)
        else:
            array = given if hasattr(given, "get") and hasattr(given, "dtype") else _of_sequence(given, name)
        if array.dtype.kind not in "fiub":
            raise InputError(f"{name} has type {array.dtype}; only real numbers can be solved for")
        if array.ndim not in (1, 2) or (array.ndim == 2 and not array.shape[1]):
            raise InputError(f"{name} must have shape (n,) or (n, k) with at least one column, not {array.shape}")
        return cls(array, name, original)

    @property
    def columns(self) -> int:
        """Number of vectors."""
        return 1 if self.array.ndim == 1 else int(self.array.shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type in which to solve: float32 for vectors of at most that precision, else float64."""
        narrow = self.array.dtype.kind == "f" and self.array.dtype.itemsize <= 4
        return np.dtype(np.float32 if narrow else np.float64)

    def like(self, other: GivenVectors) -> GivenVectors:
        """Return these vectors, refused unless they have the shape of others; (n,) and (n, 1) are the same."""
        if self.array.size != other.array.size or self.columns != other.columns:
            raise InputError(f"{self.name} must have the shape of b, {other.array.shape}, not {self.array.shape}")
        return self

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

    def returned(self, result: Any, order: LevelOrder | None) -> Any:
        """Return a result whose solution lives where these vectors do, in their shape and order."""
        home = device_of(self.array)

        def back(x: Array) -> Array:
            if order is not None:
                x = order.back(CPU.asarray(x))
            return home.asarray(x)

        x = back(result.x).reshape(self.array.shape)
        if isinstance(result, BlockSolveResult):
            columns = tuple(replace(column, x=x[:, number]) for number, column in enumerate(result.columns))
            return replace(result, x=self._wrapped(x), columns=columns)
        assert isinstance(result, SolveResult), "one right-hand side"
        return replace(result, x=self._wrapped(x))

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
