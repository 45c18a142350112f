"""Many kernels started by one call: recorded once as a CUDA graph, replayed any number of times."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

__all__ = ["RecordedGraph", "record_graph"]

_RELAXED = 2  # cudaStreamCaptureModeRelaxed: memory may be taken while recording


class RecordedGraph:
    """What :func:`record_graph` returns: the graph, and the temporary arrays that its kernels use."""

    def __init__(self, graph: Any, kept: list[Any]) -> None:
        self._graph = graph
        self._kept = kept  # never given to anybody else while the graph may run

    def launch(self) -> None:
        """Run the recorded kernels on CuPy's current stream."""
        import cupy

        self._graph.launch(cupy.cuda.get_current_stream())


def record_graph(issue: Callable[[], None]) -> RecordedGraph:
    """Record the kernels that ``issue()`` starts on CuPy's current stream, without running them.

    Replaying takes the host one call instead of one a kernel, and leaves the GPU about half the gap between kernels. The
    arrays that the kernels use must stay where they are; temporary ones stay as long as the graph.

    Parameters
    ----------
    issue : callable
        Starts kernels that were loaded before, and nothing that waits for the device.
    """
    import cupy

    pool, kept = cupy.cuda.MemoryPool(), []

    def allocate(nbytes: int) -> Any:
        kept.append(pool.malloc(nbytes))
        return kept[-1]

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, cupy.cuda.using_allocator(allocate):
        stream.begin_capture(_RELAXED)
        try:
            issue()
        except BaseException:
            # It fails where streams were forked and not joined again; the first error says more.
            with contextlib.suppress(Exception):
                stream.end_capture()
            raise
        graph = stream.end_capture()
    return RecordedGraph(graph, kept)
