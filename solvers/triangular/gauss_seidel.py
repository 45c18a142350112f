"""Symmetric Gauss-Seidel and SSOR as preconditioners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from penstock.solvers.preconditioner_spec import PreconditionerSpec
from penstock.solvers.triangular.block_entries import BlockEntries, block_entries, estimated_nbytes, solved_size
from penstock.solvers.triangular.colours import check_symmetric_pattern, colour_rows, order_by_colour
from penstock.solvers.triangular.host_schedule import HostSchedule
from penstock.solvers.triangular.levels import count_waits
from penstock.solvers.triangular.ordered_rows import Diagonal, ordered_rows
from penstock.solvers.triangular.schedules import make_schedule
from penstock.solvers.triangular.sweeps import ColourSweep, Sweep, TwoSolves
from penstock.solvers.triangular.triangular_solve import Order, check_diagonal, triangle
from penstock.spmv import Array, InputError, Operator, ValidatedOperator, VectorSpace, as_operator
from penstock.spmv.operator import is_capturable, unchecked_product


class GaussSeidel(ValidatedOperator):
    """Symmetric Gauss-Seidel: a solve with the lower triangle and one with the upper; made by :func:`gauss_seidel`.

    Parameters
    ----------
    A : Operator
        The matrix, for the residuals between sweeps.
    sweep : Sweep
    colours : int or None
        How many colours its order has, if it goes by colours.
    sweeps : int
    omega : float

    Examples
    --------
    >>> import numpy as np
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import gauss_seidel
    >>> M = gauss_seidel(Cantilever(nodes=4, dof=3).matrix(), sweeps=2)
    >>> type(M).__name__, M.shape, (M @ np.ones(192)).shape
    ('GaussSeidel', (192, 192), (192,))
    """

    def __init__(self, A: Operator, sweep: Sweep, *, colours: int | None, sweeps: int, omega: float) -> None:
        self.A, self.colours, self.sweeps, self.omega = A, colours, sweeps, omega
        self.shape, self.dtype, self.device = A.shape, A.dtype, A.device
        self._sweep = sweep
        self._work: list[Array] = []

    @property
    def capturable(self) -> bool:
        """Whether it only launches kernels."""
        return (self.sweeps == 1 or is_capturable(self.A)) and self._sweep.capturable

    def _apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        """With ``z_0 = 0``, every sweep adds ``M (x - A z)`` to z."""
        if self.sweeps == 1:
            self._sweep.apply(x, out, alpha, beta)
            return
        if not self._work or self._work[0].shape != x.shape:
            self._work = [self.device.xp.empty_like(x) for _ in range(2)]
        (residual, z), product = self._work, unchecked_product(self.A)
        self._sweep.apply(x, z, 1.0, 0.0)
        for _ in range(1, self.sweeps):
            residual[...] = x
            product(z, residual, -1.0, 1.0)
            self._sweep.apply(residual, z, 1.0, 1.0)
        VectorSpace(self.device).write(alpha, z, beta, out)


def gauss_seidel(
    A: Any,
    order: Order = "colours",
    sweeps: int = 1,
    symmetric: bool = True,
    omega: float = 1.0,
    *,
    block_size: int | None = None,
) -> GaussSeidel:
    """Return symmetric Gauss-Seidel as a preconditioner: ``M = (D/w + U)^-1 ((2 - w)/w D) (D/w + L)^-1``.

    D are the diagonal blocks of A, L and U the blocks below and above them, and w is ``omega``: with another one than 1
    this is SSOR.

    Parameters
    ----------
    A : matrix
        Symmetric positive definite, held in memory: a penstock format, or a SciPy or CuPy sparse matrix.
    order : {"colours", "levels", "natural", "auto"}
        Order in which unknowns are relaxed. By colours, a GPU needs a launch or two a colour, and about as long as a product;
        CG then takes somewhat more iterations than in the natural order, whose chains of dependent rows a GPU must follow.
        ``"levels"``, ``"natural"`` and ``"auto"`` all relax in the natural order, and differ in how it is stored; see
        :class:`TriangularSolve`.
    sweeps : int
        Forward and backward passes; each but the first costs a product with A as well.
    symmetric : bool
        Must be true: conjugate gradients need a symmetric preconditioner.
    omega : float
        Relaxation factor, between 0 and 2.
    block_size : int, optional
        Relax blocks of 1, 2, 3 or 6 unknowns, for example those of a node, at once. Default: the blocks of a BSR matrix,
        single unknowns of others.

    Raises
    ------
    InputError
        If A is not square or not held in memory, its pattern is not symmetric (values are not compared), a diagonal block is
        not positive definite, or an option is out of range.

    Notes
    -----
    Stores the matrix a second time, in the order of the solves. Axelsson (1972) for SSOR; colours: Adams and Ortega (1982).

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.solvers import cg, gauss_seidel, jacobi
    >>> beam = Cantilever(nodes=(9, 3, 3), dof=3)
    >>> A, b = beam.matrix(), beam.load()
    >>> cg(A, b, M=gauss_seidel(A)).iterations < cg(A, b, M=jacobi(A)).iterations
    True
    """
    _check_options(symmetric, sweeps, omega)
    operator = as_operator(A)
    entries = block_entries(operator, block_size)
    with entries.device.current():
        sweep, colours = _sweep(entries, order, float(omega), entries.device.kind)
    return GaussSeidel(operator, sweep, colours=colours, sweeps=int(sweeps), omega=float(omega))


def _sweep(entries: BlockEntries, order: Order, omega: float, kind: str) -> tuple[Sweep, int | None]:
    """Return the forward and backward pass, and the number of colours."""
    if order != "colours":
        check_symmetric_pattern(entries, kind)
        forward, backward = (
            triangle(entries, upper, order, part_of_symmetric=True, positive=True, omega=omega, kind=kind)[2]
            for upper in (False, True)
        )
        return TwoSolves(make_schedule(forward, "auto", kind), make_schedule(backward, "auto", kind), omega), None
    ranks = colour_rows(entries, kind)
    waits = [count_waits(entries, ranks, upper, kind) for upper in (False, True)]
    check_diagonal(entries, waits[0])
    diagonal = Diagonal(waits[0].diagonal, omega, positive=True)
    ascending = order_by_colour(ranks, False)
    orders = (ascending, order_by_colour(ranks, True) if kind == "cpu" else ascending)  # a ColourSweep goes back in it
    forward, backward = (
        ordered_rows(entries, ranks, upper, waits[upper], orders[upper], diagonal, kind) for upper in (False, True)
    )
    colours = len(forward.levels) - 1
    if kind == "cpu":
        return TwoSolves(HostSchedule(forward), HostSchedule(backward), omega), colours
    return ColourSweep(forward, backward, omega), colours


def _check_options(symmetric: bool, sweeps: Any, omega: Any) -> None:
    if not symmetric:
        raise InputError(
            "conjugate gradients need a symmetric preconditioner; leave symmetric=True, or use TriangularSolve for one half"
        )
    if not isinstance(sweeps, int) or sweeps < 1:
        raise InputError(f"sweeps must be a positive number, not {sweeps}")
    if not isinstance(omega, (int, float)) or not 0.0 < omega < 2.0:
        raise InputError(
            f"omega must lie between 0 and 2, not {omega}: beyond, the preconditioner is not positive definite"
        )


@dataclass(frozen=True)
class GaussSeidelSpec(PreconditionerSpec, name="gauss_seidel"):
    """Specification of :func:`gauss_seidel`."""

    needs_entries: ClassVar[bool] = True

    order: Order = "colours"
    sweeps: int = 1
    omega: float = 1.0

    def build(self, A: Operator) -> Operator:
        """Return the preconditioner of a matrix that is held in memory."""
        size = solved_size(self.block_size)
        return gauss_seidel(A, self.order, self.sweeps, omega=self.omega, block_size=size)

    def workspace_nbytes(self, n: int, columns: int, dtype: Any = np.float64, *, streamed_to_gpu: bool = False) -> int:
        """Return the bytes of a copy of the matrix, taken for one of 27 blocks a row, and of the work vectors."""
        matrix = estimated_nbytes(n, self.block_size, dtype)
        return matrix + n * columns * (16 + (1 if self.sweeps == 1 else 3) * int(np.dtype(dtype).itemsize))
