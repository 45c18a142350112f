"""CUDA graphs: many kernels captured once and launched by one call, any number of times."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from penstock.spmv.device import Device

_RELAXED = 2  # cudaStreamCaptureModeRelaxed: memory may be allocated during capture
# Graphs take memory that CuPy's pool does not give: about 10 KB a kernel, of which a sweep over a large matrix has 100,000.
_ROOM_NBYTES = 2 << 30


class CapturedGraph:
    """A captured graph, with the temporary arrays that its kernels use."""

    def __init__(self, graph: Any, temporaries: list[Any]) -> None:
        self._graph = graph
        self._temporaries = temporaries  # must not be reused while the graph may run

    def launch(self) -> None:
        """Run the captured kernels on CuPy's current stream."""
        import cupy

        self._graph.launch(cupy.cuda.get_current_stream())


def capture(issue: Callable[[], None]) -> CapturedGraph:
    """Capture the kernels that ``issue()`` launches on CuPy's current stream, without running them.

    Launching the graph costs the host one call instead of one per kernel, and about halves the gaps between kernels on the
    GPU. The arrays that the kernels use must not move; temporary ones live as long as the graph. ``issue`` must launch only
    kernels that are loaded already, and never wait for the device.
    """
    import cupy

    pool, temporaries = cupy.cuda.MemoryPool(), []
    Device("cuda").make_room(_ROOM_NBYTES)

    def allocate(nbytes: int) -> Any:
        temporaries.append(pool.malloc(nbytes))
        return temporaries[-1]

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, cupy.cuda.using_allocator(allocate):
        stream.begin_capture(_RELAXED)
        try:
            issue()
        except BaseException:
            # This fails if forked streams were not joined again; the first error is more informative.
            with contextlib.suppress(Exception):
                stream.end_capture()
            raise
        graph = stream.end_capture()
    return CapturedGraph(graph, temporaries)


class Replay:
    """Launches the same kernels at each call; on a GPU they are captured at the second call and replayed from then on.

    The first call loads the kernels; calls that do more than launch kernels are not ``capturable``.
    """

    def __init__(self, issue: Callable[[], None], *, capturable: bool) -> None:
        self._issue, self._capturable = issue, capturable
        self._started = False
        self._graph: CapturedGraph | None = None

    def __call__(self) -> None:
        """Issue the kernels, or launch their graph."""
        if self._graph is not None:
            self._graph.launch()
            return
        self._issue()
        if self._capturable and self._started:
            self._graph = capture(self._issue)
        self._started = True
