"""Sparse factorisations by other libraries: CHOLMOD where scikit-sparse is installed, else SciPy's SuperLU without pivoting.

An analysis finds an order of the rows in which the factor has few entries; it knows the pattern alone and serves any values. The
entries of the factor and the operations are counted exactly (:func:`factor_size`), and from these a library's seconds predicted.
"""

from __future__ import annotations

import copy
import functools
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from scipy.linalg import lapack

from penstock.host.threads import blas_limited
from penstock.spmv import CPU, Array, BudgetError, InputError
from penstock.spmv.compilation.jit import serial_kernel
from penstock.spmv.formats.reordering import reordered, rows_of_nodes

Solve = Callable[[Array], Array]

_MINIMUM_DEGREE = {"permc_spec": "MMD_AT_PLUS_A", "diag_pivot_thresh": 0.0, "options": {"SymmetricMode": True}}
# Of an entry of the factor, and of an operation, as measured on one core for systems of 8,000 to 100,000 rows in the plane and
# in space; those of CHOLMOD's operations are below.
_CHOLMOD_ENTRY_SECONDS, _SUPERLU_ENTRY_SECONDS, _SUPERLU_SECONDS = 24e-9, 50e-9, 0.1e-9
# Of a row and of an entry of the matrix, for CHOLMOD to try all orders; as measured for a dozen systems, within a factor of 2.
_ORDERS_ROW_SECONDS, _ORDERS_ENTRY_SECONDS = 5e-6, 0.04e-6
# METIS is tried where an entry of the factor takes this many operations (CHOLMOD's own limit).
_WORTH_METIS = 500
# Rows of the dense matrix by which the speed of CHOLMOD's BLAS is measured, and the runs of which the fastest counts.
_DENSE_ROWS, _RUNS = 300, 3
# Seconds of an operation that tell an optimised BLAS from the reference implementation, and what each is taken to need. On a slow
# machine both are slower: CHOLMOD's is optimised, too, if it takes less than this many times as long as LAPACK in SciPy, and that
# is optimised.
_OPTIMISED_BELOW, _OPTIMISED_SECONDS, _REFERENCE_SECONDS = 0.22e-9, 0.012e-9, 0.4e-9
_TIMES_LAPACK = 4.5


@dataclass(frozen=True)
class FactorSize:
    """The entries of a Cholesky factor, and the multiplications and additions that it takes."""

    entries: int
    operations: float

    def of_blocks(self, size: int) -> FactorSize:
        """Return what these numbers become if every entry stands for a dense block of ``size`` rows."""
        return FactorSize(self.entries * size**2, self.operations * size**3)


class Analysis(Protocol):
    """What a library knows of a symmetric pattern before it factorises.

    Attributes
    ----------
    library : str
    order : array, (nodes,)
        The rows of the pattern in the order of elimination.
    is_thorough : bool
        Whether all orders have been tried, as :meth:`with_best_order` does.
    """

    library: ClassVar[str]
    order: Array
    is_thorough: bool

    def with_best_order(self, pattern: scipy.sparse.csr_array) -> Analysis:
        """Return an analysis of the same pattern for which all orders have been tried."""

    def factorised(self, A: scipy.sparse.csr_array) -> Solve:
        """Return what solves ``A x = b`` for one or several columns.

        Raises InputError if a pivot is zero; an indefinite matrix is not refused.
        """

    def seconds(self, size: FactorSize) -> float:
        """Return the predicted seconds of a factorisation on one core."""


