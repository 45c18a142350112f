"""Solves with a sparse triangular matrix, as an operator."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from penstock.solvers.triangular.block_entries import BlockEntries, block_entries
from penstock.solvers.triangular.colours import colour_rows, order_by_colour
from penstock.solvers.triangular.levels import Waits, count_waits, find_levels
from penstock.solvers.triangular.ordered_rows import Diagonal, OrderedRows, ordered_rows
from penstock.solvers.triangular.schedules import make_schedule
from penstock.spmv import Array, InputError, ValidatedOperator

Order = Literal["auto", "levels", "colours", "natural"]
ScheduleName = Literal["auto", "dataflow", "levels", "columns"]

# A triangle with levels of fewer rows than this is a few chains, in which an order by levels brings nothing.
_ROWS_OF_A_CHAIN = 32
# If fewer than this share of the entries join rows that are near each other, rows that follow each other are independent.
_NEAR_SHARE, _NEAR, _SAMPLE = 0.1, 1.0 / 64, 4096


class TriangularSolve(ValidatedOperator):
    """The inverse of a sparse triangular matrix: ``apply(b)`` solves ``A y = b`` by substitution.

    Parameters
    ----------
    A : matrix
        A triangular matrix that is held in memory: a penstock format, or a SciPy or CuPy sparse matrix. BSR with blocks of 1,
        2, 3 or 6 rows is solved by blocks: it must be triangular by blocks, and the blocks on its diagonal are inverted whole.
        With ``order="colours"`` a matrix of symmetric pattern, of which the entries of rows of smaller colours are taken, of
        larger ones if ``lower`` is false.
    lower : bool
        Whether A is a lower triangle.
    order : {"auto", "levels", "colours", "natural"}
        Order in which rows are stored and solved: that of their levels, where all rows of a level are independent (the
        longest chain before a row is its level); that of greedy colours; or that of the matrix. ``"auto"`` takes levels, but the
        natural order on a CPU, and where consecutive rows are independent anyway or levels are narrow chains.
    unit_diagonal : bool
        Take the diagonal for ones, whatever A stores there; solved by single entries.
    schedule : {"auto", "dataflow", "levels", "columns"}
        How a GPU spreads rows over time. ``"dataflow"``: one launch, in which lanes take what they need as soon as it is
        there. ``"levels"``: a launch a level, narrow levels fused, all replayed as one CUDA graph. ``"columns"``: rows push to
        those that need them (one vector; last digits depend on timing; for comparison). ``"auto"``: dataflow, but levels where
        these are at most eight launches, as of colours, and on GPUs that do not promise that waiting lanes let others run.

    Raises
    ------
    InputError
        If A is not square, not triangular in the requested direction, has a zero or no diagonal entry, a value not finite,
        or more than 2**31 - 1 entries; the message names the first such row.

    Notes
    -----
    A solve moves ``itemsize size**2 + 4`` bytes an entry of ``size`` rows, 12 bytes and an inverse block a row, and the vectors;
    yet its time is mostly that of the longest chain of rows. Results are the same bits in every run, except by columns.

    Levels: Anderson and Saad (1989), Naumov (2011). Waiting for single rows in one launch: Liu, Li, Hogg, Duff and Vinter (2016),
    here by rows. A word of a solution is its own flag: it starts as a NaN that no arithmetic produces.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> from penstock.solvers import TriangularSolve
    >>> A = scipy.sparse.csr_array([[2.0, 0.0], [1.0, 4.0]])
    >>> (TriangularSolve(A) @ np.array([2.0, 5.0])).tolist()
    [1.0, 1.0]
    """

    def __init__(
        self,
        A: Any,
        lower: bool = True,
        order: Order = "auto",
        unit_diagonal: bool = False,
        *,
        schedule: ScheduleName = "auto",
    ) -> None:
        # The blocks of a unit triangle have ones on the diagonal, and entries below it.
        self._entries = block_entries(A, 1 if unit_diagonal else None)
        self._unit_diagonal = unit_diagonal
        self.dtype, self.device = self._entries.dtype, self._entries.device
        self.shape = (self._entries.rows * self._entries.size,) * 2
        self._kind = self.device.kind
        with self.device.current():
            self.order, self._waits, self.rows = triangle(
                self._entries, not lower, order, unit_diagonal=unit_diagonal, kind=self._kind
            )
            self._schedule = make_schedule(self.rows, schedule, self._kind)

    @property
    def capturable(self) -> bool:
        """Whether a solve only launches kernels."""
        return self._schedule.capturable

    @property
    def levels(self) -> int | None:
        """The number of levels or colours; None in natural order."""
        return None if self.rows.levels is None else len(self.rows.levels) - 1

    def with_values(self, A: Any) -> TriangularSolve:
        """Return a solve with a matrix of the same pattern, without analysing it again.

        Raises
        ------
        InputError
            If the pattern, the types or the device differ, or a value does not permit a solve.
        """
        entries = block_entries(A, 1 if self._unit_diagonal else None)
        if not entries.matches(self._entries):
            raise InputError("the matrix has another pattern; make a new TriangularSolve")
        diagonal = Diagonal(None if self._unit_diagonal else self._waits.diagonal)
        other = object.__new__(TriangularSolve)
        other.__dict__.update(self.__dict__, _entries=entries)
        with self.device.current():
            other.rows = self.rows.with_values(entries, diagonal, self._kind)
            other._schedule = type(self._schedule)(other.rows)
        return other

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        self._schedule.solve(x, out, alpha, beta, 1.0, False)


def triangle(
    entries: BlockEntries,
    upper: bool,
    order: Order,
    *,
    part_of_symmetric: bool = False,
    unit_diagonal: bool = False,
    positive: bool = False,
    omega: float = 1.0,
    kind: str,
) -> tuple[str, Waits, OrderedRows]:
    """Return the order taken, what rows wait for, and the rows of a triangle in that order.

    ``part_of_symmetric`` leaves the entries of the other triangle out instead of refusing them; ``unit_diagonal`` takes the
    diagonal for ones; ``positive`` requires positive definite diagonal blocks, whose inverses are multiplied by omega.
    The message of an error names the first row that is in the way.
    """
    if order not in ("auto", "levels", "colours", "natural"):
        raise InputError(f"order must be 'auto', 'levels', 'colours' or 'natural', not {order!r}")
    ranks = colour_rows(entries, kind) if order == "colours" else None
    waits = count_waits(entries, ranks, upper, kind)
    _check(entries, waits, upper, part_of_symmetric or ranks is not None, unit_diagonal)
    if order == "colours":
        assert ranks is not None
        taken, rows_and_levels = "colours", order_by_colour(ranks, upper)
    else:
        taken, rows_and_levels = choose_order(entries, upper, waits, order, kind)
    diagonal = None if unit_diagonal else waits.diagonal
    rows = ordered_rows(entries, ranks, upper, waits, rows_and_levels, Diagonal(diagonal, omega, positive), kind)
    return taken, waits, rows


def _check(entries: BlockEntries, waits: Waits, upper: bool, has_both: bool, unit_diagonal: bool) -> None:
    if waits.later < entries.rows and not has_both:
        this, other = ("upper", "left") if upper else ("lower", "right")
        raise InputError(
            f"row {waits.later * entries.size} has an entry {other} of the diagonal, so the matrix is not {this} triangular; "
            f"pass lower={upper}, or one of its triangles (a stored zero is an entry: call A.eliminate_zeros())"
        )
    if not unit_diagonal:
        check_diagonal(entries, waits)


def check_diagonal(entries: BlockEntries, waits: Waits) -> None:
    """Refuse a row without a diagonal entry."""
    if waits.missing < entries.rows:
        raise InputError(
            f"row {waits.missing * entries.size} has no diagonal entry, so the triangle is singular; pass unit_diagonal=True "
            "if it stands for a one"
        )


def choose_order(
    entries: BlockEntries, upper: bool, waits: Waits, order: Order, kind: str
) -> tuple[str, tuple[Array | None, Any]]:
    """Return the order taken, ``"levels"`` or ``"natural"``, and its rows and levels for :func:`ordered_rows`."""
    if order == "auto" and (kind == "cpu" or not _neighbours_wait(entries)):
        order = "natural"
    if order != "natural":
        most = entries.rows // _ROWS_OF_A_CHAIN if order == "auto" else entries.rows
        by_levels = find_levels(entries, upper, waits, max(1, most), kind)
        if by_levels is not None:
            return "levels", by_levels
    xp = entries.device.xp
    return "natural", (xp.arange(entries.rows, dtype=np.int32)[::-1].copy() if upper else None, None)


def _neighbours_wait(entries: BlockEntries) -> bool:
    """Return whether many of some thousand sampled entries join rows that are near each other."""
    xp, count = entries.device.xp, len(entries.columns)
    if not count:
        return False
    sample = xp.linspace(0, count - 1, min(count, _SAMPLE)).astype(np.int64)
    owners = xp.searchsorted(entries.offsets, sample, side="right") - 1
    distance = abs(owners - entries.columns[sample])
    counted = entries.device.to_host(distance)
    off_diagonal = counted > 0
    near = off_diagonal & (counted <= entries.rows * _NEAR)
    return bool(near.sum() > _NEAR_SHARE * max(1, off_diagonal.sum()))
