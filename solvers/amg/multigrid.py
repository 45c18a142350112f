"""Multigrid by smoothed aggregation, with the prolongators stored, on the device of the matrix: levels, cycles and set-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import scipy.sparse

from penstock.solvers.amg.coarsening import coarsen
from penstock.solvers.amg.cycle_matrix import cycle_matrix
from penstock.solvers.amg.dense_inverse import DENSE_UNKNOWNS, dense_inverse, inverse_of
from penstock.solvers.amg.group_inverses import GroupChebyshev, GroupInverses
from penstock.solvers.amg.matrix_rows import visit_rows
from penstock.solvers.amg.modes import checked_near_null_space, modes_of
from penstock.solvers.chebyshev import NEARLY_SETTLED, SETTLED, Chebyshev, check_degree, largest_eigenvalue
from penstock.solvers.preconditioners import DiagonalBlocks, block_jacobi
from penstock.solvers.triangular.gauss_seidel import gauss_seidel
from penstock.spmv import (
    Array,
    BsrMatrix,
    CsrMatrix,
    Device,
    InputError,
    Operator,
    SparseMatrix,
    ValidatedOperator,
    VectorSpace,
    as_operator,
)
from penstock.spmv.formats.limits import check_unknowns_of_a_node
from penstock.spmv.operator import is_capturable, unchecked_product
from penstock.spmv.products.block_rows import BlockRows, as_csr, rows_of

Cycle = Literal["V", "W"]
Smoother = Literal["chebyshev", "gauss_seidel"]

# Degree of the smoothing polynomial.
_DEGREE = 3
# It smooths what is above this share of the largest eigenvalue (Adams, Brezina, Hu and Tuminaro 2003).
_SMOOTHED_FROM = 1.0 / 8.0
# No more levels than this are made.
_MOST_LEVELS = 20


@dataclass
class Level:
    """A level, its symmetric smoother, used before and after the correction, and the prolongator from the next one."""

    A: SparseMatrix
    smoother: Operator
    P: CsrMatrix
    R: CsrMatrix  # the transpose of P
    work: dict[str, Array] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix and of D on groups, which is read about as often."""
        of_groups = self.smoother.D.matrix.nbytes if isinstance(self.smoother, GroupChebyshev) else 0
        return self.A.nbytes + of_groups

    def lend(self, like: Array) -> dict[str, Array]:
        """Return vectors of this level and of the next, for as many right-hand sides as ``like`` has."""
        if not self.work or self.work["residual"].shape != like.shape:
            xp, coarse = self.A.device.xp, (self.P.shape[1], *like.shape[1:])
            self.work = {name: xp.empty_like(like) for name in ("residual", "correction")}
            self.work |= {name: xp.empty(coarse) for name in ("right", "solved", "again", "more")}
        return self.work


class Multigrid(ValidatedOperator):
    """A symmetric multigrid cycle as a preconditioner; made by :func:`multigrid` or :meth:`Multigrid.from_pyamg`.

    Parameters
    ----------
    levels : sequence of Level
        The finest first.
    inverse : Operator
        Of the matrix of the coarsest level.
    cycle : {"V", "W"}
        How often a level is visited on the way: once, or twice.

    Attributes
    ----------
    operator_complexity : float
        Stored entries of all matrices but the coarsest, in those of the finest.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import multigrid
    >>> M = multigrid(Cantilever(nodes=10, dof=1).matrix())
    >>> M.shape, len(M.levels)
    ((1000, 1000), 1)
    """

    def __init__(self, levels: Sequence[Level], inverse: Operator, cycle: Cycle = "V") -> None:
        self.levels, self.inverse, self.cycle = list(levels), inverse, cycle
        finest = self.levels[0].A if self.levels else inverse
        self.shape, self.dtype, self.device = finest.shape, np.dtype(np.float64), finest.device

    @property
    def capturable(self) -> bool:
        """Whether a cycle only launches kernels, so that :func:`cg` replays it in a CUDA graph."""
        return all(map(is_capturable, (self.inverse, *(level.smoother for level in self.levels))))

    @property
    def operator_complexity(self) -> float:
        """Stored entries of all matrices but the coarsest, in those of the finest."""
        entries = [int(level.A.values.size) for level in self.levels]
        return sum(entries) / entries[0] if entries else 1.0

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        if alpha == 1.0 and beta == 0.0:
            self._solve(0, x, out)
            return
        solved = self.device.xp.empty_like(x)
        self._solve(0, x, solved)
        VectorSpace(self.device).write(alpha, solved, beta, out)

    def _solve(self, number: int, r: Array, z: Array) -> None:
        """Set z to the result of a cycle for ``A z = r`` from zero."""
        if number == len(self.levels):
            unchecked_product(self.inverse)(r, z, 1.0, 0.0)
            return
        level = self.levels[number]
        work, smooth, product = level.lend(r), unchecked_product(level.smoother), unchecked_product(level.A)
        residual, right, solved = work["residual"], work["right"], work["solved"]
        smooth(r, z, 1.0, 0.0)
        residual[...] = r
        product(z, residual, -1.0, 1.0)
        unchecked_product(level.R)(residual, right, 1.0, 0.0)
        self._solve(number + 1, right, solved)
        if self.cycle == "W" and number + 1 < len(self.levels):
            again, more = work["again"], work["more"]
            again[...] = right
            unchecked_product(self.levels[number + 1].A)(solved, again, -1.0, 1.0)
            self._solve(number + 1, again, more)
            solved += more
        unchecked_product(level.P)(solved, z, 1.0, 1.0)
        residual[...] = r
        product(z, residual, -1.0, 1.0)
        smooth(residual, work["correction"], 1.0, 0.0)
        z += work["correction"]

    @classmethod
    def from_pyamg(
        cls, hierarchy: Any, *, smoother: Smoother = "chebyshev", cycle: Cycle = "V", device: Device | str = "cpu"
    ) -> Multigrid:
        """Return a cycle over the levels of a hierarchy of ``pyamg``, which then runs on a GPU.

        Parameters
        ----------
        hierarchy : pyamg.MultilevelSolver
            Of a symmetric positive definite matrix, with ``R = P'``.
        smoother, cycle
            As for :func:`multigrid`, here V-cycles by default; those of the hierarchy are not used.
        device : Device or str
        """
        return cls(*_levels_of_pyamg(hierarchy, smoother, cycle, device), cycle)


