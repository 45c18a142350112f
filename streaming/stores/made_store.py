"""A store whose subdivisions are made where they are used, from less than they hold, instead of being read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

import numpy as np

from penstock.spmv import Array, Device
from penstock.streaming.stores.matrix_index import MatrixIndex, Part


class SlabMaker(Protocol):
    """Makes rows of a matrix, such as a finite-element matrix from its elements.

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> maker = Cantilever(nodes=4, dof=3).row_maker("symmetric_bsr")
    >>> str(maker.device), maker.nbytes
    ('cpu', 4632)
    """

    @property
    def device(self) -> Device:
        """The device whose arrays it writes."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds on the device."""

    @property
    def moved_nbytes(self) -> int:
        """Bytes that are copied to the device to make all subdivisions once; 0 if it holds all that they are made from."""

    def make(self, row_start: int, row_stop: int, arrays: Mapping[str, Array]) -> None:
        """Write the arrays of a slab: those of its structure, its values, or both; on a GPU in CuPy's current stream."""


class MadeStore:
    """A matrix of which nothing is stored: every subdivision is made in the memory where kernels use it.

    Parameters
    ----------
    index : MatrixIndex
        Of symbolic slabs.
    maker : SlabMaker

    Examples
    --------
    >>> from penstock.fem import Cantilever
    >>> from penstock.streaming import MadeStore, StreamedMatrix, index_of
    >>> beam = Cantilever(nodes=(17, 5, 5), dof=3)
    >>> store = MadeStore(index_of(beam.symbolic_slabs(8)), beam.row_maker("bsr"))
    >>> with StreamedMatrix(store, "400 KiB") as A:
    ...     bool((A @ beam.load() == beam.matrix() @ beam.load()).all()), A.bytes_streamed
    (True, 0)
    """

    def __init__(self, index: MatrixIndex, maker: SlabMaker) -> None:
        self.index, self.maker = index, maker

    @property
    def moved_share(self) -> float:
        """Bytes that move to the maker's device for a byte that is made there."""
        return self.maker.moved_nbytes / self.index.nbytes

    def make_into(self, number: int, buffer: Array, part: Part = "whole") -> None:
        """Make a part of subdivision ``number`` in a byte buffer of the maker's device."""
        self.make(number, self.index.arrays(number, buffer, part))

    def make(self, number: int, arrays: Mapping[str, Array]) -> None:
        """Make the arrays of a part of subdivision ``number``."""
        subdivision = self.index.subdivisions[number]
        self.maker.make(subdivision.row_start, subdivision.row_stop, arrays)

    def read_into(self, number: int, buffer: np.ndarray[Any, Any], part: Part = "whole") -> None:
        """Make a part of subdivision ``number`` in a buffer of the host, by way of the maker's device."""
        device = self.maker.device
        if device.kind == "cpu":
            self.make_into(number, buffer, part)
            return
        nbytes = self.index.subdivisions[number].part_nbytes(part)
        with device.current():
            made = device.xp.zeros(nbytes, dtype=np.uint8)  # gaps between arrays are not written
            self.make_into(number, made, part)
            buffer[:nbytes] = device.to_host(made)


def makes_on(store: object, device: Device) -> TypeGuard[MadeStore]:
    """Return whether a store makes its subdivisions in the memory of a device, so that they are not transferred."""
    return isinstance(store, MadeStore) and store.maker.device == device
