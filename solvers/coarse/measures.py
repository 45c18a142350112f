"""What every coarsening needs to know of a matrix: diagonal blocks, bound of the eigenvalues, free unknowns, dense inverse."""

from __future__ import annotations

from typing import Any

import scipy.sparse

from penstock.solvers.chebyshev import largest_eigenvalue, scaled_row_sums
from penstock.solvers.coarse.dense_inverse import dense_inverse
from penstock.solvers.coarse.matrix_rows import diagonal_and_row_sums
from penstock.solvers.preconditioners import DiagonalBlocks, inverted_blocks
from penstock.spmv import Array, CsrMatrix, Operator, SparseMatrix
from penstock.spmv.communicator import communicator_of

#: Matrices of up to this many unknowns are inverted.
DENSE_UNKNOWNS = 800
#: A level that is hardly smaller than the one before ends the coarsening.
LEAST_COARSENING = 0.8
# An unknown whose couplings add up to less than this share of its diagonal is decoupled.
_DECOUPLED = 1e-12


def measured(
    A: Operator, size: int, rounds: int, degree: int = 9, **options: Any
) -> tuple[DiagonalBlocks, float, Array]:
    """Return D, a bound of the eigenvalues of ``D A`` (:func:`largest_eigenvalue`), and which unknowns couple with others."""
    with communicator_of(A).together():
        blocks, of_rows = diagonal_and_row_sums(A, size)
        diagonal = inverted_blocks(A, blocks)
        sums = scaled_row_sums(diagonal, of_rows)
    high = largest_eigenvalue(A, diagonal, rounds, degree, row_sums=sums, **options)
    return diagonal, high, sums >= 1.0 + _DECOUPLED  # the sum is 1 plus the couplings


def inverse_of(A: SparseMatrix, negligible: float) -> CsrMatrix:
    """Return the dense inverse of a small matrix, on its device; entries and eigenvalues below ``negligible`` are zero."""
    inverse = dense_inverse(A.to_csr().toarray(), negligible)
    return CsrMatrix.from_csr(scipy.sparse.csr_array(inverse)).to_device(A.device)
