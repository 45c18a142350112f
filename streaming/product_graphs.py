"""Many kernels started by one call: the products with a subdivision, recorded as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

from penstock.spmv import SparseFormat
from penstock.spmv.cuda_graph import RecordedGraph, record_graph

__all__ = ["LEAST_RECORDED", "ProductGraphs"]

#: Products with each subdivision, below which a graph is not worth recording.
LEAST_RECORDED = 4


class ProductGraphs:
    """Records what is issued for each subdivision in each place once, and then replays it."""

    def __init__(self) -> None:
        self._recorded: dict[tuple[int, int], tuple[SparseFormat, RecordedGraph]] = {}

    def run(self, number: int, slab: SparseFormat, issue: Callable[[], None]) -> None:
        """Do what ``issue()`` issues with a slab, on CuPy's current stream; it is called the first time only."""
        key = (number, id(slab))  # an executor has one object for each subdivision in each slot
        if key not in self._recorded:
            self._recorded[key] = (slab, record_graph(issue))
        self._recorded[key][1].launch()
