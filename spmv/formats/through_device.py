"""A matrix on the host is looked at and converted by a GPU, piece by piece: at the speed of the link, where cores take longer."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from penstock.spmv.device import Array, Device
from penstock.spmv.formats.survey import Survey, add_survey, survey_of
from penstock.spmv.staged_copy import copy_all_from_gpu, copy_all_to_gpu

#: Bytes of the entries of matrices that are worth a GPU.
WORTH_NBYTES = 256 << 20
# Bytes of the entries of a piece, its share of the free memory of the GPU, which takes two more pieces and what becomes of two,
# and the pieces that are on their way.
_PIECE_NBYTES, _SHARE_OF_FREE, _AHEAD = 512 << 20, 8, 2


class Rows(NamedTuple):
    """Rows of a matrix in CSR from ``first`` on, whose arrays are on a GPU; offsets begin at 0."""

    first: int
    row_offsets: Array
    column_indices: Array
    values: Array


class _CallersStream:
    """The stream of the thread that makes this: copies of other threads follow its kernels, and precede those that come later."""

    def __init__(self, device: Device) -> None:
        self._device, self._stream = device, None
        if device.kind == "cuda":
            from cupy import cuda

            with device.current():
                self._stream = cuda.get_current_stream()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Use it in this thread."""
        with self._device.current(), self._stream or contextlib.nullcontext():
            yield


class Returning:
    """Arrays made on a GPU return to the host in the background, while the next ones are made."""

    def __init__(self, device: Device) -> None:
        self._stream, self._beside = _CallersStream(device), ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def add(self, pairs: list[tuple[Array, np.ndarray[Any, Any]]]) -> None:
        """Begin to copy arrays of the GPU to arrays of the host, when those before have returned."""
        self.wait()
        self._last = self._beside.submit(self._fetch, pairs)

    def wait(self) -> None:
        """Wait until all have returned."""
        if self._last is not None:
            self._last.result()
            self._last = None

    def close(self) -> None:
        """Wait, and end the thread that copies."""
        self._beside.shutdown()

    def _fetch(self, pairs: list[tuple[Array, np.ndarray[Any, Any]]]) -> None:
        with self._stream.current():
            copy_all_from_gpu(pairs)


def survey_through(
    device: Device,
    columns: int,
    source: tuple[Array, Array, Array],
    granularity: int,
    look: Callable[[Rows, Callable[[], bool]], None],
) -> Survey:
    """Survey a matrix on the host on a GPU; moves every entry there once.

    ``source`` are the row offsets, column indices and values of CSR; offsets ascend, and lead to entries. ``look`` is called
    with every piece, which ends at a multiple of a ``granularity`` of rows, while it is there, and with a function that waits and
    returns whether kernels may read it: neither it nor a piece before has a defect.
    """
    with device.current():
        seen = device.xp.zeros(5, dtype=np.int64)
        for rows in _pieces(device, *source, granularity):
            add_survey(seen, columns, rows.row_offsets, rows.column_indices, rows.values, rows.first)
            look(rows, lambda: not survey_of(seen).defects)
        return survey_of(seen)


def fill_through(
    device: Device,
    source: tuple[Array, Array, Array],
    rows_of_chunk: int,
    offsets: Array,
    targets: tuple[Array | None, Array],
    fill: Callable[[Rows, Array, Sequence[Array]], None],
) -> None:
    """Fill arrays of chunks on the host with what a GPU makes of pieces of a matrix there, which has been surveyed.

    Parameters
    ----------
    device : Device
    source : arrays
        Row offsets, column indices and values of CSR.
    rows_of_chunk : int
    offsets : int64 array, (chunks + 1,)
        Where each chunk begins in the column indices.
    targets : arrays
        Column indices, or None if they are there, and values; the GPU gets those of a piece filled with -1 and 0.
    fill : callable
        ``fill(rows, offsets, arrays)`` launches what fills them for the chunks of some rows, which begin at ``offsets``.

    Notes
    -----
    What has been made comes back while the next piece goes there.
    """
    indices, values = targets
    of_place, xp = values.size // max(1, int(offsets[-1])), device.xp
    with contextlib.closing(Returning(device)) as returning, device.current():
        for rows in _pieces(device, *source, rows_of_chunk):
            first = rows.first // rows_of_chunk
            stop = first - (-(rows.row_offsets.size - 1) // rows_of_chunk)
            begin, end = int(offsets[first]), int(offsets[stop])
            made = xp.full(end - begin, -1, dtype=np.int32), xp.zeros((end - begin) * of_place, values.dtype)
            fill(rows, device.asarray(offsets[first : stop + 1] - begin), made)
            pairs = [] if indices is None else [(made[0], indices[begin:end])]
            returning.add([*pairs, (made[1], values[begin * of_place : end * of_place])])
        returning.wait()


def _pieces(
    device: Device, row_offsets: Array, column_indices: Array, values: Array, granularity: int
) -> Iterator[Rows]:
    """Yield consecutive rows of a matrix on the host as they arrive on a GPU; they end at multiples of a granularity.

    The next pieces are on their way while one is used, so that the link does not wait.
    """

    def bring(start: int, stop: int) -> Rows:
        first, last = int(row_offsets[start]), int(row_offsets[stop])
        on_host = (row_offsets[start : stop + 1] - first, column_indices[first:last], values[first:last])
        with stream.current():
            on_gpu = [device.xp.empty(array.shape, array.dtype) for array in on_host]
            copy_all_to_gpu(list(zip(on_host, on_gpu, strict=True)))
        return Rows(start, *on_gpu)

    stream = _CallersStream(device)
    room = min(_PIECE_NBYTES, device.free_nbytes() // _SHARE_OF_FREE)
    most = max(1, room // (values.itemsize + column_indices.itemsize))
    coming: deque[Future[Rows]] = deque()
    with ThreadPoolExecutor(_AHEAD) as ahead:
        for start, stop in _cuts(row_offsets, most, granularity):
            coming.append(ahead.submit(bring, start, stop))
            if len(coming) > _AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def _cuts(row_offsets: Array, most: int, granularity: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of rows of up to ``most`` entries, multiples of a granularity but for the last."""
    start, rows = 0, row_offsets.size - 1
    while start < rows:
        stop = int(np.searchsorted(row_offsets, row_offsets[start] + most, side="right")) - 1
        stop = min(rows, max(stop // granularity, start // granularity + 1) * granularity)
        yield start, stop
        start = stop
