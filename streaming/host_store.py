"""A matrix kept in host memory, for a GPU to stream from: copied there slab by slab, or left where the caller has it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np

from penstock.spmv import DeviceError, InputError, SparseFormat, format_nbytes
from penstock.streaming.budget import PAGE_NBYTES, aligned_buffer
from penstock.streaming.layout import IndexBuilder, MatrixIndex, Part, Subdivision, as_matrix, as_slab, pack
from penstock.streaming.store import Store

__all__ = ["HostStore"]

Bytes = np.ndarray[Any, Any]

_LOCKED_AT_ONCE_NBYTES = 16 << 30
# Arrays shorter than this are copied. They may share pages with other arrays, of which CUDA then copies none that lies in
# such a page in part only; from this size on the C library gives memory in pages of its own.
_LEAST_LENT_NBYTES = 32 << 20
_COPIED_AT_ONCE_NBYTES = 8 << 20
_COPYING_THREADS = 4


class HostStore:
    """Subdivisions in host memory.

    Built by :meth:`create`, :meth:`from_matrix` or :meth:`from_store`. A streamed matrix on a CUDA device page-locks the
    memory when it opens the store; ``close`` (or leaving a ``with`` block) unlocks it.
    """

    def __init__(
        self,
        index: MatrixIndex,
        segments: list[list[tuple[int, Bytes]]],
        regions: list[tuple[int, int]],
        source: SparseFormat | None = None,
    ) -> None:
        self.index = index
        self._segments = segments  # of each subdivision: place in the piece, and the bytes that go there
        self._regions = regions  # address and length of what is to be page-locked
        self._source = source  # keeps the memory of the regions
        self._locked: list[tuple[int, int]] | None = None

    @classmethod
    def create(cls, row_slabs: Iterable[Any], shape: tuple[int, int] | None = None) -> Self:
        """Copy row slabs (SciPy CSR or BSR, or penstock formats) into host memory, one at a time.

        Raises
        ------
        InputError
            If a slab is not valid or they do not add up to ``shape``.
        """
        builder, pieces = IndexBuilder(shape), []
        for given in row_slabs:
            slab = as_slab(given)
            subdivision = builder.add(slab)
            pieces.append(aligned_buffer(subdivision.nbytes))
            pack(slab, subdivision, pieces[-1])
            del given, slab  # before the next one is made
        return cls._of_pieces(builder.finish(), pieces)

    @classmethod
    def from_store(cls, store: Store) -> Self:
        """Read a whole store, such as one on disk, into host memory."""
        pieces = [aligned_buffer(subdivision.nbytes) for subdivision in store.index.subdivisions]
        for number, piece in enumerate(pieces):
            store.read_into(number, piece)
        return cls._of_pieces(store.index, pieces)

    @classmethod
    def _of_pieces(cls, index: MatrixIndex, pieces: list[Bytes]) -> Self:
        return cls(index, [[(0, piece)] for piece in pieces], [(piece.ctypes.data, piece.nbytes) for piece in pieces])

    @classmethod
    def from_matrix(cls, A: Any, subdivisions: int | Sequence[int]) -> Self:
        """Stream a matrix from the arrays in which the caller has it: nothing but row offsets is copied.

        Parameters
        ----------
        A : SciPy CSR or BSR matrix, or penstock format on the CPU
            With int32 column indices, or they are copied. Its arrays must not change, nor be freed, while the store is in
            use; they are page-locked in place when a GPU streams from them.
        subdivisions : int or sequence of int
            Row slabs of about equal size to cut it into, or the rows at which to cut, from 0 to the last.

        Raises
        ------
        InputError
            If it is neither, not valid, or cannot be cut into that many slabs.
        """
        whole = as_matrix(A)
        if whole.device.kind != "cpu":
            raise InputError(
                f"a HostStore holds matrices of the host, not of {whole.device}; use matrix.to_device('cpu')"
            )
        arrays = [array for array in whole.arrays().values() if array.nbytes >= _LEAST_LENT_NBYTES]
        regions = _page_regions([(array.ctypes.data, array.nbytes) for array in arrays])
        bounds = whole.cut(subdivisions) if isinstance(subdivisions, int) else _checked_bounds(whole, subdivisions)
        builder, segments = IndexBuilder(whole.shape), []
        for start, stop in itertools.pairwise(bounds):
            slab = whole.rows(start, stop)
            subdivision = builder.add(slab)
            segments.append(_lend(slab, subdivision, arrays, regions))
        owned = [piece for pieces in segments for _, piece in pieces if not _region_of(piece, regions)]
        regions += [(piece.ctypes.data, piece.nbytes) for piece in owned]
        return cls(builder.finish(), segments, regions, whole)

    def segments(self, number: int, part: Part = "whole") -> list[tuple[int, Bytes]]:
        """Return the bytes of a part of subdivision ``number`` without copying: where in the part, and what goes there."""
        where = self.index.subdivisions[number].bytes_of(part)
        found = []
        for offset, piece in self._segments[number]:
            start, stop = max(offset, where.start), min(offset + piece.nbytes, where.stop)
            if start < stop:
                found.append((start - where.start, piece[start - offset : stop - offset]))
        return found

    def read_into(self, number: int, buffer: Bytes, part: Part = "whole") -> None:
        """Copy a part of subdivision ``number`` into a buffer, by several threads."""
        copies = []
        for offset, piece in self.segments(number, part):
            for start in range(0, piece.nbytes, _COPIED_AT_ONCE_NBYTES):
                source = piece[start : start + _COPIED_AT_ONCE_NBYTES]
                copies.append((buffer[offset + start : offset + start + source.nbytes], source))
        if len(copies) == 1:
            np.copyto(*copies[0])
        else:
            with ThreadPoolExecutor(_COPYING_THREADS) as threads:
                list(threads.map(np.copyto, *zip(*copies, strict=True)))

    @property
    def page_locked(self) -> bool:
        """Whether the memory is page-locked."""
        return self._locked is not None

    def page_lock(self) -> None:
        """Lock the pages in memory (0.05 s a GiB measured), so that a GPU copies from them at the speed of the link.

        Raises
        ------
        DeviceError
            If the system refuses, usually because of a limit on locked memory.
        """
        if self._locked is not None:
            return
        import cupy

        self._locked = []
        for region in self._regions:
            try:
                if region not in _LOCKS:  # else another store of the same matrix has locked it
                    cupy.cuda.runtime.hostRegister(*region, 1)  # 1: for all devices
            except cupy.cuda.runtime.CUDARuntimeError as error:
                if error.status == _ALREADY_REGISTERED and _is_locked(*region):  # by the caller, who unlocks it too
                    continue
                self.close()
                raise DeviceError(
                    f"the system refused to page-lock {format_nbytes(self.index.nbytes)} of host memory ({error}); raise the "
                    "limit on locked memory (ulimit -l) or use a smaller matrix"
                ) from error
            _LOCKS[region] = _LOCKS.get(region, 0) + 1
            self._locked.append(region)

    def close(self) -> None:
        """Unlock the pages; the store can still be read."""
        locked, self._locked = self._locked, None
        for region in locked or ():
            import cupy

            _LOCKS[region] -= 1
            if not _LOCKS[region]:
                del _LOCKS[region]
                cupy.cuda.runtime.hostUnregister(region[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_locked", None):
            self.close()


_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
#: Regions that stores have page-locked, and how many of them: several cuts of one matrix share its memory.
_LOCKS: dict[tuple[int, int], int] = {}


def _is_locked(address: int, nbytes: int) -> bool:
    """Tell whether memory is page-locked from one end to the other, as far as the pages next to the ends show.

    Of the first and the last page only a part may belong to the array for which it was locked.
    """
    from cupy.cuda import runtime

    ends = (address + PAGE_NBYTES, address + nbytes - PAGE_NBYTES - 1)
    return all(runtime.pointerGetAttributes(end).type == runtime.memoryTypeHost for end in ends)


def _checked_bounds(whole: SparseFormat, bounds: Sequence[int]) -> list[int]:
    """Refuse rows at which a matrix cannot be cut."""
    rows, granularity = whole.shape[0], whole.row_granularity
    found = [int(bound) for bound in bounds]
    ends = len(found) > 1 and (found[0], found[-1]) == (0, rows)
    if not ends or any(start >= stop or start % granularity for start, stop in itertools.pairwise(found)):
        raise InputError(
            f"rows to cut at must ascend from 0 to {rows}, by multiples of {granularity} but for the last, not {found[:4]} ..."
        )
    return found


def _page_regions(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return disjoint runs of whole pages, of bounded length, that cover ranges given by address and length."""
    merged: list[list[int]] = []
    for address, nbytes in sorted(ranges):
        start, stop = address // PAGE_NBYTES * PAGE_NBYTES, -(-(address + nbytes) // PAGE_NBYTES) * PAGE_NBYTES
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return [
        (address, min(_LOCKED_AT_ONCE_NBYTES, stop - address))
        for start, stop in merged
        for address in range(start, stop, _LOCKED_AT_ONCE_NBYTES)
    ]


def _region_of(piece: Bytes, regions: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the region in which a piece begins."""
    address = piece.ctypes.data
    return next(((start, nbytes) for start, nbytes in regions if start <= address < start + nbytes), None)


def _lend(
    slab: SparseFormat, subdivision: Subdivision, arrays: list[Bytes], regions: list[tuple[int, int]]
) -> list[tuple[int, Bytes]]:
    """Return the segments of a slab: views of the caller's arrays, cut where a locked region ends, and copies of the rest."""
    segments: list[tuple[int, Bytes]] = []
    for field in subdivision.fields:
        content = slab.arrays()[field.name]
        piece = content.reshape(-1).view(np.uint8)
        if not piece.nbytes:
            continue
        if not any(np.may_share_memory(content, array) for array in arrays):
            own = aligned_buffer(piece.nbytes)
            own[:] = piece
            segments.append((field.offset, own))
            continue
        offset = field.offset
        while piece.nbytes:
            region = _region_of(piece, regions)
            assert region is not None, "a lent array lies in what will be locked"
            length = min(piece.nbytes, sum(region) - piece.ctypes.data)
            segments.append((offset, piece[:length]))
            offset, piece = offset + length, piece[length:]
    return segments