class CholmodAnalysis:
    """CHOLMOD (Chen, Davis, Hager and Rajamanickam 2008): approximate minimum degree, or an order of METIS if that is better.

    Parameters
    ----------
    pattern : csr_array
    size : int
        Rows of the matrix for each one of the pattern, which are eliminated together. A pattern of nodes is analysed in a tenth
        of the time.
    quick : bool
        Try approximate minimum degree alone: METIS finds better orders of solids, but takes longer.

    Raises
    ------
    BudgetError
        If the factor is too large for CHOLMOD's integers or for the memory of the analysis.
    """

    library: ClassVar[str] = "CHOLMOD"

    def __init__(self, pattern: scipy.sparse.csr_array, size: int = 1, *, quick: bool = False) -> None:
        self.is_thorough, self._size = False, size
        try:
            symbolic = _cholmod().analyze(_columns(pattern), ordering_method="amd")
        except (_cholmod().CholmodTooLargeError, _cholmod().CholmodOutOfMemoryError) as error:
            raise BudgetError(f"the factor is too large for CHOLMOD: {error}") from error
        self.order: Array = symbolic.P()
        self._symbolic: Any = symbolic if size == 1 else None
        if not quick:
            self._take_best(pattern)

    def with_best_order(self, pattern: scipy.sparse.csr_array) -> Analysis:
        """Return one with the order of METIS, if that is better."""
        best = copy.copy(self)
        best._take_best(pattern)
        return best

    def _take_best(self, pattern: scipy.sparse.csr_array) -> None:
        if (found := self._by_metis(pattern)) is not None:
            self._symbolic, self.order = found if self._size == 1 else None, found.P()
        self.is_thorough = True

    def _by_metis(self, pattern: scipy.sparse.csr_array) -> Any:
        """Return an analysis in an order of METIS, if that is worth a try, and takes fewer operations and no more entries."""
        most = CPU.free_nbytes() // (8 * self._size**2)
        before = factor_size(pattern, self.order, most)
        if before is not None:
            counted = before.of_blocks(self._size)
            if counted.operations < _WORTH_METIS * counted.entries:
                return None
        try:
            found = _cholmod().analyze(_columns(pattern), ordering_method="metis")
        except _cholmod().CholmodError:  # it may be built without METIS
            return None
        after = factor_size(pattern, found.P(), most if before is None else before.entries)
        better = after is not None and (before is None or after.operations < before.operations)
        return found if better else None

    def factorised(self, A: scipy.sparse.csr_array) -> Solve:
        """Return what solves with the factor."""
        rows = None if self._size == 1 else rows_of_nodes(self.order, self._size)
        columns = _columns(A if rows is None else reordered(A, rows))
        try:
            if self._symbolic is None:
                self._symbolic = _cholmod().analyze(columns, ordering_method="natural")
            factor = self._symbolic.cholesky(columns)
        except _cholmod().CholmodNotPositiveDefiniteError as error:
            raise InputError(f"the matrix cannot be factorised without pivoting: {error}") from error
        except _cholmod().CholmodError as error:
            raise BudgetError(f"the factor cannot be made; there may be too little memory for it: {error}") from error
        return factor if rows is None else _in_order(factor, rows)

    def seconds(self, size: FactorSize) -> float:
        """Return about the seconds on one core, with the BLAS that it is linked with."""
        return _CHOLMOD_ENTRY_SECONDS * size.entries + _blas_seconds() * size.operations


class SuperLUAnalysis:
    """SuperLU (Li 2005) in symmetric mode: multiple minimum degree (Liu 1985), and both factors, as if A were not symmetric.

    Parameters are those of :class:`CholmodAnalysis`; there is one order only.
    """

    library: ClassVar[str] = "SuperLU"

    def __init__(self, pattern: scipy.sparse.csr_array, size: int = 1) -> None:
        n, self.is_thorough, self._size = pattern.shape[0], True, size
        self.order: Array = np.arange(n)
        if n:  # an incomplete factorisation of a matrix of this pattern that drops everything tells the order
            matrix = scipy.sparse.csc_matrix(
                (np.full(pattern.nnz, -1e-3), pattern.indices, pattern.indptr), shape=pattern.shape
            )
            matrix.setdiag(1.0)
            factors = scipy.sparse.linalg.spilu(matrix, drop_tol=1.0, fill_factor=1.0, **_MINIMUM_DEGREE)
            self.order = np.argsort(factors.perm_c)

    def with_best_order(self, pattern: scipy.sparse.csr_array) -> Analysis:
        """Return this one."""
        return self

    def factorised(self, A: scipy.sparse.csr_array) -> Solve:
        """Return what solves with both factors."""
        rows = rows_of_nodes(self.order, self._size)
        try:
            factors = scipy.sparse.linalg.splu(
                _columns(reordered(A, rows)), **{**_MINIMUM_DEGREE, "permc_spec": "NATURAL"}
            )
        except RuntimeError as error:  # a pivot that is zero
            raise InputError(f"the matrix cannot be factorised without pivoting: {error}") from error
        return _in_order(factors.solve, rows)

    def seconds(self, size: FactorSize) -> float:
        """Return about the seconds on one core."""
        return _SUPERLU_ENTRY_SECONDS * size.entries + _SUPERLU_SECONDS * size.operations


