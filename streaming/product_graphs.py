"""Many kernels started by one call: the products with a subdivision, recorded as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.spmv import SparseFormat

__all__ = ["LEAST_RECORDED", "ProductGraphs"]

#: Products with each subdivision, below which a graph is not worth recording.
LEAST_RECORDED = 4
_RELAXED = 2  # cudaStreamCaptureModeRelaxed: memory may be taken while recording


class ProductGraphs:
    """Records what is issued for each subdivision in each place once, and then replays it.

    Replaying takes the host one call instead of one a kernel, and leaves the GPU about half the gap between kernels. The
    arrays that the kernels use must stay where they are; temporary ones, which some kernels take while they are recorded,
    stay as long as the graphs.
    """

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._recorded: dict[tuple[int, int], tuple[SparseFormat, Any]] = {}
        self._kept: list[Any] = []

    def run(self, number: int, slab: SparseFormat, issue: Callable[[], None]) -> None:
        """Do what ``issue()`` issues with a slab, on CuPy's current stream; it is called the first time only."""
        key = (number, id(slab))  # an executor has one object for each subdivision in each slot
        if key not in self._recorded:
            self._recorded[key] = (slab, self._record(issue))
        self._recorded[key][1].launch(self._cupy.cuda.get_current_stream())

    def _record(self, issue: Callable[[], None]) -> Any:
        pool = self._cupy.cuda.MemoryPool()

        def allocate(nbytes: int) -> Any:
            self._kept.append(pool.malloc(nbytes))  # never given to anybody else while the graph may run
            return self._kept[-1]

        with self._stream, self._cupy.cuda.using_allocator(allocate):
            self._stream.begin_capture(_RELAXED)
            try:
                issue()
            finally:
                graph = self._stream.end_capture()
        return graph
