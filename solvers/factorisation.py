"""A sparse factorisation as a preconditioner, for matrices on the host whose factors stay small.

Plane problems, networks and frames factorise in the time of some dozen iterations. CG with the factors is iterative refinement:
it takes a step or two, and its residual is that of A.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import scipy.sparse

from penstock.solvers.preconditioner_spec import PreconditionerSpec
from penstock.solvers.sparse_cholesky import Analysis, analysed, factor_size, library
from penstock.spmv import (
    CPU,
    Array,
    BudgetError,
    InputError,
    Operator,
    SparseMatrix,
    ValidatedOperator,
    VectorSpace,
    format_nbytes,
)

# The first share of the diagonal is added: the factors of a singular matrix exist then, and those of others hardly change. Where
# that is not enough, as for singular matrices whose entries were rounded to float32, the second share is.
_ADDED = (1e-12, 1e-7)
# Memory where the entries of the factor are not known, in vectors: those of both factors of 70 entries a row, of 12 bytes.
_VECTORS = 200
# Bytes of an entry of the factor, of which SuperLU stores two.
_ENTRY_NBYTES = 24


class SparseFactors(ValidatedOperator):
    """``z = (A + s diag(A))^-1 r`` for A on the host and s = 1e-12 or 1e-7, by a factorisation without pivoting.

    Parameters
    ----------
    A : csr_array, (n, n)
    analysis : Analysis
        Of its pattern.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> from penstock.solvers.factorisation import SparseFactors
    >>> from penstock.solvers.sparse_cholesky import analysed
    >>> A = scipy.sparse.csr_array([[4.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 2.0]])
    >>> (SparseFactors(A, analysed(A)) @ np.array([5.0, 4.0, 2.0])).round(9).tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(self, A: scipy.sparse.csr_array, analysis: Analysis) -> None:
        self.shape, self.dtype, self.device = A.shape, np.dtype(np.float64), CPU
        self.analysis, self._space = analysis, VectorSpace(CPU)
        diagonal = A.diagonal()
        if not (diagonal > 0).all():
            raise InputError("a matrix whose diagonal is not positive cannot be factorised without pivoting")
        raised = A.copy()
        for share in _ADDED:
            raised.setdiag(diagonal * (1.0 + share))
            try:
                self._solve = analysis.factorised(raised)
                break
            except InputError:
                if share == _ADDED[-1]:
                    raise

    @property
    def capturable(self) -> bool:
        """False: it works on the host."""
        return False

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        self._space.write(alpha, self._solve(x), beta, out)


@dataclass(frozen=True)
class FactorisationSpec(PreconditionerSpec, name="factorisation"):
    """Specification of :class:`SparseFactors`; an ``analysis`` of the pattern, and the ``entries`` of the factor, if known.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import FactorisationSpec
    >>> FactorisationSpec().build(Cantilever(nodes=4, dof=1).matrix()).shape
    (64, 64)
    """

    needs_entries: ClassVar[bool] = True

    analysis: Any = field(default=None, compare=False, repr=False, metadata={"option": False})
    entries: int = field(default=0, compare=False, repr=False, metadata={"option": False})

    def build(self, A: Operator) -> Operator:
        """Return the factors of a matrix in memory on the host."""
        if self.entries * _ENTRY_NBYTES > CPU.free_nbytes():
            raise self._too_large()
        return self._factors(A, self.analysis)

    def rebuild(self, M: Operator | None, A: Operator) -> Operator:
        """Return the factors of new values, from the analysis of the pattern that the old ones have."""
        return self._factors(A, M.analysis if isinstance(M, SparseFactors) else self.analysis)

    @staticmethod
    def _too_large() -> BudgetError:
        free = format_nbytes(CPU.free_nbytes())
        return BudgetError(f"the factors would take more than the {free} that are free; choose multigrid")

    def _factors(self, A: Operator, analysis: Analysis | None) -> SparseFactors:
        if not isinstance(A, SparseMatrix) or A.device.kind != "cpu":
            raise InputError("a factorisation needs a matrix that is held in the memory of the host; choose multigrid")
        matrix = A.to_csr().astype(np.float64, copy=False)
        if analysis is None:
            analysis = analysed(matrix)
            most = CPU.free_nbytes() // _ENTRY_NBYTES
            if not self.entries and factor_size(matrix, analysis.order, most) is None:
                raise self._too_large()
        return SparseFactors(matrix, analysis)

    @property
    def description(self) -> str:
        """The name, and the library that does it."""
        return f"{self.name} by {library()}"

    @property
    def formats(self) -> tuple[str, ...]:
        """CSR, which is not converted: few products are needed."""
        return ("csr",)

    def vectors(self, columns: int, *, streamed_to_gpu: bool) -> int:
        """Return about the vectors that the factors take."""
        return _VECTORS

    def workspace_nbytes(self, n: int, columns: int, dtype: Any = np.float64, *, streamed_to_gpu: bool = False) -> int:
        """Return the bytes of the factors."""
        guessed = super().workspace_nbytes(n, columns, dtype, streamed_to_gpu=streamed_to_gpu)
        return self.entries * _ENTRY_NBYTES or guessed