def _in_order(solve: Solve, rows: Array) -> Solve:
    """Return what solves a system whose rows have been put in an order, for vectors in the order before."""

    def solved(b: Array) -> Array:
        x = np.empty_like(b)
        x[rows] = solve(np.asfortranarray(b[rows]))
        return x

    return solved


def analysed(pattern: scipy.sparse.csr_array, size: int = 1, *, quick: bool = False) -> Analysis:
    """Return an analysis of a symmetric pattern of nodes of ``size`` rows by the fastest library; ``quick`` for a prediction."""
    if _cholmod() is not None and pattern.shape[0]:
        return CholmodAnalysis(pattern, size, quick=quick)
    return SuperLUAnalysis(pattern, size)


def library() -> str:
    """Return the name of the library that factorises."""
    return (SuperLUAnalysis if _cholmod() is None else CholmodAnalysis).library


def seconds_to_try_orders(rows: int, entries: int) -> float:
    """Return about the seconds in which an analysis finds the best order of a matrix of that many rows and entries."""
    return _ORDERS_ROW_SECONDS * rows + _ORDERS_ENTRY_SECONDS * entries


def most_entries(seconds: float) -> int:
    """Return how many entries a factor may have at most that is made within some seconds."""
    return int(seconds / min(_CHOLMOD_ENTRY_SECONDS, _SUPERLU_ENTRY_SECONDS))


