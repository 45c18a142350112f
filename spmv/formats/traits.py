"""What is known about a format before any matrix is stored in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Traits:
    """Properties of a format that plans, rankings, figures and tests read.

    Parameters
    ----------
    label : str
        Name for tables and figures.
    blocked : bool
        Stores small dense blocks; ``from_csr`` takes ``block_size``.
    half : bool
        Stores the upper half of a symmetric matrix. A row slab then also adds to rows outside itself: ``out`` is scaled by
        beta once, before the first slab.
    adds : bool
        Adds parts of a row to ``out`` one by one, on a GPU by atomic operations: last digits vary between runs.
    padded : tuple of str
        Arrays of column indices in which negative numbers are padding.
    streams : bool
        Worth considering when a matrix is streamed: every row slab can be cut out cheaply and moves few bytes.
    uneven_rows_wait : bool
        On a GPU, rows of different lengths keep some lanes of a warp waiting for others.
    efficiency : mapping of str to float
        Share of the memory bandwidth that products reach at their best, by kind of device, measured on an H200 and on two CPU
        cores. It decides between formats that move about the same bytes.
    halving_columns : float
        Number of vectors at which the efficiency of the CUDA kernel for blocks of vectors has halved.
    """

    label: str
    blocked: bool = False
    half: bool = False
    adds: bool = False
    padded: tuple[str, ...] = ()
    streams: bool = False
    uneven_rows_wait: bool = True
    efficiency: Mapping[str, float] = field(default_factory=lambda: {"cpu": 0.5, "cuda": 0.5})
    halving_columns: float = 5.0

    def slowdown(self, columns: int) -> float:
        """Return the time of a product per byte on a GPU with ``columns`` vectors, relative to one vector."""
        return 1.0 if columns == 1 else 1.0 + columns / self.halving_columns
