"""A store of two planes in host memory, from which a GPU copies only the plane that it lacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Self

import numpy as np

from penstock.spmv import Array, CsrMatrix, Device, SparseMatrix
from penstock.streaming.stores.base import PlaneStore, Store, has_planes
from penstock.streaming.stores.buffers import aligned_buffer
from penstock.streaming.stores.host_store import HostStore
from penstock.streaming.stores.loading import refilled_slabs
from penstock.streaming.stores.matrix_index import MatrixIndex, Part
from penstock.streaming.stores.packing import IndexBuilder, SlabConverter, pack, row_slabs_of
from penstock.streaming.stores.planes import (
    CompletedStore,
    HighWords,
    JoinedStore,
    LostSums,
    NoPlanesError,
    Numbers,
    count_of_values,
    in_planes,
    join_in_place,
    join_on_device,
    plane_nbytes,
)


class HostPlaneStore:
    """A matrix in host memory whose values of float64 are stored in two planes, bit for bit, in the same number of bytes.

    With an image in float32 on the GPU, which the high words are, a residual moves the low words only, half of the bytes. Where a
    GPU streams the matrix in every sweep, a :class:`HostStore` is faster.

    Created by :meth:`create` or :meth:`from_store`.

    Parameters
    ----------
    index, pieces, corrections
        Made by these methods.

    Examples
    --------
    >>> import penstock
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import HostPlaneStore
    >>> beam = Cantilever(nodes=(33, 5, 5), dof=3)
    >>> store = HostPlaneStore.create(beam.subdivisions(16, "symmetric_bsr"))
    >>> options = {"coordinates": beam.mesh.coordinates(), "precision": "float32", "device": "cpu"}
    >>> with penstock.prepare(store, memory=int(0.8 * store.index.nbytes), **options) as system:
    ...     result = system.solve(beam.load())
    >>> result.converged, bool(result.bytes_streamed < 0.6 * result.sweeps * store.index.nbytes)
    (True, True)
    """

    #: It has two planes.
    planes = True

    def __init__(self, index: MatrixIndex, pieces: list[Numbers], corrections: Numbers | None) -> None:
        self.index, self._pieces, self._corrections = index, pieces, corrections
        self._memory = HostStore.of_pieces(index, pieces)

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
            If a slab is not valid, the slabs do not add up to ``shape``, values are not of float64, or one, other than 0, is
            beyond the range of float32.
        BudgetError
            If there is no memory for sums of what float32 loses, 32 bytes for each row of the matrix and each row of a block.
        """
        builder, pieces, lost = IndexBuilder(shape), list[Numbers](), None
        converter, buffer = SlabConverter(format, block_size), aligned_buffer(0)
        for slab in map(converter.convert, row_slabs_of(row_slabs, format)):
            subdivision = builder.add(slab)
            if subdivision.nbytes > buffer.size:
                buffer = aligned_buffer(subdivision.nbytes)
            piece = buffer[: subdivision.nbytes]
            pack(slab, subdivision, piece)
            pieces.append(in_planes(subdivision, piece, slab.values_dtype))
            if LostSums.has_some(slab):
                lost = lost or LostSums(slab)
                lost.add(subdivision.row_start, slab)
            del slab, piece  # before the next one is created
        return cls(builder.finish(), pieces, None if lost is None else lost.corrections())

    @classmethod
    def from_store(cls, store: PlaneStore) -> Self:
        """Read a whole store of two planes, for example one on disk, into host memory."""
        pieces = []
        for number, subdivision in enumerate(store.index.subdivisions):
            start, plane = subdivision.values_start, plane_nbytes(subdivision)
            piece = aligned_buffer(start + 2 * plane)
            store.read_into(number, piece[:start], "structure")
            store.read_high(number, piece[start : start + plane])
            store.read_low(number, piece[start + plane :])
            pieces.append(piece)
        return cls(store.index, pieces, store.corrections())

    def __repr__(self) -> str:
        return f"<HostPlaneStore {self.index}>"

    def read_into(self, number: int, buffer: Numbers, part: Part = "whole") -> None:
        """Copy a part of subdivision ``number`` into a buffer; values are completed."""
        subdivision = self.index.subdivisions[number]
        if part != "values":
            buffer[: subdivision.values_start] = self._structure(number)
        if part != "structure":
            nbytes = subdivision.part_nbytes(part)
            values = buffer[nbytes - subdivision.part_nbytes("values") : nbytes]
            self.read_low(number, values[values.nbytes - plane_nbytes(subdivision) :])
            join_in_place(self.plane(number, 0)[: values.nbytes // 2].view(np.float32), values)

    def read_high(self, number: int, buffer: Numbers) -> None:
        """Copy the high words of the values of a subdivision."""
        self._copy_plane(number, 0, buffer)

    def read_low(self, number: int, buffer: Numbers) -> None:
        """Copy the low words likewise."""
        self._copy_plane(number, 1, buffer)

    def _copy_plane(self, number: int, which: int, buffer: Numbers) -> None:
        plane = self.plane(number, which)
        buffer[: plane.nbytes] = plane

    def plane(self, number: int, which: int) -> Numbers:
        """Return a view of the bytes of the high words, 0, or of the low words, 1, of a subdivision."""
        subdivision = self.index.subdivisions[number]
        start, nbytes = subdivision.values_start, plane_nbytes(subdivision)
        return self._pieces[number][start + which * nbytes :][:nbytes]

    def _structure(self, number: int) -> Numbers:
        return self._pieces[number][: self.index.subdivisions[number].values_start]

    def corrections(self) -> Numbers | None:
        """Return the corrections of the image in float32, if its format has some."""
        return self._corrections

    def refilled(self, A: CsrMatrix) -> HostPlaneStore | HostStore:
        """Return a store of the values of a matrix on the host with the same pattern; without planes if they have none.

        Raises
        ------
        InputError
            If the pattern is another one.
        """
        try:
            return HostPlaneStore.create(refilled_slabs(self, A), self.index.shape)
        except NoPlanesError:
            return HostStore.create(refilled_slabs(self, A), self.index.shape)

    def segments_with(self, number: int, part: Part, places: dict[int, int]) -> list[tuple[int, Numbers]]:
        """Return views of what is copied for a part of a subdivision, each with its offset in the part.

        ``places`` are those at which the high words, 0, and the low words, 1, begin in the part; a plane without one is left out.
        """
        words = 4 * count_of_values(self.index.subdivisions[number])
        segments = [] if part == "values" else [(0, self._structure(number))]
        if part != "structure":
            segments += [(place, self.plane(number, which)[:words]) for which, place in places.items()]
        return [(offset, piece) for offset, piece in segments if piece.nbytes]

    def page_lock(self) -> None:
        """Page-lock the memory, as :meth:`HostStore.page_lock` does."""
        self._memory.page_lock()

    def close(self) -> None:
        """Unlock the memory; the store can still be read."""
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class HighWordsInMemory(HighWords):
    """The high words of a :class:`HostPlaneStore`, which a GPU copies from where they are."""

    store: HostPlaneStore

    def segments(self, number: int, part: Part = "whole") -> list[tuple[int, Numbers]]:
        """Return views of the bytes of a part of a subdivision, each with its offset in the part."""
        place = self.index.subdivisions[number].values_start if part == "whole" else 0
        return self.store.segments_with(number, part, {0: place})

    def page_lock(self) -> None:
        """Page-lock the memory of the store."""
        self.store.page_lock()


class CompletedInMemory(CompletedStore):
    """The matrix of a :class:`HostPlaneStore` whose high words are on the GPU, which copies the low words from where they are."""

    store: HostPlaneStore

    def segments(self, number: int, part: Part = "whole") -> list[tuple[int, Numbers]]:
        """Return views of what is copied for a part of a subdivision, each with its offset in the part."""
        subdivision = self.index.subdivisions[number]
        return self.store.segments_with(number, part, {1: subdivision.part_nbytes(part) - plane_nbytes(subdivision)})

    def page_lock(self) -> None:
        """Page-lock the memory of the store."""
        self.store.page_lock()


class JoinedInMemory(JoinedStore):
    """The matrix of a :class:`HostPlaneStore` whose planes a GPU copies from where they are, and joins."""

    store: HostPlaneStore
    planes_on_arrival = 2

    def read_into(self, number: int, buffer: Numbers, part: Part = "whole") -> None:
        """Copy what is copied for a part of a subdivision; values are still to be completed."""
        for offset, piece in self.segments(number, part):
            buffer[offset : offset + piece.nbytes] = piece

    def segments(self, number: int, part: Part = "whole") -> list[tuple[int, Numbers]]:
        """Return views of what is copied for a part of a subdivision, each with its offset in the part."""
        of = self.index.subdivisions[number]
        first = of.part_nbytes(part) - of.part_nbytes("values")
        low = {} if self.rounded else {1: first + 4 * count_of_values(of)}
        return self.store.segments_with(number, part, {0: first, **low})

    def _complete(self, number: int, values: Array, scratch: Array) -> None:
        nbytes = 4 * count_of_values(self.index.subdivisions[number])
        words = scratch[: nbytes if self.rounded else 2 * nbytes]  # over which the values are written
        words[...] = values[: words.size]
        join_on_device(words[:nbytes].view(np.float32), words[nbytes:].view(np.int32), values.view(np.float64))

    def page_lock(self) -> None:
        """Page-lock the memory of the store."""
        self.store.page_lock()


def high_words(store: PlaneStore) -> HighWords:
    """Return the matrix of a store of two planes rounded to float32."""
    return HighWordsInMemory(store) if isinstance(store, HostPlaneStore) else HighWords(store)


def completed(store: PlaneStore, image: SparseMatrix) -> CompletedStore:
    """Return the matrix of a store of two planes whose high words are in memory, as an image in float32."""
    kind = CompletedInMemory if isinstance(store, HostPlaneStore) else CompletedStore
    return kind(store, image)


def joined(store: PlaneStore, device: Device) -> JoinedStore:
    """Return the matrix of a store of two planes for a device, which joins them itself if it is a GPU and they are in memory."""
    in_memory = isinstance(store, HostPlaneStore) and device.kind == "cuda"
    return JoinedInMemory(store) if in_memory else JoinedStore(store)


def is_in_memory(store: Store, *, planes: bool) -> bool:
    """Return whether a store is in host memory, from where a GPU copies its values, or the ``planes`` of them that it wants."""
    return hasattr(store, "segments") or (planes and isinstance(store, HostPlaneStore))


def copy_in_memory(store: Store, *, planes: bool) -> Store:
    """Return a copy of a store in host memory: with its planes, if it has some and they are wanted."""
    return HostPlaneStore.from_store(store) if planes and has_planes(store) else HostStore.from_store(store)
