"""What the first run on a machine does ahead: each function is a task for a process of its own.

Most call CPU kernels on small data, so that Numba compiles them.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse

from penstock.fem import Cantilever
from penstock.solvers import DiagonalBlocks, block_jacobi, chebyshev
from penstock.solvers.amg.aggregates import Aggregates
from penstock.solvers.amg.tentative import StoredTentative
from penstock.solvers.cg_iteration import CgRecurrence
from penstock.spmv import CPU, Array, BsrMatrix, CsrMatrix, Operator, ValidatedOperator, VectorSpace
from penstock.spmv.formats.scaling import LONG, scale
from penstock.spmv.model.stencil import stencil_matrix
from penstock.spmv.products.block_products import block_product, smoothed_rows
from penstock.spmv.products.block_rows import BlockRows
from penstock.streaming import HostStore, StreamedMatrix

_NODES, _SIDE, _BLOCKS = (9, 17, 17), 24, 8400
_ROWS = 200


def assemble(format_name: str, dof: int) -> None:
    """Call the kernels of the assembly."""
    for _ in Cantilever(nodes=_NODES, dof=dof).subdivisions(2, format_name):
        pass


def multiply(format_name: str, dof: int) -> None:
    """Call the kernels of products, resident and streamed."""
    A = stencil_matrix(_SIDE, format_name, block_size=dof)
    x, out = np.ones(A.shape[0]), np.empty(A.shape[0])
    A.check_structure(0)
    A.apply(x, out)
    scale(np.ones(LONG + 1), 0.0)
    with HostStore.from_matrix(A, 8) as store, StreamedMatrix(store, 7 * max(store.index.sizes["whole"])) as streamed:
        streamed.apply(x, out)
        streamed.apply_absolute(x)


def list_fonts() -> None:
    """Let Matplotlib list the fonts of this machine."""
    import matplotlib.font_manager  # noqa: F401


def invert() -> None:
    """Call the kernel that inverts diagonal blocks."""
    block_jacobi(_Identity(6), 3)


def polynomial(dof: int) -> None:
    """Call the kernels of a Chebyshev polynomial on vectors, and those of diagonal blocks."""
    A = _Identity(_BLOCKS * dof)
    chebyshev(A, 3, block_size=dof, high=2.0).apply(np.ones(A.shape[0]))


def iterate(dof: int, preconditioner: str) -> None:
    """Call the kernels of an iteration of conjugate gradients on vectors, and of the measurement of rates."""
    n = _BLOCKS * dof
    A = _Identity(n)
    blocks = {"jacobi": 1, "block_jacobi": dof}.get(preconditioner)
    M = _Identity(n, A) if blocks is None else DiagonalBlocks(np.ones((n // blocks, blocks, blocks)))
    x, r, p, q, z, w = (np.ones(n) for _ in range(6))
    recurrence = CgRecurrence(A, M, x, r, p, q, z, w if blocks is None else None)
    recurrence.put(next_rho=1.0, unit=1e-16)
    recurrence.advance(2)
    recurrence.look()
    _measure_rates()


def _measure_rates() -> None:
    """Call the kernels with which the rates of a machine are measured."""
    VectorSpace(CPU).dot(np.ones(_BLOCKS), np.ones(_BLOCKS))
    _diagonal(6).apply(np.ones(32 * 6))


def _diagonal(size: int) -> BsrMatrix:
    offsets, columns, values = np.arange(33), np.arange(32, dtype=np.int32), np.tile(np.eye(size), (32, 1, 1))
    return BsrMatrix((32 * size, 32 * size), np.dtype(np.float64), offsets, columns, values)


def aggregate(dof: int) -> None:
    """Call the kernels of the transfer to a coarse level."""
    modes = 1 if dof == 1 else 6
    candidates, free = np.ones((_BLOCKS * dof, modes)), np.ones(_BLOCKS * dof, dtype=np.bool_)
    T = StoredTentative(candidates, free, Aggregates(np.arange(_BLOCKS, dtype=np.int32) // 100), dof, CPU)
    coarse, fine = np.ones(T.unknowns), np.empty(_BLOCKS * dof)
    T.prolong(coarse, fine)
    T.restrict(fine, coarse)


def multiply_coarse(dof: int) -> None:
    """Call the kernels of products on a coarse level, of updates of vectors, and of the measurement of rates.

    Coarsest levels of few rows are solved by one thread, whose kernel is compiled in a quarter of a second when it is needed.
    """
    modes, space = 1 if dof == 1 else 6, VectorSpace(CPU)
    A = _diagonal(modes)
    A.apply(np.ones(32 * modes))
    A.apply_absolute(np.ones(32 * modes))
    A.diagonal_blocks(modes)
    inverse = scipy.sparse.csr_array(np.ones((_ROWS, _ROWS)))  # dense, of the coarsest level
    CsrMatrix.from_csr(inverse, check=False).apply(np.ones(_ROWS))
    vector = np.ones(_BLOCKS * dof)
    space.combine(1.0, vector, 0.5, vector)
    space.dot(vector, vector)
    _measure_rates()


def multiply_blocks(dof: int) -> None:
    """Call the kernels that form the matrix of a coarse level."""
    modes, offsets, columns = 1 if dof == 1 else 6, np.arange(33), np.arange(32, dtype=np.int32)
    A = BlockRows(0, offsets, columns, np.tile(np.eye(dof), (32, 1, 1)))
    P = BlockRows(0, offsets, columns, np.ones((32, dof, modes)))
    smoothed_rows(block_product(A, P, 32), P, np.tile(np.eye(dof), (32, 1, 1)), 0.5)


class _Identity(ValidatedOperator):
    """The identity as a matrix, and as a preconditioner that consists of products with it."""

    def __init__(self, n: int, A: Operator | None = None) -> None:
        self.shape, self.dtype, self.device = (n, n), np.dtype(np.float64), CPU
        self.A = A

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        out[...] = alpha * x

    def apply_with_product(self, r: Array, z: Array, w: Array) -> None:
        """Set ``z = w = r``."""
        z[...] = w[...] = r

    def diagonal_blocks(self, size: int) -> Array:
        """Return dense identities."""
        return np.tile(np.eye(size), (self.shape[0] // size, 1, 1))