def multigrid(
    A: Any,
    near_null_space: Any = None,
    smoother: Smoother = "chebyshev",
    *,
    coordinates: Any = None,
    cycle: Cycle = "W",
    degree: int | Literal["auto"] = "auto",
    block_size: int | None = None,
) -> Multigrid:
    """Return classic multigrid by smoothed aggregation as a preconditioner, for a matrix that is held in memory.

    Parameters
    ----------
    A : matrix
        Symmetric positive definite: BSR, whose blocks are the unknowns of a node, or anything that converts to CSR.
    near_null_space : array, (n, modes), optional
        Vectors that A nearly maps to zero, 1 to 8. By default those that ``coordinates`` make, or a constant for each unknown of
        a node.
    smoother : {"chebyshev", "gauss_seidel"}
        A polynomial of D A, or symmetric Gauss-Seidel by colours.
    coordinates : array, (nodes, 2) or (nodes, 3), optional
        Of the nodes, for the rigid motions of a body.
    cycle : {"W", "V"}
        ``W`` visits coarse levels twice. They are small, and it needs two thirds of the iterations.
    degree : int or "auto"
        Of the polynomial, odd; ``auto`` is 3.
    block_size : int, optional
        Unknowns of a node, 1 to 8; by default those of the blocks of BSR, and 1 for other formats.

    Returns
    -------
    Multigrid

    Raises
    ------
    InputError
        If an argument does not fit the matrix, or that is not held in memory.

    Notes
    -----
    Vanek, Mandel and Brezina (1996), with the prolongator stored. Cycles multiply by copies of all matrices, that of A too, which
    are rounded to float32 after the set-up. They take half of the bytes and leave the number of iterations as it is: the rounded
    matrices are symmetric, and rounding hardly moves their largest eigenvalues, so that a cycle stays symmetric positive
    definite. Everything but the inverse of the last matrix is set up on the device.

    :func:`smoothed_aggregation` needs fewer iterations and no prolongator, and works on streamed matrices; this is for matrices
    of any kind in memory. Aggregates follow strong couplings only, so that jumps of a coefficient and anisotropy cost few
    iterations. Nodes that lie on lines across flat elements, and tied nodes, are smoothed and aggregated together: D then inverts
    the blocks of A on such groups. Lines of up to 4,096 nodes are factorised, in two blocks for each node; other groups are
    inverted as dense blocks, of up to 64 nodes.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import cg, multigrid
    >>> beam = Cantilever(nodes=(13, 5, 5), dof=3)
    >>> A = beam.matrix()
    >>> result = cg(A, beam.load(), M=multigrid(A, coordinates=beam.mesh.coordinates()), rtol=1e-8)
    >>> result.converged, result.iterations < 20
    (True, True)
    """
    _check_choices(smoother, cycle)
    check_degree(degree)
    if block_size is not None:
        check_unknowns_of_a_node(block_size)
    products = _DEGREE if degree == "auto" else degree
    matrix = _stored(as_operator(A), block_size)
    size = _size_of(matrix)
    with matrix.device.current():
        if near_null_space is not None:
            coordinates = None  # which would only make rigid motions
        known = checked_near_null_space(matrix, size, near_null_space, coordinates)
        modes = modes_of(matrix.shape[0] // size, size, *known, matrix.device)
        levels: list[Level] = []
        # Coarse levels of what needs no groups only look as if they did.
        grouped = smoother == "chebyshev"
        while matrix.shape[0] > DENSE_UNKNOWNS and len(levels) < _MOST_LEVELS:
            level = coarsen(matrix, _size_of(matrix), modes, rounds=1, stored=True, grouped=grouped, finest=not levels)
            if level is None:
                break
            stored = cycle_matrix(matrix, level.diagonal)
            smooth: Operator
            if isinstance(level.groups, GroupInverses):
                smooth = GroupChebyshev(stored, level.groups, products, level.high * _SMOOTHED_FROM, level.high)
            else:
                smooth = _make_smoother(stored, level.diagonal, level.high, smoother, products)
            grouped = level.groups is not None
            P, R = map(cycle_matrix, level.transfers)
            levels.append(Level(stored, smooth, P, R))
            modes = level.T.candidates
            # For one mode as CSR, which shares the arrays.
            matrix = level.A if level.T.modes > 1 else as_csr(rows_of(level.A), level.T.unknowns)
        return Multigrid(levels, _last(matrix, smoother, products), cycle)


def _stored(A: Operator, block_size: int | None) -> BsrMatrix | CsrMatrix:
    """Return a matrix as BSR or CSR, on its device, or refuse it."""
    if not isinstance(A, SparseMatrix):
        raise InputError(f"multigrid needs a matrix that is held in memory, not a {type(A).__name__}")
    if A.shape[0] != A.shape[1]:
        raise InputError(f"multigrid needs a square matrix, not one of shape {A.shape}")
    if np.dtype(A.dtype) != np.float64:
        raise InputError(f"multigrid needs vectors of float64, not {A.dtype}")
    if isinstance(A, (BsrMatrix, CsrMatrix)) and block_size in (None, _size_of(A)):
        return A
    size, parts = block_size or 1, list[BlockRows]()
    if isinstance(A, CsrMatrix):
        return BsrMatrix.from_csr(A, block_size=size)
    visit_rows(A, size, parts.append)
    rows = BlockRows.joined(parts, 0)
    if size == 1:
        return as_csr(rows, A.shape[1], A.dtype)
    arrays = {"row_offsets": rows.offsets, "column_indices": rows.columns, "values": rows.blocks}
    return BsrMatrix.from_arrays(A.shape, np.dtype(np.float64), arrays, {})


def _last(A: SparseMatrix, smoother: Smoother, degree: int) -> Operator:
    """Return an inverse of the coarsest matrix, or a smoother where that is too large."""
    if A.shape[0] == 0:
        return A
    assert isinstance(A, (BsrMatrix, CsrMatrix))
    diagonal = block_jacobi(A, _size_of(A))  # which refuses a diagonal that is not positive definite
    if A.shape[0] <= DENSE_UNKNOWNS:
        return inverse_of(A)
    return _make_smoother(
        cycle_matrix(A, diagonal), diagonal, largest_eigenvalue(A, diagonal, 1, settled=SETTLED), smoother, degree
    )


def _make_smoother(A: SparseMatrix, diagonal: DiagonalBlocks, high: float, name: Smoother, degree: int) -> Operator:
    """Return a symmetric smoother of a matrix; D is ``diagonal``, and ``high`` bounds the eigenvalues of D A."""
    if name == "gauss_seidel":
        return gauss_seidel(A)
    return Chebyshev(A, diagonal, degree, high * _SMOOTHED_FROM, high)


def _levels_of_pyamg(
    hierarchy: Any, smoother: Smoother, cycle: Cycle, device: Device | str
) -> tuple[list[Level], Operator]:
    """Return the levels of a hierarchy of ``pyamg`` on a device, and the inverse of its coarsest matrix."""
    _check_choices(smoother, cycle)
    if not getattr(hierarchy, "levels", None):
        raise InputError(f"a {type(hierarchy).__name__} is not a hierarchy of pyamg: it has no levels")
    where, levels = Device.parse(device), []
    with where.current():
        for level in hierarchy.levels[:-1]:
            A = as_operator(_sorted(level.A))
            assert isinstance(A, SparseMatrix)
            A = A.to_device(where)
            P, R = (CsrMatrix.from_csr(_sorted(M.tocsr())).to_device(where) for M in (level.P, level.P.T))
            diagonal = block_jacobi(A, _size_of(A))
            high = largest_eigenvalue(A, diagonal, 1, settled=NEARLY_SETTLED)
            levels.append(Level(A, _make_smoother(A, diagonal, high, smoother, _DEGREE), P, R))
        last = scipy.sparse.csr_array(dense_inverse(hierarchy.levels[-1].A.toarray()))
        return levels, CsrMatrix.from_csr(last).to_device(where)


def _sorted(A: Any) -> Any:
    """Return a SciPy matrix with ascending columns."""
    A = A.copy()
    A.sum_duplicates()
    A.sort_indices()
    return A


def _check_choices(smoother: str, cycle: str) -> None:
    """Refuse unknown smoothers and cycles."""
    if smoother not in ("chebyshev", "gauss_seidel"):
        raise InputError(f"smoother must be 'chebyshev' or 'gauss_seidel', not {smoother!r}")
    if cycle not in ("V", "W"):
        raise InputError(f"cycle must be 'V' or 'W', not {cycle!r}")


def _size_of(A: SparseMatrix) -> int:
    """Return the rows of the blocks of a matrix."""
    return A.row_granularity if isinstance(A, BsrMatrix) else 1


multigrid.from_pyamg = Multigrid.from_pyamg  # type: ignore[attr-defined]
