"""A sparse factorisation as a preconditioner: SciPy's SuperLU, for matrices on the host whose factors stay small.

Plane problems, networks and frames factorise in the time of some dozen iterations. CG with the factors is iterative refinement:
it takes a step or two, and its residual is that of A.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import scipy.sparse
import scipy.sparse.linalg

from penstock.solvers.preconditioner_spec import PreconditionerSpec
from penstock.spmv import CPU, Array, InputError, Operator, SparseMatrix, ValidatedOperator, VectorSpace
from penstock.spmv.compilation.jit import serial_kernel

# This share of the diagonal is added: the factors of a singular matrix exist then, and those of others hardly change.
_ADDED = 1e-12
_MINIMUM_DEGREE = {"permc_spec": "MMD_AT_PLUS_A", "diag_pivot_thresh": 0.0, "options": {"SymmetricMode": True}}
# Memory of both factors, in vectors: that of about 70 entries a row in each, of 12 bytes.
_VECTORS = 200


class SparseFactors(ValidatedOperator):
    """``z = (L U)^-1 r`` for A on the host, whose rows are taken in the order of ``order``; without pivoting, so symmetric.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> from penstock.solvers.factorisation import SparseFactors, minimum_degree_order
    >>> A = scipy.sparse.csr_array([[4.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 2.0]])
    >>> (SparseFactors(A, minimum_degree_order(A)) @ np.array([5.0, 4.0, 2.0])).round(9).tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(self, A: scipy.sparse.csr_array, order: Array) -> None:
        self.shape, self.dtype, self.device = A.shape, np.dtype(np.float64), CPU
        self._order, self._space = order, VectorSpace(CPU)
        permuted = in_order(A, order)
        if not (permuted.diagonal() > 0).all():
            raise InputError("a matrix whose diagonal is not positive cannot be factorised without pivoting")
        permuted.setdiag(permuted.diagonal() * (1.0 + _ADDED))
        options = {**_MINIMUM_DEGREE, "permc_spec": "NATURAL"}
        try:
            self._factors = scipy.sparse.linalg.splu(permuted, **options)
        except RuntimeError as error:  # a pivot that is zero
            raise InputError(f"the matrix cannot be factorised without pivoting: {error}") from error

    @property
    def entries(self) -> int:
        """Stored entries of both factors."""
        return int(self._factors.nnz)

    @property
    def capturable(self) -> bool:
        """False: it works on the host."""
        return False

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        solved = np.empty_like(x)
        solved[self._order] = self._factors.solve(np.asfortranarray(x[self._order]))
        self._space.write(alpha, solved, beta, out)


@dataclass(frozen=True)
class FactorisationSpec(PreconditionerSpec, name="factorisation"):
    """Specification of :class:`SparseFactors`; ``order`` of the rows is that of minimum degree if none is given.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import FactorisationSpec
    >>> FactorisationSpec().build(Cantilever(nodes=4, dof=1).matrix()).shape
    (64, 64)
    """

    needs_entries: ClassVar[bool] = True

    order: Any = field(default=None, compare=False, repr=False)

    def build(self, A: Operator) -> Operator:
        """Return the factors of a matrix in memory on the host."""
        if not isinstance(A, SparseMatrix) or A.device.kind != "cpu":
            raise InputError("a factorisation needs a matrix that is held in the memory of the host; choose multigrid")
        matrix = A.to_csr().astype(np.float64, copy=False)
        return SparseFactors(matrix, minimum_degree_order(matrix) if self.order is None else self.order)

    @property
    def formats(self) -> tuple[str, ...]:
        """CSR, which is not converted: few products are needed."""
        return ("csr",)

    def vectors(self, columns: int, *, streamed_to_gpu: bool) -> int:
        """Return about the vectors that the factors take."""
        return _VECTORS


def minimum_degree_order(A: scipy.sparse.csr_array) -> Array:
    """Return an order of the rows of a symmetric pattern in which factors have few entries (Liu 1985, multiple minimum degree).

    It is that of SuperLU, which an incomplete factorisation of a matrix of this pattern tells that drops everything.
    """
    n = A.shape[0]
    if not n:
        return np.empty(0, dtype=np.int64)
    pattern = scipy.sparse.csc_matrix((np.full(A.nnz, -1e-3), A.indices, A.indptr), shape=A.shape)
    pattern.setdiag(1.0)
    factors = scipy.sparse.linalg.spilu(pattern, drop_tol=1.0, fill_factor=1.0, **_MINIMUM_DEGREE)
    return np.argsort(factors.perm_c)


def in_order(A: scipy.sparse.csr_array, order: Array) -> scipy.sparse.csc_matrix:
    """Return the rows and columns of a symmetric matrix in another order."""
    permuted = scipy.sparse.csc_matrix(A[order][:, order])  # of a symmetric matrix rows are columns
    permuted.sort_indices()
    return permuted


def factor_entries(A: scipy.sparse.csr_array, order: Array, most: int) -> int | None:
    """Return the entries of the Cholesky factor of a symmetric pattern in an order, or None if there are more than ``most``.

    Exact, from the elimination tree, in a time proportional to what is counted (Liu 1990, sections 4 and 5).
    """
    permuted = in_order(A, order)
    entries = int(_count(permuted.indptr, permuted.indices, most))
    return entries if entries <= most else None


@serial_kernel
def _count(starts: Array, rows: Array, most: int) -> int:
    n = starts.shape[0] - 1
    parent, ancestor = np.full(n, -1, dtype=np.int32), np.full(n, -1, dtype=np.int32)
    for column in range(n):
        for place in range(starts[column], starts[column + 1]):
            node = rows[place]
            while 0 <= node < column:
                above = ancestor[node]
                ancestor[node] = column
                if above < 0:
                    parent[node] = column
                node = above
    seen, total = np.full(n, -1, dtype=np.int32), n
    for row in range(n):
        seen[row] = row
        for place in range(starts[row], starts[row + 1]):
            node = rows[place]
            while node < row and seen[node] != row:
                seen[node] = row
                total += 1
                node = parent[node]
        if total > most:
            break
    return total  # type: ignore[no-any-return]
