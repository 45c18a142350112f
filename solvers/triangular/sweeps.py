"""A forward and a backward pass of Gauss-Seidel."""

from __future__ import annotations

from typing import Protocol

from penstock.solvers.triangular.level_schedule import LevelLaunches
from penstock.solvers.triangular.ordered_rows import OrderedRows
from penstock.solvers.triangular.schedules import Schedule
from penstock.spmv import Array, device_of


class Sweep(Protocol):
    """``M = (D/w + U)^-1 ((2 - w)/w D) (D/w + L)^-1``, a forward and a backward pass."""

    @property
    def capturable(self) -> bool:
        """Whether applying it only launches kernels."""

    def apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        """Set ``out = alpha M x + beta out``."""


class TwoSolves:
    """Two triangular solves, with ``D / omega + L`` and ``D / omega + U``, and a vector in between."""

    def __init__(self, forward: Schedule, backward: Schedule, omega: float) -> None:
        self._forward, self._backward, self._gamma = forward, backward, 2.0 - omega
        self._between: Array = None

    @property
    def capturable(self) -> bool:
        """Whether both only launch kernels."""
        return self._forward.capturable and self._backward.capturable

    def apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        """Set ``out = alpha M x + beta out``."""
        if self._between is None or self._between.shape != x.shape:
            self._between = device_of(x).xp.empty_like(x)
        self._forward.solve(x, self._between, 1.0, 0.0, 1.0, False)
        self._backward.solve(self._between, out, alpha, beta, self._gamma, True)


class ColourSweep:
    """Colours up and down in one numbering: the second pass takes the first one's result where it stands.

    Moves the entries of the matrix once, the inverse diagonal twice, x and out once, and one work vector of float64 about six
    times. ``forward`` has the entries of smaller colours, ``backward`` those of larger ones, both in ascending order of colours.
    """

    capturable = True

    def __init__(self, forward: OrderedRows, backward: OrderedRows, omega: float) -> None:
        self._forward, self._backward = LevelLaunches(forward), LevelLaunches(backward, descending=True)
        self._gamma = 2.0 - omega
        self._y: Array = None

    def apply(self, x: Array, out: Array, alpha: float, beta: float) -> None:
        """Set ``out = alpha M x + beta out``."""
        if self._y is None or self._y.size < x.size:
            self._y = device_of(x).xp.empty(x.size)
        self._forward.launch(x, None, self._y, (1.0, 0.0, 1.0), False)
        self._backward.launch(None, out, self._y, (alpha, beta, self._gamma), True)
