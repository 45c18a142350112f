"""Incomplete Cholesky factors as preconditioners."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from penstock.solvers.preconditioner_spec import PreconditionerSpec
from penstock.solvers.triangular.block_entries import BlockEntries, block_entries, estimated_nbytes, solved_size
from penstock.solvers.triangular.colours import check_symmetric_pattern, colour_rows, order_by_colour
from penstock.solvers.triangular.factor_rows import Factor, factored, lower_pattern
from penstock.solvers.triangular.ordered_rows import OrderedRows
from penstock.solvers.triangular.permutation import permuted, transposed
from penstock.solvers.triangular.schedules import Schedule, make_schedule
from penstock.solvers.triangular.triangular_solve import Order, triangle
from penstock.spmv import Array, InputError, Operator, ValidatedOperator

Shift = float | Literal["auto"]

# The first shift after zero, and how often it is doubled (Lin and More 1999, section 2).
_FIRST_SHIFT, _DOUBLINGS = 1e-3, 12


class IncompleteCholesky(ValidatedOperator):
    """Solves with an incomplete factor L and with its transpose; made by :func:`incomplete_cholesky`.

    Parameters
    ----------
    lower, upper : Schedule
        Solves with L and L'.
    like : BlockEntries
        The matrix.
    shift : float
        By how much the diagonal was enlarged.
    nnz : int
        Stored scalars of L.

    Examples
    --------
    >>> import scipy.sparse
    >>> from penstock.solvers import incomplete_cholesky
    >>> A = scipy.sparse.diags_array([-1.0, 4.0, -1.0], offsets=[-1, 0, 1], shape=(9, 9)).tocsr()
    >>> M = incomplete_cholesky(A)
    >>> M.shift, M.nnz
    (0.0, 17)
    """

    def __init__(self, lower: Schedule, upper: Schedule, like: BlockEntries, *, shift: float, nnz: int) -> None:
        self._lower, self._upper = lower, upper
        self.shift, self.nnz = shift, nnz
        self.shape = (like.rows * like.size,) * 2
        self.dtype, self.device = like.dtype, like.device
        self._between: Array = None

    @property
    def capturable(self) -> bool:
        """Whether it only launches kernels."""
        return self._lower.capturable and self._upper.capturable

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        if self._between is None or self._between.shape != x.shape:
            self._between = self.device.xp.empty_like(x)
        self._lower.solve(x, self._between, 1.0, 0.0, 1.0, False)
        self._upper.solve(self._between, out, alpha, beta, 1.0, False)


def incomplete_cholesky(
    A: Any, fill: int = 0, shift: Shift = "auto", *, order: Order = "auto", block_size: int | None = None
) -> IncompleteCholesky:
    """Return ``M = (L L')^-1`` with a sparse L whose product is A, but for entries that L has no place for.

    Parameters
    ----------
    A : matrix
        Symmetric positive definite, held in memory: a penstock format, or a SciPy or CuPy sparse matrix.
    fill : {0, 1}
        0: L has the pattern of the lower triangle of A. 1: also places that elimination fills directly from entries of A,
        for fewer iterations and about three times the memory.
    shift : float or "auto"
        Share of every diagonal entry that is added to it before factoring. ``"auto"``: none, or where a pivot is not positive, as
        in elasticity, 0.001 and then up to twelve times twice as much.
    order : {"auto", "colours", "levels", "natural"}
        Order of the elimination. By colours, the solves on a GPU are a few launches; the natural order takes fewer iterations, in
        solves that follow long chains of rows. ``"auto"``: colours on a GPU, the natural order on a CPU. ``"levels"`` is the
        natural order, stored by levels.
    block_size : int, optional
        Factor blocks of 1, 2, 3 or 6 unknowns. Default: the blocks of a BSR matrix, single unknowns of others.

    Returns
    -------
    IncompleteCholesky

    Raises
    ------
    InputError
        If A is not square or not held in memory, its pattern is not symmetric (of the values, those of the lower triangle are
        read), a diagonal entry is missing, or a pivot is not positive with ``shift`` or the largest one tried; the message names
        the row.

    Notes
    -----
    Meijerink and van der Vorst (1977); levels of fill: Saad (2003), section 10.3.3; shifts: Manteuffel (1980). L is factored row
    by row, on a GPU by one launch in which rows wait for those they need, and stored twice, as L and as L'.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import cg, incomplete_cholesky
    >>> heat = Cantilever(nodes=8, dof=1)
    >>> A, b = heat.matrix(), heat.load()
    >>> result = cg(A, b, M=incomplete_cholesky(A), rtol=1e-8)
    >>> result.converged, result.iterations < 30
    (True, True)
    """
    if fill not in (0, 1):
        raise InputError(f"fill must be 0 or 1, not {fill}")
    if shift != "auto" and not (isinstance(shift, (int, float)) and 0 <= shift < np.inf):  # type: ignore[redundant-expr]
        raise InputError(f"shift must be 'auto' or a number that is not negative, not {shift!r}")
    entries = block_entries(A, block_size)
    kind = entries.device.kind
    with entries.device.current():
        names, taken = None, order
        if order == "colours" or (order == "auto" and kind == "cuda"):
            names, taken = order_by_colour(colour_rows(entries, kind), False)[0], "levels"
        else:
            check_symmetric_pattern(entries, kind)  # as colour_rows does
        ordered = entries if names is None else permuted(entries, names)
        factor, used = _shifted(lower_pattern(ordered, fill, kind), ordered, shift, names, kind)
        lower, upper = (
            make_schedule(_named(triangle(half, half is not factor, taken, kind=kind)[2], names), "auto", kind)
            for half in (factor, transposed(factor))
        )
    return IncompleteCholesky(lower, upper, entries, shift=used, nnz=int(factor.values.size))


def _named(rows: OrderedRows, names: Array | None) -> OrderedRows:
    """Return rows of a permuted matrix under the names that they have in the original one."""
    if names is None:
        return rows
    return replace(rows, rows=names if rows.rows is None else names[rows.rows])


def _shifted(
    pattern: Factor, entries: BlockEntries, shift: Shift, names: Array | None, kind: str
) -> tuple[BlockEntries, float]:
    """Return the factor, and the first shift that makes all pivots positive."""
    shifts = [_FIRST_SHIFT * 2**k for k in range(_DOUBLINGS)]
    for trial in [0.0, *shifts] if shift == "auto" else [float(shift)]:
        factor, bad = factored(pattern, entries, trial, kind)
        if bad == entries.rows:
            return factor, trial
    row = (bad if names is None else int(names[bad])) * entries.size
    advice = "the matrix is hardly positive definite" if shift == "auto" else "pass a larger shift, or shift='auto'"
    raise InputError(f"the pivot of row {row} is not positive with a shift of {trial:g}: {advice}")


@dataclass(frozen=True)
class IncompleteCholeskySpec(PreconditionerSpec, name="incomplete_cholesky"):
    """Specification of :func:`incomplete_cholesky`."""

    needs_entries: ClassVar[bool] = True

    fill: int = 0
    shift: Shift = "auto"
    order: Order = "auto"

    def build(self, A: Operator) -> Operator:
        """Return the preconditioner of a matrix that is held in memory."""
        size = solved_size(self.block_size)
        return incomplete_cholesky(A, self.fill, self.shift, order=self.order, block_size=size)

    def workspace_nbytes(self, n: int, columns: int, dtype: Any = np.float64, *, streamed_to_gpu: bool = False) -> int:
        """Return the bytes of L and L', taken for those of a matrix of 27 blocks a row, and of the work vectors."""
        matrix = estimated_nbytes(n, self.block_size, dtype)
        return matrix * (3 if self.fill else 1) + 4 * 8 * n * columns
