"""The levels of multigrid, their smoothers, and those of a hierarchy of ``pyamg``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import scipy.sparse

from penstock.solvers.chebyshev import Chebyshev, largest_eigenvalue
from penstock.solvers.coarse.dense_inverse import dense_inverse
from penstock.solvers.preconditioners import DiagonalBlocks, block_jacobi
from penstock.solvers.triangular.gauss_seidel import gauss_seidel
from penstock.spmv import Array, BsrMatrix, CsrMatrix, Device, InputError, Operator, SparseMatrix, as_operator

Cycle = Literal["V", "W"]
Smoother = Literal["chebyshev", "gauss_seidel"]

#: Degree of the smoothing polynomial.
DEGREE = 3
# It smooths what is above this share of the largest eigenvalue (Adams, Brezina, Hu and Tuminaro 2003).
_SMOOTHED_FROM = 1.0 / 8.0


@dataclass
class Level:
    """A level, its symmetric smoother, used before and after the correction, and the prolongator from the next one."""

    A: SparseMatrix
    smoother: Operator
    P: CsrMatrix
    R: CsrMatrix  # the transpose of P
    work: dict[str, Array] = field(default_factory=dict)

    def lend(self, like: Array) -> dict[str, Array]:
        """Return vectors of this level and of the next, for as many right-hand sides as ``like`` has."""
        if not self.work or self.work["residual"].shape != like.shape:
            xp, coarse = self.A.device.xp, (self.P.shape[1], *like.shape[1:])
            self.work = {name: xp.empty_like(like) for name in ("residual", "correction")}
            self.work |= {name: xp.empty(coarse) for name in ("right", "solved", "again", "more")}
        return self.work


def make_smoother(A: SparseMatrix, diagonal: DiagonalBlocks, high: float, name: Smoother, degree: int) -> Operator:
    """Return a symmetric smoother of a matrix; D is ``diagonal``, and ``high`` bounds the eigenvalues of D A."""
    if name == "gauss_seidel":
        return gauss_seidel(A)
    return Chebyshev(A, diagonal, degree, high * _SMOOTHED_FROM, high)


def levels_of_pyamg(
    hierarchy: Any, smoother: Smoother, cycle: Cycle, device: Device | str
) -> tuple[list[Level], Operator]:
    """Return the levels of a hierarchy of ``pyamg`` on a device, and the inverse of its coarsest matrix."""
    check_choices(smoother, cycle)
    if not getattr(hierarchy, "levels", None):
        raise InputError(f"a {type(hierarchy).__name__} is not a hierarchy of pyamg: it has no levels")
    where, levels = Device.parse(device), []
    with where.current():
        for level in hierarchy.levels[:-1]:
            A = as_operator(_sorted(level.A))
            assert isinstance(A, SparseMatrix)
            A = A.to_device(where)
            P, R = (CsrMatrix.from_csr(_sorted(M.tocsr())).to_device(where) for M in (level.P, level.P.T))
            diagonal = block_jacobi(A, size_of(A))
            high = largest_eigenvalue(A, diagonal, 1)
            levels.append(Level(A, make_smoother(A, diagonal, high, smoother, DEGREE), P, R))
        last = scipy.sparse.csr_array(dense_inverse(hierarchy.levels[-1].A.toarray()))
        return levels, CsrMatrix.from_csr(last).to_device(where)


def _sorted(A: Any) -> Any:
    """Return a SciPy matrix with ascending columns."""
    A = A.copy()
    A.sum_duplicates()
    A.sort_indices()
    return A


def check_choices(smoother: str, cycle: str) -> None:
    """Refuse unknown smoothers and cycles."""
    if smoother not in ("chebyshev", "gauss_seidel"):
        raise InputError(f"smoother must be 'chebyshev' or 'gauss_seidel', not {smoother!r}")
    if cycle not in ("V", "W"):
        raise InputError(f"cycle must be 'V' or 'W', not {cycle!r}")


def size_of(A: SparseMatrix) -> int:
    """Return the rows of the blocks of a matrix."""
    return A.row_granularity if isinstance(A, BsrMatrix) else 1
