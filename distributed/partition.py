"""Which rank has which rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from penstock.spmv import InputError


@dataclass(frozen=True)
class RowPartition:
    """Contiguous rows for each rank. Any other partition is one of these after the rows of the matrix have been permuted.

    Parameters
    ----------
    bounds : tuple of int, (ranks + 1,)
        Rank k has the rows from ``bounds[k]`` to ``bounds[k + 1]``, which may be none.

    Raises
    ------
    InputError
        If bounds do not begin with 0, or descend.

    Examples
    --------
    >>> from penstock.distributed import RowPartition
    >>> RowPartition.even(10, ranks=3).bounds
    (0, 3, 7, 10)
    >>> RowPartition.weighted(12, weights=[1, 2], multiple=3).bounds
    (0, 3, 12)
    >>> RowPartition.by_levels([0, 2, 6, 8, 12], ranks=2).bounds
    (0, 6, 12)
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.bounds) < 2 or self.bounds[0] != 0 or any(np.diff(self.bounds) < 0):
            raise InputError(f"the bounds of a partition begin with 0 and do not descend, unlike {self.bounds}")

    @classmethod
    def even(cls, rows: int, ranks: int, *, multiple: int = 1) -> Self:
        """Return about equal parts, cut at multiples of ``multiple`` rows, such as those of a block or of a plane of nodes."""
        return cls.weighted(rows, [1.0] * _checked(ranks), multiple=multiple)

    @classmethod
    def weighted(cls, rows: int, weights: Sequence[float], *, multiple: int = 1) -> Self:
        """Return parts in proportion to weights, such as the measured rates of unlike ranks."""
        return cls.by_levels([*range(0, rows, multiple), rows], weights=weights)

    @classmethod
    def by_levels(
        cls, levels: Sequence[int] | np.ndarray[Any, Any], ranks: int = 1, *, weights: Sequence[float] | None = None
    ) -> Self:
        """Return parts of whole levels, even or in proportion to weights.

        Parameters
        ----------
        levels : sequence of int, (levels + 1,)
            First row of each level, and the number of rows.
        ranks : int
        weights : sequence of float, (ranks,), optional
        """
        shares = np.array([1.0] * _checked(ranks) if weights is None else weights, dtype=np.float64)
        if not len(shares) or not np.isfinite(shares).all() or (shares < 0).any() or not shares.any():
            raise InputError(f"weights are finite, not negative and not all zero, unlike {shares.tolist()}")
        starts = np.asarray(levels)
        wanted = np.concatenate([[0.0], np.cumsum(shares) / shares.sum()]) * starts[-1]
        above = np.clip(np.searchsorted(starts, wanted), 1, len(starts) - 1)
        nearest = np.where(wanted - starts[above - 1] <= starts[above] - wanted, above - 1, above)
        bounds = starts[nearest].tolist()
        return cls((0, *bounds[1:-1], int(starts[-1])))

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.bounds) - 1

    @property
    def rows(self) -> int:
        """Rows of all ranks."""
        return self.bounds[-1]

    def of(self, rank: int) -> slice:
        """Return the rows of a rank."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def owners(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the ranks that have some rows."""
        owners: np.ndarray[Any, Any] = np.searchsorted(self.bounds, rows, side="right") - 1
        return owners


def _checked(ranks: int) -> int:
    if ranks < 1 or ranks % 1:
        raise InputError(f"a partition has one rank or more, not {ranks}")
    return int(ranks)
