"""Stores a matrix in host memory for a GPU to stream from, copied or in the arrays of the caller."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np

from penstock.spmv import (
    CsrMatrix,
    Device,
    DeviceError,
    InputError,
    SparseMatrix,
    SymmetricBsrMatrix,
    format_nbytes,
)
from penstock.spmv.device import forked_from_cuda
from penstock.spmv.formats.partition import cut_rows
from penstock.spmv.formats.through_device import WORTH_NBYTES
from penstock.streaming.stores.base import Store
from penstock.streaming.stores.buffers import PAGE_NBYTES, aligned_buffer
from penstock.streaming.stores.matrix_index import MatrixIndex, Part, Subdivision
from penstock.streaming.stores.packing import IndexBuilder, SlabConverter, as_matrix, pack, row_slabs_of

Bytes = np.ndarray[Any, Any]

_LOCKED_AT_ONCE_NBYTES = 16 << 30
# Shorter arrays are copied. Of others the first and the last bytes are, which may share a page with other arrays: CUDA refuses to
# copy an array that is only partly in page-locked pages, so no page is locked that is not wholly of the matrix.
_LEAST_LENT_NBYTES = 32 << 20
_COPIED_AT_ONCE_NBYTES = 8 << 20
_COPYING_THREADS = 4


class HostStore:
    """A store in host memory.

    Created by :meth:`create`, :meth:`from_matrix` or :meth:`from_store`. A streamed matrix on a CUDA device page-locks the
    memory when it opens the store; ``close`` (or leaving a ``with`` block) unlocks it.

    Parameters
    ----------
    index, segments, regions, source
        Made by these methods.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import HostStore
    >>> store = HostStore.from_matrix(Cantilever(nodes=4, dof=3).matrix(), subdivisions=4)
    >>> store.index.row_starts, store.slab(1).shape
    ([0, 60, 96, 135], (36, 192))
    """

    def __init__(
        self,
        index: MatrixIndex,
        segments: list[list[tuple[int, Bytes]]],
        regions: list[tuple[int, int]],
        source: SparseMatrix | None = None,
    ) -> None:
        self.index = index
        self._segments = segments  # for each subdivision: offsets in its piece, and the bytes there
        self._regions = regions  # addresses and lengths of the memory to page-lock
        self._source = source  # keeps the memory of the regions alive
        self._locked: list[tuple[int, int]] | None = None

    @classmethod
    def create(
        cls,
        row_slabs: Iterable[Any],
        shape: tuple[int, int] | None = None,
        *,
        format: str = "auto",
        block_size: int | Literal["auto"] = "auto",
    ) -> Self:
        """Copy row slabs into host memory, one at a time; parameters as for :meth:`FileStore.create`.

        Raises
        ------
        InputError
            If a slab is not valid or the slabs do not add up to ``shape``.
        """
        builder, pieces = IndexBuilder(shape), []
        converter = SlabConverter(format, block_size)
        for slab in map(converter.convert, row_slabs_of(row_slabs, format)):
            subdivision = builder.add(slab)
            pieces.append(aligned_buffer(subdivision.nbytes))
            pack(slab, subdivision, pieces[-1])
            del slab  # before the next one is created
        return cls.of_pieces(builder.finish(), pieces)

    @classmethod
    def from_store(cls, store: Store) -> Self:
        """Read a whole store, for example one on disk, into host memory."""
        pieces = [aligned_buffer(subdivision.nbytes) for subdivision in store.index.subdivisions]
        for number, piece in enumerate(pieces):
            store.read_into(number, piece)
        return cls.of_pieces(store.index, pieces)

    @classmethod
    def of_pieces(cls, index: MatrixIndex, pieces: list[Bytes]) -> Self:
        """Return the store of subdivisions whose bytes are given, each in whole pages."""
        return cls(index, [[(0, piece)] for piece in pieces], [(piece.ctypes.data, piece.nbytes) for piece in pieces])

    @classmethod
    def from_matrix(cls, A: Any, subdivisions: int | Sequence[int]) -> Self:
        """Stream a matrix from the arrays of the caller.

        Row offsets, arrays shorter than 32 MiB and less than a page at each end of others are copied.

        Parameters
        ----------
        A : SciPy CSR or BSR matrix, or penstock format on the CPU
            Column indices that are not int32 are copied. Its arrays must not be changed or freed while the store is in use;
            they are page-locked in place when a GPU streams from them.
        subdivisions : int or sequence of int
            Number of row slabs of about equal size, or the rows at which to cut, from 0 to the number of rows.

        Raises
        ------
        InputError
            If A has another type, is not valid, or cannot be cut into that many slabs.
        """
        whole = as_matrix(A)
        if whole.device.kind != "cpu":
            raise InputError(
                f"a HostStore holds matrices of the host, not of {whole.device}; use matrix.to_device('cpu')"
            )
        arrays = [array for array in whole.arrays().values() if array.nbytes >= _LEAST_LENT_NBYTES]
        regions = _page_regions([(array.ctypes.data, array.nbytes) for array in arrays])
        bounds = (
            cut_rows(whole, subdivisions) if isinstance(subdivisions, int) else _checked_bounds(whole, subdivisions)
        )
        builder, segments = IndexBuilder(whole.shape), []
        for start, stop in itertools.pairwise(bounds):
            slab = whole.rows(start, stop)
            subdivision = builder.add(slab)
            segments.append(_slab_segments(slab, subdivision, arrays, regions))
        copies = [piece for pieces in segments for _, piece in pieces if not _region_of(piece, regions)]
        regions += [(piece.ctypes.data, piece.nbytes) for piece in copies]
        return cls(builder.finish(), segments, regions, whole)

    def __repr__(self) -> str:
        return f"<HostStore {self.index}>"

    def first(self, count: int) -> Self:
        """Return a store of the first subdivisions, in the same memory; page-locking it locks no other."""
        index = replace(self.index, subdivisions=self.index.subdivisions[:count])
        index = replace(index, shape=(index.subdivisions[-1].row_stop, self.index.shape[1]))
        segments = self._segments[:count]
        used = {_region_of(piece, self._regions) for pieces in segments for _, piece in pieces}
        return type(self)(index, segments, [region for region in self._regions if region in used], self._source)

    def slab(self, number: int) -> SparseMatrix:
        """Return subdivision ``number`` as a matrix in the memory of this store, for a CPU to multiply by."""
        if self._source is not None:
            subdivision = self.index.subdivisions[number]
            return self._source.rows(subdivision.row_start, subdivision.row_stop)
        [(_, piece)] = self._segments[number]
        return self.index.view(number, piece)

    @property
    def source(self) -> SparseMatrix | None:
        """The matrix whose arrays are streamed from where they are, if the store was made so."""
        return self._source

    def check_pattern(self, A: CsrMatrix) -> None:
        """Refuse a matrix on the host that has another pattern, with an InputError."""
        for number, of in enumerate(self.index.subdivisions):
            self.slab(number).check_pattern(A.rows(of.row_start, of.row_stop), of.row_start)

    def refill(self, A: CsrMatrix, through: Device | None = None) -> None:
        """Replace the values by those of a matrix with the same pattern, where they are; no sweep may be running.

        Parameters
        ----------
        A : CsrMatrix, on the host
            With the same pattern, which :meth:`check_pattern` finds out.
        through : Device, optional
            A GPU that converts a large matrix, if its format is one that it converts.
        """
        refilled = through is not None and self._refilled_through(through, A)
        for number, of in enumerate(self.index.subdivisions):
            slab = self.slab(number)
            if not refilled:
                slab.refill(A.rows(of.row_start, of.row_stop), of.row_start, check=False)
            if self._source is not None:
                self._copy_again(slab, of, self._segments[number])

    def _refilled_through(self, device: Device, A: CsrMatrix) -> bool:
        """Let a GPU replace the values of the whole matrix, if it is large and of a format that it converts."""
        source = self._source
        if device.kind == "cpu" or A.nbytes < WORTH_NBYTES or type(source) is not SymmetricBsrMatrix:
            return False
        if source.values_dtype != A.values_dtype:
            return False
        source.refill_through(device, A)
        return True

    @staticmethod
    def _copy_again(slab: SparseMatrix, subdivision: Subdivision, segments: list[tuple[int, Bytes]]) -> None:
        """Renew the copies of bytes that are not streamed from where they are."""
        for field in subdivision.fields:
            content = np.ascontiguousarray(slab.arrays()[field.name]).reshape(-1).view(np.uint8)
            for offset, piece in segments:
                start = offset - field.offset
                if 0 <= start < content.nbytes and not np.may_share_memory(content, piece):
                    piece[:] = content[start : start + piece.nbytes]

    def segments(self, number: int, part: Part = "whole") -> list[tuple[int, Bytes]]:
        """Return views of the bytes of a part of subdivision ``number``, each with its offset in the part."""
        where = self.index.subdivisions[number].bytes_of(part)
        segments = []
        for offset, piece in self._segments[number]:
            start, stop = max(offset, where.start), min(offset + piece.nbytes, where.stop)
            if start < stop:
                segments.append((start - where.start, piece[start - offset : stop - offset]))
        return segments

    def read_into(self, number: int, buffer: Bytes, part: Part = "whole") -> None:
        """Copy a part of subdivision ``number`` into a buffer, with several threads."""
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
        """Page-lock the memory (0.05 s per GiB measured), so that a GPU copies from it at the speed of the link.

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
                if region not in _LOCKS:  # otherwise another store of the same matrix has locked it
                    cupy.cuda.runtime.hostRegister(*region, 1)  # 1: for all devices
            except cupy.cuda.runtime.CUDARuntimeError as error:
                if error.status == _ALREADY_REGISTERED and _is_locked(*region):  # by the caller, who also unlocks it
                    continue
                self.close()
                raise DeviceError(
                    f"the system refused to page-lock {format_nbytes(self.index.nbytes)} of host memory ({error}); raise the "
                    "limit on locked memory (ulimit -l) or use a smaller matrix"
                ) from error
            _LOCKS[region] = _LOCKS.get(region, 0) + 1
            self._locked.append(region)

    def close(self) -> None:
        """Unlock the memory; the store can still be read."""
        locked, self._locked = self._locked, None
        for region in locked or ():
            import cupy

            _LOCKS[region] -= 1
            if not _LOCKS[region]:
                del _LOCKS[region]
                if not forked_from_cuda():
                    cupy.cuda.runtime.hostUnregister(region[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_locked", None):
            self.close()


_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
#: Page-locked regions and the number of stores that use each: several cuts of one matrix share its memory.
_LOCKS: dict[tuple[int, int], int] = {}


def _is_locked(address: int, nbytes: int) -> bool:
    """Return whether memory is page-locked, judged by its first and its last byte."""
    from cupy.cuda import runtime

    ends = (address, address + nbytes - 1)
    return all(runtime.pointerGetAttributes(end).type == runtime.memoryTypeHost for end in ends)


def _checked_bounds(whole: SparseMatrix, bounds: Sequence[int]) -> list[int]:
    """Return the rows at which to cut a matrix, after checking them."""
    rows, granularity = whole.shape[0], whole.row_granularity
    cuts = [int(bound) for bound in bounds]
    complete = len(cuts) > 1 and (cuts[0], cuts[-1]) == (0, rows)
    if not complete or any(start >= stop or start % granularity for start, stop in itertools.pairwise(cuts)):
        raise InputError(
            f"rows to cut at must ascend from 0 to {rows}, all but the last multiples of {granularity}, not {cuts[:4]} ..."
        )
    return cuts


def _page_regions(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return disjoint runs of whole pages, of bounded length, that lie in ranges of addresses and lengths."""
    regions = []
    for address, nbytes in sorted(ranges):
        start, stop = -(-address // PAGE_NBYTES) * PAGE_NBYTES, (address + nbytes) // PAGE_NBYTES * PAGE_NBYTES
        regions += [(of, min(_LOCKED_AT_ONCE_NBYTES, stop - of)) for of in range(start, stop, _LOCKED_AT_ONCE_NBYTES)]
    return regions


def _region_of(piece: Bytes, regions: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the region that contains the start of a piece, if any."""
    address = piece.ctypes.data
    return next(((start, nbytes) for start, nbytes in regions if start <= address < start + nbytes), None)


def _slab_segments(
    slab: SparseMatrix, subdivision: Subdivision, arrays: list[Bytes], regions: list[tuple[int, int]]
) -> list[tuple[int, Bytes]]:
    """Return the segments of a slab: views of what lies in regions, split where one ends, and copies of the rest."""
    segments: list[tuple[int, Bytes]] = []
    for field in subdivision.fields:
        content, offset = slab.arrays()[field.name], field.offset
        piece = content.reshape(-1).view(np.uint8)
        is_lent = any(np.may_share_memory(content, array) for array in arrays)
        while piece.nbytes:
            region = _region_of(piece, regions) if is_lent else None
            if region is not None:
                length = min(piece.nbytes, sum(region) - piece.ctypes.data)
                segment = piece[:length]
            else:
                beyond = [start - piece.ctypes.data for start, _ in regions if is_lent and start > piece.ctypes.data]
                length = min([piece.nbytes, *beyond])
                segment = aligned_buffer(length)
                segment[:] = piece[:length]
            segments.append((offset, segment))
            offset, piece = offset + length, piece[length:]
    return segments