def factor_size(A: scipy.sparse.csr_array, order: Array, most: int) -> FactorSize | None:
    """Return the size of the Cholesky factor of a symmetric pattern in an order, or None if it has more entries than ``most``.

    Exact, in a time that grows with the entries of A, not with those of the factor (Gilbert, Ng and Peyton 1994).
    """
    places = np.empty(len(order), dtype=np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    lengths = _column_lengths(A.indptr, A.indices, np.asarray(order), places)
    entries = int(lengths.sum())
    return FactorSize(entries, float(np.square(lengths, dtype=np.float64).sum())) if entries <= most else None


@serial_kernel
def _elimination_tree(row_offsets: Array, column_indices: Array, order: Array, places: Array) -> Array:
    """Return the parent of every column of the factor, -1 of roots (Liu 1990, section 4)."""
    n = places.shape[0]
    parent, ancestor = np.full(n, -1, dtype=np.int32), np.full(n, -1, dtype=np.int32)
    for column in range(n):
        row = order[column]
        for entry in range(row_offsets[row], row_offsets[row + 1]):
            node = places[column_indices[entry]]
            while 0 <= node < column:
                above = ancestor[node]
                ancestor[node] = column
                if above < 0:
                    parent[node] = column
                node = above
    return parent


@serial_kernel
def _postorder(parent: Array) -> Array:
    """Return the columns in an order in which all descendants of a column come right before it."""
    n = parent.shape[0]
    child, sibling = np.full(n, -1, dtype=np.int32), np.full(n, -1, dtype=np.int32)
    order, waiting = np.empty(n, dtype=np.int32), np.empty(n, dtype=np.int32)
    for column in range(n - 1, -1, -1):
        if parent[column] >= 0:
            sibling[column] = child[parent[column]]
            child[parent[column]] = column
    done = 0
    for root in range(n):
        if parent[root] >= 0:
            continue
        waiting[0], depth = root, 1
        while depth:
            column = waiting[depth - 1]
            if child[column] >= 0:  # its descendants first
                waiting[depth], depth = child[column], depth + 1
                child[column] = sibling[child[column]]
            else:
                order[done], done, depth = column, done + 1, depth - 1
    return order


@serial_kernel
def _column_lengths(row_offsets: Array, column_indices: Array, order: Array, places: Array) -> Array:
    """Return the number of entries of every column of the factor.

    A row of the factor is a subtree of the elimination tree. The columns of entries of A in the row that are its leaves
    count one more entry for themselves and all columns above, and the least common ancestors of neighbouring leaves one less.
    """
    parent = _elimination_tree(row_offsets, column_indices, order, places)
    n, postorder = parent.shape[0], _postorder(parent)
    lengths = np.zeros(n, dtype=np.int64)
    first = np.full(n, -1, dtype=np.int32)  # of each column: the position of its first descendant in postorder
    for position in range(n):
        column = postorder[position]
        lengths[column] = first[column] < 0  # a leaf of the tree
        while column >= 0 and first[column] < 0:
            first[column] = position
            column = parent[column]
    latest, leaf = np.full(n, -1, dtype=np.int32), np.full(n, -1, dtype=np.int32)  # of rows: the last leaf so far
    top = np.arange(n, dtype=np.int32)  # of columns: an ancestor among those that have been visited
    for position in range(n):
        column = postorder[position]
        if parent[column] >= 0:
            lengths[parent[column]] -= 1  # the diagonal entry of the column is not one of its parent
        row = order[column]
        for entry in range(row_offsets[row], row_offsets[row + 1]):
            below = places[column_indices[entry]]
            if below <= column or first[column] <= latest[below]:
                continue
            latest[below] = first[column]
            lengths[column] += 1
            before, leaf[below] = leaf[below], column
            if before >= 0:
                common = before
                while top[common] != common:
                    common = top[common]
                while before != common:
                    after = top[before]
                    top[before] = common
                    before = after
                lengths[common] -= 1
        if parent[column] >= 0:
            top[column] = parent[column]
    for column in range(n):  # parents have higher numbers
        if parent[column] >= 0:
            lengths[parent[column]] += lengths[column]
    return lengths


def _columns(A: scipy.sparse.csr_array) -> scipy.sparse.csc_matrix:
    """Return a symmetric matrix by columns, which share its arrays: they are its rows."""
    return scipy.sparse.csc_matrix((A.data, A.indices, A.indptr), shape=A.shape)


@functools.cache
def _cholmod() -> Any:
    """Return the module of CHOLMOD, or None if no scikit-sparse of a known interface is installed."""
    try:
        module = importlib.import_module("sksparse.cholmod")
    except ImportError:
        return None
    return module if hasattr(module, "analyze") else None


@functools.cache
def _blas_seconds() -> float:
    """Return the seconds of an operation of CHOLMOD on dense columns, from what a small dense matrix takes.

    One of two values, so that a choice depends on the BLAS and not on the moment.
    """
    dense = np.full((_DENSE_ROWS, _DENSE_ROWS), -1.0) + _DENSE_ROWS * np.eye(_DENSE_ROWS) * 2
    A = scipy.sparse.csr_array(dense)
    analysis = CholmodAnalysis(A, quick=True)
    an_operation = _seconds_of_operation(lambda: analysis.factorised(A))
    if an_operation < _OPTIMISED_BELOW:
        return _OPTIMISED_SECONDS
    with blas_limited(1):
        of_lapack = _seconds_of_operation(lambda: lapack.dpotrf(dense, lower=1))
    optimised = of_lapack < _OPTIMISED_BELOW and an_operation < _TIMES_LAPACK * of_lapack
    return _OPTIMISED_SECONDS if optimised else _REFERENCE_SECONDS


def _seconds_of_operation(factorise: Callable[[], object]) -> float:
    """Return the seconds of a multiplication and addition in factorisations of the dense matrix."""
    taken = []
    for _ in range(_RUNS):
        began = time.thread_time()  # by the clock, what else runs on this core would look like a slow BLAS
        factorise()
        taken.append(time.thread_time() - began)
    return min(taken) / (_DENSE_ROWS**3 / 3)
