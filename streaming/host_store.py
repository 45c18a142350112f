"""A matrix kept in host memory, for a GPU to stream from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from penstock.spmv import DeviceError
from penstock.streaming.budget import aligned_buffer
from penstock.streaming.layout import IndexBuilder, MatrixIndex, as_slab, pack
from penstock.streaming.store import Store

__all__ = ["HostStore"]


class HostStore:
    """Subdivisions in host memory, each in one piece of whole pages.

    Built by :meth:`create` or :meth:`from_store`. A streamed matrix on a CUDA device page-locks the pieces when it opens
    the store; ``close`` (or leaving a ``with`` block) unlocks them.
    """

    def __init__(self, index: MatrixIndex, pieces: list[np.ndarray[Any, Any]]) -> None:
        self.index = index
        self._pieces = pieces
        self._locked = 0

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
        return cls(builder.finish(), pieces)

    @classmethod
    def from_store(cls, store: Store) -> Self:
        """Read a whole store, such as one on disk, into host memory."""
        pieces = [aligned_buffer(subdivision.nbytes) for subdivision in store.index.subdivisions]
        for number, piece in enumerate(pieces):
            store.read_into(number, piece)
        return cls(store.index, pieces)

    def piece(self, number: int) -> np.ndarray[Any, Any]:
        """Return the bytes of subdivision ``number``, without copying."""
        return self._pieces[number]

    def read_into(self, number: int, buffer: np.ndarray[Any, Any]) -> None:
        """Copy subdivision ``number`` into a buffer."""
        piece = self._pieces[number]
        buffer[: piece.nbytes] = piece

    def page_lock(self) -> None:
        """Lock the pages in memory (0.05 s a GiB measured), so that a GPU copies from them at the speed of the link.

        Raises
        ------
        DeviceError
            If the system refuses, usually because of a limit on locked memory.
        """
        import cupy

        while self._locked < len(self._pieces):
            piece = self._pieces[self._locked]
            try:
                cupy.cuda.runtime.hostRegister(piece.ctypes.data, piece.nbytes, 0)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                self.close()
                raise DeviceError(
                    f"the system refused to page-lock {self.index.nbytes} bytes of host memory ({error}); raise the limit "
                    "on locked memory (ulimit -l) or use a smaller matrix"
                ) from error
            self._locked += 1

    def close(self) -> None:
        """Unlock the pages; the store can still be read."""
        while self._locked:
            import cupy

            self._locked -= 1
            cupy.cuda.runtime.hostUnregister(self._pieces[self._locked].ctypes.data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
